//! The rank processes of one generation on this host.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, kill_process_group,
    pidfd_open, pidfd_send_signal, prlimit, waitid,
};

use super::OomKills;
use super::program::{self, ExternalProgram, Start};
use crate::external_trainer::{Progress, failure_causes};
use crate::lifecycle::files;
use crate::lifecycle::protocol::{Assignment, Ending, Order, Report, exit};
use crate::util::input;
use crate::util::lock::lock;

/// Time in which killed processes end.
const ENDING: Duration = Duration::from_secs(5);
/// Time in which an aborted program writes its stacks.
const ABORT: Duration = Duration::from_secs(5);

/// What happened to a rank of a generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub generation: u64,
    pub rank: u64,
    pub news: News,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum News {
    Report(Box<Report>),
    /// What an external trainer has posted on its host.
    Posted(Progress),
    /// A line that it has written to its log, on a disk that the launcher does not share.
    Printed(String),
    /// Its stacks, on such a disk.
    Stacks(String),
    /// The rank's process ended; no more events follow.
    Exited(Ending),
}

/// Where ranks and threads send their events, each of which becomes an input of a loop.
pub fn events_into<Event: Send + 'static, Input: Send + 'static>(
    inputs: &Sender<Input>,
    input: fn(Event) -> Input,
) -> Sender<Event> {
    let (events, happened) = channel();
    let inputs = inputs.clone();
    thread::spawn(move || {
        for event in happened {
            if inputs.send(input(event)).is_err() {
                return;
            }
        }
    });
    events
}

/// In place of a generation's number, in events of processes that stand by. Their numbers are in place of ranks.
pub const STANDING_BY: u64 = 0;

/// A rank of a generation, which a process is.
#[derive(Debug, Clone, Copy)]
struct Place {
    generation: u64,
    rank: u64,
}

/// The place that a process has been given.
struct Told {
    place: Place,
    /// How it has ended.
    ending: Option<Ending>,
}

/// Sends the events of a process.
struct Reporter {
    /// Where the process is by its reports.
    place: Place,
    told: Arc<Mutex<Told>>,
    events: Sender<Event>,
}

impl Place {
    fn event(self, news: News) -> Event {
        let Place { generation, rank } = self;
        Event {
            generation,
            rank,
            news,
        }
    }
}

impl Reporter {
    /// False if the agent has ended.
    fn send(&self, news: News) -> bool {
        let event = match news {
            News::Exited(ending) => {
                let mut told = lock(&self.told);
                told.ending = Some(ending);
                // The process does not go there any more.
                told.place.event(news)
            }
            _ => self.place.event(news),
        };
        self.events.send(event).is_ok()
    }

    fn report(&self, report: Report) -> bool {
        self.send(News::Report(Box::new(report)))
    }
}

/// The rank processes. Dropping this kills those that still run.
pub struct Ranks {
    first: u64,
    processes: Vec<Process>,
    /// Processes that stand by, with their numbers.
    spares: Vec<(u64, Process)>,
    /// Kills by the kernel since they were started.
    oom_kills: OomKills,
}

struct Process {
    /// A pidfd: unlike a process id it is never reused for another process.
    handle: OwnedFd,
    told: Arc<Mutex<Told>>,
    input: Option<ChildStdin>,
    /// Set for an external trainer, which understands no control messages.
    external: Option<Arc<Group>>,
}

impl Process {
    fn kill(&self) {
        match &self.external {
            Some(group) => group.kill(),
            None => self.signal(Signal::KILL),
        }
    }

    /// Sends an order to a rank of the built-in trainer.
    fn tell(&mut self, order: &Order) {
        let (Some(input), Ok(line)) = (&mut self.input, serde_json::to_string(order)) else {
            return;
        };
        if writeln!(input, "{line}").is_err() {
            self.input = None;
        }
    }

    fn signal(&self, signal: Signal) {
        // An error means that the process has already ended.
        let _ = pidfd_send_signal(&self.handle, signal);
    }
}

impl Ranks {
    /// Starts the ranks; their reports and exits go to `events`. `program`: the external trainer, if it runs.
    pub fn start(
        start: &Start<'_>,
        program: Option<&ExternalProgram>,
        events: &Sender<Event>,
    ) -> io::Result<Ranks> {
        let mut ranks = Ranks::none(start.first);
        for local in 0..start.count {
            let process = Process::start(start, program, local, events)?;
            ranks.processes.push(process);
        }
        Ok(ranks)
    }

    /// No ranks yet: processes may stand by.
    pub fn none(first: u64) -> Ranks {
        Ranks {
            first,
            processes: Vec::new(),
            spares: Vec::new(),
            oom_kills: OomKills::watch(),
        }
    }

    fn process(&mut self, rank: u64) -> Option<&mut Process> {
        let local = usize::try_from(rank.checked_sub(self.first)?).ok()?;
        self.processes.get_mut(local)
    }
}

impl Process {
    /// Starts the process of a rank, given by its index on this host.
    fn start(
        start: &Start<'_>,
        program: Option<&ExternalProgram>,
        local: u64,
        events: &Sender<Event>,
    ) -> io::Result<Process> {
        let rank = start.first + local;
        let generation = start.generation.number;
        let log = files::rank_log(generation, rank);
        let command = |log| program::command(start, program, rank, local, log);
        Process::run(
            start,
            Place { generation, rank },
            &log,
            command,
            program,
            events,
        )
    }

    /// Starts a process that stands by, with this number.
    fn stand_by(start: &Start<'_>, number: u64, events: &Sender<Event>) -> io::Result<Process> {
        let place = Place {
            generation: STANDING_BY,
            rank: number,
        };
        let log = files::spare_log(start.generation.number, number);
        let command = |log| program::spare(start, log);
        Process::run(start, place, &log, command, None, events)
    }

    fn run(
        start: &Start<'_>,
        place: Place,
        log: &Path,
        command: impl FnOnce(File) -> io::Result<Command>,
        program: Option<&ExternalProgram>,
        events: &Sender<Event>,
    ) -> io::Result<Process> {
        let told = Arc::new(Mutex::new(Told {
            place,
            ending: None,
        }));
        let reporter = Reporter {
            place,
            told: Arc::clone(&told),
            events: events.clone(),
        };
        let log = start.run_dir.join(log);
        if let Some(logs) = log.parent() {
            fs::create_dir_all(logs)?;
        }
        let written = File::create(&log)?;
        let mut child = command(written)?.spawn()?;
        let input = child.stdin.take();
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let external = match program {
            None => {
                let run_dir = start.run_dir.to_path_buf();
                thread::Builder::new().spawn(move || watch(child, &run_dir, log, reporter))?;
                None
            }
            Some(program) => {
                let drain = program::signal(program.drain_signal);
                let group = Arc::new(Group::of(&child, drain));
                let waited = Arc::clone(&group);
                let port = start.generation.master.port;
                thread::Builder::new()
                    .spawn(move || wait(child, &waited, &log, port, &reporter))?;
                Some(group)
            }
        };
        Ok(Process {
            handle,
            told,
            input,
            external,
        })
    }

    /// Gives it the place of a rank.
    fn place(&mut self, start: &Start<'_>, rank: u64, events: &Sender<Event>) {
        let generation = start.generation.number;
        let place = Place { generation, rank };
        let mut told = lock(&self.told);
        told.place = place;
        // Who follows the generation has not heard of it.
        if let Some(ending) = told.ending {
            let _ = events.send(place.event(News::Exited(ending)));
        }
        drop(told);
        self.tell(&Order::Continue(Assignment {
            generation,
            rank,
            threads: program::threads(start),
            first_of_host: rank == start.first,
            key: start.key.reveal(),
        }));
    }
}

/// The ranks of a generation on one machine: this one, or another host.
pub trait RankGroup {
    /// The number of its host ([`crate::lifecycle::Member::slot`]); 0: this machine.
    fn slot(&self) -> u64 {
        0
    }

    fn ranks(&self) -> Range<u64>;

    /// Whether the kernel's out-of-memory killer has struck there since they were started.
    fn is_oom_killed(&self) -> bool;

    /// Sends one rank an order; ignored if the rank has ended.
    fn order(&mut self, rank: u64, order: Order);

    /// Dropping it does not kill its ranks: their host lets some continue in another generation.
    fn release(&mut self) {}

    /// Lets the processes of these ranks continue as the first ranks of another generation, in this order, and kills the
    /// others. Its further ranks are these processes that stand by, and then new ones.
    ///
    /// # Errors
    /// A process cannot be started.
    fn carry_on(
        &mut self,
        _start: &Start<'_>,
        _kept: &[u64],
        _spares: &[u64],
        _events: &Sender<Event>,
    ) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Starts a process that stands by, with this number, as `start` says of its rank.
    ///
    /// # Errors
    /// The process cannot be started.
    fn stand_by(
        &mut self,
        start: &Start<'_>,
        number: u64,
        events: &Sender<Event>,
    ) -> io::Result<()>;

    /// Kills a process that stands by, if it is there.
    fn dismiss(&mut self, number: u64);

    /// This checkpoint is committed in the bucket of a run whose hosts have their own disks.
    fn committed(&mut self, _path: &str) {}

    /// Kills one rank if it still runs.
    fn kill_one(&mut self, rank: u64);

    /// Kills all running ranks.
    fn kill(&mut self);

    /// Ends the ranks of an external trainer so that Python programs write their stacks into their logs, and kills them a
    /// little later.
    fn abort(&mut self);
}

impl RankGroup for Ranks {
    fn ranks(&self) -> Range<u64> {
        self.first..self.first + self.processes.len() as u64
    }

    fn is_oom_killed(&self) -> bool {
        self.oom_kills.raised()
    }

    fn order(&mut self, rank: u64, order: Order) {
        let Some(process) = self.process(rank) else {
            return;
        };
        if let Some(group) = &process.external {
            match order {
                // Sent once: many programs exit immediately on a second signal.
                Order::Drain => {
                    if !group.leaving.swap(true, Ordering::AcqRel) {
                        process.signal(group.drain);
                    }
                }
                // A drained trainer cannot be kept, and none of its processes waits.
                Order::CancelDrain | Order::Pause => {}
                Order::Commit | Order::Continue(_) | Order::Stop => process.kill(),
            }
            return;
        }
        process.tell(&order);
    }

    fn carry_on(
        &mut self,
        start: &Start<'_>,
        kept: &[u64],
        spares: &[u64],
        events: &Sender<Event>,
    ) -> io::Result<()> {
        let earlier = std::mem::replace(&mut self.first, start.first);
        let processes = std::mem::take(&mut self.processes);
        let mut before: BTreeMap<u64, Process> = (earlier..).zip(processes).collect();
        let kept = kept.iter().filter_map(|rank| before.remove(rank));
        let mut chosen: Vec<Process> = kept.collect();
        let taken = (self.spares).extract_if(.., |(number, _)| spares.contains(number));
        chosen.extend(taken.map(|(_, process)| process));
        for (process, rank) in chosen.iter_mut().zip(start.first..) {
            process.place(start, rank, events);
        }
        self.processes = chosen;
        end(before.values());
        for local in self.processes.len() as u64..start.count {
            let process = Process::start(start, None, local, events)?;
            self.processes.push(process);
        }
        Ok(())
    }

    fn stand_by(
        &mut self,
        start: &Start<'_>,
        number: u64,
        events: &Sender<Event>,
    ) -> io::Result<()> {
        let process = Process::stand_by(start, number, events)?;
        self.spares.push((number, process));
        Ok(())
    }

    fn dismiss(&mut self, number: u64) {
        let dismissed = self.spares.extract_if(.., |(it, _)| *it == number);
        dismissed.for_each(|(_, process)| process.kill());
    }

    fn kill_one(&mut self, rank: u64) {
        if let Some(process) = self.process(rank) {
            process.kill();
        }
    }

    fn kill(&mut self) {
        self.processes.iter().for_each(Process::kill);
    }

    fn abort(&mut self) {
        for process in &self.processes {
            let Some(group) = &process.external else {
                continue;
            };
            group.limit_core_dump();
            process.signal(Signal::ABORT);
            let group = Arc::clone(group);
            thread::spawn(move || {
                thread::sleep(ABORT);
                group.kill();
            });
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        end(self.spares.iter().map(|(_, process)| process));
    }
}

/// Kills processes and waits until their devices are free for those that follow.
fn end<'p>(processes: impl Iterator<Item = &'p Process>) {
    let killed: Vec<&Process> = processes.inspect(|process| process.kill()).collect();
    let deadline = Instant::now() + ENDING;
    for process in killed {
        // A pidfd can be read once its process has ended.
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        let mut ended = [PollFd::new(&process.handle, PollFlags::IN)];
        // One that does not end holds no other up.
        let _ = poll(&mut ended, left.as_ref());
    }
}

/// Size limit of a log tail, bytes; a larger one does not fit into a status.
const LAST: u64 = 2000;
/// Size limit of a backtrace, bytes. The reason of a failure precedes it.
const BACKTRACE: u64 = 64 << 10;
/// Exit code of a Rust program that panics.
const PANICKED: u8 = 101;

/// The last bytes of a log as text; empty if the log cannot be read.
fn end_of(log: &Path, bytes: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = input::open(log)?;
        let start = file.metadata()?.len().saturating_sub(bytes);
        file.seek(SeekFrom::Start(start))?;
        let mut end = Vec::new();
        file.take(2 * bytes).read_to_end(&mut end)?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// The last lines of a log, up to the size limit of a status; empty if the log cannot be read.
pub fn last_lines(log: &Path) -> String {
    let text = end_of(log, LAST);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Forwards a rank's reports until it closes its output, then its exit.
fn watch(mut child: Child, run_dir: &Path, mut log: PathBuf, mut reporter: Reporter) {
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let report = serde_json::from_slice(&line).unwrap_or_else(|_| Report::Warning {
                message: format!(
                    "rank {} printed: {}",
                    reporter.place.rank,
                    String::from_utf8_lossy(&line)
                ),
            });
            if let Report::Entered { generation, rank } = report {
                reporter.place = Place { generation, rank };
                log = run_dir.join(files::rank_log(generation, rank));
            }
            if !reporter.report(report) {
                break;
            }
        }
    }
    let ending = ended(&mut child);
    let words = || end_of(&log, BACKTRACE);
    // A small allocation that fails aborts the process.
    if ending == Ending::Signal(Signal::ABORT.as_raw())
        && let Some(message) = failure_causes::out_of_memory(&words())
    {
        reporter.report(Report::OutOfMemory { message });
    } else if ending == Ending::Code(PANICKED)
        && let Some(message) = failure_causes::refused_thread(&words())
    {
        // A thread takes the same memory in every micro-batch.
        reporter.report(Report::Failed {
            message,
            deterministic: true,
        });
    }
    reporter.send(News::Exited(ending));
}

/// Waits for an external trainer. It sends no reports: once started it counts as part of the world,
/// and every exit after the drain signal counts as drained. `port`: that of the rendezvous.
fn wait(child: Child, group: &Group, log: &Path, port: u16, reporter: &Reporter) {
    if !reporter.report(Report::Ready) {
        return;
    }
    let id = Pid::from_child(&child);
    let ending = match (group.end(child), group.leaving.load(Ordering::Acquire)) {
        (Ending::Signal(9), _) => Ending::Signal(9),
        (_, true) => Ending::Code(exit::DRAINED),
        (Ending::Code(exit::DRAINED), false) => Ending::Unrequested,
        (ending, false) => ending,
    };
    let words = last_lines(log);
    let out_of_memory = failure_causes::out_of_memory(&words);
    if let Some(message) = match ending {
        Ending::Code(exit::OUT_OF_MEMORY) => {
            Some(out_of_memory.unwrap_or_else(|| "exit code 76".to_owned()))
        }
        Ending::Code(exit::FINISHED | exit::DRAINED) | Ending::Unrequested => None,
        _ => out_of_memory,
    } {
        reporter.report(Report::OutOfMemory { message });
    } else if let (Ending::Code(1..=2), Some(message)) = (ending, failure_causes::missing(&words)) {
        let message = failure_causes::of_missing(message);
        reporter.report(Report::Failed {
            message,
            deterministic: true,
        });
    } else if let (Ending::Code(1), Some(message)) = (ending, failure_causes::taken_port(&words)) {
        let message = failure_causes::of_taken_port(message, port);
        reporter.report(Report::Failed {
            message,
            deterministic: false,
        });
    }
    reporter.send(News::Exited(ending));
    // As the first process of its container, the agent is the parent of a killed trainer's children.
    while waitid(WaitId::Pgid(Some(id)), WaitIdOptions::EXITED).is_ok() {}
}

/// Process group of an external trainer, including its child processes.
struct Group {
    /// `None` once the process is reaped: its id may be used again.
    id: Mutex<Option<Pid>>,
    drain: Signal,
    /// Whether the drain signal was sent.
    leaving: AtomicBool,
}

impl Group {
    fn of(child: &Child, drain: Signal) -> Group {
        Group {
            id: Mutex::new(Some(Pid::from_child(child))),
            drain,
            leaving: AtomicBool::new(false),
        }
    }

    /// A core dump of the program could fill the node's disk.
    fn limit_core_dump(&self) {
        let none = Rlimit {
            current: Some(0),
            maximum: Some(0),
        };
        if let Some(group) = *lock(&self.id) {
            // A program that has ended writes none.
            let _ = prlimit(Some(group), Resource::Core, none);
        }
    }

    fn kill(&self) {
        if let Some(group) = *lock(&self.id) {
            // The group may already be empty.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Waits for the program to end, then kills its remaining children: no process of an older
    /// generation may survive.
    fn end(&self, mut child: Child) -> Ending {
        let pid = Pid::from_child(&child);
        let exited = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), exited) {}
        self.kill();
        let mut id = lock(&self.id);
        let ending = ended(&mut child);
        *id = None;
        ending
    }
}

/// Waits for the end of a process. One that cannot be waited for has ended.
fn ended(child: &mut Child) -> Ending {
    let Ok(status) = child.wait() else {
        return Ending::Signal(9);
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    match status.signal() {
        Some(signal) => Ending::Signal(signal),
        None => Ending::Code(code.unwrap_or(1)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    fn reporter(events: Sender<Event>) -> Reporter {
        let place = Place {
            generation: 1,
            rank: 0,
        };
        Reporter {
            place,
            told: Arc::new(Mutex::new(Told {
                place,
                ending: None,
            })),
            events,
        }
    }

    #[test]
    fn a_process_reports_for_its_place_and_ends_where_it_has_been_placed() {
        let child = Command::new("echo")
            .arg(
                r#"{"report":"alive"}
{"report":"entered","generation":2,"rank":3}
{"report":"ready"}"#,
            )
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (events, received) = channel();
        let reporter = reporter(events);
        // It has not read the last order.
        lock(&reporter.told).place = Place {
            generation: 4,
            rank: 1,
        };
        watch(child, Path::new("/nowhere"), PathBuf::new(), reporter);
        let places: Vec<(u64, u64)> = received
            .iter()
            .map(|event| (event.generation, event.rank))
            .collect();
        assert_eq!(places, [(1, 0), (2, 3), (2, 3), (4, 1)]);
    }

    /// What is reported of a built-in rank that ends by a shell command, with these lines before a backtrace in its log.
    fn watched(line: &str, end: &str) -> Vec<News> {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let frames = "  12: evenkeel::train::rank::live\n".repeat(500);
        write!(log, "{line}\nstack backtrace:\n{frames}").unwrap();
        let child = Command::new("sh")
            .args(["-c", end])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (events, received) = channel();
        let log = log.path().to_path_buf();
        watch(child, Path::new("/nowhere"), log, reporter(events));
        received.iter().map(|event| event.news).collect()
    }

    #[test]
    fn a_failed_allocation_is_out_of_memory_whatever_its_size_and_its_backtrace() {
        let message = "memory allocation of 48 B failed".to_owned();
        assert_eq!(
            watched("memory allocation of 48 bytes failed", "kill -ABRT $$"),
            [
                News::Report(Box::new(Report::OutOfMemory { message })),
                News::Exited(Ending::Signal(6)),
            ]
        );
    }

    #[test]
    fn a_rank_that_can_start_no_thread_is_not_restarted() {
        let line = "failed to spawn thread: Os { code: 11, kind: WouldBlock, message: \"Resource temporarily unavailable\" }";
        let news = watched(line, "exit 101");
        let [News::Report(report), News::Exited(Ending::Code(101))] = news.as_slice() else {
            panic!("{news:?}");
        };
        let Report::Failed {
            message,
            deterministic: true,
        } = report.as_ref()
        else {
            panic!("{report:?}");
        };
        insta::assert_snapshot!(message, @"a thread cannot be started; raise the limits of memory (`ulimit -v`) and of processes (`ulimit -u`, or those of the container)");
    }

    #[test]
    fn a_killed_external_trainer_leaves_no_zombie() {
        // Like the first process of a container.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; kill -9 $$"])
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut orphan = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut orphan).unwrap();
        let (events, received) = channel();
        let group = Group::of(&child, Signal::TERM);
        let reporter = reporter(events);
        wait(child, &group, Path::new("/nowhere"), 1, &reporter);
        drop(reporter);
        let last = received.iter().last().map(|event| event.news);
        assert_eq!(last, Some(News::Exited(Ending::Signal(9))));
        assert!(!Path::new("/proc").join(orphan.trim()).exists());
    }
}
