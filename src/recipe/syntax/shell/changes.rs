//! The variables that a script assigns only at places that certainly run, once, in the order of the text. Any other may
//! have another value at the command that uses it: loops, conditions, functions, `read`, arithmetic and the like
//! change it.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.9.1 and 2.15; declarations and `read` as in bash 5.2.

use crate::recipe::syntax::words::Words;

use std::collections::HashMap;
use std::ops::Range;

use tree_sitter::Node;

use super::text::Text;
use super::tree::{Place, START, check_gap, children, ends_line, places};
use super::word::{identifier, is_of_name};

/// The deepest nesting of a script.
const MAX_DEPTH: usize = 200;

/// Commands that may set the variables among their arguments.
const SETTING: Words = Words(
    "read mapfile readarray getopts unset export declare typeset local let trap alias printf wait",
);

/// Those of them that do so only with an option.
const SETTING_WITH: [(&str, &str); 2] = [("printf", "-v"), ("wait", "-p")];

/// Those of them whose arguments are evaluated as arithmetic, or run later.
const EVALUATING: Words = Words("let trap alias");

/// Commands that may assign any variable.
const ANYTHING: [&str; 3] = ["source", ".", "eval"];

/// Files that set up an environment of Python or of the shell. They assign no variable that a training reads.
const ENVIRONMENTS: [&str; 2] = ["activate", "/etc/profile"];

/// How the names of others end.
const ENVIRONMENT_ENDS: [&str; 6] = [
    "/activate",
    "/conda.sh",
    "/mamba.sh",
    "/.bash_profile",
    "/.bashrc",
    "/.profile",
];

/// Whether the words of `eval` set up an environment, as `$(conda shell.bash hook)` does.
pub(crate) fn is_shell_hook(text: &str) -> bool {
    [
        "conda shell",
        "mamba shell",
        "opam env",
        "pixi shell-hook",
        "pyenv init",
        "ssh-agent",
    ]
    .iter()
    .any(|hook| text.contains(hook))
}

/// Prefixes of a shell command that do not change its effect on variables.
const BEFORE: [&str; 2] = ["command", "builtin"];

/// Variables that the shell itself sets.
const DYNAMIC: Words = Words(
    "_ RANDOM SRANDOM SECONDS EPOCHSECONDS LINENO OPTIND OPTARG REPLY PWD OLDPWD PPID UID EUID",
);

/// Whether a command may assign variables.
pub(super) fn assigns(name: &str) -> bool {
    SETTING.has(name) || ANYTHING.contains(&name) || BEFORE.contains(&name)
}

/// How a script assigns its variables.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// The number of a variable's assignments that certainly run.
    certain: HashMap<String, usize>,
    /// Every assigned variable, with the number of its assignments.
    assigned: HashMap<String, usize>,
    /// Byte offsets of the commands that may assign any variable, in order.
    disturbing: Vec<usize>,
    /// Any variable may change at any time.
    pub anything: bool,
}

impl Changes {
    /// The changes of a whole script. An error is the place of too deep a nesting, or of what only the parser
    /// accepts.
    pub fn of(text: &Text, root: Node<'_>) -> Result<Changes, Range<usize>> {
        let mut changes = Changes::default();
        changes.find(text, root, START, 0)?;
        Ok(changes)
    }

    fn find(
        &mut self,
        text: &Text,
        node: Node<'_>,
        place: Place,
        depth: usize,
    ) -> Result<(), Range<usize>> {
        if depth > MAX_DEPTH {
            return Err(node.byte_range());
        }
        self.add(text, node, place);
        // A subshell cannot change a variable of the script.
        if ["command_substitution", "process_substitution"].contains(&node.kind()) {
            return Ok(());
        }
        // A continued word may begin its next line with `#`.
        if node.kind() == "comment" {
            let before = text.text[..node.start_byte()].trim_end_matches("\\\n");
            let ends = [' ', '\t', '\n', ';', '&', '|', '(', ')'];
            // An escaped blank is part of the word; an escaped backslash before a blank is refused as well.
            let escaped = before
                .strip_suffix(ends)
                .is_some_and(|it| it.ends_with('\\'));
            // So does a continued substitution: `$((1))`, line end, `#`.
            let continued = before.len() < node.start_byte() && before.ends_with(')');
            if !before.is_empty() && (escaped || continued || !before.ends_with(ends)) {
                return Err(node.byte_range());
            }
        }
        let quoted = node.kind() == "string" || node.kind().starts_with("heredoc");
        let whole = node.kind() == "program";
        let mut end = if whole { 0 } else { node.start_byte() };
        for (child, inside) in places(text, node, place) {
            check_gap(text, end..child.start_byte(), quoted)?;
            self.find(text, child, inside, depth + 1)?;
            end = child.end_byte();
        }
        if whole {
            check_gap(text, end..text.text.len(), false)
        } else {
            Ok(())
        }
    }

    /// Whether every assignment of a variable certainly runs, so that its value is that of the last one before.
    /// `repeated`: at a place that may run later than its text, after other assignments.
    pub fn is_followed(&self, name: &str, repeated: bool) -> bool {
        let assigned = self.assigned.get(name).copied().unwrap_or(0);
        let certain = self.certain.get(name).copied().unwrap_or(0);
        !self.anything && certain > 0 && certain == assigned && (assigned == 1 || !repeated)
    }

    /// Whether the script leaves a variable unset that it has not assigned yet.
    pub fn leaves_unset(&self, name: &str, repeated: bool) -> bool {
        let assigned = self.assigned.contains_key(name);
        let later = !repeated && self.is_followed(name, repeated);
        !self.anything && !DYNAMIC.has(name) && (!assigned || later)
    }

    /// Whether a command before a byte offset may have assigned any variable, since the last call.
    pub fn disturbed_before(&mut self, at: usize) -> bool {
        let passed = self.disturbing.iter().take_while(|start| **start < at);
        let passed = passed.count();
        self.disturbing.drain(..passed);
        passed > 0
    }

    /// Adds the changes that a node makes, without those of the nodes in it.
    fn add(&mut self, text: &Text, node: Node<'_>, place: Place) {
        let source = text.text[node.byte_range()].trim_start();
        let at = node.start_byte();
        match node.kind() {
            "variable_assignment" => {
                let name = identifier(source);
                // Not an item of an array, `NAME[0]=value`.
                let plain = source[name.len()..].starts_with(['=', '+']);
                self.assignment(name, place.certain && plain);
                // Words are then split elsewhere than at white space. Before a command it applies to that command only;
                // the parser takes assignments on the lines above a command for such prefixes.
                let command = node.parent().and_then(|it| it.child_by_field_name("name"));
                let prefix = command
                    .is_some_and(|name| !ends_line(&text.text[node.end_byte()..name.start_byte()]));
                self.anything |= name == "IFS" && !prefix;
            }
            "declaration_command" => self.declaration(text, node, place),
            "unset_command" => self.names(source, at, place),
            "for_statement" => {
                if let Some(variable) = node.child_by_field_name("variable") {
                    self.names(&text.text[variable.byte_range()], at, place);
                }
            }
            "c_style_for_statement" => {
                for part in children(node).take_while(|child| child.kind() != "))") {
                    self.arithmetic(&text.text[part.byte_range()], at, place);
                }
            }
            "compound_statement" if source.starts_with("((") => self.arithmetic(source, at, place),
            "arithmetic_expansion" | "subscript" => {
                self.arithmetic(source.trim_start_matches('$'), at, place);
            }
            "expansion" => self.expansion(source, at, place),
            "command" => self.command(text, node, place),
            _ => {}
        }
    }

    /// `${NAME:=default}`, and `${NAME:offset}`, whose offset is arithmetic.
    fn expansion(&mut self, source: &str, at: usize, place: Place) {
        let inside = source.strip_prefix("${").unwrap_or(source);
        let name = identifier(inside);
        let operator = &inside[name.len()..];
        if operator.starts_with('=') || operator.starts_with(":=") {
            self.assignment(name, place.certain);
        }
        let offset = operator.starts_with(':') && !operator[1..].starts_with(['-', '+', '?', '=']);
        // The parser has no nodes in every kind of default.
        if offset || operator.contains("((") || operator.contains("$[") {
            self.arithmetic(operator, at, place);
        }
    }

    /// Arguments of `export` and the like that are no plain assignments, and flags that change the value.
    fn declaration(&mut self, text: &Text, node: Node<'_>, place: Place) {
        let mut words = children(node).map(|child| (child, &text.text[child.byte_range()]));
        let command = words.next().map_or("", |(_, command)| command);
        let mut plain = command != "local";
        for (child, source) in words {
            if source.starts_with(['-', '+']) {
                plain &= ["-x", "-a"].contains(&source);
                // After a name reference, any assignment may change any variable.
                self.anything |= command != "export" && source.contains('n');
            } else if !["variable_assignment", "variable_name"].contains(&child.kind()) {
                self.names(source, node.start_byte(), place);
            }
        }
        if !plain {
            let names = children(node).map(|child| identifier(&text.text[child.byte_range()]));
            names.for_each(|name| self.count(name));
        }
    }

    fn command(&mut self, text: &Text, node: Node<'_>, place: Place) {
        let at = node.start_byte();
        let words = children(node).filter(|child| child.kind() != "variable_assignment");
        let words = words.map(|child| &text.text[child.byte_range()]);
        let mut words = words.skip_while(|word| BEFORE.contains(word));
        let Some(name) = words.next() else { return };
        let words: Vec<&str> = words.collect();
        let option = SETTING_WITH.iter().find(|(command, _)| *command == name);
        let lacks = |option| !words.iter().any(|word| word.starts_with(option));
        let file = words
            .first()
            .map_or("", |word| word.trim_matches(['"', '\'']));
        let environment = match name {
            "eval" => is_shell_hook(file),
            _ => {
                ENVIRONMENTS.contains(&file)
                    || ENVIRONMENT_ENDS.iter().any(|end| file.ends_with(end))
            }
        };
        if ANYTHING.contains(&name) && environment {
            // Nothing that a training reads.
        } else if ANYTHING.contains(&name) {
            self.disturb(at, place);
        } else if SETTING.has(name) && !option.is_some_and(|(_, option)| lacks(option)) {
            for word in words {
                if EVALUATING.has(name) {
                    self.arithmetic(word, at, place);
                    continue;
                }
                let value = option.and_then(|(_, option)| word.strip_prefix(option));
                self.names(value.unwrap_or(word), at, place);
            }
        }
    }

    /// An arithmetic expression. It is not evaluated: if it assigns a variable, it may be any that it names.
    fn arithmetic(&mut self, source: &str, at: usize, place: Place) {
        let mut rest = source.replace("<<=", "@=").replace(">>=", "@=");
        for comparison in ["==", "!=", "<=", ">="] {
            rest = rest.replace(comparison, " ");
        }
        if rest.contains('=') || rest.contains("++") || rest.contains("--") {
            self.names(source, at, place);
        }
    }

    /// Counts every name in a text. With an expansion in it, it may be any name.
    fn names(&mut self, source: &str, at: usize, place: Place) {
        if source.contains(['$', '`']) {
            self.disturb(at, place);
        }
        for name in source.split(|c| !is_of_name(c)) {
            self.count(identifier(name));
        }
    }

    fn disturb(&mut self, at: usize, place: Place) {
        self.anything |= place.repeated;
        self.disturbing.push(at);
    }

    fn assignment(&mut self, name: &str, certain: bool) {
        if certain && !DYNAMIC.has(name) && !name.is_empty() {
            *self.certain.entry(name.to_owned()).or_default() += 1;
        }
        self.count(name);
    }

    fn count(&mut self, name: &str) {
        if !name.is_empty() {
            *self.assigned.entry(name.to_owned()).or_default() += 1;
        }
    }
}
