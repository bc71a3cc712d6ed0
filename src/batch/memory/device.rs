//! A device of known size, and what fits into it.

use super::{Estimator, USABLE};
use crate::batch::PlanRequest;
use crate::recipe::Spec;

/// A recipe's needs against a device's memory.
#[derive(Debug, Clone)]
pub struct Device<'a> {
    estimator: Estimator<'a>,
    available: u64,
}

impl<'a> Device<'a> {
    /// `None` when the model's shape or the devices' memory is not known.
    pub fn of(spec: &'a Spec, request: &PlanRequest) -> Option<Device<'a>> {
        Some(Device {
            available: request.device_memory?,
            estimator: Estimator::of(spec, request.model_config.as_ref())?,
        })
    }

    /// Whether a device can hold so many samples.
    pub fn fits(&self, ranks: u64, micro: u64) -> bool {
        self.holds(self.estimator.total(ranks, micro))
    }

    /// Whether a device can hold the weights, gradients and optimiser states.
    pub fn states_fit(&self, ranks: u64) -> bool {
        self.holds(self.estimator.total(ranks, 0))
    }

    /// The fewest data-parallel ranks up to `most` that `suit` and could hold one sample each with
    /// everything sharded.
    pub fn sharded_ranks(&self, most: u64, suit: impl Fn(u64) -> bool) -> Option<u64> {
        let spec = self.estimator.sharded_spec();
        let sharded = Estimator {
            spec: &spec,
            ..self.estimator.clone()
        };
        (1..=most).find(|&ranks| suit(ranks) && self.holds(sharded.total(ranks, 1)))
    }

    /// What so many samples need, for people.
    pub fn needed(&self, ranks: u64, micro: u64) -> String {
        gib(self.estimator.total(ranks, micro))
    }

    /// What the states need, for people.
    pub fn states(&self, ranks: u64) -> String {
        self.needed(ranks, 0)
    }

    /// What can be used of a device, for people.
    pub fn usable(&self) -> String {
        gib(self.available as f64 * USABLE)
    }

    /// What a device has, for people.
    pub fn available(&self) -> String {
        gib(self.available as f64)
    }

    fn holds(&self, bytes: f64) -> bool {
        bytes <= self.available as f64 * USABLE
    }
}

/// `31.4 GiB`.
fn gib(bytes: f64) -> String {
    let gib = bytes / (1_u64 << 30) as f64;
    if gib < 1.0 {
        format!("{:.0} MiB", gib * 1024.0)
    } else {
        format!("{gib:.1} GiB")
    }
}
