//! Fault points at which a test crashes the controller with SIGKILL. They have no effect unless
//! `EVENKEEL_FAULTS` names them, separated by commas; the process prints the point and dies.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::LazyLock;

use rustix::process::{Signal, getpid, kill_process};

static WANTED: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let names = std::env::var("EVENKEEL_FAULTS").unwrap_or_default();
    let names = names.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(String::from)
        .collect()
});

/// Crashes here if `place/what` is enabled. `what` is the action or object of the step.
pub fn point(place: &str, what: &str) {
    if WANTED.is_empty() || !WANTED.contains(&format!("{place}/{what}")) {
        return;
    }
    // Informs the test; a failed write does not matter, since the signal follows.
    let _ = writeln!(std::io::stderr(), "fault: {place}/{what}");
    let _ = kill_process(getpid(), Signal::KILL);
    // Nothing more may happen before the signal arrives.
    loop {
        std::thread::park();
    }
}
