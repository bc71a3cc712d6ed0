//! Properties of streams, over random programs and random orders.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use emulated_gpu::config::Config;
use emulated_gpu::graph::CaptureMode;
use emulated_gpu::launch::GlobalMemory;
use emulated_gpu::launch::Program;
use emulated_gpu::machine::Machine;
use emulated_gpu::scripted::Scripted;
use emulated_gpu::status::Status;
use emulated_gpu::stream::{Access, LaneKind, Progress, Task};
use proptest::prelude::*;

/// Bytes of a buffer. Operations touch one half.
const BUFFER: u64 = 8;
const BUFFERS: usize = 3;
const STREAMS: usize = 3;

/// `to = 3 * to + from`, byte by byte, on one stream.
#[derive(Debug, Clone)]
struct Step {
    stream: usize,
    /// Buffer and half.
    from: (usize, u64),
    to: (usize, u64),
    /// Earlier steps that the stream waits for before this one.
    waits: Vec<usize>,
}

impl Step {
    fn conflicts(&self, other: &Step) -> bool {
        self.to == other.to || self.to == other.from || self.from == other.to
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let place = || (0..BUFFERS, 0u64..2);
    let step = (
        0..STREAMS,
        place(),
        place(),
        proptest::collection::vec(any::<prop::sample::Index>(), 0..3),
    );
    proptest::collection::vec(step, 1..14).prop_map(|steps| {
        let steps = steps.into_iter().enumerate();
        let steps = steps.map(|(index, (stream, from, to, waits))| Step {
            stream,
            from,
            to,
            waits: match index {
                0 => Vec::new(),
                _ => waits.iter().map(|wait| wait.index(index)).collect(),
            },
        });
        steps.collect()
    })
}

/// Adds a wait for every earlier step that touches the same bytes.
fn synchronised(mut steps: Vec<Step>) -> Vec<Step> {
    for index in 0..steps.len() {
        let conflicts = (0..index).filter(|&earlier| steps[index].conflicts(&steps[earlier]));
        steps[index].waits = conflicts.collect();
    }
    steps
}

/// Whether two steps on the same bytes have no order, by the transitive closure of streams and waits.
fn has_race(steps: &[Step]) -> bool {
    let mut before = vec![vec![false; steps.len()]; steps.len()];
    for later in 0..steps.len() {
        for earlier in (0..later).rev() {
            let same_stream = steps[earlier].stream == steps[later].stream;
            // A wait orders its stream, not the step alone, but a later step of the stream follows this one.
            if same_stream || steps[later].waits.contains(&earlier) {
                before[earlier][later] = true;
                for row in &mut before[..earlier] {
                    row[later] |= row[earlier];
                }
            }
        }
    }
    let pairs = (0..steps.len()).flat_map(|later| (0..later).map(move |earlier| (earlier, later)));
    pairs
        .filter(|&(earlier, later)| steps[earlier].conflicts(&steps[later]))
        .any(|(earlier, later)| !before[earlier][later])
}

/// The memory after the steps in their order, `rounds` times.
fn expected(steps: &[Step], rounds: usize) -> Vec<u8> {
    let mut memory: Vec<u8> = (0..BUFFER as u8 * BUFFERS as u8).collect();
    let at = |(buffer, half): (usize, u64)| buffer * BUFFER as usize + half as usize * 4;
    for step in (0..rounds).flat_map(|_| steps) {
        for byte in 0..4 {
            let from = memory[at(step.from) + byte];
            let to = &mut memory[at(step.to) + byte];
            *to = to.wrapping_mul(3).wrapping_add(from);
        }
    }
    memory
}

struct Run {
    machine: Machine,
    buffers: Vec<u64>,
    streams: Vec<usize>,
}

impl Run {
    fn new(seed: u64) -> Run {
        let config = Config {
            seed,
            ..Config::default()
        };
        let mut machine = Machine::new(config, Scripted::load);
        machine.retain(0);
        let buffers = (0..BUFFERS as u8).map(|buffer| {
            let address = machine.allocate(0, BUFFER).unwrap();
            let first = buffer * BUFFER as u8;
            let bytes: Vec<u8> = (first..first + BUFFER as u8).collect();
            machine.memory.write(address, &bytes).unwrap();
            address
        });
        let buffers = buffers.collect();
        let streams =
            (0..STREAMS).map(|_| machine.create_stream(0, LaneKind::NonBlocking).unwrap());
        let streams = streams.collect();
        Run {
            machine,
            buffers,
            streams,
        }
    }

    /// Appends the steps, with an event for each.
    fn append(&mut self, steps: &[Step]) {
        let mut events = Vec::new();
        for step in steps {
            let stream = self.streams[step.stream];
            for &wait in &step.waits {
                self.machine.wait_for_event(stream, events[wait]).unwrap();
            }
            let at = |(buffer, half): (usize, u64)| self.buffers[buffer] + 4 * half;
            let (from, to) = (at(step.from), at(step.to));
            let work = move |access: &mut Access<'_>| {
                let (mut add, mut value) = ([0; 4], [0; 4]);
                access.read(from, &mut add)?;
                access.read(to, &mut value)?;
                for (value, add) in value.iter_mut().zip(add) {
                    *value = value.wrapping_mul(3).wrapping_add(add);
                }
                Ok(access.write(to, &value)?)
            };
            let task = Task::new(&format!("{step:?}"), work);
            self.machine.submit(stream, task).unwrap();
            let event = self.machine.create_event(0, false).unwrap();
            self.machine.record(event, stream).unwrap();
            events.push(event);
        }
    }

    /// Waits for everything and returns the memory.
    fn finish(&mut self) -> Result<Vec<u8>, Status> {
        let end = self.machine.all_of(0);
        assert!(self.machine.advance(&end)?);
        let mut memory = Vec::new();
        for &buffer in &self.buffers {
            let mut bytes = [0; BUFFER as usize];
            self.machine.memory.read(buffer, &mut bytes).unwrap();
            memory.extend(bytes);
        }
        Ok(memory)
    }
}

#[test]
fn destroying_a_context_drops_pending_operations() {
    let mut run = Run::new(0);
    let [one, two, _] = run.streams[..] else {
        unreachable!()
    };
    let mark = run
        .machine
        .submit(one, Task::polled("waits", |_| Ok(Progress::Pending)));
    let mark = mark.unwrap().unwrap();
    run.machine
        .submit(two, Task::new("runs", |_| Ok(())))
        .unwrap();
    run.machine.release(0).unwrap();
    assert!(run.machine.streams.is_done(&mark));
    assert_eq!(run.machine.streams.unfinished(), 0);
    assert_eq!(run.machine.release(0), Err(Status::InvalidContext));
    run.machine.retain(0);
    assert_eq!(run.machine.check(0), Ok(()));
}

/// A bug in the emulator fails the context; it neither hangs nor passes.
#[test]
fn a_panic_of_an_operation_is_a_failed_launch() {
    let mut run = Run::new(0);
    let stream = run.streams[0];
    let task = Task::new("panics", |_| panic!("the operation"));
    run.machine.submit(stream, task).unwrap();
    assert_eq!(run.finish(), Err(Status::LaunchFailed));
}

/// A collective waits for another stream, here also for the host.
#[test]
fn a_pending_operation_keeps_only_what_follows_it_from_running() {
    for seed in 0..20 {
        let mut run = Run::new(seed);
        let [one, two, third] = run.streams[..] else {
            unreachable!()
        };
        let [met, allowed] = [0, 1].map(|_| Arc::new(AtomicBool::new(false)));
        let (meets, waits, host) = (met.clone(), met.clone(), allowed.clone());
        let pending = Task::polled("waits", move |_| {
            let is_done = waits.load(Ordering::Relaxed) && host.load(Ordering::Relaxed);
            Ok(if is_done {
                Progress::Done
            } else {
                Progress::Pending
            })
        });
        run.machine.submit(one, pending).unwrap();
        let follower = Task::new("follows", |_| Ok(()));
        run.machine.submit(one, follower).unwrap();
        let meets = Task::new("meets", move |_| {
            meets.store(true, Ordering::Relaxed);
            Ok(())
        });
        run.machine.submit(two, meets).unwrap();
        let [first, other] = [one, third].map(|stream| run.machine.end_of(stream).unwrap());
        assert_eq!(run.machine.advance(&first), Ok(false));
        assert!(
            met.load(Ordering::Relaxed),
            "the wait runs what the pending operation needs"
        );
        assert_eq!(run.machine.poll(&first), Err(Status::NotReady));
        assert_eq!(
            run.machine.advance(&other),
            Ok(true),
            "another stream is not kept"
        );
        allowed.store(true, Ordering::Relaxed);
        assert_eq!(run.machine.advance(&first), Ok(true));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_program_with_all_its_events_has_one_result(steps in steps(), seeds in any::<[u64; 4]>()) {
        let steps = synchronised(steps);
        for seed in seeds {
            let mut run = Run::new(seed);
            run.append(&steps);
            prop_assert_eq!(run.finish(), Ok(expected(&steps, 1)));
        }
    }

    /// A race is reported if and only if two steps on the same bytes have no order, whatever order ran.
    #[test]
    fn races_are_found_exactly(steps in steps(), seeds in any::<[u64; 4]>()) {
        for seed in seeds {
            let mut run = Run::new(seed);
            run.append(&steps);
            let result = run.finish();
            if has_race(&steps) {
                prop_assert_eq!(result, Err(Status::LaunchFailed));
            } else {
                prop_assert_eq!(result, Ok(expected(&steps, 1)));
            }
        }
    }

    /// A graph of a program is the program, also twice and with operations around it.
    #[test]
    fn a_replayed_capture_equals_the_program(steps in steps(), seed in any::<u64>()) {
        let steps = synchronised(steps);
        let mut run = Run::new(seed);
        let origin = run.streams[0];
        run.machine.begin_capture(origin, CaptureMode::Global).unwrap();
        for from_origin in [true, false] {
            if !from_origin {
                run.append(&steps);
            }
            for index in 1..STREAMS {
                let stream = run.streams[index];
                let event = run.machine.create_event(0, false).unwrap();
                let (from, to) = if from_origin { (origin, stream) } else { (stream, origin) };
                run.machine.record(event, from).unwrap();
                run.machine.wait_for_event(to, event).unwrap();
            }
        }
        let graph = run.machine.end_capture(origin).unwrap();
        let executable = run.machine.instantiate(0, graph).unwrap();
        for &stream in &run.streams[..2] {
            run.machine.launch_graph(executable, stream).unwrap();
        }
        prop_assert_eq!(run.finish(), Ok(expected(&steps, 2)));
    }
}
