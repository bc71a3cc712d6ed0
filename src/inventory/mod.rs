//! The hardware of a machine: GPUs through NVML, and the CPU.
//!
//! Reading the machine ([`Readings::take`]) is separate from interpreting the readings
//! ([`Inventory::from_readings`], a pure function), so that recorded readings of other machines can be
//! tested. Every query is optional: a card that does not answer one is still listed.

pub mod cgroup;
mod cpu;
pub mod kubernetes;
mod nvml;
mod visible;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use cpu::{CgroupMemory, Cpu, CpuReadings};
pub use nvml::NvmlReadings;
pub use visible::Visibility;

/// Raw readings of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Readings {
    /// NVML's answers, or the state of a driver that could not be queried.
    pub nvml: Result<NvmlReadings, DriverState>,
    pub cuda_visible_devices: Option<String>,
    pub cuda_device_order: Option<String>,
    /// Readings of processor and memory.
    pub cpu: CpuReadings,
}

impl Readings {
    /// Reads this machine's state.
    pub fn take() -> Readings {
        Readings {
            nvml: nvml::read(),
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
    /// The state of the driver.
    pub driver: DriverState,
    /// The interpretation of `CUDA_VISIBLE_DEVICES`, if it is set.
    pub visibility: Option<Visibility>,
    /// Processor and memory of the machine.
    pub cpu: Cpu,
}

/// The state of NVIDIA's driver, according to NVML.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum DriverState {
    /// The machine has no driver. This is not an error: the CPU trains.
    Absent {
        missing: String,
        /// How to install it.
        install: String,
    },
    /// The driver's NVML lacks a function that is needed to list GPUs.
    TooOld {
        /// The missing function, and the remedy.
        message: String,
    },
    /// The driver answers with an error.
    Broken {
        /// NVML's error, and the remedy.
        message: String,
    },
    Present {
        /// The driver's version, for example `570.86.15`.
        version: Option<String>,
        /// The newest CUDA version that the driver supports, for example `12.8`.
        cuda: Option<String>,
    },
}

/// One GPU and its MIG devices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// NVML's index, from 0, in PCI bus order.
    pub index: u32,
    /// Product name, for example `NVIDIA H100 80GB HBM3`.
    pub name: Option<String>,
    /// Unique id, for example `GPU-5a3c…`; reboots and the order of the cards do not change it.
    pub uuid: Option<String>,
    /// Compute capability, major and minor; `None` if it is unknown.
    #[serde(default)]
    pub capability: Option<(u32, u32)>,
    /// Framebuffer; `None` if it is unknown.
    pub memory: Option<GpuMemory>,
    /// Multi-instance GPU; `None` on cards without it.
    pub mig: Option<Mig>,
    /// Error correction; `None` on cards without it.
    pub ecc: Option<Ecc>,
    /// Whether `CUDA_VISIBLE_DEVICES` makes it, or one of its MIG devices, visible to CUDA.
    pub visible: bool,
    /// Why the driver does not allow its use, in NVML's words.
    pub problem: Option<String>,
}

/// Sizes of a framebuffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    /// Size of the framebuffer, in bytes.
    pub total: u64,
    /// Bytes allocated by any process.
    pub used: u64,
}

/// State of Multi-Instance GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mig {
    /// Whether the card is partitioned now.
    pub enabled: bool,
    /// The mode after the card's next reset.
    pub pending: bool,
    /// Partitions of the card.
    pub devices: Vec<MigDevice>,
}

/// One partition of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigDevice {
    /// Index on its GPU.
    pub index: u32,
    /// Product name, for example `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    pub name: Option<String>,
    /// Unique id, for example `MIG-c7384736-…`.
    pub uuid: Option<String>,
    /// Its part of the framebuffer.
    pub memory: Option<GpuMemory>,
    /// Whether `CUDA_VISIBLE_DEVICES` makes it visible to CUDA.
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

/// The devices that the ranks of a run can use on this machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Devices {
    /// One rank per GPU or MIG device.
    Gpus {
        /// Devices in the order in which ranks take them.
        devices: Vec<Device>,
    },
    /// Processes on the CPU.
    CpuRanks {
        ranks: u64,
        threads: u64,
        /// Bytes of memory per process; `None` if the machine's memory is unknown.
        memory: Option<u64>,
        /// Why no GPUs are used, one line.
        why: String,
    },
}

/// A GPU or a MIG device that a rank can use exclusively.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Value of the rank's `CUDA_VISIBLE_DEVICES`: the UUID, or the index if the driver does not report it.
    pub id: String,
    pub name: Option<String>,
    /// Compute capability, major and minor; `None` if it is unknown.
    #[serde(default)]
    pub capability: Option<(u32, u32)>,
    /// Size of its framebuffer, in bytes.
    pub memory: Option<u64>,
}

impl Inventory {
    /// Reads this machine's hardware. It never fails: unreadable values are missing from the result.
    pub fn discover() -> Inventory {
        Inventory::from_readings(&Readings::take())
    }

    pub fn from_readings(readings: &Readings) -> Inventory {
        let (driver, mut gpus) = match &readings.nvml {
            Ok(nvml) => (nvml::present(nvml), nvml.gpus.clone()),
            Err(driver) => (driver.clone(), Vec::new()),
        };
        gpus.sort_by_key(|gpu| gpu.index);
        for gpu in &mut gpus {
            gpu.visible = gpu.problem.is_none();
        }
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

    /// The default devices of a run: every working GPU and MIG device that is visible to CUDA, or else one
    /// rank on the CPU with all allowed cores.
    pub fn devices(&self) -> Devices {
        let devices = self.cuda_devices();
        if devices.is_empty() {
            self.cpu_ranks(1)
        } else {
            Devices::Gpus { devices }
        }
    }

    /// `ranks` processes on the CPU that share its cores and its memory evenly, with at least one thread
    /// each.
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
        let device = |place: &visible::DeviceIndex| self.device(*place);
        places.iter().filter_map(device).collect()
    }

    /// The device at these indices, if it is usable.
    fn device(&self, place: visible::DeviceIndex) -> Option<Device> {
        let gpu = self.gpus.iter().find(|gpu| gpu.index == place.gpu)?;
        if gpu.problem.is_some() {
            return None;
        }
        let (id, name, memory) = match place.mig {
            None => (gpu.id(), &gpu.name, gpu.memory),
            Some(index) => {
                let mut slices = gpu.mig.as_ref()?.devices.iter();
                let slice = slices.find(|slice| slice.index == index)?;
                (slice.uuid.clone()?, &slice.name, slice.memory)
            }
        };
        Some(Device {
            id,
            name: name.clone(),
            capability: gpu.capability,
            memory: memory.map(|memory| memory.total),
        })
    }

    /// A message if fewer than `count` GPUs or MIG devices are usable; `None` if NVML agrees or there is no
    /// NVIDIA driver to query. Kubernetes reserves devices that a device plugin once advertised; NVML shows
    /// those that the driver can use now.
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
        let mut message =
            format!("{count} GPUs were reserved, NVML shows {usable} that can be used");
        for gpu in &self.gpus {
            if let Some(problem) = &gpu.problem {
                message += &format!("; {}: {problem}", gpu.id());
            }
        }
        Some(message)
    }

    fn why_no_gpu(&self) -> String {
        match &self.driver {
            DriverState::Absent { missing, .. } => missing.clone(),
            DriverState::TooOld { message } | DriverState::Broken { message } => message.clone(),
            DriverState::Present { .. } if self.gpus.is_empty() => {
                "the driver lists no GPU".to_owned()
            }
            DriverState::Present { .. } => match &self.visibility {
                Some(visible) if visible.order.is_empty() => {
                    format!("CUDA_VISIBLE_DEVICES=\"{}\" hides every GPU", visible.value)
                }
                _ if self.gpus.iter().all(|gpu| gpu.problem.is_some()) => {
                    "no GPU can be used".to_owned()
                }
                _ => "the CPU was asked for".to_owned(),
            },
        }
    }
}

impl Gpu {
    /// The UUID, or the index if the driver does not report it.
    fn id(&self) -> String {
        self.uuid.clone().unwrap_or_else(|| self.index.to_string())
    }
}

impl Devices {
    /// Number of ranks on these devices.
    pub fn count(&self) -> u64 {
        match self {
            Devices::Gpus { devices } => devices.len() as u64,
            Devices::CpuRanks { ranks, .. } => *ranks,
        }
    }

    /// Memory that every rank has at least: the smallest device's, in bytes.
    pub fn memory(&self) -> Option<u64> {
        match self {
            Devices::Gpus { devices } => {
                let sizes = devices.iter().map(|device| device.memory);
                sizes.min().flatten()
            }
            Devices::CpuRanks { memory, .. } => *memory,
        }
    }
}

/// How many there are of each, in the order of the first: `2 × NVIDIA H100, 1 × NVIDIA A100`.
pub fn tally(things: impl IntoIterator<Item = impl PartialEq + fmt::Display>) -> String {
    let mut kinds: Vec<(_, usize)> = Vec::new();
    for thing in things {
        match kinds.iter_mut().find(|(kind, _)| *kind == thing) {
            Some((_, count)) => *count += 1,
            None => kinds.push((thing, 1)),
        }
    }
    let shown = kinds
        .iter()
        .map(|(kind, count)| format!("{count} × {kind}"));
    shown.collect::<Vec<_>>().join(", ")
}

/// One line for people: `8 × NVIDIA H100 80GB HBM3`, `1 CPU rank with 2 threads`.
impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Devices::Gpus { devices } => {
                let names = devices.iter().map(|device| device.name.as_deref());
                f.write_str(&tally(names.map(|name| name.unwrap_or("unnamed GPU"))))
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
