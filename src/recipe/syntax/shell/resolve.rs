//! Resolves the words of a script: literals, `$NAME` and `${NAME}` of a variable whose assignments certainly run,
//! `${NAME:-default}`, all items of an array, and arithmetic on those. Everything else stays unresolved.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.6. File names are not expanded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use tree_sitter::Node;

use super::changes::Changes;
use super::pieces::{Piece, Quote, pieces};
use super::text::Text;
use super::tree::{Place, children};
use super::word::{Unresolved, Word, identifier, is_name};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::yaml::MAX_BYTES;

/// The name under which the user gives a script's arguments.
pub(crate) const ARGUMENTS: &str = "@";

/// The value of a variable or an expansion.
#[derive(Debug, Clone, Default)]
pub(super) struct Value {
    pub text: String,
    /// The items of an array, which has no text.
    items: Option<Vec<Word>>,
    /// The defaults in it that the environment may replace, by variable.
    defaults: Vec<(String, String)>,
    /// The variables by which arithmetic divided it, with their values.
    divisors: Vec<(String, i64)>,
}

impl Value {
    /// The value of an array.
    pub fn array(items: Vec<Word>) -> Value {
        Value {
            items: Some(items),
            ..Value::default()
        }
    }

    fn bytes(&self) -> usize {
        let items = self.items.iter().flatten();
        self.text.len() + items.map(|item| item.text.len()).sum::<usize>()
    }

    /// This value with what `NAME+=` adds. `None`: one of them is an array, the other is not.
    fn extended(mut self, more: Value) -> Option<Value> {
        match (&mut self.items, more.items) {
            (Some(items), Some(more)) => items.extend(more),
            (None, None) => {
                self.text += &more.text;
                self.defaults.extend(more.defaults);
                self.divisors.extend(more.divisors);
            }
            _ => return None,
        }
        Some(self)
    }

    fn add(&mut self, part: Value) {
        self.text += &part.text;
        self.came_from(part);
    }

    /// The value depends on another one.
    fn came_from(&mut self, other: Value) {
        self.defaults.extend(other.defaults);
        self.divisors.extend(other.divisors);
    }
}

/// The variables of a script at one of its commands.
pub(super) struct Variables {
    changes: Changes,
    /// The variables that the user gives: they replace what the script assigns.
    given: HashSet<String>,
    /// The variables that an inline script inherits.
    exported: HashSet<String>,
    /// The variables set so far. `None`: unresolved.
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
    /// `NAME=value`, whose variables are not split into words.
    pub assignment: bool,
    /// The array that it assigns, `NAME=(…)`.
    pub array: Option<Node<'t>>,
}

impl RawWord<'_> {
    pub fn pieces(&self, text: &Text) -> Option<Vec<Piece>> {
        let ranges: Vec<Range<usize>> = self.expansions.iter().map(|(at, _)| at.clone()).collect();
        pieces(&text.text, self.range.clone(), &ranges)
    }
}

impl Variables {
    pub fn new(changes: Changes, given: &BTreeMap<String, String>) -> Variables {
        let value = |text: &String| Value {
            text: text.clone(),
            ..Value::default()
        };
        let values = given
            .iter()
            .map(|(name, text)| (name.clone(), Some(value(text))));
        Variables {
            given: given.keys().cloned().collect(),
            exported: HashSet::new(),
            values: values.collect(),
            changes,
            spent: 0,
            disturbed: false,
        }
    }

    /// Whether the value of a variable is known wherever it has any.
    fn is_certain(&self, name: &str, place: Place) -> bool {
        self.given.contains(name) || self.changes.is_followed(name, place.repeated)
    }

    /// Assigns a variable, or adds to its value with `NAME+=`.
    pub fn assign(&mut self, name: &str, value: Option<Value>, adds: bool, place: Place) {
        if self.given.contains(name) {
            return;
        }
        let value = value.filter(|_| self.is_certain(name, place));
        let value = match (value, adds) {
            // The environment may hold its beginning.
            (Some(more), true) => self.lookup(name, place).and_then(|old| old.extended(more)),
            (value, _) => value,
        };
        // Every assignment may double it.
        self.spent = self
            .spent
            .saturating_add(value.as_ref().map_or(0, Value::bytes));
        let value = value.filter(|_| self.spent <= MAX_BYTES);
        self.values.insert(name.to_owned(), value);
    }

    /// Makes a variable visible in inline scripts.
    pub fn export(&mut self, name: &str) {
        self.exported.insert(name.to_owned());
    }

    /// The value that an inline script inherits, unless it assigns the variable itself.
    fn inherited(&self, text: &Text, source: &str, place: Place) -> Option<Value> {
        let name = source.strip_prefix('$')?;
        let name = name
            .strip_prefix('{')
            .map_or(Some(name), |name| name.strip_suffix('}'))?;
        let assigns = text.text.contains(&format!("{name}="));
        let value = self.lookup(name, place).filter(|_| !assigns);
        value.filter(|_| self.exported.contains(name))
    }

    /// Continues at a byte offset of the script.
    pub fn advance(&mut self, at: usize) {
        if self.changes.disturbed_before(at) {
            self.forget_all(false);
        }
    }

    /// Makes every variable so far unresolved. `repeated`: also those that are assigned later.
    pub fn forget_all(&mut self, repeated: bool) {
        self.changes.anything |= repeated;
        let given = &self.given;
        let others = self
            .values
            .iter_mut()
            .filter(|(name, _)| !given.contains(*name));
        others.for_each(|(_, value)| *value = None);
        self.disturbed = true;
    }

    /// The value that an assignment gives to its variable.
    pub fn value(&mut self, text: &Text, raw: &RawWord<'_>, place: Place) -> Option<Value> {
        let mut value = Value::default();
        for piece in raw.pieces(text)? {
            match piece {
                Piece::Char(c, ..) => value.text.push(c),
                Piece::Expansion { node, .. } => {
                    let (_, node) = raw.expansions.get(node?)?;
                    value.add(self.expansion(text, *node, place)?);
                }
            }
        }
        Some(value)
    }

    /// The items of `(…)`. `None`: one of them names its place, `[2]=x`.
    pub fn array(&mut self, text: &Text, node: Node<'_>, place: Place) -> Option<Value> {
        let mut items = Vec::new();
        for child in children(node).filter(|child| child.is_named() && child.kind() != "comment") {
            let mut raw = RawWord {
                range: trimmed(text, child),
                expansions: Vec::new(),
                assignment: false,
                array: None,
            };
            add_expansions(text, child, &mut raw);
            if text.text[raw.range.clone()].starts_with('[') {
                return None;
            }
            items.extend(self.words(text, &raw, place));
        }
        Some(Value::array(items))
    }

    /// The words that a word expands to, each with the span of the whole word. An unquoted variable that holds
    /// several words is split if it is the whole word.
    pub fn words(&mut self, text: &Text, raw: &RawWord<'_>, place: Place) -> Vec<Word> {
        let split = !raw.assignment;
        let written = &text.text[raw.range.clone()];
        let span = text.span(raw.range.start, raw.range.end);
        let Some(pieces) = raw.pieces(text) else {
            return vec![all_unresolved(written, span, split)];
        };
        // The outer shell of an inline script expands what the inner one takes for quoted text.
        let expands = |at: usize| place.nested && !text.place(at).inner;
        let hidden = |piece: &Piece| matches!(piece, Piece::Char('$' | '`', at, Quote::Single) if expands(*at));
        if split && has_braces(&pieces) || pieces.iter().any(hidden) {
            return vec![all_unresolved(written, span, split)];
        }
        // Quotes around nothing are not among the pieces.
        let alone = matches!(pieces.as_slice(), [Piece::Expansion { at, .. }] if *at == raw.range);
        let mut word = Word::new("", span, 0);
        for piece in pieces {
            let (at, node, quoted) = match piece {
                Piece::Expansion { at, node, quoted } => (at, node, quoted),
                Piece::Char(c, at, quote) => {
                    if quote == Quote::None && at == raw.range.start + word.literal {
                        word.literal += c.len_utf8();
                    }
                    word.text.push(c);
                    continue;
                }
            };
            let whole = quoted || !split;
            let is_alone = written.trim_matches('"') == &text.text[at.clone()];
            if split
                && is_alone
                && let Some(items) = self
                    .arguments(text, &text.text[at.clone()], span, place)
                    .or_else(|| self.items(&text.text[at.clone()], quoted, span, place))
            {
                return items;
            }
            let node = node.and_then(|node| raw.expansions.get(node));
            let Some(value) = node.and_then(|(_, node)| self.expansion(text, *node, place)) else {
                let source = &text.text[at];
                word.unresolved.push(Unresolved {
                    start: word.text.len(),
                    end: word.text.len() + source.len(),
                    all: is_list(source),
                    quoted: whole,
                });
                word.text += source;
                continue;
            };
            word.defaults.extend(value.defaults);
            word.divisors.extend(value.divisors);
            let mut parts = value
                .text
                .split([' ', '\t', '\n'])
                .filter(|part| !part.is_empty());
            if !whole && alone {
                let first = parts.next().map(|part| Word {
                    text: part.to_owned(),
                    ..word
                });
                let rest = parts.map(|part| Word::new(part, span, 0));
                return first.into_iter().chain(rest).collect();
            }
            if !whole && value.text.contains([' ', '\t', '\n']) {
                return vec![all_unresolved(written, span, split)];
            }
            word.text += &value.text;
        }
        // Nothing is left of empty variables without quotes.
        let keeps = !word.text.is_empty() || written.contains(['"', '\'']);
        keeps.then_some(word).into_iter().collect()
    }

    /// The value of an expansion.
    fn expansion(&mut self, text: &Text, node: Node<'_>, place: Place) -> Option<Value> {
        let at = trimmed(text, node);
        let mut value = match node.kind() {
            _ if place.nested && text.place(at.start).inner => {
                self.inherited(text, &text.text[at.clone()], place)?
            }
            "simple_expansion" => self.plain(&text.text[at.start + 1..at.end], place)?,
            "expansion" => {
                let in_string = node.parent().is_some_and(|of| of.kind() == "string");
                self.parameter(&text.text[at.clone()], in_string, place)?
            }
            "arithmetic_expansion" => {
                let mut inner = children(node).filter(Node::is_named);
                let (expression, rest) = (inner.next()?, inner.next());
                let mut value = Value::default();
                let number = self.number(text, expression, place, &mut value)?;
                value.text = number.to_string();
                rest.is_none().then_some(value)?
            }
            "command_substitution" => {
                let mut value = Value::default();
                let number = self.expr(text, node, place, &mut value)?;
                value.text = number.to_string();
                value
            }
            _ => return None,
        };
        // Blanks and line ends at the end of an inline script end nothing.
        if place.nested && at.end >= text.text.trim_end().len() {
            value.text.truncate(value.text.trim_end().len());
        }
        self.spent = self.spent.saturating_add(value.text.len());
        // The inner shell would read other characters as its own syntax.
        let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@% \t".contains(c);
        let safe = !place.nested || value.text.chars().all(plain);
        (safe && self.spent <= MAX_BYTES).then_some(value)
    }

    fn lookup(&self, name: &str, place: Place) -> Option<Value> {
        // They are no variable: a function has its own.
        if name == ARGUMENTS {
            return None;
        }
        let value = self.values.get(name)?.clone();
        value.filter(|_| self.is_certain(name, place))
    }

    /// The value of a variable that is no array.
    fn plain(&self, name: &str, place: Place) -> Option<Value> {
        self.lookup(name, place)
            .filter(|value| value.items.is_none())
    }

    /// The words that the user gives as the arguments of the script, `@=…`. `None`: there are none for this place, or they may
    /// be those of a function, or others since.
    fn arguments(&self, text: &Text, source: &str, span: Span, place: Place) -> Option<Vec<Word>> {
        let given = self
            .given
            .get(ARGUMENTS)
            .and_then(|name| self.values.get(name)?.as_ref())?;
        let changed = ["shift", "set -- ", "()", "function "]
            .iter()
            .any(|words| text.text.contains(words));
        let is_all = ["$@", "$*", "${@}", "${*}"].contains(&source);
        let words = given.text.split_whitespace();
        (is_all && !changed && !place.repeated && !place.nested)
            .then(|| words.map(|word| Word::new(word, span, 0)).collect())
    }

    /// The items of `${NAME[@]}`, one word each at the place of the expansion. `None`: they are not known, or the shell would
    /// split them further.
    fn items(&mut self, source: &str, quoted: bool, span: Span, place: Place) -> Option<Vec<Word>> {
        let name = source.strip_prefix("${")?.strip_suffix("[@]}")?;
        let items = self.lookup(name, place)?.items?;
        let is_split = |item: &Word| {
            item.text.is_empty() || item.text.contains([' ', '\t', '\n', '*', '?', '['])
        };
        if !quoted && items.iter().any(is_split) {
            return None;
        }
        self.spent = self
            .spent
            .saturating_add(items.iter().map(|item| item.text.len()).sum());
        let word = |item: Word| Word {
            span,
            literal: 0,
            ..item
        };
        (self.spent <= MAX_BYTES).then(|| items.into_iter().map(word).collect())
    }

    /// `${NAME}`, `${NAME:-default}`, `${NAME-default}`, `${NAME:?message}` or `${NAME:=default}`, which assigns it.
    /// `in_string`: it is between double quotes.
    fn parameter(&mut self, source: &str, in_string: bool, place: Place) -> Option<Value> {
        let inside = source.strip_prefix("${")?.strip_suffix('}')?;
        // `${1:-8}`: a script's own argument, which it may not get.
        let digits = inside.len()
            - inside
                .trim_start_matches(|c: char| c.is_ascii_digit())
                .len();
        let name = if digits > 0 {
            &inside[..digits]
        } else {
            identifier(inside)
        };
        let operator = &inside[name.len()..];
        // Without a value, `?` ends the script.
        if operator.is_empty() || operator.starts_with(['?']) || operator.starts_with(":?") {
            return self.plain(name, place);
        }
        let or_empty = operator.starts_with(':');
        let default = operator.trim_start_matches(':');
        let assigns = default.starts_with('=');
        let default = default.strip_prefix(['-', '='])?;
        if self.values.contains_key(name) {
            let value = self.plain(name, place)?;
            if !(or_empty && value.text.is_empty()) {
                return Some(value);
            }
        } else if self.disturbed || !self.changes.leaves_unset(name, place.repeated) {
            return None;
        }
        let default = unquoted(default, in_string);
        let mut value = if default.contains(['"', '\'', '\\', '$', '`']) {
            self.plain(bare_variable(default)?, place)?
        } else {
            Value {
                text: default.to_owned(),
                ..Value::default()
            }
        };
        if !self.values.contains_key(name) {
            let default = (name.to_owned(), value.text.clone());
            value.defaults.push(default);
        }
        if assigns && !place.nested {
            self.assign(name, Some(value.clone()), false, place);
        }
        Some(value)
    }

    /// The value of an arithmetic expression in decimal numbers, `+`, `-`, `*`, `/`, `%` and parentheses.
    /// `of`: the value that it becomes.
    fn number(&mut self, text: &Text, node: Node<'_>, place: Place, of: &mut Value) -> Option<i64> {
        let mut of_value = |value: Value| {
            let number = decimal(&value.text);
            of.came_from(value);
            number
        };
        let source = text.text.get(node.byte_range())?.trim();
        match node.kind() {
            "number" | "word" if source.starts_with(|c: char| c.is_ascii_digit()) => {
                decimal(source)
            }
            "variable_name" | "word" if !place.nested => of_value(self.plain(source, place)?),
            "simple_expansion" | "expansion" | "arithmetic_expansion" => {
                of_value(self.expansion(text, node, place)?)
            }
            "parenthesized_expression" => {
                let mut inner = children(node).filter(Node::is_named);
                let (only, rest) = (inner.next()?, inner.next());
                let number = self.number(text, only, place, of)?;
                rest.is_none().then_some(number)
            }
            "binary_expression" => {
                let field = |name| node.child_by_field_name(name);
                let operands = [field("left")?, field("right")?];
                let operator = node.child_by_field_name("operator")?;
                let operator = text.text.get(operator.byte_range())?.trim();
                self.calculation(text, operands, operator, place, of)
            }
            _ => None,
        }
    }

    /// What `$(expr LEFT OPERATOR RIGHT)` prints.
    fn expr(&mut self, text: &Text, node: Node<'_>, place: Place, of: &mut Value) -> Option<i64> {
        let mut commands = children(node).filter(Node::is_named);
        let (command, rest) = (commands.next()?, commands.next());
        let mut words = children(command).filter(Node::is_named);
        let source = |node: Node<'_>| text.text.get(node.byte_range()).map(str::trim);
        let is_expr = command.kind() == "command" && source(words.next()?)? == "expr";
        let (left, operator, right) = (words.next()?, source(words.next()?)?, words.next()?);
        // Without quotes `*` is a pattern of file names.
        if !is_expr || operator == "*" || rest.is_some() || words.next().is_some() {
            return None;
        }
        let operator = operator.trim_matches(['\\', '\'', '"']);
        self.calculation(text, [left, right], operator, place, of)
    }

    /// The result of two operands.
    fn calculation(
        &mut self,
        text: &Text,
        [left, divisor]: [Node<'_>; 2],
        operator: &str,
        place: Place,
        of: &mut Value,
    ) -> Option<i64> {
        let left = self.number(text, left, place, of)?;
        let right = self.number(text, divisor, place, of)?;
        if operator == "/" {
            for name in factors(text, divisor) {
                let number = self
                    .plain(name, place)
                    .and_then(|value| decimal(&value.text));
                of.divisors
                    .extend(number.map(|number| (name.to_owned(), number)));
            }
        }
        match operator {
            "+" => left.checked_add(right),
            "-" => left.checked_sub(right),
            "*" => left.checked_mul(right),
            "/" => left.checked_div(right),
            "%" => left.checked_rem(right),
            _ => None,
        }
    }
}

/// The variables in a product.
fn factors<'t>(text: &'t Text, node: Node<'_>) -> Vec<&'t str> {
    let source = text.text[node.byte_range()].trim();
    match node.kind() {
        "variable_name" | "word" | "simple_expansion" | "expansion" => {
            let name = identifier(source.trim_start_matches(['$', '{']));
            (!name.is_empty()).then_some(name).into_iter().collect()
        }
        "parenthesized_expression" => {
            let inner = children(node).filter(Node::is_named);
            inner.flat_map(|inner| factors(text, inner)).collect()
        }
        "binary_expression" => {
            let field = |name| node.child_by_field_name(name);
            let operator = field("operator").map(|node| text.text[node.byte_range()].trim());
            let sides = [field("left"), field("right")].into_iter().flatten();
            let sides = sides.filter(|_| operator == Some("*"));
            sides.flat_map(|side| factors(text, side)).collect()
        }
        _ => Vec::new(),
    }
}

/// A decimal number. A shell reads a leading zero as octal.
fn decimal(text: &str) -> Option<i64> {
    let digits = text.bytes().all(|c| c.is_ascii_digit());
    let octal = text.len() > 1 && text.starts_with('0');
    text.parse().ok().filter(|_| digits && !octal)
}

/// A default without the quotes around all of it, if the shell splits it neither with nor without them. Between double
/// quotes a single quote is a letter.
fn unquoted(default: &str, in_string: bool) -> &str {
    let within = |quote: char| default.strip_prefix(quote)?.strip_suffix(quote);
    let single = within('\'').filter(|_| !in_string);
    let is_plain = |text: &&str| {
        let special = |c: char| c.is_whitespace() || "\"'\\$`*?[{~".contains(c);
        !text.is_empty() && !text.contains(special)
    };
    within('"').or(single).filter(is_plain).unwrap_or(default)
}

/// The variable of `$NAME` and `${NAME}`.
fn bare_variable(text: &str) -> Option<&str> {
    let inside = text.strip_prefix('$')?;
    let name = match inside.strip_prefix('{') {
        Some(inside) => inside.strip_suffix('}')?,
        None => inside,
    };
    is_name(name).then_some(name)
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

/// The bytes of a node without the white space and continued lines that the parser puts before an expansion in quotes.
fn trimmed(text: &Text, node: Node<'_>) -> Range<usize> {
    let mut rest = text.text[node.byte_range()].trim_start();
    while let Some(continued) = rest.strip_prefix("\\\n") {
        rest = continued.trim_start();
    }
    node.end_byte() - rest.len()..node.end_byte()
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

/// A word of which nothing is resolved. `split`: it is no assignment.
fn all_unresolved(source: &str, span: Span, split: bool) -> Word {
    let value = source.find('=').map_or(0, |at| at + 1);
    let start = if split { 0 } else { value };
    let mut word = Word::new(source, span, start);
    word.unresolved.push(Unresolved {
        start,
        end: source.len(),
        all: false,
        quoted: false,
    });
    word
}
