//! Values of a config as Python objects, whose text is `str`'s.

use std::fmt;

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema, python_float};

/// A Python object that YAML can hold, except mappings.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
    List(Vec<Value>),
}

impl Value {
    /// The value of a node; mappings have none.
    pub fn of(node: &Node, schema: Schema) -> Option<Value> {
        if let Some(items) = node.items() {
            let items = items.iter().map(|item| Value::of(item, schema));
            return items.collect::<Option<_>>().map(Value::List);
        }
        Some(match node.resolve(schema)? {
            Resolved::Null => Value::None,
            Resolved::Bool(value) => Value::Bool(value),
            Resolved::Int(value) => Value::Int(value),
            Resolved::Float(value) => Value::Float(value),
            Resolved::Str(text) => Value::Str(text),
            Resolved::Missing => Value::Str("???".to_owned()),
        })
    }

    /// The truth value, as Python's `bool` gives it.
    pub fn is_true(&self) -> bool {
        match self {
            Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) => !text.is_empty(),
            Value::List(items) => !items.is_empty(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::None => f.write_str("None"),
            Value::Bool(true) => f.write_str("True"),
            Value::Bool(false) => f.write_str("False"),
            Value::Int(value) => value.fmt(f),
            Value::Float(value) => f.write_str(&python_float(*value)),
            Value::Str(text) => f.write_str(text),
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(Value::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
        }
    }
}
