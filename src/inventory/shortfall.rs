//! Compares the GPUs that Kubernetes reserved with NVML: Kubernetes counts devices that a device plugin once
//! advertised, NVML those that the driver can use now.

use super::{DriverState, Inventory};

impl Inventory {
    /// A message if fewer than `count` GPUs or MIG devices are usable; `None` if NVML agrees or there is no
    /// NVIDIA driver to query.
    pub fn device_shortfall(&self, count: u64) -> Option<String> {
        match &self.driver {
            DriverState::Absent { .. } => return None,
            DriverState::TooOld { message } | DriverState::Broken { message } => {
                return Some(message.clone());
            }
            DriverState::Present { .. } => {}
        }
        let usable = self.cuda_devices().len() as u64;
        if usable >= count {
            return None;
        }
        let broken = self.gpus.iter().filter_map(|gpu| {
            let problem = gpu.problem.as_ref()?;
            let name = gpu.uuid.clone().unwrap_or_else(|| gpu.index.to_string());
            Some(format!("; {name}: {problem}"))
        });
        Some(format!(
            "{count} GPUs were reserved, NVML shows {usable} that can be used{}",
            broken.collect::<String>()
        ))
    }
}

#[cfg(test)]
mod tests {
    use crate::inventory::tests::{h100, readings};
    use crate::inventory::{GpuReadings, Inventory, NvmlFailure, Readings};

    fn inventory(gpus: Vec<GpuReadings>) -> Inventory {
        Inventory::from_readings(&readings(gpus))
    }

    #[test]
    fn a_card_that_fell_off_the_bus_is_reported() {
        let lost = GpuReadings {
            problem: Some("GPU is lost".into()),
            ..h100(1)
        };
        let found = inventory(vec![h100(0), lost]);
        assert_eq!(found.device_shortfall(1), None);
        let words = found.device_shortfall(2).unwrap();
        assert!(
            words.contains("2 GPUs were reserved, NVML shows 1"),
            "{words}"
        );
        assert!(
            words.contains("GPU-1f3c9d1e") && words.contains("GPU is lost"),
            "{words}"
        );
    }

    #[test]
    fn without_a_driver_no_shortfall_is_reported() {
        let absent = Readings {
            nvml: Err(NvmlFailure::NoLibrary),
            ..readings(Vec::new())
        };
        assert_eq!(Inventory::from_readings(&absent).device_shortfall(8), None);
    }
}
