//! Fault points at which a test crashes the controller with SIGKILL. They have no effect unless
//! `EVENKEEL_FAULTS` names them, separated by commas; the process prints the point and dies.

use std::io::Write;
use std::sync::LazyLock;

use rustix::process::{Signal, getpid, kill_process};

static WANTED: LazyLock<String> =
    LazyLock::new(|| std::env::var("EVENKEEL_FAULTS").unwrap_or_default());

/// Crashes here if `place/what` is enabled. `what` is the action or object of the step.
pub fn point(place: &str, what: &str) {
    if WANTED.is_empty() {
        return;
    }
    let point = format!("{place}/{what}");
    if !WANTED.split(',').any(|name| name.trim() == point) {
        return;
    }
    // Informs the test; a failed write does not matter, since the signal follows.
    let _ = writeln!(std::io::stderr(), "fault: {point}");
    let _ = kill_process(getpid(), Signal::KILL);
    // Nothing more may happen before the signal arrives.
    loop {
        std::thread::park();
    }
}
