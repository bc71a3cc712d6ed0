//! Whether this pod is cut off: for how long its agent has heard from nobody outside of it. Found out
//! by the agent alone, since a program of the user's own does not say that it has lost its peers, and
//! a world in one pod has none.

use std::time::{Duration, Instant};

/// Who is heard from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whom {
    /// Its answers, and the changes that it tells of.
    ApiServer,
    /// It asks for this agent's state.
    Controller,
    /// The agent of another pod answers.
    Peer,
}

/// How long each of them has been silent.
#[derive(Debug)]
pub struct Contact {
    api_server: Duration,
    controller: Duration,
    peers: Duration,
    looked: Instant,
}

impl Contact {
    /// Begins to listen.
    pub fn new() -> Contact {
        Contact {
            api_server: Duration::ZERO,
            controller: Duration::ZERO,
            peers: Duration::ZERO,
            looked: Instant::now(),
        }
    }

    /// Takes in a sign of life.
    pub fn heard(&mut self, whom: Whom) {
        match whom {
            Whom::ApiServer => self.api_server = Duration::ZERO,
            Whom::Controller => self.controller = Duration::ZERO,
            Whom::Peer => self.peers = Duration::ZERO,
        }
    }

    /// Counts the time since the last look. An agent that was stopped itself has heard nobody, and
    /// may well be in contact: some of `fence_after` is always left to find out.
    pub fn look(&mut self, fence_after: Duration) {
        let passed = self.looked.elapsed().min(fence_after / 2);
        self.looked = Instant::now();
        self.after(passed);
    }

    pub(super) fn after(&mut self, passed: Duration) {
        for silent in [&mut self.api_server, &mut self.controller, &mut self.peers] {
            *silent = silent.saturating_add(passed);
        }
    }

    /// Whether it is time to ask other pods' agents. Usually it is not: a thousand agents that ask
    /// each other would be a load of their own.
    pub fn misses_the_cluster(&self, fence_after: Duration) -> bool {
        self.api_server.min(self.controller) > fence_after / 3
    }

    /// Whether the ranks here have to stop. The API server alone may be away for long without harm.
    /// `lost_peer`: a rank has lost one, and waits for a word that only the API server brings.
    pub fn is_cut_off(&self, fence_after: Duration, lost_peer: bool) -> bool {
        let nobody = self.controller > fence_after && self.peers > fence_after;
        self.api_server > fence_after && (nobody || lost_peer)
    }
}

/// What is said of ranks that are stopped for it.
pub fn words(fence_after: Duration) -> String {
    format!(
        "cut off: for {} s nothing was heard from the API server, the controller or the job's other \
         pods",
        fence_after.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const FENCE: Duration = Duration::from_secs(30);

    /// One that has heard nobody for as long as it may, but for those in `but`, just now.
    fn silent(but: &[Whom]) -> Contact {
        let mut contact = Contact::new();
        contact.after(FENCE + Duration::from_secs(1));
        but.iter().for_each(|whom| contact.heard(*whom));
        contact
    }

    #[test]
    fn a_pod_is_cut_off_only_if_nobody_at_all_is_heard_of() {
        assert!(silent(&[]).is_cut_off(FENCE, false));
        for one in [Whom::ApiServer, Whom::Controller, Whom::Peer] {
            assert!(!silent(&[one]).is_cut_off(FENCE, false), "{one:?}");
        }
        let mut contact = Contact::new();
        contact.after(FENCE);
        assert!(!contact.is_cut_off(FENCE, false), "not before");
    }

    #[test]
    fn a_rank_that_lost_a_peer_waits_for_the_api_server_alone() {
        let others = [Whom::Controller, Whom::Peer];
        assert!(silent(&others).is_cut_off(FENCE, true));
        assert!(!silent(&[Whom::ApiServer]).is_cut_off(FENCE, true));
    }

    #[test]
    fn peers_are_asked_while_there_is_time_for_an_answer() {
        let mut contact = Contact::new();
        contact.after(FENCE / 3);
        assert!(!contact.misses_the_cluster(FENCE));
        contact.after(Duration::from_secs(1));
        assert!(contact.misses_the_cluster(FENCE) && !contact.is_cut_off(FENCE, false));
        contact.heard(Whom::Controller);
        assert!(!contact.misses_the_cluster(FENCE));
    }

    #[test]
    fn an_agent_that_was_stopped_itself_finds_out_first() {
        let mut contact = Contact::new();
        let Some(long_ago) = Instant::now().checked_sub(10 * FENCE) else {
            return;
        };
        contact.looked = long_ago;
        contact.look(FENCE);
        assert!(contact.misses_the_cluster(FENCE) && !contact.is_cut_off(FENCE, false));
    }
}
