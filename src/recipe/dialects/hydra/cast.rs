//! Casts of Hydra's grammar, which behave like Python's: `str(1e-3)`, `int('3')`.
//!
//! Source: Hydra 1.3, `_internal/grammar/grammar_functions.py` (`cast_int` and its neighbours).

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;

use super::primitive::yaml_float;

/// The names of the casts.
pub(super) const CASTS: [&str; 4] = ["int", "float", "str", "bool"];

/// The value after a cast; `None` if it fails. Collections are not supported.
pub(super) fn cast(name: &str, node: &Node, span: Span) -> Option<Node> {
    let value = node.resolve(Schema::OmegaConf)?;
    let plain = |text: String| Some(Node::plain(text, span));
    match name {
        "int" => plain(int(&value)?.to_string()),
        "float" => plain(yaml_float(float(&value)?)),
        "str" => Some(Node::string(text(&value)?, span)),
        _ => plain(truth(&value)?.to_string()),
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
        Resolved::Str(text) => text.to_ascii_lowercase().parse().ok(),
        Resolved::Missing => None,
        value => Some(value.is_true()),
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
