//! Numbers as people read them: `1.2k`, `3m12s`.

use crate::util::format::{noun, scale, three_digits};

/// Text in place of a missing number.
pub const UNKNOWN: &str = "–";

/// A count with three significant digits: `950`, `1.23k`, `45.6M`. Not finite: `–`.
pub fn count(value: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    if !value.is_finite() {
        return UNKNOWN.to_owned();
    }
    let (scaled, unit) = scale(value, 1000.0, &UNITS);
    if unit.is_empty() && value.fract() == 0.0 {
        return format!("{value}");
    }
    format!("{}{unit}", three_digits(scaled))
}

/// [`count`] without trailing zeros: `50k`, `1.5k`.
pub fn short(value: f64) -> String {
    let text = count(value);
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[digits.len()..];
    if digits.contains('.') {
        let digits = digits.trim_end_matches('0').trim_end_matches('.');
        return format!("{digits}{unit}");
    }
    text
}

/// A span of time: `0.42s`, `12.3s`, `3m12s`, `5h07m`, `2d04h`. Not finite: `–`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return UNKNOWN.to_owned();
    }
    let whole = seconds.round() as u64;
    let (minutes, hours, days) = (whole / 60, whole / 3600, whole / 86_400);
    if seconds < 9.995 {
        format!("{seconds:.2}s")
    } else if whole < 60 {
        format!("{seconds:.1}s")
    } else if whole < 3600 {
        format!("{minutes}m{:02}s", whole % 60)
    } else if whole < 86_400 {
        format!("{hours}h{:02}m", minutes % 60)
    } else {
        format!("{days}d{:02}h", hours % 24)
    }
}

/// [`duration`] without fractions of a second, for estimates: `42s`, `3m12s`.
pub fn whole_duration(seconds: f64) -> String {
    match seconds.round() {
        whole @ ..60.0 => format!("{whole}s"),
        whole => duration(whole),
    }
}

/// A whole number with thousands separators: `20,480`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things: `1 step`, `2,000 steps`.
pub fn plural(number: u64, thing: &str) -> String {
    format!("{} {}", grouped(number), noun(number, thing))
}

/// A learning rate with three significant digits: `3.00e-4`, `0`.
pub fn learning_rate(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    format!("{value:.2e}")
}

/// Distance of a loss from the lowest possible one (an evaluation of few samples may lie below it): `5.8%
/// above the floor 2.0794`.
pub fn from_floor(loss: f64, floor: f64) -> String {
    let percent = 100.0 * (loss / floor - 1.0);
    let side = if percent < 0.0 { "below" } else { "above" };
    format!("{:.1}% {side} the floor {floor:.4}", percent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_three_digits_and_a_unit() {
        let shown: Vec<String> = [0.0, 7.0, 7.25, 999.0, 999.7, 1234.0, 99_960.0, 45.6e6]
            .map(count)
            .to_vec();
        assert_eq!(
            shown,
            ["0", "7", "7.25", "999", "1.00k", "1.23k", "100k", "45.6M"]
        );
        let short = [0.0, 512.0, 50_000.0, 1_500.0, 1_230.0, 2_000_000.0].map(short);
        assert_eq!(short.as_slice(), ["0", "512", "50k", "1.5k", "1.23k", "2M"]);
        assert_eq!(count(f64::NAN), "–");
        assert_eq!(count(f64::INFINITY), "–");
    }

    #[test]
    fn thousands_are_separated() {
        let shown: Vec<String> = [0, 999, 1000, 20_480, 2_000_000].map(grouped).to_vec();
        assert_eq!(shown, ["0", "999", "1,000", "20,480", "2,000,000"]);
        assert_eq!(
            [plural(1, "step"), plural(2_000, "step")],
            ["1 step", "2,000 steps"]
        );
    }

    #[test]
    fn durations_carry_into_the_next_unit() {
        let shown: Vec<String> = [0.0, 0.42, 9.999, 59.96, 192.0, 3599.7, 18_420.0, 187_200.0]
            .map(duration)
            .to_vec();
        assert_eq!(
            shown,
            [
                "0.00s", "0.42s", "10.0s", "1m00s", "3m12s", "1h00m", "5h07m", "2d04h"
            ]
        );
        assert_eq!(duration(f64::NAN), "–");
    }
}
