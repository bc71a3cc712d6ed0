//! What a command changes of a script's variables: its assignments, the names that it is told, and what
//! arithmetic in any of its words does.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.9.1 and 2.15; declarations, `read` and the like as in
//! bash 5.2.

use super::arithmetic::{self, Assigns};
use super::scan::{ARITHMETIC, Line};
use super::words::{Assignment, Hole, Word};

/// Commands that assign what stands behind them.
const ASSIGNING: [&str; 5] = ["export", "readonly", "declare", "typeset", "local"];

/// Commands that give the variables that they name values of their own.
const CHANGING: [&str; 5] = ["read", "mapfile", "readarray", "getopts", "unset"];

/// Commands that may assign anything.
const ANYTHING: [&str; 3] = ["source", ".", "eval"];

/// Words before a command of the shell that change nothing of it.
const BEFORE: [&str; 2] = ["command", "builtin"];

/// What happens to a variable.
pub(super) enum Change<'l> {
    /// It is given a value where the line is certain; the word of the assignment.
    Assigns(Assignment<'l>, &'l Word),
    /// The same, with a value that means something else than it says.
    Doubts(Assignment<'l>, &'l Word),
    /// Programs find it in their environment.
    Exports(&'l str),
    /// It is given a value that is not known; where.
    Changes(&'l str, usize),
    /// It is so if it has none (`${NAME:=4}`).
    Defaults(&'l str, usize),
    /// Any of those before may have been changed.
    ChangesAnything,
    /// A name stands for another one from here on.
    Renames,
}

/// What a command changes, in the order of writing.
pub(super) fn changes(line: &Line) -> Vec<Change<'_>> {
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
    let Some((first, told)) = words.split_first() else {
        let own = line.words.iter();
        let own = own.filter_map(|word| Some(Change::Assigns(word.assignment()?, word)));
        changes.extend(own);
        return changes;
    };
    match first.text.as_str() {
        name if ASSIGNING.contains(&name) => {
            declared(name, &line.words[..before], told, &mut changes);
        }
        "let" | ARITHMETIC => told.iter().for_each(|word| arithmetic(word, &mut changes)),
        "for" | "select" => match told {
            [head, expression] if head.text == ARITHMETIC => arithmetic(expression, &mut changes),
            _ => named(&told[..told.len().min(1)], &mut changes),
        },
        // Without `-v` it prints.
        "printf" => match told {
            [option, name, ..] if option.text == "-v" => {
                named(std::slice::from_ref(name), &mut changes);
            }
            [option, ..] if option.text.starts_with("-v") => changes.push(Change::ChangesAnything),
            _ => {}
        },
        name if CHANGING.contains(&name) => named(told, &mut changes),
        name if ANYTHING.contains(&name) => changes.push(Change::ChangesAnything),
        _ => {}
    }
    changes
}

/// `export NAME=value`, `declare -x "NAME=value"`; `before`: assignments in front of the command.
fn declared<'l>(name: &str, before: &'l [Word], told: &'l [Word], changes: &mut Vec<Change<'l>>) {
    let flags = || told.iter().filter(|word| word.text.starts_with('-'));
    // `-i` and its like give the value another meaning.
    let plain = name != "local" && flags().all(|word| word.text == "-x");
    let renames = |word: &Word| name != "export" && word.text.contains('n');
    if flags().any(renames) {
        changes.push(Change::Renames);
    }
    for word in before.iter().chain(told) {
        if word.text.starts_with('-') {
            continue;
        }
        let Some(assignment) = word.assigned_by_command() else {
            if !word.holes.is_empty() {
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

/// Words that are names of variables, options among them.
fn named<'l>(words: &'l [Word], changes: &mut Vec<Change<'l>>) {
    for word in words {
        if !word.holes.is_empty() {
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

/// What the expansions of a word and of the items in it change.
fn of_word<'l>(word: &'l Word, changes: &mut Vec<Change<'l>>) {
    for Hole { start, end, .. } in &word.holes {
        let hole = &word.text[*start..*end];
        let at = word.span.start;
        let arithmetic = hole.strip_prefix("$((").or_else(|| hole.strip_prefix("$["));
        if let Some(expression) = arithmetic {
            assigned(expression, at, changes);
        } else if let Some(inside) = hole.strip_prefix("${") {
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
