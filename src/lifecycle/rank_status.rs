//! Status of a generation's ranks and the decisions that depend on it: which rank commits after a
//! loss, and the outcome of the generation. Pure; the launcher and the controller share it.

use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::Outcome;
use super::protocol::{Ending, Report, exit};

/// Status of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankStatus {
    /// It waits for connections to the other ranks.
    pub waiting: bool,
    /// It has joined the world and loaded its state.
    pub ready: bool,
    /// A peer whose loss it detected, and how; it still finishes its current computation.
    pub detected_loss: Option<(u64, String)>,
    /// Its report of a lost peer, with the state that it holds.
    pub lost: Option<LossReport>,
    /// Its message of an out-of-memory error.
    pub out_of_memory: Option<String>,
    /// Its error message, and whether a restart would fail again.
    pub failed: Option<(String, bool)>,
    /// `None` while its process lives.
    pub ending: Option<Ending>,
    /// Reason for which its agent killed it; `None` if it did not.
    pub kill_reason: Option<String>,
    /// It ended, or its agent ended it, because of lost ranks or because it did not exit in time. It is
    /// not a root cause.
    pub collateral: bool,
}

/// A rank's report of a lost peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LossReport {
    pub rank: u64,
    /// How the loss was detected.
    pub message: String,
    /// Samples in the reporting rank's state.
    pub samples: u64,
    /// Whether the reporting rank holds the complete state.
    pub whole: bool,
}

impl RankStatus {
    /// Applies a report of the rank.
    pub fn take(&mut self, report: &Report) {
        match report {
            Report::Connecting => self.waiting = true,
            Report::Connected => self.waiting = false,
            Report::Ready => self.ready = true,
            Report::LossDetected { rank, message } => {
                self.detected_loss = Some((*rank, message.clone()))
            }
            Report::Lost {
                rank,
                message,
                samples,
                whole,
            } => {
                self.lost = Some(LossReport {
                    rank: *rank,
                    message: message.clone(),
                    samples: *samples,
                    whole: *whole,
                });
            }
            Report::DeviceLost { message } => self.kill_reason = Some(message.clone()),
            Report::OutOfMemory { message } => self.out_of_memory = Some(message.clone()),
            Report::Failed {
                message,
                deterministic,
            } => self.failed = Some((message.clone(), *deterministic)),
            Report::Alive
            | Report::Step(_)
            | Report::Evaluation(_)
            | Report::Committed { .. }
            | Report::Straggler { .. }
            | Report::Warning { .. } => {}
        }
    }

    /// Records the end of its process. `follows`: it belongs to an external trainer and another rank
    /// failed before. An external trainer cannot report that it failed because of a lost peer: it exits
    /// with an error, or NCCL's watchdog aborts it.
    pub fn end(&mut self, ending: Ending, follows: bool) {
        self.ending = Some(ending);
        let killed = match ending {
            Ending::Signal(signal) => signal != Signal::ABORT.as_raw(),
            Ending::Code(_) | Ending::Unrequested => false,
        };
        self.collateral |= follows && !killed;
    }

    /// Its texts.
    pub fn messages(&mut self) -> impl Iterator<Item = &mut String> {
        let lost = self.lost.as_mut().map(|lost| &mut lost.message);
        let detected_loss = self.detected_loss.as_mut().map(|(_, message)| message);
        let failed = self.failed.as_mut().map(|(message, _)| message);
        let others = [&mut self.out_of_memory, &mut self.kill_reason];
        let others = others.into_iter().filter_map(Option::as_mut);
        failed
            .into_iter()
            .chain(lost)
            .chain(detected_loss)
            .chain(others)
    }

    /// Whether it failed or reports a lost peer.
    pub fn in_trouble(&self) -> bool {
        let well = |ending| match ending {
            Ending::Code(code) => [exit::FINISHED, exit::DRAINED].contains(&code),
            // Its peers may have been ordered to drain and have passed that on.
            Ending::Unrequested => true,
            Ending::Signal(_) => false,
        };
        self.lost.is_some() || self.detected_loss.is_some() || self.ending.is_some_and(|e| !well(e))
    }

    /// Message for a process that a signal killed.
    pub fn signal_message(&self, signal: i32) -> String {
        match &self.kill_reason {
            Some(message) => format!("{message}, so it was killed"),
            None => format!("killed by signal {signal}"),
        }
    }

    /// Whether it has reported why it ends; its process exits soon.
    fn is_leaving(&self) -> bool {
        self.failed.is_some() || self.out_of_memory.is_some()
    }

    /// Whether a signal killed it, except as a consequence of other lost ranks.
    fn is_killed(&self) -> bool {
        matches!(self.ending, Some(Ending::Signal(_))) && !self.collateral
    }

    /// Whether it has neither ended nor reported the state that it holds.
    fn undecided(&self) -> bool {
        self.ending.is_none() && self.lost.is_none()
    }
}

/// Numbers of the ranks for which `which` holds.
fn ranks<'a>(
    seen: &'a [RankStatus],
    which: impl Fn(&RankStatus) -> bool + 'a,
) -> impl Iterator<Item = u64> + 'a {
    (0..)
        .zip(seen)
        .filter(move |(_, s)| which(s))
        .map(|(rank, _)| rank)
}

/// Limit for a rank's silence before the ranks are connected; later their heartbeats count.
pub const SILENCE: Duration = Duration::from_secs(10);
/// After a loss: time in which waiting ranks may still report that they are connected.
const MEETING: Duration = Duration::from_secs(1);
/// Time in which ranks must detect a loss (the collectives' limit is 5 s).
pub const NOTICE: Duration = Duration::from_secs(10);
/// Time for which a rank that detected a loss may compute; it checks after every micro-batch.
pub const ANSWER: Duration = Duration::from_secs(120);
/// Time in which survivors must commit and exit after the order.
pub const COMMIT: Duration = Duration::from_secs(600);

/// Whether no rank needs to be waited for any more, `waited` after the detection of a loss. Every
/// rank has ended, has reported its state, is reported as lost, waits for lost ranks, or hangs.
pub fn is_settled(seen: &[RankStatus], waited: Duration) -> bool {
    let named = |rank: u64| loss_of(seen, rank).is_some();
    let awaited = (0..).zip(seen).filter(|(_, s)| s.undecided());
    awaited
        .filter(|(rank, s)| s.is_leaving() || !named(*rank))
        .all(|(_, s)| match s.detected_loss {
            Some(_) => waited > ANSWER,
            None if s.waiting => waited > MEETING,
            None => waited > NOTICE,
        })
}

/// Marks the ranks of one host, numbered from `first`, that cannot answer any more after a loss:
/// they wait for lost ranks, or they hang. A rank of an external trainer (`external`) hangs in a
/// collective as a consequence of the loss and is not at fault. Returns the ranks to kill.
pub fn give_up_unresponsive(seen: &mut [RankStatus], first: u64, external: bool) -> Vec<u64> {
    let named: Vec<Option<String>> = (first..)
        .zip(seen.iter())
        .map(|(rank, _)| loss_of(seen, rank).map(str::to_owned))
        .collect();
    let mut behind = Vec::new();
    for ((rank, seen), named) in (first..).zip(seen).zip(named) {
        if !seen.undecided() {
            continue;
        }
        match named {
            None if seen.waiting || external => seen.collateral = true,
            named => {
                let hung = || format!("no report within {} s of losing a peer", NOTICE.as_secs());
                // Its own reason is better, for example a lost GPU.
                seen.kill_reason
                    .get_or_insert_with(|| named.unwrap_or_else(hung));
            }
        }
        behind.push(rank);
    }
    behind
}

/// Ranks that peers reported as lost, and how the loss was detected.
fn named(seen: &[RankStatus]) -> impl Iterator<Item = (u64, &str)> {
    let lost = seen.iter().filter_map(|s| s.lost.as_ref());
    let lost = lost.map(|lost| (lost.rank, lost.message.as_str()));
    let detected_loss = seen.iter().filter_map(|s| s.detected_loss.as_ref());
    lost.chain(detected_loss.map(|(rank, message)| (*rank, message.as_str())))
}

/// How a peer detected the loss of this rank.
pub fn loss_of(seen: &[RankStatus], rank: u64) -> Option<&str> {
    named(seen)
        .find(|(lost, _)| *lost == rank)
        .map(|(_, message)| message)
}

/// The living rank with the newest complete state, if that is newer than `pinned` samples; it can
/// commit alone.
pub fn committer(seen: &[RankStatus], pinned: u64) -> Option<u64> {
    let holders = seen.iter().zip(0u64..).filter_map(|(seen, rank)| {
        let lost = seen.lost.as_ref()?;
        (seen.ending.is_none() && lost.whole && lost.samples > pinned)
            .then_some((lost.samples, std::cmp::Reverse(rank)))
    });
    holders.max().map(|(_, rank)| rank.0)
}

/// Number of ranks that a signal killed.
pub fn killed(seen: &[RankStatus]) -> u64 {
    ranks(seen, RankStatus::is_killed).count() as u64
}

/// Outcome of the generation, by its root cause; `None` until every rank has ended. `descent`
/// returns the next micro-batch after an out-of-memory error of this plan; `oom_killed` whether the
/// kernel's out-of-memory killer struck meanwhile.
pub fn outcome(
    seen: &[RankStatus],
    per_device_batch_size: u64,
    mut descent: impl FnMut() -> Option<u64>,
    oom_killed: impl FnOnce() -> bool,
) -> Option<Outcome> {
    let endings: Vec<Ending> = seen.iter().map(|s| s.ending).collect::<Option<_>>()?;
    let numbered = || seen.iter().zip(0u64..);
    let mut out_of_memory = |message: String| Outcome::OutOfMemory {
        per_device_batch_size,
        smaller: descent(),
        message,
    };
    if let Some(message) = seen.iter().find_map(|s| s.out_of_memory.clone()) {
        return Some(out_of_memory(message));
    }
    if let Some((rank, (message, deterministic))) =
        numbered().find_map(|(s, rank)| Some((rank, s.failed.clone()?)))
    {
        return Some(Outcome::Failed {
            rank,
            message,
            deterministic,
        });
    }
    let signalled = numbered().find_map(|(s, rank)| match s.ending {
        Some(Ending::Signal(signal)) if s.is_killed() => Some((rank, s, signal)),
        _ => None,
    });
    if let Some((rank, lost, signal)) = signalled {
        let message = lost.signal_message(signal);
        if signal == 9 && lost.kill_reason.is_none() && oom_killed() {
            return Some(out_of_memory(format!(
                "rank {rank} was killed by the kernel's out-of-memory killer"
            )));
        }
        if killed(seen) == seen.len() as u64 {
            // No rank survived, so fewer ranks would not help.
            return Some(Outcome::Failed {
                rank,
                message,
                deterministic: false,
            });
        }
        return Some(Outcome::Lost { rank, message });
    }
    if endings.iter().all(|e| *e == Ending::Code(exit::FINISHED)) {
        return Some(Outcome::Finished);
    }
    let drained = Ending::Code(exit::DRAINED);
    // Ranks of one world agree on a step to exit at: all exit together with one that was ordered to.
    let asked = endings.contains(&drained);
    let left = |s: &RankStatus| match s.ending {
        Some(Ending::Unrequested) => asked || s.collateral,
        ending => s.collateral || ending == Some(drained),
    };
    if seen.iter().all(left) {
        return Some(Outcome::Drained);
    }
    let mut own_fault = numbered().filter(|(s, _)| !left(s));
    if let Some((rank, message)) =
        own_fault.find_map(|(s, rank)| Some((rank, s.ending?.failure()?)))
    {
        return Some(Outcome::Failed {
            rank,
            message,
            deterministic: false,
        });
    }
    // Ranks only lost each other: the network failed, the processes did not.
    let (rank, message) = named(seen)
        .next()
        .unwrap_or((0, "the ranks lost each other"));
    Some(Outcome::Failed {
        rank,
        message: message.to_owned(),
        deterministic: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn killed() -> RankStatus {
        RankStatus {
            ending: Some(Ending::Signal(9)),
            ..RankStatus::default()
        }
    }

    fn survivor(of: u64) -> RankStatus {
        RankStatus {
            lost: Some(LossReport {
                rank: of,
                message: "no heartbeat for 3.0 s".into(),
                samples: 24,
                whole: true,
            }),
            ending: Some(Ending::Code(exit::PEER_LOST)),
            ..RankStatus::default()
        }
    }

    #[test]
    fn a_rank_killed_by_its_agent_is_reported_with_its_loss() {
        let message = |seen: &[RankStatus]| match outcome(seen, 2, || None, || true) {
            Some(Outcome::Lost { rank: 1, message }) => message,
            other => panic!("{other:?}"),
        };
        let mut seen = [survivor(1), killed()];
        let loss = loss_of(&seen, 1).map(str::to_owned);
        seen[1].kill_reason = loss;
        assert_eq!(message(&seen), "no heartbeat for 3.0 s, so it was killed");
    }

    #[test]
    fn a_computing_rank_is_awaited_and_a_hanging_one_is_not() {
        let computing = RankStatus {
            detected_loss: Some((1, "connection closed".into())),
            ..RankStatus::default()
        };
        let settled = |other: RankStatus, waited: Duration| {
            let all = [survivor(1), killed(), other];
            is_settled(&all, waited)
        };
        let second = Duration::from_secs(1);
        assert!(
            !settled(RankStatus::default(), NOTICE),
            "it may not know yet"
        );
        assert!(settled(RankStatus::default(), NOTICE + second), "it hangs");
        assert!(!settled(computing.clone(), NOTICE + second), "it computes");
        assert!(settled(computing.clone(), ANSWER + second));
        // Peers detect a rank that failed by itself before its process has ended.
        let leaving = RankStatus {
            failed: Some(("no such file".into(), true)),
            ..RankStatus::default()
        };
        assert!(!is_settled(&[survivor(1), leaving.clone()], second));
        assert!(is_settled(&[survivor(1), leaving], NOTICE + second));
        assert!(settled(survivor(1), second));
        // A frozen rank never ends; the reports of its peers suffice.
        assert!(is_settled(&[survivor(1), RankStatus::default()], second));
        assert_eq!(
            loss_of(&[computing, RankStatus::default()], 1),
            Some("connection closed")
        );
    }

    #[test]
    fn only_ranks_that_cannot_answer_are_killed_after_a_loss() {
        let waiting = RankStatus {
            waiting: true,
            ..RankStatus::default()
        };
        let mut seen = [
            survivor(5),
            killed(),
            waiting,
            RankStatus::default(),
            RankStatus::default(),
        ];
        assert_eq!(give_up_unresponsive(&mut seen, 2, false), [4, 5, 6]);
        assert!(
            seen[..2]
                .iter()
                .all(|s| s.kill_reason.is_none() && !s.collateral)
        );
        assert!(seen[2].collateral);
        assert_eq!(
            seen[3].kill_reason.as_deref(),
            Some("no heartbeat for 3.0 s")
        );
        assert_eq!(
            seen[4].kill_reason.as_deref(),
            Some("no report within 10 s of losing a peer")
        );
    }

    #[test]
    fn ranks_that_wait_for_a_silent_one_are_not_lost() {
        let waiting = RankStatus {
            waiting: true,
            ..RankStatus::default()
        };
        let silent = RankStatus {
            kill_reason: Some("no report for 10 s".into()),
            ..killed()
        };
        let mut seen = [waiting, silent];
        assert!(!is_settled(&seen, MEETING), "they may just have connected");
        assert!(is_settled(&seen, MEETING + Duration::from_millis(1)));
        seen[0] = RankStatus {
            collateral: true,
            ..killed()
        };
        assert_eq!(super::killed(&seen), 1);
        assert_eq!(
            outcome(&seen, 2, || None, || true),
            Some(Outcome::Lost {
                rank: 1,
                message: "no report for 10 s, so it was killed".into(),
            })
        );
    }

    #[test]
    fn ranks_that_never_connected_blame_the_missing_one() {
        let left = RankStatus {
            detected_loss: Some((2, "it did not come".into())),
            ending: Some(Ending::Code(exit::PEER_LOST)),
            ..RankStatus::default()
        };
        let blamed = |seen: &[RankStatus]| match outcome(seen, 2, || None, || false) {
            Some(Outcome::Failed { rank, message, .. }) => (rank, message),
            other => panic!("{other:?}"),
        };
        let mut seen = [left.clone(), left.clone(), left];
        assert_eq!(blamed(&seen), (2, "it did not come".into()));
        seen[2] = RankStatus {
            failed: Some(("no route".into(), false)),
            ending: Some(Ending::Code(exit::FAILED)),
            ..RankStatus::default()
        };
        assert_eq!(blamed(&seen), (2, "no route".into()));
    }

    #[test]
    fn ranks_that_exit_with_a_drained_one_are_drained() {
        let ended = |ending| RankStatus {
            ending: Some(ending),
            ..RankStatus::default()
        };
        let (asked, unasked) = (Ending::Code(exit::DRAINED), Ending::Unrequested);
        let of = |endings: [Ending; 2]| outcome(&endings.map(ended), 2, || None, || false);
        assert_eq!(of([asked, unasked]), Some(Outcome::Drained));
        let message = |outcome| match outcome {
            Some(Outcome::Failed { message, .. }) => message,
            other => panic!("{other:?}"),
        };
        assert!(message(of([unasked, unasked])).contains("without a request to drain"));
        assert_eq!(message(of([asked, Ending::Code(3)])), "exit code 3");
        // The other ranks save meanwhile.
        assert!(!ended(unasked).in_trouble() && ended(Ending::Code(3)).in_trouble());
    }

    #[test]
    fn only_an_outside_kill_may_be_the_oom_killers() {
        let seen = [survivor(1), killed()];
        let ended = |oom: bool| outcome(&seen, 2, || Some(1), || oom);
        assert!(matches!(ended(true), Some(Outcome::OutOfMemory { .. })));
        let message = "killed by signal 9".to_owned();
        assert_eq!(ended(false), Some(Outcome::Lost { rank: 1, message }));
    }
}
