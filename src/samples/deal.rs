//! The positions of the global order that each micro-batch of a step holds.

use std::ops::Range;

/// The deal of one step's samples: it consumes the positions from `start`, beginning with the first hand's
/// micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deal {
    start: u64,
    micro_batch: u64,
    /// Number of micro-batches of each hand.
    hands: Vec<u64>,
}

impl Deal {
    /// Deals a step that starts at position `start`: hand i runs `hands[i]` micro-batches of `micro_batch` samples,
    /// which the plan derives from the step's global batch.
    pub fn new(start: u64, micro_batch: u64, hands: impl Into<Vec<u64>>) -> Self {
        Deal {
            start,
            micro_batch,
            hands: hands.into(),
        }
    }

    /// The positions that the whole step consumes.
    pub fn positions(&self) -> Range<u64> {
        self.start..self.start + self.hands.iter().sum::<u64>() * self.micro_batch
    }

    /// The positions of each of hand `hand`'s micro-batches, in the order of their execution; empty for a
    /// hand that does not exist.
    pub fn micro_batches(&self, hand: usize) -> impl Iterator<Item = Range<u64>> + use<> {
        let before: u64 = self.hands.iter().take(hand).sum();
        let count = self.hands.get(hand).copied().unwrap_or(0);
        let (start, micro_batch) = (self.start, self.micro_batch);
        (before..before + count)
            .map(move |i| start + i * micro_batch..start + (i + 1) * micro_batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hands_get_adjacent_micro_batches() {
        let deal = Deal::new(100, 4, [2, 1, 0, 1]);
        let of = |hand| {
            let ranges = deal.micro_batches(hand);
            ranges.map(|r| (r.start, r.end)).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(100, 104), (104, 108)]);
        assert_eq!(of(1), [(108, 112)]);
        assert_eq!(of(2), []);
        assert_eq!(of(3), [(112, 116)]);
        assert_eq!(of(4), []);
        assert_eq!(deal.positions(), 100..116);
    }

    proptest! {
        #[test]
        fn the_micro_batches_of_all_hands_are_exactly_the_step(
            start in 0..1_000_000u64, micro_batch in 1..9u64, hands in prop::collection::vec(0..7u64, 1..9),
        ) {
            let deal = Deal::new(start, micro_batch, hands.clone());
            let dealt: Vec<u64> = (0..hands.len())
                .flat_map(|hand| deal.micro_batches(hand))
                .flatten()
                .collect();
            prop_assert!(dealt.into_iter().eq(deal.positions()));
        }

        #[test]
        fn a_step_holds_the_same_samples_however_it_is_dealt(
            start in 0..1_000_000u64, micro_batch in 1..9u64, hands in prop::collection::vec(0..7u64, 1..9),
        ) {
            let whole = Deal::new(start, 1, [hands.iter().sum::<u64>() * micro_batch]);
            prop_assert_eq!(whole.positions(), Deal::new(start, micro_batch, hands).positions());
        }
    }
}
