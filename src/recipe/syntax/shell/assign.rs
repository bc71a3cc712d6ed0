//! How a command changes a script's variables: by assignments, by the names among its arguments and by
//! arithmetic in any of its words.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.9.1 and 2.15; declarations, `read` and the like as in
//! bash 5.2.

use super::arithmetic::{self, Assigns};
use super::scan::{ARITHMETIC, Line};
use crate::recipe::syntax::shell::word::{Assignment, Unresolved, Word};

/// Commands whose arguments are assignments.
const ASSIGNING: [&str; 5] = ["export", "readonly", "declare", "typeset", "local"];

/// Commands that set the variables among their arguments to unknown values.
const CHANGING: [&str; 5] = ["read", "mapfile", "readarray", "getopts", "unset"];

/// Commands that may assign any variable.
const ANYTHING: [&str; 3] = ["source", ".", "eval"];

/// Prefixes of a shell command that do not change its effect on variables.
const BEFORE: [&str; 2] = ["command", "builtin"];

/// A change to the variables of a script.
pub(crate) enum Change<'l> {
    /// Assigns a value if the line is certain. Holds the word of the assignment.
    Assigns(Assignment<'l>, &'l Word),
    /// Assigns a value that differs from the text (`declare -i N=1+1`).
    Doubts(Assignment<'l>, &'l Word),
    Exports(&'l str),
    /// Assigns an unknown value at a byte offset.
    Changes(&'l str, usize),
    /// Assigns an unknown value at a byte offset if the variable is unset (`${NAME:=4}`).
    Defaults(&'l str, usize),
    /// May change any earlier variable.
    ChangesAnything,
    /// Declares a name reference (`declare -n`).
    Renames,
}

/// The changes that a command makes, in order.
pub(crate) fn changes(line: &Line) -> Vec<Change<'_>> {
    let mut changes = Vec::new();
    for word in &line.words {
        of_word(word, &mut changes);
    }
    let assigns = |word: &&Word| word.assignment().is_some();
    let before = line.words.iter().take_while(assigns).count();
    let mut words = &line.words[before..];
    while let Some((first, rest)) = words.split_first()
        && BEFORE.contains(&first.text.as_str())
    {
        words = rest;
    }
    let Some((first, arguments)) = words.split_first() else {
        let words = line.words.iter();
        let assigned = words.filter_map(|word| Some(Change::Assigns(word.assignment()?, word)));
        changes.extend(assigned);
        return changes;
    };
    match first.text.as_str() {
        name if ASSIGNING.contains(&name) => {
            declared(name, &line.words[..before], arguments, &mut changes);
        }
        "let" | ARITHMETIC => arguments
            .iter()
            .for_each(|word| arithmetic(word, &mut changes)),
        "for" | "select" => match arguments {
            [head, expression] if head.text == ARITHMETIC => arithmetic(expression, &mut changes),
            _ => named(&arguments[..arguments.len().min(1)], &mut changes),
        },
        // Without `-v` it prints.
        "printf" => match arguments {
            [option, name, ..] if option.text == "-v" => {
                named(std::slice::from_ref(name), &mut changes);
            }
            [option, ..] if option.text.starts_with("-v") => changes.push(Change::ChangesAnything),
            _ => {}
        },
        name if CHANGING.contains(&name) => named(arguments, &mut changes),
        name if ANYTHING.contains(&name) => changes.push(Change::ChangesAnything),
        _ => {}
    }
    changes
}

/// `export NAME=value`, `declare -x "NAME=value"`; `before`: assignments in front of the command.
fn declared<'l>(
    name: &str,
    before: &'l [Word],
    arguments: &'l [Word],
    changes: &mut Vec<Change<'l>>,
) {
    let flags = || arguments.iter().filter(|word| word.text.starts_with('-'));
    // Flags such as `-i` change the value.
    let plain = name != "local" && flags().all(|word| word.text == "-x");
    let renames = |word: &Word| name != "export" && word.text.contains('n');
    if flags().any(renames) {
        changes.push(Change::Renames);
    }
    for word in before.iter().chain(arguments) {
        if word.text.starts_with('-') {
            continue;
        }
        let Some(assignment) = word.assigned_by_command() else {
            if !word.unresolved.is_empty() {
                changes.push(Change::ChangesAnything);
            } else if name == "export" {
                changes.push(Change::Exports(&word.text));
            }
            continue;
        };
        if name == "export" {
            changes.push(Change::Exports(assignment.name));
        }
        changes.push(match plain {
            true => Change::Assigns(assignment, word),
            false => Change::Doubts(assignment, word),
        });
    }
}

/// Marks the variables that words name as changed. Options among the words do no harm.
fn named<'l>(words: &'l [Word], changes: &mut Vec<Change<'l>>) {
    for word in words {
        if !word.unresolved.is_empty() {
            changes.push(Change::ChangesAnything);
        }
        let name = word.text.split(['=', '+', '[']).next().unwrap_or_default();
        changes.push(Change::Changes(name, word.span.start));
    }
}

fn arithmetic<'l>(word: &'l Word, changes: &mut Vec<Change<'l>>) {
    assigned(&word.text, word.span.start, changes);
}

fn assigned<'l>(expression: &'l str, at: usize, changes: &mut Vec<Change<'l>>) {
    match arithmetic::assigns(expression) {
        Assigns::Names(names) => {
            changes.extend(names.into_iter().map(|name| Change::Changes(name, at)));
        }
        Assigns::Anything => changes.push(Change::ChangesAnything),
    }
}

/// The changes that the expansions in a word and in its array items make.
fn of_word<'l>(word: &'l Word, changes: &mut Vec<Change<'l>>) {
    for Unresolved { start, end, .. } in &word.unresolved {
        let expansion = &word.text[*start..*end];
        let at = word.span.start;
        let arithmetic = expansion
            .strip_prefix("$((")
            .or_else(|| expansion.strip_prefix("$["));
        if let Some(expression) = arithmetic {
            assigned(expression, at, changes);
        } else if let Some(inside) = expansion.strip_prefix("${") {
            let (name, more) = inside.split_at(inside.find([':', '=']).unwrap_or(0));
            if more.starts_with('=') || more.starts_with(":=") {
                changes.push(Change::Defaults(name, at));
            }
            if inside.contains("$((") {
                assigned(inside, at, changes);
            }
        }
    }
    for item in word.items.iter().flatten() {
        of_word(item, changes);
    }
}
