//! Coalesces events per job, so that a burst of pod events does not cause one reconciliation each.
//! The first event of a window is passed on at once, the others together at its end.

use std::collections::HashMap;
use std::hash::Hash;

use tokio::time::{Duration, Instant};

/// Keys of recent events.
pub struct Coalescer<K> {
    window: Duration,
    passed_on: HashMap<K, Instant>,
    due: HashMap<K, Instant>,
}

impl<K: Eq + Hash + Clone> Coalescer<K> {
    /// Passes on each key at most once per `window`.
    pub fn new(window: Duration) -> Coalescer<K> {
        Coalescer {
            window,
            passed_on: HashMap::new(),
            due: HashMap::new(),
        }
    }

    /// Records an event; true if it is to be passed on at once.
    pub fn record(&mut self, what: K, now: Instant) -> bool {
        let window = self.window;
        self.passed_on.retain(|_, at| now < *at + window);
        match self.passed_on.get(&what) {
            None => {
                self.passed_on.insert(what, now);
                true
            }
            Some(at) => {
                self.due.insert(what, *at + window);
                false
            }
        }
    }

    /// Time at which the next key is due.
    pub fn next(&self) -> Option<Instant> {
        self.due.values().min().copied()
    }

    /// Keys that are due, to be passed on.
    pub fn due(&mut self, now: Instant) -> Vec<K> {
        let due: Vec<K> = self
            .due
            .extract_if(|_, at| *at <= now)
            .map(|(what, _)| what)
            .collect();
        for what in &due {
            self.passed_on.insert(what.clone(), now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_passed_on_at_once_and_once_more_at_its_end() {
        let window = Duration::from_millis(200);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut coalesce = Coalescer::new(window);
        assert!(coalesce.record("a", at(0)));
        assert!(!coalesce.record("a", at(10)) && !coalesce.record("a", at(190)));
        assert!(coalesce.record("b", at(50)), "keys are independent");
        assert_eq!(coalesce.next(), Some(at(200)));
        assert!(coalesce.due(at(199)).is_empty());
        assert_eq!(coalesce.due(at(200)), ["a"]);
        assert_eq!(coalesce.next(), None, "`b` has no further event");
        // It was just passed on, so the next event waits again.
        assert!(!coalesce.record("a", at(210)));
        assert_eq!(coalesce.due(at(400)), ["a"]);
        assert!(coalesce.record("a", at(700)));
        assert!(coalesce.passed_on.len() == 1, "expired keys are dropped");
    }
}
