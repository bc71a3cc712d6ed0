//! Turns to plan: one job of each namespace at a time. Planning uses a processor for up to seconds, and a
//! tenant must not use them all. A job that finds its namespace busy does not wait in its reconciliation,
//! which would take one of the places for all jobs; it is reconciled again later.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::util::lock::lock;

/// Shortest and longest pause before a job tries again.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// Namespaces in which a job plans now, or jobs were sent away.
#[derive(Default)]
pub struct Turns {
    queues: Mutex<HashMap<String, Queue>>,
    /// Number of turns so far, for tests.
    #[cfg(test)]
    pub begun: std::sync::atomic::AtomicUsize,
    /// Whether turns panic, for tests.
    #[cfg(test)]
    pub panics: std::sync::atomic::AtomicBool,
}

/// The jobs of one namespace.
#[derive(Default)]
struct Queue {
    /// Start of the turn in progress.
    began: Option<Instant>,
    /// Duration of the last turn.
    last: Duration,
    /// Times that a job was sent away since the queue was empty, less the turns since.
    waiting: u32,
}

/// The turn of one job; it ends when dropped.
pub struct Turn<'a> {
    turns: &'a Turns,
    namespace: String,
}

impl Turns {
    /// Begins a turn; the error is the pause until the next attempt, so that the waiting jobs of a namespace
    /// come one after the other.
    pub fn begin(&self, namespace: &str) -> Result<Turn<'_>, Duration> {
        let mut queues = lock(&self.queues);
        let queue = queues.entry(namespace.to_owned()).or_default();
        if let Some(began) = queue.began {
            queue.waiting = queue.waiting.saturating_add(1);
            let each = queue.last.max(began.elapsed());
            let pause = each.saturating_mul(queue.waiting);
            return Err(pause.clamp(PAUSE.0, PAUSE.1));
        }
        #[cfg(test)]
        self.begun
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        queue.began = Some(Instant::now());
        queue.waiting = queue.waiting.saturating_sub(1);
        Ok(Turn {
            turns: self,
            namespace: namespace.to_owned(),
        })
    }
}

/// Proof that a turn is in progress: only with it are worlds planned.
pub struct AtWork(());

impl Turn<'_> {
    /// Runs `work` without delaying the other tasks of the runtime. `None`: it panicked, which would end the controller,
    /// and again after each start.
    pub fn run<T>(self, work: impl FnOnce(&AtWork) -> T) -> Option<T> {
        // Locks recover from panics, and what `work` changes is dropped by the caller.
        let work = AssertUnwindSafe(|| {
            #[cfg(test)]
            assert!(!self.turns.panics.load(std::sync::atomic::Ordering::Relaxed));
            work(&AtWork(()))
        });
        tokio::task::block_in_place(|| catch_unwind(work)).ok()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queues = lock(&self.turns.queues);
        let Some(queue) = queues.get_mut(&self.namespace) else {
            return;
        };
        let began = queue.began.take();
        queue.last = began.map_or(queue.last, |began| began.elapsed());
        if queue.waiting == 0 {
            queues.remove(&self.namespace);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_one_turn_at_a_time_and_no_other_namespace_waits_for_it() {
        let turns = Turns::default();
        let first = turns.begin("a").ok().unwrap();
        let second = turns.begin("a").err().unwrap();
        let third = turns.begin("a").err().unwrap();
        assert!(second >= PAUSE.0 && third >= second && third <= PAUSE.1);
        let other = turns.begin("b").ok().unwrap();
        drop((first, other));
        assert!(turns.begin("a").is_ok());
        assert!(turns.begin("a").is_ok());
        assert!(
            lock(&turns.queues).is_empty(),
            "nothing is kept of idle namespaces"
        );
    }
}
