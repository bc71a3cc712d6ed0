//! Types of an unquoted value in Hydra's grammar: a number, a boolean, `null`, or text.

/// The YAML spelling of an unquoted value that is not text.
pub(super) fn plain(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    if ["true", "false", "null"].contains(&lower.as_str()) {
        return Some(lower);
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if is_int(unsigned) {
        return Some(text.to_owned());
    }
    let groups = |digits: &str| {
        digits.is_empty()
            || digits
                .split('_')
                .all(|group| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit()))
    };
    let (mantissa, exponent) = match unsigned.find(['e', 'E']) {
        Some(at) => (&unsigned[..at], Some(&unsigned[at + 1..])),
        None => (unsigned, None),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent_fits = exponent.is_none_or(|e| {
        let digits = e.strip_prefix(['+', '-']).unwrap_or(e);
        !digits.is_empty() && groups(digits)
    });
    let is_number = (mantissa.contains('.') || exponent.is_some())
        && !(whole.is_empty() && fraction.is_empty())
        && (whole.is_empty() || is_int(whole))
        && groups(fraction)
        && exponent_fits;
    let is_float = is_number || ["inf", "nan"].contains(&unsigned.to_ascii_lowercase().as_str());
    let value: f64 = text.replace('_', "").parse().ok().filter(|_| is_float)?;
    Some(yaml_float(value))
}

/// A spelling that YAML reads as this float.
pub(super) fn yaml_float(value: f64) -> String {
    match value {
        value if value.is_nan() => ".nan".to_owned(),
        f64::INFINITY => ".inf".to_owned(),
        f64::NEG_INFINITY => "-.inf".to_owned(),
        value => format!("{value:?}"),
    }
}

/// Decimal digits without a leading zero, in groups between underscores.
fn is_int(text: &str) -> bool {
    let digits = |group: &str| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit());
    text == "0" || (!text.starts_with('0') && text.split('_').all(digits))
}
