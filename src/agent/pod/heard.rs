//! Handles rank events in a pod: reports, exits and missed heartbeats.

use super::PodAgent;
use crate::agent::{Event as RankEvent, last_lines};
use crate::lifecycle::files;
use crate::lifecycle::protocol::{Ending, Report};
use crate::lifecycle::rank_status::RankStatus;
use crate::telemetry::{Event, now};

impl PodAgent {
    pub(super) fn take_event(&mut self, event: RankEvent) {
        let (RankEvent::Report {
            generation, rank, ..
        }
        | RankEvent::Exited {
            generation, rank, ..
        }) = &event;
        if self.state.generation != *generation {
            return;
        }
        let rank = *rank;
        let local = rank
            .checked_sub(self.state.first)
            .and_then(|r| usize::try_from(r).ok());
        let Some(local) = local.filter(|local| *local < self.state.ranks.len()) else {
            return;
        };
        if let Some(current) = &mut self.current {
            current.silence.take(local, &event);
        }
        let urgent = match event {
            RankEvent::Report { report, .. } => {
                self.state.ranks[local].take(&report);
                self.take_report(rank, *report)
            }
            RankEvent::Exited { ending, .. } => {
                self.take_ending(rank, local, ending);
                true
            }
        };
        if urgent {
            self.publish();
        } else {
            // Later requests get the newest state; waiting callers are not woken.
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
            self.state.ranks[local].out_of_memory = Some(format!(
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
            let current = self.current.as_mut();
            if let Some(watch) = current.and_then(|current| current.progress.as_mut()) {
                watch.look_at_once();
            }
            self.report_progress();
            self.find_trainer_checkpoint();
        }
    }

    /// Finds the external trainer's newest checkpoint on the pod where its rank 0 ran.
    fn find_trainer_checkpoint(&mut self) {
        let current = self.current.as_ref().filter(|_| self.state.first == 0);
        let external = current.and_then(|current| current.external.as_ref());
        if let Some(newest) = external.and_then(|external| external.newest(&self.identity.run)) {
            self.state.external_checkpoint = Some(newest);
        }
    }

    /// Records a report; true if the controller must receive it at once.
    fn take_report(&mut self, rank: u64, report: Report) -> bool {
        if let Some(event) = report.event(rank) {
            self.log.of_training(event);
        }
        match report {
            Report::Ready => {
                if self.state.ranks.iter().all(|seen| seen.ready) {
                    self.state.ready = Some(now());
                }
                true
            }
            Report::Step(record) => {
                let first = self.state.first_step.is_none();
                self.state.first_step.get_or_insert(record.time);
                self.state.step = Some(record);
                first
            }
            Report::Committed { checkpoint_ref, .. } => {
                self.state.committed = Some(checkpoint_ref);
                true
            }
            // A controller that believes a rank is waiting would not wait for its report after a
            // loss.
            Report::Connected => true,
            Report::Connecting
            | Report::Alive
            | Report::Evaluation(_)
            | Report::Straggler { .. }
            | Report::Warning { .. } => false,
            Report::LossDetected { .. }
            | Report::Lost { .. }
            | Report::OutOfMemory { .. }
            | Report::DeviceLost { .. }
            | Report::Failed { .. } => true,
        }
    }

    /// Kills ranks that miss their heartbeat before they have connected to their peers.
    pub(super) fn kill_timed_out(&mut self) {
        let Some(current) = &mut self.current else {
            return;
        };
        for local in current.silence.timed_out() {
            if let Some(seen) = self.state.ranks.get_mut(local) {
                seen.kill_reason = Some(current.silence.message());
            }
            current.ranks.kill_one(self.state.first + local as u64);
        }
    }

    /// Publishes what the external trainer reports.
    pub(super) fn report_progress(&mut self) {
        let Some(current) = &mut self.current else {
            return;
        };
        let (Some(watch), Some(external)) = (&mut current.progress, &current.external) else {
            return;
        };
        let run = &self.identity.run;
        let newest = || Some(external.newest(run)?.path);
        let Some(step) = watch.next(&current.generation, newest) else {
            return;
        };
        if let Some(total) = step.external.and_then(|step| step.total_samples) {
            self.state.budget = Some(total);
        }
        if self.take_report(0, Report::Step(step)) {
            self.publish();
        }
    }

    /// Copies the ranks' output into the pod's log.
    pub(super) fn copy_logs(&mut self) {
        let Some(current) = &mut self.current else {
            return;
        };
        for tail in &mut current.tails {
            let rank = tail.rank();
            for line in tail.lines() {
                self.log.of_pod(Event::Output { rank, line });
            }
        }
    }
}
