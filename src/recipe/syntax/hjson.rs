//! Hjson, the format of DeepSpeed configs: JSON with comments (`#`, `//`, `/* */`), unquoted names and
//! texts, optional and trailing commas, and optional braces at the
//! root.
//!
//! There are no aliases, so only the depth and the number of values need a bound.
//!
//! Source: hjson-py 3.1.0 `decoder.py`, with the hook of DeepSpeed edaa722 that refuses a key written
//! twice (`runtime/config_utils.py`, `dict_raise_error_on_duplicate_keys`).

use std::collections::HashMap;

use super::diagnostic::Diagnostic;
use super::node::{Entry, Node, Value};
use super::source::{FileId, Span};
use super::yaml::{MAX_BYTES, MAX_DEPTH, MAX_NODES};

/// Parses a document; `None` after an error.
pub fn parse(text: &str, file: FileId, diagnostics: &mut Vec<Diagnostic>) -> Option<Node> {
    let mut parser = Parser {
        text,
        file,
        mark: Mark {
            at: 0,
            line: 1,
            column: 1,
        },
        values: 0,
        diagnostics,
    };
    let found = match text.len() > MAX_BYTES {
        true => Err(parser.problem(
            parser.mark,
            format!("the file is larger than the limit of {MAX_BYTES} bytes"),
            "check that this is the right file",
        )),
        false => parser.document(),
    };
    found
        .map_err(|problem| parser.diagnostics.push(*problem))
        .ok()
}

/// Boxed, because the results that carry it are many and small.
type Problem = Box<Diagnostic>;

/// The start of a span.
#[derive(Clone, Copy)]
struct Mark {
    at: usize,
    line: u32,
    column: u32,
}

struct Parser<'t, 'd> {
    text: &'t str,
    file: FileId,
    mark: Mark,
    /// Values begun so far.
    values: usize,
    diagnostics: &'d mut Vec<Diagnostic>,
}

impl<'t> Parser<'t, '_> {
    fn document(&mut self) -> Result<Node, Problem> {
        if self.peek() == Some('\u{feff}') {
            self.next();
        }
        self.blanks();
        let root = match self.peek() {
            Some('{' | '[') => self.value(0)?,
            _ => self.mapping(0, false)?,
        };
        self.blanks();
        match self.peek() {
            None => Ok(root),
            Some(c) => Err(self.problem(
                self.mark,
                format!("unexpected `{c}` after the end of the config"),
                "check the brackets before it",
            )),
        }
    }

    fn rest(&self) -> &'t str {
        &self.text[self.mark.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.mark.at += next.len_utf8();
        self.mark.column = self.mark.column.saturating_add(1);
        if next == '\n' {
            self.mark.line += 1;
            self.mark.column = 1;
        }
        Some(next)
    }

    /// The span from a mark to an earlier end.
    fn span(&self, from: Mark, end: usize) -> Span {
        Span {
            file: self.file,
            start: from.at,
            end,
            line: from.line,
            column: from.column,
        }
    }

    fn problem(&self, from: Mark, message: impl Into<String>, help: &str) -> Problem {
        let span = self.span(from, self.mark.at);
        let problem = Diagnostic::error("yaml-syntax", Some(span), message, help);
        Box::new(problem)
    }

    /// Whether a comment starts here.
    fn is_comment(rest: &str) -> bool {
        ["#", "//", "/*"].iter().any(|mark| rest.starts_with(mark))
    }

    /// Skips blanks and comments; a block comment may lack its end.
    fn blanks(&mut self) {
        loop {
            match self.peek() {
                Some(' ' | '\t' | '\r' | '\n') => {
                    self.next();
                }
                Some(_) if self.rest().starts_with("/*") => {
                    let end = self.rest().find("*/").map(|at| self.mark.at + at + 2);
                    let end = end.unwrap_or(self.text.len());
                    while self.mark.at < end {
                        self.next();
                    }
                }
                Some(_) if Self::is_comment(self.rest()) => {
                    while self.peek().is_some_and(|c| !matches!(c, '\r' | '\n')) {
                        self.next();
                    }
                }
                _ => return,
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node, Problem> {
        if depth >= MAX_DEPTH {
            return Err(self.problem(
                self.mark,
                format!("values are nested more than {MAX_DEPTH} deep"),
                "check the brackets",
            ));
        }
        self.values += 1;
        if self.values > MAX_NODES {
            return Err(self.problem(
                self.mark,
                format!("the config has more than {MAX_NODES} values"),
                "check that this is the right file",
            ));
        }
        let from = self.mark;
        match self.peek() {
            Some('{') => {
                self.next();
                let mut mapping = self.mapping(depth, true)?;
                mapping.span = self.span(from, self.mark.at);
                Ok(mapping)
            }
            Some('[') => {
                self.next();
                let items = self.items(depth)?;
                Ok(Node::sequence(items, self.span(from, self.mark.at)))
            }
            // Upstream reads it; the rest of the config tells whether it is one.
            Some('\'') if self.rest().starts_with("'''") => {
                let message = "text between `'''` is not supported";
                let problem = self.problem(from, message, "write it in quotes on one line");
                self.diagnostics.push(*problem);
                let length = self.rest()[3..].find("'''").map(|at| at + 6);
                let end = self.mark.at + length.unwrap_or(self.rest().len());
                while self.mark.at < end {
                    self.next();
                }
                Ok(Node::string("", self.span(from, self.mark.at)))
            }
            Some('"' | '\'') => {
                let text = self.quoted()?;
                Ok(Node::string(text, self.span(from, self.mark.at)))
            }
            _ => self.plain(),
        }
    }

    /// Reads the entries of a mapping, after its opening brace.
    fn mapping(&mut self, depth: usize, braces: bool) -> Result<Node, Problem> {
        let from = self.mark;
        let mut entries: Vec<Entry> = Vec::new();
        let mut lines: HashMap<String, u32> = HashMap::new();
        self.blanks();
        loop {
            match (self.peek(), braces) {
                (Some('}'), true) => {
                    self.next();
                    break;
                }
                (None, false) => break,
                (None, true) => return Err(self.unclosed(from, '}')),
                (Some(_), _) => {}
            }
            let (name, name_span) = self.name()?;
            self.blanks();
            if self.next() != Some(':') {
                return Err(self.problem(
                    self.mark,
                    format!("a `:` is missing after `{name}`"),
                    "write `name: value`",
                ));
            }
            self.blanks();
            let value = self.value(depth + 1)?;
            if let Some(line) = lines.get(&name) {
                self.diagnostics.push(Diagnostic::error(
                    "duplicate-key",
                    Some(name_span),
                    format!(
                        "`{name}` is given twice, first on line {line}: DeepSpeed refuses the file"
                    ),
                    "remove one of them",
                ));
            }
            lines.entry(name.clone()).or_insert(name_span.line);
            entries.push(Entry {
                name,
                name_span,
                value,
            });
            self.separator();
        }
        Ok(Node {
            value: Value::Mapping(entries),
            span: self.span(from, self.mark.at),
            key: None,
        })
    }

    fn items(&mut self, depth: usize) -> Result<Vec<Node>, Problem> {
        let from = self.mark;
        let mut items = Vec::new();
        self.blanks();
        loop {
            match self.peek() {
                Some(']') => {
                    self.next();
                    return Ok(items);
                }
                None => return Err(self.unclosed(from, ']')),
                Some(_) => items.push(self.value(depth + 1)?),
            }
            self.separator();
        }
    }

    /// Skips the text between two values: blanks, and a comma.
    fn separator(&mut self) {
        self.blanks();
        if self.peek() == Some(',') {
            self.next();
            self.blanks();
        }
    }

    fn unclosed(&self, from: Mark, end: char) -> Problem {
        self.problem(
            from,
            format!("the config ends before `{end}`"),
            "check the brackets",
        )
    }

    fn name(&mut self) -> Result<(String, Span), Problem> {
        let from = self.mark;
        if matches!(self.peek(), Some('"' | '\'')) {
            let name = self.quoted()?;
            return Ok((name, self.span(from, self.mark.at)));
        }
        while self
            .peek()
            .is_some_and(|c| !c.is_whitespace() && !"{}[],:".contains(c))
        {
            self.next();
        }
        if self.mark.at == from.at {
            return Err(self.problem(
                from,
                "a name is missing",
                "write `name: value`, and a name with other characters in quotes",
            ));
        }
        let name = self.text[from.at..self.mark.at].to_owned();
        Ok((name, self.span(from, self.mark.at)))
    }

    /// Reads a quoted text with JSON's escapes.
    fn quoted(&mut self) -> Result<String, Problem> {
        let from = self.mark;
        let quote = self.next();
        let mut text = String::new();
        loop {
            let next = self.next();
            match next {
                Some(_) if next == quote => return Ok(text),
                Some('\\') => text.push(self.escape(from)?),
                Some(c) if c >= ' ' => text.push(c),
                _ => {
                    return Err(self.problem(
                        from,
                        "the quoted text is not closed on its line",
                        "close it with the same quote",
                    ));
                }
            }
        }
    }

    fn escape(&mut self, from: Mark) -> Result<char, Problem> {
        let escaped = match self.next() {
            Some(c @ ('"' | '\'' | '\\' | '/')) => Some(c),
            Some('b') => Some('\u{8}'),
            Some('f') => Some('\u{c}'),
            Some('n') => Some('\n'),
            Some('r') => Some('\r'),
            Some('t') => Some('\t'),
            Some('u') => self.unicode(),
            _ => None,
        };
        escaped.ok_or_else(|| {
            self.problem(
                from,
                "the text has an escape that is not JSON",
                "write `\\\\` for a backslash",
            )
        })
    }

    /// Reads the digits after `\u`; half of a surrogate pair becomes U+FFFD.
    fn unicode(&mut self) -> Option<char> {
        let high = self.hex()?;
        if (0xd800..0xdc00).contains(&high) && self.rest().starts_with("\\u") {
            let before = (self.mark.at, self.mark.column);
            self.mark.at += 2;
            self.mark.column = self.mark.column.saturating_add(2);
            match self.hex() {
                Some(low @ 0xdc00..0xe000) => {
                    return char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
                }
                _ => (self.mark.at, self.mark.column) = before,
            }
        }
        Some(char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER))
    }

    fn hex(&mut self) -> Option<u32> {
        let digits = self.rest().get(..4)?;
        let all = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = u32::from_str_radix(digits, 16).ok().filter(|_| all)?;
        self.mark.at += 4;
        self.mark.column = self.mark.column.saturating_add(4);
        Some(value)
    }

    /// Reads a number, a boolean or `null`, which end at a comma, a bracket or a comment; anything else
    /// is text up to the end of its line.
    fn plain(&mut self) -> Result<Node, Problem> {
        let from = self.mark;
        if self.peek().is_none_or(|c| "{}[],:".contains(c)) {
            return Err(self.problem(
                from,
                "a value is missing",
                "write one; quote it if it begins with a bracket, a comma or a colon",
            ));
        }
        // After a comma, a bracket or a comment mark it can only be text.
        let mut may_be_word = true;
        loop {
            let rest = self.rest();
            let ends = rest.is_empty() || rest.starts_with(['\r', '\n']);
            if !ends && !may_be_word {
                self.next();
                continue;
            }
            if ends || rest.starts_with([',', '}', ']']) || Self::is_comment(rest) {
                let text = self.text[from.at..self.mark.at].trim_matches([' ', '\t']);
                let span = self.span(from, from.at + text.len());
                if let Some(plain) = word(text).filter(|_| may_be_word) {
                    return Ok(Node::plain(plain, span));
                }
                if ends {
                    return Ok(Node::string(text, span));
                }
                may_be_word = false;
            }
            self.next();
        }
    }
}

/// The YAML spelling of a word that is not text: a float with an integer value becomes an integer.
fn word(text: &str) -> Option<String> {
    if ["null", "true", "false"].contains(&text) {
        return Some(text.to_owned());
    }
    if !is_number(text) {
        return None;
    }
    let value: f64 = text.parse().ok()?;
    let whole = value.fract() == 0.0 && value.abs() < 1e10;
    Some(match whole && text.contains(['.', 'e', 'E']) {
        true => format!("{value:.0}"),
        false => text.to_owned(),
    })
}

/// Whether a text is a number of JSON.
fn is_number(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    begins && serde_json::from_str::<serde_json::Number>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::recipe::syntax::scalar::{Resolved, Schema};
    use crate::recipe::syntax::source::Sources;
    use crate::recipe::syntax::yaml;

    fn read(text: &str) -> Result<Node, String> {
        let mut sources = Sources::default();
        let file = sources.add("ds.json", text);
        let mut problems = Vec::new();
        let root = parse(text, file, &mut problems);
        match problems.first() {
            None => Ok(root.unwrap()),
            Some(problem) => Err(problem.message.clone()),
        }
    }

    /// The tree as JSON, to compare with hjson-py.
    fn json(node: &Node) -> String {
        match &node.value {
            Value::Mapping(entries) => {
                let entries = entries.iter();
                let entries = entries.map(|e| format!("{:?}: {}", e.name, json(&e.value)));
                format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
            }
            Value::Sequence(items) => {
                format!(
                    "[{}]",
                    items.iter().map(json).collect::<Vec<_>>().join(", ")
                )
            }
            Value::Scalar(scalar) if scalar.plain => scalar.text.clone(),
            Value::Scalar(scalar) => format!("{:?}", scalar.text),
        }
    }

    /// Expected results are those of `hjson.loads` of hjson-py 3.1.0.
    #[test]
    fn documents_are_read_like_upstream() {
        for (text, expected) in [
            ("{\"a\": 1, \"b\": [1, 2]}", r#"{"a": 1, "b": [1, 2]}"#),
            (
                "{\n  // one\n  a: 1 # two\n  /* three\n  */ b: 2\n}",
                r#"{"a": 1, "b": 2}"#,
            ),
            ("a: 1\nb: auto\n", r#"{"a": 1, "b": "auto"}"#),
            ("{a: 1, b: 2,}", r#"{"a": 1, "b": 2}"#),
            ("{a: 8#c\n b: true//d\n}", r#"{"a": 8, "b": true}"#),
            ("{a: x, y}\n}", r#"{"a": "x, y}"}"#),
            ("{a: 1 x # no comment\n}", r#"{"a": "1 x # no comment"}"#),
            (
                "{a: 32.0, b: 1e3, c: 1e-5, d: -0.5, e: 010\n}",
                r#"{"a": 32, "b": 1000, "c": 1e-5, "d": -0.5, "e": "010"}"#,
            ),
            (
                "{'a': 'it\\'s', \"b\": \"\\u00e9\\ud83d\\ude00\\n\"}",
                "{\"a\": \"it's\", \"b\": \"é😀\\n\"}",
            ),
            ("# nothing\n", "{}"),
            ("\u{feff}{a: null}", r#"{"a": null}"#),
            ("{a: [\n1\n2,\n]\n}", r#"{"a": [1, 2]}"#),
        ] {
            let read = read(text).unwrap_or_else(|problem| panic!("{text}: {problem}"));
            assert_eq!(json(&read), expected, "{text}");
        }
    }

    #[test]
    fn documents_that_upstream_refuses_are_refused() {
        for (text, word) in [
            ("{a: 1", "ends before `}`"),
            ("{a: [1", "ends before `]`"),
            ("{a: }", "value is missing"),
            ("{: 1}", "name is missing"),
            ("{a b: 1}", "`:` is missing"),
            ("{a: 1} b", "after the end"),
            ("{a: \"x", "is not closed"),
            ("{a: \"\\q\"}", "escape"),
            ("{a: '''x'''}", "is not supported"),
            ("{a: 1\n a: 1}", "given twice"),
        ] {
            let problem = read(text).unwrap_err();
            assert!(problem.contains(word), "{text}: {problem}");
        }
        assert!(read(&"[".repeat(5000)).unwrap_err().contains("deep"));
    }

    #[test]
    fn values_and_names_have_their_positions() {
        let text = "{\n  // größer\n  größe: 16 // n\n  \"b\": x\n}";
        let root = read(text).unwrap();
        let entries = root.entries().unwrap();
        let at = |span: Span| (&text[span.start..span.end], span.line, span.column);
        assert_eq!(at(entries[0].name_span), ("größe", 3, 3));
        assert_eq!(at(entries[0].value.span), ("16", 3, 10));
        assert_eq!(at(entries[1].name_span), ("\"b\"", 4, 3));
        assert_eq!(at(entries[1].value.span), ("x", 4, 8));
    }

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            "[a-z \"\\\\#/:,{}é]{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::btree_map("[a-z:# ]{1,5}", inner, 0..4)
                    .prop_map(|map| map.into_iter().collect::<serde_json::Map<_, _>>().into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_text_ends_in_a_tree_or_an_error(text in "[a-b:{}\\[\\]\"'\n,/*# 0-9\\\\u]{0,60}") {
            let mut sources = Sources::default();
            let file = sources.add("ds.json", text.as_str());
            let mut problems = Vec::new();
            if parse(&text, file, &mut problems).is_none() {
                prop_assert!(!problems.is_empty());
            }
            for problem in problems {
                let span = problem.span.unwrap();
                prop_assert!(text.get(span.start..span.end).is_some());
            }
        }

        /// JSON has the same meaning to both readers.
        #[test]
        fn json_is_hjson(value in prop::collection::btree_map("[a-z:# ]{1,5}", any_json(), 0..4)) {
            let text = serde_json::to_string_pretty(&value).unwrap();
            let mut sources = Sources::default();
            let file = sources.add("ds.json", text.as_str());
            let as_yaml = yaml::parse(&text, file, &mut Vec::new()).unwrap();
            let read = read(&text).unwrap();
            prop_assert_eq!(resolved(&read), resolved(&as_yaml), "{}", text);
        }
    }

    /// The resolved scalars of a tree, without their spelling.
    fn resolved(node: &Node) -> Vec<(String, Option<Resolved>)> {
        let mut all = Vec::new();
        collect(node, "", &mut all);
        all
    }

    fn collect(node: &Node, path: &str, all: &mut Vec<(String, Option<Resolved>)>) {
        all.push((path.to_owned(), node.resolve(Schema::Core)));
        for entry in node.entries().unwrap_or_default() {
            collect(&entry.value, &format!("{path}.{}", entry.name), all);
        }
        for (index, item) in node.items().unwrap_or_default().iter().enumerate() {
            collect(item, &format!("{path}.{index}"), all);
        }
    }
}
