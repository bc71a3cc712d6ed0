//! The C interface of the CUDA driver, `libcuda.so.1`.
//!
//! Names, types and codes are those of CUDA 13's driver API. Every function locks the one [`Machine`] of the
//! process, so calls of several threads run one after the other.

#![allow(non_snake_case)]

use std::alloc::Layout;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::abi::{HostRange, In, Out, guard};
use crate::config::{Config, uuid};
use crate::faults::Faults;
use crate::graph::CaptureMode;
use crate::launch::{Dim, Failure, GlobalMemory, LaunchError};
use crate::machine::{Machine, Pinned, REGISTERS, SHARED_DEFAULT, SHARED_MOST, THREADS_MOST};
use crate::memory::POISON;
use crate::status::{Status, describe};
use crate::stream::{Access, LaneKind, Mark, Task, Wait};

/// Multiprocessors of a device: few, so that a kernel that fills the device is small.
const MULTIPROCESSORS: c_int = 4;
const THREADS_OF_MULTIPROCESSOR: c_int = 2048;
const BLOCKS_OF_MULTIPROCESSOR: c_int = 32;
/// Shared memory that the driver takes of each block.
const SHARED_RESERVED: u32 = 1024;
/// How often a wait looks whether pending operations can go on.
const POLL: Duration = Duration::from_millis(1);
/// How often the report at exit tries to lock the machine.
const EXIT_TRIES: u32 = 2000;
/// Alignment of pinned memory.
const PAGE: usize = 4096;

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

thread_local! {
    /// Contexts that the thread made current; the last is the current one.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Something that a program holds by an opaque pointer: its kind and its number.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Graph,
    Executable,
}

impl Handle {
    const NULL: Handle = Handle(0);

    fn new(is: Is, number: usize) -> Handle {
        Handle((is as usize) << 32 | number)
    }

    fn number(self, is: Is) -> Result<usize, Status> {
        if self.0 >> 32 == is as usize {
            Ok(self.0 & 0xffff_ffff)
        } else {
            Err(Status::InvalidHandle)
        }
    }

    fn id(self, is: Is) -> Result<u32, Status> {
        self.number(is).map(|number| number as u32)
    }
}

/// Runs a call on the machine of the process.
pub fn with<R>(call: impl FnOnce(&mut Machine) -> Result<R, Status>) -> Result<R, Status> {
    let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    call(machine.as_mut().ok_or(Status::NotInitialized)?)
}

/// Runs a call in the current context, which must be without an error.
pub fn with_context<R>(
    call: impl FnOnce(&mut Machine, usize) -> Result<R, Status>,
) -> Result<R, Status> {
    with(|machine| {
        let context = current().ok_or(Status::InvalidContext)?;
        machine.check(context)?;
        call(machine, context)
    })
}

/// Waits. The lock is free while what is left waits for something outside of the streams, so that other
/// threads can act on it.
pub fn settle(prepare: impl FnOnce(&mut Machine) -> Result<Wait, Status>) -> Result<(), Status> {
    let wait = with(prepare)?;
    let mut is_over = with(|machine| machine.advance(&wait))?;
    while !is_over {
        std::thread::sleep(POLL);
        is_over = with(|machine| machine.resume(&wait))?;
    }
    Ok(())
}

/// Waits for all streams of the current context.
fn settle_context() -> Result<(), Status> {
    settle(|machine| {
        let context = current().ok_or(Status::InvalidContext)?;
        machine.check(context)?;
        Ok(machine.all_of(context))
    })
}

/// The number of a stream; null and 1 are the legacy default stream of the current context.
pub fn stream_of(machine: &Machine, stream: Handle) -> Result<usize, Status> {
    if stream.0 <= 1 {
        let context = current().ok_or(Status::InvalidContext)?;
        return Ok(machine.default_stream(context));
    }
    stream_in(machine, stream, 0)
}

/// The number of a stream; null and 1 are the legacy default stream of the context.
pub fn stream_in(machine: &Machine, stream: Handle, context: usize) -> Result<usize, Status> {
    if stream.0 <= 1 {
        return Ok(machine.default_stream(context));
    }
    let stream = stream.number(Is::Stream)?;
    if machine.is_created(stream) {
        Ok(stream)
    } else {
        Err(Status::InvalidHandle)
    }
}

pub fn current() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

fn code(call: impl FnOnce() -> Result<(), Status>) -> c_int {
    guard(Status::Unknown as c_int, || {
        call().map_or_else(|status| status as c_int, |()| 0)
    })
}

fn device_of(machine: &Machine, device: c_int) -> Result<usize, Status> {
    let index = usize::try_from(device).map_err(|_| Status::InvalidDevice)?;
    if index < machine.config.visible.len() {
        Ok(index)
    } else {
        Err(Status::InvalidDevice)
    }
}

/// The index of a device among all of the machine.
fn physical(machine: &Machine, device: c_int) -> Result<usize, Status> {
    Ok(machine.config.visible[device_of(machine, device)?])
}

fn context_of(machine: &Machine, context: Handle) -> Result<usize, Status> {
    let number = context.number(Is::Context);
    let number = number.map_err(|_| Status::InvalidContext)?;
    if number < machine.config.visible.len() && machine.is_retained(number) {
        Ok(number)
    } else {
        Err(Status::InvalidContext)
    }
}

// Initialisation, versions, errors

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    code(|| {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        if machine.is_none() {
            let mut config = Config::from_environment().map_err(|error| {
                eprintln!("emulated GPU: {error}");
                Status::Unknown
            })?;
            if let Some(path) = &config.faults {
                let faults = Faults::read(path);
                config
                    .visible
                    .retain(|&device| !faults.device(device).mig_empty);
            }
            *machine = Some(Machine::new(config, crate::load));
        }
        match &*machine {
            Some(machine) if machine.config.visible.is_empty() => Err(Status::NoDevice),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    code(|| version.put(self::version()))
}

/// The newest CUDA that the driver supports. Programs ask before `cuInit`.
pub fn version() -> c_int {
    Config::from_environment().unwrap_or_default().driver
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    code(|| {
        let (name, _) = describe(error).ok_or(Status::InvalidValue)?;
        text.put(name.as_ptr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    code(|| {
        let (_, description) = describe(error).ok_or(Status::InvalidValue)?;
        text.put(description.as_ptr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress_v2(
    symbol: In<c_char>,
    function: Out<*const c_void>,
    _version: c_int,
    _flags: u64,
    status: Out<c_int>,
) -> c_int {
    code(|| {
        let symbol = symbol.text()?;
        let newest = match symbol {
            "cuGraphInstantiate" => "cuGraphInstantiateWithFlags".to_owned(),
            _ => format!("{symbol}_v2"),
        };
        let found = [newest.as_str(), symbol].into_iter().find_map(|name| {
            let mut functions = FUNCTIONS.iter();
            functions.find(|entry| entry.name == name)
        });
        // CU_GET_PROC_ADDRESS_SUCCESS, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        status.put_if_wanted(c_int::from(found.is_none()));
        function.put(found.map_or(std::ptr::null(), |entry| entry.address))?;
        found.map(|_| ()).ok_or(Status::NotFound)
    })
}

/// Undocumented tables of functions, of which there are none. NVRTC asks for one if it finds a driver.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetExportTable(table: Out<*const c_void>, _uuid: In<[u8; 16]>) -> c_int {
    code(|| {
        table.put(std::ptr::null())?;
        Err(Status::NotFound)
    })
}

// Devices

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    code(|| with(|machine| count.put(machine.config.visible.len() as c_int)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    code(|| {
        with(|machine| {
            device_of(machine, ordinal)?;
            device.put(ordinal)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: Out<c_char>, bytes: c_int, device: c_int) -> c_int {
    code(|| {
        with(|machine| {
            let device = physical(machine, device)?;
            name.put_text(&machine.config.model(device).name, bytes.max(0) as usize)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(bytes: Out<[u8; 16]>, device: c_int) -> c_int {
    code(|| with(|machine| bytes.put(uuid(physical(machine, device)?, 0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    code(|| {
        with(|machine| {
            let device = device_of(machine, device)?;
            bytes.put(machine.memory.capacity(device).0 as usize)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(text: Out<c_char>, bytes: c_int, device: c_int) -> c_int {
    code(|| {
        with(|machine| {
            let device = physical(machine, device)?;
            text.put_text(
                &format!("0000:{:02X}:00.0", device + 1),
                bytes.max(0) as usize,
            )
        })
    })
}

/// Peers cannot reach each other's memory from kernels; copies go through the host.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) -> c_int {
    code(|| {
        with(|machine| {
            device_of(machine, device)?;
            device_of(machine, peer)?;
            can.put(0)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> c_int {
    code(|| {
        with(|machine| {
            let device = physical(machine, device)?;
            let (major, minor) = machine.config.model(device).capability;
            let faults = machine.config.faults.as_deref().map(Faults::read);
            let is_exclusive = faults.is_some_and(|faults| faults.device(device).exclusive);
            // The numbers are those of `CUdevice_attribute`.
            value.put(match attribute {
                1..=3 => THREADS_MOST as c_int, // threads of a block; in x; in y
                4 => 64,                        // threads of a block in z
                5 => c_int::MAX,                // blocks in x
                6 | 7 => 65535,                 // blocks in y; in z
                8 => SHARED_DEFAULT as c_int,   // shared memory of a block
                9 => 65536,                     // constant memory
                10 => 32,                       // threads of a warp
                11 => c_int::MAX,               // pitch
                12 | 82 => REGISTERS as c_int,  // registers of a block; of a multiprocessor
                13 => 1_000_000,                // clock in kHz
                14 => 512,                      // texture alignment
                16 => MULTIPROCESSORS,
                20 => 3 * c_int::from(is_exclusive), // compute mode: 3 is exclusive-process
                33 => device as c_int + 1,           // PCI bus
                36 => 1_000_000,                     // memory clock in kHz
                37 => 5120,                          // width of the memory bus in bits
                38 => 1 << 20,                       // bytes of the L2 cache
                39 => THREADS_OF_MULTIPROCESSOR,
                40 => 3, // copy engines
                75 => major,
                76 => minor,
                81 => (SHARED_MOST + SHARED_RESERVED) as c_int, // shared memory of a multiprocessor
                97 => SHARED_MOST as c_int, // shared memory of a block on request
                106 => BLOCKS_OF_MULTIPROCESSOR,
                111 => SHARED_RESERVED as c_int,
                // Host memory mapped, kernels concurrent, ECC on, unified addresses, stream priorities,
                // caches, memory pools.
                19 | 31 | 32 | 41 | 78 | 79 | 80 | 115 => 1,
                _ if (1..=150).contains(&attribute) => 0,
                _ => return Err(Status::InvalidValue),
            })
        })
    })
}

// Contexts

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) -> c_int {
    code(|| {
        with(|machine| {
            let faults = machine.config.faults.as_deref().map(Faults::read);
            let physical = physical(machine, device)?;
            if faults.is_some_and(|faults| faults.device(physical).exclusive) {
                return Err(Status::DeviceUnavailable);
            }
            let device = device_of(machine, device)?;
            context.put(Handle::new(Is::Context, device))?;
            machine.retain(device);
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    code(|| with(|machine| machine.release(device_of(machine, device)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: c_uint) -> c_int {
    code(|| with(|machine| device_of(machine, device).map(|_| ())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) -> c_int {
    code(|| {
        with(|machine| {
            let device = device_of(machine, device)?;
            flags.put(0)?;
            active.put(machine.is_retained(device).into())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Handle) -> c_int {
    code(|| {
        with(|machine| {
            let context = (context != Handle::NULL)
                .then(|| context_of(machine, context))
                .transpose()?;
            CURRENT.with_borrow_mut(|stack| {
                stack.pop();
                stack.extend(context);
            });
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<Handle>) -> c_int {
    code(|| {
        with(|_| {
            let handle = current().map(|context| Handle::new(Is::Context, context));
            context.put(handle.unwrap_or(Handle::NULL))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> c_int {
    code(|| {
        with(|machine| {
            let context = context_of(machine, context)?;
            CURRENT.with_borrow_mut(|stack| stack.push(context));
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<Handle>) -> c_int {
    code(|| {
        with(|_| {
            let popped = CURRENT.with_borrow_mut(Vec::pop);
            let popped = popped.ok_or(Status::InvalidContext)?;
            context.put_if_wanted(Handle::new(Is::Context, popped));
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    code(|| with(|_| device.put(current().ok_or(Status::InvalidContext)? as c_int)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    code(|| {
        with_context(|machine, context| machine.refuse_context_captured(context))?;
        settle_context()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) -> c_int {
    code(|| {
        least.put_if_wanted(0);
        greatest.put_if_wanted(-5);
        Ok(())
    })
}

// Memory

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(pointer: Out<u64>, bytes: usize) -> c_int {
    code(|| {
        with_context(|machine, context| {
            machine.refuse_in_capture()?;
            pointer.put(machine.allocate(context, bytes as u64)?)
        })
    })
}

/// Waits for the memory's device, as the driver does, and frees the memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(pointer: u64) -> c_int {
    code(|| {
        with_context(|machine, _| machine.refuse_in_capture())?;
        if pointer == 0 {
            return Ok(());
        }
        settle(|machine| {
            let owner = machine.memory.device_of(pointer).or_else(current);
            Ok(machine.all_of(owner.ok_or(Status::InvalidContext)?))
        })?;
        with_context(|machine, _| machine.free(pointer))
    })
}

/// The memory exists at once, but only operations that are ordered after the allocation may use it.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(pointer: Out<u64>, bytes: usize, stream: Handle) -> c_int {
    code(|| {
        with_context(|machine, context| {
            let stream = stream_of(machine, stream)?;
            machine.refuse_captured(stream)?;
            let address = machine.allocate(context, bytes as u64)?;
            submit(machine, stream, "allocation", move |access| {
                access.touched.write(address, bytes as u64);
                Ok(())
            })?;
            pointer.put(address)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(pointer: u64, stream: Handle) -> c_int {
    code(|| {
        with_context(|machine, _| {
            let stream = stream_of(machine, stream)?;
            machine.refuse_captured(stream)?;
            machine.check_range(pointer, 1)?;
            submit(machine, stream, "free", move |access| {
                let freed = access.free(pointer);
                freed.map_err(|error| LaunchError::new(Failure::Launch, error))
            })
            .map(|_| ())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    code(|| {
        with_context(|machine, context| {
            let (capacity, left) = machine.memory.capacity(context);
            free.put(left as usize)?;
            total.put(capacity as usize)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(pointer: Out<*mut c_void>, bytes: usize, _flags: c_uint) -> c_int {
    code(|| {
        with_context(|machine, context| {
            machine.refuse_in_capture()?;
            if bytes == 0 {
                return Err(Status::InvalidValue);
            }
            let layout = pinned_layout(bytes)?;
            // SAFETY: the layout is not empty. The bytes are initialised before they are returned.
            let address = unsafe {
                let address = std::alloc::alloc(layout);
                if address.is_null() {
                    return Err(Status::OutOfMemory);
                }
                address.write_bytes(POISON, bytes);
                address
            };
            let pinned = Pinned {
                bytes: bytes as u64,
                context,
            };
            machine.pinned.insert(address as u64, pinned);
            pointer.put(address.cast())
        })
    })
}

/// Waits for the context, as the driver does, and frees pinned memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> c_int {
    code(|| {
        with_context(|machine, _| machine.refuse_in_capture())?;
        settle_context()?;
        with_context(|machine, _| {
            let Some(pinned) = machine.pinned.remove(&(pointer as u64)) else {
                machine.misuse(&format!("no pinned memory starts at {pointer:p}"));
                return Err(Status::InvalidValue);
            };
            let bytes = pinned.bytes as usize;
            let layout = pinned_layout(bytes)?;
            // SAFETY: the map has only addresses that `cuMemHostAlloc` allocated with this layout, once.
            unsafe {
                pointer.cast::<u8>().write_bytes(POISON, bytes);
                std::alloc::dealloc(pointer.cast(), layout);
            }
            Ok(())
        })
    })
}

fn pinned_layout(bytes: usize) -> Result<Layout, Status> {
    Layout::from_size_align(bytes, PAGE).map_err(|_| Status::OutOfMemory)
}

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE` (2) and `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL` (9).
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(data: Out<c_int>, attribute: c_int, pointer: u64) -> c_int {
    code(|| {
        with_context(|machine, context| {
            let pinned = machine.is_pinned(pointer, 1);
            if !pinned && machine.memory.range_of(pointer).is_none() {
                return Err(Status::InvalidValue);
            }
            let device = machine.memory.device_of(pointer).unwrap_or(context);
            match attribute {
                2 => data.put(if pinned { 1 } else { 2 }),
                9 => data.put(device as c_int),
                _ => Err(Status::NotSupported),
            }
        })
    })
}

// Copies and sets

/// Appends work to a stream.
pub fn submit(
    machine: &mut Machine,
    stream: usize,
    name: &str,
    work: impl Fn(&mut Access<'_>) -> Result<(), LaunchError> + Send + Sync + 'static,
) -> Result<Option<Mark>, Status> {
    machine.submit(stream, Task::new(name, work))
}

/// The form of a copy. A synchronous one is on the default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Synchronous,
    Asynchronous(Handle),
}

impl Form {
    /// The stream of a copy between the device and the host, if a capture allows it.
    fn stream(self, machine: &mut Machine, has_pinned: bool) -> Result<usize, Status> {
        let stream = match self {
            Form::Synchronous => {
                machine.refuse_in_capture()?;
                stream_of(machine, Handle::NULL)?
            }
            Form::Asynchronous(stream) => stream_of(machine, stream)?,
        };
        if !has_pinned {
            machine.refuse_captured(stream)?;
        }
        Ok(stream)
    }
}

/// Pageable memory is read at the call, pinned memory when the copy runs. Only a synchronous copy from pinned
/// memory has arrived on the device when the call returns.
fn to_device(form: Form, to: u64, from: HostRange) -> Result<(), Status> {
    let name = format!("copy of {} bytes to the device", from.bytes);
    let is_pinned = with_context(|machine, _| {
        machine.check_range(to, from.bytes)?;
        Ok(machine.is_pinned(from.address, from.bytes))
    })?;
    if is_pinned {
        return settle(|machine| {
            let stream = form.stream(machine, true)?;
            let mark = submit(machine, stream, &name, move |access| {
                access.touched.read(from.address, from.bytes);
                Ok(access.write(to, &from.read())?)
            })?;
            let is_waiting = form == Form::Synchronous;
            Ok(Wait {
                context: machine.streams.context(stream),
                marks: mark.filter(|_| is_waiting).into_iter().collect(),
            })
        });
    }
    if form == Form::Synchronous {
        settle(|machine| {
            let stream = form.stream(machine, false)?;
            machine.end_of(stream)
        })?;
    }
    with_context(|machine, _| {
        let stream = form.stream(machine, false)?;
        let staged = from.read();
        let copy = submit(machine, stream, &name, move |access| {
            Ok(access.write(to, &staged)?)
        });
        copy.map(|_| ())
    })
}

/// The host waits for a copy to pageable memory, and for every synchronous one.
fn to_host(form: Form, to: HostRange, from: u64) -> Result<(), Status> {
    settle(|machine| {
        let context = current().ok_or(Status::InvalidContext)?;
        machine.check(context)?;
        machine.check_range(from, to.bytes)?;
        let is_pinned = machine.is_pinned(to.address, to.bytes);
        let stream = form.stream(machine, is_pinned)?;
        let name = format!("copy of {} bytes to the host", to.bytes);
        let mark = submit(machine, stream, &name, move |access| {
            let mut bytes = vec![0; to.bytes as usize];
            access.read(from, &mut bytes)?;
            access.touched.write(to.address, to.bytes);
            to.write(&bytes);
            Ok(())
        })?;
        let is_waiting = form == Form::Synchronous || !is_pinned;
        Ok(Wait {
            context: machine.streams.context(stream),
            marks: mark.filter(|_| is_waiting).into_iter().collect(),
        })
    })
}

/// Asynchronous in both forms, as in the real driver.
fn on_device(to: u64, from: u64, bytes: usize, stream: Handle) -> Result<(), Status> {
    let bytes = bytes as u64;
    with_context(|machine, _| {
        let stream = stream_of(machine, stream)?;
        machine.check_range(to, bytes)?;
        machine.check_range(from, bytes)?;
        let name = format!("copy of {bytes} bytes on the device");
        submit(machine, stream, &name, move |access| {
            Ok(access.copy(to, from, bytes)?)
        })
        .map(|_| ())
    })
}

/// Asynchronous in both forms, as in the real driver.
fn set<const N: usize>(
    to: u64,
    pattern: [u8; N],
    count: usize,
    stream: Handle,
) -> Result<(), Status> {
    with_context(|machine, _| {
        let stream = stream_of(machine, stream)?;
        if !to.is_multiple_of(N as u64) {
            return Err(Status::InvalidValue);
        }
        let bytes = (count as u64).saturating_mul(N as u64);
        machine.check_range(to, bytes)?;
        let name = format!("set of {bytes} bytes");
        submit(machine, stream, &name, move |access| {
            Ok(access.fill(to, &pattern, count as u64)?)
        })
        .map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> c_int {
    code(|| to_device(Form::Synchronous, to, HostRange::new(from, bytes)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: Handle,
) -> c_int {
    code(|| to_device(Form::Asynchronous(stream), to, HostRange::new(from, bytes)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> c_int {
    code(|| to_host(Form::Synchronous, HostRange::new(to, bytes)?, from))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: Handle,
) -> c_int {
    code(|| to_host(Form::Asynchronous(stream), HostRange::new(to, bytes)?, from))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> c_int {
    code(|| on_device(to, from, bytes, Handle::NULL))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> c_int {
    code(|| on_device(to, from, bytes, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: u64, value: u8, count: usize) -> c_int {
    code(|| set(to, [value], count, Handle::NULL))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) -> c_int {
    code(|| set(to, [value], count, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) -> c_int {
    code(|| set(to, value.to_le_bytes(), count, Handle::NULL))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: Handle) -> c_int {
    code(|| set(to, value.to_le_bytes(), count, stream))
}

// Streams and events

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) -> c_int {
    code(|| {
        with_context(|machine, context| {
            let kind = match flags {
                0 => LaneKind::Blocking,
                1 => LaneKind::NonBlocking,
                _ => return Err(Status::InvalidValue),
            };
            let number = machine.create_stream(context, kind)?;
            stream.put(Handle::new(Is::Stream, number))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(
    stream: Out<Handle>,
    flags: c_uint,
    _priority: c_int,
) -> c_int {
    cuStreamCreate(stream, flags)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> c_int {
    code(|| with(|machine| machine.destroy_stream(stream_of(machine, stream)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> c_int {
    code(|| {
        settle(|machine| {
            let stream = stream_of(machine, stream)?;
            machine.check(machine.streams.context(stream))?;
            machine.end_of(stream)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: Handle) -> c_int {
    code(|| {
        with(|machine| {
            let stream = stream_of(machine, stream)?;
            let end = machine.end_of(stream)?;
            machine.poll(&end)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> c_int {
    code(|| {
        with(|machine| {
            let stream = stream_of(machine, stream)?;
            machine.wait_for_event(stream, event.id(Is::Event)?)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<Handle>, flags: c_uint) -> c_int {
    code(|| {
        with_context(|machine, context| {
            // CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_EVENT_INTERPROCESS
            if flags & !7 != 0 || flags & 6 == 4 {
                return Err(Status::InvalidValue);
            }
            let number = machine.create_event(context, flags & 2 == 0)?;
            event.put(Handle::new(Is::Event, number as usize))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> c_int {
    code(|| with(|machine| machine.destroy_event(event.id(Is::Event)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> c_int {
    code(|| {
        with(|machine| {
            let stream = stream_of(machine, stream)?;
            machine.record(event.id(Is::Event)?, stream)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: Handle) -> c_int {
    code(|| settle(|machine| machine.record_of(event.id(Is::Event)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Handle) -> c_int {
    code(|| {
        with(|machine| {
            machine.refuse_in_capture()?;
            let record = machine.record_of(event.id(Is::Event)?)?;
            machine.poll(&record)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(time: Out<f32>, start: Handle, end: Handle) -> c_int {
    code(|| with(|machine| time.put(machine.elapsed(start.id(Is::Event)?, end.id(Is::Event)?)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(time: Out<f32>, start: Handle, end: Handle) -> c_int {
    cuEventElapsedTime_v2(time, start, end)
}

// Modules and launches

/// Loads PTX. Machine code (ELF or a fat binary) is for no emulated GPU.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(module: Out<Handle>, image: In<c_char>) -> c_int {
    code(|| {
        with_context(|machine, context| {
            machine.refuse_in_capture()?;
            for magic in [*b"\x7fELF", *b"\x50\xed\x55\xba"] {
                // Stops at the first difference, so a short text is not overrun.
                let mut bytes = magic.iter().enumerate();
                if bytes.all(|(index, &byte)| image.at(index) == Ok(byte as c_char)) {
                    return Err(Status::NoBinaryForGpu);
                }
            }
            let text = image.text().map_err(|_| Status::InvalidImage)?;
            let number = machine.load(context, text)?;
            module.put(Handle::new(Is::Module, number as usize))
        })
    })
}

/// The options are ignored: they tune a compiler.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(
    module: Out<Handle>,
    image: In<c_char>,
    _count: c_uint,
    _options: *const c_int,
    _values: *const *const c_void,
) -> c_int {
    cuModuleLoadData(module, image)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: Handle) -> c_int {
    code(|| {
        settle_context()?;
        with_context(|machine, _| machine.unload(module.id(Is::Module)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(
    function: Out<Handle>,
    module: Handle,
    name: In<c_char>,
) -> c_int {
    code(|| {
        with_context(|machine, _| {
            let number = machine.function(module.id(Is::Module)?, name.text()?)?;
            function.put(Handle::new(Is::Function, number as usize))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetGlobal_v2(
    pointer: Out<u64>,
    bytes: Out<usize>,
    module: Handle,
    name: In<c_char>,
) -> c_int {
    code(|| {
        with_context(|machine, _| {
            let (address, length) = machine.global(module.id(Is::Module)?, name.text()?)?;
            pointer.put_if_wanted(address);
            bytes.put_if_wanted(length as usize);
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    function: Handle,
) -> c_int {
    code(|| {
        with_context(|machine, context| {
            let (kernel, dynamic, _) = machine.kernel(function.id(Is::Function)?)?;
            let model = machine.config.model(machine.config.visible[context]);
            let (major, minor) = model.capability;
            // The numbers are those of `CUfunction_attribute`.
            value.put(match attribute {
                0 => {
                    let registers = REGISTERS / kernel.registers.max(1);
                    kernel.max_threads.min(registers).min(THREADS_MOST) as c_int
                }
                1 => kernel.static_shared as c_int,
                2 => 0, // constant memory
                3 => kernel.local as c_int,
                4 => kernel.registers as c_int,
                5 | 6 => major * 10 + minor,
                8 => dynamic as c_int,
                9 => -1, // preferred shared memory: the default
                _ => return Err(Status::InvalidValue),
            })
        })
    })
}

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` (8); the preferred carve-out (9) changes nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> c_int {
    code(|| {
        with_context(|machine, _| match attribute {
            8 => machine.allow_shared(function.id(Is::Function)?, value),
            9 => machine.kernel(function.id(Is::Function)?).map(|_| ()),
            _ => Err(Status::InvalidValue),
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    function: Handle,
    threads: c_int,
    dynamic_shared: usize,
) -> c_int {
    code(|| {
        with_context(|machine, _| {
            let (kernel, limit, _) = machine.kernel(function.id(Is::Function)?)?;
            let threads = u32::try_from(threads).map_err(|_| Status::InvalidValue)?;
            if threads == 0 {
                return Err(Status::InvalidValue);
            }
            if threads > THREADS_MOST.min(kernel.max_threads) || dynamic_shared > limit as usize {
                return blocks.put(0);
            }
            let shared = kernel.static_shared + dynamic_shared as u32 + SHARED_RESERVED;
            let by_threads = THREADS_OF_MULTIPROCESSOR as u32 / threads.next_multiple_of(32);
            let by_registers = REGISTERS / (kernel.registers.max(1) * threads);
            let by_shared = (SHARED_MOST + SHARED_RESERVED) / shared;
            let least = by_threads.min(by_registers).min(by_shared) as c_int;
            blocks.put(least.min(BLOCKS_OF_MULTIPROCESSOR))
        })
    })
}

/// `extra` is not supported; parameters are passed as an array of pointers.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    dynamic_shared: c_uint,
    stream: Handle,
    parameters: In<*const c_void>,
    extra: In<*const c_void>,
) -> c_int {
    code(|| {
        with_context(|machine, _| {
            let function = function.id(Is::Function)?;
            let stream = stream_of(machine, stream)?;
            let (kernel, _, _) = machine.kernel(function)?;
            if !extra.is_null() {
                return Err(Status::NotSupported);
            }
            let mut packed = vec![0; kernel.parameter_bytes()];
            for (index, parameter) in kernel.parameters.iter().enumerate() {
                let (offset, bytes) = (parameter.offset as usize, parameter.bytes as usize);
                let value = HostRange::new(parameters.at(index)?, bytes)?.read();
                packed[offset..offset + bytes].copy_from_slice(&value);
            }
            let [grid, block] = [(grid_x, grid_y, grid_z), (block_x, block_y, block_z)]
                .map(|(x, y, z)| Dim { x, y, z });
            machine.launch(function, [grid, block], dynamic_shared, stream, packed)
        })
    })
}

// Capture and graphs

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) -> c_int {
    code(|| {
        with(|machine| {
            let mode = match mode {
                0 => CaptureMode::Global,
                1 => CaptureMode::ThreadLocal,
                2 => CaptureMode::Relaxed,
                _ => return Err(Status::InvalidValue),
            };
            let stream = stream_of(machine, stream)?;
            machine.begin_capture(stream, mode)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) -> c_int {
    code(|| {
        with(|machine| {
            let stream = stream_of(machine, stream)?;
            match machine.end_capture(stream) {
                Ok(number) => graph.put(Handle::new(Is::Graph, number as usize)),
                Err(status) => {
                    graph.put_if_wanted(Handle::NULL);
                    Err(status)
                }
            }
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: Handle, status: Out<c_int>) -> c_int {
    code(|| with(|machine| status.put(machine.capture_status(stream_of(machine, stream)?))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(
    executable: Out<Handle>,
    graph: Handle,
    _flags: c_ulonglong,
) -> c_int {
    code(|| {
        with_context(|machine, context| {
            let number = machine.instantiate(context, graph.id(Is::Graph)?)?;
            executable.put(Handle::new(Is::Executable, number as usize))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: Handle, stream: Handle) -> c_int {
    code(|| {
        with(|machine| {
            let stream = stream_of(machine, stream)?;
            machine.launch_graph(executable.id(Is::Executable)?, stream)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: Handle) -> c_int {
    code(|| with(|machine| machine.destroy_graph(graph.id(Is::Graph)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: Handle) -> c_int {
    code(|| with(|machine| machine.destroy_executable(executable.id(Is::Executable)?)))
}

// The report

/// Writes the counters so far to the report.
#[unsafe(no_mangle)]
pub extern "C" fn emulatedGpuReport() -> c_int {
    code(|| {
        with(|machine| {
            machine.summarize();
            Ok(())
        })
    })
}

/// Runs at the process's exit, after `main`.
extern "C" fn report_at_exit() {
    // Another thread may hold the lock for a while, or it may never run again.
    for _ in 0..EXIT_TRIES {
        if let Ok(mut machine) = MACHINE.try_lock() {
            if let Some(machine) = &mut *machine {
                machine.report_communicators(None);
                machine.summarize();
            }
            return;
        }
        std::thread::sleep(POLL);
    }
}

// SAFETY: the section holds functions without parameters, which the loader calls at exit.
#[used]
#[unsafe(link_section = ".fini_array")]
static REPORT_AT_EXIT: extern "C" fn() = report_at_exit;

// The table

/// A function of the interface.
struct Entry {
    name: &'static str,
    address: *const c_void,
}

// SAFETY: the addresses are those of functions, which never change.
unsafe impl Sync for Entry {}

macro_rules! table {
    ($($function:ident)*) => {
        &[$(Entry {
            name: stringify!($function),
            address: $function as *const c_void,
        },)*]
    };
}

/// What `cuGetProcAddress` finds.
static FUNCTIONS: &[Entry] = table![
    cuInit
    cuDriverGetVersion
    cuGetErrorName
    cuGetErrorString
    cuGetProcAddress_v2
    cuGetExportTable
    cuDeviceGetCount
    cuDeviceGet
    cuDeviceGetName
    cuDeviceGetUuid_v2
    cuDeviceTotalMem_v2
    cuDeviceGetPCIBusId
    cuDeviceCanAccessPeer
    cuDeviceGetAttribute
    cuDevicePrimaryCtxRetain
    cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxSetFlags_v2
    cuDevicePrimaryCtxGetState
    cuCtxSetCurrent
    cuCtxGetCurrent
    cuCtxPushCurrent_v2
    cuCtxPopCurrent_v2
    cuCtxGetDevice
    cuCtxSynchronize
    cuCtxGetStreamPriorityRange
    cuMemAlloc_v2
    cuMemFree_v2
    cuMemAllocAsync
    cuMemFreeAsync
    cuMemGetInfo_v2
    cuMemHostAlloc
    cuMemFreeHost
    cuPointerGetAttribute
    cuMemcpyHtoD_v2
    cuMemcpyHtoDAsync_v2
    cuMemcpyDtoH_v2
    cuMemcpyDtoHAsync_v2
    cuMemcpyDtoD_v2
    cuMemcpyDtoDAsync_v2
    cuMemsetD8_v2
    cuMemsetD8Async
    cuMemsetD32_v2
    cuMemsetD32Async
    cuStreamCreate
    cuStreamCreateWithPriority
    cuStreamDestroy_v2
    cuStreamSynchronize
    cuStreamQuery
    cuStreamWaitEvent
    cuEventCreate
    cuEventDestroy_v2
    cuEventRecord
    cuEventSynchronize
    cuEventQuery
    cuEventElapsedTime_v2
    cuEventElapsedTime
    cuModuleLoadData
    cuModuleLoadDataEx
    cuModuleUnload
    cuModuleGetFunction
    cuModuleGetGlobal_v2
    cuFuncGetAttribute
    cuFuncSetAttribute
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuLaunchKernel
    cuStreamBeginCapture_v2
    cuStreamEndCapture
    cuStreamIsCapturing
    cuGraphInstantiateWithFlags
    cuGraphLaunch
    cuGraphDestroy
    cuGraphExecDestroy
    emulatedGpuReport
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A function that is exported but not in the table would be missing for programs that ask by name.
    #[test]
    fn the_table_has_every_exported_function() {
        let source = include_str!("driver.rs");
        let exported = source.lines().filter_map(|line| {
            let name = line.strip_prefix("pub extern \"C\" fn ")?;
            name.split('(').next()
        });
        let listed: Vec<&str> = FUNCTIONS.iter().map(|entry| entry.name).collect();
        assert_eq!(exported.collect::<Vec<_>>(), listed);
    }

    #[test]
    fn handles_of_another_kind_are_refused() {
        let stream = Handle::new(Is::Stream, 7);
        assert_eq!(stream.number(Is::Stream), Ok(7));
        assert_eq!(stream.number(Is::Event), Err(Status::InvalidHandle));
        assert_eq!(Handle::NULL.number(Is::Context), Err(Status::InvalidHandle));
    }
}
