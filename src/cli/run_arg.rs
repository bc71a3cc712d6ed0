//! The RUN and NAME arguments: a run on this machine by its directory or name, or a TrainingJob.

use std::path::{Path, PathBuf};

use anyhow::bail;

use super::cluster::ClusterArgs;
pub use crate::launch::run_path::RUNS;
use crate::launch::{RunDir, index};

/// A run on this machine or a TrainingJob on a cluster.
#[derive(Debug, Clone, clap::Args)]
pub struct Target {
    /// A run on this machine, by its directory or name, or the name of a TrainingJob
    #[arg(index = 1)]
    name: PathBuf,
    /// Take the run on this machine if a TrainingJob has the same name
    #[arg(long, conflicts_with_all = ["namespace", "context", "kubeconfig"])]
    local: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// What a [`Target`] names.
pub enum Found {
    Run(RunDir),
    Job(String),
}

impl Target {
    /// What a command with an optional name means by it.
    pub fn named(name: PathBuf, cluster: &ClusterArgs) -> Target {
        Target {
            name,
            local: false,
            cluster: cluster.clone(),
        }
    }

    /// The name as typed.
    pub fn name(&self) -> String {
        self.name.display().to_string()
    }

    /// The run or the job that is meant. A name of both is refused. `is_change`: the command changes it, so that a
    /// cluster that answers is asked.
    pub fn find(&self, is_change: bool) -> anyhow::Result<Found> {
        if self.cluster.is_selected() {
            return Ok(Found::Job(self.name()));
        }
        let found = find(&self.name);
        match found {
            Err(_) if !self.local && self.cluster.is_configured() => Ok(Found::Job(self.name())),
            Err(error) => Err(error),
            Ok(run) => {
                if is_change
                    && !self.local
                    && let Some(namespace) = self.cluster.namespace_with(&self.name())
                {
                    bail!(
                        "`{}` is the run in {} and a TrainingJob in namespace {namespace}; add `--local` or \
                         `-n {namespace}`",
                        self.name(),
                        run.path().display(),
                    );
                }
                Ok(Found::Run(run))
            }
        }
    }
}

/// Finds a run by directory or by name.
pub fn find(run: &Path) -> anyhow::Result<RunDir> {
    for candidate in [run.to_path_buf(), Path::new(RUNS).join(run)] {
        let directory = RunDir::at(candidate);
        if directory.contains_run() {
            return Ok(directory);
        }
    }
    let elsewhere = index::named(run);
    match elsewhere.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!(
            "{}: not a run directory, and no run of that name is in {RUNS}/; `evenkeel list` lists the runs",
            run.display()
        ),
        several => {
            let paths: Vec<String> = several
                .iter()
                .map(|run| run.path().display().to_string())
                .collect();
            bail!(
                "`{}` is the name of several runs; give the directory of one: {}",
                run.display(),
                paths.join(", ")
            )
        }
    }
}

/// All runs under `runs/`, by name, and those that were launched from here into other directories.
pub fn all() -> Vec<RunDir> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(RUNS)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    let here = std::env::current_dir().unwrap_or_default();
    let shown = |run: RunDir| match run.path().strip_prefix(&here) {
        Ok(inside) => RunDir::at(inside),
        Err(_) => run,
    };
    paths
        .into_iter()
        .map(RunDir::at)
        .filter(RunDir::contains_run)
        .chain(index::launched_here().into_iter().map(shown))
        .collect()
}
