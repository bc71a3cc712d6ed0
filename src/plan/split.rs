//! Splits a global batch over data-parallel ranks: exactly if possible, unevenly if the user allows it. The
//! parts always add up to the batch.

use super::arithmetic::{divisors, gcd, lcm};
use crate::recipe::schema::spec::Remainder;

/// One way to split a global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Data-parallel ranks.
    pub ranks: u64,
    /// Samples per device and forward pass.
    pub per_device_batch_size: u64,
    /// Micro-batches of all ranks together.
    pub micro_batches: u64,
    /// Whether every rank runs the same number of them.
    pub remainder: Remainder,
}

impl Split {
    /// Forward passes of the busiest rank.
    pub fn accumulation(&self) -> u64 {
        self.micro_batches.div_ceil(self.ranks)
    }

    /// The global batch, samples.
    pub fn batch(&self) -> u64 {
        self.micro_batches * self.per_device_batch_size
    }

    /// Micro-batches of every rank: the first ranks run one more if the division leaves a remainder.
    pub fn deal(&self) -> Vec<u64> {
        deal(self.micro_batches, self.ranks)
    }

    /// The share of the ranks' time spent waiting for the busiest rank, 0 to 1.
    pub fn idle_share(&self) -> f64 {
        1.0 - self.micro_batches as f64 / (self.ranks as f64 * self.accumulation() as f64)
    }

    /// `8 × 16 × 1 = 128` (ranks × micro-batch × accumulation), `16 × (3 + 3 + 2) = 128`, or for
    /// more than eight ranks `16 × (3 × 10 + 2 × 6) = 672`.
    pub fn formula(&self) -> String {
        let total = self.batch();
        if self.remainder == Remainder::Exact {
            let (ranks, accumulation) = (self.ranks, self.accumulation());
            let per_device_batch_size = self.per_device_batch_size;
            return format!("{ranks} × {per_device_batch_size} × {accumulation} = {total}");
        }
        let more = self.micro_batches % self.ranks;
        let dealt = if self.ranks <= 8 {
            let each: Vec<String> = self.deal().iter().map(u64::to_string).collect();
            each.join(" + ")
        } else {
            let most = self.accumulation();
            let least = self.micro_batches / self.ranks;
            format!("{most} × {more} + {least} × {}", self.ranks - more)
        };
        format!("{} × ({dealt}) = {total}", self.per_device_batch_size)
    }
}

/// Deals whole micro-batches to ranks: the first `micro_batches % ranks` run one more.
pub fn deal(micro_batches: u64, ranks: u64) -> Vec<u64> {
    (0..ranks)
        .map(|rank| micro_batches / ranks + u64::from(rank < micro_batches % ranks))
        .collect()
}

/// Upper limits of a micro-batch, samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// The limit if a micro-batch fits.
    pub most: u64,
    /// The limit if no micro-batch fits: then a smaller one would gain nothing.
    pub otherwise: u64,
}

impl Cap {
    /// The same limit in both cases.
    pub fn at(most: u64) -> Cap {
        Cap {
            most,
            otherwise: most,
        }
    }
}

/// Everything that a split depends on except the number of ranks.
pub struct Splitter<'a> {
    /// The base global batch, samples.
    global: u64,
    /// The smaller of the base batch and the one that the run has reached.
    smallest: u64,
    /// Divisors of every batch that must stay exact, ascending.
    divisors: Vec<u64>,
    cap: Cap,
    /// Whether a device can hold a micro-batch: (data-parallel ranks, samples).
    fits: &'a dyn Fn(u64, u64) -> bool,
}

impl<'a> Splitter<'a> {
    /// `current` is the batch that a run has reached, if it has grown: splits keep that one exact
    /// too.
    pub fn new(
        global: u64,
        current: Option<u64>,
        cap: Cap,
        fits: &'a dyn Fn(u64, u64) -> bool,
    ) -> Self {
        let current = current.filter(|&batch| batch > 0).unwrap_or(global);
        Splitter {
            global,
            smallest: global.min(current),
            divisors: divisors(gcd(global, current)),
            cap,
            fits,
        }
    }

    /// The same number of equal micro-batches on every rank, with the largest micro-batch within the
    /// limit that fits and leaves accumulation a whole number.
    pub fn exact(&self, ranks: u64) -> Option<Split> {
        if !self.is_exact(ranks) {
            return None;
        }
        let share = self.divisors[self.divisors.len() - 1] / ranks;
        let size = self.largest(ranks, |size| share.is_multiple_of(size));
        Some(self.split(ranks, size, Remainder::Exact))
    }

    /// Whole micro-batches dealt as evenly as possible, at least one to every rank.
    pub fn uneven(&self, ranks: u64) -> Option<Split> {
        if ranks == 0 || ranks > self.smallest {
            return None;
        }
        let size = self.largest(ranks, |size| self.smallest / size >= ranks);
        Some(self.split(ranks, size, Remainder::Uneven))
    }

    /// An exact split, or if there is none and the user allows it, an uneven one.
    pub fn choose(&self, ranks: u64, remainder: Remainder) -> Option<Split> {
        self.exact(ranks).or_else(|| match remainder {
            Remainder::Exact => None,
            Remainder::Uneven => self.uneven(ranks),
        })
    }

    /// Whether this number of ranks can share every batch equally.
    pub fn is_exact(&self, ranks: u64) -> bool {
        self.divisors.binary_search(&ranks).is_ok()
    }

    /// The quantum over several rank counts: all of them split every multiple of it. It divides the global
    /// batch. `None`: no count splits the batch.
    pub fn quantum(
        &self,
        ranks: impl IntoIterator<Item = u64>,
        remainder: Remainder,
    ) -> Option<u64> {
        ranks
            .into_iter()
            .filter_map(|ranks| self.choose(ranks, remainder))
            .map(|split| match split.remainder {
                Remainder::Exact => split.ranks * split.per_device_batch_size,
                Remainder::Uneven => split.per_device_batch_size,
            })
            .reduce(lcm)
    }

    /// The largest divisor within the cap that `suits` and fits. The smallest, 1, always suits.
    fn largest(&self, ranks: u64, suits: impl Fn(u64) -> bool) -> u64 {
        let suitable = |most: u64| {
            let within = self.divisors.partition_point(|&size| size <= most);
            let descending = self.divisors[..within].iter().rev().copied();
            descending.filter(|&size| suits(size))
        };
        let fitting = suitable(self.cap.most).find(|&size| (self.fits)(ranks, size));
        let otherwise = || suitable(self.cap.otherwise.min(self.cap.most)).next();
        fitting.or_else(otherwise).unwrap_or(1)
    }

    fn split(&self, ranks: u64, per_device_batch_size: u64, remainder: Remainder) -> Split {
        Split {
            ranks,
            per_device_batch_size,
            micro_batches: self.global / per_device_batch_size,
            remainder,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn anything(_ranks: u64, _micro: u64) -> bool {
        true
    }

    #[test]
    fn micro_batch_is_the_largest_divisor_within_the_cap() {
        let split = |ranks, cap| Splitter::new(128, None, Cap::at(cap), &anything).exact(ranks);
        let numbers = |s: Split| (s.per_device_batch_size, s.accumulation());
        assert_eq!(split(8, 16).map(numbers), Some((16, 1)));
        assert_eq!(split(4, 16).map(numbers), Some((16, 2)));
        assert_eq!(split(16, 16).map(numbers), Some((8, 1)));
        assert_eq!(split(4, 12).map(numbers), Some((8, 4)));
        assert_eq!(split(3, 16), None);
    }

    #[test]
    fn uneven_dealing_keeps_the_micro_batch_and_the_sum() {
        let splitter = Splitter::new(128, None, Cap::at(16), &anything);
        let split = splitter.uneven(3).unwrap();
        assert_eq!(split.deal(), [3, 3, 2]);
        assert_eq!(split.formula(), "16 × (3 + 3 + 2) = 128");
        assert!((split.idle_share() - 1.0 / 9.0).abs() < 1e-12);
        // Eight micro-batches of 16 are too few for twelve ranks, sixteen of 8 are enough.
        let split = splitter.uneven(12).unwrap();
        assert_eq!(split.formula(), "8 × (2 × 4 + 1 × 8) = 128");
        assert_eq!(splitter.uneven(129), None);
    }

    #[test]
    fn exact_wins_over_uneven_where_both_exist() {
        let splitter = Splitter::new(128, None, Cap::at(16), &anything);
        let split = splitter.choose(4, Remainder::Uneven).unwrap();
        assert_eq!(split.formula(), "4 × 16 × 2 = 128");
    }

    #[test]
    fn memory_moves_the_micro_batch_down_its_divisors() {
        let fits = |ranks: u64, per_device_batch_size: u64| per_device_batch_size * 4 <= ranks;
        let splitter = Splitter::new(128, None, Cap::at(16), &fits);
        assert_eq!(splitter.exact(8).unwrap().per_device_batch_size, 2);
        // Nothing fits, so the recipe's micro-batch stays, and a rule reports it.
        assert_eq!(splitter.exact(2).unwrap().per_device_batch_size, 16);
    }

    proptest! {
        #[test]
        fn rescale_keeps_global_batch(
            global in 1..50_000u64, ranks in 1..2000u64, cap in 1..100u64,
        ) {
            let splitter = Splitter::new(global, None, Cap::at(cap), &anything);
            let split = splitter.exact(ranks);
            prop_assert_eq!(split.is_some(), global % ranks == 0);
            if let Some(split) = split {
                prop_assert_eq!(split.ranks * split.per_device_batch_size * split.accumulation(), global);
                prop_assert!(split.per_device_batch_size <= cap);
                let best = (1..=cap).rev().find(|m| (global / ranks) % m == 0);
                prop_assert_eq!(Some(split.per_device_batch_size), best);
            }
        }

        #[test]
        fn uneven_splits_always_add_up(global in 1..50_000u64, ranks in 1..2000u64, cap in 1..100u64) {
            let splitter = Splitter::new(global, None, Cap::at(cap), &anything);
            let split = splitter.uneven(ranks);
            prop_assert_eq!(split.is_some(), ranks <= global);
            if let Some(split) = split {
                let dealt = split.deal();
                prop_assert_eq!(dealt.len() as u64, ranks);
                prop_assert_eq!(dealt.iter().sum::<u64>() * split.per_device_batch_size, global);
                let (most, least) = (dealt[0], dealt[dealt.len() - 1]);
                prop_assert!(least >= 1 && most - least <= 1);
                prop_assert_eq!(most, split.accumulation());
            }
        }

        #[test]
        fn every_multiple_of_the_quantum_is_exact_in_every_world(
            global in 1..5_000u64, cap in 1..64u64, low in 1..20u64, more in 0..40u64, times in 1..9u64,
        ) {
            let splitter = Splitter::new(global, None, Cap::at(cap), &anything);
            let worlds = || low..=low + more;
            if let Some(quantum) = splitter.quantum(worlds(), Remainder::Exact) {
                prop_assert_eq!(global % quantum, 0);
                for split in worlds().filter_map(|ranks| splitter.exact(ranks)) {
                    prop_assert_eq!((times * quantum) % (split.ranks * split.per_device_batch_size), 0);
                }
            }
        }

        #[test]
        fn a_grown_batch_stays_exact(
            global in 1..5_000u64, times in 1..9u64, cap in 1..64u64, limit in 1..64u64,
        ) {
            // The batch grew by a multiple of the quantum; then the micro-batch gets a lower limit.
            let before = Splitter::new(global, None, Cap::at(cap), &anything);
            let worlds = || 1..=16u64;
            let quantum = before.quantum(worlds(), Remainder::Exact).unwrap_or(1);
            let current = global + times * quantum;
            let after = Splitter::new(global, Some(current), Cap::at(cap.min(limit)), &anything);
            for ranks in worlds().filter(|&ranks| before.exact(ranks).is_some()) {
                let split = after.exact(ranks).unwrap();
                prop_assert_eq!(current % (split.ranks * split.per_device_batch_size), 0);
                prop_assert_eq!(global % (split.ranks * split.per_device_batch_size), 0);
            }
            let next = after.quantum(worlds(), Remainder::Exact).unwrap_or(1);
            prop_assert_eq!(current % next, 0);
        }
    }
}
