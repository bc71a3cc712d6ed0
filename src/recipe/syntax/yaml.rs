//! YAML (and its subset JSON) to a [`Node`] tree with positions, within budgets.
//!
//! Only this module uses the parser: `granit-parser` gives events with byte offsets. This module
//! builds a tree from them, expands aliases, merges `<<` and reports duplicate keys.
//! Hostile input ends in a diagnostic: size, depth and the tree after alias expansion are bounded.

mod budget;
mod keys;
mod problem;
mod tabs;
mod tags;

use std::collections::HashMap;

use granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError};

use super::diagnostic::Diagnostic;
use super::node::{Entry, Node, Value};
use super::scalar::Scalar;
use super::source::{FileId, Span};

use keys::{duplicate, merge};
use problem::{Problem, over_budget, problem, too_deep};
use tags::{collection_tag, scalar_tag};

pub use budget::{MAX_DEPTH, MAX_NODES, MAX_TEXT};
pub(crate) use budget::{Weight, weigh};

/// The largest accepted file, bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// As [`parse`], and refuses tabs where PyYAML does.
pub fn parse_as_pyyaml(
    text: &str,
    file: FileId,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Node> {
    let (root, quoted) = parse_with_quotes(text, file, diagnostics)?;
    if let Some(problem) = tabs::find(text, file, &quoted) {
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
    if text.len() > MAX_BYTES {
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            None,
            format!(
                "the file has {} bytes, the limit is {MAX_BYTES}",
                text.len()
            ),
            "check that this is the right file",
        ));
        return None;
    }
    let options = granit_parser::options! {
        emit_comments: false,
        block_nesting_limit: MAX_DEPTH,
        flow_nesting_limit: MAX_DEPTH,
    };
    let mut builder = Builder::new(file, diagnostics);
    for next in Parser::new_from_str_with_options(text, options) {
        let step = match next {
            Ok((event, span)) => builder.event(event, builder.span(span)),
            Err(error) => Err(builder.syntax(&error, text)),
        };
        if let Err(problem) = step {
            builder.diagnostics.push(*problem);
            return None;
        }
    }
    let quoted = std::mem::take(&mut builder.quoted);
    builder.finish().map(|root| (root, quoted))
}

/// A collection that is still open.
struct Open {
    span: Span,
    anchor: usize,
    /// The totals at its start, from which its own weight follows at its end.
    before: Weight,
    content: Content,
}

enum Content {
    Sequence(Vec<Node>),
    Mapping {
        entries: Vec<Entry>,
        /// Positions of the keys in `entries`.
        index: HashMap<String, usize>,
        /// Values of `<<` keys.
        merges: Vec<Node>,
        /// A key that has no value yet.
        key: Option<(String, bool, Span)>,
    },
}

struct Builder<'d> {
    file: FileId,
    diagnostics: &'d mut Vec<Diagnostic>,
    open: Vec<Open>,
    anchors: HashMap<usize, (Node, Weight)>,
    total: Weight,
    root: Option<Node>,
    documents: usize,
    /// The byte ranges of scalars that are quoted or blocks.
    quoted: Vec<(usize, usize)>,
}

impl<'d> Builder<'d> {
    fn new(file: FileId, diagnostics: &'d mut Vec<Diagnostic>) -> Self {
        Builder {
            file,
            diagnostics,
            open: Vec::new(),
            anchors: HashMap::new(),
            total: Weight::default(),
            root: None,
            documents: 0,
            quoted: Vec::new(),
        }
    }

    fn span(&self, span: granit_parser::Span) -> Span {
        let start = span.start.byte_offset().unwrap_or(0);
        Span {
            file: self.file,
            start,
            end: span.end.byte_offset().unwrap_or(start).max(start),
            line: u32::try_from(span.start.line()).unwrap_or(u32::MAX),
            column: u32::try_from(span.start.col() + 1).unwrap_or(u32::MAX),
        }
    }

    fn syntax(&self, error: &ScanError, text: &str) -> Problem {
        let span = self.span(granit_parser::Span::empty(*error.marker()));
        if *error.kind() == ErrorKind::RecursionLimitExceeded {
            return too_deep(span);
        }
        let line = text
            .lines()
            .nth(span.line.saturating_sub(1) as usize)
            .unwrap_or("");
        let help = if line.trim_start_matches(' ').starts_with('\t') {
            "indent YAML with spaces, not with tabs"
        } else if *error.kind() == ErrorKind::UnknownAnchor {
            "an alias `*name` needs an anchor `&name` before it"
        } else {
            "check the indentation, the quotes and the brackets before this position"
        };
        problem(span, error.kind().to_string(), help)
    }

    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), Problem> {
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(problem(
                        span,
                        "the file holds more than one document",
                        "keep one recipe in a file: remove everything after `---`",
                    ));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                if style != ScalarStyle::Plain {
                    self.quoted.push((span.start, span.end));
                }
                let tag = tag.map(|t| scalar_tag(&t, span)).transpose()?;
                let plain = style == ScalarStyle::Plain;
                let text = text.into_owned();
                self.scalar(Scalar { text, plain, tag }, anchor, span)
            }
            Event::SequenceStart(_, anchor, tag) => {
                collection_tag(tag.as_deref(), "seq", span)?;
                self.start(anchor, span, Content::Sequence(Vec::new()))
            }
            Event::MappingStart(_, anchor, tag) => {
                collection_tag(tag.as_deref(), "map", span)?;
                let content = Content::Mapping {
                    entries: Vec::new(),
                    index: HashMap::new(),
                    merges: Vec::new(),
                    key: None,
                };
                self.start(anchor, span, content)
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(span),
            Event::Alias(id) => self.alias(id, span),
            Event::UnresolvedAlias(name) => Err(problem(
                span,
                format!("the alias `*{name}` has no anchor"),
                "an alias `*name` needs an anchor `&name` before it",
            )),
            _ => Ok(()),
        }
    }

    fn scalar(&mut self, scalar: Scalar, anchor: usize, span: Span) -> Result<(), Problem> {
        let weight = Weight::leaf(scalar.text.len());
        self.spend(weight, span)?;
        let node = Node {
            value: Value::Scalar(scalar),
            span,
            key: None,
        };
        if anchor != 0 {
            self.anchors.insert(anchor, (node.clone(), weight));
        }
        self.place(node)
    }

    fn alias(&mut self, id: usize, span: Span) -> Result<(), Problem> {
        let Some((node, weight)) = self.anchors.get(&id) else {
            return Err(problem(
                span,
                "the alias is inside the value that it names",
                "write the value out, or name another anchor",
            ));
        };
        if self.open.len() + weight.height > MAX_DEPTH {
            return Err(too_deep(span));
        }
        // Counted before the copy, so that a bomb never allocates its memory.
        let total = self.total.with(*weight);
        self.total = total.ok_or_else(|| over_budget(span))?;
        let node = node.clone();
        self.place(node)
    }

    fn spend(&mut self, weight: Weight, span: Span) -> Result<(), Problem> {
        let total = self.total.with(weight);
        self.total = total.ok_or_else(|| over_budget(span))?;
        Ok(())
    }

    fn start(&mut self, anchor: usize, span: Span, content: Content) -> Result<(), Problem> {
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep(span));
        }
        let before = self.total;
        self.spend(Weight::leaf(0), span)?;
        self.open.push(Open {
            span,
            anchor,
            before,
            content,
        });
        Ok(())
    }

    fn end(&mut self, end: Span) -> Result<(), Problem> {
        let Some(open) = self.open.pop() else {
            return Ok(());
        };
        let mut span = open.span;
        span.end = end.end.max(span.end);
        let (value, merged) = match open.content {
            Content::Sequence(items) => (Value::Sequence(items), false),
            Content::Mapping {
                entries, merges, ..
            } => {
                let merged = !merges.is_empty();
                (Value::Mapping(merge(entries, merges)?), merged)
            }
        };
        let node = Node {
            value,
            span,
            key: None,
        };
        if merged || open.anchor != 0 {
            let weight = weigh(&node);
            if merged {
                // Values that the merge dropped do not count.
                self.total = open.before;
                self.spend(weight, span)?;
            }
            if open.anchor != 0 {
                // The copy for the anchor costs memory as well.
                self.spend(weight, span)?;
                self.anchors.insert(open.anchor, (node.clone(), weight));
            }
        }
        self.place(node)
    }

    /// Adds a finished node to the innermost open collection.
    fn place(&mut self, node: Node) -> Result<(), Problem> {
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match &mut open.content {
            Content::Sequence(items) => items.push(node),
            Content::Mapping {
                entries,
                index,
                merges,
                key,
            } => match key.take() {
                None => {
                    let Value::Scalar(scalar) = node.value else {
                        return Err(problem(
                            node.span,
                            format!("a key must be a single value, this is {}", node.kind()),
                            "quote the key if its brackets are part of it",
                        ));
                    };
                    *key = Some((scalar.text, scalar.plain, node.span));
                }
                Some((name, true, _)) if name == "<<" => merges.push(node),
                Some((name, _, name_span)) => {
                    let entry = Entry {
                        name: name.clone(),
                        name_span,
                        value: node,
                    };
                    match index.get(&name) {
                        None => {
                            index.insert(name, entries.len());
                            entries.push(entry);
                        }
                        Some(&at) => {
                            self.diagnostics.push(duplicate(&entries[at], &entry));
                            entries[at] = entry;
                        }
                    }
                }
            },
        }
        Ok(())
    }

    fn finish(self) -> Option<Node> {
        if self.root.is_none() {
            self.diagnostics.push(Diagnostic::error(
                "yaml-syntax",
                None,
                "the file is empty",
                "check that this is the right file",
            ));
        }
        self.root
    }
}

#[cfg(test)]
mod tests;
