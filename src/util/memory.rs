//! A limit on this process's memory while it runs what a stranger wrote: a chat template or a tokenizer's
//! regular expressions.
//!
//! Counting instructions bounds neither: `'x' * 100000000` is one instruction. Beyond the limit an allocation
//! fails, which ends the process, with words ([`super::allocator`]), before it takes the memory of others.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::lock::lock;

/// The number of values of [`Limited`], and the soft limit before the first one.
static HOLDERS: Mutex<(usize, Option<u64>)> = Mutex::new((0, None));

/// Whether there is one. An allocator may not wait for a lock.
static LIMITED: AtomicBool = AtomicBool::new(false);

/// Keeps the limit until it is dropped. Processes started meanwhile inherit the limit.
#[derive(Debug)]
pub struct Limited(());

/// Allows this process `more` bytes beyond what it has now (`RLIMIT_DATA`). A lower limit stays. If the
/// system does not say how much the process has, there is no limit.
pub fn limit(more: u64) -> Limited {
    let mut holders = lock(&HOLDERS);
    let set = getrlimit(Resource::Data);
    if holders.0 == 0 {
        holders.1 = set.current;
    }
    holders.0 += 1;
    LIMITED.store(true, Ordering::Relaxed);
    if let Some(now) = data() {
        let wanted = now.saturating_add(more);
        let current = holders.1.map_or(wanted, |before| before.min(wanted));
        // A refusal leaves the limit of the system.
        let _ = setrlimit(
            Resource::Data,
            Rlimit {
                current: Some(current),
                ..set
            },
        );
    }
    Limited(())
}

impl Drop for Limited {
    fn drop(&mut self) {
        let mut holders = lock(&HOLDERS);
        holders.0 = holders.0.saturating_sub(1);
        if holders.0 == 0 {
            LIMITED.store(false, Ordering::Relaxed);
            let set = getrlimit(Resource::Data);
            let current = holders.1;
            let _ = setrlimit(Resource::Data, Rlimit { current, ..set });
        }
    }
}

/// Whether the limit holds now.
pub fn is_limited() -> bool {
    LIMITED.load(Ordering::Relaxed)
}

/// Says on standard error that the limit is reached, without an allocation.
pub fn say_exhausted() {
    let words = b"error: the preparation of the data takes more memory than it may: a chat template, a tokenizer or a file of \
                  the data asks for it; repair it, or name another one\n";
    // A failure cannot be reported either.
    let _ = rustix::io::write(rustix::stdio::stderr(), words);
}

/// The bytes that `RLIMIT_DATA` counts.
fn data() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmData:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_ends_with_its_last_holder() {
        const MORE: u64 = 1 << 40;
        let before = getrlimit(Resource::Data).current;
        let (one, two) = (limit(MORE), limit(MORE));
        drop(one);
        assert!(getrlimit(Resource::Data).current.is_some());
        drop(two);
        // Another test may hold a limit.
        if HOLDERS.lock().unwrap().0 == 0 {
            assert_eq!(getrlimit(Resource::Data).current, before);
        }
    }
}
