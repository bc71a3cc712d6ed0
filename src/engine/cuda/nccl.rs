//! Collectives of one rank's device with those of other ranks, by NCCL.
//!
//! Communicators are non-blocking, so that no call of NCCL waits for another rank: what waits is here, and an
//! abort ends it. A rank whose peer is lost aborts its communicator, which ends pending operations on the device
//! with undefined results, and forms a new one.

use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::driver::{Device, Driver, Handle, Stream};
use super::error::CudaError;
use super::libraries::NCCL;
use super::options::Precision;
use super::table::{functions, text};
use crate::util::lock::lock;

/// `ncclResult_t`
type Code = c_int;

const SUCCESS: Code = 0;
/// A call of the driver failed.
const UNHANDLED_CUDA: Code = 1;
const IN_PROGRESS: Code = 7;

/// `ncclSum`
const SUM: c_int = 0;
/// `ncclFloat32`
const FLOAT32: c_int = 7;
/// `ncclBfloat16`
const BFLOAT16: c_int = 9;

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
}

/// Names a communicator, for one use: rank 0 makes the id and gives it to the other ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; ID_BYTES]);

pub struct Nccl {
    functions: Functions,
}

impl Nccl {
    /// Loads NCCL, which is never closed again.
    ///
    /// # Errors
    /// The library is missing, broken or older than 2.14.
    pub fn load(driver: &Driver) -> Result<Arc<Nccl>, CudaError> {
        let (functions, _) = Functions::open(&NCCL, Some(driver.major()))?;
        Ok(Arc::new(Nccl { functions }))
    }

    /// A new id. This process must live until all ranks have formed the communicator.
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the function writes its result.
        match unsafe { (self.functions.ncclGetUniqueId)(&mut id) } {
            SUCCESS => Ok(id),
            code => Err(self.failed("this process", "ncclGetUniqueId", code, Handle::NULL)),
        }
    }

    /// The error of a call, with NCCL's last message. The communicator is live or null.
    fn failed(
        &self,
        who: &str,
        function: &'static str,
        code: Code,
        communicator: Handle,
    ) -> CudaError {
        // SAFETY: the functions accept every code, and null or a live communicator. A text is valid until the
        // next message.
        let (description, last) = unsafe {
            let last = text((self.functions.ncclGetLastError)(communicator)).unwrap_or_default();
            let description = text((self.functions.ncclGetErrorString)(code)).unwrap_or_default();
            (description, last)
        };
        // So that the caller descends to a smaller batch.
        if code == UNHANDLED_CUDA && last.contains("out of memory") {
            return CudaError::out_of_memory(format!("NCCL ({function})"));
        }
        let words = match last.trim() {
            "" => description,
            last => format!("{description}: {last}"),
        };
        let report = "report it with the output of NCCL_DEBUG=INFO";
        let (name, remedy) = match code {
            UNHANDLED_CUDA => (
                "ncclUnhandledCudaError",
                "look for errors of the GPU in the kernel's log (dmesg)",
            ),
            2 => (
                "ncclSystemError",
                "check that all ranks run, that NCCL_SOCKET_IFNAME names a network between them, and that \
                 /dev/shm has room",
            ),
            3 => ("ncclInternalError", report),
            4 => ("ncclInvalidArgument", report),
            5 => (
                "ncclInvalidUsage",
                "check that each rank has a GPU for itself (CUDA_VISIBLE_DEVICES) and that all ranks run the \
                 same program and configuration",
            ),
            6 => ("ncclRemoteError", "restart the world without the lost rank"),
            _ => ("", report),
        };
        CudaError::Nccl {
            who: who.to_owned(),
            function,
            failure: match name {
                "" => format!("error {code}: {words}"),
                name => format!("{name}: {words}"),
            },
            remedy,
        }
    }
}

/// One rank's part of a group of ranks.
///
/// All ranks must call the same operations in the same order. Calls from several threads run one after the
/// other; [`Communicator::abort`] may interrupt a wait of another thread.
pub struct Communicator {
    nccl: Arc<Nccl>,
    device: Arc<Device>,
    /// The rank in messages, for example `rank 0 of 4`.
    who: String,
    /// `None` once aborted. No call of NCCL holds the lock for long.
    handle: Mutex<Option<Handle>>,
}

impl Communicator {
    /// Joins the other ranks of the id, and waits for them at most for `timeout`, and while they are `wanted`.
    ///
    /// # Errors
    /// A rank does not come, two ranks use one device, or NCCL fails.
    pub fn form(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        id: UniqueId,
        (rank, world): (usize, usize),
        timeout: Duration,
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
                id,
                number(rank),
                &NON_BLOCKING,
            )
        };
        let communicator = Communicator {
            nccl: nccl.clone(),
            device: device.clone(),
            who: format!("rank {rank} of {world}"),
            handle: Mutex::new(Some(handle).filter(|&handle| handle != Handle::NULL)),
        };
        let function = "ncclCommInitRankConfig";
        let formed = match code {
            SUCCESS | IN_PROGRESS => {
                communicator.wait("the other ranks did not join", timeout, || {
                    if wanted() {
                        communicator.state(function)
                    } else {
                        Err(communicator.aborted())
                    }
                })
            }
            code => Err(nccl.failed(&communicator.who, function, code, Handle::NULL)),
        };
        communicator.or_abort(formed)?;
        Ok(communicator)
    }

    fn aborted(&self) -> CudaError {
        let who = self.who.clone();
        CudaError::NcclAborted { who }
    }

    /// Fails if the communicator is aborted, or with the error of an operation. Costs no wait: poll it while the
    /// device works.
    pub fn check(&self) -> Result<(), CudaError> {
        self.state("ncclCommGetAsyncError").map(|_| ())
    }

    /// Whether the last call is complete on the host. Errors name the function that is waited for.
    fn state(&self, function: &'static str) -> Result<bool, CudaError> {
        let mut state = SUCCESS;
        self.call(function, |functions, handle| {
            // SAFETY: the communicator is live, and the function writes its result.
            match unsafe { (functions.ncclCommGetAsyncError)(handle, &mut state) } {
                SUCCESS => state,
                code => code,
            }
        })?;
        Ok(state == SUCCESS)
    }

    /// Calls NCCL with the communicator, which is live meanwhile.
    fn call(
        &self,
        function: &'static str,
        call: impl FnOnce(&Functions, Handle) -> Code,
    ) -> Result<(), CudaError> {
        let handle = lock(&self.handle);
        let live = handle.ok_or_else(|| self.aborted())?;
        match call(&self.nccl.functions, live) {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.nccl.failed(&self.who, function, code, live)),
        }
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
                    who: self.who.clone(),
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
        self.or_abort(waited)
    }

    /// Aborts after a failure: streams may wait for an operation that has failed.
    fn or_abort(&self, result: Result<(), CudaError>) -> Result<(), CudaError> {
        if result.is_err() {
            self.abort();
        }
        result
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

    /// Calls a collective and waits until it is in its stream. Only an abort limits the wait: NCCL connects to the
    /// peers, which may compute for long.
    fn start(
        &self,
        function: &'static str,
        call: impl FnOnce(&Functions, Handle) -> Code,
    ) -> Result<(), CudaError> {
        self.device.make_current()?;
        let called = self.call(function, call);
        let started = called.and_then(|()| {
            let what = "a collective did not start";
            self.wait(what, Duration::MAX, || self.state(function))
        });
        self.or_abort(started)
    }

    /// `all[i] = Σ over ranks of all[i]`, f32.
    ///
    /// # Safety
    /// The buffer has `count` elements, and is live and otherwise unused until the stream has run the operation.
    pub unsafe fn all_reduce(
        &self,
        stream: &Stream,
        buffer: u64,
        count: usize,
    ) -> Result<(), CudaError> {
        let stream = stream.handle();
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffer.
        self.start("ncclAllReduce", |functions, handle| unsafe {
            (functions.ncclAllReduce)(buffer, buffer, count, FLOAT32, SUM, handle, stream)
        })
    }

    /// `own[i] = Σ over ranks of all[rank · count + i]`, f32; in place if `own` is that part of `all`.
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
    ) -> Result<(), CudaError> {
        let stream = stream.handle();
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffers.
        self.start("ncclReduceScatter", |functions, handle| unsafe {
            (functions.ncclReduceScatter)(all, own, count, FLOAT32, SUM, handle, stream)
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
        element: Precision,
    ) -> Result<(), CudaError> {
        let stream = stream.handle();
        let element = match element {
            Precision::F32 => FLOAT32,
            Precision::Bf16 => BFLOAT16,
        };
        // SAFETY: the communicator and the stream are live; the caller guarantees the buffers.
        self.start("ncclAllGather", |functions, handle| unsafe {
            (functions.ncclAllGather)(own, all, count, element, handle, stream)
        })
    }

    /// Waits until all operations are done, and leaves.
    fn finish(&self) -> Result<(), CudaError> {
        self.check()?;
        self.device.make_current()?;
        let function = "ncclCommFinalize";
        // SAFETY: only this thread can end the communicator now, as it is being dropped.
        self.call(function, |functions, handle| unsafe {
            (functions.ncclCommFinalize)(handle)
        })?;
        let what = "the collectives did not end";
        self.wait(what, DROP, || self.state(function))?;
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
        let finished = self.finish();
        let _ = self.or_abort(finished);
    }
}
