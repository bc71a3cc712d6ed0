//! Suspected nodes: a job lost a pod there whose agent does not answer. They get no new pods of the same
//! namespace for a while, even if Kubernetes still considers them ready.
//!
//! The evidence comes from the job's own agents, so it counts only for jobs of its namespace: other tenants
//! must not lose nodes to what a stranger's pods report.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

/// Time for which an unresponsive node gets no new pod. Kubernetes with its defaults needs 50 s to
/// detect such a node.
const SUSPICION: Duration = Duration::from_secs(90);

/// Start of each suspicion, by namespace and node.
#[derive(Debug, Default)]
pub struct Suspects(HashMap<String, HashMap<String, SystemTime>>);

impl Suspects {
    /// Suspects these nodes for [`SUSPICION`].
    pub fn suspect(&mut self, namespace: &str, nodes: &BTreeSet<String>) {
        let now = SystemTime::now();
        self.0.retain(|_, nodes| {
            nodes.retain(|_, since| recent(*since));
            !nodes.is_empty()
        });
        if nodes.is_empty() {
            return;
        }
        let suspected = self.0.entry(namespace.to_owned()).or_default();
        for node in nodes {
            suspected.entry(node.clone()).or_insert(now);
        }
    }

    /// Whether a namespace suspects a node.
    pub fn contains(&self, namespace: &str, node: &str) -> bool {
        let suspected = self.0.get(namespace);
        suspected.is_some_and(|nodes| nodes.get(node).is_some_and(|since| recent(*since)))
    }

    /// All suspected nodes.
    pub fn nodes(&self) -> BTreeSet<String> {
        self.0.values().flat_map(HashMap::keys).cloned().collect()
    }

    /// Ends the suspicions of a node that began before its kubelet renewed its Lease.
    pub fn renewed(&mut self, node: &str, renewed: SystemTime) {
        for nodes in self.0.values_mut() {
            if nodes.get(node).is_some_and(|since| renewed > *since) {
                nodes.remove(node);
            }
        }
    }
}

fn recent(since: SystemTime) -> bool {
    since.elapsed().is_ok_and(|elapsed| elapsed < SUSPICION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspicion_counts_in_its_namespace_until_the_lease_is_renewed() {
        let mut suspects = Suspects::default();
        suspects.suspect("a", &BTreeSet::from(["n".to_string()]));
        assert!(suspects.contains("a", "n"));
        assert!(!suspects.contains("b", "n"));
        let before = SystemTime::now() - Duration::from_secs(60);
        suspects.renewed("n", before);
        assert!(suspects.contains("a", "n"));
        suspects.renewed("n", SystemTime::now() + Duration::from_secs(1));
        assert!(!suspects.contains("a", "n"));
        assert!(suspects.nodes().is_empty());
    }
}
