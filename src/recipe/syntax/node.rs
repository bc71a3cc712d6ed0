//! The generic tree of a recipe file, before a dialect interprets it.
//!
//! Scalars keep their text. The meaning of `1e-5` or `NO` depends on the dialect; a
//! [`super::scalar::Schema`] resolves it later. Every node knows its place.

use std::collections::HashMap;

use super::scalar::{Resolved, Scalar, Schema};
use super::source::Span;
use super::words::cut;

/// A value in a recipe file, or in the native tree that a reader translates it into.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The content of the node.
    pub value: Value,
    pub span: Span,
    /// In a tree with native keys: the key in the user's dialect. `None` there means that the value is a
    /// default of the dialect.
    pub key: Option<String>,
}

/// The three kinds of YAML node.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A text whose type a schema resolves.
    Scalar(Scalar),
    /// The items of a list.
    Sequence(Vec<Node>),
    /// Keys and values in file order. Keys are unique.
    Mapping(Vec<Entry>),
}

/// One key of a mapping with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub name: String,
    pub name_span: Span,
    pub value: Node,
}

/// The path of a key below a path, which may be empty.
pub fn joined(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    }
}

impl Node {
    /// A plain scalar. A schema resolves its type.
    pub fn plain(text: impl Into<String>, span: Span) -> Node {
        Node::scalar(text, true, span)
    }

    /// A string, even if its text looks like a number or boolean.
    pub fn string(text: impl Into<String>, span: Span) -> Node {
        Node::scalar(text, false, span)
    }

    /// A value as `argparse` reads it: no octal, hexadecimal or base-60 numbers. The other spellings of Python's `int`
    /// (`016`, `+8`, `1_6`) are text as well.
    pub(crate) fn argument(text: &str, span: Span) -> Node {
        let node = Node::plain(text, span);
        match node.resolve(Schema::PyYaml) {
            Some(Resolved::Int(value)) if value.to_string() != text => Node::string(text, span),
            _ => node,
        }
    }

    pub(super) fn scalar(text: impl Into<String>, plain: bool, span: Span) -> Node {
        let text = text.into();
        Node {
            value: Value::Scalar(Scalar { text, plain }),
            span,
            key: None,
        }
    }

    /// A list at a place.
    pub fn sequence(items: Vec<Node>, span: Span) -> Node {
        Node {
            value: Value::Sequence(items),
            span,
            key: None,
        }
    }

    /// An empty mapping at a place.
    pub fn mapping(span: Span) -> Node {
        Node {
            value: Value::Mapping(Vec::new()),
            span,
            key: None,
        }
    }

    /// Whether this or a value in it has the place.
    pub(crate) fn is_anywhere(&self, span: Span) -> bool {
        let is_in = |node: &Node| node.is_anywhere(span);
        self.span == span
            || match &self.value {
                Value::Scalar(_) => false,
                Value::Sequence(items) => items.iter().any(is_in),
                Value::Mapping(entries) => entries.iter().any(|entry| is_in(&entry.value)),
            }
    }

    /// The entries, if this is a mapping.
    pub fn entries(&self) -> Option<&[Entry]> {
        match &self.value {
            Value::Mapping(entries) => Some(entries),
            _ => None,
        }
    }

    /// The items, if this is a list.
    pub fn items(&self) -> Option<&[Node]> {
        match &self.value {
            Value::Sequence(items) => Some(items),
            _ => None,
        }
    }

    /// The value under a key of a mapping, or at a position of a list.
    pub fn get(&self, name: &str) -> Option<&Node> {
        match &self.value {
            Value::Scalar(_) => None,
            Value::Sequence(items) => items.get(name.parse::<usize>().ok()?),
            Value::Mapping(entries) => Some(&entries.iter().find(|e| e.name == name)?.value),
        }
    }

    /// As [`Node::get`], to change the value.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Node> {
        let Value::Mapping(entries) = &mut self.value else {
            return None;
        };
        let mut entries = entries.iter_mut();
        Some(&mut entries.find(|e| e.name == name)?.value)
    }

    /// The value at a dotted path of keys and positions in lists.
    pub fn get_path(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(self, Node::get)
    }

    /// The scalar's value under a schema; `None` for lists and mappings.
    pub fn resolve(&self, schema: Schema) -> Option<Resolved> {
        match &self.value {
            Value::Scalar(scalar) => Some(schema.resolve(scalar)),
            _ => None,
        }
    }

    /// The whole number of a scalar under a schema.
    pub fn int(&self, schema: Schema) -> Option<i128> {
        match self.resolve(schema)? {
            Resolved::Int(value) => Some(value),
            _ => None,
        }
    }

    /// Whether this is a boolean with that value under a schema.
    pub fn is_bool(&self, value: bool, schema: Schema) -> bool {
        self.resolve(schema) == Some(Resolved::Bool(value))
    }

    /// Whether this is empty under a schema.
    pub fn is_null(&self, schema: Schema) -> bool {
        self.resolve(schema) == Some(Resolved::Null)
    }

    /// The scalar's text, or the kind of a list or mapping, for messages.
    pub fn shown(&self) -> &str {
        self.text().unwrap_or(self.kind())
    }

    /// The scalar's text as written; `None` for lists and mappings.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(scalar) => Some(&scalar.text),
            _ => None,
        }
    }

    /// Whether both trees are equal apart from places. Decides whether a repeated key is a contradiction.
    pub fn same_value(&self, other: &Node) -> bool {
        match (&self.value, &other.value) {
            (Value::Scalar(a), Value::Scalar(b)) => a == b,
            (Value::Sequence(a), Value::Sequence(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same_value(b))
            }
            (Value::Mapping(a), Value::Mapping(b)) => {
                a.len() == b.len()
                    && a.iter()
                        .zip(b)
                        .all(|(a, b)| a.name == b.name && a.value.same_value(&b.value))
            }
            _ => false,
        }
    }

    /// Sets a key of this mapping, replacing an existing value.
    ///
    /// A node of another kind becomes a mapping: readers call this only on trees that they build.
    pub fn set(&mut self, name: &str, name_span: Span, value: Node) {
        if self.entries().is_none() {
            self.value = Value::Mapping(Vec::new());
        }
        if let Value::Mapping(entries) = &mut self.value {
            match entries.iter_mut().find(|e| e.name == name) {
                Some(entry) => {
                    entry.name_span = name_span;
                    entry.value = value;
                }
                None => entries.push(Entry {
                    name: name.to_owned(),
                    name_span,
                    value,
                }),
            }
        }
    }

    /// Sets the value at a dotted path. Creates missing mappings.
    pub fn set_path(&mut self, path: &str, value: Node) {
        let span = value.span;
        match path.split_once('.') {
            None => self.set(path, span, value),
            Some((head, rest)) => {
                if self.get(head).is_none() {
                    self.set(head, span, Node::mapping(span));
                }
                if let Some(below) = self.get_mut(head) {
                    below.set_path(rest, value);
                }
            }
        }
    }

    /// Removes the value at a dotted path of keys and positions in lists.
    pub fn remove_path(&mut self, path: &str) {
        let (head, rest) = cut(path, '.');
        match (&mut self.value, rest) {
            (Value::Mapping(entries), None) => entries.retain(|e| e.name != head),
            (Value::Mapping(_), Some(rest)) => {
                if let Some(below) = self.get_mut(head) {
                    below.remove_path(rest);
                }
            }
            (Value::Sequence(items), rest) => {
                let Some(index) = head.parse::<usize>().ok().filter(|i| *i < items.len()) else {
                    return;
                };
                match rest {
                    None => drop(items.remove(index)),
                    Some(rest) => items[index].remove_path(rest),
                }
            }
            (Value::Scalar(_), _) => {}
        }
    }

    /// Merges `over` into this tree: mappings merge, other values are replaced.
    pub fn overlay(&mut self, over: Node) {
        match over.value {
            Value::Mapping(entries) => {
                let Value::Mapping(present) = &mut self.value else {
                    self.value = Value::Mapping(entries);
                    (self.span, self.key) = (over.span, over.key);
                    return;
                };
                let names = present.iter().enumerate();
                let mut positions: HashMap<String, usize> =
                    names.map(|(at, e)| (e.name.clone(), at)).collect();
                for entry in entries {
                    match positions.get(&entry.name) {
                        Some(&at) => {
                            present[at].name_span = entry.name_span;
                            present[at].value.overlay(entry.value);
                        }
                        None => {
                            positions.insert(entry.name.clone(), present.len());
                            present.push(entry);
                        }
                    }
                }
            }
            _ => *self = over,
        }
    }

    /// Sets the key of every node to its path below `prefix`, for messages.
    pub fn name_keys(&mut self, prefix: &str) {
        self.key = Some(prefix.to_owned());
        self.name_entries(prefix);
    }

    /// As [`Node::name_keys`], without this node itself.
    pub fn name_entries(&mut self, prefix: &str) {
        for (name, child) in self.children_mut() {
            child.name_keys(&joined(prefix, &name));
        }
    }

    /// The values of a mapping with their keys, or of a list with their positions.
    pub fn children_mut(&mut self) -> Vec<(String, &mut Node)> {
        match &mut self.value {
            Value::Scalar(_) => Vec::new(),
            Value::Sequence(items) => {
                let items = items.iter_mut().enumerate();
                items.map(|(at, item)| (at.to_string(), item)).collect()
            }
            Value::Mapping(entries) => {
                let entries = entries.iter_mut();
                entries.map(|e| (e.name.clone(), &mut e.value)).collect()
            }
        }
    }

    /// Changes every place of the tree, those of keys too.
    pub fn each_span(&mut self, change: &impl Fn(&mut Span)) {
        change(&mut self.span);
        match &mut self.value {
            Value::Scalar(_) => {}
            Value::Sequence(items) => items.iter_mut().for_each(|item| item.each_span(change)),
            Value::Mapping(entries) => {
                for entry in entries {
                    change(&mut entry.name_span);
                    entry.value.each_span(change);
                }
            }
        }
    }

    /// Gives every node of the tree one place, for JSON within a text, whose offsets are meaningless.
    pub fn put_at(&mut self, span: Span) {
        self.each_span(&|place| *place = span);
    }

    /// The number of values in this tree.
    pub fn count(&self) -> usize {
        let below: usize = match &self.value {
            Value::Scalar(_) => 0,
            Value::Sequence(items) => items.iter().map(Node::count).sum(),
            Value::Mapping(entries) => entries.iter().map(|e| e.value.count()).sum(),
        };
        1 + below
    }

    /// The kind of this node, for messages.
    pub fn kind(&self) -> &'static str {
        match &self.value {
            Value::Scalar(_) => "a single value",
            Value::Sequence(_) => "a list",
            Value::Mapping(_) => "a mapping",
        }
    }
}
