//! The signals that stop a launch: SIGINT, SIGTERM, and SIGHUP when the terminal closes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator;

/// Makes a write beyond `ulimit -f` fail with an error; by default the signal would kill the
/// process.
pub fn fail_writes_that_are_too_large() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Offset of a signal number in a shell's exit code.
const SIGNAL_OFFSET: i32 = 128;

/// Signals within this time count as one: `timeout` signals a process and its group, and a closing
/// terminal sends several.
const AT_ONCE: Duration = Duration::from_millis(300);

pub struct Signals {
    seen: Arc<AtomicUsize>,
    first: Arc<AtomicI32>,
    heeded: Arc<AtomicBool>,
}

impl Signals {
    /// Counts signals from now on, in a separate thread. An ignored SIGHUP (`nohup`) stays ignored.
    pub fn listen() -> io::Result<Signals> {
        let signals = Signals {
            seen: Arc::default(),
            first: Arc::default(),
            heeded: Arc::default(),
        };
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mut handled = vec![SIGINT, SIGTERM];
        handled.extend((!ignores(&status, SIGHUP)).then_some(SIGHUP));
        let mut coming = iterator::Signals::new(handled)?;
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
                // Record only the first signal, before the count becomes visible.
                let _ = first.compare_exchange(0, signal, Ordering::Release, Ordering::Relaxed);
                if seen.fetch_add(1, Ordering::Release) > 0 && !heeded.load(Ordering::Relaxed) {
                    // No work would be lost.
                    std::process::exit(SIGNAL_OFFSET + signal);
                }
            }
        });
        Ok(signals)
    }

    /// Shared counter of received signals.
    pub fn count(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.seen)
    }

    /// Whether a signal was received.
    pub fn is_raised(&self) -> bool {
        self.seen.load(Ordering::Acquire) > 0
    }

    /// Hands the signals to the launcher. Before that, a second signal ends this process.
    pub fn hand_over(&self) {
        self.heeded.store(true, Ordering::Relaxed);
    }

    /// Exit code after the first signal.
    pub fn exit_code(&self) -> u8 {
        u8::try_from(SIGNAL_OFFSET + self.first.load(Ordering::Acquire)).unwrap_or(u8::MAX)
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
