//! Collectives of one rank's device with those of other ranks, by NCCL.
//!
//! Communicators are non-blocking, so that no call of NCCL waits for another rank: what waits is here, with a
//! limit. A rank whose peer is lost aborts its communicator, which ends pending operations on the device with
//! undefined results, and forms a new one.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::driver::{Device, Driver, Handle, Stream};
use super::error::{CudaError, NcclCode};
use super::libraries::NCCL;
use super::table::functions;
use crate::util::lock::lock;

/// `ncclResult_t`
type Code = c_int;

const SUCCESS: Code = 0;
/// A call of the driver failed.
const UNHANDLED_CUDA: Code = 1;
const IN_PROGRESS: Code = 7;

/// Bytes of a unique id (`NCCL_UNIQUE_ID_BYTES`).
const ID_BYTES: usize = 128;
/// `NCCL_API_MAGIC`
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`
const UNDEFINED: c_int = c_int::MIN;
/// How long a dropped communicator waits for its operations before it is aborted.
const DROP: Duration = Duration::from_secs(5);
/// The longest pause between two polls.
const PAUSE: Duration = Duration::from_millis(1);

/// `ncclConfig_t` of NCCL 2.14, which newer versions accept by its version.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Padding in 2.14; a setting in newer versions.
    cluster_size: c_int,
}

const NON_BLOCKING: Config = Config {
    size: size_of::<Config>(),
    magic: CONFIG_MAGIC,
    version: 21_400,
    blocking: 0,
    cluster_size: UNDEFINED,
};

functions! {
    Functions:
    ncclGetVersion(*mut c_int) -> Code;
    ncclGetErrorString(Code) -> *const c_char;
    ncclGetLastError(Handle) -> *const c_char;
    ncclGetUniqueId(*mut UniqueId) -> Code;
    ncclCommInitRankConfig(*mut Handle, c_int, UniqueId, c_int, *const Config) -> Code;
    ncclCommGetAsyncError(Handle, *mut Code) -> Code;
    ncclCommFinalize(Handle) -> Code;
    ncclCommDestroy(Handle) -> Code;
    ncclCommAbort(Handle) -> Code;
    ncclAllReduce(u64, u64, usize, c_int, c_int, Handle, Handle) -> Code;
    ncclReduceScatter(u64, u64, usize, c_int, c_int, Handle, Handle) -> Code;
    ncclAllGather(u64, u64, usize, c_int, Handle, Handle) -> Code;
    ncclBroadcast(u64, u64, usize, c_int, c_int, Handle, Handle) -> Code;
    ncclGroupStart() -> Code;
    ncclGroupEnd() -> Code;
}

/// The type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    U64,
    F32,
    F64,
    Bf16,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Element::Bf16 => 2,
            Element::F32 => 4,
            Element::U64 | Element::F64 => 8,
        }
    }

    /// `ncclDataType_t`
    fn number(self) -> c_int {
        match self {
            Element::U64 => 5,
            Element::F32 => 7,
            Element::F64 => 8,
            Element::Bf16 => 9,
        }
    }
}

/// How elements of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    Sum,
    Max,
    Min,
    Average,
}

impl Reduction {
    /// `ncclRedOp_t`
    fn number(self) -> c_int {
        match self {
            Reduction::Sum => 0,
            Reduction::Max => 2,
            Reduction::Min => 3,
            Reduction::Average => 4,
        }
    }
}

/// Names a communicator, for one use: rank 0 makes the id and gives it to the other ranks. As text and in JSON
/// it is 256 hexadecimal digits.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct UniqueId([u8; ID_BYTES]);

impl UniqueId {
    pub fn as_bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }

    pub fn from_bytes(bytes: [u8; ID_BYTES]) -> UniqueId {
        UniqueId(bytes)
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({self})")
    }
}

impl From<UniqueId> for String {
    fn from(id: UniqueId) -> String {
        id.to_string()
    }
}

/// A text that is no unique id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a unique id of NCCL has {} hexadecimal digits; got {characters} characters", 2 * ID_BYTES)]
pub struct InvalidId {
    characters: usize,
}

impl FromStr for UniqueId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<UniqueId, InvalidId> {
        let invalid = || InvalidId {
            characters: text.chars().count(),
        };
        let is_hexadecimal = text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if text.len() != 2 * ID_BYTES || !is_hexadecimal {
            return Err(invalid());
        }
        let mut bytes = [0; ID_BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            let digits = text.get(2 * index..2 * index + 2).ok_or_else(invalid)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| invalid())?;
        }
        Ok(UniqueId(bytes))
    }
}

impl TryFrom<String> for UniqueId {
    type Error = InvalidId;

    fn try_from(text: String) -> Result<UniqueId, InvalidId> {
        text.parse()
    }
}

/// The loaded library.
pub struct Nccl {
    functions: Functions,
    version: (u32, u32),
}

impl Nccl {
    /// Loads NCCL, which is never closed again.
    ///
    /// # Errors
    /// The library is missing, broken or older than 2.14.
    pub fn load(driver: &Driver) -> Result<Arc<Nccl>, CudaError> {
        let functions = Functions::open(&NCCL, Some(driver.major()))?;
        let mut version = 0;
        // SAFETY: the function writes its result.
        let code = unsafe { (functions.ncclGetVersion)(&mut version) };
        let version = u32::try_from(version).unwrap_or(0);
        let nccl = Nccl {
            functions,
            version: (version / 10_000, version % 10_000 / 100),
        };
        match code {
            SUCCESS => Ok(Arc::new(nccl)),
            code => Err(nccl.failed(LOCAL, "ncclGetVersion", code, None)),
        }
    }

    /// Major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// A new id. This process must live until all ranks have formed the communicator.
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the function writes its result.
        match unsafe { (self.functions.ncclGetUniqueId)(&mut id) } {
            SUCCESS => Ok(id),
            code => Err(self.failed(LOCAL, "ncclGetUniqueId", code, None)),
        }
    }

    /// The error of a call, with NCCL's last message.
    fn failed(
        &self,
        who: &str,
        function: &'static str,
        code: Code,
        communicator: Option<Handle>,
    ) -> CudaError {
        let text = |text: *const c_char| {
            // SAFETY: NCCL returns null or a text that is valid until its next message.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map_or(String::new(), |text| text.to_string_lossy().into_owned())
        };
        // SAFETY: the functions accept every code, and null or a live communicator.
        let (description, last) = unsafe {
            let handle = communicator.unwrap_or(Handle::NULL);
            let last = text((self.functions.ncclGetLastError)(handle));
            (text((self.functions.ncclGetErrorString)(code)), last)
        };
        // So that the caller descends to a smaller batch.
        if code == UNHANDLED_CUDA && last.contains("out of memory") {
            return CudaError::OutOfMemory {
                what: format!("NCCL ({function})"),
                bytes: 0,
            };
        }
        let words = match last.trim() {
            "" => description,
            last => format!("{description}: {last}"),
        };
        CudaError::Nccl {
            who: who.to_owned(),
            function,
            code: NcclCode::new(code),
            words,
        }
    }
}

/// The subject of errors without a rank.
const LOCAL: &str = "this process";

/// One rank's part of a group of ranks.
///
/// All ranks must call the same operations in the same order. Calls from several threads run one after the
/// other; [`Communicator::abort`] may interrupt a wait of another thread.
pub struct Communicator {
    nccl: Arc<Nccl>,
    device: Arc<Device>,
    rank: usize,
    world: usize,
    /// The limit of a wait for other ranks, unless the call gives one.
    timeout: Duration,
    /// `None` once aborted. No call of NCCL holds the lock for long.
    handle: Mutex<Option<Handle>>,
}

impl Communicator {
    /// Joins the other ranks of the id, and waits for them at most for `timeout`. The limit also holds for
    /// the start of every operation, in which NCCL connects to its peers.
    ///
    /// # Errors
    /// A rank does not come, two ranks use one device, or NCCL fails.
    pub fn new(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        id: &UniqueId,
        place: (usize, usize),
        timeout: Duration,
    ) -> Result<Communicator, CudaError> {
        Communicator::form(nccl, device, id, place, [timeout; 2], &|| true)
    }

    /// As [`Communicator::new`], with two limits: for all ranks to join, and for the start of an operation. It
    /// fails as soon as the ranks are not `wanted` any more.
    pub fn form(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        id: &UniqueId,
        (rank, world): (usize, usize),
        [forming, timeout]: [Duration; 2],
        wanted: &dyn Fn() -> bool,
    ) -> Result<Communicator, CudaError> {
        device.make_current()?;
        let number = |value: usize| c_int::try_from(value).unwrap_or(-1);
        let mut handle = Handle::NULL;
        // SAFETY: the function writes the handle, which is aborted or destroyed once; it copies the
        // configuration, which has the layout that its version says.
        let code = unsafe {
            (nccl.functions.ncclCommInitRankConfig)(
                &mut handle,
                number(world),
                *id,
                number(rank),
                &NON_BLOCKING,
            )
        };
        let communicator = Communicator {
            nccl: nccl.clone(),
            device: device.clone(),
            rank,
            world,
            timeout,
            handle: Mutex::new(Some(handle).filter(|&handle| handle != Handle::NULL)),
        };
        let function = "ncclCommInitRankConfig";
        let formed = match code {
            SUCCESS | IN_PROGRESS => {
                communicator.wait("the other ranks did not join", forming, || match wanted() {
                    true => communicator.state(function),
                    false => Err(communicator.aborted()),
                })
            }
            code => Err(nccl.failed(&communicator.who(), function, code, None)),
        };
        match formed {
            Ok(()) => Ok(communicator),
            Err(error) => {
                communicator.abort();
                Err(error)
            }
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the communicator.
    pub fn world(&self) -> usize {
        self.world
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn who(&self) -> String {
        format!("rank {} of {}", self.rank, self.world)
    }

    fn aborted(&self) -> CudaError {
        CudaError::NcclAborted { who: self.who() }
    }

    /// Fails if the communicator is aborted, or with the error of an operation. Costs no wait: poll it while the
    /// device works.
    pub fn check(&self) -> Result<(), CudaError> {
        self.state("ncclCommGetAsyncError").map(|_| ())
    }

    /// Whether the last call is complete on the host. Errors name the function that is waited for.
    fn state(&self, function: &'static str) -> Result<bool, CudaError> {
        let handle = lock(&self.handle);
        let handle = handle.as_ref().ok_or_else(|| self.aborted())?;
        let mut state = SUCCESS;
        // SAFETY: the communicator is live while the lock is held, and the function writes its result.
        let code = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(*handle, &mut state) };
        match (code, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, code) | (code, _) => {
                Err(self.nccl.failed(&self.who(), function, code, Some(*handle)))
            }
        }
    }

    /// Waits until the last call is complete on the host; aborts at the limit.
    fn settle(
        &self,
        function: &'static str,
        what: &'static str,
        timeout: Duration,
    ) -> Result<(), CudaError> {
        self.wait(what, timeout, || self.state(function))
    }

    /// Polls until it is over; aborts at the limit.
    fn wait(
        &self,
        what: &'static str,
        timeout: Duration,
        mut is_over: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), CudaError> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(2);
        while !is_over()? {
            if begun.elapsed() > timeout {
                self.abort();
                return Err(CudaError::NcclTimeout {
                    who: self.who(),
                    what,
                    seconds: timeout.as_secs_f64(),
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
        Ok(())
    }

    /// Waits on the host until a stream has run everything. If an operation fails or the limit passes, the
    /// communicator is aborted, so that the stream can be used again; results on the device are undefined then.
    pub fn synchronize(&self, stream: &Stream, timeout: Duration) -> Result<(), CudaError> {
        let waited = self.wait("the work of a stream did not end", timeout, || {
            let done = stream.is_done()?;
            // An abort of another thread ends the stream's work, too; its results are undefined.
            self.check().map(|()| done)
        });
        if waited.is_err() {
            self.abort();
        }
        waited
    }

    /// Ends pending operations; every later call fails. Any thread may call it, at any time and repeatedly.
    pub fn abort(&self) {
        let Some(handle) = lock(&self.handle).take() else {
            return;
        };
        if self.device.make_current().is_ok() {
            // SAFETY: the handle was live and is not used again. A failure leaves nothing to do.
            unsafe { (self.nccl.functions.ncclCommAbort)(handle) };
        }
    }

    /// Calls several operations as one, which is faster for many small ones. The group is called while the
    /// communicator is locked: use only the group in it.
    pub fn group(
        &self,
        calls: impl FnOnce(&Group<'_>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.device.make_current()?;
        let handle = lock(&self.handle);
        let open = handle.as_ref().ok_or_else(|| self.aborted())?;
        let functions = &self.nccl.functions;
        let group = Group {
            communicator: self,
            handle: *open,
        };
        // SAFETY: the group ends below on every way.
        group.check("ncclGroupStart", unsafe { (functions.ncclGroupStart)() })?;
        let end = End(functions);
        let called = calls(&group);
        std::mem::forget(end);
        // SAFETY: the group was started on this thread.
        let ended = group.check("ncclGroupEnd", unsafe { (functions.ncclGroupEnd)() });
        drop(handle);
        // Until it settles, the operations may be missing in their streams.
        let what = "a collective did not start";
        let started = called.and(ended);
        let started = started.and_then(|()| self.settle("ncclGroupEnd", what, self.timeout));
        if started.is_err() {
            // Streams may wait for the group's operations, or for earlier ones that have failed.
            self.abort();
        }
        started
    }

    /// `all[i] = reduction over ranks of all[i]`
    ///
    /// # Safety
    /// The buffer has `count` elements, and is live and otherwise unused until the stream has run the operation.
    pub unsafe fn all_reduce_in_place(
        &self,
        stream: &Stream,
        buffer: u64,
        count: usize,
        element: Element,
        reduction: Reduction,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the buffer.
        self.group(|group| unsafe {
            group.all_reduce_in_place(stream, buffer, count, element, reduction)
        })
    }

    /// `own[i] = reduction over ranks of all[rank · count + i]`; in place if `own` is that part of `all`.
    ///
    /// # Safety
    /// `own` has `count` elements and `all` has `world · count`; both are live and otherwise unused until the
    /// stream has run the operation.
    pub unsafe fn reduce_scatter(
        &self,
        stream: &Stream,
        all: u64,
        own: u64,
        count: usize,
        element: Element,
        reduction: Reduction,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the buffers.
        self.group(|group| unsafe {
            group.reduce_scatter(stream, all, own, count, element, reduction)
        })
    }

    /// `all[r · count + i] = own[i]` of rank r; in place if `own` is this rank's part of `all`.
    ///
    /// # Safety
    /// `own` has `count` elements and `all` has `world · count`; both are live and otherwise unused until the
    /// stream has run the operation.
    pub unsafe fn all_gather(
        &self,
        stream: &Stream,
        own: u64,
        all: u64,
        count: usize,
        element: Element,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the buffers.
        self.group(|group| unsafe { group.all_gather(stream, own, all, count, element) })
    }

    /// `buffer[i] = buffer[i]` of the root.
    ///
    /// # Safety
    /// The buffer has `count` elements, and is live and otherwise unused until the stream has run the operation.
    pub unsafe fn broadcast_in_place(
        &self,
        stream: &Stream,
        buffer: u64,
        count: usize,
        element: Element,
        root: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller guarantees the buffer.
        self.group(|group| unsafe {
            group.broadcast_in_place(stream, buffer, count, element, root)
        })
    }

    /// Waits until all operations are done, and leaves. The communicator is aborted if that takes too long.
    fn finish(&self, timeout: Duration) -> Result<(), CudaError> {
        self.check()?;
        self.device.make_current()?;
        let open = (*lock(&self.handle)).ok_or_else(|| self.aborted())?;
        // SAFETY: only this thread can end the communicator now, as it is being dropped.
        let code = unsafe { (self.nccl.functions.ncclCommFinalize)(open) };
        if ![SUCCESS, IN_PROGRESS].contains(&code) {
            return Err(self
                .nccl
                .failed(&self.who(), "ncclCommFinalize", code, Some(open)));
        }
        self.settle("ncclCommFinalize", "the collectives did not end", timeout)?;
        if let Some(handle) = lock(&self.handle).take() {
            // SAFETY: the communicator is finalised and not used again.
            unsafe { (self.nccl.functions.ncclCommDestroy)(handle) };
        }
        Ok(())
    }
}

impl Drop for Communicator {
    /// Waits for pending operations for a few seconds at most.
    fn drop(&mut self) {
        if self.finish(self.timeout.min(DROP)).is_err() {
            self.abort();
        }
    }
}

/// Ends a group of this thread if its calls panic.
struct End<'a>(&'a Functions);

impl Drop for End<'_> {
    fn drop(&mut self) {
        // SAFETY: the group was started on this thread.
        unsafe { (self.0.ncclGroupEnd)() };
    }
}

/// Operations that become one when the group ends.
pub struct Group<'a> {
    communicator: &'a Communicator,
    handle: Handle,
}

impl Group<'_> {
    fn check(&self, function: &'static str, code: Code) -> Result<(), CudaError> {
        let Communicator { nccl, .. } = self.communicator;
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(nccl.failed(&self.communicator.who(), function, code, Some(self.handle))),
        }
    }

    /// See [`Communicator::all_reduce_in_place`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_reduce_in_place(
        &self,
        stream: &Stream,
        buffer: u64,
        count: usize,
        element: Element,
        reduction: Reduction,
    ) -> Result<(), CudaError> {
        let functions = &self.communicator.nccl.functions;
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffer.
        let code = unsafe {
            (functions.ncclAllReduce)(
                buffer,
                buffer,
                count,
                element.number(),
                reduction.number(),
                self.handle,
                stream.handle(),
            )
        };
        self.check("ncclAllReduce", code)
    }

    /// See [`Communicator::reduce_scatter`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn reduce_scatter(
        &self,
        stream: &Stream,
        all: u64,
        own: u64,
        count: usize,
        element: Element,
        reduction: Reduction,
    ) -> Result<(), CudaError> {
        let functions = &self.communicator.nccl.functions;
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffers.
        let code = unsafe {
            (functions.ncclReduceScatter)(
                all,
                own,
                count,
                element.number(),
                reduction.number(),
                self.handle,
                stream.handle(),
            )
        };
        self.check("ncclReduceScatter", code)
    }

    /// See [`Communicator::all_gather`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_gather(
        &self,
        stream: &Stream,
        own: u64,
        all: u64,
        count: usize,
        element: Element,
    ) -> Result<(), CudaError> {
        let functions = &self.communicator.nccl.functions;
        let number = element.number();
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffers.
        let code = unsafe {
            (functions.ncclAllGather)(own, all, count, number, self.handle, stream.handle())
        };
        self.check("ncclAllGather", code)
    }

    /// See [`Communicator::broadcast_in_place`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn broadcast_in_place(
        &self,
        stream: &Stream,
        buffer: u64,
        count: usize,
        element: Element,
        root: usize,
    ) -> Result<(), CudaError> {
        let functions = &self.communicator.nccl.functions;
        let root = c_int::try_from(root).unwrap_or(-1);
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffer.
        let code = unsafe {
            (functions.ncclBroadcast)(
                buffer,
                buffer,
                count,
                element.number(),
                root,
                self.handle,
                stream.handle(),
            )
        };
        self.check("ncclBroadcast", code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unique_id_is_the_same_after_json() {
        let id = UniqueId(std::array::from_fn(|index| index as u8 ^ 0xa5));
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(json.len(), 2 * ID_BYTES + 2);
        assert_eq!(serde_json::from_str::<UniqueId>(&json).unwrap(), id);
        assert_eq!(UniqueId::from_bytes(*id.as_bytes()), id);
    }

    #[test]
    fn a_text_that_is_no_unique_id_is_refused() {
        let error = "abc".parse::<UniqueId>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "a unique id of NCCL has 256 hexadecimal digits; got 3 characters"
        );
        for text in ["+1".repeat(128), "é".repeat(128), "0".repeat(258)] {
            assert!(text.parse::<UniqueId>().is_err());
        }
    }
}
