//! A device of known memory, and the micro-batches that fit into it.

use super::{Estimator, USABLE};
use crate::plan::PlanRequest;
use crate::recipe::Spec;
use crate::util::format::bytes;

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

    /// Whether a device can hold this number of samples; 0: the weights, gradients and optimiser states.
    pub fn fits(&self, ranks: u64, per_device_batch_size: u64) -> bool {
        self.fits_within(USABLE, ranks, per_device_batch_size)
    }

    /// The same device with another recipe for the same model.
    pub fn with<'b>(&self, spec: &'b Spec) -> Device<'b> {
        Device {
            estimator: self.estimator.with(spec),
            available: self.available,
        }
    }

    /// The memory for this number of samples, as text; for 0 that of the states.
    pub fn needed(&self, ranks: u64, per_device_batch_size: u64) -> String {
        bytes(self.estimator.total(ranks, per_device_batch_size) as u64)
    }

    /// The usable memory of a device, as text.
    pub fn usable(&self) -> String {
        bytes((self.available as f64 * USABLE) as u64)
    }

    /// The memory of a device, as text.
    pub fn available(&self) -> String {
        bytes(self.available)
    }

    /// Whether this number of samples fits into a share of a device.
    pub fn fits_within(&self, share: f64, ranks: u64, per_device_batch_size: u64) -> bool {
        self.estimator.total(ranks, per_device_batch_size) <= self.available as f64 * share
    }
}
