//! How many samples are held out for evaluation: the one function by which the planner counts them
//! and the data's preparation takes them away.

use super::horizon::share;

/// Samples to hold out of `samples`, as `data.held_out` asks for it: below 1 a share, rounded up to
/// whole samples, else a count, of which a fraction is dropped.
pub fn held_out(asked: Option<f64>, samples: u64) -> u64 {
    match asked {
        Some(part) if part < 1.0 => share(samples, part),
        // A cast drops the fraction, and makes 0 of what is no number.
        Some(count) => count as u64,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::held_out;

    #[test]
    fn shares_are_rounded_up_and_counts_are_taken_as_they_are() {
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
