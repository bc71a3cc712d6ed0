//! The value of a YAML scalar, which depends on its reader.
//!
//! Upstream recipes are read by PyYAML's `SafeLoader` (alignment-handbook, TRL, accelerate) or by
//! OmegaConf's loader on top of it (Hydra recipes), and both differ from YAML 1.2: `NO` is false,
//! `010` is eight, and `1e-5` is a string to PyYAML but a float to OmegaConf. Native recipes use
//! the YAML 1.2 core schema. Sources: PyYAML 6.0.3 `resolver.py` and `constructor.py`, OmegaConf
//! 2.3.0 `_utils.py`. PyYAML's timestamps stay strings here: no recipe key takes one.

use std::fmt;
use std::sync::LazyLock;

use regex::RegexSet;

/// A scalar as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    /// The text without escapes and folding.
    pub text: String,
    /// Whether it is unquoted, so that a schema may read a number or a boolean.
    pub plain: bool,
}

/// The rules that turn a scalar's text into a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schema {
    /// YAML 1.1 as PyYAML's `SafeLoader` reads it.
    PyYaml,
    /// PyYAML with OmegaConf's own floats, and `???` for a mandatory value.
    OmegaConf,
    /// The YAML 1.2 core schema.
    Core,
}

/// The typed value of a scalar under a schema.
#[derive(Debug, Clone, PartialEq)]
pub enum Resolved {
    /// An empty scalar, `~` or `null`.
    Null,
    Bool(bool),
    /// An integer. Beyond `i128` it saturates, which every key refuses as out of range.
    Int(i128),
    Float(f64),
    Str(String),
    /// OmegaConf's `???`, a mandatory value.
    Missing,
}

impl Resolved {
    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Resolved::Int(value) => Some(*value as f64),
            Resolved::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// The type of the value, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Resolved::Null => "empty",
            Resolved::Bool(_) => "a boolean",
            Resolved::Int(_) => "a whole number",
            Resolved::Float(_) => "a float",
            Resolved::Str(_) => "a string",
            Resolved::Missing => "missing",
        }
    }

    /// The truth value, as Python's `bool` gives it.
    pub fn is_true(&self) -> bool {
        match self {
            Resolved::Null => false,
            Resolved::Bool(value) => *value,
            Resolved::Int(value) => *value != 0,
            Resolved::Float(value) => *value != 0.0,
            Resolved::Str(text) => !text.is_empty(),
            Resolved::Missing => true,
        }
    }
}

/// Python's `str` of the value.
impl fmt::Display for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resolved::Null => f.write_str("None"),
            Resolved::Bool(true) => f.write_str("True"),
            Resolved::Bool(false) => f.write_str("False"),
            Resolved::Int(value) => value.fmt(f),
            Resolved::Float(value) => f.write_str(&python_float(*value)),
            Resolved::Str(text) => f.write_str(text),
            Resolved::Missing => f.write_str("???"),
        }
    }
}

/// Python's `repr` of a float. Rust's `Debug` differs only in the exponent (`1e-5`) and in `NaN`.
pub fn python_float(value: f64) -> String {
    let text = format!("{value:?}").to_lowercase();
    let parts = text.split_once('e');
    match parts.and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) => format!("{digits}e{exponent:+03}"),
        None => text,
    }
}

impl Schema {
    /// The value of a scalar under this schema.
    pub fn resolve(self, scalar: &Scalar) -> Resolved {
        let text = scalar.text.as_str();
        if self == Schema::OmegaConf && text == "???" {
            return Resolved::Missing;
        }
        let implicit = self.implicit(text).filter(|_| scalar.plain);
        implicit.unwrap_or_else(|| Resolved::Str(text.to_owned()))
    }

    fn implicit(self, text: &str) -> Option<Resolved> {
        if matches!(text, "" | "~" | "null" | "Null" | "NULL") {
            return Some(Resolved::Null);
        }
        let first = text.as_bytes()[0];
        if first.is_ascii_alphabetic() {
            return self.bool(text).map(Resolved::Bool);
        }
        if !matches!(first, b'+' | b'-' | b'.' | b'0'..=b'9') {
            return None;
        }
        self.number(text)
    }

    fn number(self, text: &str) -> Option<Resolved> {
        let found = NUMBERS.as_ref()?.matches(text);
        let [
            pyyaml_float,
            pyyaml_int,
            omegaconf_float,
            core_int,
            core_float,
        ] = std::array::from_fn(|at| found.matched(at));
        let (is_int, is_float) = match self {
            Schema::Core => (core_int, core_float),
            Schema::PyYaml => (pyyaml_int, pyyaml_float),
            Schema::OmegaConf => (pyyaml_int, pyyaml_float || omegaconf_float),
        };
        if is_int {
            return integer(text, self != Schema::Core).map(Resolved::Int);
        }
        is_float.then(|| float(text)).flatten().map(Resolved::Float)
    }

    fn bool(self, text: &str) -> Option<bool> {
        match text {
            "true" | "True" | "TRUE" => Some(true),
            "false" | "False" | "FALSE" => Some(false),
            _ if self == Schema::Core => None,
            "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Some(true),
            "no" | "No" | "NO" | "off" | "Off" | "OFF" => Some(false),
            _ => None,
        }
    }
}

/// Upstream's patterns of numbers, in the order in which [`Schema::number`] names them: PyYAML's floats, which need a
/// point and a sign in the exponent, and its integers; OmegaConf's floats, where both are optional; and those of the
/// core schema.
const PATTERNS: [&str; 5] = [
    r"^([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
    r"^[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|[1-9][0-9_]*(:[0-5]?[0-9])+)$",
    r"^[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$",
    r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
    r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
];

static NUMBERS: LazyLock<Option<RegexSet>> = LazyLock::new(|| RegexSet::new(PATTERNS).ok());

/// The sign and the digits of a number.
fn digits(text: &str) -> (bool, String) {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    (text.starts_with('-'), unsigned.replace('_', ""))
}

/// An integer, saturating. `old`: YAML 1.1's, where a leading zero means octal and colons base 60.
fn integer(text: &str, old: bool) -> Option<i128> {
    let (negative, digits) = digits(text);
    let (radix, digits) = match digits.get(..2) {
        Some("0b") => (2, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some("0x") => (16, &digits[2..]),
        _ if old && digits.starts_with('0') => (8, digits.as_str()),
        _ => (10, digits.as_str()),
    };
    let mut value: i128 = 0;
    for part in digits.split(':') {
        let mut number: i128 = 0;
        for c in part.chars() {
            let digit = i128::from(c.to_digit(radix)?);
            number = number
                .saturating_mul(i128::from(radix))
                .saturating_add(digit);
        }
        value = value.saturating_mul(60).saturating_add(number);
    }
    (!digits.is_empty()).then_some(if negative { -value } else { value })
}

/// A float; with colons in base 60, added up from its end as PyYAML does.
fn float(text: &str) -> Option<f64> {
    let (negative, digits) = digits(text);
    let mut value = 0.0;
    let mut base = 1.0;
    for part in digits.rsplit(':') {
        value += match part.to_ascii_lowercase().as_str() {
            ".inf" => f64::INFINITY,
            ".nan" => f64::NAN,
            part => part.parse::<f64>().ok()? * base,
        };
        base *= 60.0;
    }
    Some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::corpus;
    use crate::recipe::syntax::source::Sources;
    use crate::recipe::syntax::yaml;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (-0.0, "-0.0"),
            (123_456.0, "123456.0"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-10, "1.5e-10"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }

    /// The value of `a: TEXT`, in the notation of the golden table.
    fn python(schema: Schema, text: &str) -> String {
        let mut sources = Sources::default();
        let document = format!("a: {text}\n");
        let file = sources.add("x.yaml", document.clone());
        let tree = yaml::parse(&document, file, &mut Vec::new()).unwrap();
        match tree.get("a").unwrap().resolve(schema).unwrap() {
            Resolved::Null => "NoneType:None".to_owned(),
            Resolved::Bool(true) => "bool:True".to_owned(),
            Resolved::Bool(false) => "bool:False".to_owned(),
            Resolved::Int(value) => format!("int:{value}"),
            Resolved::Float(value) => format!("float:{}", python_float(value)),
            Resolved::Str(value) => format!("str:{value}"),
            Resolved::Missing => "MissingMandatoryValue".to_owned(),
        }
    }

    #[test]
    fn golden_scalars_resolve_like_upstream() {
        let Some(root) = corpus::root() else { return };
        let table = std::fs::read_to_string(root.join("golden/yaml_scalars.csv")).unwrap();
        let mut rows = 0;
        for row in corpus::csv(&table).skip(1) {
            let [text, pyyaml, omegaconf] = row.as_slice() else {
                panic!("three columns in {row:?}");
            };
            assert_eq!(
                &python(Schema::PyYaml, text),
                pyyaml,
                "PyYAML reads {text:?}"
            );
            assert_eq!(
                &python(Schema::OmegaConf, text),
                omegaconf,
                "OmegaConf reads {text:?}"
            );
            rows += 1;
        }
        assert!(rows > 20, "the golden table has {rows} rows");
    }
}
