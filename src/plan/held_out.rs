//! The number of samples held out for evaluation. The planner counts with this function, and data
//! preparation removes the same number.

use super::horizon::share;

/// Samples to hold out of `samples` for `data.held_out`: a value below 1 is a share, rounded up to
/// whole samples; else it is a count, truncated to a whole number.
pub fn held_out(asked: Option<f64>, samples: u64) -> u64 {
    match asked {
        Some(part) if part < 1.0 => share(samples, part),
        // The cast truncates the fraction and turns NaN into 0.
        Some(count) => count as u64,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::held_out;

    #[test]
    fn shares_are_rounded_up_and_counts_stay_unchanged() {
        assert_eq!(held_out(None, 1000), 0);
        assert_eq!(held_out(Some(0.1), 1280), 128);
        assert_eq!(held_out(Some(0.0004), 1000), 1);
        assert_eq!(held_out(Some(0.0), 1000), 0);
        assert_eq!(held_out(Some(2.9), 1000), 2);
        assert_eq!(held_out(Some(2000.0), 1000), 2000);
        assert_eq!(held_out(Some(f64::NAN), 1000), 0);
        assert_eq!(held_out(Some(-1.0), 1000), 0);
    }
}
