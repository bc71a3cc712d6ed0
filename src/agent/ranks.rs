//! The rank processes of one generation on this host.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open,
    pidfd_send_signal, waitid,
};

use super::oom_words;
use super::program::{self, Program, Start};
use crate::job::files;
use crate::job::protocol::{Ending, Order, Report, exit};

/// What happened to a rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It said something.
    Report {
        /// The generation it belongs to.
        generation: u64,
        /// Who.
        rank: u64,
        /// What.
        report: Report,
    },
    /// Its process ended; nothing more will come from it.
    Exited {
        /// The generation it belongs to.
        generation: u64,
        /// Who.
        rank: u64,
        /// How.
        ending: Ending,
    },
}

fn ending(status: ExitStatus) -> Ending {
    match (status.signal(), status.code()) {
        (Some(signal), _) => Ending::Signal(signal),
        (None, code) => Ending::Code(code.and_then(|c| u8::try_from(c).ok()).unwrap_or(1)),
    }
}

/// The processes. Dropping them kills those that still run.
pub struct Ranks {
    first: u64,
    processes: Vec<Process>,
}

struct Process {
    /// A handle on the process, not a number that another process may get once this one is gone.
    handle: OwnedFd,
    input: Option<ChildStdin>,
    /// Of a foreign program, which knows no orders.
    foreign: Option<Foreign>,
}

/// How a foreign program is asked to leave, and ended with all that it has started.
struct Foreign {
    signal: Signal,
    /// Whether it was asked.
    leaving: Arc<AtomicBool>,
    group: Arc<Group>,
}

impl Process {
    fn kill(&self) {
        match &self.foreign {
            Some(foreign) => foreign.group.kill(),
            None => self.signal(Signal::KILL),
        }
    }

    fn signal(&self, signal: Signal) {
        // One that has ended already is all right.
        let _ = pidfd_send_signal(&self.handle, signal);
    }
}

impl Ranks {
    /// Starts them; what they say and how they end goes to `events`.
    pub fn start(start: &Start<'_>, events: &Sender<Event>) -> io::Result<Ranks> {
        let mut ranks = Ranks {
            first: start.first,
            processes: Vec::new(),
        };
        for local in 0..start.count {
            let rank = start.first + local;
            let log = start
                .run
                .join(files::rank_log(start.generation.number, rank));
            if let Some(logs) = log.parent() {
                fs::create_dir_all(logs)?;
            }
            let written = File::create(&log)?;
            let mut child = program::command(start, rank, local, written)?.spawn()?;
            let input = child.stdin.take();
            let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
            let events = events.clone();
            let number = start.generation.number;
            let foreign = match start.program {
                Program::BuiltIn => {
                    thread::spawn(move || watch(child, number, rank, &events));
                    None
                }
                Program::Foreign { drain, .. } => {
                    let leaving = Arc::<AtomicBool>::default();
                    let group = Arc::new(Group::of(&child));
                    let (told, its) = (Arc::clone(&leaving), Arc::clone(&group));
                    thread::spawn(move || wait(child, &its, number, rank, &told, &log, &events));
                    let signal = program::signal(drain);
                    Some(Foreign {
                        signal,
                        leaving,
                        group,
                    })
                }
            };
            ranks.processes.push(Process {
                handle,
                input,
                foreign,
            });
        }
        Ok(ranks)
    }

    /// Gives one rank an order; one that is gone hears nothing.
    pub fn order(&mut self, rank: u64, order: Order) {
        let Some(process) = self.process(rank) else {
            return;
        };
        if let Some(foreign) = &process.foreign {
            match order {
                // Once: for many programs a second signal means at once.
                Order::Drain => {
                    if !foreign.leaving.swap(true, Ordering::AcqRel) {
                        process.signal(foreign.signal);
                    }
                }
                // What was told to leave leaves.
                Order::Stay => {}
                Order::Commit | Order::Stop => process.kill(),
            }
            return;
        }
        let (Some(input), Ok(line)) = (&mut process.input, serde_json::to_string(&order)) else {
            return;
        };
        if writeln!(input, "{line}").is_err() {
            process.input = None;
        }
    }

    /// Gives all ranks an order.
    pub fn order_all(&mut self, order: Order) {
        for rank in self.first..self.first + self.processes.len() as u64 {
            self.order(rank, order);
        }
    }

    /// Kills all that still run.
    pub fn kill(&mut self) {
        self.processes.iter().for_each(Process::kill);
    }

    /// Kills one, if it still runs.
    pub fn kill_one(&mut self, rank: u64) {
        if let Some(process) = self.process(rank) {
            process.kill();
        }
    }

    fn process(&mut self, rank: u64) -> Option<&mut Process> {
        let local = usize::try_from(rank.checked_sub(self.first)?).ok()?;
        self.processes.get_mut(local)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Bytes of a log that fit into a status.
const LAST: u64 = 2000;

/// The last lines of a log, as much as fits into a status; nothing where it cannot be read.
pub fn last_lines(log: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let start = file.metadata()?.len().saturating_sub(LAST);
        file.seek(SeekFrom::Start(start))?;
        let mut end = Vec::new();
        file.take(2 * LAST).read_to_end(&mut end)?;
        Ok(end)
    };
    let end = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&end).into_owned();
    let lines: Vec<&str> = text.lines().rev().take(20).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// Passes a rank's reports on until it closes its output, then its end.
fn watch(mut child: Child, generation: u64, rank: u64, events: &Sender<Event>) {
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let report = serde_json::from_slice(&line).unwrap_or_else(|_| Report::Warning {
                message: format!("rank {rank} printed: {}", String::from_utf8_lossy(&line)),
            });
            let event = Event::Report {
                generation,
                rank,
                report,
            };
            if events.send(event).is_err() {
                break;
            }
        }
    }
    tell_end(ended(&mut child), generation, rank, events);
}

/// Waits for a foreign program. It says nothing of itself: once it runs it is taken to be in the
/// world, and whatever ends it after it was told to leave is its way of leaving.
fn wait(
    child: Child,
    group: &Group,
    generation: u64,
    rank: u64,
    leaving: &AtomicBool,
    log: &Path,
    events: &Sender<Event>,
) {
    let ready = Event::Report {
        generation,
        rank,
        report: Report::Ready,
    };
    if events.send(ready).is_err() {
        return;
    }
    let ending = match (group.end(child), leaving.load(Ordering::Acquire)) {
        (Ending::Signal(9), _) => Ending::Signal(9),
        (_, true) => Ending::Code(exit::DRAINED),
        (Ending::Code(exit::DRAINED), false) => Ending::Unasked,
        (ending, false) => ending,
    };
    let words = last_lines(log);
    let said = oom_words::find(&words);
    if let Some(message) = match ending {
        Ending::Code(exit::OUT_OF_MEMORY) => Some(said.unwrap_or("exit code 76")),
        Ending::Code(exit::FINISHED | exit::DRAINED) | Ending::Unasked => None,
        _ => said,
    } {
        let message = message.to_owned();
        let report = Report::OutOfMemory { message };
        let _ = events.send(Event::Report {
            generation,
            rank,
            report,
        });
    }
    tell_end(ending, generation, rank, events);
}

/// The process group of a foreign program: it and all that it has started. Its number is nobody
/// else's until the program was waited for; then there is none any more.
struct Group(Mutex<Option<Pid>>);

impl Group {
    fn of(child: &Child) -> Group {
        Group(Mutex::new(Some(Pid::from_child(child))))
    }

    fn number(&self) -> MutexGuard<'_, Option<Pid>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kill(&self) {
        if let Some(group) = *self.number() {
            // Nobody may be left in it.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Waits until the program has ended, and ends what it has started and left behind: of an older
    /// generation nothing may live on.
    fn end(&self, mut child: Child) -> Ending {
        let pid = Pid::from_child(&child);
        let exited = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), exited) {}
        self.kill();
        let mut number = self.number();
        let ending = ended(&mut child);
        *number = None;
        ending
    }
}

/// A process that cannot be waited for is gone.
fn ended(child: &mut Child) -> Ending {
    child.wait().map_or(Ending::Signal(9), ending)
}

fn tell_end(ending: Ending, generation: u64, rank: u64, events: &Sender<Event>) {
    let _ = events.send(Event::Exited {
        generation,
        rank,
        ending,
    });
}
