//! Decides whether a pod whose agent does not answer is lost. A silent agent may just be starting,
//! terminating or slow; further evidence decides how soon its pod counts as lost.

use std::time::Duration;

use crate::inventory::kubernetes::Standing;

/// Silence after which an agent is lost if there is further evidence: a peer that lost its ranks, or
/// the state of its node.
pub const SILENCE: Duration = Duration::from_secs(1);
/// Silence after which an agent is lost without further evidence, but never before its ranks have
/// stopped.
const LONG_SILENCE: Duration = Duration::from_secs(45);
/// Margin for late reconciliations on top of `fenceAfterSeconds`, after which the ranks of an
/// isolated agent have stopped.
const BEYOND_FENCE: Duration = Duration::from_secs(15);

/// A pod whose agent does not answer.
pub struct Silence<'a> {
    /// Name of the pod.
    pub pod: &'a str,
    /// Name of its node.
    pub node: &'a str,
    /// Time since its agent stopped answering.
    pub silent: Duration,
    /// It is a member of the newest generation. A pod that never was a member may have no agent.
    pub member: bool,
    /// Peers report its ranks as lost.
    pub named: bool,
    /// It runs an external trainer, which may write checkpoints anywhere: it must have stopped before
    /// its pod is replaced.
    pub external_trainer: bool,
    /// Silence after which its ranks stop by themselves.
    pub fence_after: Duration,
}

impl Silence<'_> {
    /// Silence after which its ranks have stopped.
    fn fenced(&self) -> Duration {
        self.fence_after + BEYOND_FENCE
    }

    /// Whether its ranks may still run and commit where the next generation reads.
    pub fn may_commit(&self) -> bool {
        self.external_trainer && self.member && self.silent <= self.fenced()
    }

    /// Reason for which the pod is lost; `None` while its silence is the only evidence and its ranks may
    /// run. `standing` is that of its node, `None` if the node was deleted. `stale`: the kubelet does not
    /// renew the node's Lease.
    pub fn verdict(
        &self,
        standing: Option<Standing>,
        stale: impl FnOnce() -> bool,
    ) -> Option<String> {
        let (pod, node) = (self.pod, self.node);
        let Some(standing) = standing else {
            return Some(format!("node {node} was deleted"));
        };
        if self.silent <= SILENCE {
            return None;
        }
        if self.named {
            return Some(format!(
                "pod {pod} on {node} is unreachable for its peers and the controller"
            ));
        }
        let harmless = !self.may_commit();
        if standing == Standing::NotReady && harmless {
            return Some(format!("node {node} is not ready"));
        }
        if !self.member {
            return None;
        }
        if harmless && stale() {
            return Some(format!(
                "pod {pod} does not answer and its node {node} does not renew its Lease"
            ));
        }
        (self.silent > LONG_SILENCE.max(self.fenced()))
            .then(|| format!("pod {pod} on {node} does not answer"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silence(seconds: u64) -> Silence<'static> {
        Silence {
            pod: "j-0-1",
            node: "n",
            silent: Duration::from_secs(seconds),
            member: true,
            named: false,
            external_trainer: false,
            fence_after: Duration::from_secs(30),
        }
    }

    fn open(silence: &Silence<'_>, stale: bool) -> Option<String> {
        silence.verdict(Some(Standing::Open), || stale)
    }

    #[test]
    fn a_silent_agent_is_lost_once_its_ranks_have_stopped() {
        assert_eq!(open(&silence(44), false), None);
        assert!(open(&silence(46), false).is_some());
        let patient = |seconds| Silence {
            fence_after: Duration::from_secs(3600),
            ..silence(seconds)
        };
        assert_eq!(open(&patient(3600), false), None);
        assert!(open(&patient(3616), false).is_some());
        let never_a_member = Silence {
            member: false,
            ..silence(3600)
        };
        assert_eq!(open(&never_a_member, true), None);
    }

    #[test]
    fn further_evidence_makes_a_silent_pod_lost_at_once() {
        let verdict = |silence: Silence<'_>, standing, stale| silence.verdict(standing, || stale);
        let named = Silence {
            named: true,
            ..silence(2)
        };
        assert!(open(&named, false).unwrap().contains("its peers"));
        let not_ready = verdict(silence(2), Some(Standing::NotReady), false);
        assert_eq!(not_ready.unwrap(), "node n is not ready");
        assert_eq!(
            verdict(silence(0), None, false).unwrap(),
            "node n was deleted"
        );
        assert!(
            open(&silence(2), true)
                .unwrap()
                .contains("does not renew its Lease")
        );
        assert_eq!(open(&silence(1), true), None);
    }

    #[test]
    fn an_external_trainer_is_not_replaced_before_it_has_stopped() {
        let external = |seconds| Silence {
            external_trainer: true,
            ..silence(seconds)
        };
        let not_ready = |silence: &Silence<'_>| {
            let standing = Some(Standing::NotReady);
            silence.verdict(standing, || true).is_some()
        };
        assert!(external(44).may_commit() && !not_ready(&external(44)));
        assert_eq!(open(&external(44), true), None);
        assert!(open(&external(46), true).is_some());
        assert!(!external(46).may_commit() && not_ready(&external(46)));
        assert!(!silence(2).may_commit() && not_ready(&silence(2)));
    }
}
