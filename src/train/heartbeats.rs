//! Heartbeats of a rank that waits for the others, sent by a separate thread. They let its agent tell a
//! waiting rank from a hung one; its peers cannot do so before they have connected. If the agent is gone, the
//! process ends: there is no state to commit yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::orders::Reports;
use crate::lifecycle::protocol::{Report, exit};

/// Time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);

/// Sends heartbeats until it is dropped.
pub struct Heartbeats {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeats {
    /// Starts at once; ends the process when `agent_is_gone`.
    pub fn start(reports: Reports, agent_is_gone: Arc<AtomicBool>) -> Heartbeats {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                reports.send(&Report::Connecting);
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                if agent_is_gone.load(Ordering::Relaxed) {
                    eprintln!("the agent left before the ranks had met");
                    std::process::exit(exit::DRAINED.into());
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
