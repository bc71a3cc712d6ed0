//! Command lines: what somebody typed to start a training, or keeps in a script or in a file of
//! arguments. `torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8` says how many
//! processes there are and what the trainer is told, and may name further files.

mod alone;
mod arguments;
mod launcher;
mod words;

use std::path::{Path, PathBuf};

use super::diagnostic::Diagnostic;
use super::node::Node;
use super::source::{FileId, Span};
use super::tree::{Given, Tree};

use launcher::Launched;
use words::{Lines, Word};

pub(super) use alone::alone;
pub(super) use launcher::PER_NODE;
pub(super) use words::join;

/// The commands of a text and their words, as a shell splits it.
pub(super) fn commands(text: &str) -> Vec<Vec<String>> {
    let commands = words::commands(text, FileId(0), Lines::AreCommands).into_iter();
    commands
        .map(|words| words.into_iter().map(|word| word.text).collect())
        .collect()
}

/// The name of the virtual file that holds a command given after `--`.
pub const COMMAND: &str = "command";

/// A command line that was understood.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Command {
    /// The trainer's arguments, `--key value`, as a mapping.
    pub arguments: Node,
    /// The program, or the trainer's name in TRL's command line.
    pub script: Option<Given<PathBuf>>,
    /// A recipe that the program is told to read.
    pub config: Option<PathBuf>,
    /// The recipe is a DeepSpeed config, and the arguments are the script's own business: a program
    /// that uses DeepSpeed without a trainer around it (`--deepspeed_config`).
    pub deepspeed: bool,
    /// The accelerate config that it is launched with.
    pub accelerate: Option<PathBuf>,
    /// Options of `accelerate launch`, as keys of its config.
    pub launch: Option<Node>,
    /// Processes that torchrun or DeepSpeed's launcher starts, as a native tree.
    pub world: Option<Node>,
    /// Where arguments may be added: after the last one.
    pub end: usize,
}

/// Whether a file holds a command line rather than YAML or JSON.
pub(super) fn is_one(path: &Path, text: &str) -> bool {
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
    first.is_some_and(|line| words::is_long_option(line) || launches(line))
}

/// The first command of a text that starts a training.
pub(super) fn parse(
    text: &str,
    file: FileId,
    is_switch: impl Fn(&str) -> bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Command> {
    let starts_so = text.trim_start().starts_with("--");
    let lines = if starts_so {
        Lines::AreSpaces
    } else {
        Lines::AreCommands
    };
    let commands = words::commands(text, file, lines);
    let found = commands
        .iter()
        .find_map(|words| Some((launcher::find(words)?, words.last()?)));
    if let Some((_, last)) = &found
        && !last.closed
    {
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(last.span),
            "a quote of the command is not closed",
            "end it: everything after it would be one word",
        ));
        return None;
    }
    let Some((launched, last)) = found else {
        let span = commands
            .first()
            .and_then(|words| words.first())
            .map(|word| word.span);
        diagnostics.push(Diagnostic::error(
            "unknown-dialect",
            span,
            "no command here starts a training",
            "give the whole call, as `torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 8`, or its arguments",
        ));
        return None;
    };
    Some(understand(&launched, last, is_switch, diagnostics))
}

fn understand(
    launched: &Launched<'_>,
    last: &Word,
    is_switch: impl Fn(&str) -> bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> Command {
    let start = launched.arguments.first().unwrap_or(last).span;
    let (mut arguments, loose) = arguments::tree(launched.arguments, start, is_switch, diagnostics);
    if launched.mixed {
        for key in launcher::TRL_PASSES_ON
            .iter()
            .chain([&launcher::TRL_CONFIG])
        {
            arguments.remove_path(key);
        }
    }
    let script = launched.script.map(|word| {
        let path = PathBuf::from(&word.text);
        Given::new("script", path, word.span)
    });
    // TRL and the handbook take `--config recipe.yaml`; transformers' scripts a JSON or YAML file
    // as their only argument.
    let file = |arguments: &Node, key| arguments.get(key).and_then(Node::text).map(PathBuf::from);
    let raw = file(&arguments, "deepspeed_config");
    let deepspeed = raw.is_some();
    let named = raw.or_else(|| file(&arguments, "config"));
    arguments.remove_path("config");
    let config = named.or_else(|| {
        let file = loose.iter().map(|word| Path::new(&word.text)).find(|path| {
            let extension = path.extension().and_then(|e| e.to_str());
            matches!(extension, Some("json" | "yaml" | "yml"))
        });
        file.map(Path::to_owned)
    });
    let accelerate = launched.accelerate.as_ref();
    let launch = accelerate.map(|call| launch_keys(&call.options, start));
    Command {
        arguments,
        script,
        config,
        deepspeed,
        accelerate: accelerate.and_then(|call| Some(PathBuf::from(&call.config.as_ref()?.text))),
        launch,
        world: launched.world.clone(),
        end: last.span.end,
    }
}

/// Options of `accelerate launch` as the keys of its config that they stand over.
fn launch_keys(options: &[(String, Option<Word>)], span: Span) -> Node {
    let mut tree = Tree::new(span);
    for (name, value) in options {
        let (path, text) = match (name.as_str(), value) {
            ("use_deepspeed", _) => ("distributed_type".to_owned(), "DEEPSPEED"),
            ("use_fsdp", _) => ("distributed_type".to_owned(), "FSDP"),
            ("use_megatron_lm", _) => ("distributed_type".to_owned(), "MEGATRON_LM"),
            ("multi_gpu", _) => ("distributed_type".to_owned(), "MULTI_GPU"),
            ("num_processes" | "num_machines" | "mixed_precision", Some(value)) => {
                (name.clone(), value.text.as_str())
            }
            (
                "zero_stage" | "gradient_accumulation_steps" | "deepspeed_config_file",
                Some(value),
            ) => (format!("deepspeed_config.{name}"), value.text.as_str()),
            (name, Some(value)) => {
                let prefixes = [
                    ("fsdp_", "fsdp_config"),
                    ("parallelism_config_", "parallelism_config"),
                    ("megatron_lm_", "megatron_lm_config"),
                ];
                let Some((_, part)) = prefixes.iter().find(|(prefix, _)| name.starts_with(prefix))
                else {
                    continue;
                };
                (format!("{part}.{name}"), value.text.as_str())
            }
            _ => continue,
        };
        let at = value.as_ref().map_or(span, |value| value.span);
        tree.plain(&path, &Given::new(format!("--{name}"), text, at));
    }
    tree.into_node()
}

#[cfg(test)]
mod tests;
