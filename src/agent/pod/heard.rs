//! Handles rank events in a pod: reports, exits and missed heartbeats.

use super::PodAgent;
use crate::host::{Event as RankEvent, News, last_lines, new_output};
use crate::lifecycle::files;
use crate::lifecycle::protocol::{Ending, Report};
use crate::lifecycle::rank_status::{RankStatus, Stage};
use crate::lifecycle::stall::OnStall;
use crate::telemetry::{Event, now};

impl PodAgent {
    pub(super) fn take_event(&mut self, event: RankEvent) {
        let rank = event.rank;
        let mut ranks = self.state.first..self.state.first + self.state.ranks.len() as u64;
        let Some(local) = ranks.position(|own| own == rank) else {
            return;
        };
        if self.state.generation != event.generation {
            return;
        }
        if let Some(current) = &mut self.current {
            current.silence.take(local, &event.news);
        }
        let urgent = match event.news {
            News::Report(report) => {
                let report = retried(*report);
                self.state.ranks[local].take(&report);
                self.take_report(rank, report)
            }
            News::Exited(ending) => {
                self.take_ending(rank, local, ending);
                true
            }
        };
        self.publish_report(urgent);
    }

    /// Publishes a changed state. Only urgent changes wake waiting callers; later requests get the others too.
    fn publish_report(&mut self, urgent: bool) {
        if urgent {
            self.publish();
        } else {
            self.state.bound();
            self.published.send_if_modified(|published| {
                published.clone_from(&self.state);
                false
            });
        }
    }

    /// Records how a rank ended. A rank killed by the out-of-memory killer is reported like one
    /// that detected the shortage itself.
    fn take_ending(&mut self, rank: u64, local: usize, ending: Ending) {
        let external = self.external_job().is_some();
        let current = self.current.as_ref();
        if ending == Ending::Signal(9) && current.is_some_and(|c| c.oom_kills.raised()) {
            self.state.ranks[local].out_of_memory(format!(
                "rank {rank} was killed by the kernel's out-of-memory killer"
            ));
        }
        if matches!(ending, Ending::Signal(_)) || ending.failure().is_some() {
            let log = self
                .identity
                .run
                .join(files::rank_log(self.state.generation, rank));
            self.state.log_tail = last_lines(&log);
        }
        let ranks = &mut self.state.ranks;
        let follows = external && ranks.iter().any(RankStatus::in_trouble);
        ranks[local].end(ending, follows);
        if self.all_ended() {
            self.follow_ranks(true);
        }
    }

    /// Records a report; true if the controller must receive it at once.
    fn take_report(&mut self, rank: u64, report: Report) -> bool {
        if let Some(event) = report.event(rank) {
            self.log.of_training(event);
        }
        // A controller that believes a rank is waiting would not wait for its report after a loss: it must hear of
        // connected ranks.
        let mut urgent = !matches!(
            report,
            Report::Connecting
                | Report::Alive
                | Report::Evaluation(_)
                | Report::Straggler { .. }
                | Report::Warning { .. }
        );
        match report {
            Report::Ready => {
                let mut ranks = self.state.ranks.iter();
                if ranks.all(|seen| seen.stage == Stage::Ready) {
                    self.state.ready = Some(now());
                }
            }
            Report::Step(record) => {
                urgent = self.state.first_step.is_none();
                self.state.first_step.get_or_insert(record.time);
                if let Some(current) = &mut self.current {
                    current.pace.step(&record);
                    let budget = self.state.budget;
                    self.state.seconds_left =
                        budget.and_then(|budget| current.pace.seconds_left(budget));
                }
                self.state.step = Some(record);
            }
            Report::Committed { checkpoint_ref, .. } => {
                self.state.committed = Some(checkpoint_ref);
            }
            Report::Stalled { message, waiting } => self.take_stall(rank, &message, waiting),
            Report::Progressing => self.state.stalled = None,
            // The status of the rank has all that the others say.
            _ => {}
        }
        urgent
    }

    /// Handles a rank without progress. One that was `waiting` for other ranks does not hide the one that they wait for.
    fn take_stall(&mut self, rank: u64, message: &str, waiting: bool) {
        let on_stall = self.job.as_ref().map(|job| job.on_stall);
        if on_stall.unwrap_or_default() == OnStall::Report {
            if !waiting || self.state.stalled.is_none() {
                self.state.stalled = Some(format!("rank {rank}: {message}"));
            }
        } else if let Some(current) = &mut self.current {
            current
                .ranks
                .stall(&mut self.state.ranks, rank, message, waiting);
        }
    }

    /// Kills ranks that miss their heartbeat before they have connected to their peers.
    pub(super) fn kill_timed_out(&mut self) {
        let Some(current) = &mut self.current else {
            return;
        };
        for local in current.silence.timed_out() {
            if let Some(seen) = self.state.ranks.get_mut(local) {
                seen.kill(|| current.silence.message());
            }
            current.ranks.kill_one(self.state.first + local as u64);
        }
    }

    /// Copies the ranks' output into the pod's log, and publishes what the external trainer reports. `ended`: the
    /// ranks have exited, so this is the last report, and the newest checkpoint counts.
    pub(super) fn follow_ranks(&mut self, ended: bool) {
        let Some(current) = &mut self.current else {
            return;
        };
        let watch = current.progress.as_mut();
        new_output(&mut current.tails, watch, ended, |rank, line| {
            self.log.of_pod(Event::Output { rank, line });
        });
        let (Some(watch), Some(external)) = (&mut current.progress, &current.external) else {
            return;
        };
        let mut newest = None;
        let step = watch.next(&current.generation, ended, || {
            newest = external.newest(&self.identity.run);
            Some(newest.as_ref()?.path.clone())
        });
        let checkpoint = newest.as_ref().map(|newest| newest.path.as_path());
        let stall = current.stall.as_mut().filter(|_| !ended);
        let stall = stall.and_then(|stall| stall.look(&current.tails, checkpoint, step.is_some()));
        if ended {
            current.progress = None;
            if newest.is_some() {
                self.state.external_checkpoint = newest;
            }
        }
        if let Some(report) = stall {
            self.take_report(0, report);
            self.publish();
        }
        let Some(step) = step else {
            return;
        };
        if let Some(total) = step.external.and_then(|step| step.total_samples) {
            self.state.budget = Some(total);
        }
        let urgent = self.take_report(0, Report::Step(step));
        self.publish_report(urgent);
    }
}

/// A volume may be repaired while its job lives: the next generation waits for that. A local run ends instead.
fn retried(report: Report) -> Report {
    match report {
        Report::VolumeFailed { message } => Report::Failed {
            message,
            deterministic: false,
        },
        other => other,
    }
}
