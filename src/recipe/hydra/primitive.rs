//! What a value without quotes is in Hydra's grammar: a number, a truth value, `null`, or text.

/// The YAML spelling of what is more than text without quotes.
pub(super) fn plain(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    if ["true", "false", "null"].contains(&lower.as_str()) {
        return Some(lower);
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if is_int(unsigned) {
        return Some(text.to_owned());
    }
    match unsigned.to_ascii_lowercase().as_str() {
        "inf" if text.starts_with('-') => return Some("-.inf".to_owned()),
        "inf" => return Some(".inf".to_owned()),
        "nan" => return Some(".nan".to_owned()),
        _ => {}
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
    let is_float = (mantissa.contains('.') || exponent.is_some())
        && !(whole.is_empty() && fraction.is_empty())
        && groups(whole)
        && groups(fraction)
        && exponent_fits;
    let value: f64 = text.replace('_', "").parse().ok().filter(|_| is_float)?;
    Some(format!("{value:?}"))
}

/// Decimal digits without a leading zero, in groups between underscores.
fn is_int(text: &str) -> bool {
    let digits = |group: &str| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit());
    text == "0" || (!text.starts_with('0') && text.split('_').all(digits))
}
