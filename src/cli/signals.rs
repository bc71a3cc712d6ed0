//! The signals that stop a launch: SIGINT, SIGTERM, and SIGHUP, which comes when the terminal is
//! closed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator;

/// A write beyond `ulimit -f` fails with an error that says so; by itself it would end the process.
pub fn fail_writes_that_are_too_large() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// What the shell adds to a signal's number in the exit code of what it ended.
const BY_SIGNAL: i32 = 128;

/// Signals that come together are one: `timeout` sends one to a process and one to its group, and a
/// closed terminal more than one.
const AT_ONCE: Duration = Duration::from_millis(300);

/// The signals so far.
pub struct Signals {
    seen: Arc<AtomicUsize>,
    first: Arc<AtomicI32>,
    heeded: Arc<AtomicBool>,
}

impl Signals {
    /// Counts them from here on, in a thread of its own. A hangup that whoever started this process
    /// wants ignored (`nohup`) stays ignored.
    pub fn listen() -> io::Result<Signals> {
        let signals = Signals {
            seen: Arc::default(),
            first: Arc::default(),
            heeded: Arc::default(),
        };
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mut wanted = vec![SIGINT, SIGTERM];
        wanted.extend((!ignores(&status, SIGHUP)).then_some(SIGHUP));
        let mut coming = iterator::Signals::new(wanted)?;
        let (seen, first, heeded) = (
            Arc::clone(&signals.seen),
            Arc::clone(&signals.first),
            Arc::clone(&signals.heeded),
        );
        std::thread::spawn(move || {
            let mut last: Option<Instant> = None;
            for signal in coming.forever() {
                let now = Instant::now();
                let before = last.replace(now);
                if before.is_some_and(|before| now - before < AT_ONCE) {
                    continue;
                }
                // Only where there is none yet; and before anybody can see that there is one.
                let _ = first.compare_exchange(0, signal, Ordering::Release, Ordering::Relaxed);
                if seen.fetch_add(1, Ordering::Release) > 0 && !heeded.load(Ordering::Relaxed) {
                    // Nothing runs yet that would be lost.
                    std::process::exit(BY_SIGNAL + signal);
                }
            }
        });
        Ok(signals)
    }

    /// How many came.
    pub fn count(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.seen)
    }

    /// Somebody acts on every signal from here on. Until then a second one ends this process.
    pub fn heed(&self) {
        self.heeded.store(true, Ordering::Relaxed);
    }

    /// The exit code of a process that the first of them ended.
    pub fn exit_code(&self) -> u8 {
        u8::try_from(BY_SIGNAL + self.first.load(Ordering::Acquire)).unwrap_or(u8::MAX)
    }
}

/// Whether a process with this `/proc/PID/status` ignores a signal.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_mask() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert!(ignores(status, SIGHUP));
        assert!(ignores(status, signal_hook::consts::SIGPIPE));
        assert!(!ignores(status, SIGINT) && !ignores(status, SIGTERM));
        assert!(!ignores("", SIGHUP));
    }
}
