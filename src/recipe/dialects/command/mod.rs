//! Command lines that start a training: typed, in a script or in an arguments file.
//! `torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8` sets the number of processes and
//! the trainer's arguments, and may name further files.

pub(crate) mod alone;
pub(crate) mod arguments;
pub(crate) mod blanks;
pub(crate) mod hydra;
pub(crate) mod launcher;
pub(crate) mod rewritten;
pub(crate) mod script;
pub(crate) mod slurm;
pub(crate) mod unresolved;
pub(crate) mod wrapper;

use std::path::{Path, PathBuf};

use super::accelerate::{self, Config};
use super::handbook::keys;
use super::projects::{self, Project};
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::source::{FileId, Span};
use crate::util::suggest::short;

use crate::recipe::syntax::shell::word::{self, Word};
use crate::recipe::syntax::shell::{self, Form};
use arguments::Arguments;
use launcher::{Launched, Opt};
use script::Candidate;
use unresolved::AS_EXPANDED;

pub(crate) use hydra::Call as HydraCall;
pub(crate) use launcher::{Launcher, nodes, refuse_switches};
pub(crate) use rewritten::only_numbers_changed;
pub(crate) use slurm::gpu_requests as slurm_gpu_requests;

/// The longest script or command line, bytes. Some steps of the parser take the square of its length.
const MAX_SCRIPT: usize = 64 << 10;

/// The expanded value at a place of a text with commands. `None`: the place holds more or fewer than one
/// value.
pub(crate) fn value_at(path: &Path, text: &str, span: Span) -> Option<String> {
    let script = shell::read(text, span.file, Form::of(path)).ok()?;
    let words = script.lines.iter().flat_map(|line| &line.words);
    let mut covering =
        words.filter(|word| word.span.start <= span.start && span.end <= word.span.end);
    let word = covering.next()?;
    // A variable may hold several words.
    if covering.any(|other| other.span == word.span && !std::ptr::eq(other, word)) {
        return None;
    }
    if word.span.start == span.start {
        return Some(word.text.clone());
    }
    let (before, _) = word.text.split_once('=')?;
    let value = word.after(before.len() + 1);
    (value.span.start == span.start).then_some(value.text)
}

/// A parsed command line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Command {
    /// The trainer's arguments, `--key value`, as a mapping.
    pub arguments: Node,
    /// The program, or the trainer's name in TRL's command line.
    pub script: Option<Given<PathBuf>>,
    /// The program is a module, called by its name (`python -m pkg.train`).
    pub module: bool,
    /// The overrides of a Hydra program. `arguments` is empty then.
    pub hydra: Option<HydraCall>,
    /// The project whose program the command starts, if its arguments are not read. `arguments` is empty
    /// then.
    pub project: Option<Given<&'static Project>>,
    /// The recipe that the command names.
    pub config: Option<Given<PathBuf>>,
    /// The recipe is the only argument, without `--config`. Upstream then reads nothing else.
    pub only_config: bool,
    /// `--config=FILE`, one word.
    pub tied_config: Option<Given<String>>,
    /// The recipe is a DeepSpeed config (`--deepspeed_config`): the program uses DeepSpeed without a
    /// known trainer, and its arguments are not interpreted.
    pub deepspeed: bool,
    /// The accelerate config of the launcher.
    pub accelerate: Option<Config>,
    /// The command is TRL's command line, which also reads launcher options from the recipe.
    pub by_trl: bool,
    /// Options of `accelerate launch`, as keys of its config.
    pub launch: Option<Node>,
    /// All options of `accelerate launch` in their order; `None`: it does not start the program.
    pub options: Option<Vec<Given<Option<String>>>>,
    /// Processes that torchrun or DeepSpeed's launcher starts, as a native tree.
    pub world: Option<Node>,
    /// Byte offset at which arguments may be added, after the last one.
    pub end: usize,
}

/// Whether a file holds a command line rather than YAML or JSON.
pub(crate) fn is_one(path: &Path, text: &str) -> bool {
    let extension = path.extension().and_then(|e| e.to_str());
    if matches!(extension, Some("args" | "sh" | "bash")) {
        return true;
    }
    if matches!(extension, Some("yaml" | "yml" | "json")) {
        return false;
    }
    let mut lines = text.lines().map(str::trim_start);
    let shell = |line: &str| line.starts_with("#!") && line.contains("sh");
    if lines.clone().next().is_some_and(shell) {
        return true;
    }
    let first = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    let launches = |line: &str| {
        ["torchrun ", "accelerate launch ", "deepspeed ", "trl "]
            .iter()
            .any(|launcher| line.starts_with(launcher))
    };
    first.is_some_and(|line| word::is_long_option(line) || launches(line))
}

/// The arguments in a file that `HfArgumentParser` reads before the command's arguments.
pub(crate) fn arguments_of(
    text: &str,
    file: FileId,
    is_switch: impl Fn(&str) -> bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Node> {
    if refuse_long(text, file, diagnostics) {
        return None;
    }
    let script = shell::read(text, file, Form::ArgumentsFile).ok()?;
    let line = script.lines.into_iter().next()?;
    let start = line.words.first()?.span;
    Some(arguments::tree(&line.words, start, is_switch, diagnostics).root)
}

/// Refuses a text with commands that is longer than any script that starts a training.
fn refuse_long(text: &str, file: FileId, diagnostics: &mut Vec<Diagnostic>) -> bool {
    let long = text.len() > MAX_SCRIPT;
    if long {
        let start = Span::of(text, 0..0, file);
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(start),
            format!(
                "the script has {} bytes, the limit is {MAX_SCRIPT}",
                text.len()
            ),
            "give only the command that starts the training",
        ));
    }
    long
}

/// The command of a text that starts a training.
pub(crate) fn parse(
    path: &Path,
    text: &str,
    file: FileId,
    is_switch: impl Fn(&str) -> bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Command> {
    if refuse_long(text, file, diagnostics) {
        return None;
    }
    let form = Form::of(path);
    if blanks::refuse_line_ends(text, form, file, diagnostics) {
        return None;
    }
    let script = match shell::read(text, file, form) {
        Ok(script) => script,
        Err(at) => {
            let blank = blanks::blank(&text[at.start..at.end], at);
            diagnostics.push(blank.unwrap_or_else(|| {
                Diagnostic::error(
                    "yaml-syntax",
                    Some(at),
                    "the script cannot be parsed here: a quote or bracket is not closed, a word is out of place, or the nesting is too deep",
                    AS_EXPANDED,
                )
            }));
            return None;
        }
    };
    if let [first, second, ..] = script.lines.as_slice()
        && word::is_long_option(&first.words[0].text)
    {
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(second.words[0].span),
            "these arguments continue on another line without a `\\` before it",
            "end each line but the last with `\\`, or name the file `.args`",
        ));
        return None;
    }
    let mut candidates = script::candidates(&script);
    if let Some(project) = projects::of_script(text)
        && let Some(first) = candidates.first_mut()
        && first.project.is_none()
    {
        first.project = Some(Given::new("command", project, first.words[0].span));
    }
    if script::refuse_unread(&script.lines, &candidates, diagnostics) {
        return None;
    }
    let Some(found) = candidates.first() else {
        if let Some(problem) = unresolved::program(&script.lines) {
            diagnostics.push(problem);
            return None;
        }
        let first = script.lines.first().and_then(|line| line.words.first());
        let span = first.map(|word| word.span);
        diagnostics.push(Diagnostic::error(
            "unknown-dialect",
            span,
            "no command here starts a training",
            "give the whole command, such as `torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 8`, or its arguments",
        ));
        return None;
    };
    if found.project.is_none() {
        script::refuse_others(&candidates, diagnostics);
    }
    blanks::refuse(form, found, diagnostics);
    unresolved::warn_of_defaults(found.words, diagnostics);
    Some(understand(found, is_switch, diagnostics))
}

fn understand(
    found: &Candidate<'_>,
    is_switch: impl Fn(&str) -> bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Command {
    let Candidate {
        launched,
        last,
        project,
        ..
    } = found;
    let start = launched.arguments.first().unwrap_or(last).span;
    let hydra = hydra::call(launched.script, launched.arguments).filter(|_| project.is_none());
    let hydra = hydra.map(|call| {
        let resolved = hydra::resolved(launched.arguments, diagnostics);
        let resolved = hydra::call(launched.script, &resolved);
        if let Some(word) = &call.hidden {
            diagnostics.push(hydra::hidden_overrides(word, launched.arguments));
        }
        HydraCall {
            overrides: resolved.map_or_else(Vec::new, |call| call.overrides),
            ..call
        }
    });
    let words = match (&hydra, project) {
        (None, None) => launched.arguments,
        _ => &[],
    };
    unresolved::refuse(words, launched.unresolved, diagnostics);
    let Arguments {
        root: mut arguments,
        loose,
        unresolved,
    } = arguments::tree(words, start, is_switch, diagnostics);
    unresolved::take_values(&mut arguments, &unresolved, diagnostics);
    refuse_hydra(&loose, diagnostics);
    refuse_after_config(&arguments, diagnostics);
    if launched.mixed
        && let Value::Mapping(entries) = &mut arguments.value
    {
        entries.retain(|entry| !launcher::is_for_trls_launcher(&entry.name));
    }
    let script = launched.script.map(|word| {
        let path = PathBuf::from(&word.text);
        Given::new("script", path, word.span)
    });
    // TRL and the handbook take `--config recipe.yaml`; transformers' scripts take a JSON or YAML file
    // as their only argument.
    let file = |arguments: &Node, key| {
        let node = arguments.get(key)?;
        Some(Given::new(key, PathBuf::from(node.text()?), node.span))
    };
    let raw = file(&arguments, "deepspeed_config");
    let deepspeed = raw.is_some();
    let named = raw.or_else(|| file(&arguments, "config"));
    arguments.remove_path("config");
    let only_config = named.is_none();
    let mut tied = words
        .iter()
        .filter(|word| word.text.starts_with("--config="));
    let tied_config = tied.next_back().map(|word| {
        let value = word.after("--config=".len()).text;
        Given::new("config", value, word.span)
    });
    let config = named.or_else(|| {
        let file = loose.iter().find(|word| {
            let extension = Path::new(&word.text).extension().and_then(|e| e.to_str());
            matches!(extension, Some("json" | "yaml" | "yml"))
        });
        file.map(|word| Given::new("config", PathBuf::from(&word.text), word.span))
    });
    let by_accelerate = [Launcher::Accelerate, Launcher::Trl].contains(&launched.launcher);
    let without = launched.launcher == Launcher::Trl && launched.options.is_empty();
    let launch = by_accelerate && !without;
    let launch = launch.then(|| launch_keys(&launched.options, start));
    let options = by_accelerate.then(|| {
        let options = launched.options.iter().map(|option| {
            let value = option.value.as_ref().map(|word| word.text.clone());
            Given::new(&option.name, value, option.at)
        });
        options.collect()
    });
    diagnostics.extend(launched.refused.clone());
    Command {
        arguments,
        script,
        module: launched.module,
        hydra,
        project: project.clone(),
        only_config: only_config && config.is_some(),
        config,
        tied_config,
        deepspeed,
        accelerate: launched.config.clone(),
        by_trl: launched.mixed,
        launch,
        options,
        world: launched.world.clone(),
        end: end_of_options(launched, last),
    }
}

/// Byte offset at which arguments may be added: after the last word, but before `--`, which ends the
/// options.
fn end_of_options(launched: &Launched<'_>, last: &Word) -> usize {
    let words = launched.arguments;
    let Some(at) = words.iter().position(|word| word.text == "--") else {
        return last.span.end;
    };
    let before = at.checked_sub(1).and_then(|at| words.get(at));
    match before.or(launched.script) {
        Some(before) => before.span.end,
        // At the blank before `--`.
        None => words[at].span.start.saturating_sub(1),
    }
}

/// Refuses Hydra overrides (`loss=dpo`) beside arguments that no Hydra program takes.
fn refuse_hydra(loose: &[Word], diagnostics: &mut Vec<Diagnostic>) {
    if let Some(word) = loose.iter().find(|word| hydra::is_override(&word.text)) {
        let text = short(&word.text);
        diagnostics.push(Diagnostic::error(
            "unknown-dialect",
            Some(word.span),
            format!("`{text}` is a Hydra override, but other arguments of this command are not"),
            format!("pass the config tree and the overrides, `evenkeel plan config {text} …`, and an accelerate config with `--accelerate FILE`"),
        ));
    }
}

/// Refuses words after `--config FILE`. The option takes one value, and upstream's parsers refuse the rest
/// (transformers 5.23.0 `hf_argparser.py`, `parse_args_into_dataclasses`).
fn refuse_after_config(arguments: &Node, diagnostics: &mut Vec<Diagnostic>) {
    for key in ["config", "deepspeed_config"] {
        let words = arguments.get(key).and_then(Node::items);
        let Some([file, word, ..]) = words else {
            continue;
        };
        let (file, text) = (
            file.text().unwrap_or_default(),
            word.text().unwrap_or_default(),
        );
        diagnostics.push(Diagnostic::error(
            "unknown-key",
            Some(word.span),
            format!("`{}` follows `--{key} {}`, which takes one file", short(text), short(file)),
            "remove it, or write it as an option, `--key value`: upstream's parser refuses the command",
        ));
    }
}

/// Options of `accelerate launch` as the config keys that they override, and its switches as `--NAME`.
fn launch_keys(options: &[Opt], span: Span) -> Node {
    let mut tree = Tree::new(span);
    for Opt { name, at, value } in options {
        let key = format!("--{name}");
        if accelerate::is_switch(name) {
            tree.plain(&key, &Given::new(&key, true, *at));
        } else if let (Some(value), Some(path)) = (value, config_key(name)) {
            // An unresolved count stays unset; the user gives it with `--recipe-gpus`.
            if COUNTS.contains(&name.as_str()) && !value.unresolved.is_empty() {
                continue;
            }
            tree.put(&path, &key, arguments::typed(&value.text, value.span));
        }
    }
    tree.into_node()
}

/// Options of `accelerate launch` for the world size and this machine's rank.
const COUNTS: &[&str] = &["num_processes", "num_machines", "machine_rank"];

/// The key of an accelerate config that an option with a value overrides.
fn config_key(name: &str) -> Option<String> {
    const PREFIXES: &[(&str, &str)] = &[
        ("fsdp_", "fsdp_config"),
        ("parallelism_config_", "parallelism_config"),
        ("megatron_lm_", "megatron_lm_config"),
        ("deepspeed_", "deepspeed_config"),
        ("mpirun_", "mpirun_config"),
    ];
    let part = match name {
        "num_processes" | "num_machines" | "mixed_precision" | "gpu_ids" | "main_process_ip" => {
            return Some(name.to_owned());
        }
        "zero_stage" | "gradient_accumulation_steps" => "deepspeed_config",
        name => {
            let mut prefixes = PREFIXES.iter();
            prefixes.find(|(prefix, _)| name.starts_with(prefix))?.1
        }
    };
    Some(format!("{part}.{name}"))
}

/// The launcher of a command and the places of its options, for writing a plan's numbers into the text.
pub(crate) struct Call {
    /// What starts the processes.
    pub launcher: Launcher,
    /// Byte offset in the text at which further options may be added.
    pub room: usize,
    /// The command names its program.
    pub has_program: bool,
    /// An unresolved word among the launcher's options.
    pub hidden: Option<String>,
    options: Vec<Opt>,
}

impl Call {
    /// The launcher of the training command in a text.
    pub fn of(path: &Path, text: &str, file: FileId) -> Option<Call> {
        let script = shell::read(text, file, Form::of(path)).ok()?;
        let candidates = script::candidates(&script);
        let launched = candidates.into_iter().next()?.launched;
        Some(Call {
            launcher: launched.launcher,
            room: launched.room,
            has_program: launched.script.is_some(),
            hidden: launched.hidden.map(|word| word.text.clone()),
            options: launched.options,
        })
    }

    /// The option value that begins at a byte offset of the text.
    pub fn value_from(&self, start: usize) -> Option<(&str, Span)> {
        let mut values = self
            .options
            .iter()
            .filter_map(|option| option.value.as_ref());
        let word = values.find(|word| word.span.start == start)?;
        Some((&word.text, word.span))
    }

    /// The place of an option, with or without a value.
    pub fn at(&self, names: &[&str]) -> Option<Span> {
        Some(launcher::option(&self.options, names)?.at)
    }

    /// The value of an option and its place.
    pub fn value(&self, names: &[&str]) -> Option<(&str, Span)> {
        let option = launcher::option(&self.options, names)?;
        let word = option.value.as_ref()?;
        Some((&word.text, word.span))
    }
}

/// The accelerate config and the launcher options that a recipe gives to TRL's launcher.
#[derive(Debug, Default)]
pub(crate) struct Launch {
    /// `accelerate_config`.
    pub config: Option<Config>,
    /// Options of `accelerate launch`, as keys of its config.
    pub options: Option<Node>,
    /// The same options as words.
    pub words: Vec<Given<Option<String>>>,
}

/// Removes from a recipe the keys that TRL's command line passes to its launcher (`num_processes: 4`). TRL
/// passes on every key that the trainer does not know.
pub(crate) fn take_launch(root: &mut Node) -> Launch {
    let mut launch = Launch::default();
    let Value::Mapping(entries) = &mut root.value else {
        return launch;
    };
    let mut options = Tree::new(root.span);
    let mut any = false;
    entries.retain(|entry| {
        let name = entry.name.as_str();
        let text = entry.value.text();
        let (Some(text), true) = (text, keys::is_launcher_key(name)) else {
            return true;
        };
        let span = entry.value.span;
        match name {
            keys::TRL_CONFIG => launch.config = Some(Config::of_trl(text.to_owned(), span)),
            "config_file" => {
                launch.config = Some(Config::File(PathBuf::from(text), Some(span)));
            }
            name => {
                let word = Given::new(name, Some(text.to_owned()), span);
                launch.words.push(word);
                if let Some(path) = config_key(name) {
                    options.plain(&path, &Given::new(name, text, span));
                    any = true;
                }
            }
        }
        false
    });
    launch.options = any.then(|| options.into_node());
    launch
}

#[cfg(test)]
pub(crate) mod tests;
