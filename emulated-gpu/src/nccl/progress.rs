//! The thread that runs collectives, and what they wait for, while the host is elsewhere.

use std::sync::Once;
use std::time::Duration;

use super::communicator::Phase;
use super::communicators;
use crate::driver;
use crate::machine::Background;

/// After this time, calls of a non-blocking communicator are in their streams without a poll.
const DEFERRED: Duration = Duration::from_secs(1);

/// Starts the thread, once in a process.
pub fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        std::thread::spawn(run);
    });
}

fn run() {
    loop {
        for communicator in communicators() {
            let state = communicator.state();
            let is_late = !state.deferred.is_empty() && state.deferred_at.elapsed() > DEFERRED;
            let is_due = is_late && state.phase == Phase::Ready;
            drop(state);
            if is_due {
                communicator.issue_deferred();
            }
        }
        // The pauses let calls of the host have the machine.
        let pause = match driver::with(|machine| Ok(machine.progress())) {
            Ok(Background::Ran) => Duration::from_micros(20),
            Ok(Background::Waits) => Duration::from_micros(200),
            Ok(Background::Idle) | Err(_) => Duration::from_millis(1),
        };
        std::thread::sleep(pause);
    }
}
