//! The launcher's part for an external trainer, which sends no reports: it finds the trainer's
//! checkpoints and copies its output.

use std::path::PathBuf;

use super::{Launcher, RESTARTS};
use crate::external_trainer::ExternalTrainer;
use crate::launch::{LaunchError, RunDir, external};
use crate::lifecycle::ExternalCheckpoint;
use crate::recipe::Recipe;
use crate::recipe::schema::spec::DrainSignal;
use crate::telemetry::{Display, Event, Metric, metrics};
use crate::train::Setup;

/// State of the external trainer.
pub(super) struct ExternalRun {
    recipe: Recipe,
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
    /// Records the external trainer's progress after its end: its last report, and its newest checkpoint.
    pub(super) fn record_progress(&mut self) -> Result<(), LaunchError> {
        let current = self.current.as_mut();
        if let Some(watch) = current.and_then(|current| current.progress.as_mut()) {
            watch.look_at_once();
        }
        self.report_progress()?;
        let Some(external) = &mut self.external else {
            return Ok(());
        };
        let newest = external.trainer(&self.setup).newest();
        if newest != external.newest {
            self.restarts_left = RESTARTS;
            external.newest = newest;
        }
        Ok(())
    }

    /// Shows and records what the external trainer reports.
    pub(super) fn report_progress(&mut self) -> Result<(), LaunchError> {
        let (Some(external), Some(current)) = (&self.external, &mut self.current) else {
            return Ok(());
        };
        let Some(watch) = &mut current.progress else {
            return Ok(());
        };
        let newest = || Some(external.trainer(&self.setup).newest()?.path);
        let Some(step) = watch.next(&current.generation, newest) else {
            return Ok(());
        };
        let file = self.run.metrics(current.generation.number);
        let recorded = metrics::Writer::append_to(file)
            .and_then(|mut writer| writer.write(&Metric::Step(step.clone())));
        if let Err(error) = recorded {
            self.warn(error.to_string());
        }
        self.display.event(&Event::Step(step.clone()));
        self.step(&step)
    }

    /// Shows the remaining output of the current generation's ranks after it has ended.
    pub(super) fn copy_remaining_logs(&mut self) {
        let current = self.current.take();
        for mut tail in current.into_iter().flat_map(|current| current.tails) {
            show(self.display, tail.rank(), tail.rest());
        }
    }

    /// Shows new output of the current generation's ranks.
    pub(super) fn copy_logs(&mut self) {
        let current = self.current.as_mut();
        for tail in current.into_iter().flat_map(|current| &mut current.tails) {
            show(self.display, tail.rank(), tail.lines());
        }
    }

    /// The signal that asks the external trainer to save and exit, and its time limit in seconds.
    pub(super) fn drain_by(&self) -> (DrainSignal, u64) {
        let trainer = &self.setup.spec.trainer;
        (trainer.drain_signal, trainer.drain_seconds)
    }
}

/// Shows a rank's output.
fn show(display: &mut Display, rank: u64, lines: Vec<String>) {
    for line in lines {
        display.event(&Event::Output { rank, line });
    }
}
