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
    /// `nvmlSystemGetDriverVersion`.
    pub version: Option<String>,
    /// `nvmlSystemGetCudaDriverVersion`, 1000 × major + 10 × minor.
    pub cuda: Option<i32>,
    /// Every device that NVML counts.
    pub gpus: Vec<Gpu>,
}

/// Queries all values of NVML; the error is the state of a driver that could not be queried.
pub fn read() -> Result<NvmlReadings, DriverState> {
    let failure = |error| not_usable(&error, pci_gpus());
    let nvml = Nvml::init().map_err(failure)?;
    let count = nvml.device_count().map_err(failure)?;
    Ok(NvmlReadings {
        version: nvml.sys_driver_version().ok(),
        cuda: nvml.sys_cuda_driver_version().ok(),
        gpus: (0..count).map(|index| gpu(&nvml, index)).collect(),
    })
}

fn gpu(nvml: &Nvml, index: u32) -> Gpu {
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(error) => {
            return Gpu {
                index,
                problem: Some(error.to_string()),
                ..Gpu::default()
            };
        }
    };
    let uncorrected = |counter| {
        let errors = device.total_ecc_errors(MemoryError::Uncorrected, counter);
        errors.ok()
    };
    let mig_mode = device.mig_mode().ok();
    let ecc_mode = device.is_ecc_enabled().ok();
    Gpu {
        index,
        name: device.name().ok(),
        uuid: device.uuid().ok(),
        capability: capability(&device),
        memory: memory(&device),
        mig: mig_mode.map(|mode| mig(&device, mode.current == 1, mode.pending == 1)),
        ecc: ecc_mode.map(|mode| Ecc {
            enabled: mode.currently_enabled,
            pending: mode.pending_enabled,
            uncorrected_volatile: uncorrected(EccCounter::Volatile),
            uncorrected_aggregate: uncorrected(EccCounter::Aggregate),
        }),
        visible: true,
        problem: None,
    }
}

fn mig(device: &nvml_wrapper::Device<'_>, enabled: bool, pending: bool) -> Mig {
    let mut devices = Vec::new();
    if enabled {
        for index in 0..device.mig_device_count().unwrap_or(0) {
            // The count is that of slots; an empty slot answers with an error.
            if let Ok(slice) = device.mig_device_by_index(index) {
                devices.push(MigDevice {
                    index,
                    name: slice.name().ok(),
                    uuid: slice.uuid().ok(),
                    memory: memory(&slice),
                    visible: true,
                });
            }
        }
    }
    Mig {
        enabled,
        pending,
        devices,
    }
}

fn memory(device: &nvml_wrapper::Device<'_>) -> Option<GpuMemory> {
    let memory = device.memory_info().ok()?;
    Some(GpuMemory {
        total: memory.total,
        used: memory.used,
    })
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
fn pci_gpus() -> Option<u32> {
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
pub(super) fn present(nvml: &NvmlReadings) -> DriverState {
    let version = |cuda| {
        let (major, minor) = (
            cuda_driver_version_major(cuda),
            cuda_driver_version_minor(cuda),
        );
        format!("{major}.{minor}")
    };
    DriverState::Present {
        version: nvml.version.clone(),
        cuda: nvml.cuda.map(version),
    }
}

/// The state of a driver that could not be queried. `pci_gpus`: the number of GPUs on the PCI bus, if it can
/// be read.
pub(super) fn not_usable(error: &NvmlError, pci_gpus: Option<u32>) -> DriverState {
    let broken = |message| DriverState::Broken { message };
    match error {
        NvmlError::LibloadingError(error) => not_opened(&error.to_string(), pci_gpus),
        NvmlError::LibraryNotFound => no_library(pci_gpus),
        NvmlError::DriverNotLoaded => DriverState::Absent {
            missing: "the NVIDIA driver is installed, but its kernel module is not loaded"
                .to_owned(),
            install: "load it with `modprobe nvidia`; `dmesg` says why if that fails".to_owned(),
        },
        NvmlError::FailedToLoadSymbol(symbol) => too_old(symbol),
        NvmlError::FunctionNotFound => too_old(&error.to_string()),
        NvmlError::LibRmVersionMismatch => broken(
            "the NVIDIA driver's library and its kernel module are of different versions; reboot, or reload the \
             module"
                .to_owned(),
        ),
        other => broken(format!("the NVIDIA driver does not answer: {other}; see `nvidia-smi`")),
    }
}

/// The loader distinguishes a missing file from a bad one only by its message.
pub(super) fn not_opened(words: &str, pci_gpus: Option<u32>) -> DriverState {
    if words.contains("No such file") {
        return no_library(pci_gpus);
    }
    DriverState::Broken {
        message: format!("the NVIDIA driver's library cannot be opened: {words}; reinstall it"),
    }
}

fn no_library(pci_gpus: Option<u32>) -> DriverState {
    DriverState::Absent {
        missing: match pci_gpus {
            Some(0) => "no NVIDIA GPU on this machine".to_owned(),
            Some(1) => "1 NVIDIA GPU, but no driver (libnvidia-ml.so.1)".to_owned(),
            Some(n) => format!("{n} NVIDIA GPUs, but no driver (libnvidia-ml.so.1)"),
            None => "no NVIDIA driver (libnvidia-ml.so.1)".to_owned(),
        },
        install: "to use one, install NVIDIA's driver from your distribution, or start the \
                  container with its GPUs (docker run --gpus all)"
            .to_owned(),
    }
}

fn too_old(what: &str) -> DriverState {
    DriverState::TooOld {
        message: format!("the NVIDIA driver is too old ({what}); install a newer one"),
    }
}
