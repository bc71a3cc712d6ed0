//! Resolves the words of a script: literals, `$NAME` and `${NAME}` of a variable that is assigned once,
//! `${NAME:-default}`, and arithmetic on those. Everything else stays unresolved.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.6. File names are not expanded.

use std::collections::HashMap;
use std::ops::Range;

use tree_sitter::Node;

use super::changes::{Changes, identifier};
use super::pieces::{Piece, Quote, pieces};
use super::text::Text;
use super::tree::{Context, children};
use super::word::{Unresolved, Word};
use crate::recipe::syntax::yaml::MAX_BYTES;

/// The value of a variable or an expansion.
#[derive(Debug, Clone, Default)]
pub(super) struct Value {
    pub text: String,
    /// The defaults in it that the environment may replace, by variable.
    defaults: Vec<(String, String)>,
}

/// The variables of a script at one of its commands.
pub(super) struct Variables {
    changes: Changes,
    /// The variables assigned so far. `None`: unresolved.
    values: HashMap<String, Option<Value>>,
    /// Bytes of all expanded values so far. Nested variables can double with every assignment.
    spent: usize,
    /// An earlier command may have assigned any variable.
    disturbed: bool,
}

/// A word of a script before its expansion: its bytes and the expansions in it.
pub(super) struct RawWord<'t> {
    pub range: Range<usize>,
    pub expansions: Vec<(Range<usize>, Node<'t>)>,
}

impl RawWord<'_> {
    pub fn pieces(&self, text: &Text) -> Option<Vec<Piece>> {
        let ranges: Vec<Range<usize>> = self.expansions.iter().map(|(at, _)| at.clone()).collect();
        pieces(&text.text, self.range.clone(), &ranges)
    }
}

impl Variables {
    pub fn new(changes: Changes) -> Variables {
        Variables {
            changes,
            values: HashMap::new(),
            spent: 0,
            disturbed: false,
        }
    }

    /// Assigns a variable whose assignment certainly runs.
    pub fn assign(&mut self, name: &str, value: Option<Value>) {
        let value = value.filter(|_| self.changes.is_assigned_once(name));
        self.values.insert(name.to_owned(), value);
    }

    /// Continues at a byte offset of the script.
    pub fn advance(&mut self, at: usize) {
        if self.changes.disturbed_before(at) {
            self.forget_all(false);
        }
    }

    pub fn is_assigned_once(&self, name: &str) -> bool {
        self.changes.is_assigned_once(name)
    }

    /// Makes every variable so far unresolved. `repeated`: also those that are assigned later.
    pub fn forget_all(&mut self, repeated: bool) {
        self.changes.anything |= repeated;
        self.values.values_mut().for_each(|value| *value = None);
        self.disturbed = true;
    }

    /// The value that an assignment gives to its variable.
    pub fn value(&mut self, text: &Text, raw: &RawWord<'_>, context: Context) -> Option<Value> {
        let mut value = Value::default();
        for piece in raw.pieces(text)? {
            match piece {
                Piece::Char(c, ..) => value.text.push(c),
                Piece::Expansion { node, .. } => {
                    let (_, node) = raw.expansions.get(node?)?;
                    let part = self.expansion(text, *node, context)?;
                    value.text += &part.text;
                    value.defaults.extend(part.defaults);
                }
            }
        }
        Some(value)
    }

    /// The words that a word expands to, each with the span of the whole word. `split`: its unquoted expansions
    /// are split at white space.
    pub fn words(
        &mut self,
        text: &Text,
        raw: &RawWord<'_>,
        split: bool,
        context: Context,
    ) -> Vec<Word> {
        let written = text.text[raw.range.clone()].to_owned();
        let mut fields = Fields {
            done: Vec::new(),
            current: None,
            empty: Word::new("", text.span(raw.range.start, raw.range.end), 0),
            defaults: Vec::new(),
        };
        let Some(pieces) = raw.pieces(text) else {
            return fields.all_unresolved(&written, split);
        };
        // The outer shell of an inline script expands what the inner one takes for quoted text.
        let expands = |at: usize| context.nested && !text.place(at).inner;
        let hidden = |piece: &Piece| matches!(piece, Piece::Char('$' | '`', at, Quote::Single) if expands(*at));
        // Empty quotes beside a value that is split may be a word.
        let unquoted = |piece: &Piece| matches!(piece, Piece::Expansion { quoted: false, .. });
        let empty = ["''", "\"\""].iter().any(|quotes| written.contains(quotes));
        let unclear = split && (has_braces(&pieces) || (empty && pieces.iter().any(unquoted)));
        if unclear || pieces.iter().any(hidden) {
            return fields.all_unresolved(&written, split);
        }
        let literal = pieces
            .iter()
            .scan(raw.range.start, |next, piece| match piece {
                Piece::Char(c, at, Quote::None) if at == next => {
                    *next += c.len_utf8();
                    Some(c.len_utf8())
                }
                _ => None,
            })
            .sum();
        for piece in pieces {
            match piece {
                Piece::Char(c, ..) => fields.push(c),
                Piece::Expansion { at, node, quoted } => {
                    let whole = quoted || !split;
                    let source = &text.text[at];
                    let node = node.and_then(|node| raw.expansions.get(node));
                    match node.and_then(|(_, node)| self.expansion(text, *node, context)) {
                        Some(value) => fields.value(&value, whole),
                        None => fields.unresolved(source, whole, is_list(source)),
                    }
                }
            }
        }
        if written.contains(['"', '\'']) {
            fields.push_nothing();
        }
        let mut words = fields.end();
        if let Some(first) = words.first_mut() {
            first.literal = literal;
        }
        words
    }

    /// The value of an expansion.
    fn expansion(&mut self, text: &Text, node: Node<'_>, context: Context) -> Option<Value> {
        let at = trimmed(text, node);
        if context.nested && text.place(at.start).inner {
            return None;
        }
        let value = match node.kind() {
            "simple_expansion" => self.lookup(&text.text[at.start + 1..at.end])?,
            "expansion" => self.parameter(text, node, at, context)?,
            "arithmetic_expansion" => {
                let mut inner = children(node).filter(Node::is_named);
                let (expression, rest) = (inner.next()?, inner.next());
                let mut defaults = Vec::new();
                let number = self.number(text, expression, context, &mut defaults)?;
                rest.is_none().then(|| Value {
                    text: number.to_string(),
                    defaults,
                })?
            }
            _ => return None,
        };
        self.spent = self.spent.saturating_add(value.text.len());
        // The inner shell would read other characters as its own syntax.
        let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@% \t".contains(c);
        let safe = !context.nested || value.text.chars().all(plain);
        (safe && self.spent <= MAX_BYTES).then_some(value)
    }

    fn lookup(&self, name: &str) -> Option<Value> {
        let value = self.values.get(name)?.clone();
        value.filter(|_| self.changes.is_assigned_once(name))
    }

    /// `${NAME}`, `${NAME:-default}` or `${NAME-default}`.
    fn parameter(
        &mut self,
        text: &Text,
        node: Node<'_>,
        at: Range<usize>,
        context: Context,
    ) -> Option<Value> {
        let inside = text.text[at.clone()]
            .strip_prefix("${")?
            .strip_suffix('}')?;
        let name = identifier(inside);
        let operator = &inside[name.len()..];
        if operator.is_empty() {
            return self.lookup(name);
        }
        let (or_empty, default) = match operator.strip_prefix(":-") {
            Some(default) => (true, default),
            None => (false, operator.strip_prefix('-')?),
        };
        if self.values.contains_key(name) {
            let value = self.lookup(name)?;
            if !(or_empty && value.text.is_empty()) {
                return Some(value);
            }
        } else if self.disturbed || !self.changes.leaves_unset(name, context.in_function) {
            return None;
        }
        let mut value = match default.contains(['"', '\'', '\\', '$', '`']) {
            false => Value {
                text: default.to_owned(),
                defaults: Vec::new(),
            },
            // These mean something else in double quotes around the expansion.
            true if default.contains(['\'', '\\']) => return None,
            true => {
                let end = at.end - 1;
                let raw = raw_word(text, node, end - default.len()..end);
                self.value(text, &raw, context)?
            }
        };
        if !self.values.contains_key(name) {
            let default = (name.to_owned(), value.text.clone());
            value.defaults.push(default);
        }
        Some(value)
    }

    /// The value of an arithmetic expression in decimal numbers, `+`, `-`, `*`, `/`, `%` and parentheses.
    /// Adds the defaults in it.
    fn number(
        &mut self,
        text: &Text,
        node: Node<'_>,
        context: Context,
        defaults: &mut Vec<(String, String)>,
    ) -> Option<i64> {
        let mut of_value = |value: Value| {
            defaults.extend(value.defaults);
            decimal(&value.text)
        };
        let source = text.text.get(node.byte_range())?.trim();
        match node.kind() {
            "number" | "word" if source.starts_with(|c: char| c.is_ascii_digit()) => {
                decimal(source)
            }
            "variable_name" | "word" if !context.nested => of_value(self.lookup(source)?),
            "simple_expansion" | "expansion" | "arithmetic_expansion" => {
                of_value(self.expansion(text, node, context)?)
            }
            "parenthesized_expression" => {
                let mut inner = children(node).filter(Node::is_named);
                let (only, rest) = (inner.next()?, inner.next());
                let number = self.number(text, only, context, defaults)?;
                rest.is_none().then_some(number)
            }
            "binary_expression" => {
                let left =
                    self.number(text, node.child_by_field_name("left")?, context, defaults)?;
                let right =
                    self.number(text, node.child_by_field_name("right")?, context, defaults)?;
                let operator = node.child_by_field_name("operator")?;
                match text.text.get(operator.byte_range())?.trim() {
                    "+" => left.checked_add(right),
                    "-" => left.checked_sub(right),
                    "*" => left.checked_mul(right),
                    "/" => left.checked_div(right),
                    "%" => left.checked_rem(right),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

/// A decimal number. A shell reads a leading zero as octal.
fn decimal(text: &str) -> Option<i64> {
    let digits = text.bytes().all(|c| c.is_ascii_digit());
    let octal = text.len() > 1 && text.starts_with('0');
    text.parse().ok().filter(|_| digits && !octal)
}

/// Whether an expansion gives any number of words, even in quotes.
fn is_list(source: &str) -> bool {
    let inside = source.trim_start_matches('$').trim_matches(['{', '}']);
    matches!(inside, "@" | "*") || inside.contains("[@]") || inside.contains("[*]")
}

/// Whether unquoted braces expand to several words: `{a,b}`, `{1..4}`.
fn has_braces(pieces: &[Piece]) -> bool {
    let unquoted: String = pieces
        .iter()
        .map(|piece| match piece {
            Piece::Char(c, _, Quote::None) => *c,
            _ => 'x',
        })
        .collect();
    let inside = unquoted.split_once('{').map_or("", |(_, inside)| inside);
    inside.contains('}') && (inside.contains(',') || inside.contains(".."))
}

/// The bytes of a node without the white space that the parser puts before an expansion in quotes.
fn trimmed(text: &Text, node: Node<'_>) -> Range<usize> {
    let source = &text.text[node.byte_range()];
    let blank = source.len() - source.trim_start().len();
    node.start_byte() + blank..node.end_byte()
}

/// A range of a node as a word, with the expansions in it.
fn raw_word<'t>(text: &Text, node: Node<'t>, range: Range<usize>) -> RawWord<'t> {
    let mut raw = RawWord {
        range,
        expansions: Vec::new(),
    };
    for child in children(node) {
        add_expansions(text, child, &mut raw);
    }
    raw
}

/// Adds the expansions in a node to the word that holds it.
pub(super) fn add_expansions<'t>(text: &Text, node: Node<'t>, raw: &mut RawWord<'t>) {
    if [
        "simple_expansion",
        "expansion",
        "arithmetic_expansion",
        "command_substitution",
        "process_substitution",
    ]
    .contains(&node.kind())
    {
        let at = trimmed(text, node);
        if raw.range.start <= at.start && at.end <= raw.range.end {
            raw.expansions.push((at, node));
        }
        return;
    }
    for child in children(node) {
        add_expansions(text, child, raw);
    }
}

/// The words that one word expands to, built from left to right.
struct Fields {
    done: Vec<Word>,
    current: Option<Word>,
    empty: Word,
    defaults: Vec<(String, String)>,
}

impl Fields {
    fn current(&mut self) -> &mut Word {
        self.current.get_or_insert_with(|| self.empty.clone())
    }

    fn push(&mut self, c: char) {
        self.current().text.push(c);
    }

    /// Keeps a word with quotes although it is empty.
    fn push_nothing(&mut self) {
        if self.done.is_empty() {
            self.current();
        }
    }

    fn value(&mut self, value: &Value, whole: bool) {
        if whole {
            self.current().text += &value.text;
        } else {
            for (index, field) in value.text.split([' ', '\t', '\n']).enumerate() {
                if index > 0 {
                    self.done.extend(self.current.take());
                }
                if !field.is_empty() {
                    self.current().text += field;
                }
            }
        }
        for default in &value.defaults {
            if !self.defaults.contains(default) {
                self.defaults.push(default.clone());
            }
        }
    }

    fn unresolved(&mut self, source: &str, quoted: bool, all: bool) {
        let current = self.current();
        let start = current.text.len();
        current.text += source;
        let end = current.text.len();
        current.unresolved.push(Unresolved {
            start,
            end,
            all,
            quoted,
        });
    }

    /// One unresolved word. `split`: it is no assignment.
    fn all_unresolved(mut self, source: &str, split: bool) -> Vec<Word> {
        let value = source.find('=').map_or(0, |at| at + 1);
        let name = if split { "" } else { &source[..value] };
        self.current().text += name;
        self.current().literal = name.len();
        self.unresolved(&source[name.len()..], false, false);
        self.end()
    }

    fn end(mut self) -> Vec<Word> {
        self.done.extend(self.current.take());
        if let Some(first) = self.done.first_mut() {
            first.defaults = self.defaults;
        }
        self.done
    }
}
