//! A rank that waits for the others says so, from a thread of its own: its agent tells it from one
//! that hangs, which its peers cannot do before they have met it. Where the agent itself is gone,
//! nobody is waited for: there is nothing to commit yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::orders::Reports;
use crate::job::protocol::{Report, exit};

/// Time between two signs of life.
const INTERVAL: Duration = Duration::from_secs(1);

/// Signs of life are given until this is dropped.
pub struct SignsOfLife {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl SignsOfLife {
    /// Begins at once; ends the process when `agent_is_gone`.
    pub fn give(reports: Reports, agent_is_gone: Arc<AtomicBool>) -> SignsOfLife {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                reports.send(&Report::Waiting);
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                if agent_is_gone.load(Ordering::Relaxed) {
                    eprintln!("the agent left before the ranks had met");
                    std::process::exit(exit::DRAINED.into());
                }
            }
        });
        SignsOfLife {
            end: Some(end),
            thread: Some(thread),
        }
    }
}

/// Waits for the last sign: what the rank says next comes after it.
impl Drop for SignsOfLife {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // It does nothing that could fail.
            let _ = thread.join();
        }
    }
}
