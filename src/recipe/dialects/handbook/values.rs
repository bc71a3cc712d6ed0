//! The values of a recipe, with the types of upstream's dataclasses.
//!
//! `TrlParser` hands YAML values to `argparse` as defaults, and `argparse` converts a default only
//! if it is a string. So `learning_rate: 1e-5`, a string to PyYAML, becomes a float there.
//! transformers' own `parse_yaml_file` keeps the string, and the run crashes later. A value with
//! one possible meaning is converted with a warning (`scalar-type`); any other is an error.

use crate::recipe::schema::reading::{Reading, wrong_type};
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};

use super::keys::Kind;

/// A scalar with its upstream type.
#[derive(Debug, Clone, PartialEq)]
enum Typed {
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
}

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
    scalars: Vec<Given<Typed>>,
    nodes: Vec<(String, &'n Node)>,
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
        let mut values = Values {
            scalars: Vec::new(),
            nodes: Vec::new(),
        };
        // An argument parser and JSON have already converted the values.
        for entry in mapping.entries().unwrap_or_default() {
            let Some(kind) = kind_of(&entry.name) else {
                continue;
            };
            let node = &entry.value;
            let key = format!("{prefix}{}", entry.name);
            if node.is_null(Schema::PyYaml) {
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
            match typed(node, kind, &key, reading) {
                Checked::Refused => continue,
                Checked::Collection => {}
                Checked::Scalar(value) => values.scalars.push(Given {
                    key,
                    value,
                    span: node.span,
                }),
            }
            values.nodes.push((entry.name.clone(), node));
        }
        values
    }

    fn scalar(&self, key: &str) -> Option<&Given<Typed>> {
        let named = |given: &&Given<Typed>| {
            let name = given.key.as_str();
            name == key || name.strip_suffix(key).is_some_and(|p| p.ends_with('.'))
        };
        self.scalars.iter().find(named)
    }

    pub fn bool(&self, key: &str) -> Option<Given<bool>> {
        let given = self.scalar(key)?;
        match given.value {
            Typed::Bool(value) => Some(given.with(value)),
            _ => None,
        }
    }

    /// Whether a boolean is given and true.
    pub fn is_true(&self, key: &str) -> bool {
        self.bool(key).is_some_and(|given| given.value)
    }

    pub fn int(&self, key: &str) -> Option<Given<i128>> {
        let given = self.scalar(key)?;
        match given.value {
            Typed::Int(value) => Some(given.with(value)),
            _ => None,
        }
    }

    pub fn float(&self, key: &str) -> Option<Given<f64>> {
        let given = self.scalar(key)?;
        match given.value {
            Typed::Float(value) => Some(given.with(value)),
            Typed::Int(value) => Some(given.with(value as f64)),
            _ => None,
        }
    }

    pub fn text(&self, key: &str) -> Option<Given<String>> {
        let given = self.scalar(key)?;
        match &given.value {
            Typed::Text(value) => Some(given.with(value.clone())),
            _ => None,
        }
    }

    /// The node of a value; `None` for an empty value.
    pub fn node(&self, key: &str) -> Option<&'n Node> {
        let found = self.nodes.iter().find(|(name, _)| name == key);
        found.map(|(_, node)| *node)
    }
}

/// The result of checking a value.
enum Checked {
    Scalar(Typed),
    /// A list or mapping, where the type allows one.
    Collection,
    /// The value is wrong, and an error is in the diagnostics.
    Refused,
}

/// Converts a value to its upstream type.
fn typed(node: &Node, kind: Kind, key: &str, reading: &mut Reading) -> Checked {
    let expected = match kind {
        Kind::Bool => "true or false",
        Kind::Int => "a whole number",
        Kind::Float => "a number",
        Kind::Str => "text",
        Kind::List => "a list",
        Kind::Dict => "a mapping",
        Kind::Any => "a value",
    };
    let refuse = |reading: &mut Reading| {
        let problem = wrong_type(key, node, Schema::PyYaml, expected);
        reading.diagnostics.push(problem);
        Checked::Refused
    };
    let Some(resolved) = node.resolve(Schema::PyYaml) else {
        let fits = match (&node.value, kind) {
            (_, Kind::Any) => true,
            (Value::Sequence(_), kind) => kind == Kind::List,
            (_, kind) => kind == Kind::Dict,
        };
        return if fits {
            Checked::Collection
        } else {
            refuse(reading)
        };
    };
    let text = node.text().unwrap_or_default();
    // The value; for one of the wrong type that has one possible meaning, its correct spelling.
    let found = match (kind, &resolved) {
        (Kind::Bool | Kind::Any, Resolved::Bool(value)) => Some((Typed::Bool(*value), None)),
        (Kind::Bool, Resolved::Int(value @ (0 | 1))) => {
            let value = *value == 1;
            Some((Typed::Bool(value), Some(value.to_string())))
        }
        (Kind::Bool, Resolved::Str(text)) => {
            truth(text).map(|value| (Typed::Bool(value), Some(value.to_string())))
        }
        (Kind::Int | Kind::Float | Kind::Any, Resolved::Int(value)) => {
            Some((Typed::Int(*value), None))
        }
        (Kind::Float | Kind::Any, Resolved::Float(value)) => Some((Typed::Float(*value), None)),
        // Python's `int` of a string, for decimal digits, and its `float`, for finite numbers.
        (Kind::Int, Resolved::Str(text)) => {
            let value = text.trim().parse::<i128>().ok();
            value.map(|value| (Typed::Int(value), Some(value.to_string())))
        }
        (Kind::Float, Resolved::Str(text)) => {
            let value = text
                .trim()
                .parse()
                .ok()
                .filter(|value: &f64| value.is_finite());
            value.map(|value| (Typed::Float(value), Some(yaml_float(value))))
        }
        (Kind::Str, Resolved::Bool(_)) => {
            Some((Typed::Text(text.to_owned()), Some(format!("\"{text}\""))))
        }
        (Kind::Str, Resolved::Str(_) | Resolved::Int(_) | Resolved::Float(_))
        | (Kind::List | Kind::Dict, Resolved::Str(_))
        | (Kind::Any, _) => Some((Typed::Text(text.to_owned()), None)),
        _ => None,
    };
    let Some((value, write)) = found else {
        return refuse(reading);
    };
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
    Checked::Scalar(value)
}

/// transformers' `string_to_bool`.
fn truth(text: &str) -> Option<bool> {
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
