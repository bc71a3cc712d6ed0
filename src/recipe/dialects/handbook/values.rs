//! The values of a recipe, with the types of upstream's dataclasses.
//!
//! `TrlParser` hands YAML values to `argparse` as defaults, and `argparse` converts a default only
//! if it is a string. So `learning_rate: 1e-5`, a string to PyYAML, becomes a float there.
//! transformers' own `parse_yaml_file` keeps the string, and the run crashes later. A value with
//! one possible meaning is converted with a warning (`scalar-type`); any other is an error.

use crate::recipe::schema::reading::{Reading, wrong_type};
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};

use super::keys::Kind;

/// Fields of `TrainingArguments` that the trainer computes with. Upstream's parsers turn an empty
/// value into None, and the trainer fails on it, whatever the default is.
const NEVER_EMPTY: [&str; 4] = [
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
];

/// The typed values of one mapping.
pub(crate) struct Values<'n> {
    /// Goes before the keys in messages.
    pub prefix: String,
    /// Names, values, and the scalars among them with their upstream types.
    values: Vec<(&'n str, &'n Node, Option<Resolved>)>,
}

impl<'n> Values<'n> {
    /// Checks a mapping's values. `kind_of` gives a key's type, or `None` for a key that has been
    /// reported. `prefix` goes before the keys in messages (`dataset_mixture.datasets.0.`). Empty
    /// values count as absent where upstream accepts them.
    pub fn check(
        mapping: &'n Node,
        prefix: &str,
        kind_of: impl Fn(&str) -> Option<Kind>,
        reading: &mut Reading,
    ) -> Values<'n> {
        let mut values = Vec::new();
        for entry in mapping.entries().unwrap_or_default() {
            let Some(kind) = kind_of(&entry.name) else {
                continue;
            };
            let key = format!("{prefix}{}", entry.name);
            if entry.value.is_null(Schema::PyYaml) {
                if NEVER_EMPTY.contains(&key.as_str()) {
                    reading.error(
                        "wrong-type",
                        Some(entry.name_span),
                        format!("`{key}` is empty: the trainer reads None, not a number"),
                        "give a whole number, or remove the line for the default",
                    );
                }
                continue;
            }
            match typed(&entry.value, kind, &key, reading) {
                Ok(scalar) => values.push((entry.name.as_str(), &entry.value, scalar)),
                Err(problem) => reading.diagnostics.push(problem),
            }
        }
        let prefix = prefix.to_owned();
        Values { prefix, values }
    }

    fn scalar<T>(&self, key: &str, convert: impl Fn(&Resolved) -> Option<T>) -> Option<Given<T>> {
        let (_, node, scalar) = self.values.iter().find(|(name, ..)| *name == key)?;
        let value = convert(scalar.as_ref()?)?;
        Some(Given::new(
            format!("{}{key}", self.prefix),
            value,
            node.span,
        ))
    }

    pub fn bool(&self, key: &str) -> Option<Given<bool>> {
        self.scalar(key, |value| match value {
            Resolved::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// Whether a boolean is given and true.
    pub fn is_true(&self, key: &str) -> bool {
        self.bool(key).is_some_and(|given| given.value)
    }

    pub fn int(&self, key: &str) -> Option<Given<i128>> {
        self.scalar(key, |value| match value {
            Resolved::Int(value) => Some(*value),
            _ => None,
        })
    }

    pub fn float(&self, key: &str) -> Option<Given<f64>> {
        self.scalar(key, Resolved::number)
    }

    pub fn text(&self, key: &str) -> Option<Given<String>> {
        self.scalar(key, |value| match value {
            Resolved::Str(value) => Some(value.clone()),
            _ => None,
        })
    }

    /// The node of a value; `None` for an empty value.
    pub fn node(&self, key: &str) -> Option<&'n Node> {
        let found = self.values.iter().find(|(name, ..)| *name == key);
        found.map(|(_, node, _)| *node)
    }
}

/// Converts a value to its upstream type. `None`: it is a list or a mapping, and its type allows one.
fn typed(
    node: &Node,
    kind: Kind,
    key: &str,
    reading: &mut Reading,
) -> Result<Option<Resolved>, Diagnostic> {
    let expected = match kind {
        Kind::Bool => "true or false",
        Kind::Int => "a whole number",
        Kind::Float => "a number",
        Kind::Str => "text",
        Kind::List => "a list",
        Kind::Dict => "a mapping",
        Kind::Any => "a value",
    };
    let wrong = || wrong_type(key, node, Schema::PyYaml, expected);
    let Some(resolved) = node.resolve(Schema::PyYaml) else {
        let fits = match &node.value {
            _ if kind == Kind::Any => true,
            Value::Sequence(_) => kind == Kind::List,
            _ => kind == Kind::Dict,
        };
        return if fits { Ok(None) } else { Err(wrong()) };
    };
    let text = node.text().unwrap_or_default();
    // The value; for one of the wrong type that has one possible meaning, its correct spelling.
    let (value, write) = match (kind, &resolved) {
        (Kind::Bool | Kind::Any, Resolved::Bool(_))
        | (Kind::Int | Kind::Float | Kind::Any, Resolved::Int(_))
        | (Kind::Float | Kind::Any, Resolved::Float(_)) => (resolved.clone(), None),
        (Kind::Bool, Resolved::Int(0 | 1) | Resolved::Str(_)) => {
            let value = truth(&resolved.to_string()).ok_or_else(wrong)?;
            (Resolved::Bool(value), Some(value.to_string()))
        }
        // Python's `int` of a string, for decimal digits, and its `float`, for finite numbers.
        (Kind::Int, Resolved::Str(text)) => {
            let value: i128 = text.trim().parse().map_err(|_| wrong())?;
            (Resolved::Int(value), Some(value.to_string()))
        }
        (Kind::Float, Resolved::Str(text)) => {
            let value = text
                .trim()
                .parse()
                .ok()
                .filter(|value: &f64| value.is_finite());
            let value = value.ok_or_else(wrong)?;
            (Resolved::Float(value), Some(yaml_float(value)))
        }
        (Kind::Str, Resolved::Bool(_)) => {
            (Resolved::Str(text.to_owned()), Some(format!("\"{text}\"")))
        }
        (Kind::Str, Resolved::Str(_) | Resolved::Int(_) | Resolved::Float(_))
        | (Kind::List | Kind::Dict, Resolved::Str(_))
        | (Kind::Any, _) => (Resolved::Str(text.to_owned()), None),
        _ => return Err(wrong()),
    };
    // An argument parser and JSON have already converted the values.
    if let Some(write) = write.filter(|_| !reading.converts(node.span.file)) {
        let found = match &resolved {
            Resolved::Str(_) => format!("the string `{text}`"),
            Resolved::Bool(value) => format!("the boolean {value}"),
            _ => format!("`{text}`, {}", resolved.kind()),
        };
        let message = format!("`{key}` is {found} to PyYAML, read as `{write}`");
        let help = format!("write `{write}`: upstream's readers disagree on this value");
        reading.warning("scalar-type", Some(node.span), message, help);
    }
    Ok(Some(value))
}

/// transformers' `string_to_bool`.
pub(crate) fn truth(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "yes" | "true" | "t" | "y" | "1" => Some(true),
        "no" | "false" | "f" | "n" | "0" => Some(false),
        _ => None,
    }
}

/// A float in a form that PyYAML reads back as one: with a point, and a sign in the exponent.
fn yaml_float(value: f64) -> String {
    let text = format!("{value:?}");
    match text.split_once('e') {
        None => text,
        Some((mantissa, exponent)) => {
            let point = if mantissa.contains('.') { "" } else { ".0" };
            let sign = if exponent.starts_with('-') { "" } else { "+" };
            format!("{mantissa}{point}e{sign}{exponent}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggested_floats_are_floats_to_pyyaml() {
        for (value, text) in [
            (1e-5, "1.0e-5"),
            (2.5e-7, "2.5e-7"),
            (1e30, "1.0e+30"),
            (0.1, "0.1"),
        ] {
            assert_eq!(yaml_float(value), text);
            let span = Reading::default().parse("x", "a".to_owned()).unwrap().span;
            let read = Node::plain(text, span).resolve(Schema::PyYaml);
            assert_eq!(read, Some(Resolved::Float(value)));
        }
    }
}
