//! The commands of a script, in its order, with their words. The bytes between two words must be blanks.

use std::collections::BTreeMap;
use std::ops::Range;

use tree_sitter::Node;

use super::changes::{Changes, assigns};
use super::hide::hide;
use super::inner;
use super::resolve::{RawWord, Variables, add_expansions};
use super::text::Text;
use super::tree::{Place, START, children, ends_line, parse, places};
use super::word::{RESERVED, Word, identifier};
use super::{Line, Shell};
use crate::recipe::syntax::source::Span;

/// The deepest nesting of inline scripts.
const MAX_INNER: usize = 3;

/// The commands of a script. An error is the place of a syntax error or of too deep a nesting.
pub(super) fn script(
    text: &Text,
    environment: &BTreeMap<String, String>,
) -> Result<Vec<Line>, Span> {
    let lines = lines(text, &text.text, environment).or_else(|error| {
        let hidden = hide(text).ok_or_else(|| error.clone())?;
        lines(&hidden.text, &hidden.parsed, environment).map_err(|_| error)
    });
    lines.map_err(|at| text.span(at.start, at.end))
}

/// The line of a command whose words are known, or the lines of its inline script. `inner`: the text of one of the words.
pub(super) fn typed(words: Vec<Word>, inner: impl Fn(usize) -> Text) -> Vec<Line> {
    let mut reader = Reader {
        variables: Variables::new(Changes::default(), &BTreeMap::new()),
        lines: Vec::new(),
        inner: 0,
    };
    if !words.is_empty() {
        reader.push(words, |at| Some(inner(at)), START);
    }
    reader.lines
}

/// `parsed`: what the parser reads of the text.
fn lines(
    text: &Text,
    parsed: &str,
    environment: &BTreeMap<String, String>,
) -> Result<Vec<Line>, Range<usize>> {
    let tree = parse(parsed)?;
    let mut reader = Reader {
        variables: Variables::new(Changes::of(text, tree.root_node())?, environment),
        lines: Vec::new(),
        inner: 0,
    };
    reader.statement(text, tree.root_node(), START)?;
    Ok(reader.lines)
}

/// The parts of a command so far.
#[derive(Default)]
struct Parts<'t> {
    words: Vec<RawWord<'t>>,
    /// The end of the last word or redirection.
    end: Option<usize>,
    /// The last one is a word.
    is_word: bool,
    /// Statements in a redirection (`cat <<END | tee log`).
    statements: Vec<Node<'t>>,
}

struct Reader {
    variables: Variables,
    lines: Vec<Line>,
    /// The nesting of inline scripts.
    inner: usize,
}

impl Reader {
    fn statement(&mut self, text: &Text, node: Node<'_>, place: Place) -> Result<(), Range<usize>> {
        let mut parts = Parts::default();
        match node.kind() {
            "command" | "declaration_command" | "unset_command" | "variable_assignment" => {
                self.add_words(text, node, place, &mut parts)?;
                self.command(text, parts, place)
            }
            "variable_assignments" => {
                for child in children(node) {
                    self.statement(text, child, place)?;
                }
                Ok(())
            }
            "redirected_statement" => {
                let simple = ["command", "declaration_command", "unset_command"];
                for (child, inside) in places(text, node, place) {
                    if simple.contains(&child.kind()) {
                        self.add_words(text, child, place, &mut parts)?;
                    } else if child.kind().ends_with("_redirect") {
                        add_redirection(text, child, &mut parts)?;
                    } else {
                        self.statement(text, child, inside)?;
                    }
                }
                self.command(text, parts, place)
            }
            "compound_statement" if text.text[node.byte_range()].starts_with("((") => Ok(()),
            "test_command" | "comment" => Ok(()),
            _ => {
                for (child, inside) in places(text, node, place) {
                    self.statement(text, child, inside)?;
                }
                Ok(())
            }
        }
    }

    /// Adds the words of a simple command.
    fn add_words<'t>(
        &mut self,
        text: &Text,
        node: Node<'t>,
        place: Place,
        parts: &mut Parts<'t>,
    ) -> Result<(), Range<usize>> {
        if node.kind() == "variable_assignment" {
            return add_word(text, node, parts);
        }
        for child in children(node) {
            let source = &text.text[child.byte_range()];
            let name = identifier(source);
            // After two assignments on a line the parser takes a reserved word for a command's name, and
            // after a continued empty line an assignment.
            let assigns = source[name.len()..].starts_with(['=', '+', '[']) && !name.is_empty();
            if child.kind() == "command_name" && (assigns || RESERVED.has(source)) {
                return Err(child.byte_range());
            }
            if child.kind().ends_with("_redirect") {
                add_redirection(text, child, parts)?;
                continue;
            }
            let gap = parts
                .end
                .and_then(|end| text.text.get(end..child.start_byte()));
            if gap.is_some_and(ends_line) && parts.words.iter().all(|part| part.assignment) {
                self.command(text, std::mem::take(parts), place)?;
            }
            add_word(text, child, parts)?;
        }
        Ok(())
    }

    /// Adds the line of a simple command, and lets it change the variables.
    fn command(
        &mut self,
        text: &Text,
        parts: Parts<'_>,
        mut place: Place,
    ) -> Result<(), Range<usize>> {
        if let Some(first) = parts.words.first() {
            if !place.nested {
                self.variables.advance(first.range.start);
            }
            let mut words = Vec::new();
            let mut owners = Vec::new();
            for (index, raw) in parts.words.iter().enumerate() {
                for word in self.variables.words(text, raw, place) {
                    words.push(word);
                    owners.push(index);
                }
            }
            if !place.nested {
                self.assign(text, &parts, &words, place);
            }
            if !words.is_empty() {
                let inner = |at: usize| {
                    let mut whole = owners.iter().filter(|owner| **owner == owners[at]);
                    let is_one = whole.next().is_some() && whole.next().is_none();
                    let raw = &parts.words[owners[at]];
                    inner::text_of(text, raw).filter(|_| is_one)
                };
                self.push(words, inner, place);
            }
        }
        place.certain = false;
        for node in &parts.statements {
            self.statement(text, *node, place)?;
        }
        Ok(())
    }

    /// Lets a command change the variables.
    fn assign(&mut self, text: &Text, parts: &Parts<'_>, words: &[Word], place: Place) {
        let command = words.iter().find(|word| word.assignment().is_none());
        let name = command.map_or("", |word| word.text.as_str());
        let declares = ["export", "readonly", "declare", "typeset"].contains(&name);
        // `$NAME …` may be `eval …`.
        let hidden = |word: &Word| word.literal < word.text.len() && assigns(&word.text);
        if command.is_some_and(|word| word.is_unresolved() || hidden(word)) {
            self.variables.forget_all(place.repeated);
        }
        // In front of a command, an assignment is only for that command.
        if command.is_some() && !declares {
            return;
        }
        if name == "export" {
            let names = words.iter().map(|word| identifier(&word.text));
            names.for_each(|name| self.variables.export(name));
        }
        for part in parts.words.iter().filter(|part| part.assignment) {
            let source = &text.text[part.range.clone()];
            let name = identifier(source);
            let adds = source[name.len()..].starts_with('+');
            let start = part.range.start + name.len() + 1 + usize::from(adds);
            let value = match part.array {
                Some(array) => self.variables.array(text, array, place),
                None => {
                    let raw = RawWord {
                        range: start.min(part.range.end)..part.range.end,
                        expansions: part.expansions.clone(),
                        assignment: false,
                        array: None,
                    };
                    self.variables.value(text, &raw, place)
                }
            };
            self.variables.assign(name, value, adds, place);
        }
    }

    /// Adds a line, or the lines of the inline script that it starts. `inner`: the text that the inner shell reads from
    /// one of the words.
    fn push(&mut self, words: Vec<Word>, inner: impl Fn(usize) -> Option<Text>, place: Place) {
        let mut line = Line {
            words,
            shell: if place.nested {
                Shell::Inner
            } else {
                Shell::Own
            },
            certain: place.certain,
        };
        if let Some(evaluated) = inner::evaluated(&line.words) {
            let defaults: Vec<_> = line
                .words
                .iter()
                .flat_map(|word| word.defaults.clone())
                .collect();
            let from = self.lines.len();
            if self.inline(&evaluated, &[], place) {
                let words = self.lines[from..]
                    .iter_mut()
                    .filter_map(|line| line.words.first_mut());
                words.for_each(|word| word.defaults.extend(defaults.iter().cloned()));
                return;
            }
        }
        let found = inner::script(&line.words).filter(|_| !inner::is_harmless(&line.words));
        if let Some(found) = found {
            let before = line.words[..found].iter();
            let before = before.filter(|word| word.assignment().is_some());
            let before: Vec<Word> = before.cloned().collect();
            if inner(found).is_some_and(|inner| self.inline(&inner, &before, place)) {
                return;
            }
            line.shell = Shell::Unread;
        }
        self.lines.push(line);
    }

    /// Adds the lines of an inline script. `before`: assignments for its environment. Returns whether it can be
    /// read.
    fn inline(&mut self, text: &Text, before: &[Word], mut place: Place) -> bool {
        let Ok(tree) = parse(&text.text) else {
            return false;
        };
        let at = self.lines.len();
        place.certain = false;
        place.nested = true;
        self.inner += 1;
        let read = self.inner <= MAX_INNER
            && Changes::of(text, tree.root_node()).is_ok()
            && self.statement(text, tree.root_node(), place).is_ok();
        self.inner -= 1;
        if !read {
            self.lines.truncate(at);
        }
        for line in &mut self.lines[at..] {
            line.words.splice(..0, before.iter().cloned());
        }
        read
    }
}

/// Adds a word, or joins it to the last one if nothing separates them.
fn add_word<'t>(text: &Text, node: Node<'t>, parts: &mut Parts<'t>) -> Result<(), Range<usize>> {
    let (start, end) = (node.start_byte(), node.end_byte());
    let gap = match parts.end {
        Some(before) => text.text.get(before..start).unwrap_or("|"),
        None => " ",
    };
    let gap = gap.replace("\\\n", "");
    if gap.contains(|c| c != ' ' && c != '\t') {
        return Err(parts.end.unwrap_or(start).min(start)..start);
    }
    parts.end = Some(end);
    let joined = gap.is_empty() && std::mem::replace(&mut parts.is_word, true);
    parts.is_word = true;
    if joined && let Some(last) = parts.words.last_mut() {
        last.range.end = end;
        add_expansions(text, node, last);
        return Ok(());
    }
    let mut raw = RawWord {
        range: start..end,
        expansions: Vec::new(),
        assignment: node.kind() == "variable_assignment",
        array: node
            .child_by_field_name("value")
            .filter(|value| value.kind() == "array"),
    };
    add_expansions(text, node, &mut raw);
    parts.words.push(raw);
    Ok(())
}

/// Skips a redirection. The parser counts the words after its target as its own.
fn add_redirection<'t>(
    text: &Text,
    node: Node<'t>,
    parts: &mut Parts<'t>,
) -> Result<(), Range<usize>> {
    // A number right before it is its file descriptor.
    let adjacent = parts.is_word && parts.end == Some(node.start_byte());
    let digits = |raw: &mut RawWord<'_>| {
        let written = &text.text[raw.range.clone()];
        written.bytes().all(|c| c.is_ascii_digit())
    };
    if adjacent {
        parts.words.pop_if(digits);
    }
    parts.is_word = false;
    let mut targets = 0;
    let mut end = node.start_byte();
    for (child, index) in children(node).zip(0..) {
        let field = node.field_name_for_child(index);
        let statement = ["pipeline", "list", "command", "redirected_statement"];
        if child.kind().ends_with("_redirect") {
            add_redirection(text, child, parts)?;
        } else if statement.contains(&child.kind()) {
            parts.statements.push(child);
        } else if field == Some("argument") || (field == Some("destination") && targets > 0) {
            parts.end = Some(parts.end.unwrap_or(end).max(end));
            add_word(text, child, parts)?;
            parts.is_word = true;
        } else {
            targets += usize::from(field == Some("destination"));
            parts.is_word = false;
        }
        end = child.end_byte();
    }
    parts.end = Some(node.end_byte().max(end));
    Ok(())
}
