//! The mismatched rows of KTO's KL estimate: the prompt of each position of an order with the completion of another one.

use std::ops::Range;

use crate::data::{Collated, DataError, Dataset};
use crate::objective::{KlCompletions, mismatched};
use crate::samples::Order;

/// Which prompts and completions belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatched {
    order: Order,
    /// Positions among which completions move on by one.
    block: u64,
    /// Positions in all, a multiple of a block.
    len: u64,
    completions: KlCompletions,
}

impl Mismatched {
    /// Those of this many positions of an order, rounded up to blocks; `None` for blocks of one row, which has no pair.
    pub fn new(
        order: Order,
        block: u64,
        positions: u64,
        completions: KlCompletions,
    ) -> Option<Mismatched> {
        (block > 1).then(|| Mismatched {
            order,
            block,
            len: positions.next_multiple_of(block),
            completions,
        })
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// What distinguishes these rows from others of the same data.
    pub fn key(&self) -> [u64; 4] {
        let completions = u64::from(self.completions == KlCompletions::Next);
        [self.block, self.len, self.order.epoch_length(), completions]
    }

    /// The rows at these positions. If rows are decoded, they are made of texts, as upstream makes them.
    pub fn collate(&self, dataset: &Dataset, positions: Range<u64>) -> Result<Collated, DataError> {
        let samples = |position| {
            let other = mismatched(position, self.block, self.completions);
            [self.order.at(position), self.order.at(other)]
        };
        dataset.collate_mismatched(positions.map(samples))
    }
}
