//! Leases of nodes with silent pods. A living kubelet renews its node's Lease every ten seconds;
//! Kubernetes itself waits 40 s and more before it declares a node dead.
//!
//! Only requested Leases are read, and only while they are requested. Staleness is the time for which
//! this process observes a Lease unchanged: the clocks of other machines are not trusted.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use crate::util::lock::lock;

/// 1.5 times a kubelet's renewal interval of 10 s (a quarter of the Lease duration of 40 s).
const STALE: Duration = Duration::from_secs(15);
/// Gap between two reads after which the observation restarts: while the API server did not answer,
/// kubelets could not renew either.
const GAP: Duration = Duration::from_secs(5);
/// Time without a request after which a node's Lease is no longer read.
const WANTED: Duration = Duration::from_secs(20);

/// Observed Leases, by node.
#[derive(Default)]
pub struct Leases(Mutex<HashMap<String, Lease>>);

struct Lease {
    asked: Instant,
    reading: Option<Reading>,
}

/// Observation of a Lease.
struct Reading {
    renewed: Option<SystemTime>,
    /// First of the consecutive reads with this renewal time.
    first: Instant,
    /// Last read with this renewal time.
    last: Instant,
}

impl Leases {
    /// Whether a node's kubelet has stopped renewing its Lease. The first call returns false and starts
    /// the observation.
    pub fn is_stale(&self, node: &str) -> bool {
        self.stale_at(node, Instant::now())
    }

    fn stale_at(&self, node: &str, now: Instant) -> bool {
        let mut leases = lock(&self.0);
        let lease = leases.entry(node.to_owned()).or_insert(Lease {
            asked: now,
            reading: None,
        });
        lease.asked = now;
        let reading = lease.reading.as_ref();
        reading.is_some_and(|reading| reading.last - reading.first >= STALE)
    }

    /// Nodes whose Leases are requested.
    pub fn wanted(&self) -> Vec<String> {
        let mut leases = lock(&self.0);
        leases.retain(|_, lease| lease.asked.elapsed() < WANTED);
        leases.keys().cloned().collect()
    }

    /// Records a read of a node's Lease.
    pub fn read(&self, node: &str, renewed: Option<SystemTime>) {
        self.read_at(node, renewed, Instant::now());
    }

    fn read_at(&self, node: &str, renewed: Option<SystemTime>, now: Instant) {
        let mut leases = lock(&self.0);
        let Some(lease) = leases.get_mut(node) else {
            return;
        };
        match &mut lease.reading {
            Some(reading) if reading.renewed == renewed && now - reading.last <= GAP => {
                reading.last = now
            }
            reading => {
                *reading = Some(Reading {
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
    fn a_lease_is_stale_after_15_seconds_without_renewal() {
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
        assert!(!leases.stale_at("a", after(20)), "not requested before");
        assert_eq!(leases.wanted(), ["a"]);
        read(1, 21..=35);
        assert!(!leases.stale_at("b", after(36)), "another node");
        read(1, 36..=36);
        assert!(leases.stale_at("a", after(36)));
        read(2, 37..=37);
        assert!(!leases.stale_at("a", after(53)), "renewed");
        // The API server did not answer meanwhile.
        read(2, 60..=74);
        assert!(!leases.stale_at("a", after(74)));
        read(2, 75..=75);
        assert!(leases.stale_at("a", after(75)));
    }
}
