//! What hardware there is: GPUs through NVML, and the CPU.
//!
//! Looking at the machine ([`Readings::take`]) is kept apart from making sense of what was seen
//! ([`Inventory::from_readings`], a pure function), so that machines that nobody has at hand can
//! be tested from their readings. Every single query is optional: a card that cannot answer one
//! is still listed.

pub mod cgroup;
mod cpu;
pub mod kubernetes;
mod nvml;
mod promise;
mod visible;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use cpu::{CgroupMemory, Cpu, CpuReadings};
pub use nvml::{DriverReadings, GpuReadings, NvmlFailure, NvmlReadings};
pub use visible::Visibility;

/// Everything that was seen, as it was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Readings {
    /// What NVML said, or why it could not be asked.
    pub nvml: Result<NvmlReadings, NvmlFailure>,
    /// NVIDIA display and compute controllers on the PCI bus; `None` where the bus cannot be read.
    pub pci_gpus: Option<u32>,
    /// The environment's `CUDA_VISIBLE_DEVICES`.
    pub cuda_visible_devices: Option<String>,
    /// The environment's `CUDA_DEVICE_ORDER`.
    pub cuda_device_order: Option<String>,
    /// The processor and the memory.
    pub cpu: CpuReadings,
}

impl Readings {
    /// Looks at this machine.
    pub fn take() -> Readings {
        Readings {
            nvml: nvml::read(),
            pci_gpus: nvml::pci_gpus(),
            cuda_visible_devices: environment("CUDA_VISIBLE_DEVICES"),
            cuda_device_order: environment("CUDA_DEVICE_ORDER"),
            cpu: CpuReadings::take(),
        }
    }
}

fn environment(key: &str) -> Option<String> {
    std::env::var_os(key).map(|value| value.to_string_lossy().into_owned())
}

/// The hardware of one machine. Its JSON form is what `evenkeel gpus -o json` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// All GPUs that the driver lists, by NVML's index (PCI bus order), visible to CUDA or not.
    pub gpus: Vec<Gpu>,
    /// The driver, or what keeps it from being used.
    pub driver: DriverState,
    /// What `CUDA_VISIBLE_DEVICES` makes of the GPUs, when it is set.
    pub visibility: Option<Visibility>,
    /// The processor and the memory.
    pub cpu: Cpu,
}

/// NVIDIA's driver as NVML shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum DriverState {
    /// No driver to talk to. Not an error: the CPU trains.
    Absent {
        /// What is missing.
        missing: String,
        /// What to do to get it.
        install: String,
    },
    /// A driver whose NVML lacks a function that is needed to list GPUs.
    TooOld {
        /// What it lacks, and the way out.
        message: String,
    },
    /// A driver that answers with an error.
    Broken {
        /// NVML's error, and the way out.
        message: String,
    },
    /// A driver that works.
    Present {
        /// The driver's version, for example `570.86.15`.
        version: Option<String>,
        /// The newest CUDA that the driver runs, for example `12.8`.
        cuda: Option<String>,
    },
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's index, from 0, in PCI bus order.
    pub index: u32,
    /// For example `NVIDIA H100 80GB HBM3`.
    pub name: Option<String>,
    /// For example `GPU-5a3c…`; unchanged by reboots and by the order of the cards.
    pub uuid: Option<String>,
    /// The framebuffer.
    pub memory: Option<GpuMemory>,
    /// Multi-instance GPU; `None` on cards without it.
    pub mig: Option<Mig>,
    /// Error correction; `None` on cards without it.
    pub ecc: Option<Ecc>,
    /// Whether `CUDA_VISIBLE_DEVICES` lets CUDA see it (or one of its MIG devices).
    pub visible: bool,
    /// Why the driver does not let it be used, in NVML's words.
    pub problem: Option<String>,
}

/// A framebuffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    /// All of it.
    pub total: u64,
    /// Allocated by any process.
    pub used: u64,
}

/// Multi-instance GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mig {
    /// Whether the card is partitioned now.
    pub enabled: bool,
    /// The mode after the card's next reset.
    pub pending: bool,
    /// The partitions.
    pub devices: Vec<MigDevice>,
}

/// One partition of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigDevice {
    /// Its index on its GPU.
    pub index: u32,
    /// For example `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    pub name: Option<String>,
    /// For example `MIG-c7384736-…`.
    pub uuid: Option<String>,
    /// Its part of the framebuffer.
    pub memory: Option<GpuMemory>,
    /// Whether `CUDA_VISIBLE_DEVICES` lets CUDA see it.
    pub visible: bool,
}

/// Error correction of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ecc {
    /// Whether it is on now.
    pub enabled: bool,
    /// The mode after the next reboot.
    pub pending: bool,
    /// Uncorrected errors since the driver was loaded.
    pub uncorrected_volatile: Option<u64>,
    /// Uncorrected errors over the card's life.
    pub uncorrected_aggregate: Option<u64>,
}

/// What a run on this machine can be spread over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Devices {
    /// One rank per GPU or MIG device.
    Gpus {
        /// In the order in which ranks take them.
        devices: Vec<Device>,
    },
    /// Processes on the CPU.
    CpuRanks {
        /// How many.
        ranks: u64,
        /// Threads of each.
        threads: u64,
        /// Memory of each, bytes; `None` when the machine does not say.
        memory: Option<u64>,
        /// Why not GPUs, one line.
        why: String,
    },
}

/// A GPU or a MIG device that a rank can have to itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// What `CUDA_VISIBLE_DEVICES` of its rank has to be: the UUID, or the index when the driver
    /// does not tell it.
    pub id: String,
    /// Its name.
    pub name: Option<String>,
    /// Its framebuffer, bytes.
    pub memory: Option<u64>,
}

impl Inventory {
    /// Looks at this machine. Never fails: what cannot be read is missing from the result.
    pub fn discover() -> Inventory {
        Inventory::from_readings(&Readings::take())
    }

    /// Makes sense of readings.
    pub fn from_readings(readings: &Readings) -> Inventory {
        let (driver, mut gpus) = match &readings.nvml {
            Ok(nvml) => (nvml::present(&nvml.driver), nvml::gpus(nvml)),
            Err(failure) => (nvml::not_usable(failure, readings.pci_gpus), Vec::new()),
        };
        gpus.sort_by_key(|gpu| gpu.index);
        let visibility = readings
            .cuda_visible_devices
            .as_ref()
            .map(|value| visible::apply(value, readings.cuda_device_order.as_deref(), &mut gpus));
        Inventory {
            gpus,
            driver,
            visibility,
            cpu: readings.cpu.summary(),
        }
    }

    /// What a run uses unless it is told otherwise: every GPU and MIG device that CUDA may see
    /// and that works, or else one rank on the CPU with every core that is allowed.
    pub fn devices(&self) -> Devices {
        let devices = self.cuda_devices();
        if devices.is_empty() {
            self.cpu_ranks(1)
        } else {
            Devices::Gpus { devices }
        }
    }

    /// `ranks` processes on the CPU that share its cores and its memory evenly, with at least one
    /// thread each.
    pub fn cpu_ranks(&self, ranks: u64) -> Devices {
        let share = ranks.max(1);
        Devices::CpuRanks {
            ranks,
            threads: (self.cpu.cores / share).max(1),
            memory: self.cpu.memory_available.map(|bytes| bytes / share),
            why: self.why_no_gpu(),
        }
    }

    fn cuda_devices(&self) -> Vec<Device> {
        let places = match &self.visibility {
            Some(visibility) => visibility.order.clone(),
            None => visible::everything(&self.gpus),
        };
        places
            .into_iter()
            .filter_map(|place| self.device(place))
            .collect()
    }

    /// The device at a place, if it can be used.
    fn device(&self, place: visible::Place) -> Option<Device> {
        let gpu = self.gpus.iter().find(|gpu| gpu.index == place.gpu)?;
        if gpu.problem.is_some() {
            return None;
        }
        let Some(index) = place.mig else {
            return Some(Device {
                id: gpu.uuid.clone().unwrap_or_else(|| gpu.index.to_string()),
                name: gpu.name.clone(),
                memory: gpu.memory.map(|memory| memory.total),
            });
        };
        let slice = gpu
            .mig
            .as_ref()?
            .devices
            .iter()
            .find(|d| d.index == index)?;
        Some(Device {
            id: slice.uuid.clone()?,
            name: slice.name.clone(),
            memory: slice.memory.map(|memory| memory.total),
        })
    }

    fn why_no_gpu(&self) -> String {
        match &self.driver {
            DriverState::Absent { missing, .. } => missing.clone(),
            DriverState::TooOld { message } | DriverState::Broken { message } => message.clone(),
            DriverState::Present { .. } if self.gpus.is_empty() => {
                "the driver lists no GPU".to_owned()
            }
            DriverState::Present { .. } => match &self.visibility {
                Some(visibility) if visibility.order.is_empty() => {
                    format!(
                        "CUDA_VISIBLE_DEVICES=\"{}\" hides every GPU",
                        visibility.value
                    )
                }
                _ if self.gpus.iter().all(|gpu| gpu.problem.is_some()) => {
                    "no GPU can be used".to_owned()
                }
                _ => "the CPU was asked for".to_owned(),
            },
        }
    }
}

impl Devices {
    /// How many ranks they make.
    pub fn count(&self) -> u64 {
        match self {
            Devices::Gpus { devices } => devices.len() as u64,
            Devices::CpuRanks { ranks, .. } => *ranks,
        }
    }

    /// Memory that every rank can count on: the smallest device's, in bytes.
    pub fn memory(&self) -> Option<u64> {
        match self {
            Devices::Gpus { devices } => devices
                .iter()
                .map(|device| device.memory)
                .min_by_key(|memory| memory.unwrap_or(0))
                .flatten(),
            Devices::CpuRanks { memory, .. } => *memory,
        }
    }
}

/// One line for people: `8 × NVIDIA H100 80GB HBM3`, `1 CPU rank with 2 threads`.
impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Devices::Gpus { devices } => {
                let mut kinds: Vec<(&str, usize)> = Vec::new();
                for device in devices {
                    let name = device.name.as_deref().unwrap_or("unnamed GPU");
                    match kinds.iter_mut().find(|(kind, _)| *kind == name) {
                        Some((_, count)) => *count += 1,
                        None => kinds.push((name, 1)),
                    }
                }
                for (nth, (name, count)) in kinds.iter().enumerate() {
                    let comma = if nth == 0 { "" } else { ", " };
                    write!(f, "{comma}{count} × {name}")?;
                }
                Ok(())
            }
            Devices::CpuRanks { ranks, threads, .. } => {
                let rank = if *ranks == 1 { "rank" } else { "ranks" };
                let thread = if *threads == 1 { "thread" } else { "threads" };
                let each = if *ranks == 1 { "" } else { " each" };
                write!(f, "{ranks} CPU {rank} with {threads} {thread}{each}")
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
