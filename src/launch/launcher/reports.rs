//! Turns the ranks' reports into events for the user and into the run's state.

use std::time::Instant;

use super::{Launcher, RESTARTS};
use crate::checkpoint;
use crate::host::{Event as RankEvent, News};
use crate::launch::LaunchError;
use crate::launch::run_dir::{GenerationRow, Phase};
use crate::lifecycle::CheckpointRef;
use crate::lifecycle::protocol::{Ending, Report};
use crate::lifecycle::stall::OnStall;
use crate::telemetry::{EvaluationRecord, Event, Metric, StepRecord};

impl Launcher<'_> {
    /// Handles an event of a rank of the current generation.
    pub(super) fn take(&mut self, event: &RankEvent) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        let rank = event.rank;
        if !current.host.take(event) {
            return Ok(());
        }
        match &event.news {
            News::Report(report) => self.take_report(rank, report),
            News::Posted(_) => Ok(()),
            News::Printed(_) | News::Stacks(_) => self.keep_output(event),
            News::Exited(ending) => {
                if let (Ending::Signal(signal), Some(seen)) = (ending, current.host.status(rank))
                    && !seen.is_collateral()
                {
                    let reason = seen.signal_message(*signal);
                    self.in_trouble();
                    self.display.event(&Event::RankLost { rank, reason });
                }
                Ok(())
            }
        }
    }

    pub(super) fn take_report(&mut self, rank: u64, report: &Report) -> Result<(), LaunchError> {
        if let Report::Step(_) = report {
            self.trains()?;
        }
        if let Some(event) = report.event(rank) {
            self.display.event(&event);
        }
        match report {
            Report::Ready => {
                if self.current.as_ref().is_some_and(|c| c.host.is_ready()) {
                    self.trains()?;
                }
            }
            Report::Step(record) => {
                self.record(&Metric::Step(record.clone()))?;
                self.step(record)?;
            }
            Report::Evaluation(record) => {
                self.record(&Metric::Evaluation(record.clone()))?;
                self.evaluation(record);
            }
            Report::Committed { checkpoint_ref, .. } => self.committed(checkpoint_ref.clone())?,
            Report::LossDetected { .. } | Report::Lost { .. } => self.in_trouble(),
            Report::DeviceLost { .. } => {
                self.in_trouble();
                self.lose_gpu(rank);
            }
            Report::Stalled { message, waiting } => {
                if self.on_stall != OnStall::Report
                    && let Some(current) = &mut self.current
                {
                    current.host.stall(rank, message, *waiting);
                }
            }
            Report::Connecting
            | Report::Alive
            | Report::Connected
            | Report::Paused { .. }
            | Report::StandingBy
            | Report::Entered { .. }
            | Report::Progressing
            | Report::Straggler { .. }
            | Report::Warning { .. }
            | Report::OutOfMemory { .. }
            | Report::Failed { .. }
            | Report::VolumeFailed { .. } => {}
        }
        Ok(())
    }

    pub(super) fn warn(&mut self, message: String) {
        self.display.event(&Event::Warning { message });
    }

    /// Starts the clock of the next generation when its reason is detected.
    pub(super) fn in_trouble(&mut self) {
        let world = self.current.as_ref().map_or(0, |c| c.host.record.world());
        self.trouble.get_or_insert((Instant::now(), world));
    }

    /// Marks that all ranks have connected and loaded their state. A step proves it too, because
    /// reports are ordered only within one rank.
    fn trains(&mut self) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        if std::mem::replace(&mut current.trains, true) {
            return Ok(());
        }
        let (generation, draining) = (&current.host.record, current.host.is_draining());
        self.display.event(&Event::GenerationStarted {
            generation: generation.number,
            world: generation.world(),
            formula: generation.formula(),
            reason: generation.reason.to_string(),
            start_samples: generation.start_samples(),
        });
        if !draining {
            self.state.phase = Phase::Running;
        }
        self.write_state()
    }

    pub(super) fn step(&mut self, record: &StepRecord) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        let first = !std::mem::replace(&mut current.stepped, true);
        let before = self.last_step.as_ref();
        if let Some(event) = before.and_then(|before| batch_changed(before, record)) {
            self.display.event(&event);
        }
        self.last_step = Some(record.clone());
        let losses = self.losses.as_mut().filter(|_| record.external.is_none());
        if let Some(message) = losses.and_then(|l| l.step(record.loss, record.gradient_norm)) {
            self.warn(message);
        }
        if first { self.first_step() } else { Ok(()) }
    }

    fn evaluation(&mut self, record: &EvaluationRecord) {
        self.last_evaluation = Some(record.loss);
        if let Some(message) = self.losses.as_mut().and_then(|l| l.evaluation(record.loss)) {
            self.warn(message);
        }
    }

    /// A checkpoint counts once its launcher has recorded it.
    fn committed(&mut self, checkpoint_ref: CheckpointRef) -> Result<(), LaunchError> {
        self.state.checkpoint_ref = Some(checkpoint_ref.clone());
        self.restarts_left = RESTARTS;
        self.write_state()?;
        if self.retain_in_bucket(&checkpoint_ref) {
            return Ok(());
        }
        if let Some(keep) = self.run.spec.checkpoint.keep {
            let run_dir = self.run_dir.path();
            let current = self.current.as_ref();
            let start = current.and_then(|current| current.host.record.start.as_ref());
            let start = start.map(|start| run_dir.join(&start.path));
            let kept = checkpoint::retain_in_run(
                run_dir,
                keep,
                &run_dir.join(checkpoint_ref.path),
                start.as_deref(),
            );
            // A surplus copy does not stop training.
            if let Err(error) = kept {
                self.warn(error.to_string());
            }
        }
        Ok(())
    }

    /// The first step of a generation ends its transition.
    fn first_step(&mut self) -> Result<(), LaunchError> {
        let Some((since, from)) = self.trouble.take() else {
            return Ok(());
        };
        let seconds = since.elapsed().as_secs_f64();
        if let Some(row) = self.state.generations.last_mut() {
            row.first_step_seconds = Some(seconds);
            if let Some(event) = rescaled(from, row, seconds) {
                self.display.event(&event);
            }
        }
        self.write_state()
    }
}

/// The event of a step whose batch differs from that of the preceding step `before`. A repeated
/// step after a rollback yields none, because `before` is then not in the current lineage.
fn batch_changed(before: &StepRecord, record: &StepRecord) -> Option<Event> {
    let follows = before.samples + record.batch == record.samples;
    if !follows || before.batch == record.batch {
        return None;
    }
    let test = before.norm_test.as_ref();
    Some(Event::BatchChanged {
        samples: before.samples,
        from: before.batch,
        to: record.batch,
        ratio: test
            .map(|test| test.ratio)
            .filter(|ratio| ratio.is_finite()),
        threshold: test.map(|test| test.threshold),
        reason: test.map_or("as scheduled".into(), |test| test.reason.clone()),
    })
}

/// The event of a generation whose world differs from the previous one of `from` ranks (0: none in
/// this launch).
fn rescaled(from: u64, row: &GenerationRow, seconds: f64) -> Option<Event> {
    (from > 0 && from != row.world).then(|| Event::Rescaled {
        from,
        to: row.world,
        seconds,
        message: row.reason.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::Reason;

    fn step(samples: u64, batch: u64) -> StepRecord {
        StepRecord {
            generation: 1,
            step: 1,
            samples,
            batch,
            world: 2,
            loss: 1.0,
            tokens: 1,
            learning_rate: 1.0,
            gradient_norm: 1.0,
            seconds: 1.0,
            time: 1.0,
            norm_test: None,
            coordinate_test: None,
            preferences: None,
            external: None,
        }
    }

    #[test]
    fn a_rollback_to_a_smaller_batch_is_not_a_batch_change() {
        // Grown from 12 to 24 after sample 48, lost, and repeated from the checkpoint at sample 24.
        assert_eq!(batch_changed(&step(72, 24), &step(36, 12)), None);
        assert_eq!(batch_changed(&step(36, 12), &step(48, 12)), None);
        let grown = batch_changed(&step(48, 12), &step(72, 24));
        assert!(
            matches!(
                grown,
                Some(Event::BatchChanged {
                    samples: 48,
                    from: 12,
                    to: 24,
                    ..
                })
            ),
            "{grown:?}"
        );
    }

    #[test]
    fn only_a_different_world_is_a_rescale() {
        let row = |world| GenerationRow {
            number: 2,
            reason: Reason::Resized { from: 3, to: 2 },
            world,
            formula: String::new(),
            start_samples: Some(0),
            created: 0.0,
            first_step_seconds: None,
            call: None,
        };
        // A resumed launch had no ranks before; a failed program is retried in the same world.
        assert_eq!(rescaled(0, &row(2), 1.0), None);
        assert_eq!(rescaled(2, &row(2), 1.0), None);
        let moved = rescaled(3, &row(2), 1.0);
        assert!(
            matches!(moved, Some(Event::Rescaled { from: 3, to: 2, .. })),
            "{moved:?}"
        );
    }
}
