//! Leases of nodes whose pods fell silent: a kubelet that lives renews its node's every ten seconds, and
//! Kubernetes itself waits for 40 s and more before it takes one for dead.
//!
//! Only those that somebody asked for are read, and only while somebody asks. What counts is how long a
//! Lease has stood unchanged here: clocks of other machines are not trusted.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use super::locked::locked;

/// Half as long again as a kubelet takes between two renewals (a quarter of the 40 s that a Lease holds).
const STALE: Duration = Duration::from_secs(15);
/// Without an answer of the API server for so long, kubelets had none either: the count begins anew.
const GAP: Duration = Duration::from_secs(5);
/// A node that nobody has asked for so long is read no more.
const WANTED: Duration = Duration::from_secs(20);

/// The Leases that are watched, by node.
#[derive(Default)]
pub struct Leases(Mutex<HashMap<String, Lease>>);

struct Lease {
    asked: Instant,
    seen: Option<Seen>,
}

/// What a Lease said when it was read.
struct Seen {
    renewed: Option<SystemTime>,
    /// The first time that it said so, of those that follow one another.
    first: Instant,
    /// The last time.
    last: Instant,
}

impl Leases {
    /// Whether a node's kubelet has stopped renewing its Lease. The first time nobody knows yet: it is
    /// read from then on.
    pub fn is_stale(&self, node: &str) -> bool {
        self.stale_at(node, Instant::now())
    }

    fn stale_at(&self, node: &str, now: Instant) -> bool {
        let mut leases = locked(&self.0);
        let lease = leases.entry(node.to_owned()).or_insert(Lease {
            asked: now,
            seen: None,
        });
        lease.asked = now;
        let seen = lease.seen.as_ref();
        seen.is_some_and(|seen| seen.last - seen.first >= STALE)
    }

    /// The nodes whose Leases are to be read.
    pub fn wanted(&self) -> Vec<String> {
        let mut leases = locked(&self.0);
        leases.retain(|_, lease| lease.asked.elapsed() < WANTED);
        leases.keys().cloned().collect()
    }

    /// Takes in what a node's Lease says.
    pub fn read(&self, node: &str, renewed: Option<SystemTime>) {
        self.read_at(node, renewed, Instant::now());
    }

    fn read_at(&self, node: &str, renewed: Option<SystemTime>, now: Instant) {
        let mut leases = locked(&self.0);
        let Some(lease) = leases.get_mut(node) else {
            return;
        };
        match &mut lease.seen {
            Some(seen) if seen.renewed == renewed && now - seen.last <= GAP => seen.last = now,
            seen => {
                *seen = Some(Seen {
                    renewed,
                    first: now,
                    last: now,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_stale_once_it_was_seen_unchanged_for_long() {
        let leases = Leases::default();
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let read = |renewed: u64, seconds: std::ops::RangeInclusive<u64>| {
            let renewed = SystemTime::UNIX_EPOCH + Duration::from_secs(renewed);
            for second in seconds {
                leases.read_at("a", Some(renewed), after(second));
            }
        };
        read(1, 0..=20);
        assert!(!leases.stale_at("a", after(20)), "nobody had asked for it");
        assert_eq!(leases.wanted(), ["a"]);
        read(1, 21..=35);
        assert!(!leases.stale_at("b", after(36)), "another one");
        read(1, 36..=36);
        assert!(leases.stale_at("a", after(36)));
        read(2, 37..=37);
        assert!(!leases.stale_at("a", after(53)), "renewed");
        // Nobody could renew anything meanwhile.
        read(2, 60..=74);
        assert!(!leases.stale_at("a", after(74)));
        read(2, 75..=75);
        assert!(leases.stale_at("a", after(75)));
    }
}
