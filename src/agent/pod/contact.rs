//! Detects that this pod is cut off: its agent has heard from no other process for `fence_after`.
//! Only the agent can detect it, since an external trainer does not report lost peers, and a world
//! in one pod has no peers.

use std::time::{Duration, Instant};

/// A source of contact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContactSource {
    /// Its responses and watch events.
    ApiServer,
    /// It requests this agent's state.
    Controller,
    /// The agent of another pod answers.
    Peer,
}

/// Time since the last contact with each source.
#[derive(Debug)]
pub struct Contact {
    /// In the order of [`ContactSource`].
    silent: [Duration; 3],
    last_check: Instant,
}

impl Contact {
    /// Starts all timers at zero.
    pub fn new() -> Contact {
        Contact {
            silent: [Duration::ZERO; 3],
            last_check: Instant::now(),
        }
    }

    /// Resets the timer of one source.
    pub fn heard(&mut self, whom: ContactSource) {
        self.silent[whom as usize] = Duration::ZERO;
    }

    /// Adds the time since the last call. If the agent itself was suspended, that time counts at
    /// most as half of `fence_after`, so that it can find out whether contact still exists.
    pub fn look(&mut self, fence_after: Duration) {
        let passed = self.last_check.elapsed().min(fence_after / 2);
        self.last_check = Instant::now();
        self.after(passed);
    }

    pub(super) fn after(&mut self, passed: Duration) {
        for silent in &mut self.silent {
            *silent = silent.saturating_add(passed);
        }
    }

    /// Whether to ask other pods' agents now. Usually false, since a thousand agents asking each
    /// other are a considerable load.
    pub fn misses_the_cluster(&self, fence_after: Duration) -> bool {
        let [api_server, controller, _] = self.silent;
        api_server.min(controller) > fence_after / 3
    }

    /// Whether the ranks here must stop. An outage of the API server alone is harmless for long.
    /// `lost_peer`: a rank has lost a peer and waits for a decision that only the API server
    /// delivers.
    pub fn is_cut_off(&self, fence_after: Duration, lost_peer: bool) -> bool {
        let [api_server, controller, peers] = self.silent.map(|silent| silent > fence_after);
        api_server && ((controller && peers) || lost_peer)
    }
}

/// Message for ranks that are stopped because the pod is cut off.
pub fn cut_off_message(fence_after: Duration) -> String {
    format!(
        "cut off: no contact with the API server, the controller or the job's other pods for {} s",
        fence_after.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const FENCE: Duration = Duration::from_secs(30);

    /// A contact that is silent for as long as allowed, except for sources in `but`.
    fn silent(but: &[ContactSource]) -> Contact {
        let mut contact = Contact::new();
        contact.after(FENCE + Duration::from_secs(1));
        but.iter().for_each(|whom| contact.heard(*whom));
        contact
    }

    #[test]
    fn a_pod_is_cut_off_only_if_every_source_is_silent() {
        assert!(silent(&[]).is_cut_off(FENCE, false));
        for one in [
            ContactSource::ApiServer,
            ContactSource::Controller,
            ContactSource::Peer,
        ] {
            assert!(!silent(&[one]).is_cut_off(FENCE, false), "{one:?}");
        }
        let mut contact = Contact::new();
        contact.after(FENCE);
        assert!(!contact.is_cut_off(FENCE, false), "not before");
    }

    #[test]
    fn after_a_lost_peer_only_the_api_server_counts_as_contact() {
        let others = [ContactSource::Controller, ContactSource::Peer];
        assert!(silent(&others).is_cut_off(FENCE, true));
        assert!(!silent(&[ContactSource::ApiServer]).is_cut_off(FENCE, true));
    }

    #[test]
    fn peers_are_asked_early_enough_for_an_answer() {
        let mut contact = Contact::new();
        contact.after(FENCE / 3);
        assert!(!contact.misses_the_cluster(FENCE));
        contact.after(Duration::from_secs(1));
        assert!(contact.misses_the_cluster(FENCE) && !contact.is_cut_off(FENCE, false));
        contact.heard(ContactSource::Controller);
        assert!(!contact.misses_the_cluster(FENCE));
    }

    #[test]
    fn a_suspended_agent_checks_its_contact_before_it_fences() {
        let mut contact = Contact::new();
        let Some(long_ago) = Instant::now().checked_sub(10 * FENCE) else {
            return;
        };
        contact.last_check = long_ago;
        contact.look(FENCE);
        assert!(contact.misses_the_cluster(FENCE) && !contact.is_cut_off(FENCE, false));
    }
}
