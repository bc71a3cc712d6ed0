//! The launcher's part for an external trainer, which sends no reports: it finds the trainer's
//! checkpoints and copies its output.

use std::path::PathBuf;

use super::{Launcher, RESTARTS};
use crate::external_trainer::ExternalTrainer;
use crate::host::new_output;
use crate::launch::{LaunchError, RunDir, external};
use crate::lifecycle::ExternalCheckpoint;
use crate::recipe::Recipe;
use crate::recipe::schema::spec::DrainSignal;
use crate::telemetry::{Event, Metric, metrics};
use crate::train::Setup;

/// State of the external trainer.
pub(super) struct ExternalRun {
    pub(super) recipe: Recipe,
    run: PathBuf,
    /// The newest checkpoint found; a newer one is progress.
    pub(super) newest: Option<ExternalCheckpoint>,
}

impl ExternalRun {
    pub(super) fn new(
        recipe: Recipe,
        setup: &Setup,
        run: &RunDir,
    ) -> Result<ExternalRun, LaunchError> {
        let run = external::absolute(run.path())?;
        let mut external = ExternalRun {
            recipe,
            run,
            newest: None,
        };
        external.newest = external.trainer(setup).newest();
        Ok(external)
    }

    pub(super) fn trainer<'a>(&'a self, setup: &'a Setup) -> ExternalTrainer<'a> {
        ExternalTrainer {
            recipe: &self.recipe,
            run: &self.run,
            base: Some(&setup.base),
        }
    }
}

impl Launcher<'_> {
    /// Shows the new output of the external trainer's ranks; shows and records what it reports. `ended`: the ranks
    /// have exited, so this is the last report, and the newest checkpoint counts.
    pub(super) fn follow_external_trainer(&mut self, ended: bool) -> Result<(), LaunchError> {
        let (Some(external), Some(current)) = (&mut self.external, &mut self.current) else {
            return Ok(());
        };
        let watch = current.progress.as_mut();
        new_output(&mut current.tails, watch, ended, |rank, line| {
            self.display.event(&Event::Output { rank, line });
        });
        let Some(watch) = &mut current.progress else {
            return Ok(());
        };
        let mut newest = None;
        let step = watch.next(&current.generation, ended, || {
            newest = external.trainer(&self.setup).newest();
            Some(newest.as_ref()?.path.clone())
        });
        let checkpoint = newest.as_ref().map(|newest| newest.path.as_path());
        let stall = current.stall.as_mut().filter(|_| !ended);
        let stall = stall.and_then(|stall| stall.look(&current.tails, checkpoint, step.is_some()));
        if ended {
            current.progress = None;
            if newest != external.newest {
                self.restarts_left = RESTARTS;
                external.newest = newest;
            }
        }
        let file = self.run.metrics(current.generation.number);
        if let Some(report) = stall {
            self.take_report(0, &report)?;
        }
        let Some(step) = step else {
            return Ok(());
        };
        let recorded = metrics::Writer::append_to(file)
            .and_then(|mut writer| writer.write(&Metric::Step(step.clone())));
        if let Err(error) = recorded {
            self.warn(error.to_string());
        }
        self.display.event(&Event::Step(step.clone()));
        self.step(&step)
    }

    /// The signal that asks the external trainer to save and exit, and its time limit in seconds.
    pub(super) fn drain_by(&self) -> (DrainSignal, u64) {
        let trainer = &self.setup.spec.trainer;
        (trainer.drain_signal, trainer.drain_seconds)
    }
}
