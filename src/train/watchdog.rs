//! Detects that this rank makes no progress although its process lives: a computation that does not end, a device or
//! a file that does not answer. It writes down the stacks and reports it; the agent decides what follows.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::orders::report;
use super::stacks;
use crate::comm::activity::Activity;
use crate::lifecycle::protocol::Report;
use crate::lifecycle::stall::{ProgressDeadline, STACKS, StallClock};
use crate::util::stderr;

/// Longest wait for the file of the stacks, whose volume may be what does not answer.
const WRITE: Duration = STACKS.saturating_sub(stacks::ANSWER);

/// Time between two calls of [`EverySecond`].
const INTERVAL: Duration = Duration::from_secs(1);

/// Acts until it is dropped.
pub struct EverySecond {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl EverySecond {
    /// Calls `act` at once and then every second.
    pub fn start(mut act: impl FnMut() + Send + 'static) -> EverySecond {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                act();
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        EverySecond {
            end: Some(end),
            thread: Some(thread),
        }
    }
}

/// Waits for the end of the last call.
impl Drop for EverySecond {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // The thread cannot fail.
            let _ = thread.join();
        }
    }
}

struct Watchdog {
    activity: Arc<Activity>,
    clock: StallClock,
    /// Number of calls at the last look.
    calls: u64,
    /// File of the stacks.
    stacks: PathBuf,
    /// The stacks of this stall are written.
    written: bool,
}

/// Watches this rank, whose main thread is the caller, until the result is dropped.
pub fn watch(activity: Arc<Activity>, deadline: ProgressDeadline, stacks: PathBuf) -> EverySecond {
    stacks::prepare();
    let mut watchdog = Watchdog {
        activity,
        clock: StallClock::of_rank(deadline),
        calls: 0,
        stacks,
        written: false,
    };
    EverySecond::start(move || {
        if let Some(news) = watchdog.look() {
            report(&news);
        }
    })
}

impl Watchdog {
    fn look(&mut self) -> Option<Report> {
        self.clock.look();
        // Before the calls: a wait that ends in between is then seen as progress.
        let waiting = self.activity.waiting();
        let calls = self.activity.calls();
        if std::mem::replace(&mut self.calls, calls) != calls {
            self.clock.progress();
            self.written = false;
        }
        if self.clock.stalled(false).is_some() && !std::mem::replace(&mut self.written, true) {
            self.write_stacks(waiting);
        }
        let doing = format!(" while {}", doing(waiting));
        self.clock.report(&doing, waiting.is_some())
    }

    fn write_stacks(&self, waiting: Option<&str>) {
        let text = format!("{}\n\n{}", doing(waiting), stacks::text());
        let path = self.stacks.clone();
        let (written, heard) = channel();
        std::thread::spawn(move || {
            let directory = path.parent().map_or(Ok(()), std::fs::create_dir_all);
            let result = directory.and_then(|()| std::fs::write(&path, text));
            if let Err(error) = result {
                stderr::line(format_args!("cannot write {}: {error}", path.display()));
            }
            // The watchdog may have stopped waiting.
            let _ = written.send(());
        });
        let _ = heard.recv_timeout(WRITE);
    }
}

fn doing(waiting: Option<&str>) -> String {
    match waiting {
        Some(operation) => format!("waiting for other ranks ({operation})"),
        None => "computing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::activity::Observed;
    use crate::comm::solo::Solo;

    /// A watchdog with a deadline of no time, so that every look without progress is one too late.
    fn watchdog(activity: &Arc<Activity>, directory: &std::path::Path) -> Watchdog {
        Watchdog {
            activity: Arc::clone(activity),
            clock: StallClock::of_rank(ProgressDeadline::After(Duration::ZERO)),
            calls: 0,
            stacks: directory.join("stacks/rank-0.txt"),
            written: false,
        }
    }

    #[test]
    fn a_stall_is_reported_once_with_its_stacks_until_there_is_progress() {
        let directory = tempfile::tempdir().unwrap();
        let (world, activity) = Observed::of(Arc::new(Solo));
        let mut watchdog = watchdog(&activity, directory.path());
        world.check().unwrap();
        assert_eq!(watchdog.look(), None);
        let Some(Report::Stalled {
            message,
            waiting: false,
        }) = watchdog.look()
        else {
            panic!("no report");
        };
        assert_eq!(message, "no progress for 0 s while computing");
        assert_eq!(watchdog.look(), None);
        let stacks = std::fs::read_to_string(&watchdog.stacks).unwrap();
        assert!(stacks.starts_with("computing\n\nthread "), "{stacks}");
        world.check().unwrap();
        assert_eq!(watchdog.look(), Some(Report::Progressing));
        assert!(watchdog.look().is_some());
    }
}
