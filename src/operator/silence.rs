//! Whether a pod whose agent does not answer is gone. By itself an agent may be starting, saying goodbye
//! or slow; what else speaks for its loss decides how soon it is given up.

use std::time::Duration;

use crate::inventory::kubernetes::Standing;

/// An agent that is silent for so long is gone when something else says so too: a peer that lost its
/// ranks, or its node.
pub const SILENCE: Duration = Duration::from_secs(1);
/// Silent for so long, it is gone whoever else says so, but never before its ranks have stopped.
const LONG_SILENCE: Duration = Duration::from_secs(45);
/// Beyond `fenceAfterSeconds` the ranks of an agent that is cut off have stopped; this is for looks that
/// are late.
const BEYOND_FENCE: Duration = Duration::from_secs(15);

/// A pod whose agent does not answer.
pub struct Silence<'a> {
    /// Its name.
    pub pod: &'a str,
    /// Its node's.
    pub node: &'a str,
    /// For how long.
    pub silent: Duration,
    /// It is of the newest generation. One that never was of any may have no agent at all.
    pub member: bool,
    /// Its peers lost its ranks.
    pub named: bool,
    /// It runs a program of the user's own, which commits where it likes: it must have stopped before it
    /// is replaced.
    pub own_program: bool,
    /// When its ranks stop by themselves.
    pub fence_after: Duration,
}

impl Silence<'_> {
    /// Its ranks have stopped when it has been silent for longer.
    fn fenced(&self) -> Duration {
        self.fence_after + BEYOND_FENCE
    }

    /// Whether its ranks may run still, and commit where the next generation reads.
    pub fn may_commit(&self) -> bool {
        self.own_program && self.member && self.silent <= self.fenced()
    }

    /// Why it is gone; `None` for as long as nothing but its silence says so and its ranks may run.
    /// `standing`: its node's, `None` for one that was deleted; `stale`: the kubelet renews the node's
    /// Lease no more.
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
                "pod {pod} on {node} is cut off from its peers and from here"
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
                "pod {pod} does not answer, and its node {node} renews its Lease no more"
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
            own_program: false,
            fence_after: Duration::from_secs(30),
        }
    }

    fn open(silence: &Silence<'_>, stale: bool) -> Option<String> {
        silence.verdict(Some(Standing::Open), || stale)
    }

    #[test]
    fn an_agent_that_is_only_silent_is_given_up_once_its_ranks_have_stopped() {
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
    fn what_else_speaks_for_a_loss_makes_it_one_at_once() {
        let said = |silence: Silence<'_>, standing, stale| silence.verdict(standing, || stale);
        let named = Silence {
            named: true,
            ..silence(2)
        };
        assert!(open(&named, false).unwrap().contains("its peers"));
        let not_ready = said(silence(2), Some(Standing::NotReady), false);
        assert_eq!(not_ready.unwrap(), "node n is not ready");
        assert_eq!(said(silence(0), None, false).unwrap(), "node n was deleted");
        assert!(open(&silence(2), true).unwrap().contains("Lease no more"));
        assert_eq!(open(&silence(1), true), None);
    }

    #[test]
    fn a_program_that_commits_where_it_likes_is_not_replaced_before_it_has_stopped() {
        let own = |seconds| Silence {
            own_program: true,
            ..silence(seconds)
        };
        let not_ready = |silence: &Silence<'_>| {
            let standing = Some(Standing::NotReady);
            silence.verdict(standing, || true).is_some()
        };
        assert!(own(44).may_commit() && !not_ready(&own(44)));
        assert_eq!(open(&own(44), true), None);
        assert!(open(&own(46), true).is_some());
        assert!(!own(46).may_commit() && not_ready(&own(46)));
        assert!(!silence(2).may_commit() && not_ready(&silence(2)));
    }
}
