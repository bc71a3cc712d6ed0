//! Formats counts and sizes for messages.

use std::ops::RangeInclusive;

/// The plural of a noun for a count: `sample`, `samples`; `process`, `processes`; `batch`, `batches`.
pub fn noun(number: u64, thing: &str) -> String {
    let hisses = ["s", "x", "ch", "sh"]
        .iter()
        .any(|end| thing.ends_with(end));
    let ending = match (number, hisses) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{thing}{ending}")
}

/// `1 sample`, `2000 samples`.
pub fn count(number: u64, thing: &str) -> String {
    format!("{number} {}", noun(number, thing))
}

/// Bytes with binary units: `512 B`, `79.6 GiB`.
pub fn bytes(value: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (scaled, unit) = scale(value as f64, 1024.0, &UNITS);
    if unit == "B" {
        return format!("{value} B");
    }
    format!("{} {unit}", three_digits(scaled))
}

/// Two sizes to compare. In bytes if their units would show different sizes alike.
pub fn bytes_apart(one: u64, other: u64) -> [String; 2] {
    let shown = [one, other].map(bytes);
    if one != other && shown[0] == shown[1] {
        return [one, other].map(|size| format!("{size} B"));
    }
    shown
}

/// A line of another program with units in place of `134217728 bytes`.
pub fn with_units(line: &str) -> String {
    let mut shown = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once(" bytes") {
        let text = before.trim_end_matches(|c: char| c.is_ascii_digit());
        shown += &match before[text.len()..].parse() {
            Ok(size) => format!("{text}{}", bytes(size)),
            Err(_) => format!("{before} bytes"),
        };
        rest = after;
    }
    shown + rest
}

/// Divides by `base` until the number is small enough for its unit.
pub fn scale<'a>(value: f64, base: f64, units: &[&'a str]) -> (f64, &'a str) {
    let mut scaled = value;
    let mut unit = 0;
    // 999.5 would be formatted as 1000.
    while scaled.abs() >= base.min(999.5) && unit + 1 < units.len() {
        scaled /= base;
        unit += 1;
    }
    (scaled, units[unit])
}

/// Three significant digits: `9.99`, `10.0`, `100`.
pub fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        size if size < 9.995 => 2,
        size if size < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// Cuts a text to `most` bytes at a character, and replaces control characters, which a terminal would
/// execute.
pub fn shorten(text: &mut String, most: usize) {
    text.truncate(text.floor_char_boundary(most));
    let hostile = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(hostile) {
        *text = text.replace(hostile, " ");
    }
    text.shrink_to_fit();
}

/// The beginning of a text that someone else wrote, for a message.
pub fn shortened(text: &str) -> String {
    let mut text = text.to_owned();
    shorten(&mut text, 300);
    text
}

/// The first of the named numbers that is outside of a range: `quantum is 0`.
pub fn outside<'n>(
    range: RangeInclusive<u64>,
    numbers: impl IntoIterator<Item = (&'n str, u64)>,
) -> Option<String> {
    let mut numbers = numbers.into_iter();
    let (name, number) = numbers.find(|(_, number)| !range.contains(number))?;
    Some(format!("{name} is {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_binary_units() {
        let shown: Vec<String> = [0, 512, 1023, 1024, 85_520_809_984, u64::MAX]
            .map(bytes)
            .to_vec();
        assert_eq!(
            shown,
            [
                "0 B",
                "512 B",
                "1.00 KiB",
                "1.00 KiB",
                "79.6 GiB",
                "16384 PiB"
            ]
        );
    }

    #[test]
    fn different_sizes_are_shown_differently() {
        assert_eq!(bytes_apart(3 << 30, 2 << 30), ["3.00 GiB", "2.00 GiB"]);
        assert_eq!(bytes_apart(65_537, 65_536), ["65537 B", "65536 B"]);
        assert_eq!(bytes_apart(2048, 2048), ["2.00 KiB", "2.00 KiB"]);
    }

    #[test]
    fn sizes_in_the_lines_of_other_programs_get_units() {
        for (line, shown) in [
            (
                "memory allocation of 134217728 bytes failed",
                "memory allocation of 128 MiB failed",
            ),
            (
                "you tried to allocate 8589934592 bytes. Error code 12",
                "you tried to allocate 8.00 GiB. Error code 12",
            ),
            ("no bytes, 48 bytes, x8 bytes", "no bytes, 48 B, x8 B"),
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB",
                "CUDA out of memory. Tried to allocate 2.00 GiB",
            ),
        ] {
            assert_eq!(with_units(line), shown);
        }
    }

    #[test]
    fn texts_of_others_are_short_and_harmless() {
        assert_eq!(shortened("a\u{1b}[2J\u{7}ü"), "a [2J ü");
        assert_eq!(shortened(&"ü".repeat(151)), "ü".repeat(150));
    }

    #[test]
    fn a_count_of_one_is_singular() {
        let texts = [0, 1, 2000].map(|n| count(n, "sample"));
        assert_eq!(texts, ["0 samples", "1 sample", "2000 samples"]);
        let texts = ["process", "batch", "GPU", "rank"].map(|thing| noun(2, thing));
        assert_eq!(texts, ["processes", "batches", "GPUs", "ranks"]);
    }
}
