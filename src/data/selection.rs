//! Selects an exact number of many items by seed, in one pass and without storing them.

use crate::samples::Order;

use crate::util::random::Random;

/// Selects exactly `wanted` of `total` items: those that a seeded permutation puts first.
#[derive(Debug, Clone)]
pub(super) struct Selection {
    /// `None` if there are no items.
    order: Option<Order>,
    next: u64,
    wanted: u64,
}

impl Selection {
    /// Selects `wanted` of `total` items, or all of them if there are fewer. Different keys select
    /// independently.
    pub fn new(keys: &[u64], wanted: u64, total: u64) -> Self {
        let seed = Random::new(keys).next_u64();
        Selection {
            order: Order::new(seed, total, true).ok(),
            next: 0,
            wanted,
        }
    }

    /// Whether the next item is selected; `false` after `total` calls.
    pub fn next_is_chosen(&mut self) -> bool {
        let Some(order) = &self.order else {
            return false;
        };
        if self.next == order.epoch_length() {
            return false;
        }
        let place = order.at(self.next).index;
        self.next += 1;
        place < self.wanted
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_position_has_the_same_chance() {
        let mut counts = [0u32; 10];
        for seed in 0..20_000 {
            let mut selection = Selection::new(&[seed], 3, 10);
            for count in &mut counts {
                *count += u32::from(selection.next_is_chosen());
            }
        }
        for count in counts {
            // The expected count is 6000, the standard deviation 65.
            assert!((5_700..=6_300).contains(&count), "{counts:?}");
        }
    }

    proptest! {
        #[test]
        fn the_number_chosen_is_exact(seed: u64, total in 0u64..500, wanted in 0u64..600) {
            let mut selection = Selection::new(&[seed], wanted, total);
            let chosen = (0..total + 10).filter(|_| selection.next_is_chosen()).count() as u64;
            prop_assert_eq!(chosen, wanted.min(total));
        }
    }
}
