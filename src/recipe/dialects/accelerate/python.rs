//! Values of a config as Python objects, whose text is `str`'s.

use std::fmt;

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

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
            Value::Float(value) => f.write_str(&float(*value)),
            Value::Str(text) => f.write_str(text),
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(Value::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
        }
    }
}

/// Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16.
fn float(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string().to_lowercase();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float(value), text);
        }
    }
}
