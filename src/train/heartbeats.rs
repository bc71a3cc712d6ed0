//! Heartbeats of a rank, sent to its agent by a separate thread: while it waits for the others, who cannot
//! watch it before they have connected, and as long as it trains alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::orders::Reports;
use crate::lifecycle::protocol::{Report, exit};
use crate::util::stderr;

/// Time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);

/// Sends heartbeats until it is dropped.
pub struct Heartbeats {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeats {
    /// Of a rank that waits for the others. Ends the process when `agent_is_gone`: there is no state to
    /// commit yet.
    pub fn while_connecting(reports: Reports, agent_is_gone: Arc<AtomicBool>) -> Heartbeats {
        Heartbeats::start(move || {
            if agent_is_gone.load(Ordering::Relaxed) {
                stderr::line(format_args!("the agent left before the ranks had met"));
                std::process::exit(exit::DRAINED.into());
            }
            reports.send(&Report::Connecting);
        })
    }

    /// Of the only rank of a world.
    pub fn alone(reports: Reports) -> Heartbeats {
        Heartbeats::start(move || reports.send(&Report::Alive))
    }

    /// Calls `beat` at once and then at every interval.
    fn start(beat: impl Fn() + Send + 'static) -> Heartbeats {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                beat();
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Heartbeats {
            end: Some(end),
            thread: Some(thread),
        }
    }
}

/// Waits for the last heartbeat, so that later reports come after it.
impl Drop for Heartbeats {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // The thread cannot fail.
            let _ = thread.join();
        }
    }
}
