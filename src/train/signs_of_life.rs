//! A rank that waits for the others says so, from a thread of its own: its agent tells it from one
//! that hangs, which its peers cannot do before they have met it.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::orders::Reports;
use crate::job::protocol::Report;

/// Time between two signs of life.
const INTERVAL: Duration = Duration::from_secs(1);

/// Signs of life are given until this is dropped.
pub struct SignsOfLife {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl SignsOfLife {
    /// Begins at once.
    pub fn give(reports: Reports) -> SignsOfLife {
        let (end, ended) = channel();
        let thread = std::thread::spawn(move || {
            loop {
                reports.send(&Report::Waiting);
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
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
