//! The value of a YAML scalar, which depends on its reader.
//!
//! Upstream recipes are read by PyYAML's `SafeLoader` (alignment-handbook, TRL, accelerate) or by
//! OmegaConf's loader on top of it (Hydra recipes), and both differ from YAML 1.2: `NO` is false,
//! `010` is eight, and `1e-5` is a string to PyYAML but a float to OmegaConf. Native recipes use
//! the YAML 1.2 core schema. Sources: PyYAML 6.0.3 `resolver.py` and `constructor.py`, OmegaConf
//! 2.3.0 `_utils.py`. PyYAML's timestamps stay strings here: no recipe key takes one.

use std::fmt;

/// A scalar as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    /// The text without escapes and folding.
    pub text: String,
    /// Whether it is unquoted, so that a schema may read a number or a boolean.
    pub plain: bool,
    /// An explicit core tag such as `!!str`.
    pub tag: Option<Tag>,
}

/// The core tags of a scalar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// `!!str`, or the non-specific `!`.
    Str,
    /// `!!int`.
    Int,
    /// `!!float`.
    Float,
    /// `!!bool`.
    Bool,
    /// `!!null`.
    Null,
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
        match scalar.tag {
            Some(tag) => self.tagged(tag, text),
            None if self == Schema::OmegaConf && text == "???" => Resolved::Missing,
            None if !scalar.plain => Resolved::Str(text.to_owned()),
            None => self
                .implicit(text)
                .unwrap_or_else(|| Resolved::Str(text.to_owned())),
        }
    }

    /// An explicit tag overrides the form of the text. Text that does not fit the tag stays a string,
    /// which the key's type check then refuses.
    fn tagged(self, tag: Tag, text: &str) -> Resolved {
        let resolved = match tag {
            Tag::Str => None,
            Tag::Null => Some(Resolved::Null),
            Tag::Float => text.replace('_', "").parse().ok().map(Resolved::Float),
            Tag::Int | Tag::Bool => self.implicit(text),
        };
        resolved.unwrap_or_else(|| Resolved::Str(text.to_owned()))
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
        match self {
            Schema::Core => core_int(text)
                .map(Resolved::Int)
                .or_else(|| core_float(text).map(Resolved::Float)),
            Schema::PyYaml => yaml11_float(text)
                .map(Resolved::Float)
                .or_else(|| yaml11_int(text).map(Resolved::Int)),
            Schema::OmegaConf => yaml11_float(text)
                .map(Resolved::Float)
                .or_else(|| yaml11_int(text).map(Resolved::Int))
                .or_else(|| omegaconf_float(text).map(Resolved::Float)),
        }
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

/// The sign and the rest of a number.
fn sign(text: &str) -> (bool, &str) {
    match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    }
}

fn all(text: &str, accept: impl Fn(u8) -> bool) -> bool {
    !text.is_empty() && text.bytes().all(accept)
}

fn digit_or_underscore(byte: u8) -> bool {
    byte.is_ascii_digit() || byte == b'_'
}

/// The signed number of these digits, saturating.
fn integer(negative: bool, digits: &str, radix: u32) -> Option<i128> {
    let mut value: i128 = 0;
    for c in digits.chars() {
        let digit = i128::from(c.to_digit(radix)?);
        value = value
            .saturating_mul(i128::from(radix))
            .saturating_add(digit);
    }
    (!digits.is_empty()).then_some(if negative { -value } else { value })
}

fn special_float(text: &str) -> Option<f64> {
    let (negative, rest) = sign(text);
    match rest {
        ".inf" | ".Inf" | ".INF" if negative => Some(f64::NEG_INFINITY),
        ".inf" | ".Inf" | ".INF" => Some(f64::INFINITY),
        ".nan" | ".NaN" | ".NAN" if rest.len() == text.len() => Some(f64::NAN),
        _ => None,
    }
}

fn core_int(text: &str) -> Option<i128> {
    if let Some(digits) = text.strip_prefix("0x") {
        return integer(false, digits, 16);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return integer(false, digits, 8);
    }
    let (negative, digits) = sign(text);
    integer(negative, digits, 10)
}

fn core_float(text: &str) -> Option<f64> {
    if let Some(value) = special_float(text) {
        return Some(value);
    }
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    let (_, unsigned) = sign(text);
    let (mantissa, exponent) = split_exponent(unsigned);
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent_fits = exponent.is_none_or(|e| all(sign(e).1, |b| b.is_ascii_digit()));
    if !digits(whole) || !digits(fraction) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    exponent_fits.then(|| text.parse().ok()).flatten()
}

fn split_exponent(text: &str) -> (&str, Option<&str>) {
    match text.find(['e', 'E']) {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    }
}

/// PyYAML's int: binary, octal with a leading zero, decimal, hexadecimal, base 60; underscores.
fn yaml11_int(text: &str) -> Option<i128> {
    let (negative, digits) = sign(text);
    let plain = digits.replace('_', "");
    if let Some(rest) = digits.strip_prefix("0b") {
        return all(rest, |b| matches!(b, b'0' | b'1' | b'_'))
            .then(|| integer(negative, &plain[2..], 2))
            .flatten();
    }
    if let Some(rest) = digits.strip_prefix("0x") {
        return all(rest, |b| b.is_ascii_hexdigit() || b == b'_')
            .then(|| integer(negative, &plain[2..], 16))
            .flatten();
    }
    if digits.starts_with('0') {
        return all(digits, |b| matches!(b, b'0'..=b'7' | b'_'))
            .then(|| integer(negative, &plain, 8))
            .flatten();
    }
    if !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let (head, tail) = digits.split_once(':').unwrap_or((digits, ""));
    if !all(head, digit_or_underscore) {
        return None;
    }
    if tail.is_empty() && !digits.contains(':') {
        return integer(negative, &plain, 10);
    }
    let mut value = integer(false, &head.replace('_', ""), 10)?;
    for part in tail.split(':') {
        value = value
            .saturating_mul(60)
            .saturating_add(i128::from(sixty(part)?));
    }
    Some(if negative { -value } else { value })
}

/// One digit of a base-60 number, `[0-5]?[0-9]`.
fn sixty(part: &str) -> Option<u8> {
    match part.as_bytes() {
        [unit @ b'0'..=b'9'] => Some(unit - b'0'),
        [ten @ b'0'..=b'5', unit @ b'0'..=b'9'] => Some((ten - b'0') * 10 + unit - b'0'),
        _ => None,
    }
}

/// PyYAML's float: it needs a point, and its exponent needs a sign.
fn yaml11_float(text: &str) -> Option<f64> {
    if let Some(value) = special_float(text) {
        return Some(value);
    }
    if text.contains(':') {
        return base60_float(text);
    }
    let (_, unsigned) = sign(text);
    let (mantissa, exponent) = split_exponent(unsigned);
    let (whole, fraction) = mantissa.split_once('.')?;
    let exponent_fits =
        exponent.is_none_or(|e| e.starts_with(['+', '-']) && all(&e[1..], |b| b.is_ascii_digit()));
    let mantissa_fits = if whole.is_empty() {
        // `.5` is a float, `-.5` is not.
        text.starts_with('.')
            && fraction.starts_with(|c: char| c.is_ascii_digit())
            && all(fraction, digit_or_underscore)
    } else {
        whole.starts_with(|c: char| c.is_ascii_digit())
            && all(whole, digit_or_underscore)
            && fraction.bytes().all(digit_or_underscore)
    };
    (mantissa_fits && exponent_fits)
        .then(|| text.replace('_', "").parse().ok())
        .flatten()
}

/// `190:20:30.15`: base-60 digits, the last with a point.
fn base60_float(text: &str) -> Option<f64> {
    let (negative, unsigned) = sign(text);
    let (value_sources, fraction) = unsigned.split_once('.')?;
    let (head, tail) = value_sources.split_once(':')?;
    if !head.starts_with(|c: char| c.is_ascii_digit())
        || !all(head, digit_or_underscore)
        || !fraction.bytes().all(digit_or_underscore)
    {
        return None;
    }
    let mut value: f64 = head.replace('_', "").parse().ok()?;
    for part in tail.split(':') {
        value = value * 60.0 + f64::from(sixty(part)?);
    }
    let fraction: f64 = format!("0.{}", fraction.replace('_', "")).parse().ok()?;
    value += fraction;
    Some(if negative { -value } else { value })
}

/// OmegaConf's addition to PyYAML's floats: the point and the exponent's sign are optional.
fn omegaconf_float(text: &str) -> Option<f64> {
    let (_, unsigned) = sign(text);
    let (mantissa, exponent) = split_exponent(unsigned);
    let exponent = exponent?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let grouped = !whole.is_empty()
        && whole
            .split('_')
            .all(|group| all(group, |b| b.is_ascii_digit()));
    let fits = grouped
        && fraction.bytes().all(digit_or_underscore)
        && all(sign(exponent).1, |b| b.is_ascii_digit());
    fits.then(|| text.replace('_', "").parse().ok()).flatten()
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
