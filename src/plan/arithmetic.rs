//! Divisors and multiples. Batches are at most 2^32 samples (the recipe's limits), so trial division up
//! to the square root of what is left takes at most 2^15 steps.

/// All divisors of `n`, ascending; `n` is at least 1.
pub fn divisors(n: u64) -> Vec<u64> {
    let mut divisors = vec![1];
    for (prime, exponent) in prime_factors(n) {
        let without = divisors.len();
        for previous in 0..without * exponent {
            divisors.push(divisors[previous] * prime);
        }
    }
    divisors.sort_unstable();
    divisors
}

/// The prime factors of `n` with their exponents, ascending.
fn prime_factors(mut n: u64) -> Vec<(u64, usize)> {
    let mut factors = Vec::new();
    let mut factor = 2;
    while factor <= n / factor {
        let mut exponent = 0;
        while n.is_multiple_of(factor) {
            n /= factor;
            exponent += 1;
        }
        if exponent > 0 {
            factors.push((factor, exponent));
        }
        factor += if factor == 2 { 1 } else { 2 };
    }
    if n > 1 {
        factors.push((n, 1));
    }
    factors
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
    let mut factors = factors.iter();
    factors.try_fold(1_u64, |all, &factor| all.checked_mul(factor))
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
        assert_eq!(divisors(4_294_967_291), [1, 4_294_967_291], "a prime");
    }

    #[test]
    fn products_beyond_64_bits_are_none() {
        assert_eq!(product(&[1 << 20, 1 << 20, 1 << 20]), Some(1 << 60));
        assert_eq!(product(&[1 << 20, 1 << 20, 1 << 20, 1 << 20]), None);
    }
}
