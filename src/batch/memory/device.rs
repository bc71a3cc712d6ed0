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

    /// The same device with another recipe for the same model.
    pub fn with<'b>(&self, spec: &'b Spec) -> Device<'b> {
        Device {
            estimator: self.estimator.with(spec),
            available: self.available,
        }
    }

    /// What so many samples need, for people.
    pub fn needed(&self, ranks: u64, micro: u64) -> String {
        size(self.estimator.total(ranks, micro))
    }

    /// What the states need, for people.
    pub fn states(&self, ranks: u64) -> String {
        self.needed(ranks, 0)
    }

    /// What can be used of a device, for people.
    pub fn usable(&self) -> String {
        size(self.available as f64 * USABLE)
    }

    /// What a device has, for people.
    pub fn available(&self) -> String {
        size(self.available as f64)
    }

    fn holds(&self, bytes: f64) -> bool {
        bytes <= self.available as f64 * USABLE
    }
}

/// `512 MiB`, `31.4 GiB`, `7.9 PiB`.
fn size(bytes: f64) -> String {
    let mebibytes = bytes / (1_u64 << 20) as f64;
    if mebibytes < 1024.0 {
        return format!("{mebibytes:.0} MiB");
    }
    let units = ["GiB", "TiB", "PiB"];
    let power = (mebibytes.log2() / 10.0) as usize;
    let power = power.min(units.len());
    let value = mebibytes / 1024_f64.powi(power as i32);
    format!("{value:.1} {}", units[power - 1])
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_told_in_the_unit_that_suits_them() {
        let told: Vec<String> = [30, 39, 40, 43, 50, 53, 70]
            .map(|power| size(1.5 * 2_f64.powi(power)))
            .to_vec();
        assert_eq!(
            told,
            [
                "1.5 GiB",
                "768.0 GiB",
                "1.5 TiB",
                "12.0 TiB",
                "1.5 PiB",
                "12.0 PiB",
                "1572864.0 PiB"
            ]
        );
        assert_eq!(size((1_u64 << 29) as f64), "512 MiB");
    }
}
