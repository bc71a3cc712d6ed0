//! Sizes as people type them: `800M`, `2GiB`, `1073741824`.

/// A text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SizeError(String);

/// Parses a number of bytes with an optional unit; a unit without `i` counts in thousands.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let factor: u64 = match unit.strip_suffix('b').unwrap_or(&unit) {
        "" => 1,
        "k" => 1000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "t" => 1_000_000_000_000,
        "ki" => 1 << 10,
        "mi" => 1 << 20,
        "gi" => 1 << 30,
        "ti" => 1 << 40,
        _ => {
            return Err(SizeError(format!(
                "unknown unit `{unit}`: use KB, MB, GB, TB (thousands), KiB, MiB, GiB, TiB (1024s), or \
                 none for bytes"
            )));
        }
    };
    match digits.trim().parse::<u64>() {
        Err(_) => Err(SizeError(format!(
            "`{digits}` is not a whole number; write 1536MiB for 1.5 GiB"
        ))),
        Ok(0) => Err(SizeError("size must be positive".to_owned())),
        Ok(number) => number
            .checked_mul(factor)
            .ok_or_else(|| SizeError(format!("`{text}` exceeds the largest size, 2^64 - 1 bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn units_are_binary_with_an_i_and_decimal_without() {
        assert_eq!(parse("12MiB"), Ok(12 << 20));
        assert_eq!(parse("2g"), Ok(2_000_000_000));
        assert_eq!(parse("1024"), Ok(1024));
        assert_eq!(parse("80GB"), Ok(80_000_000_000));
        assert_eq!(parse("24GiB"), Ok(24 << 30));
        assert!(parse("many").is_err());
        assert!(parse("12GBB").is_err());
        assert!(parse("1.5GiB").is_err());
        assert!(parse("0").is_err());
        assert!(parse("0GiB").is_err());
        assert!(parse("99999999999TiB").is_err());
    }
}
