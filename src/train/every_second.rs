//! A thread that acts every second until it is stopped.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

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
