//! The RUN and NAME arguments: a run on this machine by its directory or name, or a TrainingJob.

use std::path::{Path, PathBuf};

use anyhow::bail;

use super::cluster::ClusterArgs;
use super::output::say;
use super::slurm;
use crate::launch::generator::Place;
pub use crate::launch::run_path::RUNS;
use crate::launch::{RunDir, index};

/// The newest checkpoint of a run, copied here if it is in a bucket.
pub fn newest_of(run_dir: &RunDir) -> anyhow::Result<Place> {
    if let Some(url) = run_dir.run()?.bucket {
        let place = run_dir.path().display();
        say(format_args!(
            "note: copying the newest checkpoint from {url} to {place}\n"
        ));
    }
    Ok(Place::of_run(run_dir)?)
}

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
    pub fn named(name: PathBuf, local: bool, cluster: &ClusterArgs) -> Target {
        Target {
            name,
            local,
            cluster: cluster.clone(),
        }
    }

    /// The name as typed.
    pub fn name(&self) -> String {
        self.name.display().to_string()
    }

    /// The run or the job that is meant. `is_change`: the command changes it, so that a name of both is refused.
    pub fn find(&self, is_change: bool) -> anyhow::Result<Found> {
        if self.cluster.is_selected() {
            return Ok(Found::Job(self.name()));
        }
        // Only a name, not a path, can be a job's.
        let is_job = !self.local && !self.name().contains('/') && self.cluster.is_configured();
        let runs = runs(&self.name);
        if runs.is_empty() && is_job {
            return Ok(Found::Job(self.name()));
        }
        let run = the_one(&self.name, runs)?;
        if is_change && is_job {
            match self.cluster.soon(async |cluster| {
                cluster
                    .job(&self.name())
                    .await
                    .map(|_| cluster.namespace.clone())
            }) {
                Ok(namespace) => bail!(
                    "`{}` is the run in {} and a TrainingJob in namespace {namespace}; add `--local` or `-n {namespace}`",
                    self.name(),
                    run.path().display(),
                ),
                Err(error) if error.is_no_job() => {}
                Err(error) => say(format_args!(
                    "note: whether a TrainingJob has this name is unknown ({error}); `--local` avoids this note\n"
                )),
            }
        }
        Ok(Found::Run(run))
    }
}

/// Refuses an option that has a meaning only for a run on this machine.
pub fn refuse_for_job(option: Option<&str>) -> anyhow::Result<()> {
    match option {
        Some(option) => bail!(
            "`{option}` applies to a run on this machine, and this is a TrainingJob; remove it"
        ),
        None => Ok(()),
    }
}

/// Finds a run by directory or by name.
pub fn find(run: &Path) -> anyhow::Result<RunDir> {
    the_one(run, runs(run))
}

/// The runs that a word names: a directory, else a name under `runs/`, else a name of runs elsewhere.
fn runs(run: &Path) -> Vec<RunDir> {
    let places = [run.to_path_buf(), Path::new(RUNS).join(run)];
    let found = places
        .map(RunDir::at)
        .into_iter()
        .find(RunDir::contains_run);
    found.map_or_else(|| index::named(run), |run| vec![run])
}

fn the_one(run: &Path, found: Vec<RunDir>) -> anyhow::Result<RunDir> {
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] if let Some(job) = slurm::queued(run) => bail!(
            "{0} has not begun: {job} in Slurm's queue; `evenkeel status {0}` shows it, and `evenkeel cancel {0}` removes it",
            run.display()
        ),
        [] => bail!(
            "{}: not a run directory, and no run of that name is in {RUNS}/; `evenkeel list` lists the runs",
            run.display()
        ),
        several => {
            let paths = several.iter().map(|run| run.path().display().to_string());
            bail!(
                "`{}` is the name of several runs; give the directory of one: {}",
                run.display(),
                paths.collect::<Vec<_>>().join(", ")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_of_a_name_is_found_and_several_are_refused_with_their_places() {
        let run = |path: &str| RunDir::at(path);
        let name = Path::new("zephyr");
        assert_eq!(
            the_one(name, vec![run("/a/zephyr")]).unwrap(),
            run("/a/zephyr")
        );
        let several = the_one(name, vec![run("/a/zephyr"), run("/b/zephyr")]).unwrap_err();
        assert!(
            several
                .to_string()
                .ends_with("give the directory of one: /a/zephyr, /b/zephyr")
        );
        let none = the_one(name, Vec::new()).unwrap_err().to_string();
        assert!(none.contains("no run of that name is in runs/"), "{none}");
    }
}
