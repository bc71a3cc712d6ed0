//! Places at which a test ends the controller as a crash would, by SIGKILL. Nothing happens at them
//! unless `EVENKEEL_FAULTS` names them, several with commas between; the process says which one it
//! was, and is gone.

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

/// A place in the course of things. `what` is what the controller is about to bring about.
pub fn point(place: &str, what: &str) {
    if WANTED.is_empty() || !WANTED.contains(&format!("{place}/{what}")) {
        return;
    }
    // Whoever set the variable reads this; if it cannot be written, there is still the signal.
    let _ = writeln!(std::io::stderr(), "fault: {place}/{what}");
    let _ = kill_process(getpid(), Signal::KILL);
    // The signal is on its way; nothing more may happen here.
    loop {
        std::thread::park();
    }
}
