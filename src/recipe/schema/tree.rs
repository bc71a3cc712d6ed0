//! Building a native tree: values with their places, and the tree itself.

use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::source::Span;

/// A value from the user, with its upstream key and place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given<T> {
    pub key: String,
    pub value: T,
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

    /// Text from the user, as an item of a list.
    pub fn of(given: &Given<String>) -> Tree {
        let mut root = Node::string(&given.value, given.span);
        root.key = Some(given.key.clone());
        Tree { root }
    }

    pub fn into_node(self) -> Node {
        self.root
    }

    /// Sets a default of the dialect. It has no key, and the place of the file's root.
    pub fn default(&mut self, path: &str, text: impl ToString) {
        let node = Node::plain(text.to_string(), self.root.span);
        self.root.set_path(path, node);
    }

    /// Sets a number or boolean from the user.
    pub fn plain<T: ToString>(&mut self, path: &str, given: &Given<T>) {
        let text = given.value.to_string();
        // YAML would read Rust's spellings as strings.
        let text = match text.as_str() {
            "NaN" => ".nan",
            "inf" => ".inf",
            "-inf" => "-.inf",
            text => text,
        };
        self.put(path, &given.key, Node::plain(text, given.span));
    }

    /// As [`Tree::plain`], if the user gives the value.
    pub fn plain_if<T: ToString>(&mut self, path: &str, given: Option<Given<T>>) {
        if let Some(given) = given {
            self.plain(path, &given);
        }
    }

    /// Sets text from the user.
    pub fn text(&mut self, path: &str, given: &Given<String>) {
        let node = Node::string(&given.value, given.span);
        self.put(path, &given.key, node);
    }

    /// As [`Tree::text`], if the user gives the value.
    pub fn text_if(&mut self, path: &str, given: Option<Given<String>>) {
        if let Some(given) = given {
            self.text(path, &given);
        }
    }

    /// The value at a native path, if it is set.
    pub fn get(&self, path: &str) -> Option<&Node> {
        self.root.get_path(path)
    }

    /// Overrides values of this tree with those of another native tree.
    pub fn lay(&mut self, tree: Node) {
        self.root.overlay(tree);
    }

    /// Appends an item to the list at `path`. The list has the place of its first item.
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

    /// Sets a value from the user without conversion.
    pub fn put(&mut self, path: &str, key: &str, mut node: Node) {
        node.key = Some(key.to_owned());
        self.root.set_path(path, node);
    }
}
