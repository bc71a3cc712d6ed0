//! Seeded random numbers for data: the same on every machine and in every version.
//!
//! SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). The numbers
//! of a seed are part of the meaning of a recipe, so they must not depend on a library.

/// A stream of random numbers that is a pure function of its keys.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

/// SplitMix64's increment of the state.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The number at a place of the plain SplitMix64 stream of a seed, which begins at place 1.
pub fn nth(seed: u64, place: u64) -> u64 {
    mix(seed.wrapping_add(place.wrapping_mul(GAMMA)))
}

impl Random {
    /// The plain SplitMix64 stream of a seed.
    pub fn seeded(seed: u64) -> Self {
        Random { state: seed }
    }

    /// A stream for these keys; different keys, or another order of them, give an unrelated stream.
    pub fn new(keys: &[u64]) -> Self {
        let mut random = Random {
            state: 0x243f_6a88_85a3_08d3,
        };
        for key in keys {
            random.state = random.next_u64() ^ key;
        }
        random.state = random.next_u64();
        random
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }

    /// Uniform in [0, 1), with 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in 0..`bound` without bias (Lemire's multiplication with rejection); 0 for 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let threshold = bound.wrapping_neg().checked_rem(bound).unwrap_or(0);
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// Shuffles in place (Fisher–Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn streams_never_change() {
        // A change of these numbers changes the meaning of every recipe's seed.
        let mut random = Random::new(&[1, 2]);
        let first: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        insta::assert_debug_snapshot!(first);
        assert_ne!(first[0], Random::new(&[2, 1]).next_u64());
        assert_ne!(first[0], Random::new(&[1]).next_u64());
    }

    #[test]
    fn below_is_uniform() {
        let mut random = Random::new(&[7]);
        let mut counts = [0u32; 5];
        for _ in 0..50_000 {
            counts[random.below(5) as usize] += 1;
        }
        for count in counts {
            // The standard deviation is 89.
            assert!((9_600..=10_400).contains(&count), "{counts:?}");
        }
    }

    proptest! {
        #[test]
        fn below_stays_below(seed: u64, bound in 1u64..) {
            prop_assert!(Random::new(&[seed]).below(bound) < bound);
        }

        #[test]
        fn shuffle_keeps_every_item(seed: u64, count in 0usize..100) {
            let mut items: Vec<usize> = (0..count).collect();
            Random::new(&[seed]).shuffle(&mut items);
            items.sort_unstable();
            prop_assert_eq!(items, (0..count).collect::<Vec<_>>());
        }
    }
}
