//! YAML (and its subset JSON) to a [`Node`] tree with positions.
//!
//! Only this module uses the parser: `granit-parser` gives events with byte offsets. This module
//! builds a tree from them and reports duplicate keys. Aliases and merges (`<<`) are expanded as PyYAML does it;
//! tags are refused. Hostile input ends in a diagnostic: size, depth and the number of values are bounded, also
//! after expansion.
//!
//! The value of an alias has the place of the alias. What is inside it, and merged keys, have their places below the
//! anchor, where their text is.

use std::collections::HashMap;
use std::collections::hash_map;

use granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError, StrInput};

use super::diagnostic::Diagnostic;
use super::node::{Entry, Node, Value};
use super::source::{FileId, Span};

/// The largest accepted file, bytes. Messages state it as 1 MiB.
pub const MAX_BYTES: usize = 1 << 20;
/// The deepest nesting of lists and mappings.
pub const MAX_DEPTH: usize = 64;
/// The most values and keys of a file, with those that aliases repeat.
pub const MAX_NODES: usize = 100_000;
/// The most bytes of all files of a recipe.
pub const MAX_TEXT: usize = 8 << 20;

/// As [`parse`], and refuses tabs where PyYAML does.
pub fn parse_as_pyyaml(
    text: &str,
    file: FileId,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Node> {
    let (root, quoted) = parse_with_quotes(text, file, diagnostics)?;
    if let Some(problem) = refused_tab(text, file, &quoted) {
        diagnostics.push(*problem);
        return None;
    }
    Some(root)
}

/// Parses one document. On failure the diagnostics hold at least one error.
pub fn parse(text: &str, file: FileId, diagnostics: &mut Vec<Diagnostic>) -> Option<Node> {
    parse_with_quotes(text, file, diagnostics).map(|(root, _)| root)
}

/// The document, and the byte ranges of its quoted and block scalars in the order of the text.
fn parse_with_quotes(
    text: &str,
    file: FileId,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<(Node, Vec<(usize, usize)>)> {
    let message = if text.len() > MAX_BYTES {
        "the file is larger than 1 MiB".to_owned()
    } else {
        let known = diagnostics.len();
        let mut parsed = Parsed::of(text, &Indented::default(), file, diagnostics);
        if parsed.is_underindented {
            diagnostics.truncate(known);
            parsed = Parsed::of(text, &Indented::of(text), file, diagnostics);
        }
        match parsed.root {
            Ok(Some(root)) => return Some((root, parsed.quoted)),
            Ok(None) => "the file is empty".to_owned(),
            Err(problem) => {
                diagnostics.push(*problem);
                return None;
            }
        }
    };
    let help = "check that this is the right file";
    diagnostics.push(Diagnostic::error("yaml-syntax", None, message, help));
    None
}

/// What the parser makes of a text.
struct Parsed {
    /// The only document; `None`: there is none.
    root: Result<Option<Node>, Problem>,
    /// The byte ranges of scalars that are quoted or blocks.
    quoted: Vec<(usize, usize)>,
    /// The parser refuses the indentation of a line in a quoted scalar.
    is_underindented: bool,
}

impl Parsed {
    fn of(
        text: &str,
        indented: &Indented,
        file: FileId,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Parsed {
        let mut builder = Builder {
            text,
            file,
            lines: &indented.lines,
            parser: parser(indented.text.as_deref().unwrap_or(text)),
            nodes: 0,
            repeated: 0,
            anchors: HashMap::new(),
            first_lines: HashMap::new(),
            quoted: Vec::new(),
            is_underindented: false,
            diagnostics,
        };
        Parsed {
            root: builder.document(),
            quoted: builder.quoted,
            is_underindented: builder.is_underindented,
        }
    }
}

fn parser(text: &str) -> Parser<'_, StrInput<'_>> {
    let options = granit_parser::options! {
        emit_comments: false,
        emit_anchor_events: true,
        block_nesting_limit: MAX_DEPTH,
        flow_nesting_limit: MAX_DEPTH,
    };
    Parser::new_from_str_with_options(text, options)
}

/// An error of `yaml-syntax`; boxed, because the results that carry it are many and small.
type Problem = Box<Diagnostic>;

fn problem(span: Span, message: impl Into<String>, help: &str) -> Problem {
    Box::new(Diagnostic::error("yaml-syntax", Some(span), message, help))
}

fn too_deep(span: Span) -> Problem {
    problem(
        span,
        format!("values are nested more than {MAX_DEPTH} deep"),
        "check the brackets and the indentation",
    )
}

/// Builds the tree from the parser's events.
struct Builder<'t, 'd> {
    text: &'t str,
    file: FileId,
    /// The lines that the parser sees with more spaces than the text has.
    lines: &'d [IndentedLine],
    parser: Parser<'t, StrInput<'t>>,
    nodes: usize,
    /// The bytes of text that anchors and aliases repeat.
    repeated: usize,
    /// The values of anchors by the parser's number; `None` until the value is complete.
    anchors: HashMap<usize, Option<Node>>,
    /// The line on which each name of an anchor is given.
    first_lines: HashMap<String, u32>,
    /// As in [`Parsed`].
    quoted: Vec<(usize, usize)>,
    is_underindented: bool,
    diagnostics: &'d mut Vec<Diagnostic>,
}

impl<'t> Builder<'t, '_> {
    /// The root of the only document; `None` if there is none.
    fn document(&mut self) -> Result<Option<Node>, Problem> {
        let mut root = None;
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamEnd => return Ok(root),
                Event::DocumentStart(..) if root.is_some() => {
                    return Err(problem(
                        span,
                        "the file holds more than one document",
                        "keep one recipe in a file: remove everything after `---`",
                    ));
                }
                Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd => {}
                event => root = Some(self.node(event, span, 0)?),
            }
        }
    }

    fn next(&mut self) -> Result<(Event<'t>, Span), Problem> {
        loop {
            match self.parser.next() {
                Some(Ok((Event::Anchor(_, name), span))) => {
                    let span = self.span(span);
                    self.name_anchor(&name, span)?;
                }
                Some(Ok((event, span))) => return Ok((event, self.span(span))),
                Some(Err(error)) => {
                    self.is_underindented = *error.kind() == ErrorKind::InvalidQuotedScalarIndent;
                    return Err(self.syntax(&error));
                }
                None => {
                    let end = Span::of(self.text, self.text.len()..self.text.len(), self.file);
                    return Err(problem(end, "the file is not complete", "check its end"));
                }
            }
        }
    }

    /// Refuses the names of anchors that PyYAML refuses.
    fn name_anchor(&mut self, name: &str, span: Span) -> Result<(), Problem> {
        let is_read = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if !name.chars().all(is_read) {
            return Err(problem(
                span,
                format!(
                    "the anchor `&{name}` has a character that PyYAML, upstream's parser, refuses"
                ),
                "use letters, digits, `-` and `_`; put text that begins with `&` in quotes",
            ));
        }
        match self.first_lines.insert(name.to_owned(), span.line) {
            None => Ok(()),
            Some(line) => Err(problem(
                span,
                format!("the anchor `&{name}` is given twice, first on line {line}"),
                "rename one of them, and its aliases",
            )),
        }
    }

    fn span(&self, span: granit_parser::Span) -> Span {
        let start = span.start.byte_offset().unwrap_or(0);
        let end = span.end.byte_offset().unwrap_or(start).max(start);
        let line = span.start.line();
        let last = self.line_before(start);
        let spaces = last.filter(|last| last.number == line);
        let column = span.start.col() - spaces.map_or(0, |last| last.spaces.min(span.start.col()));
        Span {
            file: self.file,
            start: self.in_text(start),
            end: self.in_text(end),
            line: u32::try_from(line).unwrap_or(u32::MAX),
            column: u32::try_from(column + 1).unwrap_or(u32::MAX),
        }
    }

    /// The last indented line that begins at or before an offset of the parser.
    fn line_before(&self, offset: usize) -> Option<&IndentedLine> {
        let next = self.lines.partition_point(|line| line.start <= offset);
        self.lines.get(next.checked_sub(1)?)
    }

    /// The offset in the text for an offset of the parser.
    fn in_text(&self, offset: usize) -> usize {
        match self.line_before(offset) {
            Some(line) => offset - line.before - line.spaces.min(offset - line.start),
            None => offset,
        }
    }

    fn syntax(&self, error: &ScanError) -> Problem {
        let span = self.span(granit_parser::Span::empty(*error.marker()));
        match error.kind() {
            ErrorKind::RecursionLimitExceeded => return too_deep(span),
            ErrorKind::UnknownAnchor => return self.unknown_alias(span),
            _ => {}
        }
        let line = self.text.lines().nth(span.line.saturating_sub(1) as usize);
        let indented = line.map(|line| line.trim_start_matches(' '));
        let help = if indented.is_some_and(|line| line.starts_with('\t')) {
            "indent YAML with spaces, not with tabs"
        } else {
            "check the indentation, the quotes and the brackets before this position"
        };
        problem(span, error.kind().to_string(), help)
    }

    /// The name of the alias at a place.
    fn alias_name(&self, span: Span) -> String {
        let rest = self.text.get(span.start + 1..).unwrap_or_default();
        let inside = |c: &char| !c.is_whitespace() && !",]}".contains(*c);
        rest.chars().take(40).take_while(inside).collect()
    }

    fn unknown_alias(&self, span: Span) -> Problem {
        let name = self.alias_name(span);
        problem(
            span,
            format!("the alias `*{name}` has no anchor `&{name}` before it"),
            "add the anchor, or write the value out; put text that begins with `*` in quotes",
        )
    }

    /// A copy of the value of an anchor, at the place of its alias inside `depth` collections.
    fn alias(&mut self, anchor: usize, span: Span, depth: usize) -> Result<Node, Problem> {
        let mut node = match self.anchors.get(&anchor) {
            Some(Some(node)) => {
                let size = Size::of(node);
                if depth + size.depth > MAX_DEPTH {
                    return Err(too_deep(span));
                }
                // The copy is made only if there is room for it.
                count_copy(&mut self.nodes, &mut self.repeated, size, span)?;
                node.clone()
            }
            Some(None) => {
                let name = self.alias_name(span);
                return Err(problem(
                    span,
                    format!(
                        "the alias `*{name}` is inside the value of its anchor `&{name}`, which would have no end"
                    ),
                    "write out the value that is meant",
                ));
            }
            None => return Err(self.unknown_alias(span)),
        };
        node.span = span;
        Ok(node)
    }

    /// The value that begins with an event, inside `depth` collections.
    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Node, Problem> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(problem(
                span,
                format!("the file has more than {MAX_NODES} values"),
                "check that this is the right file",
            ));
        }
        let (anchor, tag) = match &event {
            Event::Scalar(.., anchor, tag)
            | Event::SequenceStart(.., anchor, tag)
            | Event::MappingStart(.., anchor, tag) => (*anchor, tag),
            Event::Alias(anchor) => return self.alias(*anchor, span, depth),
            Event::UnresolvedAlias(_) => return Err(self.unknown_alias(span)),
            _ => return Err(problem(span, "a value is missing", "write one, or `null`")),
        };
        if let Some(tag) = tag {
            return Err(problem(
                span,
                format!("the tag `{}` is not supported", tag.original()),
                "remove the tag, and write the value so that it needs none",
            ));
        }
        if anchor == 0 {
            return self.content(event, span, depth);
        }
        self.anchors.insert(anchor, None);
        let node = self.content(event, span, depth)?;
        count_copy(&mut self.nodes, &mut self.repeated, Size::of(&node), span)?;
        self.anchors.insert(anchor, Some(node.clone()));
        Ok(node)
    }

    /// The scalar, list or mapping that begins with an event, inside `depth` collections.
    fn content(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Node, Problem> {
        if let Event::Scalar(text, style, ..) = event {
            let plain = style == ScalarStyle::Plain;
            if !plain {
                self.quoted.push((span.start, span.end));
            }
            return Ok(Node::scalar(text, plain, span));
        }
        if depth >= MAX_DEPTH {
            return Err(too_deep(span));
        }
        if matches!(event, Event::MappingStart(..)) {
            return self.mapping(span, depth);
        }
        let mut items = Vec::new();
        loop {
            let (event, at) = self.next()?;
            if event == Event::SequenceEnd {
                let end = at.end.max(span.end);
                return Ok(Node::sequence(items, Span { end, ..span }));
            }
            items.push(self.node(event, at, depth + 1)?);
        }
    }

    fn mapping(&mut self, span: Span, depth: usize) -> Result<Node, Problem> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut positions = HashMap::new();
        let mut merged: Vec<Entry> = Vec::new();
        loop {
            let (event, at) = self.next()?;
            if event == Event::MappingEnd {
                let mut mapping = Node::mapping(span);
                mapping.span.end = at.end.max(span.end);
                mapping.value = Value::Mapping(last_of_each(merged, entries));
                return Ok(mapping);
            }
            let key = self.node(event, at, depth + 1)?;
            let kind = key.kind();
            let Value::Scalar(name) = key.value else {
                return Err(problem(
                    key.span,
                    format!("a key must be a single value, this is {kind}"),
                    "quote the key if its brackets are part of it",
                ));
            };
            if name.plain && name.text == "<<" {
                let (event, at) = self.next()?;
                merged.extend(merged_entries(self.node(event, at, depth + 1)?)?);
                continue;
            }
            let (event, at) = self.next()?;
            let entry = Entry {
                name: name.text,
                name_span: key.span,
                value: self.node(event, at, depth + 1)?,
            };
            match positions.entry(entry.name.clone()) {
                hash_map::Entry::Vacant(position) => {
                    position.insert(entries.len());
                    entries.push(entry);
                }
                hash_map::Entry::Occupied(position) => {
                    let first = &mut entries[*position.get()];
                    self.diagnostics.push(duplicate(first, &entry));
                    *first = entry;
                }
            }
        }
    }
}

/// A text whose quoted scalars continue with more spaces before their lines, where the parser demands them. PyYAML takes
/// such a line at any indentation, and folds the blanks before it either way.
///
/// Source: PyYAML 6.0.3 `scanner.py` (`scan_flow_scalar_breaks`); YAML 1.2.2 [69], `s-flow-line-prefix(n)`.
#[derive(Default)]
struct Indented {
    /// `None`: the text needs no more spaces.
    text: Option<String>,
    lines: Vec<IndentedLine>,
}

#[derive(Clone, Copy)]
struct IndentedLine {
    /// The offset of its first byte, with the spaces.
    start: usize,
    /// The line's number, from 1.
    number: usize,
    /// The spaces that it has more than in the file.
    spaces: usize,
    /// The spaces that all lines before it have more.
    before: usize,
}

impl Indented {
    /// The most scalars of a file that are indented.
    const MOST: usize = 64;

    fn of(text: &str) -> Indented {
        let mut indented = Indented::default();
        for _ in 0..Self::MOST {
            let source = indented.text.as_deref().unwrap_or(text);
            let Some((start, end)) = underindented(source) else {
                break;
            };
            let Some(more) = indented.with(source, start, end) else {
                break;
            };
            indented = more;
        }
        indented
    }

    /// The text with the lines of one more scalar indented beyond its opening quote. `None`: it would be too long.
    fn with(&self, source: &str, start: usize, end: usize) -> Option<Indented> {
        let line_start = source[..start].rfind('\n').map_or(0, |at| at + 1);
        let spaces = source[line_start..start].chars().count() + 1;
        let second = source[..start].matches('\n').count() + 2;
        let mut text = source[..start].to_owned();
        let mut lines: Vec<IndentedLine> = Vec::new();
        let before = self
            .lines
            .last()
            .map_or(0, |last| last.before + last.spaces);
        let mut rest = source[start..end].split_inclusive('\n');
        text += rest.next()?;
        for (number, line) in (second..).zip(rest) {
            if !line.trim().is_empty() {
                lines.push(IndentedLine {
                    start: text.len(),
                    number,
                    spaces,
                    before: before + lines.len() * spaces,
                });
                text.extend(std::iter::repeat_n(' ', spaces));
            }
            text += line;
            if text.len() > 2 * MAX_BYTES {
                return None;
            }
        }
        text += &source[end..];
        let known = self.lines.iter().copied();
        Some(Indented {
            text: Some(text),
            lines: known.chain(lines).collect(),
        })
    }
}

/// The bytes of the first quoted scalar that the parser refuses for the indentation of a line in it.
fn underindented(text: &str) -> Option<(usize, usize)> {
    let mut known = 0;
    for event in parser(text) {
        match event {
            Ok((_, span)) => known = span.end.byte_offset().unwrap_or(known).max(known),
            Err(error) if *error.kind() == ErrorKind::InvalidQuotedScalarIndent => {
                let at = error.marker().byte_offset()?;
                let start = known + opening_quote(text.get(known..at)?)?;
                let end = end_of_quotes(text, start)?;
                return (start < at && at < end).then_some((start, end));
            }
            Err(_) => return None,
        }
    }
    None
}

/// The offset of the quote that opens the next scalar: only indicators, properties and comments are before it.
fn opening_quote(text: &str) -> Option<usize> {
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        at += match c {
            '"' | '\'' => return Some(at),
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '&' | '!' => rest.find(char::is_whitespace).unwrap_or(rest.len()),
            ':' | '-' | '?' => 1,
            c if c.is_whitespace() => c.len_utf8(),
            _ => return None,
        };
    }
    None
}

/// The end of the quoted scalar that begins at an offset.
fn end_of_quotes(text: &str, start: usize) -> Option<usize> {
    let quote = text[start..].chars().next()?;
    let mut chars = text[start + 1..].char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if quote == '"' => drop(chars.next()),
            '\'' if quote == '\'' && chars.next_if(|(_, next)| *next == '\'').is_some() => {}
            c if c == quote => return Some(start + 1 + at + 1),
            _ => {}
        }
    }
    None
}

/// What a copy of a value takes.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// Values, with the keys of mappings.
    nodes: usize,
    /// Bytes of values and keys.
    bytes: usize,
    /// Levels of lists and mappings.
    depth: usize,
}

impl Size {
    fn of(node: &Node) -> Size {
        let mut size = Size {
            nodes: 1,
            bytes: 0,
            depth: 0,
        };
        match &node.value {
            Value::Scalar(scalar) => size.bytes = scalar.text.len(),
            Value::Sequence(items) => {
                size.depth = 1;
                for item in items {
                    size.add(Size::of(item));
                }
            }
            Value::Mapping(entries) => {
                size.depth = 1;
                for entry in entries {
                    size.nodes += 1;
                    size.bytes += entry.name.len();
                    size.add(Size::of(&entry.value));
                }
            }
        }
        size
    }

    fn add(&mut self, below: Size) {
        self.nodes += below.nodes;
        self.bytes += below.bytes;
        self.depth = self.depth.max(below.depth + 1);
    }
}

/// Counts a copy for an anchor or an alias, and refuses one over the limits of a file. `nodes`, `repeated`: the values and the
/// bytes so far.
fn count_copy(
    nodes: &mut usize,
    repeated: &mut usize,
    size: Size,
    span: Span,
) -> Result<(), Problem> {
    *nodes += size.nodes;
    *repeated += size.bytes;
    if *nodes <= MAX_NODES && *repeated <= MAX_BYTES {
        return Ok(());
    }
    Err(problem(
        span,
        format!(
            "with what its anchors and aliases repeat the file has more than {MAX_NODES} values or 1 MiB"
        ),
        "check that this is the right file",
    ))
}

/// The entries that the value of a merge (`<<`) adds: the last of a key counts.
///
/// Source: PyYAML 6.0.3 `constructor.py` (`flatten_mapping`). The first mapping of a list has precedence.
fn merged_entries(node: Node) -> Result<Vec<Entry>, Problem> {
    let refused = |node: &Node, inside: &str| {
        problem(
            node.span,
            format!(
                "a merge (`<<`) takes a mapping or a list of mappings, {inside}{}",
                node.kind()
            ),
            "give an alias of a mapping, `<<: *name`, or put `<<` in quotes",
        )
    };
    match node.value {
        Value::Mapping(entries) => Ok(entries),
        Value::Sequence(items) => {
            let mut merged = Vec::new();
            for item in items.into_iter().rev() {
                match item.value {
                    Value::Mapping(entries) => merged.extend(entries),
                    _ => return Err(refused(&item, "an item of this list is ")),
                }
            }
            Ok(merged)
        }
        Value::Scalar(_) => Err(refused(&node, "this is ")),
    }
}

/// The entries of a mapping after those that are merged into it: a key is where it is first, with its last value.
fn last_of_each(merged: Vec<Entry>, own: Vec<Entry>) -> Vec<Entry> {
    if merged.is_empty() {
        return own;
    }
    let mut positions = HashMap::new();
    let mut entries: Vec<Entry> = Vec::new();
    for entry in merged.into_iter().chain(own) {
        match positions.entry(entry.name.clone()) {
            hash_map::Entry::Vacant(position) => {
                position.insert(entries.len());
                entries.push(entry);
            }
            hash_map::Entry::Occupied(position) => entries[*position.get()] = entry,
        }
    }
    entries
}

/// A duplicate key: upstream loaders silently take the last, so a contradiction is refused.
fn duplicate(first: &Entry, second: &Entry) -> Diagnostic {
    let (name, line) = (&second.name, first.name_span.line);
    let message = format!("`{name}` is given twice, first on line {line}");
    let help = "remove one of them: loaders silently take the last";
    let span = Some(second.name_span);
    if first.value.same_value(&second.value) {
        let message = format!("{message}, with the same value");
        Diagnostic::warning("duplicate-key", span, message, help)
    } else {
        Diagnostic::error("duplicate-key", span, message, help)
    }
}

/// The first tab that PyYAML refuses: outside quotes, block scalars and comments. YAML 1.2 allows some of them.
/// `quoted`: the byte ranges of scalars that are quoted or blocks.
///
/// Source: PyYAML 6.0.3 `scanner.py` (`scan_to_next_token`, `fetch_more_tokens`, `scan_plain`).
fn refused_tab(text: &str, file: FileId, quoted: &[(usize, usize)]) -> Option<Problem> {
    if !text.contains('\t') {
        return None;
    }
    let mut quoted = quoted.iter().copied().peekable();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let mut blank = true;
        for (at, c) in line.char_indices() {
            let here = start + at;
            while quoted.next_if(|(_, end)| *end <= here).is_some() {}
            if quoted.peek().is_some_and(|(begin, _)| *begin <= here) {
                blank = false;
                continue;
            }
            match c {
                '#' if blank => break,
                '\t' => {
                    return Some(problem(
                        Span::of(text, here..here + 1, file),
                        "a tab separates tokens here, and PyYAML, upstream's parser, refuses it",
                        "write a space instead of the tab",
                    ));
                }
                _ => blank = c.is_whitespace(),
            }
        }
        start += line.len();
    }
    None
}

#[cfg(test)]
mod tests;
