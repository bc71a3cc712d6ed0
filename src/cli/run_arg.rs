//! The RUN argument: a run directory, or its name under `runs/`.

use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::launch::RunDir;
pub use crate::launch::run_path::RUNS;

/// Finds a run by directory or by name.
pub fn find(run: &Path) -> anyhow::Result<RunDir> {
    for candidate in [run.to_path_buf(), Path::new(RUNS).join(run)] {
        let directory = RunDir::at(candidate);
        if directory.contains_run() {
            return Ok(directory);
        }
    }
    bail!(
        "{}: not a run directory, and no run of that name is in {RUNS}/; `evenkeel status` lists the runs",
        run.display()
    )
}

/// All runs under `runs/`, by name.
pub fn all() -> Vec<RunDir> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(RUNS)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(RunDir::at)
        .filter(RunDir::contains_run)
        .collect()
}
