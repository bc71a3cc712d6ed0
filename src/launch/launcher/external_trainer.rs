//! The launcher's part for an external trainer, which sends no reports: it finds the trainer's
//! checkpoints and copies its output.

use std::path::PathBuf;

use super::{Current, Launcher, RESTARTS};
use crate::external_trainer::ExternalTrainer;
use crate::launch::{LaunchError, RunDir, external};
use crate::lifecycle::ExternalCheckpoint;
use crate::recipe::Recipe;
use crate::telemetry::{Event, Metric, metrics};
use crate::train::Run;

/// State of the external trainer.
pub(super) struct ExternalRun {
    pub(super) recipe: Recipe,
    run_dir: PathBuf,
    /// Most ranks that one machine runs.
    pub(super) most_on_a_host: u64,
    /// The newest checkpoint found; a newer one is progress.
    pub(super) newest: Option<ExternalCheckpoint>,
}

impl ExternalRun {
    pub(super) fn new(
        recipe: Recipe,
        run: &Run,
        run_dir: &RunDir,
        most_on_a_host: u64,
    ) -> Result<ExternalRun, LaunchError> {
        let run_dir = external::absolute(run_dir.path())?;
        let mut external = ExternalRun {
            recipe,
            run_dir,
            most_on_a_host,
            newest: None,
        };
        external.newest = external.trainer(run).newest();
        Ok(external)
    }

    pub(super) fn trainer<'a>(&'a self, run: &'a Run) -> ExternalTrainer<'a> {
        ExternalTrainer {
            recipe: &self.recipe,
            run_dir: &self.run_dir,
            base: Some(&run.base),
            most_on_a_host: self.most_on_a_host,
        }
    }
}

impl Launcher<'_> {
    /// Shows the new output of the external trainer's ranks; shows and records what it reports. `ended`: the ranks
    /// have exited, so this is the last report, and the newest checkpoint counts.
    pub(super) fn follow_external_trainer(&mut self, ended: bool) -> Result<(), LaunchError> {
        let Some(Current { host, .. }) = &mut self.current else {
            return Ok(());
        };
        let followed = host.follow(ended, |rank, line| {
            self.display.event(&Event::Output { rank, line });
        });
        let file = self.run_dir.metrics(host.record.number);
        if let Some(external) = &mut self.external
            && followed.is_last
            && followed.checkpoint != external.newest
        {
            self.restarts_left = RESTARTS;
            external.newest = followed.checkpoint;
        }
        if let Some(report) = followed.stall {
            self.take_report(0, &report)?;
        }
        let Some(step) = followed.step else {
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
}
