//! Nodes with silent pods: their Leases, and the suspicions of jobs that lost a pod there.
//!
//! A living kubelet renews its node's Lease every ten seconds; Kubernetes itself waits 40 s and more before it
//! declares a node dead. Only requested Leases are read, and only while they are requested. Staleness is the time for
//! which this process observes a Lease unchanged: the clocks of other machines are not trusted.
//!
//! A suspected node gets no new pods of the same namespace for a while, even if Kubernetes still considers it ready.
//! The evidence comes from the job's own agents, so it counts only for jobs of its namespace: other tenants
//! must not lose nodes to what a stranger's pods report.

use std::collections::{BTreeSet, HashMap};
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
/// Time for which an unresponsive node gets no new pod. Kubernetes with its defaults needs 50 s to
/// detect such a node.
const SUSPICION: Duration = Duration::from_secs(90);

/// Nodes with silent pods, by name.
#[derive(Default)]
pub struct Leases(Mutex<HashMap<String, Node>>);

#[derive(Default)]
struct Node {
    /// The last request of its Lease.
    asked: Option<Instant>,
    reading: Option<Reading>,
    /// Start of each suspicion, by namespace.
    suspicions: HashMap<String, SystemTime>,
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
    pub fn is_stale(&self, node: &str, now: Instant) -> bool {
        let mut nodes = lock(&self.0);
        let node = nodes.entry(node.to_owned()).or_default();
        node.asked = Some(now);
        let reading = node.reading.as_ref();
        reading.is_some_and(|reading| reading.last - reading.first >= STALE)
    }

    /// Suspects these nodes for [`SUSPICION`].
    pub fn suspect(&self, namespace: &str, suspects: &BTreeSet<String>) {
        let mut nodes = lock(&self.0);
        for node in suspects {
            let suspicions = &mut nodes.entry(node.clone()).or_default().suspicions;
            suspicions.retain(|_, since| is_recent(*since));
            let since = suspicions.entry(namespace.to_owned());
            since.or_insert_with(SystemTime::now);
        }
    }

    /// Whether a namespace suspects a node.
    pub fn is_suspected(&self, namespace: &str, node: &str) -> bool {
        let nodes = lock(&self.0);
        let since = nodes
            .get(node)
            .and_then(|node| node.suspicions.get(namespace));
        since.is_some_and(|since| is_recent(*since))
    }

    /// Nodes whose Leases are to be read.
    pub fn wanted(&self) -> Vec<String> {
        let mut nodes = lock(&self.0);
        nodes.retain(|_, node| {
            node.suspicions.retain(|_, since| is_recent(*since));
            if node.asked.is_none_or(|asked| asked.elapsed() >= WANTED) {
                (node.asked, node.reading) = (None, None);
            }
            node.asked.is_some() || !node.suspicions.is_empty()
        });
        nodes.keys().cloned().collect()
    }

    /// Records a read of a node's Lease. A renewal ends the suspicions that began before it.
    pub fn read(&self, node: &str, renewed: Option<SystemTime>, now: Instant) {
        let mut nodes = lock(&self.0);
        let Some(node) = nodes.get_mut(node) else {
            return;
        };
        if let Some(renewed) = renewed {
            node.suspicions.retain(|_, since| renewed <= *since);
        }
        match &mut node.reading {
            _ if node.asked.is_none() => {}
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

fn is_recent(since: SystemTime) -> bool {
    since.elapsed().is_ok_and(|elapsed| elapsed < SUSPICION)
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
                leases.read("a", Some(renewed), after(second));
            }
        };
        read(1, 0..=20);
        assert!(!leases.is_stale("a", after(20)), "not requested before");
        assert_eq!(leases.wanted(), ["a"]);
        read(1, 21..=35);
        assert!(!leases.is_stale("b", after(36)), "another node");
        read(1, 36..=36);
        assert!(leases.is_stale("a", after(36)));
        read(2, 37..=37);
        assert!(!leases.is_stale("a", after(53)), "renewed");
        // The API server did not answer meanwhile.
        read(2, 60..=74);
        assert!(!leases.is_stale("a", after(74)));
        read(2, 75..=75);
        assert!(leases.is_stale("a", after(75)));
    }

    #[test]
    fn a_suspicion_counts_in_its_namespace_until_the_lease_is_renewed() {
        let leases = Leases::default();
        leases.suspect("a", &BTreeSet::from(["n".to_string()]));
        assert!(leases.is_suspected("a", "n"));
        assert!(!leases.is_suspected("b", "n"));
        let before = SystemTime::now() - Duration::from_secs(60);
        leases.read("n", Some(before), Instant::now());
        assert!(leases.is_suspected("a", "n"));
        let after = SystemTime::now() + Duration::from_secs(1);
        leases.read("n", Some(after), Instant::now());
        assert!(!leases.is_suspected("a", "n"));
        assert!(leases.wanted().is_empty());
    }
}
