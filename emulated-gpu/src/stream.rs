//! Streams as lanes of operations that run late, in a random order that the real driver could choose.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use crate::launch::{Counts, GlobalMemory, LaunchError, MemoryFault};
use crate::memory::{FreeError, Memory, Snapshot};
use crate::race::{Clock, Stamp, Touched};

/// Work of an operation. A graph runs it many times, so it keeps no state between runs.
type Work = Arc<dyn Fn(&mut Access<'_>) -> Result<Progress, LaunchError> + Send + Sync>;

/// Whether an operation is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Done,
    /// The operation waits for something outside of the streams and is called again.
    Pending,
}

/// Work with its name for people.
#[derive(Clone)]
pub struct Task {
    name: Arc<str>,
    work: Work,
    is_collective: bool,
}

impl Task {
    /// Work that is complete when it returns.
    pub fn new(
        name: &str,
        work: impl Fn(&mut Access<'_>) -> Result<(), LaunchError> + Send + Sync + 'static,
    ) -> Task {
        Task::polled(name, move |access| work(access).map(|()| Progress::Done))
    }

    /// Work that is called until it is done.
    pub fn polled(
        name: &str,
        work: impl Fn(&mut Access<'_>) -> Result<Progress, LaunchError> + Send + Sync + 'static,
    ) -> Task {
        Task {
            name: name.into(),
            work: Arc::new(work),
            is_collective: false,
        }
    }

    /// Work with other ranks. It and what it waits for run without a call of the host, as on a GPU.
    pub fn collective(
        name: &str,
        work: impl Fn(&mut Access<'_>) -> Result<Progress, LaunchError> + Send + Sync + 'static,
    ) -> Task {
        Task {
            is_collective: true,
            ..Task::polled(name, work)
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn run(&self, access: &mut Access<'_>) -> Result<Progress, LaunchError> {
        (self.work)(access)
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// What an operation does.
#[derive(Debug, Clone)]
pub enum Kind {
    Task(Task),
    /// Stamps the event of this number.
    Record(u32),
    /// Nothing; it waits for its dependencies.
    Join,
}

/// A point in a stream: an operation, and everything that is ordered before its end.
#[derive(Debug, Clone)]
pub struct Mark {
    operation: u64,
    clock: Arc<Clock>,
}

impl Mark {
    /// The number of the operation.
    pub fn operation(&self) -> u64 {
        self.operation
    }
}

/// A wait of the host: until the marks are reached, or the context fails.
#[derive(Debug, Clone)]
pub struct Wait {
    pub context: usize,
    pub marks: Vec<Mark>,
}

/// An operation that is ready to run.
#[derive(Debug)]
pub struct Operation {
    pub id: u64,
    pub context: usize,
    pub kind: Kind,
    pub stamp: Stamp,
    pub clock: Arc<Clock>,
}

/// All streams of all contexts, and their operations that did not run yet.
pub struct Streams {
    lanes: Vec<Lane>,
    waiting: HashMap<u64, Waiting>,
    /// Operations whose dependencies all ran.
    ready: Vec<u64>,
    /// Collectives that did not end.
    collectives: BTreeSet<u64>,
    /// What the host has waited for.
    host: Clock,
    next: u64,
    seed: u64,
    random: Random,
}

struct Lane {
    context: usize,
    kind: LaneKind,
    clock: Clock,
    last: Option<u64>,
}

/// How a stream is ordered with the legacy default stream of its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneKind {
    /// The legacy default stream itself, which waits for all blocking streams, and they for it.
    Default,
    Blocking,
    NonBlocking,
}

struct Waiting {
    /// `None` while it runs.
    operation: Option<Operation>,
    dependencies: Vec<u64>,
    /// How many of the dependencies did not run.
    unmet: usize,
    dependents: Vec<u64>,
}

impl Streams {
    pub fn new(seed: u64) -> Streams {
        Streams {
            lanes: Vec::new(),
            waiting: HashMap::new(),
            ready: Vec::new(),
            collectives: BTreeSet::new(),
            host: Clock::default(),
            next: 1,
            seed,
            random: Random(seed),
        }
    }

    /// Adds a stream. Its number is never used again.
    pub fn add(&mut self, context: usize, kind: LaneKind) -> usize {
        self.lanes.push(Lane {
            context,
            kind,
            clock: Clock::default(),
            last: None,
        });
        self.lanes.len() - 1
    }

    pub fn context(&self, lane: usize) -> usize {
        self.lanes[lane].context
    }

    pub fn kind(&self, lane: usize) -> LaneKind {
        self.lanes[lane].kind
    }

    /// A random number of an operation, the same whenever it runs.
    pub fn seed_of(&self, operation: u64) -> u64 {
        Random(self.seed ^ operation.rotate_left(32)).next()
    }

    /// A new random number.
    pub fn random(&mut self) -> u64 {
        self.random.next()
    }

    /// Appends an operation to a stream, after the marks and after what its stream implies.
    pub fn push(&mut self, lane: usize, kind: Kind, after: &[Mark]) -> Mark {
        let id = self.next;
        self.next += 1;
        let Lane {
            context,
            kind: blocking,
            ..
        } = self.lanes[lane];
        let mut clock = self.lanes[lane].clock.clone();
        clock.join(&self.host);
        let mut dependencies: BTreeSet<u64> = self.lanes[lane].last.into_iter().collect();
        for mark in after {
            clock.join(&mark.clock);
            dependencies.insert(mark.operation);
        }
        for other in &self.lanes {
            let implied = match (blocking, other.kind) {
                (LaneKind::Default, LaneKind::Blocking) => true,
                (LaneKind::Blocking, LaneKind::Default) => true,
                (_, _) => false,
            };
            if implied && other.context == context {
                clock.join(&other.clock);
                dependencies.extend(other.last);
            }
        }
        clock.tick(lane);
        let time = clock.get(lane);
        self.lanes[lane].clock = clock.clone();
        self.lanes[lane].last = Some(id);
        let clock = Arc::new(clock);
        let name = match &kind {
            Kind::Task(task) => format!("{} (stream {lane}, operation {time})", task.name),
            _ => String::new(),
        };
        if matches!(&kind, Kind::Task(task) if task.is_collective) {
            self.collectives.insert(id);
        }
        let mut unmet = 0;
        for dependency in &dependencies {
            if let Some(waiting) = self.waiting.get_mut(dependency) {
                waiting.dependents.push(id);
                unmet += 1;
            }
        }
        if unmet == 0 {
            self.ready.push(id);
        }
        let waiting = Waiting {
            operation: Some(Operation {
                id,
                context,
                kind,
                stamp: Stamp {
                    lane,
                    time,
                    operation: name.into(),
                },
                clock: clock.clone(),
            }),
            dependencies: dependencies.into_iter().collect(),
            unmet,
            dependents: Vec::new(),
        };
        self.waiting.insert(id, waiting);
        Mark {
            operation: id,
            clock,
        }
    }

    /// The end of a stream as it is now; `None` while nothing was appended.
    pub fn end(&self, lane: usize) -> Option<Mark> {
        let Lane { clock, last, .. } = &self.lanes[lane];
        Some(Mark {
            operation: (*last)?,
            clock: Arc::new(clock.clone()),
        })
    }

    /// The ends of all streams of a context.
    pub fn ends(&self, context: usize) -> Vec<Mark> {
        let lanes = (0..self.lanes.len()).filter(|&lane| self.lanes[lane].context == context);
        lanes.filter_map(|lane| self.end(lane)).collect()
    }

    /// Whether the operation ran.
    pub fn is_done(&self, mark: &Mark) -> bool {
        !self.waiting.contains_key(&mark.operation)
    }

    /// Notes that the host has waited for the mark: all that it does next is ordered after it.
    pub fn host_waited(&mut self, mark: &Mark) {
        self.host.join(&mark.clock);
    }

    /// How many operations did not run.
    pub fn unfinished(&self) -> usize {
        self.waiting.len()
    }

    /// Whether all operations ran and the host knows it, so that no later one can race with them.
    pub fn is_quiet(&self) -> bool {
        let known = |(index, lane): (usize, &Lane)| self.host.get(index) >= lane.clock.get(index);
        self.waiting.is_empty() && self.lanes.iter().enumerate().all(known)
    }

    /// Chooses the operations that a wait for the marks may run: all, or only those that it needs.
    pub fn choose(&mut self, marks: &[Mark]) -> Choice {
        if self.random.next() & 1 == 0 {
            return Choice::All;
        }
        Choice::Only(self.needed(marks.iter().map(|mark| mark.operation).collect()))
    }

    /// The operations, and what they wait for.
    fn needed(&self, mut open: Vec<u64>) -> HashSet<u64> {
        let mut needed = HashSet::new();
        while let Some(id) = open.pop() {
            if let Some(waiting) = self.waiting.get(&id)
                && needed.insert(id)
            {
                open.extend(&waiting.dependencies);
            }
        }
        needed
    }

    pub fn has_collectives(&self) -> bool {
        !self.collectives.is_empty()
    }

    /// The oldest collective that is ready and newer than `after`.
    pub fn take_collective(&mut self, after: u64) -> Option<Operation> {
        let mut newer = self.collectives.range(after + 1..);
        let id = *newer.find(|id| self.ready.contains(id))?;
        self.take_ready(id)
    }

    /// The operations that collectives wait for, and the collectives.
    pub fn needed_by_collectives(&self) -> HashSet<u64> {
        self.needed(self.collectives.iter().copied().collect())
    }

    /// The oldest operation of these that is ready and no collective. The order is not random, so that the
    /// progress of collectives changes no random number of the host's waits.
    pub fn take_oldest(&mut self, needed: &HashSet<u64>) -> Option<Operation> {
        let ready = self.ready.iter().copied();
        let wanted = ready.filter(|id| needed.contains(id) && !self.collectives.contains(id));
        let id = wanted.min()?;
        self.take_ready(id)
    }

    fn take_ready(&mut self, id: u64) -> Option<Operation> {
        self.ready.retain(|&ready| ready != id);
        // The entry stays until `finish`, so that nothing that depends on it is ready.
        self.waiting.get_mut(&id)?.operation.take()
    }

    /// A random operation that is ready and not excluded, or `None` if none of the choice is. Collectives are
    /// never chosen.
    pub fn take(&mut self, choice: &Choice, excluded: &HashSet<u64>) -> Option<Operation> {
        let ready = self.ready.iter();
        let candidates = ready.filter(|id| match choice {
            Choice::All => !excluded.contains(id),
            Choice::Only(needed) => needed.contains(id) && !excluded.contains(id),
        });
        let candidates: Vec<u64> = candidates
            .filter(|id| !self.collectives.contains(id))
            .copied()
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let chosen = self.random.next() % candidates.len() as u64;
        self.take_ready(candidates[chosen as usize])
    }

    /// Returns an operation that is not done.
    pub fn put_back(&mut self, operation: Operation) {
        if let Some(waiting) = self.waiting.get_mut(&operation.id) {
            self.ready.push(operation.id);
            waiting.operation = Some(operation);
        }
    }

    /// Notes that the operation ran.
    pub fn finish(&mut self, id: u64) {
        self.collectives.remove(&id);
        let done = self.waiting.remove(&id);
        for dependent in done.into_iter().flat_map(|done| done.dependents) {
            if let Some(waiting) = self.waiting.get_mut(&dependent) {
                waiting.unmet -= 1;
                if waiting.unmet == 0 {
                    self.ready.push(dependent);
                }
            }
        }
    }
}

/// Operations that may run during a wait.
pub enum Choice {
    All,
    Only(HashSet<u64>),
}

/// The memory as one operation may use it. It records what the operation touches.
pub struct Access<'a> {
    pub memory: &'a mut Memory,
    pub touched: Touched,
    /// What the operation counts, for the report.
    pub counts: Counts,
    /// The operation's number, the same whenever a pending operation is called.
    pub operation: u64,
    /// A random number.
    pub seed: u64,
    /// Mistakes that the operation finds: kind, message and details.
    pub findings: Vec<(&'static str, String, Value)>,
    /// The only device whose memory the operation reaches; `None` for copies, which reach all.
    device: Option<usize>,
}

impl<'a> Access<'a> {
    pub fn new(memory: &'a mut Memory, operation: u64, seed: u64) -> Access<'a> {
        Access {
            memory,
            touched: Touched::default(),
            counts: Counts::new(),
            operation,
            seed,
            findings: Vec::new(),
            device: None,
        }
    }

    /// Allows the memory of one device only, as for a kernel: there is no peer access.
    pub fn limit_to(&mut self, device: usize) {
        self.device = Some(device);
    }

    pub fn fill(&mut self, address: u64, pattern: &[u8], count: u64) -> Result<(), MemoryFault> {
        self.memory.fill(address, pattern, count)?;
        self.touched.write(address, pattern.len() as u64 * count);
        Ok(())
    }

    /// Copies bytes, initialised or not.
    pub fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), MemoryFault> {
        let snapshot: Snapshot = self.memory.snapshot(from, bytes)?;
        self.touched.read(from, bytes);
        self.memory.restore(to, &snapshot)?;
        self.touched.write(to, bytes);
        Ok(())
    }

    /// Frees an allocation, which is ordered like a write of all its bytes.
    pub fn free(&mut self, address: u64) -> Result<(), FreeError> {
        let range = self.memory.range_of(address);
        self.memory.free(address)?;
        if let Some(range) = range {
            self.touched.write(range.start, range.end - range.start);
        }
        Ok(())
    }

    fn check(&self, address: u64, bytes: u64) -> Result<(), MemoryFault> {
        if self.device.is_some() && self.memory.device_of(address) != self.device {
            return Err(MemoryFault::OutOfBounds { address, bytes });
        }
        Ok(())
    }
}

impl GlobalMemory for Access<'_> {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.check(address, into.len() as u64)?;
        self.memory.read(address, into)?;
        self.touched.read(address, into.len() as u64);
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryFault> {
        self.check(address, bytes.len() as u64)?;
        self.memory.write(address, bytes)?;
        self.touched.write(address, bytes.len() as u64);
        Ok(())
    }
}

/// Sebastiano Vigna's SplitMix64.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task() -> Kind {
        Kind::Task(Task::new("task", |_| Ok(())))
    }

    /// The lanes of the operations in the order in which a wait for the marks runs them.
    fn run(streams: &mut Streams, marks: &[Mark]) -> Vec<usize> {
        let choice = streams.choose(marks);
        let mut order = Vec::new();
        while !marks.iter().all(|mark| streams.is_done(mark)) {
            let operation = streams.take(&choice, &HashSet::new()).unwrap();
            order.push(operation.stamp.lane);
            streams.finish(operation.id);
        }
        order
    }

    #[test]
    fn streams_run_in_every_legal_order_and_no_other() {
        let mut seen = HashSet::new();
        for seed in 0..200 {
            let mut streams = Streams::new(seed);
            let [a, b] = [0, 0].map(|context| streams.add(context, LaneKind::NonBlocking));
            streams.push(a, task(), &[]);
            let fork = streams.push(a, task(), &[]);
            let end_b = streams.push(b, task(), &[fork]);
            let end_a = streams.push(a, task(), &[]);
            seen.insert(run(&mut streams, &[end_a, end_b]));
        }
        assert_eq!(seen, HashSet::from([vec![0, 0, 0, 1], vec![0, 0, 1, 0]]));
    }

    #[test]
    fn a_wait_sometimes_runs_only_what_it_needs() {
        let mut lengths = HashSet::new();
        for seed in 0..50 {
            let mut streams = Streams::new(seed);
            let [a, b] = [0, 0].map(|context| streams.add(context, LaneKind::NonBlocking));
            streams.push(a, task(), &[]);
            let end = streams.push(b, task(), &[]);
            lengths.insert(run(&mut streams, &[end]).len());
        }
        assert_eq!(lengths, HashSet::from([1, 2]));
    }

    #[test]
    fn the_default_stream_is_ordered_with_blocking_streams_of_its_context_only() {
        let mut streams = Streams::new(1);
        let default = streams.add(0, LaneKind::Default);
        let blocking = streams.add(0, LaneKind::Blocking);
        let free = streams.add(0, LaneKind::NonBlocking);
        let other = streams.add(1, LaneKind::Blocking);
        for lane in [blocking, free, other] {
            streams.push(lane, task(), &[]);
        }
        let mark = streams.push(default, task(), &[]);
        let ordered = [blocking, free, other].map(|lane| mark.clock.get(lane));
        assert_eq!(ordered, [1, 0, 0]);
        let after = [blocking, free].map(|lane| streams.push(lane, task(), &[]).clock.get(default));
        assert_eq!(after, [1, 0]);
    }

    /// The background runs what a collective needs, in the order of the calls, and nothing else.
    #[test]
    fn a_collective_brings_along_only_what_it_waits_for() {
        let mut streams = Streams::new(1);
        let [a, b] = [0, 0].map(|context| streams.add(context, LaneKind::NonBlocking));
        streams.push(b, task(), &[]);
        let first = streams.push(a, task(), &[]);
        let collective = Task::collective("collective", |_| Ok(Progress::Done));
        let last = streams.push(a, Kind::Task(collective), &[]);
        assert!(streams.take_collective(0).is_none(), "not its turn");
        let needed = streams.needed_by_collectives();
        let taken = streams.take_oldest(&needed).unwrap();
        assert_eq!(taken.id, first.operation());
        streams.finish(taken.id);
        assert!(streams.take_oldest(&needed).is_none());
        let excluded = HashSet::from([first.operation() - 1]);
        assert!(streams.take(&Choice::All, &excluded).is_none());
        let taken = streams.take_collective(0).unwrap();
        assert_eq!(taken.id, last.operation());
        streams.finish(taken.id);
        assert!(!streams.has_collectives());
    }

    #[test]
    fn streams_are_quiet_once_the_host_waited_for_all() {
        let mut streams = Streams::new(3);
        let lane = streams.add(0, LaneKind::NonBlocking);
        let mark = streams.push(lane, task(), &[]);
        run(&mut streams, std::slice::from_ref(&mark));
        assert!(!streams.is_quiet());
        streams.host_waited(&mark);
        assert!(streams.is_quiet());
    }
}
