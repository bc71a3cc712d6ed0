//! Casts of Hydra's grammar, which behave like Python's: `str(1e-3)`, `int('3')`, `float([1, 2])`.
//!
//! Source: Hydra 1.3, `_internal/grammar/grammar_functions.py` (`cast_int` and its neighbours).

use crate::recipe::syntax::node::{Entry, Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;

use super::primitive::yaml_float;

/// The target type of a cast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cast {
    Int,
    Float,
    Str,
    Bool,
}

impl Cast {
    /// The cast with this name.
    pub fn of(name: &str) -> Option<Cast> {
        match name {
            "int" => Some(Cast::Int),
            "float" => Some(Cast::Float),
            "str" => Some(Cast::Str),
            "bool" => Some(Cast::Bool),
            _ => None,
        }
    }

    /// The value after the cast, which applies to every value of a collection; `None` if it fails.
    pub fn of_value(self, node: &Node, span: Span) -> Option<Node> {
        let value = match &node.value {
            Value::Scalar(_) => return self.scalar(node, span),
            Value::Sequence(items) => {
                let items = items.iter().map(|item| self.of_value(item, span));
                Value::Sequence(items.collect::<Option<_>>()?)
            }
            Value::Mapping(entries) => {
                let entries = entries.iter().map(|entry| {
                    Some(Entry {
                        value: self.of_value(&entry.value, span)?,
                        ..entry.clone()
                    })
                });
                Value::Mapping(entries.collect::<Option<_>>()?)
            }
        };
        Some(Node {
            value,
            ..node.clone()
        })
    }

    fn scalar(self, node: &Node, span: Span) -> Option<Node> {
        let value = node.resolve(Schema::OmegaConf)?;
        let plain = |text: String| Some(Node::plain(text, span));
        match self {
            Cast::Int => plain(int(&value)?.to_string()),
            Cast::Float => plain(yaml_float(float(&value)?)),
            Cast::Str => Some(Node::string(text(&value)?, span)),
            Cast::Bool => plain(truth(&value)?.to_string()),
        }
    }
}

fn int(value: &Resolved) -> Option<i128> {
    match value {
        Resolved::Int(value) => Some(*value),
        Resolved::Bool(value) => Some((*value).into()),
        // Rounds towards zero; NaN and infinities have no integer.
        Resolved::Float(value) if value.is_finite() => Some(value.trunc() as i128),
        Resolved::Str(text) => digits(text)?.parse().ok(),
        _ => None,
    }
}

fn float(value: &Resolved) -> Option<f64> {
    match value {
        Resolved::Int(value) => Some(*value as f64),
        Resolved::Bool(value) => Some(f64::from(u8::from(*value))),
        Resolved::Float(value) => Some(*value),
        // Rust accepts Python's spellings, `inf`, `infinity` and `nan` too.
        Resolved::Str(text) => digits(text)?.parse().ok(),
        _ => None,
    }
}

fn text(value: &Resolved) -> Option<String> {
    match value {
        Resolved::Null => None,
        Resolved::Bool(value) => Some(value.to_string()),
        other => Some(other.to_string()),
    }
}

fn truth(value: &Resolved) -> Option<bool> {
    match value {
        Resolved::Int(value) => Some(*value != 0),
        Resolved::Bool(value) => Some(*value),
        Resolved::Float(value) => Some(*value != 0.0),
        Resolved::Str(text) => text.to_ascii_lowercase().parse().ok(),
        Resolved::Null => Some(false),
        Resolved::Missing => None,
    }
}

/// A number's text as Python accepts it: blanks around it, `_` between two digits.
fn digits(text: &str) -> Option<String> {
    let text = text.trim();
    let between = |at: usize| {
        let digit = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_digit);
        let bytes = text.as_bytes();
        at > 0 && digit(bytes.get(at - 1)) && digit(bytes.get(at + 1))
    };
    text.match_indices('_')
        .all(|(at, _)| between(at))
        .then(|| text.replace('_', ""))
}
