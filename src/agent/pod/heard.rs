//! Handles rank events in a pod: reports and exits.

use super::PodAgent;
use crate::host::{Event as RankEvent, HostGeneration, News, last_lines};
use crate::lifecycle::files;
use crate::lifecycle::protocol::{Ending, Report};
use crate::lifecycle::stall::OnStall;
use crate::telemetry::now;

impl PodAgent {
    pub(super) fn take_event(&mut self, event: RankEvent) {
        let event = retried(event);
        if let Some(standby) = &mut self.standby {
            // None of its processes is a rank.
            standby.host.take(&event);
        }
        let current = self.current.as_mut();
        if !current.is_some_and(|current| current.take(&event)) {
            return;
        }
        let urgent = match event.news {
            News::Report(report) => self.take_report(event.rank, *report),
            News::Posted(_) | News::Printed(_) | News::Stacks(_) => false,
            News::Exited(ending) => {
                self.take_ending(event.rank, ending);
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
            self.describe();
            self.published.send_if_modified(|published| {
                published.clone_from(&self.state);
                false
            });
        }
    }

    /// Records how a rank ended. A rank killed by the out-of-memory killer is reported like one
    /// that detected the shortage itself.
    fn take_ending(&mut self, rank: u64, ending: Ending) {
        if let Some(current) = &mut self.current
            && ending == Ending::Signal(9)
            && current.is_oom_killed()
        {
            let message = format!("rank {rank} was killed by the kernel's out-of-memory killer");
            current.out_of_memory(rank, message);
        }
        if matches!(ending, Ending::Signal(_)) || ending.failure().is_some() {
            let log = files::rank_log(self.state.generation, rank);
            self.state.log_tail = last_lines(&self.identity.run.join(log));
        }
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
                let current = self.current.as_ref();
                if current.is_some_and(HostGeneration::is_ready) {
                    self.state.ready = Some(now());
                }
            }
            Report::Step(record) => {
                urgent = self.state.first_step.is_none();
                self.state.first_step.get_or_insert(record.time);
                self.pace.step(&record);
                let budget = self.state.budget;
                self.state.seconds_left = budget.and_then(|budget| self.pace.seconds_left(budget));
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
            current.stall(rank, message, waiting);
        }
    }

    /// Copies the ranks' output into the pod's log, and publishes what the external trainer reports. `ended`: the
    /// ranks have exited, so this is the last report, and the newest checkpoint counts.
    pub(super) fn follow_ranks(&mut self, ended: bool) {
        let Some(current) = &mut self.current else {
            return;
        };
        let followed = current.follow(ended, |rank, line| {
            self.log.of_rank(rank, line);
        });
        if followed.is_last && followed.checkpoint.is_some() {
            self.state.external_checkpoint = followed.checkpoint;
        }
        if let Some(report) = followed.stall {
            self.take_report(0, report);
            self.publish();
        }
        let Some(step) = followed.step else {
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
fn retried(mut event: RankEvent) -> RankEvent {
    if let News::Report(report) = &mut event.news
        && let Report::VolumeFailed { message } = &mut **report
    {
        **report = Report::Failed {
            message: std::mem::take(message),
            deterministic: false,
        };
    }
    event
}
