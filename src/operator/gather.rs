//! Touches of one thing within a short while are one: a burst of events of a job's pods would be a
//! look each otherwise. The first is passed on at once, the rest together when the while is over.

use std::collections::HashMap;
use std::hash::Hash;

use tokio::time::{Duration, Instant};

/// What was touched lately.
pub struct Gather<K> {
    window: Duration,
    passed_on: HashMap<K, Instant>,
    due: HashMap<K, Instant>,
}

impl<K: Eq + Hash + Clone> Gather<K> {
    /// Nothing yet. Touches of one thing are passed on once in so long.
    pub fn new(window: Duration) -> Gather<K> {
        Gather {
            window,
            passed_on: HashMap::new(),
            due: HashMap::new(),
        }
    }

    /// Something is touched; true where it is to be passed on at once.
    pub fn touch(&mut self, what: K, now: Instant) -> bool {
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

    /// When something is due next.
    pub fn next(&self) -> Option<Instant> {
        self.due.values().min().copied()
    }

    /// What is due by now, to be passed on.
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
        let mut gather = Gather::new(window);
        assert!(gather.touch("a", at(0)));
        assert!(!gather.touch("a", at(10)) && !gather.touch("a", at(190)));
        assert!(gather.touch("b", at(50)), "each for itself");
        assert_eq!(gather.next(), Some(at(200)));
        assert!(gather.due(at(199)).is_empty());
        assert_eq!(gather.due(at(200)), ["a"]);
        assert_eq!(gather.next(), None, "nothing was left out of `b`'s");
        // It was just passed on, so that the next waits again.
        assert!(!gather.touch("a", at(210)));
        assert_eq!(gather.due(at(400)), ["a"]);
        assert!(gather.touch("a", at(700)));
        assert!(gather.passed_on.len() == 1, "old ones are forgotten");
    }
}
