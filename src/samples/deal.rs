//! The positions of the global order that each micro-batch of a step holds.

use std::ops::Range;

/// The positions of each micro-batch of rank `rank`, in the order of their execution, in a step that starts at position
/// `start`. Rank i runs `dealt[i]` micro-batches of `micro_batch` samples, which the plan derives from the step's global
/// batch; those of rank 0 come first.
pub fn micro_batches(
    start: u64,
    micro_batch: u64,
    dealt: &[u64],
    rank: usize,
) -> impl Iterator<Item = Range<u64>> + use<> {
    let before: u64 = dealt.iter().take(rank).sum();
    let count = dealt.get(rank).copied().unwrap_or(0);
    (before..before + count).map(move |i| start + i * micro_batch..start + (i + 1) * micro_batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_get_adjacent_micro_batches() {
        let of = |rank| {
            let ranges = micro_batches(100, 4, &[2, 1, 0, 1], rank);
            ranges.map(|r| (r.start, r.end)).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(100, 104), (104, 108)]);
        assert_eq!(of(1), [(108, 112)]);
        assert_eq!(of(2), []);
        assert_eq!(of(3), [(112, 116)]);
        assert_eq!(of(4), []);
    }

    proptest! {
        #[test]
        fn the_micro_batches_of_all_ranks_are_exactly_the_step(
            start in 0..1_000_000u64, micro_batch in 1..9u64, dealt in prop::collection::vec(0..7u64, 1..9),
        ) {
            let all: Vec<u64> = (0..dealt.len())
                .flat_map(|rank| micro_batches(start, micro_batch, &dealt, rank))
                .flatten()
                .collect();
            let samples = dealt.iter().sum::<u64>() * micro_batch;
            prop_assert!(all.into_iter().eq(start..start + samples));
        }
    }
}
