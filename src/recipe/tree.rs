//! What readers write with: values with their places, and the native tree they go into.

use super::node::{Node, Value};
use super::source::Span;

/// A value that somebody wrote, with its key and place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given<T> {
    /// The upstream key.
    pub key: String,
    /// The value.
    pub value: T,
    /// Where it stood.
    pub span: Span,
}

impl<T> Given<T> {
    /// A value at a place, under a key.
    pub fn new(key: impl Into<String>, value: T, span: Span) -> Given<T> {
        Given {
            key: key.into(),
            value,
            span,
        }
    }

    /// The same place with another value.
    pub fn with<U>(&self, value: U) -> Given<U> {
        Given {
            key: self.key.clone(),
            value,
            span: self.span,
        }
    }
}

/// A native tree under construction.
pub struct Tree {
    root: Node,
}

impl Tree {
    /// An empty tree for a file.
    pub fn new(span: Span) -> Tree {
        Tree {
            root: Node::mapping(span),
        }
    }

    /// Text that somebody wrote, as an item of a list.
    pub fn of(given: &Given<String>) -> Tree {
        let mut root = Node::string(&given.value, given.span);
        root.key = Some(given.key.clone());
        Tree { root }
    }

    /// The finished tree.
    pub fn into_node(self) -> Node {
        self.root
    }

    /// A default of the dialect: nobody wrote it, so it has no place.
    pub fn default(&mut self, path: &str, text: impl ToString) {
        let node = Node::plain(text.to_string(), self.root.span);
        self.root.set_path(path, node);
    }

    /// A number or truth value that somebody wrote.
    pub fn plain<T: ToString>(&mut self, path: &str, given: &Given<T>) {
        let text = given.value.to_string();
        // What Rust calls them are strings to YAML.
        let text = match text.as_str() {
            "NaN" => ".nan",
            "inf" => ".inf",
            "-inf" => "-.inf",
            text => text,
        };
        self.put(path, &given.key, Node::plain(text, given.span));
    }

    /// A number or truth value that somebody may have written.
    pub fn plain_if<T: ToString>(&mut self, path: &str, given: Option<Given<T>>) {
        if let Some(given) = given {
            self.plain(path, &given);
        }
    }

    /// A list of numbers that somebody wrote.
    pub fn plain_list<T: ToString>(&mut self, path: &str, given: &Given<Vec<T>>) {
        let items = given.value.iter();
        let items = items.map(|item| Node::plain(item.to_string(), given.span));
        let node = Node {
            value: Value::Sequence(items.collect()),
            span: given.span,
            key: None,
        };
        self.put(path, &given.key, node);
    }

    /// Text that somebody wrote.
    pub fn text(&mut self, path: &str, given: &Given<String>) {
        let node = Node::string(&given.value, given.span);
        self.put(path, &given.key, node);
    }

    /// Text that somebody may have written.
    pub fn text_if(&mut self, path: &str, given: Option<Given<String>>) {
        if let Some(given) = given {
            self.text(path, &given);
        }
    }

    /// The value at a native path.
    pub fn get(&self, path: &str) -> Option<&Node> {
        self.root.get_path(path)
    }

    /// Lays the values of another native tree on this one.
    pub fn lay(&mut self, tree: Node) {
        self.root.overlay(tree);
    }

    /// Adds an item to the list at `path`; the list's place is its first item's.
    pub fn push(&mut self, path: &str, item: Tree) {
        let present = self.root.get_path(path).and_then(Node::items);
        let mut items = present.unwrap_or_default().to_vec();
        items.push(item.root);
        let list = Node {
            span: items[0].span,
            key: items[0].key.clone(),
            value: Value::Sequence(items),
        };
        self.root.set_path(path, list);
    }

    /// A value that somebody wrote, as it is.
    pub fn put(&mut self, path: &str, key: &str, mut node: Node) {
        node.key = Some(key.to_owned());
        self.root.set_path(path, node);
    }
}
