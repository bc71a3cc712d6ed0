//! The syntax of interpolations: their bounds and their contents.

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part<'t> {
    /// Text, with its escapes resolved.
    Text(String),
    /// The text between `${` and `}`.
    Interpolation(&'t str),
}

/// The length of the interpolation at the start of a text, bytes; `None`: it is not closed.
pub fn length(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut quote = None;
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => {
                bytes.next();
            }
            _ if quote == Some(byte) => quote = None,
            _ if quote.is_some() => {}
            b'\'' | b'"' if depth > 0 => quote = Some(byte),
            b'{' => depth += 1,
            b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// The parts of a text; `None`: an interpolation is not closed. `\${` is no interpolation.
pub(super) fn parts(text: &str) -> Option<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let before = &rest[..at];
        let slashes = before.bytes().rev().take_while(|b| *b == b'\\').count();
        plain += &before[..at - slashes];
        // Before an interpolation two backslashes are one.
        plain += &"\\".repeat(slashes / 2);
        if slashes % 2 == 1 {
            plain += "${";
            rest = &rest[at + 2..];
            continue;
        }
        if !plain.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut plain)));
        }
        let length = length(&rest[at..])?;
        parts.push(Part::Interpolation(&rest[at + 2..at + length - 1]));
        rest = &rest[at + length..];
    }
    plain += rest;
    if !plain.is_empty() {
        parts.push(Part::Text(plain));
    }
    Some(parts)
}

/// The name and the arguments of a resolver call; `None` for other interpolations.
pub(super) fn resolver(inner: &str) -> Option<(&str, Vec<&str>)> {
    let (name, arguments) = inner.split_once(':')?;
    let name = name.trim();
    let fits = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    if name.is_empty() || !name.chars().all(fits) {
        return None;
    }
    if arguments.trim().is_empty() {
        return Some((name, Vec::new()));
    }
    let mut found = Vec::new();
    let (mut from, mut depth, mut quote) = (0, 0_usize, None);
    for (at, byte) in arguments.bytes().enumerate() {
        match byte {
            _ if quote == Some(byte) => quote = None,
            _ if quote.is_some() => {}
            b'\'' | b'"' => quote = Some(byte),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                found.push(arguments[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(arguments[from..].trim());
    Some((name, found))
}

/// An argument without its quotes.
pub(super) fn unquoted(argument: &str) -> &str {
    let argument = argument.trim();
    ['\'', '"']
        .iter()
        .find_map(|quote| argument.strip_prefix(*quote)?.strip_suffix(*quote))
        .unwrap_or(argument)
}

/// The keys of a path: `a.b[0].c`, `a[b]`.
pub(super) fn keys(path: &str) -> Vec<String> {
    let parts = path.split(['.', '[']);
    let keys = parts.map(|part| part.strip_suffix(']').unwrap_or(part));
    keys.filter(|key| !key.is_empty())
        .map(str::to_owned)
        .collect()
}

/// A scalar as Python prints it; `None` for lists and mappings.
pub(super) fn python(node: &Node) -> Option<String> {
    Some(match node.resolve(Schema::OmegaConf)? {
        Resolved::Null => "None".to_owned(),
        Resolved::Bool(true) => "True".to_owned(),
        Resolved::Bool(false) => "False".to_owned(),
        Resolved::Int(value) => value.to_string(),
        Resolved::Float(value) => python_float(value),
        Resolved::Str(text) => text,
        Resolved::Missing => "???".to_owned(),
    })
}

/// Python's `repr` of a float.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let magnitude = value.abs();
    if value != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = match exponent.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("+", exponent),
        };
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_printed_like_python() {
        for (value, text) in [
            (5e-6, "5e-06"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-10, "1.5e-10"),
            (123_456.0, "123456.0"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }

    #[test]
    fn interpolations_end_at_their_closing_brace() {
        assert_eq!(length("${a.b}/c"), Some(6));
        assert_eq!(length("${f:${a},'}'}x"), Some(13));
        assert_eq!(length("${a"), None);
        let inner = |text| match parts(text).unwrap().as_slice() {
            [Part::Interpolation(inner)] => Some(inner.to_string()),
            _ => None,
        };
        assert_eq!(inner("${a}").as_deref(), Some("a"));
        assert_eq!(inner("\\${a}"), None);
        assert_eq!(parts("\\${a}").unwrap(), [Part::Text("${a}".to_owned())]);
    }

    #[test]
    fn commas_outside_of_brackets_separate_arguments() {
        let (name, arguments) = resolver("f:${g:1,2}, 'a,b',c").unwrap();
        assert_eq!((name, arguments), ("f", vec!["${g:1,2}", "'a,b'", "c"]));
        assert_eq!(resolver("a.b"), None);
        assert_eq!(resolver("${a}:b"), None);
        assert_eq!(keys("a.b[0].c"), ["a", "b", "0", "c"]);
    }
}
