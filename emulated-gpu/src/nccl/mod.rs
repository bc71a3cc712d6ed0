//! The C interface of NCCL, `libnccl.so.2`: collectives between processes over sockets, in the order of streams.
//!
//! Names, types and codes are those of NCCL 2.28. A call locks the state of one communicator, and never while
//! it locks the machine; a task of a stream does both, the machine first.

#![allow(non_snake_case)]

mod communicator;
mod forming;
mod progress;
mod reduce;
mod wire;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};

use crate::abi::{HostRange, In, Out, guard};
use crate::config::{Config, NcclConfig};
use crate::driver::{self, Handle};
use crate::status::Status;
use crate::stream::Wait;
use communicator::{Collective, Communicator, Factor, Phase};
use forming::UniqueId;
use reduce::{Element, Reduction};
use wire::{Header, Kind};

/// Marks handles of this library.
const HANDLE: usize = 0x4e43 << 32;
/// `NCCL_API_MAGIC`
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`
const UNDEFINED: i32 = i32::MIN;
/// The number of the first operator of `ncclRedOpCreatePreMulSum`.
const FIRST_FACTOR: i32 = 5;

/// `ncclResult_t` without success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    UnhandledCuda = 1,
    System = 2,
    Internal = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    Remote = 6,
    InProgress = 7,
}

/// A result cannot be written, or an argument cannot be read.
impl From<Status> for Code {
    fn from(_: Status) -> Code {
        Code::InvalidArgument
    }
}

/// The start of `ncclConfig_t`, which has been the same since NCCL 2.14.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Configuration {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// A communicator by its number.
enum Entry {
    Live(Arc<Communicator>),
    /// The function that ended it.
    Ended(&'static str),
}

static COMMUNICATORS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
/// Operations, bytes and bytes of a ring, by kind.
static COUNTS: Mutex<BTreeMap<&'static str, [u64; 3]>> = Mutex::new(BTreeMap::new());
/// Texts that C holds pointers to.
static TEXTS: Mutex<BTreeSet<&'static std::ffi::CStr>> = Mutex::new(BTreeSet::new());
/// Initialisations of the process.
static INITIALISATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static GROUP: RefCell<Group> = RefCell::new(Group::default());
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls between `ncclGroupStart` and `ncclGroupEnd`.
#[derive(Default)]
struct Group {
    depth: usize,
    forming: Vec<Arc<Communicator>>,
    operations: Vec<(Arc<Communicator>, usize, Collective)>,
}

pub fn settings() -> &'static NcclConfig {
    static SETTINGS: OnceLock<NcclConfig> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let config = Config::from_environment();
        config
            .unwrap_or_else(|error| {
                eprintln!("emulated GPU: {error}");
                Config::default()
            })
            .nccl
    })
}

/// The communicators that are not destroyed.
pub fn communicators() -> Vec<Arc<Communicator>> {
    let entries = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner);
    let live = entries.iter().filter_map(|entry| match entry {
        Entry::Live(communicator) => Some(communicator.clone()),
        Entry::Ended(_) => None,
    });
    live.collect()
}

/// Device and name of the communicators that are not destroyed.
pub fn live(device: Option<usize>) -> Vec<(usize, String)> {
    let live = communicators().into_iter();
    let live = live.filter(|communicator| device.is_none_or(|of| of == communicator.device));
    live.map(|communicator| (communicator.device, communicator.name()))
        .collect()
}

/// Counts an operation that is done.
fn count(kind: Kind, (bytes, ring): (u64, u64)) {
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let sums = counts.entry(kind.name()).or_default();
    for (sum, value) in sums.iter_mut().zip([1, bytes, ring]) {
        *sum += value;
    }
}

/// The counters for the report.
pub fn counts() -> Value {
    let counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let kinds = counts.iter().map(|(kind, [operations, bytes, ring])| {
        let sums = json!({"operations": operations, "bytes": bytes, "ring_bytes": ring});
        ((*kind).to_owned(), sums)
    });
    Value::Object(kinds.collect())
}

fn code(call: impl FnOnce() -> Result<(), Code>) -> c_int {
    guard(Code::Internal as c_int, || {
        call().map_or_else(|code| code as c_int, |()| 0)
    })
}

/// Keeps the reason of an error for `ncclGetLastError`.
fn refuse(code: Code, message: &str) -> Code {
    LAST_ERROR.with_borrow_mut(|last| message.clone_into(last));
    code
}

/// Reports a call that a correct program does not make.
fn misuse(code: Code, message: &str) -> Code {
    // Without a driver there is no report.
    let _ = driver::with(|machine| {
        machine.misuse(message);
        Ok(())
    });
    refuse(code, message)
}

fn communicator(function: &str, handle: usize) -> Result<Arc<Communicator>, Code> {
    let entries = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner);
    let index = (handle ^ HANDLE).checked_sub(1);
    let ended = match index.and_then(|index| entries.get(index)) {
        Some(Entry::Live(communicator)) => return Ok(communicator.clone()),
        Some(Entry::Ended(by)) => *by,
        None => {
            return Err(refuse(
                Code::InvalidArgument,
                "the handle is no communicator",
            ));
        }
    };
    drop(entries);
    let message = format!("{function} uses a communicator that {ended} has ended");
    Err(misuse(Code::InvalidArgument, &message))
}

/// The communicator, if a new call on it is allowed.
fn ready(function: &str, handle: usize) -> Result<Arc<Communicator>, Code> {
    let communicator = communicator(function, handle)?;
    drop(communicator.issuing());
    let state = communicator.state();
    if let Some(error) = state.error {
        return Err(refuse(error, &state.message));
    }
    let is_busy = state.phase == Phase::Forming || !state.deferred.is_empty();
    let is_final = state.phase == Phase::Finalizing;
    let name = communicator.name();
    drop(state);
    let in_group = GROUP.with_borrow(|group| group.depth > 0);
    if is_busy && !(in_group && communicator.is_blocking) {
        let message = format!("{function} on {name} while an earlier call is in progress");
        return Err(misuse(Code::InvalidArgument, &message));
    }
    if is_final {
        let message = format!("{function} on {name} after ncclCommFinalize");
        return Err(misuse(Code::InvalidArgument, &message));
    }
    Ok(communicator)
}

/// Ends a communicator's handle.
fn remove(function: &'static str, handle: usize) -> Result<Arc<Communicator>, Code> {
    let ended = communicator(function, handle)?;
    let mut entries = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(entry) = entries.get_mut((handle ^ HANDLE) - 1) {
        *entry = Entry::Ended(function);
    }
    Ok(ended)
}

// Versions and errors

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: Out<c_int>) -> c_int {
    code(|| Ok(version.put(settings().version)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    match result {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
    .as_ptr()
}

/// The last problem of the communicator, or of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(handle: usize) -> *const c_char {
    let mut text = LAST_ERROR.with_borrow(String::clone);
    if handle != 0
        && let Ok(communicator) = communicator("ncclGetLastError", handle)
    {
        let message = communicator.state().message.clone();
        if !message.is_empty() {
            text = message;
        }
    }
    let text = CString::new(text).unwrap_or_default();
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = texts.get(text.as_c_str()) {
        return known.as_ptr();
    }
    let text: &'static std::ffi::CStr = Box::leak(text.into_boxed_c_str());
    texts.insert(text);
    text.as_ptr()
}

// Communicators

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: Out<UniqueId>) -> c_int {
    code(|| {
        let created = UniqueId::create();
        let created = created.map_err(|error| refuse(Code::System, &error.to_string()))?;
        Ok(id.put(created)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(
    handle: Out<usize>,
    world: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    code(|| initialise(handle, world, id, rank, true))
}

/// Of the configuration, only `blocking` has an effect.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    handle: Out<usize>,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    config: In<Configuration>,
) -> c_int {
    code(|| {
        let mut is_blocking = true;
        if !config.is_null() {
            let config = config.get()?;
            let is_complete = config.size >= size_of::<Configuration>();
            if config.magic != CONFIG_MAGIC || !is_complete {
                let message = "ncclConfig_t is not initialised with NCCL_CONFIG_INITIALIZER";
                return Err(refuse(Code::InvalidArgument, message));
            }
            is_blocking = match config.blocking {
                UNDEFINED | 1 => true,
                0 => false,
                _ => return Err(refuse(Code::InvalidArgument, "blocking is neither 0 nor 1")),
            };
        }
        initialise(handle, world, id, rank, is_blocking)
    })
}

fn initialise(
    handle: Out<usize>,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    is_blocking: bool,
) -> Result<(), Code> {
    let ranks = usize::try_from(rank).ok().zip(usize::try_from(world).ok());
    let Some((rank, world)) = ranks.filter(|(rank, world)| rank < world) else {
        let message = format!("Invalid rank requested : {rank}/{world}");
        return Err(refuse(Code::InvalidArgument, &message));
    };
    let (device, physical) =
        driver::with_context(|machine, device| Ok((device, machine.config.visible[device])))
            .map_err(|status| refuse(Code::UnhandledCuda, &status.to_string()))?;
    let key = id.parts().map_or(0, |(key, _)| key);
    let communicator = Communicator::new(key, (rank, world), device, is_blocking);
    let mut entries = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner);
    entries.push(Entry::Live(communicator.clone()));
    let number = HANDLE | entries.len();
    drop(entries);
    handle.put(number)?;
    progress::start();
    let fails = INITIALISATIONS.fetch_add(1, Ordering::Relaxed) + 1 == settings().fail_init;
    communicator.form(id, physical, fails);
    let in_group = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.forming.push(communicator.clone());
        }
        group.depth > 0
    });
    if in_group {
        return Ok(());
    }
    if !is_blocking {
        return Err(Code::InProgress);
    }
    wait_formed(&communicator)
}

/// Waits for a blocking communicator. One that fails stays to be aborted, as its handle is known.
fn wait_formed(communicator: &Communicator) -> Result<(), Code> {
    communicator.wait_formed();
    let state = communicator.state();
    state
        .error
        .map_or(Ok(()), |error| Err(refuse(error, &state.message)))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(handle: usize, count: Out<c_int>) -> c_int {
    code(|| Ok(count.put(communicator("ncclCommCount", handle)?.world as c_int)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(handle: usize, rank: Out<c_int>) -> c_int {
    code(|| Ok(rank.put(communicator("ncclCommUserRank", handle)?.rank as c_int)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(handle: usize, device: Out<c_int>) -> c_int {
    code(|| Ok(device.put(communicator("ncclCommCuDevice", handle)?.device as c_int)?))
}

/// The operations of a non-blocking call are in their streams when the second call says so, at the latest.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(handle: usize, error: Out<c_int>) -> c_int {
    code(|| {
        let communicator = communicator("ncclCommGetAsyncError", handle)?;
        drop(communicator.issuing());
        let mut state = communicator.state();
        let in_progress = if state.error.is_some() {
            false
        } else if !state.deferred.is_empty() && state.has_polled {
            drop(state);
            communicator.issue_deferred();
            state = communicator.state();
            false
        } else if !state.deferred.is_empty() {
            state.has_polled = true;
            true
        } else if let (Phase::Finalizing, Some(last)) = (state.phase, state.last.clone()) {
            drop(state);
            let done = driver::with(|machine| Ok(machine.streams.is_done(&last)));
            state = communicator.state();
            done == Ok(false)
        } else {
            state.phase == Phase::Forming
        };
        let in_progress = in_progress.then_some(Code::InProgress);
        let result = state.error.or(in_progress);
        drop(state);
        Ok(error.put(result.map_or(0, |code| code as c_int))?)
    })
}

/// Waits until the operations of a communicator are done.
fn settle(communicator: &Communicator) -> Result<(), Code> {
    let marks = communicator.state().last.clone().into_iter().collect();
    let context = communicator.device;
    let waited = driver::settle(|_| Ok(Wait { context, marks }));
    waited.map_err(|status| refuse(Code::UnhandledCuda, &status.to_string()))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(handle: usize) -> c_int {
    code(|| {
        let communicator = ready("ncclCommFinalize", handle)?;
        communicator.state().phase = Phase::Finalizing;
        if communicator.is_blocking {
            settle(&communicator)
        } else {
            Err(Code::InProgress)
        }
    })
}

/// Waits for the operations of the communicator, and hangs if they do.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(handle: usize) -> c_int {
    code(|| {
        let communicator = communicator("ncclCommDestroy", handle)?;
        if !communicator.is_blocking {
            communicator.wait_formed();
        }
        communicator.issue_deferred();
        let settled = settle(&communicator);
        remove("ncclCommDestroy", handle)?;
        communicator.leave();
        settled
    })
}

/// Ends pending operations: their results are poison, and their streams continue.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(handle: usize) -> c_int {
    code(|| {
        remove("ncclCommAbort", handle)?.abort();
        Ok(())
    })
}

// Collectives

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    send: u64,
    receive: u64,
    count: usize,
    element: c_int,
    operator: c_int,
    handle: usize,
    stream: Handle,
) -> c_int {
    let call = Call::new(Kind::AllReduce, send, receive, count, element);
    call.with_operator(operator).submit(handle, stream)
}

/// `count` is that of the received elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    send: u64,
    receive: u64,
    count: usize,
    element: c_int,
    operator: c_int,
    handle: usize,
    stream: Handle,
) -> c_int {
    let call = Call::new(Kind::ReduceScatter, send, receive, count, element);
    call.with_operator(operator).submit(handle, stream)
}

/// `count` is that of the sent elements.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    send: u64,
    receive: u64,
    count: usize,
    element: c_int,
    handle: usize,
    stream: Handle,
) -> c_int {
    Call::new(Kind::AllGather, send, receive, count, element).submit(handle, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    send: u64,
    receive: u64,
    count: usize,
    element: c_int,
    root: c_int,
    handle: usize,
    stream: Handle,
) -> c_int {
    let call = Call::new(Kind::Broadcast, send, receive, count, element);
    call.with_root(root).submit(handle, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    send: u64,
    receive: u64,
    count: usize,
    element: c_int,
    operator: c_int,
    root: c_int,
    handle: usize,
    stream: Handle,
) -> c_int {
    let call = Call::new(Kind::Reduce, send, receive, count, element);
    let call = call.with_operator(operator).with_root(root);
    call.submit(handle, stream)
}

/// The arguments of a collective.
struct Call {
    kind: Kind,
    /// Of the operand and the result.
    addresses: (u64, u64),
    count: usize,
    element: c_int,
    operator: c_int,
    root: c_int,
}

impl Call {
    fn new(kind: Kind, send: u64, receive: u64, count: usize, element: c_int) -> Call {
        Call {
            kind,
            addresses: (send, receive),
            count,
            element,
            operator: 0,
            root: 0,
        }
    }

    fn with_operator(self, operator: c_int) -> Call {
        Call { operator, ..self }
    }

    fn with_root(self, root: c_int) -> Call {
        Call { root, ..self }
    }

    fn submit(&self, handle: usize, stream: Handle) -> c_int {
        code(|| {
            let function = self.function();
            let communicator = ready(function, handle)?;
            let collective = self.collective(&communicator)?;
            if collective.overlaps(communicator.rank, communicator.world) {
                let message = format!("{function}: the buffers overlap and are not in place");
                return Err(misuse(Code::InvalidArgument, &message));
            }
            let stream = stream_of(&communicator, stream)?;
            // As in NCCL, an operation without elements does nothing.
            if self.count == 0 {
                return Ok(());
            }
            start_group();
            GROUP.with_borrow_mut(|group| {
                let operation = (communicator.clone(), stream, collective);
                group.operations.push(operation);
            });
            end_group()
        })
    }

    fn function(&self) -> &'static str {
        match self.kind {
            Kind::AllReduce => "ncclAllReduce",
            Kind::ReduceScatter => "ncclReduceScatter",
            Kind::AllGather => "ncclAllGather",
            Kind::Broadcast => "ncclBroadcast",
            Kind::Reduce => "ncclReduce",
        }
    }

    fn collective(&self, communicator: &Communicator) -> Result<Collective, Code> {
        let invalid = |what: &str, value: c_int| {
            let message = format!("{}: invalid {what} {value}", self.function());
            refuse(Code::InvalidArgument, &message)
        };
        let element = Element::new(self.element).ok_or_else(|| invalid("type", self.element))?;
        let root = usize::try_from(self.root).ok();
        let root = root.filter(|&root| root < communicator.world);
        let root = root.ok_or_else(|| invalid("root", self.root))?;
        let operator = usize::try_from(self.operator).ok();
        let operator = operator.ok_or_else(|| invalid("operator", self.operator))?;
        let (reduction, factor) = if self.operator < FIRST_FACTOR {
            (Reduction::ALL[operator], None)
        } else {
            let state = communicator.state();
            let factor = state.factors.get(operator - FIRST_FACTOR as usize);
            match factor.cloned().flatten() {
                Some((of, factor)) if of == element => (Reduction::PreMulSum, Some(factor)),
                _ => return Err(invalid("operator", self.operator)),
            }
        };
        let header = Header {
            kind: self.kind,
            element,
            reduction,
            root: root as u32,
            count: self.count as u64,
        };
        let (send, receive) = self.addresses;
        Ok(Collective {
            header,
            send,
            receive,
            factor,
        })
    }
}

/// The stream, which must be one of the communicator's device.
fn stream_of(communicator: &Communicator, stream: Handle) -> Result<usize, Code> {
    let device = communicator.device;
    let found = driver::with(|machine| {
        let stream = driver::stream_in(machine, stream, device)?;
        Ok(Some(stream).filter(|&stream| machine.streams.context(stream) == device))
    });
    match found {
        Ok(Some(stream)) => Ok(stream),
        Ok(None) => {
            let name = communicator.name();
            let message = format!("{name} is on device {device} and the stream is not");
            Err(misuse(Code::InvalidArgument, &message))
        }
        Err(status) => Err(refuse(Code::UnhandledCuda, &status.to_string())),
    }
}

fn start_group() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Ends a group; the outermost one waits for communicators and issues operations.
fn end_group() -> Result<(), Code> {
    let ended = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Err(refuse(
            Code::InvalidUsage,
            "ncclGroupEnd without ncclGroupStart",
        )),
        1 => Ok(std::mem::take(group)),
        _ => {
            group.depth -= 1;
            Ok(Group::default())
        }
    })?;
    let mut in_progress = false;
    for communicator in &ended.forming {
        if communicator.is_blocking {
            wait_formed(communicator)?;
        } else {
            in_progress = true;
        }
    }
    for (communicator, stream, collective) in ended.operations {
        if communicator.is_blocking {
            communicator.issue(stream, collective)?;
            continue;
        }
        let mut state = communicator.state();
        if state.deferred.is_empty() {
            (state.deferred_at, state.has_polled) = (Instant::now(), false);
        }
        state.deferred.push((stream, collective));
        in_progress = true;
    }
    if in_progress {
        Err(Code::InProgress)
    } else {
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    code(|| {
        start_group();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    code(end_group)
}

/// A sum of operands that each rank multiplies by its factor. Only floats are supported.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpCreatePreMulSum(
    operator: Out<c_int>,
    scalar: *const c_void,
    element: c_int,
    residence: c_int,
    handle: usize,
) -> c_int {
    code(|| {
        let communicator = communicator("ncclRedOpCreatePreMulSum", handle)?;
        let element = Element::new(element).filter(|element| element.is_float());
        let element = element.ok_or(Code::InvalidArgument)?;
        let factor = match residence {
            0 => Factor::Device(scalar as u64),
            1 => Factor::Value(HostRange::new(scalar, element.bytes())?.read()),
            _ => return Err(Code::InvalidArgument),
        };
        let mut state = communicator.state();
        state.factors.push(Some((element, factor)));
        let number = FIRST_FACTOR + state.factors.len() as c_int - 1;
        drop(state);
        Ok(operator.put(number)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(operator: c_int, handle: usize) -> c_int {
    code(|| {
        let communicator = communicator("ncclRedOpDestroy", handle)?;
        let index = usize::try_from(operator - FIRST_FACTOR).map_err(|_| Code::InvalidArgument)?;
        let mut state = communicator.state();
        let factor = state.factors.get_mut(index).and_then(Option::take);
        factor.map(|_| ()).ok_or(Code::InvalidArgument)
    })
}
