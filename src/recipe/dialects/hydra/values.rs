//! Typed access to the values of a composed config.

use crate::recipe::schema::reading::{Reading, wrong_type};
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

/// The type of a key.
#[derive(Debug, Clone, Copy)]
pub enum Type {
    Int,
    Float,
    Bool,
    Text,
}

/// Reads the values of a config and reports values of a wrong type. Null and
/// `???` count as absent.
pub struct Values<'n> {
    root: &'n Node,
}

impl<'n> Values<'n> {
    pub fn new(root: &'n Node) -> Values<'n> {
        Values { root }
    }

    /// Writes the values of keys to native paths. `keys`: native path, type, key.
    pub fn translate(&self, keys: &[(&str, Type, &str)], tree: &mut Tree, reading: &mut Reading) {
        for (path, kind, key) in keys {
            match kind {
                Type::Int => tree.plain_if(path, self.int(key, reading)),
                Type::Float => tree.plain_if(path, self.float(key, reading)),
                Type::Bool => tree.plain_if(path, self.bool(key, reading)),
                Type::Text => tree.text_if(path, self.text(key, reading)),
            }
        }
    }

    /// Whether a key exists, whatever its value.
    pub fn has(&self, key: &str) -> bool {
        self.root.get_path(key).is_some()
    }

    /// A key's node, unless it is null or `???`.
    pub fn node(&self, key: &str) -> Option<&'n Node> {
        self.root.get_path(key).filter(|node| {
            let resolved = node.resolve(Schema::OmegaConf);
            !matches!(resolved, Some(Resolved::Null | Resolved::Missing))
        })
    }

    /// The value that `take` makes of a key's node.
    fn value<T>(
        &self,
        key: &str,
        expected: &str,
        reading: &mut Reading,
        take: impl Fn(&Resolved) -> Option<T>,
    ) -> Option<Given<T>> {
        let node = self.node(key)?;
        let resolved = node.resolve(Schema::OmegaConf);
        if let Some(value) = resolved.as_ref().and_then(take) {
            return Some(Given::new(key, value, node.span));
        }
        let problem = wrong_type(key, node, Schema::OmegaConf, expected);
        reading.diagnostics.push(problem);
        None
    }

    /// An integer; any other type is reported.
    pub fn int(&self, key: &str, reading: &mut Reading) -> Option<Given<i128>> {
        self.value(key, "a whole number", reading, |resolved| match resolved {
            Resolved::Int(value) => Some(*value),
            _ => None,
        })
    }

    /// A number; any other type is reported.
    pub fn float(&self, key: &str, reading: &mut Reading) -> Option<Given<f64>> {
        self.value(key, "a number", reading, Resolved::number)
    }

    /// A boolean; any other type is reported.
    pub fn bool(&self, key: &str, reading: &mut Reading) -> Option<Given<bool>> {
        self.value(key, "true or false", reading, |resolved| match resolved {
            Resolved::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// Text; a number is taken as its digits.
    pub fn text(&self, key: &str, reading: &mut Reading) -> Option<Given<String>> {
        let written = self.node(key).and_then(Node::text).unwrap_or_default();
        self.value(key, "text", reading, |resolved| match resolved {
            Resolved::Str(text) => Some(text.clone()),
            Resolved::Int(_) | Resolved::Float(_) => Some(written.to_owned()),
            _ => None,
        })
    }

    /// The counterpart of one of the given words; another word is reported.
    pub fn word<T: Copy>(
        &self,
        key: &str,
        words: &[(&str, T)],
        reading: &mut Reading,
    ) -> Option<Given<T>> {
        let given = self.text(key, reading)?;
        let found = words.iter().find(|(word, _)| *word == given.value);
        if found.is_none() {
            let words = words.iter().map(|(word, _)| *word);
            reading.unknown_value(key, &given.value, given.span, words);
        }
        found.map(|(_, value)| given.with(*value))
    }

    /// The items of a list of texts; a single text counts as a list of one.
    pub fn texts(&self, key: &str, reading: &mut Reading) -> Vec<Given<String>> {
        let mut texts = Vec::new();
        let Some(node) = self.node(key) else {
            return texts;
        };
        let items = node.items().unwrap_or(std::slice::from_ref(node));
        for (index, item) in items.iter().enumerate() {
            if let Some(text) = item.text() {
                let key = format!("{key}.{index}");
                texts.push(Given::new(key, text.to_owned(), item.span));
            } else {
                let message = format!("`{key}` takes a list of texts, this is {}", item.kind());
                let help = "give one name an item";
                reading.error("wrong-type", Some(item.span), message, help);
            }
        }
        texts
    }
}
