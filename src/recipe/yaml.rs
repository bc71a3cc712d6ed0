//! YAML (and JSON, which is a part of it) to a [`Node`] tree with places, within budgets.
//!
//! The one place that knows the parser underneath: `granit-parser` gives events with byte offsets;
//! here they become a tree, with aliases expanded, `<<` merged and keys written twice reported.
//! Hostile input ends in a diagnostic: size, depth and the tree after alias expansion are bounded.

use std::collections::HashMap;

use granit_parser::{ErrorKind, Event, Parser, ScalarStyle, ScanError};

use super::diagnostic::{Diagnostic, Severity};
use super::node::{Entry, Node, Scalar, Tag, Value};
use super::source::{FileId, Span};

/// The largest file that is read, bytes.
pub const MAX_BYTES: usize = 1 << 20;
/// The deepest nesting of lists and mappings.
pub const MAX_DEPTH: usize = 64;
/// The most nodes, with every alias counted as what it stands for.
pub const MAX_NODES: usize = 100_000;
/// The most bytes of scalars and keys, with every alias counted as what it stands for.
pub const MAX_TEXT: usize = 8 << 20;

/// Parses one document. On failure the diagnostics hold at least one error.
pub fn parse(text: &str, file: FileId, diagnostics: &mut Vec<Diagnostic>) -> Option<Node> {
    if text.len() > MAX_BYTES {
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            None,
            format!(
                "the file has {} bytes, the limit is {MAX_BYTES}",
                text.len()
            ),
            "recipes are small: is this the right file?",
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
    builder.finish()
}

type Problem = Box<Diagnostic>;

/// How much a subtree weighs against the budgets.
#[derive(Clone, Copy, Default)]
struct Weight {
    nodes: usize,
    text: usize,
    /// Levels of nesting, 1 for a scalar.
    height: usize,
}

fn weigh(node: &Node) -> Weight {
    let mut weight = Weight {
        nodes: 1,
        text: 0,
        height: 0,
    };
    let mut add = |child: Weight| {
        weight.nodes += child.nodes;
        weight.text += child.text;
        weight.height = weight.height.max(child.height);
    };
    match &node.value {
        Value::Scalar(scalar) => add(Weight {
            nodes: 0,
            text: scalar.text.len(),
            height: 0,
        }),
        Value::Sequence(items) => items.iter().map(weigh).for_each(add),
        Value::Mapping(entries) => {
            for entry in entries {
                let mut child = weigh(&entry.value);
                child.nodes += 1;
                child.text += entry.name.len();
                add(child);
            }
        }
    }
    weight.height += 1;
    weight
}

/// A collection whose end has not come yet.
struct Open {
    span: Span,
    anchor: usize,
    /// The totals when it began, so that its own weight is known when it ends.
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
        /// A key whose value has not come yet.
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
            "YAML is indented with spaces, never with tabs"
        } else if *error.kind() == ErrorKind::UnknownAnchor {
            "an alias `*name` needs an anchor `&name` before it"
        } else {
            "check the indentation, the quotes and the brackets up to this place"
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
                        "keep one recipe a file: remove what follows `---`",
                    ));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                let tag = tag.map(|t| scalar_tag(&t, span)).transpose()?;
                self.scalar(text.into_owned(), style, anchor, tag, span)
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

    fn scalar(
        &mut self,
        text: String,
        style: ScalarStyle,
        anchor: usize,
        tag: Option<Tag>,
        span: Span,
    ) -> Result<(), Problem> {
        let weight = Weight {
            nodes: 1,
            text: text.len(),
            height: 1,
        };
        self.spend(weight, span)?;
        let plain = style == ScalarStyle::Plain;
        let node = Node {
            value: Value::Scalar(Scalar { text, plain, tag }),
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
                "the alias stands inside the very value it names",
                "write the value out, or name another anchor",
            ));
        };
        let weight = *weight;
        // Counted before it is copied: a bomb never gets its memory.
        if self.total.nodes + weight.nodes > MAX_NODES || self.total.text + weight.text > MAX_TEXT {
            return Err(over_budget(span));
        }
        if self.open.len() + weight.height > MAX_DEPTH {
            return Err(too_deep(span));
        }
        let node = node.clone();
        self.spend(weight, span)?;
        self.place(node)
    }

    fn spend(&mut self, weight: Weight, span: Span) -> Result<(), Problem> {
        self.total.nodes += weight.nodes;
        self.total.text += weight.text;
        if self.total.nodes > MAX_NODES || self.total.text > MAX_TEXT {
            return Err(over_budget(span));
        }
        Ok(())
    }

    fn start(&mut self, anchor: usize, span: Span, content: Content) -> Result<(), Problem> {
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep(span));
        }
        let before = self.total;
        let weight = Weight {
            nodes: 1,
            text: 0,
            height: 1,
        };
        self.spend(weight, span)?;
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
                // What the merge threw away is not counted on.
                self.total = open.before;
                self.spend(weight, span)?;
            }
            if open.anchor != 0 {
                // The copy that the anchor keeps costs memory as well.
                self.spend(weight, span)?;
                self.anchors.insert(open.anchor, (node.clone(), weight));
            }
        }
        self.place(node)
    }

    /// Puts a finished node where it belongs.
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
                            "put quotes around the key if its brackets belong to it",
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
                "is this the right file?",
            ));
        }
        self.root
    }
}

fn problem(span: Span, message: impl Into<String>, help: &str) -> Problem {
    Box::new(Diagnostic::error("yaml-syntax", Some(span), message, help))
}

fn too_deep(span: Span) -> Problem {
    problem(
        span,
        format!("values are nested more than {MAX_DEPTH} deep"),
        "no recipe key nests so deep: check the brackets, the indentation and the aliases",
    )
}

fn over_budget(span: Span) -> Problem {
    problem(
        span,
        format!("the values come to more than {MAX_NODES} nodes or {MAX_TEXT} bytes"),
        "aliases that hold aliases multiply: write out what is meant",
    )
}

/// A key written twice: upstream loaders silently take the last, so a contradiction is refused.
fn duplicate(first: &Entry, second: &Entry) -> Diagnostic {
    let same = first.value.same_value(&second.value);
    Diagnostic {
        rule: "duplicate-key".to_owned(),
        severity: if same {
            Severity::Warning
        } else {
            Severity::Error
        },
        message: format!(
            "`{}` is given twice, first on line {}{}",
            second.name,
            first.name_span.line,
            if same { ", with the same value" } else { "" }
        ),
        help: "keep one of the two: loaders silently take the last".to_owned(),
        span: Some(second.name_span),
    }
}

/// Merges `<<` values below a mapping's own keys; the first mapping of a `<<` list wins.
fn merge(own: Vec<Entry>, merges: Vec<Node>) -> Result<Vec<Entry>, Problem> {
    if merges.is_empty() {
        return Ok(own);
    }
    let mut names: std::collections::HashSet<String> = own.iter().map(|e| e.name.clone()).collect();
    let mut entries = own;
    // Of several `<<` keys the last wins, as in PyYAML.
    for node in merges.into_iter().rev() {
        let sources = match node.value {
            Value::Sequence(items) => items,
            _ => vec![node],
        };
        for source in sources {
            let (kind, span) = (source.kind(), source.span);
            let Value::Mapping(merged) = source.value else {
                return Err(problem(
                    span,
                    format!("`<<` merges mappings, this is {kind}"),
                    "name an anchor of a mapping: `<<: *name`",
                ));
            };
            for entry in merged {
                if names.insert(entry.name.clone()) {
                    entries.push(entry);
                }
            }
        }
    }
    Ok(entries)
}

fn scalar_tag(tag: &granit_parser::Tag, span: Span) -> Result<Tag, Problem> {
    if tag.original() == "!" {
        return Ok(Tag::Str);
    }
    match tag.core_suffix() {
        Some("str") => Ok(Tag::Str),
        Some("int") => Ok(Tag::Int),
        Some("float") => Ok(Tag::Float),
        Some("bool") => Ok(Tag::Bool),
        Some("null") => Ok(Tag::Null),
        _ => Err(unknown_tag(tag, span)),
    }
}

fn collection_tag(
    tag: Option<&granit_parser::Tag>,
    expected: &str,
    span: Span,
) -> Result<(), Problem> {
    match tag {
        Some(tag) if tag.core_suffix() != Some(expected) => Err(unknown_tag(tag, span)),
        _ => Ok(()),
    }
}

fn unknown_tag(tag: &granit_parser::Tag, span: Span) -> Problem {
    problem(
        span,
        format!("the tag `{}` has no meaning here", tag.original()),
        "remove the tag: upstream's safe loader refuses it too",
    )
}

#[cfg(test)]
mod tests;
