//! Divisors and multiples. Batches are at most 2^32 samples (the recipe's limits), so trial
//! division is fast enough.

/// All divisors of `n`, ascending; `n` is at least 1.
pub fn divisors(n: u64) -> Vec<u64> {
    let mut small = Vec::new();
    let mut large = Vec::new();
    let mut d = 1;
    while d <= n / d {
        if n.is_multiple_of(d) {
            small.push(d);
            if d != n / d {
                large.push(n / d);
            }
        }
        d += 1;
    }
    small.extend(large.into_iter().rev());
    small
}

/// The greatest common divisor.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least common multiple of two divisors of the same 64-bit number, so it cannot overflow.
pub fn lcm(a: u64, b: u64) -> u64 {
    a / gcd(a, b) * b
}

/// The product, or `None` beyond 64 bits.
pub fn product(factors: &[u64]) -> Option<u64> {
    factors
        .iter()
        .try_fold(1_u64, |all, &factor| all.checked_mul(factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_ascend_and_are_complete() {
        for n in 1..500 {
            let slow: Vec<u64> = (1..=n).filter(|d| n % d == 0).collect();
            assert_eq!(divisors(n), slow);
        }
        assert_eq!(divisors(1 << 32).len(), 33);
    }

    #[test]
    fn products_beyond_64_bits_are_none() {
        assert_eq!(product(&[1 << 20, 1 << 20, 1 << 20]), Some(1 << 60));
        assert_eq!(product(&[1 << 20, 1 << 20, 1 << 20, 1 << 20]), None);
    }
}
