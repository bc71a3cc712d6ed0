//! Queries of NVIDIA's management library, and the interpretation of its answers and errors.
//!
//! `nvml-wrapper` opens `libnvidia-ml.so.1` at the first query, so that one binary runs with and without a
//! driver, and returns an error for a function that an old library lacks.

use std::path::Path;

use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use serde::{Deserialize, Serialize};

use super::{DriverState, Ecc, Gpu, GpuMemory, Mig, MigDevice};

/// NVML's answers. A query that a card or an old driver cannot answer is `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NvmlReadings {
    /// Versions of the driver.
    pub driver: DriverReadings,
    /// Every device that NVML counts.
    pub gpus: Vec<GpuReadings>,
}

/// Versions of the driver and of CUDA.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DriverReadings {
    /// `nvmlSystemGetDriverVersion`.
    pub version: Option<String>,
    /// `nvmlSystemGetCudaDriverVersion`, 1000 × major + 10 × minor.
    pub cuda: Option<i32>,
}

/// The answers of one GPU or MIG device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuReadings {
    /// NVML's index, or the MIG device's index on its GPU.
    pub index: u32,
    /// The error of the device itself; all other values are then unknown.
    pub problem: Option<String>,
    /// `nvmlDeviceGetName`.
    pub name: Option<String>,
    /// `nvmlDeviceGetUUID`.
    pub uuid: Option<String>,
    /// `nvmlDeviceGetCudaComputeCapability`: major and minor.
    pub capability: Option<(u32, u32)>,
    /// `nvmlDeviceGetMemoryInfo_v2`: total and used bytes.
    pub memory: Option<(u64, u64)>,
    /// `nvmlDeviceGetMigMode`: current and pending.
    pub mig_mode: Option<(bool, bool)>,
    /// MIG devices of the GPU.
    pub mig_devices: Vec<GpuReadings>,
    /// `nvmlDeviceGetEccMode`: current and pending.
    pub ecc_mode: Option<(bool, bool)>,
    /// Uncorrected errors since the driver was loaded.
    pub ecc_uncorrected_volatile: Option<u64>,
    /// Uncorrected errors over the card's life.
    pub ecc_uncorrected_aggregate: Option<u64>,
}

/// Why NVML could not be queried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "message", rename_all = "snake_case")]
pub enum NvmlFailure {
    /// The library does not exist.
    NoLibrary,
    /// The library exists, but cannot be opened.
    BadLibrary(String),
    /// The library is there, the kernel module is not loaded.
    NotLoaded,
    /// The library lacks this function.
    NoFunction(String),
    /// Library and kernel module are of different versions.
    Mismatch,
    /// Any other error, in NVML's words.
    Other(String),
}

/// Queries all values of NVML.
pub fn read() -> Result<NvmlReadings, NvmlFailure> {
    let nvml = Nvml::init().map_err(failure)?;
    let count = nvml.device_count().map_err(failure)?;
    Ok(NvmlReadings {
        driver: DriverReadings {
            version: nvml.sys_driver_version().ok(),
            cuda: nvml.sys_cuda_driver_version().ok(),
        },
        gpus: (0..count).map(|index| gpu(&nvml, index)).collect(),
    })
}

fn failure(error: NvmlError) -> NvmlFailure {
    match error {
        NvmlError::LibloadingError(error) => {
            // The loader distinguishes a missing file from a bad one only by its message.
            let words = error.to_string();
            if words.contains("No such file") {
                NvmlFailure::NoLibrary
            } else {
                NvmlFailure::BadLibrary(words)
            }
        }
        NvmlError::LibraryNotFound => NvmlFailure::NoLibrary,
        NvmlError::DriverNotLoaded => NvmlFailure::NotLoaded,
        NvmlError::FailedToLoadSymbol(symbol) => NvmlFailure::NoFunction(symbol),
        NvmlError::FunctionNotFound => NvmlFailure::NoFunction(error.to_string()),
        NvmlError::LibRmVersionMismatch => NvmlFailure::Mismatch,
        other => NvmlFailure::Other(other.to_string()),
    }
}

fn gpu(nvml: &Nvml, index: u32) -> GpuReadings {
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(error) => {
            return GpuReadings {
                index,
                problem: Some(error.to_string()),
                ..GpuReadings::default()
            };
        }
    };
    let mig_mode = device
        .mig_mode()
        .ok()
        .map(|mode| (mode.current == 1, mode.pending == 1));
    let slots = match mig_mode {
        Some((true, _)) => device.mig_device_count().unwrap_or(0),
        _ => 0,
    };
    let uncorrected = |counter| {
        device
            .total_ecc_errors(MemoryError::Uncorrected, counter)
            .ok()
    };
    GpuReadings {
        mig_mode,
        // The count is that of slots; an empty slot answers with an error.
        mig_devices: (0..slots)
            .filter_map(|slot| Some((slot, device.mig_device_by_index(slot).ok()?)))
            .map(|(slot, slice)| common(&slice, slot))
            .collect(),
        ecc_mode: device
            .is_ecc_enabled()
            .ok()
            .map(|mode| (mode.currently_enabled, mode.pending_enabled)),
        ecc_uncorrected_volatile: uncorrected(EccCounter::Volatile),
        ecc_uncorrected_aggregate: uncorrected(EccCounter::Aggregate),
        ..common(&device, index)
    }
}

/// Values that GPUs and MIG devices have in common.
fn common(device: &nvml_wrapper::Device<'_>, index: u32) -> GpuReadings {
    GpuReadings {
        index,
        name: device.name().ok(),
        uuid: device.uuid().ok(),
        capability: capability(device),
        memory: device.memory_info().ok().map(|m| (m.total, m.used)),
        ..GpuReadings::default()
    }
}

fn capability(device: &nvml_wrapper::Device<'_>) -> Option<(u32, u32)> {
    let capability = device.cuda_compute_capability().ok()?;
    Some((
        capability.major.try_into().ok()?,
        capability.minor.try_into().ok()?,
    ))
}

/// The number of NVIDIA's display controllers on the PCI bus, which distinguishes a machine without a GPU
/// from one without a driver.
pub fn pci_gpus() -> Option<u32> {
    let read = |path: &Path, file: &str| std::fs::read_to_string(path.join(file)).ok();
    let mut count = 0;
    for entry in std::fs::read_dir("/sys/bus/pci/devices").ok()?.flatten() {
        let nvidia = read(&entry.path(), "vendor").is_some_and(|v| v.trim() == "0x10de");
        // PCI class 03: display controllers, which includes data-centre GPUs.
        let display = read(&entry.path(), "class").is_some_and(|c| c.starts_with("0x03"));
        count += u32::from(nvidia && display);
    }
    Some(count)
}

/// The state of a driver that answered.
pub(super) fn present(driver: &DriverReadings) -> DriverState {
    DriverState::Present {
        version: driver.version.clone(),
        cuda: driver.cuda.map(|version| {
            format!(
                "{}.{}",
                cuda_driver_version_major(version),
                cuda_driver_version_minor(version)
            )
        }),
    }
}

/// The state of a driver that could not be queried.
pub(super) fn not_usable(failure: &NvmlFailure, pci_gpus: Option<u32>) -> DriverState {
    match failure {
        NvmlFailure::NoLibrary => DriverState::Absent {
            missing: match pci_gpus {
                Some(0) => "no NVIDIA GPU on this machine".to_owned(),
                Some(1) => "1 NVIDIA GPU, but no driver (libnvidia-ml.so.1)".to_owned(),
                Some(n) => format!("{n} NVIDIA GPUs, but no driver (libnvidia-ml.so.1)"),
                None => "no NVIDIA driver (libnvidia-ml.so.1)".to_owned(),
            },
            install: "to use one, install NVIDIA's driver from your distribution, or start the \
                      container with its GPUs (docker run --gpus all)"
                .to_owned(),
        },
        NvmlFailure::NotLoaded => DriverState::Absent {
            missing: "the NVIDIA driver is installed, but its kernel module is not loaded"
                .to_owned(),
            install: "load it with `modprobe nvidia`; `dmesg` says why if that fails".to_owned(),
        },
        NvmlFailure::NoFunction(what) => DriverState::TooOld {
            message: format!("the NVIDIA driver is too old ({what}); install a newer one"),
        },
        NvmlFailure::Mismatch => DriverState::Broken {
            message: "the NVIDIA driver's library and its kernel module are of different \
                      versions; reboot, or reload the module"
                .to_owned(),
        },
        NvmlFailure::BadLibrary(words) => DriverState::Broken {
            message: format!("the NVIDIA driver's library cannot be opened: {words}; reinstall it"),
        },
        NvmlFailure::Other(message) => DriverState::Broken {
            message: format!("the NVIDIA driver does not answer: {message}; see `nvidia-smi`"),
        },
    }
}

/// All GPUs; `CUDA_VISIBLE_DEVICES` is applied later.
pub(super) fn gpus(nvml: &NvmlReadings) -> Vec<Gpu> {
    nvml.gpus.iter().map(Gpu::from).collect()
}

impl From<&GpuReadings> for Gpu {
    fn from(gpu: &GpuReadings) -> Gpu {
        Gpu {
            index: gpu.index,
            name: gpu.name.clone(),
            uuid: gpu.uuid.clone(),
            capability: gpu.capability,
            memory: memory(gpu),
            mig: gpu.mig_mode.map(|(enabled, pending)| Mig {
                enabled,
                pending,
                devices: gpu
                    .mig_devices
                    .iter()
                    .map(|slice| MigDevice {
                        index: slice.index,
                        name: slice.name.clone(),
                        uuid: slice.uuid.clone(),
                        memory: memory(slice),
                        visible: true,
                    })
                    .collect(),
            }),
            ecc: gpu.ecc_mode.map(|(enabled, pending)| Ecc {
                enabled,
                pending,
                uncorrected_volatile: gpu.ecc_uncorrected_volatile,
                uncorrected_aggregate: gpu.ecc_uncorrected_aggregate,
            }),
            visible: gpu.problem.is_none(),
            problem: gpu.problem.clone(),
        }
    }
}

fn memory(gpu: &GpuReadings) -> Option<GpuMemory> {
    gpu.memory.map(|(total, used)| GpuMemory { total, used })
}
