//! Streams, events and graphs.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use super::functions::{Functions, NOT_READY};
use super::{Argument, CudaError, Device, Function, Grid, Handle, Object, Pinned};

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: an event without a time costs less.
const WITHOUT_TIME: u32 = 2;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads may allocate during a capture.
const THREAD_LOCAL: c_int = 1;
/// The driver's code for a range that does not fit.
const INVALID_VALUE: c_int = 1;

impl Device {
    /// A stream without implicit order with other streams.
    pub fn stream(self: &Arc<Self>) -> Result<Stream, CudaError> {
        let destroy = self.driver.functions.cuStreamDestroy_v2;
        // SAFETY: the function writes its result.
        let create = |functions: &Functions, handle: &mut _| unsafe {
            (functions.cuStreamCreate)(handle, NON_BLOCKING)
        };
        Object::new(self, "cuStreamCreate", create, destroy).map(Stream)
    }

    /// An event without a time.
    pub fn event(self: &Arc<Self>) -> Result<Event, CudaError> {
        let destroy = self.driver.functions.cuEventDestroy_v2;
        // SAFETY: the function writes its result.
        let create = |functions: &Functions, handle: &mut _| unsafe {
            (functions.cuEventCreate)(handle, WITHOUT_TIME)
        };
        Object::new(self, "cuEventCreate", create, destroy).map(Event)
    }
}

/// An ordered queue of work on a device. Work continues after a drop.
pub struct Stream(Object);

impl Stream {
    /// The `CUstream`, for libraries on top of the driver.
    pub(in super::super) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Appends a launch.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters in number, order and type. Memory that they point to is
    /// live until the stream has run the kernel, and the function's module until then, too.
    pub unsafe fn launch(
        &self,
        function: &Function,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        let values: Vec<_> = arguments.iter().map(Argument::value).collect();
        let (x, y, z) = grid.blocks;
        // SAFETY: the function and the stream are live; the values are copied by the call; the caller
        // guarantees the rest.
        let code = unsafe {
            (functions.cuLaunchKernel)(
                function.handle,
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared,
                self.0.handle,
                values.as_ptr(),
                std::ptr::null(),
            )
        };
        functions.check("cuLaunchKernel", code)
    }

    /// Appends a copy of a range of pinned memory to the device.
    ///
    /// # Safety
    /// Both memories are live, and the pinned memory unchanged, until the stream has run the copy.
    pub unsafe fn upload(
        &self,
        to: u64,
        from: &Pinned,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        let Some(bytes) = from.bytes().get(range) else {
            return Err(functions.failed("cuMemcpyHtoDAsync", INVALID_VALUE));
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let start = bytes.as_ptr().cast();
        // SAFETY: the caller guarantees that both memories are live.
        let code =
            unsafe { (functions.cuMemcpyHtoDAsync_v2)(to, start, bytes.len(), self.0.handle) };
        functions.check("cuMemcpyHtoDAsync", code)
    }

    /// Appends a copy from the device into pinned memory, from its byte `at` on.
    ///
    /// # Safety
    /// Both memories are live, and the pinned memory unused, until the stream has run the copy.
    pub unsafe fn download(
        &self,
        to: &mut Pinned,
        at: usize,
        from: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        let target = at
            .checked_add(bytes)
            .and_then(|end| to.bytes_mut().get_mut(at..end));
        let Some(target) = target else {
            return Err(functions.failed("cuMemcpyDtoHAsync", INVALID_VALUE));
        };
        if bytes == 0 {
            return Ok(());
        }
        let start = target.as_mut_ptr().cast();
        // SAFETY: the caller guarantees that both memories are live.
        let code = unsafe { (functions.cuMemcpyDtoHAsync_v2)(start, from, bytes, self.0.handle) };
        functions.check("cuMemcpyDtoHAsync", code)
    }

    /// Appends a copy within the device.
    ///
    /// # Safety
    /// Both ranges are allocated, do not overlap, and are live until the stream has run the copy.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the ranges.
        let code = unsafe { (functions.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.0.handle) };
        functions.check("cuMemcpyDtoDAsync", code)
    }

    /// Appends a fill with zeros.
    ///
    /// # Safety
    /// The range is allocated and live until the stream has filled it.
    pub unsafe fn fill_zero(&self, at: u64, bytes: usize) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the range.
        let code = unsafe { (functions.cuMemsetD8Async)(at, 0, bytes, self.0.handle) };
        functions.check("cuMemsetD8Async", code)
    }

    /// Records the work so far in the event.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        // SAFETY: both are live.
        let code = unsafe { (functions.cuEventRecord)(event.0.handle, self.0.handle) };
        functions.check("cuEventRecord", code)
    }

    /// Lets all later work wait for the last record of the event, on any stream.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        // SAFETY: both are live; the flags must be 0.
        let code = unsafe { (functions.cuStreamWaitEvent)(self.0.handle, event.0.handle, 0) };
        functions.check("cuStreamWaitEvent", code)
    }

    /// Waits on the host until the stream has run everything. Errors of earlier work appear here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        // SAFETY: the stream is live.
        let code = unsafe { (functions.cuStreamSynchronize)(self.0.handle) };
        functions.check("cuStreamSynchronize", code)
    }

    /// Whether the stream has run everything. Errors of earlier work appear here.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let functions = self.0.device.current()?;
        // SAFETY: the stream is live.
        match unsafe { (functions.cuStreamQuery)(self.0.handle) } {
            NOT_READY => Ok(false),
            code => functions.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Begins to record the stream's work instead of running it. Streams that wait for an event of the
    /// capture join it. Until its end, this thread must not allocate, free or synchronise.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        // SAFETY: the stream is live.
        let code = unsafe { (functions.cuStreamBeginCapture_v2)(self.0.handle, THREAD_LOCAL) };
        functions.check("cuStreamBeginCapture", code)
    }

    /// Ends the capture, also after an error, and instantiates the graph.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        let functions = self.0.device.current()?;
        let mut graph = Handle::NULL;
        // SAFETY: the stream is live, and the function writes its result.
        let code = unsafe { (functions.cuStreamEndCapture)(self.0.handle, &mut graph) };
        functions.check("cuStreamEndCapture", code)?;
        // SAFETY: the function writes its result; the captured graph is destroyed once. The driver waits for the
        // launches of the executable graph before it destroys that.
        let instantiate = |functions: &Functions, handle: &mut _| unsafe {
            let code = (functions.cuGraphInstantiateWithFlags)(handle, graph, 0);
            (functions.cuGraphDestroy)(graph);
            code
        };
        let (device, destroy) = (&self.0.device, functions.cuGraphExecDestroy);
        Object::new(device, "cuGraphInstantiate", instantiate, destroy).map(Graph)
    }

    /// Appends a graph. Launches of one graph never overlap. Memory and modules of its work must be live.
    pub fn launch_graph(&self, graph: &Graph) -> Result<(), CudaError> {
        let functions = self.0.device.current()?;
        // SAFETY: both are live. The callers of the captured calls guarantee what the graph uses.
        let code = unsafe { (functions.cuGraphLaunch)(graph.0.handle, self.0.handle) };
        functions.check("cuGraphLaunch", code)
    }
}

/// A point in a stream's work.
pub struct Event(Object);

/// A captured and instantiated graph of work.
pub struct Graph(Object);
