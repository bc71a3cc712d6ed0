//! Command lines that start a training: typed, in a script or in an arguments file.
//! `torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8` sets the number of processes and
//! the trainer's arguments, and may name further files.

pub(crate) mod alone;
pub(crate) mod arguments;
pub(crate) mod hydra;
pub(crate) mod launcher;
pub(crate) mod script;
pub(crate) mod slurm;
pub(crate) mod unresolved;
mod world;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::accelerate::options::{TRL_CONFIG, is_launcher_key};
use super::accelerate::{self, Config};
use super::handbook;
use super::projects::{self, Project};
use crate::recipe::schema::launch::Opt;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::{Diagnostic, has_error};
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::shell::word::{self, Word};
use crate::recipe::syntax::shell::{self, Form, Line, Typed};
use crate::recipe::syntax::source::{FileId, Span};
use crate::util::format::bytes_apart;
use crate::util::suggest::short;

use arguments::Arguments;
pub(crate) use arguments::of_text as options_of_text;

use script::Candidate;
pub(crate) use script::LINE;
pub(crate) use unresolved::AS_EXPANDED;

pub(crate) use launcher::{Launch, Launcher, nodes, refuse_switches};

/// The longest script or command line, bytes. Some steps of the parser take the square of its length.
const MAX_SCRIPT: usize = 64 << 10;

/// A command and what its arguments mean.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Command {
    /// Its launcher and its program.
    pub launch: Launch,
    /// The trainer's arguments, `--key value`, as a mapping. Empty for a Hydra program and for a project whose
    /// arguments are not read.
    pub arguments: Node,
    /// The root file of a Hydra program's configs.
    pub hydra: Option<Given<PathBuf>>,
    /// The overrides of a Hydra program.
    pub overrides: Vec<String>,
    /// The project whose program the command starts, if its arguments are not read.
    pub project: Option<Given<&'static Project>>,
    /// The recipe that the command names.
    pub config: Option<Given<PathBuf>>,
    /// The recipe is the only argument, without `--config`. Upstream then reads nothing else.
    pub only_config: bool,
    /// The recipe is a DeepSpeed config (`--deepspeed_config`): the program uses DeepSpeed without a
    /// known trainer, and its arguments are not interpreted.
    pub deepspeed: bool,
    /// The settings of `accelerate launch`.
    pub accelerate: Stated,
    /// The processes for which the script computed the accumulation, with the names of its variables.
    pub computed_for: Option<Given<u64>>,
    /// Byte offset at which arguments may be added, after the last one.
    pub end: usize,
}

impl Command {
    fn program(&self) -> Option<&str> {
        Some(self.launch.program.as_ref()?.text.as_str())
    }

    /// The keys and values of arguments that are not read, also of Hydra overrides and of a command that the program runs.
    pub fn unread_arguments(&self) -> Node {
        arguments::unread(&self.launch.arguments, self.arguments.span)
    }

    /// Those of them that are no options of the program itself.
    pub fn unread_beside_options(&self) -> Node {
        arguments::beside_options(&self.launch.arguments, self.arguments.span)
    }

    fn recipe(&self) -> Option<&Path> {
        Some(self.config.as_ref()?.value.as_path())
    }
}

/// What a command, or a recipe for TRL's launcher, states for `accelerate launch`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Stated {
    /// The config, also as TRL's `accelerate_config`.
    pub config: Option<Config>,
    /// All options in their order; `None`: it does not start the program.
    pub options: Option<Vec<Opt>>,
    /// The options as keys of the config.
    pub tree: Option<Node>,
}

/// Whether a file is YAML or JSON by its name.
pub(crate) fn is_config(path: &Path) -> bool {
    let extension = path.extension().and_then(|e| e.to_str());
    matches!(extension, Some("yaml" | "yml" | "json"))
}

/// Whether a file holds a command line rather than YAML or JSON.
pub(crate) fn is_one(path: &Path, text: &str) -> bool {
    let extension = path.extension().and_then(|e| e.to_str());
    if matches!(extension, Some("args" | "sh" | "bash")) {
        return true;
    }
    if is_config(path) {
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

/// Refuses a text with commands that is longer than any script that starts a training.
fn refuse_long(text: &str, file: FileId, diagnostics: &mut Vec<Diagnostic>) -> bool {
    let long = text.len() > MAX_SCRIPT;
    if long {
        let start = Span::of(text, 0..0, file);
        let [size, limit] = bytes_apart(text.len() as u64, MAX_SCRIPT as u64);
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(start),
            format!("the script has {size}, the limit is {limit}"),
            "give only the command that starts the training",
        ));
    }
    long
}

/// The command of a text that starts a training. `variables`: those that its environment has.
pub(crate) fn parse(
    path: &Path,
    text: &str,
    file: FileId,
    variables: &BTreeMap<String, String>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Command> {
    let form = Form::of(path);
    if refuse_long(text, file, diagnostics)
        || script::refuse_line_ends(text, form, file, diagnostics)
    {
        return None;
    }
    let lines = match shell::read(text, file, form, variables) {
        Ok(lines) => lines,
        Err(at) => {
            let blank = script::blank(&text[at.start..at.end], at);
            diagnostics.push(blank.unwrap_or_else(|| {
                Diagnostic::error(
                    "yaml-syntax",
                    Some(at),
                    "the script cannot be parsed here: a quote or bracket is not closed, a word is out of place, or the nesting is too deep",
                    AS_EXPANDED,
                )
                .of_batch()
            }));
            return None;
        }
    };
    let line = variables.get(script::LINE).map(String::as_str);
    let found = training(&lines, (text, file), Some(line), diagnostics)?;
    script::refuse_blanks(form, &found, diagnostics);
    if !script::warn_of_escaped_end(text, form, &found, diagnostics) {
        script::warn_of_torn(&lines, &found, diagnostics);
    }
    Some(understand(&found, diagnostics))
}

/// The command of words that the user typed.
pub(crate) fn of_typed(typed: &Typed, diagnostics: &mut Vec<Diagnostic>) -> Option<Command> {
    if refuse_long(&typed.text, typed.file, diagnostics) {
        return None;
    }
    let text = (typed.text.as_str(), typed.file);
    let found = training(&typed.lines, text, None, diagnostics)?;
    script::warn_of_torn(&typed.lines, &found, diagnostics);
    Some(understand(&found, diagnostics))
}

/// The command of a launcher without its program's arguments. `None`: it has no words.
pub(crate) fn of_launcher(launch: &Launch, diagnostics: &mut Vec<Diagnostic>) -> Option<Command> {
    let launcher = Candidate {
        last: launch.words.last()?.span,
        launch: launch.clone(),
        words: &[],
        project: None,
    };
    Some(understand(&launcher, diagnostics))
}

/// The only command of a text that starts a training. `line`: the given line of a script; `None`: it is no script.
fn training<'w>(
    lines: &'w [Line],
    text: (&str, FileId),
    line: Option<Option<&str>>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Candidate<'w>> {
    if let [first, second, ..] = lines
        && script::begins_with_option(first)
    {
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(second.words[0].span),
            "these arguments continue on another line without a `\\` before it",
            "end each line but the last with `\\`, or name the file `.args`",
        ));
        return None;
    }
    let mut candidates = script::candidates(lines, text);
    if let Some(line) = line.flatten() {
        script::choose(&mut candidates, line, diagnostics);
    }
    if let Some(project) = projects::of_script(text.0)
        && let Some(first) = candidates.first_mut()
        && first.project.is_none()
    {
        first.project = Some(Given::new("command", project, first.words[0].span));
    }
    if script::refuse_unread(lines, &candidates, diagnostics) {
        return None;
    }
    // `python prepare.py` beside `eval $COMMAND`.
    if !script::is_training(&candidates)
        && let Some(hidden) = unresolved::program(lines)
    {
        diagnostics.push(hidden);
        return None;
    }
    if candidates
        .first()
        .is_none_or(|found| found.project.is_none())
    {
        script::refuse_others(&candidates, line.is_some(), diagnostics);
    }
    let Some(found) = candidates.into_iter().next() else {
        diagnostics.push(unresolved::program(lines).unwrap_or_else(|| {
            let words = || lines.iter().filter_map(|line| line.words.first());
            let first = words().next();
            if let Some(remote) = words().find(|word| ["ssh", "pdsh"].contains(&word.text.as_str())) {
                return Diagnostic::error(
                    "unknown-dialect",
                    Some(remote.span),
                    format!("`{}` starts what it starts on other machines, which is not read", remote.text),
                    "give the command that runs there, after `--`",
                ).of_batch();
            }
            let torn = lines.iter().skip(1).find(|line| script::begins_with_option(line));
            if let Some(word) = torn.and_then(|line| line.words.first()) {
                return script::torn(word);
            }
            if let Some(other) = script::other_script(lines) {
                return other;
            }
            Diagnostic::error(
                "unknown-dialect",
                first.map(|word| word.span),
                "no command here starts a training",
                "give the whole command, such as `torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 8`, or its arguments",
            ).of_batch()
        }));
        return None;
    };
    // `$LAUNCHER train.py`: the world and how it is sharded would be unknown.
    let launcher = found.words.iter().find(|word| word.assignment().is_none());
    if launcher.is_some_and(Word::is_unresolved) {
        diagnostics.extend(unresolved::program(lines));
    }
    unresolved::warn_of_defaults(found.words, diagnostics);
    Some(found)
}

fn understand(found: &Candidate<'_>, diagnostics: &mut Vec<Diagnostic>) -> Command {
    let Candidate {
        launch,
        last,
        project,
        ..
    } = found;
    let first = launch.arguments.first();
    let start = first.map_or(*last, |word| word.span);
    let hydra = hydra::call(launch).filter(|_| project.is_none());
    let mut overrides = Vec::new();
    if let Some(call) = &hydra {
        for word in &call.overrides {
            overrides.extend(hydra::resolved(word, diagnostics));
        }
        diagnostics.extend(call.hidden.map(hydra::hidden_overrides));
    }
    let words = match (&hydra, project) {
        (None, None) => launch.arguments.as_slice(),
        _ => &[],
    };
    unresolved::refuse(launch, words, diagnostics);
    let Arguments {
        root: mut arguments,
        loose,
        unresolved,
    } = arguments::tree(words, start, diagnostics);
    unresolved::take_values(&mut arguments, &unresolved, diagnostics);
    refuse_hydra(&loose, diagnostics);
    refuse_after_config(&arguments, diagnostics);
    refuse_tied_config(launch, words, diagnostics);
    if launch.is_trl()
        && let Value::Mapping(entries) = &mut arguments.value
    {
        entries.retain(|entry| !launcher::is_for_trls_launcher(&entry.name));
    }
    // TRL and the handbook take `--config recipe.yaml`; transformers' scripts take a JSON or YAML file
    // as their only argument.
    let file = |key| {
        let node = arguments.get(key)?;
        Some(Given::new(key, PathBuf::from(node.text()?), node.span))
    };
    let raw = file("deepspeed_config");
    let deepspeed = raw.is_some();
    let named = raw.or_else(|| file("config"));
    arguments.remove_path("config");
    let only = loose.iter().find(|word| is_config(Path::new(&word.text)));
    let only = only.filter(|_| named.is_none());
    diagnostics.extend(launch.refused.clone());
    Command {
        arguments,
        hydra: hydra.map(|call| Given::new("config", call.root, start)),
        overrides,
        project: project.clone(),
        only_config: only.is_some(),
        config: named
            .or(only.map(|word| Given::new("config", PathBuf::from(&word.text), word.span))),
        deepspeed,
        accelerate: stated(launch, start),
        computed_for: world::computed_for(words),
        end: end_of_options(launch, *last),
        launch: launch.clone(),
    }
}

/// What a command states for `accelerate launch`.
fn stated(launch: &Launch, start: Span) -> Stated {
    if ![Launcher::Accelerate, Launcher::Trl].contains(&launch.launcher) {
        return Stated::default();
    }
    let reads = !launch.is_trl() || !launch.options.is_empty();
    Stated {
        config: launch.config(),
        tree: reads.then(|| accelerate::options::tree(&launch.options, "--", start)),
        options: Some(launch.options.clone()),
    }
}

/// Byte offset at which arguments may be added: after the last word, but before `--`, which ends the
/// options.
fn end_of_options(launch: &Launch, last: Span) -> usize {
    let words = &launch.arguments;
    let Some(at) = words.iter().position(|word| word.text == "--") else {
        return last.end;
    };
    let before = at.checked_sub(1).and_then(|at| words.get(at));
    match before.or(launch.program.as_ref()) {
        Some(before) => before.span.end,
        // At the blank before `--`.
        None => words[at].span.start.saturating_sub(1),
    }
}

/// Refuses Hydra overrides (`loss=dpo`) beside arguments that no Hydra program takes. After `--`, `loose` has the options of
/// another command with their values (`--remap a=b`).
fn refuse_hydra(loose: &[Word], diagnostics: &mut Vec<Diagnostic>) {
    let is_value = |at: usize| {
        let before = at.checked_sub(1).and_then(|before| loose.get(before));
        before.is_some_and(|word| word::is_long_option(&word.text) && !word.text.contains('='))
    };
    let mut found = loose.iter().enumerate();
    let found = found.find(|(at, word)| hydra::is_override(&word.text) && !is_value(*at));
    if let Some((_, word)) = found {
        let text = short(&word.text);
        diagnostics.push(
            Diagnostic::error(
                "unknown-dialect",
                Some(word.span),
                format!("`{text}` is a Hydra override, but other arguments of this command are not"),
                format!("pass the config tree and the overrides, `evenkeel plan config {text} …`, and an accelerate config with `--accelerate FILE`"),
            )
            .of_batch(),
        );
    }
}

/// Refuses `--config=FILE` for TRL. Its parser expects `--config` as a separate word (f2cd577,
/// `scripts/utils.py`, `parse_args_and_config`) and treats `--config=FILE` as an unknown argument.
fn refuse_tied_config(launch: &Launch, words: &[Word], diagnostics: &mut Vec<Diagnostic>) {
    let script = launch.script();
    let trainer = script.and_then(|script| handbook::trainer_of(script.value));
    let tied = |word: &&Word| word.text.starts_with("--config=");
    if let (Some(_), Some(word)) = (trainer, words.iter().rev().find(tied)) {
        let file = word.after("--config=".len()).text;
        diagnostics.push(Diagnostic::error(
            "unknown-key",
            Some(word.span),
            format!("TRL refuses `--config={file}` as an unknown argument"),
            format!("write it as two words, `--config {file}`"),
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

/// Removes from a recipe the keys that TRL's command line passes to its launcher (`num_processes: 4`). TRL
/// passes on every key that the trainer does not know. A launcher's config has the same keys and stays unchanged.
pub(crate) fn take_launch(root: &mut Node) -> Stated {
    let (mut config, mut options) = (None, Vec::new());
    let span = root.span;
    if accelerate::looks_like_one(root) {
        return Stated::default();
    }
    let Value::Mapping(entries) = &mut root.value else {
        return Stated::default();
    };
    entries.retain(|entry| {
        let name = entry.name.as_str();
        let text = entry.value.text().filter(|_| is_launcher_key(name));
        let Some(text) = text else {
            return true;
        };
        let at = entry.value.span;
        match name {
            TRL_CONFIG => config = Some(Config::of_trl(text.to_owned(), at)),
            "config_file" => config = Some(Config::File(PathBuf::from(text), Some(at))),
            name => options.push(Opt {
                name: name.to_owned(),
                at,
                value: Some(Word::new(text, at, 0)),
            }),
        }
        false
    });
    if options.is_empty() {
        return Stated {
            config,
            ..Stated::default()
        };
    }
    Stated {
        config,
        tree: Some(accelerate::options::tree(&options, "", span)),
        options: Some(options),
    }
}

/// Whether `after` starts the same program as `before` with the same arguments, except that the keys in
/// `numbers` have the given values. An added word may become another option's value or an option of the launcher.
pub(crate) fn only_numbers_changed(
    path: &Path,
    (before, after): (&str, &str),
    variables: &BTreeMap<String, String>,
    numbers: &[(String, u64)],
) -> bool {
    let read = |text: &str| {
        let mut diagnostics = Vec::new();
        let command = parse(path, text, FileId(0), variables, &mut diagnostics)?;
        (!has_error(&diagnostics)).then_some(command)
    };
    let (Some(before), Some(after)) = (read(before), read(after)) else {
        return false;
    };
    let has = |(key, number): &(String, u64)| {
        let text = after.arguments.get(key).and_then(Node::text);
        text.and_then(|text| text.parse().ok()) == Some(*number)
    };
    let rest = |command: &Command| {
        let mut arguments = command.arguments.clone();
        if let Value::Mapping(entries) = &mut arguments.value {
            entries.retain(|entry| !numbers.iter().any(|(key, _)| *key == entry.name));
        }
        arguments
    };
    numbers.iter().all(has)
        && rest(&before).same_value(&rest(&after))
        && before.program() == after.program()
        && before.recipe() == after.recipe()
}

#[cfg(test)]
pub(crate) mod tests;
