//! Types of an unquoted value in Hydra's grammar: a number, a boolean, `null`, or text.

use std::sync::LazyLock;

use regex::RegexSet;

/// The YAML spelling of an unquoted value that is not text.
pub(super) fn plain(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    if ["true", "false", "null"].contains(&lower.as_str()) {
        return Some(lower);
    }
    let found = NUMBERS.as_ref()?.matches(text);
    if found.matched(0) {
        return Some(text.to_owned());
    }
    let value = found.matched(1).then(|| text.replace('_', "").parse().ok());
    value.flatten().map(yaml_float)
}

/// Hydra's patterns of integers and of floats (`grammar/OverrideLexer.g4`).
static NUMBERS: LazyLock<Option<RegexSet>> = LazyLock::new(|| {
    const INT: &str = "(0|[1-9][0-9]*(_[0-9]+)*)";
    const DIGITS: &str = "[0-9]+(_[0-9]+)*";
    let exponent = format!("(e[+-]?{DIGITS})");
    let float = format!(
        r"(?i)^[+-]?({INT}?\.{DIGITS}{exponent}?|{INT}\.{exponent}?|{INT}{exponent}|inf|nan)$"
    );
    RegexSet::new([format!("^[+-]?{INT}$"), float]).ok()
});

/// A spelling that YAML reads as this float.
pub(super) fn yaml_float(value: f64) -> String {
    match value {
        value if value.is_nan() => ".nan".to_owned(),
        f64::INFINITY => ".inf".to_owned(),
        f64::NEG_INFINITY => "-.inf".to_owned(),
        value => format!("{value:?}"),
    }
}
