//! Unresolved arguments: `train.py $ARGS`, `"$@"`. They may hold batch numbers, so a batch that ignores
//! them would be a guess.

use std::collections::HashSet;

use super::launcher::{Launch, Launcher};
use crate::recipe::dialects::handbook::{self, keys};
use crate::recipe::schema::reading::IN_FOLDER;
use crate::recipe::schema::request::Request;
use crate::recipe::syntax::diagnostic::{Diagnostic, Next};
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::shell::word::{
    UnresolvedExtent, Word, is_name, is_of_name, values_of, variable,
};
use crate::recipe::syntax::shell::{ARGUMENTS, Line, is_shell_hook};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::short;

/// The help of every refusal of what only the shell knows.
pub(crate) const AS_EXPANDED: &str =
    "give the command as the shell expands it: `evenkeel plan … -- COMMAND`";

/// The beginning of a command that gives a variable beside the script.
const WITH_VALUE: &str = "`evenkeel plan SCRIPT ";

/// Names the script and the world in the commands that the diagnostics propose.
pub(crate) fn name_script(diagnostics: &mut [Diagnostic], request: &Request) {
    for found in diagnostics {
        if request.path.as_os_str().is_empty() && found.help.contains(WITH_VALUE) {
            AS_EXPANDED.clone_into(&mut found.help);
        }
        if let Some((folder, _)) = found.help.split_once(IN_FOLDER)
            && let Some((_, folder)) = folder.rsplit_once("`cd ")
            && let Some(name) = request
                .path
                .strip_prefix(folder.trim_end_matches(" && "))
                .ok()
        {
            let inside = Request {
                path: name.to_owned(),
                ..request.clone()
            };
            let command = format!("cd {folder}{}", inside.plan_with(&[]));
            found.help = found
                .help
                .replace(&format!("cd {folder}{IN_FOLDER}"), &command);
            found.next = Next::command(command);
            continue;
        }
        let given = found
            .help
            .split_once(WITH_VALUE)
            .and_then(|(_, rest)| rest.split('`').next());
        if let Some(given) = given
            && found.is_error()
        {
            found.next = Next::words(given.split(' '));
        }
        let named = format!("`{} ", request.plan_with(&[]));
        found.help = found.help.replace(WITH_VALUE, &named);
    }
}

/// Options whose value is a mapping or a file that may hold batch numbers.
const HOLDING: [&str; 3] = ["accelerator_config", "config", "parallelism_config"];

/// The options that fix the batch. A command gives each of them under one of its names.
const SETTLING: [&[&str]; 2] = [
    &["per_device_train_batch_size", "per_gpu_train_batch_size"],
    &["gradient_accumulation_steps"],
];

/// Refuses a command whose unresolved words may hold batch numbers. `arguments`: those of them that are read. With
/// `accelerate launch` a word among the launcher's options may set the number of processes and more.
pub(crate) fn refuse(launch: &Launch, arguments: &[Word], diagnostics: &mut Vec<Diagnostic>) {
    let hidden = launch.hidden.as_ref();
    let hidden = hidden.filter(|_| launch.launcher == Launcher::Accelerate);
    if let Some(word) = hidden {
        let text = shown(word);
        diagnostics.push(Diagnostic::error(
            "global-batch-unknown",
            Some(word.span),
            format!("`{text}` is unresolved and may hold further launcher options, such as the number of processes"),
            AS_EXPANDED,
        ).of_batch());
    }
    let settle = |words: &[Word]| SETTLING.iter().all(|names| gives(words, names));
    let hiding = hiding(arguments, settle(arguments));
    let Some((at, word)) = hiding.last().copied() else {
        return;
    };
    if settle(&arguments[at + 1..]) {
        return;
    }
    let text = shown(word);
    let mut values: Vec<String> = Vec::new();
    for (_, word) in &hiding {
        let value = variable(&word.text).map(|name| format!("{name}=VALUE"));
        values.extend(value.filter(|value| !values.contains(value)));
    }
    diagnostics.push(Diagnostic::error(
        "global-batch-unknown",
        Some(word.span),
        format!("`{text}` is unresolved and may hold further arguments, such as the batch size"),
        match variable(&text) {
            Some(_) => format!(
                "give its value beside the script, `evenkeel plan SCRIPT {}`, or the command as the shell expands it after \
                 `--`",
                values.join(" ")
            ),
            None if ["$@", "$*"].contains(&text.as_str()) => format!(
                "give the arguments of the script beside it, `evenkeel plan SCRIPT {ARGUMENTS}=` if it gets none, or the \
                 command as the shell expands it after `--`"
            ),
            None => format!(
                "{AS_EXPANDED}, or write `--per_device_train_batch_size N --gradient_accumulation_steps N` after it: the \
                 last value counts"
            ),
        },
    ).of_batch());
}

/// The error for a script in which only an unresolved word can start the training: `bash -c "$LAUNCHER $CMD"`.
pub(crate) fn program(lines: &[Line]) -> Option<Diagnostic> {
    let mut programs = lines.iter().filter_map(|line| {
        let mut words = line.words.iter().filter(|word| word.assignment().is_none());
        let first = words.next()?;
        if first.text == "eval" {
            words.next()
        } else {
            Some(first)
        }
    });
    let word = programs.find(|word| word.is_unresolved() && !is_shell_hook(&word.text))?;
    Some(
        Diagnostic::error(
            "global-batch-unknown",
            Some(word.span),
            format!("`{}` is unresolved and may start the training", shown(word)),
            AS_EXPANDED,
        )
        .of_batch(),
    )
}

/// Name parts of the options on which the batch, the world size or a length depends.
const COUNTED: Words = Words(
    "batch core cpu cuda degree device drop_last episode epoch examples generation iteration \
     ratio rollout samples size step",
);

/// Whether the batch, the world size or a length may depend on an option.
pub(crate) fn is_counted(name: &str) -> bool {
    COUNTED.iter().any(|part| name.contains(part))
}

/// Removes unresolved numbers and booleans. A value that the plan does not depend on gives a warning, any
/// other an error. `names`: the keys with unresolved values.
pub(crate) fn take_values(
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
        diagnostics.push(if is_counted(name) {
            unknown(name, &text, entry.value.span)
        } else {
            left_out(name, &text, entry.value.span)
        });
        false
    });
}

/// The error for an unresolved batch number.
pub(crate) fn unknown(name: &str, text: &str, at: Span) -> Diagnostic {
    Diagnostic::error(
        "global-batch-unknown",
        Some(at),
        format!("`{name}` is unresolved: only the shell or its environment knows `{text}`"),
        match given(text) {
            Some(given) => format!(
                "give the value beside the script, `evenkeel plan SCRIPT {given}`, or write it there"
            ),
            None => format!("{AS_EXPANDED}, or write the value"),
        },
    ).of_batch()
}

/// The words that give a variable, or all variables of a calculation: `$((BATCH / WORLD_SIZE))`.
fn given(text: &str) -> Option<String> {
    let inside = text
        .strip_prefix("$((")
        .and_then(|text| text.strip_suffix("))"));
    let mut names: Vec<&str> = match inside {
        Some(inside) => inside
            .split(|c| !is_of_name(c))
            .filter(|name| is_name(name))
            .collect(),
        None => Vec::from_iter(variable(text)),
    };
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(*name));
    let words: Vec<String> = names.iter().map(|name| format!("{name}=VALUE")).collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// The warning for an unresolved value on which no batch number depends.
pub(crate) fn left_out(name: &str, text: &str, at: Span) -> Diagnostic {
    Diagnostic::warning(
        "wrong-type",
        Some(at),
        format!("`{name}` is unresolved: the plan ignores `{text}`"),
        match variable(text) {
            Some(variable) => format!(
                "nothing to do: no batch number depends on it; `evenkeel plan SCRIPT {variable}=VALUE` gives its value"
            ),
            None => format!("nothing to do: no batch number depends on it; {AS_EXPANDED}"),
        },
    )
}

/// Warns of every default that the environment may replace (`${N:-8}`).
pub(crate) fn warn_of_defaults(words: &[Word], diagnostics: &mut Vec<Diagnostic>) {
    let mut warned = HashSet::new();
    for word in words {
        for (name, default) in &word.defaults {
            if warned.insert(name) {
                diagnostics.push(Diagnostic::warning(
                    "wrong-type",
                    Some(word.span),
                    format!(
                        "the script does not assign `{}`: the plan takes its default `{}`",
                        short(name),
                        short(default)
                    ),
                    if name.starts_with(|first: char| first.is_ascii_digit()) {
                        format!("if the script is given `${name}`, write its value there")
                    } else {
                        format!("if the environment sets it, give its value beside the script, `evenkeel plan SCRIPT {name}=VALUE`")
                    },
                ));
            }
        }
    }
}

/// The first line of a word, shortened for a message.
pub(crate) fn shown(word: &Word) -> String {
    short(word.text.lines().next().unwrap_or_default())
}

/// The words that may expand to arguments, and their positions. `settled`: some words fix the batch.
fn hiding(arguments: &[Word], settled: bool) -> Vec<(usize, &Word)> {
    let mut found = Vec::new();
    let mut option: Option<String> = None;
    for (at, word) in arguments.iter().enumerate() {
        let long = word.long_option();
        if word
            .unresolved_extent()
            .is_some_and(|how| hides(word, how, option.as_deref(), settled))
        {
            found.push((at, word));
        }
        option = long.and_then(|(name, tied)| tied.is_none().then_some(name));
    }
    found
}

/// Whether a word may expand to arguments. `option`: the option before it, whose value it may be.
fn hides(word: &Word, how: UnresolvedExtent, option: Option<&str>, settled: bool) -> bool {
    if word.unresolved.iter().any(|part| part.all) {
        return true;
    }
    if let Some((name, tied)) = word.option() {
        // The option's name itself is unresolved, or its value may hold several numbers.
        return match tied {
            Some(value) => {
                value.unresolved.len() < word.unresolved.len() || HOLDING.contains(&name.as_str())
            }
            None => true,
        };
    }
    // An unknown option most likely takes the word as its value: a command that gives a batch rarely
    // holds another one in a variable.
    let takes = |name| handbook::takes_value(name) || (settled && !handbook::is_switch(name));
    let holding = option.is_some_and(|name| HOLDING.contains(&name));
    match how {
        UnresolvedExtent::Part => holding,
        // It is the option's value, unless the option is a switch.
        UnresolvedExtent::Whole => holding || option.is_none_or(handbook::is_switch),
        UnresolvedExtent::Number => holding || !option.is_some_and(takes),
    }
}

/// Whether words give one of these options a resolved value.
fn gives(words: &[Word], names: &[&str]) -> bool {
    let resolved = |value: Word| value.unresolved.is_empty();
    names
        .iter()
        .any(|name| values_of(words, name).any(resolved))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_a_calculation_are_named_once() {
        for (text, words) in [
            ("$N", Some("N=VALUE")),
            ("${N:-8}", Some("N=VALUE")),
            (
                "$((256 / WORLD_SIZE / $WORLD_SIZE))",
                Some("WORLD_SIZE=VALUE"),
            ),
            ("$((BATCH/(${GPUS} * 2)))", Some("BATCH=VALUE GPUS=VALUE")),
            ("$((256 / $1))", None),
            ("$(nproc)", None),
            ("$1", None),
        ] {
            assert_eq!(given(text).as_deref(), words, "{text}");
        }
    }
}
