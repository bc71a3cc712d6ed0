//! Launchers: the number of processes that a command starts, the program and its arguments.
//!
//! Sources: torch 2.9 `distributed/run.py`, `distributed/argparse_util.py`; accelerate 16cb6eb `commands/launch.py`; DeepSpeed
//! edaa722 `launcher/runner.py`; TRL f2cd577 `cli/main.py`.

pub(super) mod options;
mod trl;

use std::path::{Path, PathBuf};

use crate::recipe::dialects::accelerate::Config;
use crate::recipe::dialects::accelerate::options::TRL_CONFIG;
use crate::recipe::dialects::deepspeed::hosts;
use crate::recipe::schema::launch::Opt;
use crate::recipe::schema::tree;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::Line;
use crate::recipe::syntax::shell::word::{Word, values_of};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::short;

use options::{ACCELERATE, DEEPSPEED, Given, Options, PYTHON, TORCH_LAUNCH, TORCHRUN, options};
pub(crate) use options::{option, value};
use trl::trl;
pub(crate) use trl::{is_for_trls_launcher, refuse_switches};

/// What starts the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Launcher {
    /// No known launcher: Python, or another program before the script.
    #[default]
    Python,
    Torchrun,
    Deepspeed,
    Accelerate,
    /// TRL's command line, which starts `accelerate launch`.
    Trl,
}

impl Launcher {
    /// All launchers, without Python.
    pub const NAMED: [Launcher; 4] = [
        Launcher::Torchrun,
        Launcher::Deepspeed,
        Launcher::Accelerate,
        Launcher::Trl,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Launcher::Python => "python",
            Launcher::Torchrun => "torchrun",
            Launcher::Deepspeed => "deepspeed",
            Launcher::Accelerate => "accelerate",
            Launcher::Trl => "trl",
        }
    }
}

/// A command that starts a training: its launcher and its program, with the places of their words.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Launch {
    /// What starts the program.
    pub launcher: Launcher,
    /// The launcher's options, from left to right.
    pub options: Vec<Opt>,
    /// Byte offset in the text at which further options may be added.
    pub room: usize,
    /// The program; in TRL's command line the trainer's name.
    pub program: Option<Word>,
    /// The program is a module, started by its name.
    pub module: bool,
    pub arguments: Vec<Word>,
    /// The number of processes, with the option that states it.
    pub world: Option<tree::Given<u64>>,
    /// Why the launcher refuses its options.
    pub refused: Option<Diagnostic>,
    /// A launcher starts the program in several processes.
    pub many: bool,
    /// An unresolved word among the options, which may hold further ones. The user then gives the world; with
    /// `accelerate launch` the command is refused.
    pub hidden: Option<Word>,
    /// The words before the program that start it without the launcher. `None`: evenkeel cannot replace it.
    pub alone: Option<Vec<String>>,
    /// All words of the command.
    pub words: Vec<Word>,
    /// The option by which the launcher passes a rank's number on its machine to the program.
    pub local_rank: Option<&'static str>,
}

impl Launch {
    /// The last of the launcher's options with one of the names.
    pub fn option(&self, names: &[&str]) -> Option<&Opt> {
        option(&self.options, names)
    }

    /// The value of [`Launch::option`].
    pub fn value(&self, names: &[&str]) -> Option<&Word> {
        value(&self.options, names)
    }

    /// TRL's command line starts the program, and reads options of its launcher from the recipe as well.
    pub fn is_trl(&self) -> bool {
        self.launcher == Launcher::Trl
    }

    pub fn script(&self) -> Option<tree::Given<&Path>> {
        let word = self.program.as_ref()?;
        Some(tree::Given::new("script", Path::new(&word.text), word.span))
    }

    /// The config of `accelerate launch`, which its options override.
    pub fn config(&self) -> Option<Config> {
        if let Some(word) = self.value(&[TRL_CONFIG]) {
            return Some(Config::of_trl(word.text.clone(), word.span));
        }
        let word = self.value(&["config_file"])?;
        Some(Config::File(PathBuf::from(&word.text), Some(word.span)))
    }

    /// The expanded value at a place of the command. `None`: the place holds more or fewer than one value.
    pub fn value_at(&self, span: Span) -> Option<String> {
        let covers = |word: &&Word| {
            let at = word.span;
            at.file == span.file && at.start <= span.start && span.end <= at.end
        };
        let mut covering = self.words.iter().filter(covers);
        let word = covering.next()?;
        // A variable may hold several words.
        if covering.any(|other| other.span == word.span) {
            return None;
        }
        if word.span.start == span.start {
            return Some(word.text.clone());
        }
        let (before, _) = word.text.split_once('=')?;
        let value = word.after(before.len() + 1);
        (value.span.start == span.start).then_some(value.text)
    }
}

/// torchrun's option for the number of processes on a node.
const PER_NODE: &str = "--nproc_per_node";

/// Words that separate forwarded commands. A script escapes them for the shell that the program starts.
const ENDS: [&str; 5] = ["--", "&&", "||", ";", "|"];

/// Splits a command into launcher and program. A command without a launcher begins at its script or its first
/// option. A program may forward the command after `--` (`python mason.py --gpus 8 -- torchrun … train.py …`;
/// allenai/open-instruct e6c3044 `mason.py`, `parse_commands`). `None`: the command starts no training.
pub(crate) fn find(words: &[Word]) -> Option<Launch> {
    let mut found = launcher(words).or_else(|| without_launcher(words))?;
    found.words = words.to_vec();
    let first = found.options.first().map(|option| option.at);
    let first = first.or(found.program.as_ref().map(|program| program.span));
    let before = words.iter().position(|word| Some(word.span) == first);
    refuse_wrapper(&words[..before.unwrap_or(0)], &mut found);
    let (Launcher::Python, Some(script)) = (found.launcher, &found.program) else {
        return Some(found);
    };
    let at = found.arguments.iter().position(|word| word.text == "--");
    let forwarded = at.map_or(&[][..], |at| &found.arguments[at + 1..]);
    let commands = forwarded.split(|word| ENDS.contains(&word.text.as_str()));
    let mut inner = commands.filter_map(launcher);
    let Some(mut launched) = inner.next() else {
        return Some(found);
    };
    // A program that forwards commands does more than start processes.
    launched.alone = None;
    launched.words = found.words.clone();
    let own = &words[..words.len() - forwarded.len()];
    if script.file_name() == "mason.py" && launched.launcher == Launcher::Accelerate {
        multiply_by_nodes(own, &mut launched);
    } else {
        refuse_wrapper(own, &mut launched);
    }
    if let Some(second) = inner.next() {
        launched.refused = Some(Diagnostic::error(
            "global-batch-unknown",
            second.program.map(|word| word.span),
            format!(
                "`{}` forwards several commands, and more than one may be the training",
                short(&script.text)
            ),
            "pass the training command after `--`, without the program that forwards it",
        ));
    }
    Some(launched)
}

/// Multiplies the processes of `accelerate launch` by the nodes of open-instruct's `mason.py`, as it does
/// (allenai/open-instruct 002c330 `mason.py`, `make_internal_command`).
fn multiply_by_nodes(own: &[Word], launched: &mut Launch) {
    let nodes = values_of(own, "num_nodes").find_map(|value| value.text.parse::<u64>().ok());
    let options = launched.options.iter_mut();
    let counts = options.filter(|option| option.name == "num_processes");
    for value in counts.filter_map(|option| option.value.as_mut()) {
        if let (Some(nodes), Ok(processes)) = (nodes, value.text.parse::<u64>()) {
            value.text = nodes.saturating_mul(processes).to_string();
        }
    }
}

/// Refuses a program that starts the launcher on several nodes, unless the launcher itself states them. Whether its
/// processes count once or on every node is the program's own matter. Slurm's nodes are read elsewhere.
fn refuse_wrapper(own: &[Word], launched: &mut Launch) {
    let is_slurm = own.iter().any(|word| SLURM.has(word.file_name()));
    let states = ["nnodes", "num_nodes", "num_machines", "hostfile"];
    let mut programs = own.iter().filter(|word| word.assignment().is_none());
    let script = own.iter().find(|word| word.text.ends_with(".py"));
    let Some(wrapper) = script.or_else(|| programs.next()) else {
        return;
    };
    if is_slurm || launched.option(&states).is_some() || launched.launcher == Launcher::Trl {
        return;
    }
    let nodes = ["nodes", "num_nodes", "nnodes"]
        .into_iter()
        .find_map(|name| {
            let value = values_of(own, name).next_back()?;
            let is_one = value.text == "1";
            (!is_one && !value.text.is_empty()).then_some((name, value))
        });
    let Some((name, value)) = nodes else { return };
    let name = name.replace('_', "-");
    launched.world = None;
    launched.refused = Some(
        Diagnostic::error(
            "global-batch-unknown",
            Some(value.span),
            format!(
                "`{}` has `--{name} {}`: whether it multiplies the processes of the command is not known",
                short(wrapper.file_name()),
                short(&value.text)
            ),
            "give the command that it starts, with all nodes in its own options (`torchrun --nnodes N …`)",
        )
        .of_batch(),
    );
}

/// A script with its arguments, or arguments alone. Options before a script belong to its wrapper (`srun`).
fn without_launcher(words: &[Word]) -> Option<Launch> {
    let script = words.iter().position(|word| word.text.ends_with(".py"));
    let option = words.iter().position(|word| word.text.starts_with("--"));
    Some(program(&words[script.or(option)?..]))
}

/// Slurm's commands that start or ask for tasks.
const SLURM: Words = Words("srun sbatch salloc");

/// Programs that start a launcher, such as `uv run --with trl torchrun …`, and their options with a value as a
/// separate word. Such a value may equal a launcher's name.
///
/// Sources: uv 0.9 `uv run --help`; conda 25 `conda run --help`; Slurm 25.05 `srun(1)`.
const STARTERS: [(Words, Words); 3] = [
    (
        Words("uv uvx"),
        Words(
            "--with -w --with-editable --with-requirements --from --extra --no-extra --group --no-group \
             --only-group --package --env-file --python -p --python-platform --index --default-index \
             --index-url -i --extra-index-url --find-links -f --directory --project --cache-dir \
             --config-file --refresh-package --upgrade-package -P --reinstall-package --no-build-package \
             --no-binary-package --no-build-isolation-package --config-setting -C",
        ),
    ),
    (
        Words("conda mamba micromamba"),
        Words("-n --name -p --prefix --cwd"),
    ),
    (
        SLURM,
        Words("-J --job-name -A --account --comment -p --partition -q --qos -D --chdir"),
    ),
];

/// The positions of words that are not option values of a program before the launcher.
pub(crate) fn word_positions(words: &[Word]) -> impl Iterator<Item = usize> {
    let mut valued = Words("");
    (0..words.len()).filter(move |at| {
        let option = at.checked_sub(1).map(|at| words[at].text.as_str());
        if option.is_some_and(|option| valued.has(option)) {
            return false;
        }
        let name = words[*at].file_name();
        let starter = STARTERS.iter().find(|(names, _)| names.has(name));
        valued = starter.map_or(valued, |(_, options)| *options);
        true
    })
}

fn launcher(words: &[Word]) -> Option<Launch> {
    word_positions(words).find_map(|at| {
        let (before, from) = words.split_at(at);
        let (word, rest) = from.split_first()?;
        // `NAME=/usr/bin/torchrun`.
        if word.assignment().is_some() {
            return None;
        }
        let name = word.file_name();
        if is_python(name) {
            Some(python(word, rest, before))
        } else {
            by_name(word, rest, beside(word), before)
        }
    })
}

/// A launcher that is started by its program's name. `python`: the interpreter of torchrun's installation.
/// `before`: the words before the command.
fn by_name(word: &Word, rest: &[Word], python: String, before: &[Word]) -> Option<Launch> {
    let name = word.file_name();
    match name {
        "torchrun" => Some(torchrun(word, rest, python, before, &TORCHRUN)),
        "accelerate-launch" => Some(accelerate(word, rest, python)),
        "accelerate" if rest.first().is_some_and(|w| w.text == "launch") => {
            Some(accelerate(&rest[0], &rest[1..], python))
        }
        "deepspeed" | "deepspeed.pt" if !rest.is_empty() => Some(deepspeed(word, rest, python)),
        "trl" if !rest.is_empty() => Some(trl(rest, python)),
        // They start a process for every device of the machine.
        "swift" | "llamafactory-cli" | "lmf" if !rest.is_empty() => Some(Launch {
            program: Some(word.clone()),
            arguments: rest[1..].to_vec(),
            many: true,
            ..Launch::default()
        }),
        // Scripts among the examples of transformers and optimum-habana that start another script.
        "xla_spawn.py" | "gaudi_spawn.py" => Some(Launch {
            refused: Some(Diagnostic::error(
                "unsupported-value",
                Some(word.span),
                format!(
                    "`{name}` starts the program in several processes, and its options are not read"
                ),
                "give the program's own command with the number of processes, `torchrun --nproc_per_node N PROGRAM …`",
            ).of_batch()),
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
    match launcher.text.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/python3"),
        None => "python3".to_owned(),
    }
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
pub(super) fn program(words: &[Word]) -> Launch {
    let (program, arguments) = match words.split_first() {
        // A launcher without a program, as in a shortened documentation example.
        Some((first, rest)) if !first.text.starts_with('-') => (Some(first), rest),
        _ => (None, words),
    };
    Launch {
        program: program.cloned(),
        arguments: arguments.to_vec(),
        alone: Some(Vec::new()),
        ..Launch::default()
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

/// The default that torchrun's environment holds for an option: `PET_NNODES=2 torchrun`.
fn default(option: &str, before: &[Word]) -> Option<Word> {
    let name = format!("PET_{}", option.to_uppercase());
    let mut assigned = before.iter().rev().filter_map(Word::assignment);
    let found = assigned.find(|assignment| assignment.name == name)?;
    Some(found.value)
}

/// Whether a script sets such a default for a later command, where the environment is not followed.
pub(super) fn sets_defaults(line: &Line) -> bool {
    let names = ["PET_NNODES", "PET_NPROC_PER_NODE"];
    let sets = |word: &Word| names.iter().any(|name| word.text.contains(name));
    line.words.iter().any(sets)
}

/// Parses torchrun. Its world size is `--nnodes` × `--nproc_per_node`, both 1 by default.
fn torchrun(
    launcher: &Word,
    words: &[Word],
    python: String,
    before: &[Word],
    known: &Options,
) -> Launch {
    let mut launched = launched(Launcher::Torchrun, launcher, options(words, known), python);
    for name in ["nnodes", "nproc_per_node"] {
        if value(&launched.options, &[name]).is_none()
            && let Some(default) = default(name, before)
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
    if let (Some(nodes), Some((each, at)), None) = (nodes, each, &launched.hidden) {
        let processes = nodes.saturating_mul(each);
        launched.world = Some(tree::Given::new(PER_NODE, processes, at));
    }
    launched
}

/// The program that a launcher's options start.
fn launched(launcher: Launcher, word: &Word, given: Given<'_>, python: String) -> Launch {
    Launch {
        launcher,
        room: word.span.end,
        module: by_module(&given.options),
        alone: Some(interpreter(&given.options, python)),
        many: true,
        hidden: given.unresolved.cloned(),
        options: given.options,
        refused: given.refused,
        ..program(given.rest)
    }
}

/// Parses DeepSpeed's launcher. Its world size is `--num_nodes` × `--num_gpus`, or the number of devices in
/// `--include localhost:0,1`.
fn deepspeed(launcher: &Word, words: &[Word], python: String) -> Launch {
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
        Some((each, at)) => {
            let processes = nodes.saturating_mul(each);
            Some(tree::Given::new("--num_gpus", processes, at))
        }
        None => value(options, &["include", "i"]).and_then(|word| {
            let devices = hosts::device_count(&word.text)?;
            Some(tree::Given::new("--include", devices, word.span))
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
    let (counts, named) = (counts.written(), names.written());
    Some(Diagnostic::error(
        "unsupported-value",
        Some(names.at),
        format!("DeepSpeed refuses `{named}` together with `{counts}`"),
        format!("remove one of them: `{named}` lists devices, `{counts}` sets their number"),
    ))
}

fn accelerate(launcher: &Word, words: &[Word], python: String) -> Launch {
    let given = options(words, &ACCELERATE);
    launched(Launcher::Accelerate, launcher, given, python)
}

/// Whether the launcher's options say that the program is a module.
fn by_module(options: &[Opt]) -> bool {
    option(options, &["m", "module"]).is_some()
}

/// Parses `python [options] SCRIPT`, or a launcher that is started as a module.
fn python(python: &Word, words: &[Word], before: &[Word]) -> Launch {
    let Given { options, rest, .. } = options(words, &PYTHON);
    let by = python.text.clone();
    let found = match value(&options, &["m"]) {
        Some(module) => by_module_name(module, rest, by.clone(), before),
        None => rest
            .split_first()
            .and_then(|(script, rest)| by_name(script, rest, by.clone(), before)),
    };
    if let Some(launched) = found {
        return launched;
    }
    let module = value(&options, &["m"]);
    // The module's name may be a part of its option (`-mpkg.train`).
    let program_at = match module {
        Some(module) => words
            .iter()
            .position(|word| word.span.end == module.span.end),
        None => Some(words.len() - rest.len()),
    };
    let (flags, from) = words.split_at(program_at.unwrap_or(0));
    let flags = flags.iter().map(|word| word.text.clone());
    Launch {
        module: module.is_some(),
        alone: Some(std::iter::once(by).chain(flags).collect()),
        ..program(from)
    }
}

/// A launcher that Python starts as a module.
fn by_module_name(module: &Word, rest: &[Word], python: String, before: &[Word]) -> Option<Launch> {
    let launched = match module.text.as_str() {
        "torch.distributed.run" => torchrun(module, rest, python, before, &TORCHRUN),
        "torch.distributed.launch" => {
            let launched = torchrun(module, rest, python, before, &TORCH_LAUNCH);
            let by_variable = option(&launched.options, &["use_env"]).is_some();
            Launch {
                local_rank: (!by_variable).then_some("--local-rank"),
                ..launched
            }
        }
        "accelerate.commands.launch" => accelerate(module, rest, python),
        "accelerate.commands.accelerate_cli"
            if rest.first().is_some_and(|w| w.text == "launch") =>
        {
            accelerate(&rest[0], &rest[1..], python)
        }
        "deepspeed.launcher.runner" => deepspeed(module, rest, python),
        "trl" | "trl.cli" if !rest.is_empty() => trl(rest, python),
        _ => return None,
    };
    Some(launched)
}

#[cfg(test)]
mod tests;
