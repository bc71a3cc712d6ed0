//! Arguments that the text does not say: `train.py $ARGS`, `"$@"`. Numbers of the batch may be among
//! them, so a batch without them would be invented.

use std::collections::HashSet;

use super::hydra;
use super::words::{Unsaid, Word};
use crate::recipe::diagnostic::Diagnostic;
use crate::recipe::handbook::{self, keys};
use crate::recipe::node::{Node, Value};
use crate::recipe::source::Span;
use crate::recipe::suggest::short;

/// Options whose values are mappings or files with numbers of the batch in them.
const HOLDING: [&str; 3] = ["accelerator_config", "config", "parallelism_config"];

/// The options that settle the batch, each by one of its names.
const SETTLING: [&[&str]; 2] = [
    &["per_device_train_batch_size", "per_gpu_train_batch_size"],
    &["gradient_accumulation_steps"],
];

/// Refuses a command in which numbers of the batch may be hidden. `of_launcher`: a word that may be
/// options of `accelerate launch`, which say the processes and more.
pub(super) fn refuse(
    arguments: &[Word],
    of_launcher: Option<&Word>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    if let Some(word) = of_launcher {
        let text = shown(word);
        diagnostics.push(Diagnostic::error(
            "global-batch-unknown",
            Some(word.span),
            format!("`{text}` may stand for further options of the launcher, and for which is not in the text: the processes may be among them"),
            "give the command as the shell expands it, `evenkeel plan … -- COMMAND`",
        ));
    }
    let settle = |words: &[Word]| SETTLING.iter().all(|names| says(words, names));
    let Some((at, word)) = last(arguments, settle(arguments)) else {
        return;
    };
    if settle(&arguments[at + 1..]) {
        return;
    }
    let text = shown(word);
    diagnostics.push(Diagnostic::error(
        "global-batch-unknown",
        Some(word.span),
        format!("`{text}` may stand for further arguments, and for which is not in the text: numbers of the batch may be among them"),
        "give the command as the shell expands it, `evenkeel plan … -- COMMAND`, or write `--per_device_train_batch_size N --gradient_accumulation_steps N` after it: what comes last counts",
    ));
}

/// A variable among the overrides of a Hydra program that may hold more of them.
pub(super) fn hidden_overrides(word: &Word, arguments: &[Word]) -> Diagnostic {
    let [size, accumulation] = hydra::settling(arguments);
    Diagnostic::error(
        "global-batch-unknown",
        Some(word.span),
        format!(
            "`{}` may stand for further overrides, and for which is not in the text: numbers of the batch may be among them",
            shown(word)
        ),
        format!(
            "give the command as the shell expands it, `evenkeel plan … -- COMMAND`, or write `{size}=N {accumulation}=N` after it: what comes last counts"
        ),
    )
}

/// Parts of the names of options that the batch, the world or a length hangs on.
const COUNTED: [&str; 17] = [
    "batch",
    "core",
    "cpu",
    "cuda",
    "degree",
    "device",
    "drop_last",
    "episode",
    "epoch",
    "examples",
    "generation",
    "iteration",
    "ratio",
    "rollout",
    "samples",
    "size",
    "step",
];

/// Whether the batch, the world or a length may hang on an option.
pub(super) fn is_counted(name: &str) -> bool {
    COUNTED.iter().any(|part| name.contains(part))
}

/// Takes out numbers and truth values that the text does not say, with a word about them: the plan is the
/// same without them. Refuses those that it hangs on. `names`: the keys of such values.
pub(super) fn take_values(
    arguments: &mut Node,
    names: &HashSet<String>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let Value::Mapping(entries) = &mut arguments.value else {
        return;
    };
    entries.retain(|entry| {
        let name = entry.name.as_str();
        let kind = keys::agreed(name).filter(|_| names.contains(name));
        let Some(keys::Kind::Int | keys::Kind::Float | keys::Kind::Bool) = kind else {
            return true;
        };
        let text = short(entry.value.text().unwrap_or_default());
        diagnostics.push(match is_counted(name) {
            true => unknown(name, &text, entry.value.span),
            false => left_out(name, &text, entry.value.span),
        });
        false
    });
}

/// A number of the batch is not in the text.
pub(super) fn unknown(name: &str, text: &str, at: Span) -> Diagnostic {
    Diagnostic::error(
        "global-batch-unknown",
        Some(at),
        format!(
            "`{name}` is `{text}`, which is not in the text: the shell or its environment says it"
        ),
        "give the command as the shell expands it, `evenkeel plan … -- COMMAND`, or write the value",
    )
}

/// A value that is not in the text, and that no number of the batch hangs on.
pub(super) fn left_out(name: &str, text: &str, at: Span) -> Diagnostic {
    Diagnostic::warning(
        "wrong-type",
        Some(at),
        format!("`{name}` is `{text}`, which is not in the text: the plan is made without it"),
        "nothing to do, no number of the batch hangs on it; `evenkeel plan … -- COMMAND` takes the command as the shell expands it",
    )
}

/// A word in a message, which is one line.
fn shown(word: &Word) -> String {
    short(word.text.lines().next().unwrap_or_default())
}

/// The last word that may be arguments, and its position. `settled`: the batch is said somewhere.
fn last(arguments: &[Word], settled: bool) -> Option<(usize, &Word)> {
    let mut found = None;
    let mut option: Option<String> = None;
    for (at, word) in arguments.iter().enumerate() {
        let own = word.option().filter(|_| word.text.starts_with("--"));
        if word
            .unsaid()
            .is_some_and(|how| hides(word, how, option.as_deref(), settled))
        {
            found = Some((at, word));
        }
        option = own.and_then(|(name, tied)| tied.is_none().then_some(name));
    }
    found
}

/// Whether a word may hide arguments. `option`: what stands before it and takes it for its value.
fn hides(word: &Word, how: Unsaid, option: Option<&str>, settled: bool) -> bool {
    if word.holes.iter().any(|hole| hole.all) {
        return true;
    }
    if let Some((name, tied)) = word.option() {
        // The name of the option itself, or a value that holds more than one number.
        return match tied {
            Some(value) => value.holes.len() < word.holes.len() || HOLDING.contains(&name.as_str()),
            None => true,
        };
    }
    // An option that nobody knows most likely takes it; hardly anybody types a batch and hides another.
    let takes = |name| handbook::takes_value(name) || (settled && !handbook::is_switch(name));
    let holding = option.is_some_and(|name| HOLDING.contains(&name));
    match how {
        Unsaid::Part => holding,
        // A value in any case, but for a switch that has none.
        Unsaid::Whole => holding || option.is_none_or(handbook::is_switch),
        Unsaid::Number => holding || !option.is_some_and(takes),
    }
}

/// Whether words give one of these options a value that the text says.
fn says(words: &[Word], names: &[&str]) -> bool {
    words.iter().enumerate().any(|(at, word)| {
        let option = word.option().filter(|_| word.text.starts_with("--"));
        let Some((name, tied)) = option else {
            return false;
        };
        let value = tied.or_else(|| words.get(at + 1).cloned());
        names.contains(&name.as_str()) && value.is_some_and(|value| value.holes.is_empty())
    })
}
