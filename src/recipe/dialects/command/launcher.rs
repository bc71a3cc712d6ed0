//! Launchers: the number of processes that a command starts, the program and its arguments.
//!
//! Sources: torch 2.9 `distributed/run.py`, `distributed/argparse_util.py`; accelerate 16cb6eb `commands/launch.py`; DeepSpeed
//! edaa722 `launcher/runner.py`; TRL f2cd577 `cli/main.py`.

mod before;
mod known;
mod options;
mod spawn;
pub(super) mod srun;
mod trl;

use std::collections::HashMap;
use std::path::PathBuf;

use super::wrapper;
use crate::recipe::dialects::accelerate::Config;
use crate::recipe::dialects::deepspeed::hosts;
use crate::recipe::schema::tree::{self, Tree};
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::source::Span;
use crate::util::suggest::short;

pub(crate) use before::value_sources;
use known::{ACCELERATE, DEEPSPEED, Options, PYTHON, TORCH_LAUNCH, TORCHRUN};
use options::{Given, options};
pub(crate) use options::{Opt, option, value};
use trl::trl;
pub(crate) use trl::{is_for_trls_launcher, refuse_switches};

/// What starts the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Launcher {
    /// No known launcher: Python, or another program before the script.
    #[default]
    Python,
    /// `torchrun`.
    Torchrun,
    /// `deepspeed`.
    Deepspeed,
    /// `accelerate launch`.
    Accelerate,
    /// TRL's command line, which starts `accelerate launch`.
    Trl,
    /// A script that starts another script in several processes (`xla_spawn.py`).
    Spawn,
}

/// A command, split into its launcher and its program.
#[derive(Default)]
pub(crate) struct Launched<'w> {
    /// What starts the program.
    pub launcher: Launcher,
    /// The launcher's options, from left to right.
    pub options: Vec<Opt>,
    /// Byte offset in the text at which further options may be added.
    pub room: usize,
    /// The program; in TRL's command line the trainer's name.
    pub script: Option<&'w Word>,
    /// The program is a module, started by its name.
    pub module: bool,
    pub arguments: &'w [Word],
    /// The number of processes, as a native tree.
    pub world: Option<Node>,
    /// The config of `accelerate launch`. The options override it.
    pub config: Option<Config>,
    /// Why the launcher refuses its options.
    pub refused: Option<Diagnostic>,
    /// The launcher's options are mixed with the program's (`trl`).
    pub mixed: bool,
    /// A launcher starts the program in several processes.
    pub many: bool,
    /// An unresolved word that may hold launcher options.
    pub unresolved: Option<&'w Word>,
    /// An unresolved word among the options, which may hold further ones. The user then gives the world.
    pub hidden: Option<&'w Word>,
    /// The words before the program that start it without the launcher. `None`: evenkeel cannot replace it.
    pub alone: Option<Vec<String>>,
    /// The option by which the launcher passes a rank's number on its machine to the program.
    pub local_rank: Option<&'static str>,
}

/// torchrun's option for the number of processes on a node.
const PER_NODE: &str = "--nproc_per_node";

/// Splits a command into launcher and program. A command without a launcher begins at its script or its first
/// option. `None`: the command starts no training.
pub(crate) fn find<'w>(words: &'w [Word], exports: &HashMap<String, Word>) -> Option<Launched<'w>> {
    let found = launcher(words, exports).or_else(|| without_launcher(words))?;
    if found.launcher != Launcher::Python || found.script.is_none() {
        return Some(found);
    }
    let inner = wrapper::handed_on(found.arguments);
    let mut inner = inner.filter_map(|words| launcher(words, exports));
    let Some(first) = inner.next() else {
        return Some(found);
    };
    // A program that forwards commands does more than start processes.
    let first = Launched {
        alone: None,
        ..first
    };
    Some(match inner.next() {
        None => first,
        Some(second) => Launched {
            refused: several_handed_on(found.script, &second),
            ..first
        },
    })
}

/// The error for a program that forwards several commands, each of which may be the training.
fn several_handed_on(script: Option<&Word>, second: &Launched<'_>) -> Option<Diagnostic> {
    let script = script?;
    Some(Diagnostic::error(
        "global-batch-unknown",
        second.script.map(|word| word.span),
        format!(
            "`{}` forwards several commands, and more than one may be the training",
            short(&script.text)
        ),
        "pass the training command after `--`, without the program that forwards it",
    ))
}

/// A script with its arguments, or arguments alone. Options before a script belong to its wrapper (`srun`).
fn without_launcher(words: &[Word]) -> Option<Launched<'_>> {
    let script = words.iter().position(|word| word.text.ends_with(".py"));
    let option = words.iter().position(|word| word.text.starts_with("--"));
    Some(program(&words[script.or(option)?..]))
}

fn launcher<'w>(words: &'w [Word], exports: &HashMap<String, Word>) -> Option<Launched<'w>> {
    value_sources(words).find_map(|at| {
        let environment = Environment {
            before: &words[..at],
            exports,
        };
        let (word, rest) = words[at..].split_first()?;
        let name = word.text.rsplit('/').next().unwrap_or_default();
        match is_python(name) {
            true => Some(python(word, rest, &environment)),
            false => by_name(word, rest, beside(word), &environment),
        }
    })
}

/// A launcher that is started by its program's name. `python`: the interpreter of torchrun's installation.
fn by_name<'w>(
    word: &'w Word,
    rest: &'w [Word],
    python: String,
    environment: &Environment<'_>,
) -> Option<Launched<'w>> {
    let name = word.text.rsplit('/').next().unwrap_or_default();
    match name {
        "torchrun" => Some(torchrun(word, rest, python, environment, &TORCHRUN)),
        "accelerate-launch" => Some(accelerate(word, rest, python)),
        "accelerate" if rest.first().is_some_and(|w| w.text == "launch") => {
            Some(accelerate(&rest[0], &rest[1..], python))
        }
        "deepspeed" | "deepspeed.pt" if !rest.is_empty() => Some(deepspeed(word, rest, python)),
        "trl" if !rest.is_empty() => Some(trl(rest, python)),
        // They start a process for every device of the machine.
        "swift" | "llamafactory-cli" | "lmf" if !rest.is_empty() => Some(Launched {
            script: Some(word),
            arguments: &rest[1..],
            many: true,
            alone: None,
            ..program(rest)
        }),
        _ => None,
    }
}

/// Whether a program is Python: `python`, `python3`, `python3.11`.
fn is_python(name: &str) -> bool {
    name.strip_prefix("python")
        .is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// The Python interpreter beside a launcher.
fn beside(launcher: &Word) -> String {
    let (folder, _) = launcher.text.rsplit_once('/').unzip();
    folder.map_or_else(
        || "python3".to_owned(),
        |folder: &str| format!("{folder}/python3"),
    )
}

/// The words before a program that start it as the launcher does.
fn interpreter(options: &[Opt], python: String) -> Vec<String> {
    if option(options, &["no_python"]).is_some() {
        return Vec::new();
    }
    let mut words = vec![python, "-u".to_owned()];
    words.extend(by_module(options).then(|| "-m".to_owned()));
    words
}

/// A program with its arguments, or arguments alone.
pub(super) fn program(words: &[Word]) -> Launched<'_> {
    let (script, arguments) = match words.split_first() {
        // A launcher without a program, as in a shortened documentation example.
        Some((first, rest)) if !first.text.starts_with('-') => (Some(first), rest),
        _ => (None, words),
    };
    Launched {
        script,
        arguments,
        alone: Some(Vec::new()),
        ..Launched::default()
    }
}

/// The value of torchrun's `--nnodes`: a number, or a range with equal ends (`2:2`).
pub(crate) fn nodes(text: &str) -> Option<u64> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let nodes = least.parse().ok()?;
    (most.parse() == Ok(nodes)).then_some(nodes)
}

/// The number of processes or machines. `None` for any other text (`gpu`, `$N`).
fn number(word: Option<&Word>) -> Option<(u64, Span)> {
    let word = word?;
    Some((word.text.parse().ok()?, word.span))
}

fn world(key: &str, processes: u64, span: Span) -> Node {
    let mut tree = Tree::new(span);
    tree.plain("batch.gpus", &tree::Given::new(key, processes, span));
    tree.into_node()
}

/// The environment of torchrun, which holds the default of `--name` as `PET_NAME`.
struct Environment<'w> {
    /// The words before `torchrun`: `PET_NNODES=2 torchrun`.
    before: &'w [Word],
    exports: &'w HashMap<String, Word>,
}

impl Environment<'_> {
    fn default(&self, option: &str) -> Option<Word> {
        let name = format!("PET_{}", option.to_uppercase());
        let mut before = self.before.iter().rev().filter_map(Word::assignment);
        match before.find(|assignment| assignment.name == name) {
            Some(assignment) => Some(assignment.value),
            None => self.exports.get(&name).cloned(),
        }
    }
}

/// Parses torchrun. Its world size is `--nnodes` × `--nproc_per_node`, both 1 by default.
fn torchrun<'w>(
    launcher: &Word,
    words: &'w [Word],
    python: String,
    environment: &Environment<'_>,
    known: &Options,
) -> Launched<'w> {
    let mut launched = launched(Launcher::Torchrun, launcher, options(words, known), python);
    for name in ["nnodes", "nproc_per_node"] {
        if value(&launched.options, &[name]).is_none()
            && let Some(default) = environment.default(name)
        {
            launched.options.push(Opt {
                name: name.to_owned(),
                at: default.span,
                value: Some(default),
            });
        }
    }
    let nodes = match value(&launched.options, &["nnodes"]) {
        None => Some(1),
        given => given.and_then(|word| nodes(&word.text)),
    };
    let each = match value(&launched.options, &["nproc_per_node"]) {
        None => Some((1, launcher.span)),
        given => number(given),
    };
    // Without a world size here the user has to give one.
    if let (Some(nodes), Some((each, at)), None) = (nodes, each, launched.hidden) {
        launched.world = Some(world(PER_NODE, nodes.saturating_mul(each), at));
    }
    launched
}

/// The program that a launcher's options start.
fn launched<'w>(launcher: Launcher, word: &Word, given: Given<'w>, python: String) -> Launched<'w> {
    Launched {
        launcher,
        room: word.span.end,
        module: by_module(&given.options),
        alone: Some(interpreter(&given.options, python)),
        many: true,
        hidden: given.unresolved,
        options: given.options,
        refused: given.refused,
        ..program(given.rest)
    }
}

/// Parses DeepSpeed's launcher. Its world size is `--num_nodes` × `--num_gpus`, or the number of devices in
/// `--include localhost:0,1`.
fn deepspeed<'w>(launcher: &Word, words: &'w [Word], python: String) -> Launched<'w> {
    let given = options(words, &DEEPSPEED);
    let mut launched = launched(Launcher::Deepspeed, launcher, given, python);
    let options = &launched.options;
    if option(options, &["no_local_rank"]).is_none() {
        launched.local_rank = Some("--local_rank");
    }
    if launched.hidden.is_some() {
        return launched;
    }
    let nodes = number(value(options, &["num_nodes"])).map_or(1, |(nodes, _)| nodes);
    launched.world = match number(value(options, &["num_gpus"])) {
        Some((each, at)) => Some(world("--num_gpus", nodes.saturating_mul(each), at)),
        None => value(options, &["include", "i"]).and_then(|word| {
            let devices = hosts::device_count(&word.text)?;
            Some(world("--include", devices, word.span))
        }),
    };
    let filtered = filtered_and_counted(options);
    launched.refused = launched.refused.or(filtered);
    launched
}

/// Refuses both a number and a list of devices, as DeepSpeed does (`main`).
fn filtered_and_counted(options: &[Opt]) -> Option<Diagnostic> {
    let counts = option(options, &["num_gpus", "num_nodes"])?;
    let names = option(options, &["include", "i", "exclude", "e"])?;
    let written = |option: &Opt| {
        let dashes = if option.name.len() == 1 { "-" } else { "--" };
        format!("{dashes}{}", option.name)
    };
    let (counts, named) = (written(counts), written(names));
    Some(Diagnostic::error(
        "unsupported-value",
        Some(names.at),
        format!("DeepSpeed refuses `{named}` together with `{counts}`"),
        format!("remove one of them: `{named}` lists devices, `{counts}` sets their number"),
    ))
}

fn accelerate<'w>(launcher: &Word, words: &'w [Word], python: String) -> Launched<'w> {
    let given = options(words, &ACCELERATE);
    let launched = launched(Launcher::Accelerate, launcher, given, python);
    Launched {
        config: file(&launched.options),
        unresolved: launched.hidden,
        hidden: None,
        ..launched
    }
}

/// Whether the launcher's options say that the program is a module.
fn by_module(options: &[Opt]) -> bool {
    option(options, &["m", "module"]).is_some()
}

fn file(options: &[Opt]) -> Option<Config> {
    let word = value(options, &["config_file"])?;
    Some(Config::File(PathBuf::from(&word.text), Some(word.span)))
}

/// Parses `python [options] SCRIPT`, or a launcher that is started as a module.
fn python<'w>(python: &Word, words: &'w [Word], environment: &Environment<'_>) -> Launched<'w> {
    let Given { options, rest, .. } = options(words, &PYTHON);
    let flags = &words[..words.len() - rest.len()];
    let mut alone = vec![python.text.clone()];
    let Some(module) = value(&options, &["m"]) else {
        if let Some(launched) = spawn::spawn(rest) {
            return launched;
        }
        let (script, arguments) = rest.split_first().unzip();
        if let (Some(script), Some(arguments)) = (script, arguments)
            && let Some(launched) = by_name(script, arguments, python.text.clone(), environment)
        {
            return launched;
        }
        let mut launched = program(rest);
        alone.extend(flags.iter().map(|word| word.text.clone()));
        launched.alone = Some(alone);
        return launched;
    };
    match module.text.as_str() {
        "torch.distributed.run" => {
            torchrun(module, rest, python.text.clone(), environment, &TORCHRUN)
        }
        "torch.distributed.launch" => {
            let python = python.text.clone();
            let launched = torchrun(module, rest, python, environment, &TORCH_LAUNCH);
            let by_variable = option(&launched.options, &["use_env"]).is_some();
            Launched {
                local_rank: (!by_variable).then_some("--local-rank"),
                ..launched
            }
        }
        "accelerate.commands.launch" => accelerate(module, rest, python.text.clone()),
        "accelerate.commands.accelerate_cli"
            if rest.first().is_some_and(|w| w.text == "launch") =>
        {
            accelerate(&rest[0], &rest[1..], python.text.clone())
        }
        "deepspeed.launcher.runner" => deepspeed(module, rest, python.text.clone()),
        "trl" | "trl.cli" if !rest.is_empty() => trl(rest, python.text.clone()),
        _ => {
            let at = words
                .iter()
                .position(|word| word.span.end == module.span.end);
            let at = at.unwrap_or(0);
            let mut launched = program(&words[at..]);
            launched.module = true;
            alone.extend(words[..at].iter().map(|word| word.text.clone()));
            launched.alone = Some(alone);
            launched
        }
    }
}

#[cfg(test)]
mod tests;
