//! Status of a generation's ranks and the decisions that depend on it: which rank commits after a
//! loss, and the outcome of the generation. Pure; the launcher and the controller share it.

use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::Outcome;
use super::protocol::{Ending, HeldState, Report, exit};

/// Status of one rank: its stage, and what is known of its trouble.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Flags", into = "Flags")]
pub struct RankStatus {
    pub stage: Stage,
    /// The state that it holds outside of a world: after a pause, or from an earlier generation until it is connected to
    /// the other ranks.
    pub kept: Option<HeldState>,
    /// The loss of a peer that it noticed.
    pub loss: Option<PeerLoss>,
    /// Its own error.
    pub fault: Option<Fault>,
    /// Why its process ended, if neither its error nor an order explains it.
    pub cause: Option<Cause>,
}

/// Lifecycle of a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Stage {
    /// Its process starts, or it is connected and loads its state.
    #[default]
    Starting,
    /// It waits for connections to the other ranks.
    Connecting,
    /// It has joined the world and loaded its state.
    Ready,
    /// It has left the world in order, and waits.
    Paused,
    /// Its process has ended.
    Ended(Ending),
}

/// A peer's loss, as a rank noticed it.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerLoss {
    pub rank: u64,
    /// How the loss was detected.
    pub message: String,
    /// The state of the rank, which waits for an order. `None`: it still finishes its current computation.
    pub held: Option<HeldState>,
}

/// An error that a rank reports of itself. It ends soon.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    OutOfMemory(String),
    /// `deterministic`: a restart would fail again.
    Failed {
        message: String,
        deterministic: bool,
    },
}

/// Why a rank ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Cause {
    /// Its agent killed it for this reason, or its device was lost.
    Killed(String),
    /// Its agent killed it for this lack of progress. It did not wait for other ranks; of an external trainer that is
    /// unknown.
    Stalled(String),
    /// Its host was lost.
    HostLost(String),
    /// It ended, or its agent ended it, because of lost ranks or because it did not exit in time. It is not a
    /// root cause.
    Collateral,
}

/// The form in which agents send a status. Agents of other versions send it too.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Flags {
    waiting: bool,
    ready: bool,
    paused: bool,
    kept: Option<HeldState>,
    detected_loss: Option<(u64, String)>,
    lost: Option<LossReport>,
    out_of_memory: Option<String>,
    failed: Option<(String, bool)>,
    ending: Option<Ending>,
    kill_reason: Option<String>,
    stalled: bool,
    host_lost: bool,
    collateral: bool,
}

/// A loss of a rank that waits for an order.
#[derive(Serialize, Deserialize)]
struct LossReport {
    rank: u64,
    message: String,
    #[serde(flatten)]
    held: HeldState,
}

impl From<Flags> for RankStatus {
    fn from(flags: Flags) -> RankStatus {
        let loss = |rank, message, held| PeerLoss {
            rank,
            message,
            held,
        };
        let reported = |lost: LossReport| loss(lost.rank, lost.message, Some(lost.held));
        let detected = |(rank, message)| loss(rank, message, None);
        let failed = |(message, deterministic)| Fault::Failed {
            message,
            deterministic,
        };
        RankStatus {
            stage: match flags.ending {
                Some(ending) => Stage::Ended(ending),
                None if flags.paused => Stage::Paused,
                None if flags.ready => Stage::Ready,
                None if flags.waiting => Stage::Connecting,
                None => Stage::Starting,
            },
            kept: flags.kept,
            loss: (flags.lost.map(reported)).or(flags.detected_loss.map(detected)),
            fault: (flags.out_of_memory.map(Fault::OutOfMemory)).or(flags.failed.map(failed)),
            cause: match flags.collateral {
                true => Some(Cause::Collateral),
                false if flags.stalled => flags.kill_reason.map(Cause::Stalled),
                false if flags.host_lost => flags.kill_reason.map(Cause::HostLost),
                false => flags.kill_reason.map(Cause::Killed),
            },
        }
    }
}

impl From<RankStatus> for Flags {
    fn from(status: RankStatus) -> Flags {
        let mut flags = Flags {
            waiting: status.stage == Stage::Connecting,
            ready: status.stage == Stage::Ready,
            paused: status.stage == Stage::Paused,
            kept: status.kept,
            ending: status.ending(),
            collateral: status.is_collateral(),
            stalled: status.is_stalled(),
            host_lost: status.is_host_lost(),
            ..Flags::default()
        };
        if let Some(PeerLoss {
            rank,
            message,
            held,
        }) = status.loss
        {
            match held {
                None => flags.detected_loss = Some((rank, message)),
                Some(held) => {
                    flags.lost = Some(LossReport {
                        rank,
                        message,
                        held,
                    });
                }
            }
        }
        match status.fault {
            Some(Fault::OutOfMemory(message)) => flags.out_of_memory = Some(message),
            Some(Fault::Failed {
                message,
                deterministic,
            }) => flags.failed = Some((message, deterministic)),
            None => {}
        }
        if let Some(Cause::Killed(reason) | Cause::Stalled(reason) | Cause::HostLost(reason)) =
            status.cause
        {
            flags.kill_reason = Some(reason);
        }
        flags
    }
}

impl RankStatus {
    /// The status of a rank whose process has ended.
    pub fn ended(ending: Ending) -> RankStatus {
        RankStatus {
            stage: Stage::Ended(ending),
            ..RankStatus::default()
        }
    }

    /// How its process ended; `None` while it lives.
    pub fn ending(&self) -> Option<Ending> {
        match self.stage {
            Stage::Ended(ending) => Some(ending),
            Stage::Starting | Stage::Connecting | Stage::Ready | Stage::Paused => None,
        }
    }

    pub fn has_ended(&self) -> bool {
        self.ending().is_some()
    }

    /// The status of a rank that continues with a state from an earlier generation.
    pub fn carrying(held: HeldState) -> RankStatus {
        RankStatus {
            kept: Some(held),
            ..RankStatus::default()
        }
    }

    /// The state that it holds while it waits for an order after a loss, or for connections with what it carries.
    pub fn held(&self) -> Option<HeldState> {
        let lost = || self.loss.as_ref().and_then(|loss| loss.held);
        self.kept.or_else(lost)
    }

    /// The same if it has ended or holds a state, as one that has left its world; `None` if it is still a part of it.
    pub fn as_left(&self) -> Option<RankStatus> {
        if self.has_ended() {
            return Some(self.clone());
        }
        self.held()?;
        let code = match self.stage {
            Stage::Paused => exit::DRAINED,
            _ => exit::PEER_LOST,
        };
        Some(RankStatus {
            stage: Stage::Ended(Ending::Code(code)),
            ..self.clone()
        })
    }

    /// Whether it was killed for a lack of progress; see [`Cause::Stalled`].
    pub fn is_stalled(&self) -> bool {
        matches!(self.cause, Some(Cause::Stalled(_)))
    }

    /// Records that it is killed for a lack of progress ([`Cause::Stalled`]), unless a reason is known.
    pub fn stall(&mut self, message: String) {
        self.cause.get_or_insert(Cause::Stalled(message));
    }

    fn is_host_lost(&self) -> bool {
        matches!(self.cause, Some(Cause::HostLost(_)))
    }

    pub fn is_collateral(&self) -> bool {
        self.cause == Some(Cause::Collateral)
    }

    /// Records that it is killed; true if nothing else had ended it. The first reason counts.
    pub fn kill(&mut self, reason: impl FnOnce() -> String) -> bool {
        let first = self.cause.is_none();
        self.cause.get_or_insert_with(|| Cause::Killed(reason()));
        first
    }

    /// Records that it ran out of memory, which explains all its other errors.
    pub fn out_of_memory(&mut self, message: String) {
        self.fault = Some(Fault::OutOfMemory(message));
    }

    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.fault, Some(Fault::OutOfMemory(_)))
    }

    /// Applies a report of the rank.
    pub fn take(&mut self, report: &Report) {
        match report {
            Report::Connecting => self.stage = Stage::Connecting,
            Report::Connected => {
                self.stage = Stage::Starting;
                self.kept = None;
            }
            Report::Ready => self.stage = Stage::Ready,
            Report::LossDetected { rank, message } => {
                if self.held().is_none() {
                    self.lose(*rank, message, None);
                }
            }
            Report::Lost {
                rank,
                message,
                held,
            } => self.lose(*rank, message, Some(*held)),
            Report::Paused { held } => {
                self.stage = Stage::Paused;
                self.kept = Some(*held);
            }
            Report::DeviceLost { message } => {
                self.kill(|| message.clone());
            }
            Report::OutOfMemory { message } => self.out_of_memory(message.clone()),
            Report::Failed {
                message,
                deterministic,
            } => self.fail(message, *deterministic),
            Report::VolumeFailed { message } => self.fail(message, true),
            Report::Alive
            | Report::Step(_)
            | Report::Evaluation(_)
            | Report::Committed { .. }
            | Report::Straggler { .. }
            | Report::Stalled { .. }
            | Report::Progressing
            | Report::StandingBy
            | Report::Entered { .. }
            | Report::Warning { .. } => {}
        }
    }

    fn lose(&mut self, rank: u64, message: &str, held: Option<HeldState>) {
        let message = message.to_owned();
        self.loss = Some(PeerLoss {
            rank,
            message,
            held,
        });
    }

    fn fail(&mut self, message: &str, deterministic: bool) {
        if !self.is_out_of_memory() {
            let message = message.to_owned();
            self.fault = Some(Fault::Failed {
                message,
                deterministic,
            });
        }
    }

    /// Records the end of its process. `follows`: it belongs to an external trainer and another rank
    /// failed before. An external trainer cannot report that it failed because of a lost peer: it exits
    /// with an error, or NCCL's watchdog aborts it.
    pub fn end(&mut self, ending: Ending, follows: bool) {
        self.stage = Stage::Ended(ending);
        let abort = Signal::ABORT.as_raw();
        let killed = matches!(ending, Ending::Signal(signal) if signal != abort);
        if follows && !killed && !self.is_stalled() {
            self.cause = Some(Cause::Collateral);
        }
    }

    pub fn messages(&mut self) -> impl Iterator<Item = &mut String> {
        let fault = match &mut self.fault {
            Some(Fault::OutOfMemory(message) | Fault::Failed { message, .. }) => Some(message),
            None => None,
        };
        let loss = self.loss.as_mut().map(|loss| &mut loss.message);
        let cause = match &mut self.cause {
            Some(Cause::Killed(reason) | Cause::Stalled(reason) | Cause::HostLost(reason)) => {
                Some(reason)
            }
            Some(Cause::Collateral) | None => None,
        };
        [fault, loss, cause].into_iter().flatten()
    }

    /// Whether it failed or noticed a lost peer.
    pub fn in_trouble(&self) -> bool {
        let failed = match self.stage {
            Stage::Ended(Ending::Code(code)) => ![exit::FINISHED, exit::DRAINED].contains(&code),
            Stage::Ended(Ending::Signal(_)) => true,
            // Its peers may have been ordered to drain and have passed that on.
            Stage::Ended(Ending::Unrequested) => false,
            Stage::Starting | Stage::Connecting | Stage::Ready | Stage::Paused => false,
        };
        self.loss.is_some() || failed
    }

    /// Message for a process that a signal killed.
    pub fn signal_message(&self, signal: i32) -> String {
        match &self.cause {
            Some(Cause::Killed(reason) | Cause::Stalled(reason)) => {
                format!("{reason}, so it was killed")
            }
            Some(Cause::HostLost(reason)) => reason.clone(),
            Some(Cause::Collateral) | None => format!("killed by signal {signal}"),
        }
    }

    /// The signal that killed it, except as a consequence of other lost ranks.
    fn killed_by(&self) -> Option<i32> {
        match self.stage {
            Stage::Ended(Ending::Signal(signal)) if !self.is_collateral() => Some(signal),
            _ => None,
        }
    }

    /// Whether it has neither ended nor reported the state that it holds.
    fn undecided(&self) -> bool {
        !self.has_ended() && self.held().is_none()
    }

    /// Whether it holds the state of an earlier generation and has said nothing of a loss in this one: it may be lost.
    fn only_carries(&self) -> bool {
        !self.has_ended()
            && self.stage != Stage::Paused
            && self.kept.is_some()
            && self.loss.is_none()
    }
}

/// Limit for a rank's silence before the ranks are connected; later their heartbeats count.
pub const SILENCE: Duration = Duration::from_secs(10);
/// After a loss: time in which waiting ranks may still report that they are connected, or are seen to end.
const MEETING: Duration = Duration::from_secs(1);
/// After a loss: time in which the end of the lost rank's process is seen, which says more than its peers can.
const EXIT: Duration = Duration::from_millis(100);
/// Time in which ranks must detect a loss (the collectives' limit is 5 s).
pub const NOTICE: Duration = Duration::from_secs(10);
/// Time for which a rank that detected a loss may compute; it checks after every micro-batch.
pub const ANSWER: Duration = Duration::from_secs(120);
/// Time in which survivors must commit and exit after the order.
pub const COMMIT: Duration = Duration::from_secs(600);

/// Whether all ranks have left their world in order, and some wait for what follows.
pub fn is_paused(seen: &[RankStatus]) -> bool {
    let has_left = |seen: &RankStatus| seen.stage == Stage::Paused || seen.has_ended();
    seen.iter().all(has_left) && seen.iter().any(|seen| seen.stage == Stage::Paused)
}

/// Whether no rank needs to be waited for any more, `waited` after the detection of a loss. Every
/// rank has ended, has reported its state, is reported as lost, waits for lost ranks, or hangs.
pub fn is_settled(seen: &[RankStatus], waited: Duration) -> bool {
    let named = |rank: u64| loss_of(seen, rank).is_some();
    // The end of a process says which rank is lost. If none ends, a connection of living ranks is.
    let is_explained = seen.iter().any(RankStatus::has_ended) || waited > MEETING;
    let is_missing = |(rank, s): (u64, &RankStatus)| s.only_carries() && named(rank);
    if !is_explained && (0..).zip(seen).any(is_missing) {
        return false;
    }
    let awaited = (0..).zip(seen).filter(|(_, s)| s.undecided());
    awaited
        .filter(|(rank, s)| s.fault.is_some() || !named(*rank) || waited < EXIT)
        .all(|(rank, s)| match s.loss {
            _ if s.fault.is_none() && named(rank) => false,
            Some(_) => waited > ANSWER,
            None if s.stage == Stage::Connecting => waited > MEETING,
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
            None if seen.stage == Stage::Connecting || external => {
                seen.cause = Some(Cause::Collateral);
            }
            named => {
                let hung = || format!("no report within {} s of losing a peer", NOTICE.as_secs());
                // Its own reason is better, for example a lost GPU.
                seen.kill(|| named.unwrap_or_else(hung));
            }
        }
        behind.push(rank);
    }
    behind
}

/// Ranks that peers reported as lost, and how the loss was detected.
fn named(seen: &[RankStatus]) -> impl Iterator<Item = (u64, &str)> {
    let losses = || seen.iter().filter_map(|s| s.loss.as_ref());
    let reported = losses().filter(|loss| loss.held.is_some());
    let all = reported.chain(losses().filter(|loss| loss.held.is_none()));
    all.map(|loss| (loss.rank, loss.message.as_str()))
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
        let held = seen.held()?;
        (!seen.has_ended() && held.whole && held.samples > pinned)
            .then_some((held.samples, std::cmp::Reverse(rank)))
    });
    holders.max().map(|(_, rank)| rank.0)
}

/// The living ranks with a complete state, the newest first: those that can continue in another generation.
pub fn carriers(seen: &[RankStatus]) -> Vec<(u64, HeldState)> {
    let living = (0..).zip(seen).filter(|(_, seen)| !seen.has_ended());
    let holders = living.filter_map(|(rank, seen)| Some((rank, seen.held()?)));
    let mut carriers: Vec<_> = holders.filter(|(_, held)| held.whole).collect();
    carriers.sort_by_key(|(rank, held)| (std::cmp::Reverse(held.samples), *rank));
    carriers
}

/// Number of ranks that a signal killed on hosts that are still there.
pub fn killed(seen: &[RankStatus]) -> u64 {
    let killed = seen
        .iter()
        .filter(|s| s.killed_by().is_some() && !s.is_host_lost());
    killed.count() as u64
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
    let endings: Vec<Ending> = seen.iter().map(RankStatus::ending).collect::<Option<_>>()?;
    let numbered = || seen.iter().zip(0u64..);
    let mut out_of_memory = |message: String| Outcome::OutOfMemory {
        per_device_batch_size,
        smaller: descent(),
        message,
    };
    let failed = |rank: u64, message: &str, deterministic: bool| {
        let message = message.to_owned();
        Some(Outcome::Failed {
            rank,
            message,
            deterministic,
        })
    };
    let faults = || numbered().filter_map(|(s, rank)| Some((rank, s.fault.as_ref()?)));
    for (_, fault) in faults() {
        if let Fault::OutOfMemory(message) = fault {
            return Some(out_of_memory(message.clone()));
        }
    }
    for (rank, fault) in faults() {
        if let Fault::Failed {
            message,
            deterministic,
        } = fault
        {
            return failed(rank, message, *deterministic);
        }
    }
    let signalled = numbered().find_map(|(s, rank)| Some((rank, s, s.killed_by()?)));
    if let Some((rank, lost, signal)) = signalled {
        let message = lost.signal_message(signal);
        if signal == 9 && lost.cause.is_none() && oom_killed() {
            return Some(out_of_memory(format!(
                "rank {rank} was killed by the kernel's out-of-memory killer"
            )));
        }
        if killed(seen) == seen.len() as u64 {
            // No rank survived, so fewer ranks would not help.
            return failed(rank, &message, false);
        }
        return Some(Outcome::Lost { rank, message });
    }
    if endings.iter().all(|e| *e == Ending::Code(exit::FINISHED)) {
        return Some(Outcome::Finished);
    }
    let drained = Ending::Code(exit::DRAINED);
    // Ranks of one world agree on a step to exit at: all exit together with one that was ordered to.
    let asked = endings.contains(&drained);
    let left = |s: &RankStatus| match s.ending() {
        Some(Ending::Unrequested) => asked || s.is_collateral(),
        ending => s.is_collateral() || ending == Some(drained),
    };
    if seen.iter().all(left) {
        return Some(Outcome::Drained);
    }
    for (s, rank) in numbered().filter(|(s, _)| !left(s)) {
        if let Some(message) = s.ending().and_then(Ending::failure) {
            return failed(rank, &message, false);
        }
    }
    // Ranks only lost each other: the network failed, the processes did not.
    let (rank, message) = named(seen)
        .next()
        .unwrap_or((0, "the ranks lost each other"));
    failed(rank, message, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn killed() -> RankStatus {
        RankStatus::ended(Ending::Signal(9))
    }

    fn held(samples: u64) -> HeldState {
        HeldState {
            step: samples / 8,
            samples,
            batch: 8,
            whole: true,
            joinable: true,
        }
    }

    fn survivor(of: u64) -> RankStatus {
        RankStatus {
            loss: Some(PeerLoss {
                rank: of,
                message: "no heartbeat for 3.0 s".into(),
                held: Some(held(24)),
            }),
            ..RankStatus::ended(Ending::Code(exit::PEER_LOST))
        }
    }

    fn detected(rank: u64, message: &str) -> Option<PeerLoss> {
        let message = message.to_owned();
        Some(PeerLoss {
            rank,
            message,
            held: None,
        })
    }

    fn failed(message: &str, deterministic: bool) -> Option<Fault> {
        let message = message.to_owned();
        Some(Fault::Failed {
            message,
            deterministic,
        })
    }

    fn connecting() -> RankStatus {
        RankStatus {
            stage: Stage::Connecting,
            ..RankStatus::default()
        }
    }

    #[test]
    fn a_status_survives_its_transport() {
        let reported = survivor(1);
        let statuses = [
            RankStatus::default(),
            connecting(),
            RankStatus {
                stage: Stage::Ready,
                loss: detected(3, "connection closed"),
                ..RankStatus::default()
            },
            RankStatus {
                fault: failed("no such file", true),
                ..reported
            },
            RankStatus {
                fault: Some(Fault::OutOfMemory("2 GiB".into())),
                cause: Some(Cause::Killed("no report for 10 s".into())),
                ..killed()
            },
            RankStatus {
                cause: Some(Cause::Collateral),
                ..killed()
            },
            on_lost_host(),
            RankStatus::carrying(held(8)),
            paused(),
        ];
        for status in statuses {
            let sent = serde_json::to_string(&status).unwrap();
            assert_eq!(serde_json::from_str::<RankStatus>(&sent).unwrap(), status);
        }
    }

    fn on_lost_host() -> RankStatus {
        RankStatus {
            cause: Some(Cause::HostLost("h2 is lost".into())),
            ..killed()
        }
    }

    #[test]
    fn the_ranks_of_a_lost_host_are_lost_and_their_devices_may_come_back() {
        let lost = |seen: &[RankStatus]| match outcome(seen, 2, || None, || true) {
            Some(Outcome::Lost { rank, message }) => (rank, message),
            other => panic!("{other:?}"),
        };
        let message = "h2 is lost".to_owned();
        assert_eq!(lost(&[survivor(1), on_lost_host()]), (1, message.clone()));
        // A world of which nothing is left has not failed.
        assert_eq!(lost(&[on_lost_host(), on_lost_host()]), (0, message));
        assert_eq!(super::killed(&[on_lost_host(), killed()]), 1);
    }

    #[test]
    fn a_rank_killed_by_its_agent_is_reported_with_its_loss() {
        let message = |seen: &[RankStatus]| match outcome(seen, 2, || None, || true) {
            Some(Outcome::Lost { rank: 1, message }) => message,
            other => panic!("{other:?}"),
        };
        let mut seen = [survivor(1), killed()];
        let loss = loss_of(&seen, 1).map(str::to_owned).unwrap();
        assert!(seen[1].kill(|| loss));
        assert_eq!(message(&seen), "no heartbeat for 3.0 s, so it was killed");
    }

    #[test]
    fn a_computing_rank_is_awaited_and_a_hanging_one_is_not() {
        let computing = RankStatus {
            loss: detected(1, "connection closed"),
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
            fault: failed("no such file", true),
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

    fn paused() -> RankStatus {
        let mut paused = RankStatus::default();
        paused.take(&Report::Ready);
        paused.take(&Report::Paused { held: held(16) });
        paused
    }

    #[test]
    fn ranks_that_wait_count_as_left_and_the_newest_continues_first() {
        let waiting = |samples| RankStatus {
            stage: Stage::Ready,
            loss: Some(PeerLoss {
                rank: 0,
                message: "connection closed".into(),
                held: Some(held(samples)),
            }),
            ..RankStatus::default()
        };
        let seen = [killed(), waiting(16), waiting(24), waiting(24)];
        let carriers: Vec<(u64, u64)> = carriers(&seen)
            .into_iter()
            .map(|(rank, held)| (rank, held.samples))
            .collect();
        assert_eq!(carriers, [(2, 24), (3, 24), (1, 16)]);
        assert_eq!(outcome(&seen, 1, || None, || false), None, "three live");
        let left: Option<Vec<_>> = seen.iter().map(RankStatus::as_left).collect();
        let lost = outcome(&left.unwrap(), 1, || None, || false);
        assert!(
            matches!(lost, Some(Outcome::Lost { rank: 0, .. })),
            "{lost:?}"
        );
        // Another one that is lost while the others connect takes its state along, and they keep theirs.
        let mut connecting = RankStatus::carrying(held(24));
        connecting.take(&Report::Connecting);
        assert!(connecting.as_left().is_some());
        assert!(is_settled(&[killed(), connecting.clone()], Duration::ZERO));
        connecting.take(&Report::Connected);
        assert_eq!(connecting.as_left(), None);
    }

    #[test]
    fn a_rank_that_is_lost_with_the_state_that_it_brings_is_seen_to_end() {
        let brings = RankStatus::carrying(held(16));
        let mut noticed = brings.clone();
        noticed.take(&Report::Lost {
            rank: 1,
            message: "it left while the ranks connected".into(),
            held: held(16),
        });
        let seen = [noticed.clone(), brings];
        assert!(!is_settled(&seen, MEETING), "its agent learns of it later");
        assert!(is_settled(&seen, MEETING + Duration::from_millis(1)));
        let seen = [noticed, killed()];
        assert!(is_settled(&seen, Duration::ZERO));
        let left = seen.map(|it| it.as_left().unwrap());
        let lost = outcome(&left, 1, || None, || false);
        assert!(
            matches!(lost, Some(Outcome::Lost { rank: 1, .. })),
            "{lost:?}"
        );
    }

    #[test]
    fn ranks_that_have_paused_are_drained_ones() {
        assert!(is_paused(&[paused(), paused()]));
        let still_there = RankStatus {
            stage: Stage::Ready,
            ..RankStatus::default()
        };
        assert!(!is_paused(&[paused(), still_there]));
        let finished = RankStatus::ended(Ending::Code(exit::FINISHED));
        assert!(!is_paused(&[finished.clone(), finished]));
        let left = [paused(), paused()].map(|it| it.as_left().unwrap());
        assert_eq!(outcome(&left, 1, || None, || false), Some(Outcome::Drained));
    }

    #[test]
    fn only_ranks_that_cannot_answer_are_killed_after_a_loss() {
        let mut seen = [
            survivor(5),
            killed(),
            connecting(),
            RankStatus::default(),
            RankStatus::default(),
        ];
        assert_eq!(give_up_unresponsive(&mut seen, 2, false), [4, 5, 6]);
        let killed = |reason: &str| Some(Cause::Killed(reason.to_owned()));
        let causes = [
            None,
            None,
            Some(Cause::Collateral),
            killed("no heartbeat for 3.0 s"),
            killed("no report within 10 s of losing a peer"),
        ];
        assert_eq!(seen.map(|s| s.cause), causes);
    }

    #[test]
    fn ranks_that_wait_for_a_silent_one_are_not_lost() {
        let silent = RankStatus {
            cause: Some(Cause::Killed("no report for 10 s".into())),
            ..killed()
        };
        let mut seen = [connecting(), silent];
        assert!(!is_settled(&seen, MEETING), "they may just have connected");
        assert!(is_settled(&seen, MEETING + Duration::from_millis(1)));
        seen[0] = RankStatus {
            cause: Some(Cause::Collateral),
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
            loss: detected(2, "it did not come"),
            ..RankStatus::ended(Ending::Code(exit::PEER_LOST))
        };
        let blamed = |seen: &[RankStatus]| match outcome(seen, 2, || None, || false) {
            Some(Outcome::Failed { rank, message, .. }) => (rank, message),
            other => panic!("{other:?}"),
        };
        let mut seen = [left.clone(), left.clone(), left];
        assert_eq!(blamed(&seen), (2, "it did not come".into()));
        seen[2] = RankStatus {
            fault: failed("no route", false),
            ..RankStatus::ended(Ending::Code(exit::FAILED))
        };
        assert_eq!(blamed(&seen), (2, "no route".into()));
    }

    #[test]
    fn ranks_that_exit_with_a_drained_one_are_drained() {
        let (asked, unasked) = (Ending::Code(exit::DRAINED), Ending::Unrequested);
        let of =
            |endings: [Ending; 2]| outcome(&endings.map(RankStatus::ended), 2, || None, || false);
        assert_eq!(of([asked, unasked]), Some(Outcome::Drained));
        let message = |outcome| match outcome {
            Some(Outcome::Failed { message, .. }) => message,
            other => panic!("{other:?}"),
        };
        assert!(message(of([unasked, unasked])).contains("without a request to drain"));
        assert_eq!(message(of([asked, Ending::Code(3)])), "exit code 3");
        // The other ranks save meanwhile.
        let in_trouble = |ending| RankStatus::ended(ending).in_trouble();
        assert!(!in_trouble(unasked) && in_trouble(Ending::Code(3)));
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
