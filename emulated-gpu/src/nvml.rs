//! The C interface of NVML, `libnvidia-ml.so.1`, as far as an inventory and a health check need it.
//!
//! Devices are those of the settings, in the order of their PCI addresses; `CUDA_VISIBLE_DEVICES` does not
//! hide them. Their state is the file of [`Faults`], read at each call.

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::{In, Out, guard};
use crate::config::{Config, uuid_text};
use crate::driver;
use crate::faults::{DeviceFaults, Faults};
use crate::status::Status;

const DRIVER_VERSION: &str = "580.65.06";
const NVML_VERSION: &str = "13.580.65.06";
/// MIG devices that one GPU can have.
const MIG_MOST: usize = 7;
/// `nvmlEventTypeXidCriticalError`
const XID_EVENT: u64 = 8;
/// How often a wait for events reads the file of faults.
const POLL: Duration = Duration::from_millis(5);

/// NVML's return codes, without success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Code {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    Timeout = 10,
    GpuIsLost = 15,
    VersionMismatch = 25,
    Unknown = 999,
}

/// A result cannot be written, or an argument cannot be read.
impl From<Status> for Code {
    fn from(_: Status) -> Code {
        Code::InvalidArgument
    }
}

static STATE: Mutex<State> = Mutex::new(State {
    config: None,
    references: 0,
    sets: Vec::new(),
});

struct State {
    /// The settings; `None` before the first initialisation.
    config: Option<Config>,
    /// Initialisations less shutdowns.
    references: u32,
    /// Event sets: for each registered device, the XID that was reported last. `None` once freed.
    sets: Vec<Option<HashMap<usize, u64>>>,
}

/// An opaque device: a GPU, or one of its MIG devices.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Device(usize);

/// Marks handles of this library.
const DEVICE: usize = 0x6e76 << 32;

impl Device {
    fn gpu(index: usize) -> Device {
        Device(DEVICE | index << 8)
    }

    fn mig(index: usize, slot: usize) -> Device {
        Device(DEVICE | index << 8 | (slot + 1))
    }

    fn index(self) -> usize {
        self.0 >> 8 & 0xff
    }

    /// The MIG device's index on its GPU.
    fn slot(self) -> Option<usize> {
        (self.0 & 0xff).checked_sub(1)
    }
}

fn code(call: impl FnOnce() -> Result<(), Code>) -> c_int {
    guard(Code::Unknown as c_int, || {
        call().map_or_else(|code| code as c_int, |()| 0)
    })
}

fn with<R>(call: impl FnOnce(&mut State, &Config) -> Result<R, Code>) -> Result<R, Code> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if state.references == 0 {
        return Err(Code::Uninitialized);
    }
    let config = state.config.clone().ok_or(Code::Uninitialized)?;
    call(&mut state, &config)
}

fn faults(config: &Config, index: usize) -> DeviceFaults {
    let path = config.faults.as_deref();
    path.map(Faults::read).unwrap_or_default().device(index)
}

/// Calls with a device that exists and answers.
fn on<R>(
    device: Device,
    call: impl FnOnce(&Config, DeviceFaults) -> Result<R, Code>,
) -> Result<R, Code> {
    with(|_, config| {
        if device.0 & !0xffff != DEVICE || device.index() >= config.devices {
            return Err(Code::InvalidArgument);
        }
        let faults = faults(config, device.index());
        if faults.lost {
            return Err(Code::GpuIsLost);
        }
        let gone = |slot| slot >= faults.mig_devices as usize;
        if device.slot().is_some_and(gone) {
            return Err(Code::NotFound);
        }
        call(config, faults)
    })
}

/// A query of GPUs that MIG devices do not have.
fn gpu_only(device: Device) -> Result<(), Code> {
    if device.slot().is_some() {
        Err(Code::NotSupported)
    } else {
        Ok(())
    }
}

fn put_text(text: &str, into: Out<c_char>, bytes: c_uint) -> Result<(), Code> {
    let written = into.put_text(text, bytes as usize);
    written.map_err(|_| Code::InsufficientSize)
}

fn gpu_uuid(index: usize) -> String {
    format!("GPU-{}", uuid_text(index, 0))
}

fn mig_uuid(index: usize, slot: usize) -> String {
    format!("MIG-{}", uuid_text(index, slot + 1))
}

/// The handle of a GPU by its index, which a lost GPU does not have.
fn find(device: Out<Device>, which: impl Fn(usize) -> bool) -> Result<(), Code> {
    let index = with(|_, config| {
        let mut indices = 0..config.devices;
        indices.find(|&index| which(index)).ok_or(Code::NotFound)
    })?;
    on(Device::gpu(index), |_, _| {
        Ok(device.put(Device::gpu(index))?)
    })
}

// Initialisation and versions

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    code(|| {
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        if state.config.is_none() {
            let config = Config::from_environment().map_err(|error| {
                eprintln!("emulated GPU: {error}");
                Code::DriverNotLoaded
            })?;
            state.config = Some(config);
        }
        state.references += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_int {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    code(|| {
        with(|state, _| {
            state.references -= 1;
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(result: c_int) -> *const c_char {
    const CODES: [(Code, &std::ffi::CStr); 10] = [
        (Code::Uninitialized, c"Uninitialized"),
        (Code::InvalidArgument, c"Invalid Argument"),
        (Code::NotSupported, c"Not Supported"),
        (Code::NotFound, c"Not Found"),
        (Code::InsufficientSize, c"Insufficient Size"),
        (Code::DriverNotLoaded, c"Driver Not Loaded"),
        (Code::Timeout, c"Timeout"),
        (Code::GpuIsLost, c"GPU is lost"),
        (Code::VersionMismatch, c"Argument version mismatch"),
        (Code::Unknown, c"Unknown Error"),
    ];
    let known = CODES.iter().find(|(code, _)| *code as c_int == result);
    match known {
        _ if result == 0 => c"Success".as_ptr(),
        Some((_, text)) => text.as_ptr(),
        None => c"Unknown Error".as_ptr(),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(version: Out<c_char>, bytes: c_uint) -> c_int {
    code(|| with(|_, _| put_text(DRIVER_VERSION, version, bytes)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetNVMLVersion(version: Out<c_char>, bytes: c_uint) -> c_int {
    code(|| with(|_, _| put_text(NVML_VERSION, version, bytes)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) -> c_int {
    code(|| Ok(version.put(driver::version())?))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) -> c_int {
    nvmlSystemGetCudaDriverVersion_v2(version)
}

// Devices

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: Out<c_uint>) -> c_int {
    code(|| with(|_, config| Ok(count.put(config.devices as c_uint)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Device>) -> c_int {
    code(|| {
        let found = find(device, |candidate| candidate == index as usize);
        found.map_err(|code| match code {
            Code::NotFound => Code::InvalidArgument,
            code => code,
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByUUID(uuid: In<c_char>, device: Out<Device>) -> c_int {
    code(|| {
        let uuid = uuid.text()?.to_owned();
        let slots = with(|_, config| {
            let all =
                (0..config.devices).flat_map(|gpu| (0..MIG_MOST).map(move |slot| (gpu, slot)));
            Ok(all.collect::<Vec<_>>())
        })?;
        let mut slots = slots.into_iter();
        if let Some((gpu, slot)) = slots.find(|&(gpu, slot)| mig_uuid(gpu, slot) == uuid) {
            let mig = Device::mig(gpu, slot);
            return on(mig, |_, _| Ok(device.put(mig)?));
        }
        find(device, |index| gpu_uuid(index) == uuid)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    address: In<c_char>,
    device: Out<Device>,
) -> c_int {
    code(|| {
        let address = address.text()?.to_lowercase();
        // The domain may have four or eight digits.
        find(device, |index| {
            pci_address(index).ends_with(address.trim_start_matches('0'))
        })
    })
}

/// A device's PCI address, with a domain of eight digits.
fn pci_address(index: usize) -> String {
    format!("00000000:{:02x}:00.0", index + 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetIndex(device: Device, index: Out<c_uint>) -> c_int {
    code(|| {
        on(device, |_, _| {
            let own = device.slot().unwrap_or(device.index());
            Ok(index.put(own as c_uint)?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: Device, name: Out<c_char>, bytes: c_uint) -> c_int {
    code(|| {
        on(device, |config, faults| {
            let gpu = &config.model(device.index()).name;
            let mig = format!("{gpu} MIG 1/{}", faults.mig_devices);
            put_text(device.slot().map_or(gpu, |_| &mig), name, bytes)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: Device, uuid: Out<c_char>, bytes: c_uint) -> c_int {
    code(|| {
        on(device, |_, _| {
            let own = match device.slot() {
                Some(slot) => mig_uuid(device.index(), slot),
                None => gpu_uuid(device.index()),
            };
            put_text(&own, uuid, bytes)
        })
    })
}

/// `nvmlPciInfo_t`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, info: Out<PciInfo>) -> c_int {
    fn array<const N: usize>(text: &str) -> [c_char; N] {
        let mut array = [0; N];
        for (to, from) in array.iter_mut().zip(text.bytes().take(N - 1)) {
            *to = from as c_char;
        }
        array
    }
    code(|| {
        on(device, |_, _| {
            let address = pci_address(device.index()).to_uppercase();
            Ok(info.put(PciInfo {
                bus_id_legacy: array(&address[4..]),
                domain: 0,
                bus: device.index() as c_uint + 1,
                device: 0,
                device_id: 0xe1e1_10de,
                subsystem_id: 0xe1e1_10de,
                bus_id: array(&address),
            })?)
        })
    })
}

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlMemory_v2_t`, in bytes; the caller sets the version.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// Total and used bytes. Used are those of this process, and what the file of faults says of others.
fn memory(device: Device) -> Result<(u64, u64), Code> {
    on(device, |config, faults| {
        if device.slot().is_some() {
            return Ok((config.nvml_memory / faults.mig_devices, 0));
        }
        let own = driver::with(|machine| {
            let mut visible = machine.config.visible.iter();
            let logical = visible.position(|&physical| physical == device.index());
            Ok(logical.map_or(0, |logical| machine.memory.statistics(logical).live_bytes))
        });
        let used = own.unwrap_or(0) + faults.used;
        Ok((config.nvml_memory, used.min(config.nvml_memory)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, info: Out<Memory>) -> c_int {
    code(|| {
        let (total, used) = memory(device)?;
        let free = total - used;
        Ok(info.put(Memory { total, free, used })?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, info: Out<MemoryV2>) -> c_int {
    code(|| {
        let version = info.get()?.version;
        if version as usize != size_of::<MemoryV2>() | 2 << 24 {
            return Err(Code::VersionMismatch);
        }
        let (total, used) = memory(device)?;
        Ok(info.put(MemoryV2 {
            version,
            total,
            reserved: 0,
            free: total - used,
            used,
        })?)
    })
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(device: Device, rates: Out<Utilization>) -> c_int {
    code(|| {
        on(device, |_, faults| {
            gpu_only(device)?;
            let gpu = faults.utilization as c_uint;
            Ok(rates.put(Utilization { gpu, memory: gpu })?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(
    device: Device,
    _sensor: c_int,
    temperature: Out<c_uint>,
) -> c_int {
    code(|| {
        on(device, |_, faults| {
            gpu_only(device)?;
            Ok(temperature.put(faults.temperature as c_uint)?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Device,
    major: Out<c_int>,
    minor: Out<c_int>,
) -> c_int {
    code(|| {
        on(device, |config, _| {
            let capability = config.model(device.index()).capability;
            major.put(capability.0)?;
            Ok(minor.put(capability.1)?)
        })
    })
}

// ECC

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetEccMode(
    device: Device,
    current: Out<c_uint>,
    pending: Out<c_uint>,
) -> c_int {
    code(|| {
        on(device, |_, _| {
            gpu_only(device)?;
            current.put(1)?;
            Ok(pending.put(1)?)
        })
    })
}

/// The aggregate counters equal the volatile ones.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: Device,
    kind: c_uint,
    counter: c_uint,
    count: Out<c_ulonglong>,
) -> c_int {
    code(|| {
        on(device, |_, faults| {
            gpu_only(device)?;
            let errors = match kind {
                0 => faults.ecc_corrected,
                1 => faults.ecc_uncorrected,
                _ => return Err(Code::InvalidArgument),
            };
            if counter > 1 {
                return Err(Code::InvalidArgument);
            }
            Ok(count.put(errors)?)
        })
    })
}

// MIG

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(
    device: Device,
    current: Out<c_uint>,
    pending: Out<c_uint>,
) -> c_int {
    code(|| {
        on(device, |_, faults| {
            gpu_only(device)?;
            let enabled = c_uint::from(faults.mig_devices > 0 || faults.mig_empty);
            current.put(enabled)?;
            Ok(pending.put(enabled)?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Device, count: Out<c_uint>) -> c_int {
    code(|| {
        on(device, |_, faults| {
            gpu_only(device)?;
            let is_on = faults.mig_devices > 0 || faults.mig_empty;
            let most = if is_on { MIG_MOST } else { 0 };
            Ok(count.put(most as c_uint)?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: Device,
    index: c_uint,
    mig: Out<Device>,
) -> c_int {
    code(|| {
        gpu_only(device)?;
        let index = index as usize;
        if index >= MIG_MOST {
            return Err(Code::InvalidArgument);
        }
        let slot = Device::mig(device.index(), index);
        on(device, |_, _| Ok(()))?;
        on(slot, |_, _| Ok(mig.put(slot)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    mig: Device,
    device: Out<Device>,
) -> c_int {
    code(|| on(mig, |_, _| Ok(device.put(Device::gpu(mig.index()))?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceIsMigDeviceHandle(device: Device, is_mig: Out<c_uint>) -> c_int {
    code(|| {
        on(device, |_, _| {
            Ok(is_mig.put(device.slot().is_some().into())?)
        })
    })
}

// Events

/// `nvmlEventData_t`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EventData {
    device: Device,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(set: Out<usize>) -> c_int {
    code(|| {
        with(|state, _| {
            state.sets.push(Some(HashMap::new()));
            Ok(set.put(state.sets.len())?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: usize) -> c_int {
    code(|| {
        with(|state, _| {
            let slot = set.checked_sub(1).and_then(|set| state.sets.get_mut(set));
            let freed = slot.and_then(Option::take);
            freed.map(|_| ()).ok_or(Code::InvalidArgument)
        })
    })
}

/// Only XIDs occur; an XID that the file has already at this call does not.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(
    device: Device,
    kinds: c_ulonglong,
    set: usize,
) -> c_int {
    code(|| {
        let xid = on(device, |_, faults| Ok(faults.xid))?;
        with(|state, _| {
            let slot = set.checked_sub(1).and_then(|set| state.sets.get_mut(set));
            let registered = slot.and_then(Option::as_mut);
            let registered = registered.ok_or(Code::InvalidArgument)?;
            if kinds & XID_EVENT != 0 {
                registered.insert(device.index(), xid);
            }
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSupportedEventTypes(
    device: Device,
    kinds: Out<c_ulonglong>,
) -> c_int {
    code(|| on(device, |_, _| Ok(kinds.put(XID_EVENT)?)))
}

/// Returns the next XID of a registered device, or a timeout after this number of milliseconds.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(set: usize, data: Out<EventData>, timeout: c_uint) -> c_int {
    code(|| {
        let end = Instant::now() + Duration::from_millis(timeout.into());
        loop {
            let event = with(|state, config| {
                let slot = set.checked_sub(1).and_then(|set| state.sets.get_mut(set));
                let registered = slot.and_then(Option::as_mut);
                let registered = registered.ok_or(Code::InvalidArgument)?;
                let fresh = registered.iter_mut().find_map(|(&index, reported)| {
                    let xid = faults(config, index).xid;
                    let is_new = xid != *reported;
                    *reported = xid;
                    (is_new && xid != 0).then_some((index, xid))
                });
                Ok(fresh)
            })?;
            if let Some((index, xid)) = event {
                return Ok(data.put(EventData {
                    device: Device::gpu(index),
                    kind: XID_EVENT,
                    data: xid,
                    gpu_instance: c_uint::MAX,
                    compute_instance: c_uint::MAX,
                })?);
            }
            if Instant::now() >= end {
                return Err(Code::Timeout);
            }
            std::thread::sleep(POLL);
        }
    })
}
