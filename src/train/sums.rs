//! Sums over the samples of a step or of an evaluation, as ranks exchange them.

use serde::{Deserialize, Serialize};

/// Sums that can be added.
pub trait Merge: Default {
    fn merge(&mut self, other: &Self);
}

/// A rank's sums: one over all of its micro-batches, or those of each. Sums of f64 depend on the order of their addends, so
/// that ranks whose sums must not depend on the world exchange each micro-batch's, and add them in the order of the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Parts<T> {
    parts: Vec<T>,
    #[serde(skip)]
    are_apart: bool,
}

impl<T: Merge> Parts<T> {
    /// No sums so far. `are_apart`: each micro-batch has its own.
    pub fn new(are_apart: bool) -> Parts<T> {
        Parts {
            parts: Vec::new(),
            are_apart,
        }
    }

    /// The sums of the next micro-batch.
    pub fn next(&mut self) -> &mut T {
        if self.are_apart || self.parts.is_empty() {
            self.parts.push(T::default());
        }
        let last = self.parts.len() - 1;
        &mut self.parts[last]
    }

    /// The sums over all ranks, if the samples of each are those after the ranks before it.
    pub fn total<'a>(ranks: impl IntoIterator<Item = &'a Parts<T>>) -> T
    where
        T: 'a,
    {
        let mut total = T::default();
        for part in ranks.into_iter().flat_map(|rank| &rank.parts) {
            total.merge(part);
        }
        total
    }

    /// The sums over all ranks, if they take turns with the micro-batches.
    pub fn total_in_turns(ranks: &[Parts<T>]) -> T {
        let mut total = T::default();
        let most = ranks.iter().map(|rank| rank.parts.len()).max();
        for turn in 0..most.unwrap_or(0) {
            for part in ranks.iter().filter_map(|rank| rank.parts.get(turn)) {
                total.merge(part);
            }
        }
        total
    }
}
