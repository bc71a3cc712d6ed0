//! All emulated devices of a process, with their primary contexts and what belongs to those.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::config::Config;
use crate::faults::Faults;
use crate::graph::{Capture, CaptureMode, Executable, Frontier, Graph};
use crate::launch::{Counts, Dim, Failure, Kernel, Launch, LaunchError, LoadError, Program};
use crate::memory::{AllocationError, Memory};
use crate::race::History;
use crate::report::Report;
use crate::status::Status;
use crate::stream::{
    Access, Choice, Kind, LaneKind, Mark, Operation, Progress, Streams, Task, Wait,
};

/// Loads the text of a module.
pub type Loader = fn(&str) -> Result<Box<dyn Program>, LoadError>;

/// Shared memory of a block unless a kernel's attribute allows more.
pub const SHARED_DEFAULT: u32 = 48 * 1024;
/// The most shared memory of a block.
pub const SHARED_MOST: u32 = 227 * 1024;
/// Registers of a multiprocessor, which are those that one block can have.
pub const REGISTERS: u32 = 64 * 1024;
/// Threads of a block.
pub const THREADS_MOST: u32 = 1024;
/// How long the progress of collectives keeps the machine from the host.
const SLICE: Duration = Duration::from_millis(1);

/// The devices of a process.
pub struct Machine {
    pub config: Config,
    pub memory: Memory,
    pub streams: Streams,
    /// Host memory that `cuMemHostAlloc` returned, by its address.
    pub pinned: BTreeMap<u64, Pinned>,
    report: Report,
    loader: Loader,
    history: History,
    /// One primary context for each device.
    contexts: Vec<Context>,
    /// Streams that the program created and did not destroy.
    created: BTreeSet<usize>,
    events: HashMap<u32, Event>,
    captures: HashMap<u32, Capture>,
    modules: HashMap<u32, Module>,
    functions: HashMap<u32, Function>,
    graphs: HashMap<u32, Graph>,
    executables: HashMap<u32, (usize, Executable)>,
    launches: BTreeMap<String, u64>,
    /// What operations counted, by their names.
    counts: BTreeMap<String, Counts>,
    /// Waits of streams for events, ignored ones included.
    waits: u64,
    /// Operations that ran, which is also the clock of events.
    ran: u64,
    /// Starts and ends of operations so far.
    moments: u64,
    /// The moments at which pending operations started.
    starts: HashMap<u64, u64>,
    next: u32,
}

/// Pinned memory of the host.
#[derive(Debug, Clone, Copy)]
pub struct Pinned {
    pub bytes: u64,
    pub context: usize,
}

#[derive(Debug, Default)]
struct Context {
    /// How often the program holds the context; 0 means that it does not exist.
    retained: u32,
    /// The first asynchronous error; every later call returns it.
    error: Option<Status>,
    default_stream: usize,
}

#[derive(Debug)]
struct Event {
    context: usize,
    has_time: bool,
    /// The last record outside a capture.
    mark: Option<Mark>,
    /// The last record, if it was in a capture.
    captured: Option<Frontier>,
    /// When the record ran.
    time: Option<u64>,
}

struct Module {
    context: usize,
    program: Arc<dyn Program>,
    /// Address and bytes of the module's variables.
    globals: HashMap<String, (u64, u64)>,
}

#[derive(Debug)]
struct Function {
    module: u32,
    kernel: usize,
    /// Limit of dynamic shared memory, in bytes.
    dynamic_shared: u32,
}

impl Machine {
    pub fn new(config: Config, loader: Loader) -> Machine {
        let mut streams = Streams::new(config.seed);
        let contexts = (0..config.visible.len()).map(|device| Context {
            default_stream: streams.add(device, LaneKind::Default),
            ..Context::default()
        });
        Machine {
            contexts: contexts.collect(),
            memory: Memory::new(config.visible.len(), config.memory, config.fail_after),
            streams,
            pinned: BTreeMap::new(),
            report: Report::new(config.report.clone()),
            loader,
            history: History::default(),
            created: BTreeSet::new(),
            events: HashMap::new(),
            captures: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            launches: BTreeMap::new(),
            counts: BTreeMap::new(),
            waits: 0,
            ran: 0,
            moments: 0,
            starts: HashMap::new(),
            next: 1,
            config,
        }
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }

    // Contexts

    pub fn retain(&mut self, device: usize) {
        self.contexts[device].retained += 1;
    }

    /// Releases a context; the last release destroys it and reports what it leaks.
    pub fn release(&mut self, device: usize) -> Result<(), Status> {
        match self.contexts[device].retained {
            0 => return Err(Status::InvalidContext),
            1 => self.destroy(device),
            _ => {}
        }
        self.contexts[device].retained -= 1;
        Ok(())
    }

    fn destroy(&mut self, device: usize) {
        self.captures
            .retain(|_, capture| self.streams.context(capture.origin) != device);
        let end = self.all_of(device);
        if self.advance(&end) == Ok(false) {
            // A broken context drops what is pending, and the call then returns that error.
            self.contexts[device].error = Some(Status::Deinitialized);
            let _ = self.advance(&end);
        }
        let modules = self.modules.iter();
        let modules = modules.filter(|(_, module)| module.context == device);
        for module in modules.map(|(&id, _)| id).collect::<Vec<u32>>() {
            // Freeing the variables of a live module cannot fail.
            let _ = self.unload(module);
        }
        self.report_communicators(Some(device));
        for leak in self.memory.reset(device) {
            let (address, bytes) = (leak.start, leak.end - leak.start);
            let details = json!({"device": device, "address": address, "bytes": bytes});
            let message = format!("{bytes} bytes at {address:#x} of device {device} are not freed");
            self.report.finding("leak", &message, details);
        }
        // The memory itself stays, for a program that still uses it.
        let leaks = self
            .pinned
            .extract_if(.., |_, pinned| pinned.context == device);
        for (address, Pinned { bytes, .. }) in leaks {
            let details = json!({"address": address, "bytes": bytes});
            let message = format!("{bytes} bytes at {address:#x} of the host are not freed");
            self.report.finding("leak", &message, details);
        }
        self.events.retain(|_, event| event.context != device);
        self.executables
            .retain(|_, (context, _)| *context != device);
        self.created
            .retain(|&stream| self.streams.context(stream) != device);
        self.contexts[device].error = None;
    }

    pub fn is_retained(&self, device: usize) -> bool {
        self.contexts[device].retained > 0
    }

    /// Fails with the error that broke the context, as every call does from then on.
    pub fn check(&mut self, context: usize) -> Result<(), Status> {
        if !self.is_retained(context) {
            return Err(Status::InvalidContext);
        }
        if let Some(path) = &self.config.faults {
            let fault = Faults::read(path).device(self.config.visible[context]);
            let error = &mut self.contexts[context].error;
            if fault.lost {
                *error = error.or(Some(Status::Unknown));
            } else if fault.ecc_uncorrected > 0 {
                *error = error.or(Some(Status::UncorrectableEcc));
            }
        }
        self.contexts[context].error.map_or(Ok(()), Err)
    }

    // Operations

    /// Appends a task to a stream. `None` means that the stream is captured.
    pub fn submit(&mut self, stream: usize, task: Task) -> Result<Option<Mark>, Status> {
        self.submit_after(stream, task, &[])
    }

    /// Appends a task to a stream, after the marks. A captured task has only the order of its stream.
    pub fn submit_after(
        &mut self,
        stream: usize,
        task: Task,
        after: &[Mark],
    ) -> Result<Option<Mark>, Status> {
        self.check(self.streams.context(stream))?;
        if let Some(capture) = self.capture_of(stream)? {
            capture.add(stream, task)?;
            return Ok(None);
        }
        Ok(Some(self.streams.push(stream, Kind::Task(task), after)))
    }

    /// Runs operations, in a random order, until the wait is over; `false` if those that are left wait for
    /// something outside of the streams.
    pub fn advance(&mut self, wait: &Wait) -> Result<bool, Status> {
        let choice = self.streams.choose(&wait.marks);
        self.advance_by(wait, choice)
    }

    /// Continues an [`Machine::advance`] that returned `false`. How often that happens depends on time, so it
    /// takes no random number.
    pub fn resume(&mut self, wait: &Wait) -> Result<bool, Status> {
        self.advance_by(wait, Choice::All)
    }

    fn advance_by(&mut self, wait: &Wait, mut choice: Choice) -> Result<bool, Status> {
        let mut pending = HashSet::new();
        while !wait.marks.iter().all(|mark| self.streams.is_done(mark)) {
            if self.run_collectives() {
                continue;
            }
            match self.streams.take(&choice, &pending) {
                Some(operation) => pending.extend(self.run(operation)),
                None if matches!(choice, Choice::All) => {
                    self.check(wait.context)?;
                    return Ok(false);
                }
                // What is needed may wait for another stream's operation.
                None => choice = Choice::All,
            }
        }
        for mark in &wait.marks {
            self.streams.host_waited(mark);
        }
        if self.streams.is_quiet() {
            self.history.clear();
        }
        self.check(wait.context)?;
        Ok(true)
    }

    /// Fails with [`Status::NotReady`] if the wait is not over; a few operations run first, so that a program
    /// that polls proceeds.
    pub fn poll(&mut self, wait: &Wait) -> Result<(), Status> {
        let choice = self.streams.choose(&wait.marks);
        let mut pending = HashSet::new();
        for _ in 0..=self.streams.random() % 4 {
            self.run_collectives();
            match self.streams.take(&choice, &pending) {
                Some(operation) => pending.extend(self.run(operation)),
                None => break,
            }
        }
        self.check(wait.context)?;
        if !wait.marks.iter().all(|mark| self.streams.is_done(mark)) {
            return Err(Status::NotReady);
        }
        for mark in &wait.marks {
            self.streams.host_waited(mark);
        }
        Ok(())
    }

    /// Calls every collective that is ready; whether one of them ended.
    fn run_collectives(&mut self) -> bool {
        let (mut last, mut ended) = (0, false);
        while let Some(operation) = self.streams.take_collective(last) {
            last = operation.id;
            ended |= self.run(operation).is_none();
        }
        ended
    }

    /// Runs collectives and, for about a millisecond, operations that they wait for.
    pub fn progress(&mut self) -> Background {
        if !self.streams.has_collectives() {
            return Background::Idle;
        }
        let mut has_run = self.run_collectives();
        let needed = self.streams.needed_by_collectives();
        let begun = Instant::now();
        while begun.elapsed() < SLICE
            && let Some(operation) = self.streams.take_oldest(&needed)
        {
            has_run = true;
            self.run(operation);
        }
        if has_run {
            Background::Ran
        } else {
            Background::Waits
        }
    }

    /// Runs an operation; returns its number if it is still pending.
    fn run(&mut self, operation: Operation) -> Option<u64> {
        let id = operation.id;
        let mut progress = Progress::Done;
        match &operation.kind {
            Kind::Join => {}
            Kind::Record(event) => {
                let event = self.events.get_mut(event);
                if let Some(event) = event.filter(|event| {
                    let mark = event.mark.as_ref();
                    mark.is_some_and(|mark| mark.operation() == id)
                }) {
                    event.time = Some(self.ran + 1);
                }
            }
            Kind::Task(task) => {
                // A broken context drops its operations.
                if self.contexts[operation.context].error.is_none() {
                    let moment = self.moments;
                    let start = *self.starts.entry(id).or_insert(moment);
                    self.moments += u64::from(start == moment);
                    progress = self.run_task(&operation, task);
                }
                if progress == Progress::Done
                    && let Some(start) = self.starts.remove(&id)
                {
                    self.write_timeline(&operation, task, start);
                }
            }
        }
        if progress == Progress::Pending {
            self.streams.put_back(operation);
            return Some(id);
        }
        self.ran += 1;
        self.streams.finish(id);
        None
    }

    fn write_timeline(&mut self, operation: &Operation, task: &Task, start: u64) {
        let end = self.moments;
        self.moments += 1;
        if !self.config.timeline {
            return;
        }
        let details = json!({
            "device": operation.context, "stream": operation.stamp.lane, "operation": task.name(),
            "issued": operation.id, "start": start, "end": end,
        });
        self.report.line("timeline", details);
    }

    fn run_task(&mut self, operation: &Operation, task: &Task) -> Progress {
        let seed = self.streams.seed_of(operation.id);
        let mut access = Access::new(&mut self.memory, operation.id, seed);
        // A panic would leave the operation unfinished, and what depends on it would never run.
        let result = catch_unwind(AssertUnwindSafe(|| task.run(&mut access)));
        let result = result.unwrap_or_else(|_| {
            let message = "the emulator panicked";
            Err(LaunchError::new(Failure::Launch, message))
        });
        let (reads, writes) = access.touched.ranges();
        let (counts, findings) = (access.counts, access.findings);
        let runs = u64::from(!matches!(result, Ok(Progress::Pending)));
        let sums = self.counts.entry(task.name().to_owned()).or_default();
        for (name, count) in [("runs", runs)].into_iter().chain(counts) {
            *sums.entry(name).or_default() += count;
        }
        for (kind, message, details) in findings {
            self.report.finding(kind, &message, details);
        }
        let (stamp, clock) = (&operation.stamp, &operation.clock);
        let mut race = None;
        for range in reads {
            race = race.or(self.history.read(range, stamp, clock));
        }
        for range in writes {
            race = race.or(self.history.write(range, stamp, clock));
        }
        let error = &mut self.contexts[operation.context].error;
        if let Some(race) = race {
            let (start, bytes) = (race.bytes.start, race.bytes.end - race.bytes.start);
            let details = json!({
                "first": &*race.first, "second": &*race.second, "access": race.kind,
                "address": start, "bytes": bytes,
            });
            self.report.finding("race", &race.to_string(), details);
            *error = Some(Status::LaunchFailed);
        }
        result.unwrap_or_else(|failure| {
            let message = format!("{}: {failure}", stamp.operation);
            let details = json!({"operation": &*stamp.operation});
            self.report.finding("fault", &message, details);
            *error = Some(status_of(failure.failure));
            Progress::Done
        })
    }

    /// Reports a call that a correct program does not make.
    pub fn misuse(&mut self, message: &str) {
        self.report.finding("misuse", message, json!({}));
    }

    /// Reports something that a correct program does not do.
    pub fn finding(&mut self, kind: &str, message: &str, details: Value) {
        self.report.finding(kind, message, details);
    }

    /// Reports communicators that are still there, of one device or of all.
    pub fn report_communicators(&mut self, device: Option<usize>) {
        for (device, communicator) in crate::nccl::live(device) {
            let message = format!("{communicator} on device {device} is not destroyed");
            let details = json!({"device": device, "communicator": communicator});
            self.report.finding("leak", &message, details);
        }
    }

    // Memory

    pub fn allocate(&mut self, context: usize, bytes: u64) -> Result<u64, Status> {
        self.check(context)?;
        if bytes == 0 {
            return Err(Status::InvalidValue);
        }
        let allocated = self.memory.allocate(context, bytes);
        allocated.map_err(|error: AllocationError| {
            let details = json!({"device": context, "bytes": bytes, "message": error.to_string()});
            self.report.line("out_of_memory", details);
            Status::OutOfMemory
        })
    }

    /// Frees an allocation. The driver waits for the context first.
    pub fn free(&mut self, address: u64) -> Result<(), Status> {
        self.memory.free(address).map_err(|error| {
            self.misuse(&error.to_string());
            Status::InvalidValue
        })
    }

    /// Fails for a range that is not in one live allocation, as copies and sets do at the call.
    pub fn check_range(&mut self, address: u64, bytes: u64) -> Result<(), Status> {
        self.memory.check(address, bytes).map_err(|fault| {
            self.misuse(&fault.to_string());
            Status::InvalidValue
        })
    }

    /// Whether the whole range of the host is pinned.
    pub fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        let before = self.pinned.range(..=address).next_back();
        before.is_some_and(|(start, pinned)| address - start + bytes <= pinned.bytes)
    }

    // Streams

    pub fn create_stream(&mut self, context: usize, kind: LaneKind) -> Result<usize, Status> {
        self.check(context)?;
        let stream = self.streams.add(context, kind);
        self.created.insert(stream);
        Ok(stream)
    }

    /// Destroys a stream. Its operations still run.
    pub fn destroy_stream(&mut self, stream: usize) -> Result<(), Status> {
        self.refuse_captured(stream)?;
        if self.created.remove(&stream) {
            Ok(())
        } else {
            Err(Status::InvalidHandle)
        }
    }

    pub fn default_stream(&self, context: usize) -> usize {
        self.contexts[context].default_stream
    }

    pub fn is_created(&self, stream: usize) -> bool {
        self.created.contains(&stream)
    }

    /// The wait for a stream: for its end and, of the default stream, for those of blocking streams.
    pub fn end_of(&mut self, stream: usize) -> Result<Wait, Status> {
        self.refuse_captured(stream)?;
        let mark = if self.streams.kind(stream) == LaneKind::Default {
            Some(self.streams.push(stream, Kind::Join, &[]))
        } else {
            self.streams.end(stream)
        };
        Ok(Wait {
            context: self.streams.context(stream),
            marks: mark.into_iter().collect(),
        })
    }

    /// The wait for all streams of a context.
    pub fn all_of(&self, context: usize) -> Wait {
        Wait {
            context,
            marks: self.streams.ends(context),
        }
    }

    // Events

    pub fn create_event(&mut self, context: usize, has_time: bool) -> Result<u32, Status> {
        self.check(context)?;
        let event = Event {
            context,
            has_time,
            mark: None,
            captured: None,
            time: None,
        };
        let number = self.number();
        self.events.insert(number, event);
        Ok(number)
    }

    pub fn destroy_event(&mut self, event: u32) -> Result<(), Status> {
        let event = self.events.remove(&event);
        event.map(|_| ()).ok_or(Status::InvalidHandle)
    }

    fn event(&mut self, event: u32) -> Result<&mut Event, Status> {
        self.events.get_mut(&event).ok_or(Status::InvalidHandle)
    }

    pub fn record(&mut self, number: u32, stream: usize) -> Result<(), Status> {
        let context = self.streams.context(stream);
        self.check(context)?;
        if self.event(number)?.context != context {
            return Err(Status::InvalidHandle);
        }
        let captured = self
            .capture_of(stream)?
            .and_then(|capture| capture.record(stream));
        let mark = match captured {
            Some(_) => None,
            None => Some(self.streams.push(stream, Kind::Record(number), &[])),
        };
        let event = self.event(number)?;
        (event.mark, event.captured, event.time) = (mark, captured, None);
        Ok(())
    }

    /// Lets a stream wait for the last record of an event; an event without one is complete. A wait that the
    /// settings drop is only checked for its handles.
    pub fn wait_for_event(&mut self, stream: usize, event: u32) -> Result<(), Status> {
        self.check(self.streams.context(stream))?;
        let event = self.event(event)?;
        let (mark, captured) = (event.mark.clone(), event.captured.clone());
        self.waits += 1;
        if self.config.drop_wait_after == Some(self.waits - 1) {
            return Ok(());
        }
        let Some(frontier) = captured else {
            if self.capture_of(stream)?.is_some() {
                self.invalidate(|capture| capture.contains(stream));
                return Err(Status::CaptureIsolation);
            }
            if let Some(mark) = mark {
                self.streams.push(stream, Kind::Join, &[mark]);
            }
            return Ok(());
        };
        if self.streams.kind(stream) == LaneKind::Default {
            self.invalidate(|capture| capture.recorded(&frontier));
            return Err(Status::CaptureImplicit);
        }
        let other = self.capture_of(stream)?;
        if other.is_some_and(|other| !other.recorded(&frontier)) {
            self.invalidate(|other| other.contains(stream) || other.recorded(&frontier));
            return Err(Status::CaptureMerge);
        }
        let capture = self.captures.get_mut(&frontier.capture);
        let capture = capture.ok_or(Status::CapturedEvent)?;
        if capture.invalidated {
            return Err(Status::CaptureInvalidated);
        }
        capture.wait(stream, &frontier);
        Ok(())
    }

    /// The wait for the last record of an event.
    pub fn record_of(&mut self, event: u32) -> Result<Wait, Status> {
        let event = self.event(event)?;
        let (context, mark) = (event.context, event.mark.clone());
        if let Some(frontier) = event.captured.clone() {
            self.invalidate(|capture| capture.recorded(&frontier));
            return Err(Status::CapturedEvent);
        }
        Ok(Wait {
            context,
            marks: mark.into_iter().collect(),
        })
    }

    /// Milliseconds between two records: a microsecond for each operation that ran.
    pub fn elapsed(&mut self, start: u32, end: u32) -> Result<f32, Status> {
        let mut times = [0.0; 2];
        for (event, time) in [start, end].into_iter().zip(&mut times) {
            let event = self.event(event)?;
            if event.captured.is_some() {
                return Err(Status::CapturedEvent);
            }
            if !event.has_time || event.mark.is_none() {
                return Err(Status::InvalidHandle);
            }
            *time = event.time.ok_or(Status::NotReady)? as f64;
        }
        Ok(((times[1] - times[0]) / 1000.0) as f32)
    }

    // Capture and graphs

    /// The open capture of a stream. The default stream must not be used while a blocking stream is captured.
    fn capture_of(&mut self, stream: usize) -> Result<Option<&mut Capture>, Status> {
        if self.streams.kind(stream) == LaneKind::Default {
            let context = self.streams.context(stream);
            let blocking = |lane| {
                self.streams.context(lane) == context
                    && self.streams.kind(lane) == LaneKind::Blocking
            };
            let mut implied = false;
            for capture in self.captures.values_mut() {
                if capture.streams().any(blocking) {
                    capture.invalidated = true;
                    implied = true;
                }
            }
            if implied {
                return Err(Status::CaptureImplicit);
            }
        }
        let mut captures = self.captures.values_mut();
        let capture = captures.find(|capture| capture.contains(stream));
        match capture {
            Some(capture) if capture.invalidated => Err(Status::CaptureInvalidated),
            capture => Ok(capture),
        }
    }

    fn invalidate(&mut self, which: impl Fn(&Capture) -> bool) -> bool {
        let mut any = false;
        for capture in self.captures.values_mut().filter(|capture| which(capture)) {
            capture.invalidated = true;
            any = true;
        }
        any
    }

    /// Fails, and invalidates the capture, if the stream is captured.
    pub fn refuse_captured(&mut self, stream: usize) -> Result<(), Status> {
        if self.capture_of(stream)?.is_some() {
            self.invalidate(|capture| capture.contains(stream));
            return Err(Status::CaptureUnsupported);
        }
        Ok(())
    }

    /// Fails, and invalidates the captures, if a capture forbids unsafe calls, for example an allocation.
    pub fn refuse_in_capture(&mut self) -> Result<(), Status> {
        let here = std::thread::current().id();
        let forbidden = self.invalidate(|capture| match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == here,
            CaptureMode::Relaxed => false,
        });
        if forbidden {
            Err(Status::CaptureUnsupported)
        } else {
            Ok(())
        }
    }

    /// Fails, and invalidates the captures, if any stream of the context is captured.
    pub fn refuse_context_captured(&mut self, context: usize) -> Result<(), Status> {
        let mut captured = false;
        for capture in self.captures.values_mut() {
            if capture
                .streams()
                .any(|lane| self.streams.context(lane) == context)
            {
                capture.invalidated = true;
                captured = true;
            }
        }
        if captured {
            Err(Status::CaptureUnsupported)
        } else {
            Ok(())
        }
    }

    pub fn begin_capture(&mut self, stream: usize, mode: CaptureMode) -> Result<(), Status> {
        self.check(self.streams.context(stream))?;
        if self.streams.kind(stream) == LaneKind::Default {
            return Err(Status::CaptureUnsupported);
        }
        if self.capture_of(stream)?.is_some() {
            return Err(Status::IllegalState);
        }
        let id = self.number();
        self.captures.insert(id, Capture::begin(id, stream, mode));
        Ok(())
    }

    /// Ends a capture, which is gone also after an error.
    pub fn end_capture(&mut self, stream: usize) -> Result<u32, Status> {
        let here = std::thread::current().id();
        let mut captures = self.captures.iter();
        let found = captures.find(|(_, capture)| capture.contains(stream));
        let (&id, capture) = found.ok_or(Status::IllegalState)?;
        if capture.origin != stream {
            return Err(Status::CaptureUnmatched);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != here {
            return Err(Status::CaptureWrongThread);
        }
        let capture = self.captures.remove(&id).ok_or(Status::IllegalState)?;
        let graph = capture.end()?;
        let number = self.number();
        self.graphs.insert(number, graph);
        Ok(number)
    }

    /// The state of a stream's capture (`CUstreamCaptureStatus`): none, active or invalidated.
    pub fn capture_status(&self, stream: usize) -> i32 {
        let mut captures = self.captures.values();
        match captures.find(|capture| capture.contains(stream)) {
            None => 0,
            Some(capture) if capture.invalidated => 2,
            Some(_) => 1,
        }
    }

    pub fn instantiate(&mut self, context: usize, graph: u32) -> Result<u32, Status> {
        self.check(context)?;
        let graph = self.graphs.get(&graph).ok_or(Status::InvalidValue)?.clone();
        let streams = &mut self.streams;
        let executable = Executable::new(graph, || streams.add(context, LaneKind::NonBlocking));
        let number = self.number();
        self.executables.insert(number, (context, executable));
        Ok(number)
    }

    pub fn launch_graph(&mut self, executable: u32, stream: usize) -> Result<(), Status> {
        self.check(self.streams.context(stream))?;
        self.refuse_captured(stream)?;
        let executable = self.executables.get_mut(&executable);
        let (_, executable) = executable.ok_or(Status::InvalidValue)?;
        executable.launch(&mut self.streams, stream);
        *self.launches.entry("graph".into()).or_default() += 1;
        Ok(())
    }

    pub fn destroy_graph(&mut self, graph: u32) -> Result<(), Status> {
        let graph = self.graphs.remove(&graph);
        graph.map(|_| ()).ok_or(Status::InvalidValue)
    }

    pub fn destroy_executable(&mut self, executable: u32) -> Result<(), Status> {
        let executable = self.executables.remove(&executable);
        executable.map(|_| ()).ok_or(Status::InvalidValue)
    }

    // Modules

    /// Loads a module and allocates its variables.
    pub fn load(&mut self, context: usize, text: &str) -> Result<u32, Status> {
        self.check(context)?;
        let mut program = (self.loader)(text).map_err(|error| {
            self.misuse(&error.to_string());
            match error {
                LoadError::Invalid(_) => Status::InvalidPtx,
                LoadError::Unsupported(_) => Status::UnsupportedPtx,
            }
        })?;
        let mut globals = HashMap::new();
        for (index, global) in program.globals().to_vec().into_iter().enumerate() {
            let bytes = global.initial.len() as u64;
            let address = self.allocate(context, bytes)?;
            let written = self.memory.write(address, &global.initial);
            written.map_err(|_| Status::Unknown)?;
            program.place(index, address);
            globals.insert(global.name, (address, bytes));
        }
        let module = Module {
            context,
            program: program.into(),
            globals,
        };
        let number = self.number();
        self.modules.insert(number, module);
        Ok(number)
    }

    /// Unloads a module. The driver waits for the context first.
    pub fn unload(&mut self, module: u32) -> Result<(), Status> {
        let module_number = module;
        let module = self.modules.remove(&module).ok_or(Status::InvalidHandle)?;
        self.functions
            .retain(|_, function| function.module != module_number);
        for (address, _) in module.globals.values() {
            // Fails for a variable that the program has freed itself.
            if let Err(error) = self.memory.free(*address) {
                self.misuse(&error.to_string());
            }
        }
        Ok(())
    }

    pub fn global(&self, module: u32, name: &str) -> Result<(u64, u64), Status> {
        let module = self.modules.get(&module).ok_or(Status::InvalidHandle)?;
        module.globals.get(name).copied().ok_or(Status::NotFound)
    }

    /// The number of a module's kernel; the same for every call.
    pub fn function(&mut self, module: u32, name: &str) -> Result<u32, Status> {
        let kernels = self.modules.get(&module).ok_or(Status::InvalidHandle)?;
        let mut kernels = kernels.program.kernels().iter();
        let kernel = kernels.position(|kernel| kernel.name == name);
        let kernel = kernel.ok_or(Status::NotFound)?;
        let known = self
            .functions
            .iter()
            .find(|(_, function)| (function.module, function.kernel) == (module, kernel));
        if let Some((&number, _)) = known {
            return Ok(number);
        }
        let number = self.number();
        let function = Function {
            module,
            kernel,
            dynamic_shared: 0,
        };
        self.functions.insert(number, function);
        Ok(number)
    }

    /// A kernel, its limit of dynamic shared memory and its context.
    pub fn kernel(&self, function: u32) -> Result<(&Kernel, u32, usize), Status> {
        let function = self.functions.get(&function).ok_or(Status::InvalidHandle)?;
        let module = self.modules.get(&function.module);
        let module = module.ok_or(Status::InvalidHandle)?;
        let kernel = &module.program.kernels()[function.kernel];
        let limit = SHARED_DEFAULT.saturating_sub(kernel.static_shared);
        Ok((kernel, limit.max(function.dynamic_shared), module.context))
    }

    /// Allows a kernel more dynamic shared memory.
    pub fn allow_shared(&mut self, function: u32, bytes: i32) -> Result<(), Status> {
        let (kernel, _, _) = self.kernel(function)?;
        let most = SHARED_MOST.saturating_sub(kernel.static_shared);
        let bytes = u32::try_from(bytes).map_err(|_| Status::InvalidValue)?;
        if bytes > most {
            return Err(Status::InvalidValue);
        }
        if let Some(function) = self.functions.get_mut(&function) {
            function.dynamic_shared = bytes;
        }
        Ok(())
    }

    /// Launches a kernel with packed parameters.
    pub fn launch(
        &mut self,
        function: u32,
        [grid, block]: [Dim; 2],
        dynamic_shared: u32,
        stream: usize,
        parameters: Vec<u8>,
    ) -> Result<(), Status> {
        let (kernel, limit, context) = self.kernel(function)?;
        if context != self.streams.context(stream) {
            return Err(Status::InvalidHandle);
        }
        let threads = block.count();
        let fits = block.x <= 1024 && block.y <= 1024 && block.z <= 64;
        let fits = fits && grid.x <= i32::MAX as u32 && grid.y < 1 << 16 && grid.z < 1 << 16;
        if !fits || threads == 0 || grid.count() == 0 || dynamic_shared > limit {
            return Err(Status::InvalidValue);
        }
        if threads > u64::from(THREADS_MOST.min(kernel.max_threads)) {
            return Err(Status::InvalidValue);
        }
        if threads * u64::from(kernel.registers) > u64::from(REGISTERS) {
            return Err(Status::LaunchOutOfResources);
        }
        let name = kernel.name.clone();
        let program = self.functions.get(&function).and_then(|function| {
            let module = self.modules.get(&function.module)?;
            Some(module.program.clone())
        });
        let program = program.ok_or(Status::InvalidHandle)?;
        *self.launches.entry(name.clone()).or_default() += 1;
        let task = Task::new(&format!("kernel {name}"), move |access| {
            access.limit_to(context);
            let launch = Launch {
                grid,
                block,
                dynamic_shared,
                parameters: &parameters,
                seed: access.seed,
            };
            access.counts = program.run(&name, &launch, access)?;
            Ok(())
        });
        self.submit(stream, task).map(|_| ())
    }

    // Report

    /// Writes the counters so far.
    pub fn summarize(&self) {
        let devices = (0..self.config.visible.len()).map(|device| {
            let statistics = self.memory.statistics(device);
            json!({
                "device": device,
                "allocations": statistics.allocations,
                "live_allocations": statistics.live_allocations,
                "live_bytes": statistics.live_bytes,
                "peak_bytes": statistics.peak_bytes,
            })
        });
        let details = json!({
            "devices": devices.collect::<Vec<_>>(),
            "launches": self.launches,
            "counts": self.counts,
            "operations": self.ran,
            "waits": self.waits,
            "unfinished": self.streams.unfinished(),
            "nccl": crate::nccl::counts(),
            "findings": self.report.findings(),
        });
        self.report.line("summary", details);
    }
}

/// What collectives did without the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Background {
    /// There is no collective.
    Idle,
    Ran,
    /// All collectives wait for other ranks.
    Waits,
}

/// The code with which the driver reports a failure.
fn status_of(failure: Failure) -> Status {
    match failure {
        Failure::Address => Status::IllegalAddress,
        Failure::Misaligned => Status::MisalignedAddress,
        Failure::Instruction => Status::IllegalInstruction,
        Failure::Assert => Status::Assert,
        Failure::Resources => Status::LaunchOutOfResources,
        Failure::Launch => Status::LaunchFailed,
    }
}
