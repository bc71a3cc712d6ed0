//! The tables of a TOML file, by their headers: enough to tell whose config it is. Nothing else of it is read.

use super::node::{Entry, Node, Value};
use super::source::{FileId, Span};

/// A mapping with an empty mapping for each table, `[training]` and `[training.optimizer]` alike.
pub fn tables(text: &str, file: FileId) -> Node {
    let whole = Span::of(text, 0..0, file);
    let mut entries: Vec<Entry> = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let header = line.trim_start().strip_prefix('[');
        let inside = header.and_then(|rest| rest.trim_start_matches('[').split([']', '.']).next());
        let name = inside.unwrap_or_default().trim();
        if !name.is_empty() && entries.iter().all(|entry| entry.name != name) {
            let at = start + line.find(name).unwrap_or(0);
            let span = Span::of(text, at..at + name.len(), file);
            entries.push(Entry {
                name: name.to_owned(),
                name_span: span,
                value: Node::mapping(span),
            });
        }
        start += line.len();
    }
    Node {
        value: Value::Mapping(entries),
        ..Node::mapping(whole)
    }
}
