//! What the launcher makes of its ranks' reports: events for those who watch, metrics, and the
//! run's state.

use std::path::PathBuf;
use std::time::Instant;

use super::{Launcher, RESTARTS};
use crate::agent::{Ending, Event as RankEvent};
use crate::job::protocol::Report;
use crate::job::{Pin, Reason};
use crate::launch::LaunchError;
use crate::launch::run_dir::Phase;
use crate::telemetry::{EvaluationRecord, Event, Metric, StepRecord};
use crate::train::checkpoint;

impl Launcher<'_> {
    /// Takes in what happened to a rank of the current generation.
    pub(super) fn take(&mut self, event: &RankEvent) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        let (RankEvent::Report { generation, .. } | RankEvent::Exited { generation, .. }) = event;
        if *generation != current.generation.number {
            return Ok(());
        }
        current.watch.take(event);
        match event {
            RankEvent::Report { report, rank, .. } => self.take_report(*rank, report),
            RankEvent::Exited { ending, rank, .. } => {
                if let Ending::Signal(signal) = ending {
                    self.in_trouble();
                    self.display.event(&Event::RankLost {
                        rank: *rank,
                        reason: format!("killed by signal {signal}"),
                    });
                }
                Ok(())
            }
        }
    }

    fn take_report(&mut self, rank: u64, report: &Report) -> Result<(), LaunchError> {
        match report {
            Report::Ready => {
                if self.current.as_ref().is_some_and(|c| c.watch.is_ready()) {
                    self.trains()?;
                }
            }
            Report::Step(record) => self.step(record)?,
            Report::Evaluation(record) => self.evaluation(record)?,
            Report::Committed {
                pin,
                seconds,
                bytes,
            } => {
                self.display.event(&Event::Checkpoint {
                    samples: pin.samples,
                    seconds: *seconds,
                    bytes: *bytes,
                });
                self.committed(pin.clone())?;
            }
            Report::Straggler {
                rank,
                seconds,
                usual,
            } => self.display.event(&Event::Straggler {
                rank: *rank,
                seconds: *seconds,
                usual: *usual,
            }),
            Report::Warning { message } => self.warn(message.clone()),
            Report::Lost { .. } => self.in_trouble(),
            Report::OutOfMemory { message } | Report::Failed { message, .. } => {
                self.warn(format!("rank {rank}: {message}"));
            }
        }
        Ok(())
    }

    pub(super) fn warn(&mut self, message: String) {
        self.display.event(&Event::Warning { message });
    }

    /// The reason for another generation is seen: its clock runs from here.
    pub(super) fn in_trouble(&mut self) {
        let world = self.current.as_ref().map_or(0, |c| c.generation.world());
        self.trouble.get_or_insert((Instant::now(), world));
    }

    /// All ranks have met and loaded their state. A step says so, too: only one rank's reports
    /// come in the order in which they were made.
    fn trains(&mut self) -> Result<(), LaunchError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        if std::mem::replace(&mut current.trains, true) {
            return Ok(());
        }
        let (generation, draining) = (&current.generation, current.draining);
        self.display.event(&Event::GenerationStarted {
            generation: generation.number,
            world: generation.world(),
            proof: generation.plan.proof.clone(),
            reason: generation.reason.to_string(),
            start_samples: generation.start_samples(),
        });
        if !draining {
            self.state.phase = Phase::Running;
        }
        self.write_state()
    }

    fn step(&mut self, record: &StepRecord) -> Result<(), LaunchError> {
        self.trains()?;
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        current.metrics.write(&Metric::Step(record.clone()))?;
        let first = !std::mem::replace(&mut current.stepped, true);
        self.display.event(&Event::Step(record.clone()));
        if let Some(before) = &self.last_step
            && before.batch != record.batch
        {
            let test = before.norm_test.as_ref();
            self.display.event(&Event::BatchChanged {
                samples: before.samples,
                from: before.batch,
                to: record.batch,
                ratio: test
                    .map(|test| test.ratio)
                    .filter(|ratio| ratio.is_finite()),
                threshold: test.map(|test| test.threshold),
                reason: test.map_or("as scheduled".into(), |test| test.reason.clone()),
            });
        }
        self.last_step = Some(record.clone());
        if let Some(message) = self.losses.step(record.loss) {
            self.warn(message);
        }
        match first {
            true => self.first_step(),
            false => Ok(()),
        }
    }

    fn evaluation(&mut self, record: &EvaluationRecord) -> Result<(), LaunchError> {
        if let Some(current) = &mut self.current {
            current.metrics.write(&Metric::Evaluation(record.clone()))?;
        }
        self.display.event(&Event::Evaluation(record.clone()));
        self.last_evaluation = Some(record.loss);
        if let Some(message) = self.losses.evaluation(record.loss) {
            self.warn(message);
        }
        Ok(())
    }

    /// A checkpoint counts as soon as its launcher knows of it.
    fn committed(&mut self, pin: Pin) -> Result<(), LaunchError> {
        self.state.pin = Some(pin.clone());
        self.restarts_left = RESTARTS;
        self.write_state()?;
        if let Some(keep) = self.setup.spec.checkpoint.keep {
            let current = self.current.as_ref();
            let protected: Vec<PathBuf> = current
                .and_then(|current| current.generation.start.clone())
                .into_iter()
                .chain([pin])
                .map(|pin| self.run.path().join(pin.path))
                .collect();
            // A copy too many is no reason to stop.
            if let Err(error) = checkpoint::retain_in_run(self.run.path(), keep, &protected) {
                self.warn(error.to_string());
            }
        }
        Ok(())
    }

    /// The first step of a generation ends what led to it.
    fn first_step(&mut self) -> Result<(), LaunchError> {
        let Some((since, from)) = self.trouble.take() else {
            return Ok(());
        };
        let seconds = since.elapsed().as_secs_f64();
        if let Some(row) = self.state.generations.last_mut() {
            row.first_step_seconds = Some(seconds);
            if row.number > 1 && row.reason != Reason::Resumed {
                self.display.event(&Event::Rescaled {
                    from,
                    to: row.world,
                    seconds,
                    why: row.reason.to_string(),
                });
            }
        }
        self.write_state()
    }
}
