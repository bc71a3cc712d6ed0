//! How the directories and files of checkpoints are named.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::job::files;

/// What is written last; a directory without it is no checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The training loop's state.
pub const STATE: &str = "state.json";
/// Hugging Face's description of the model.
pub const CONFIG: &str = "config.json";
/// Hugging Face's map from tensors to files.
pub const INDEX: &str = "model.safetensors.index.json";

/// Where a checkpoint goes: `<run>/gen-<generation>/step-<step, 7 digits>`. That generation's
/// directory is the only one in which its ranks create or remove anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The run's directory; on several machines, one that they share.
    pub run_directory: PathBuf,
    /// The generation that writes it.
    pub generation: u64,
    /// Optimiser steps so far.
    pub step: u64,
}

impl Target {
    /// The checkpoint's directory once it is committed.
    pub fn directory(&self) -> PathBuf {
        self.run_directory
            .join(files::generation(self.generation))
            .join(files::checkpoint(self.step))
    }

    /// The directory in which it is written; never read, and removed by its own generation or by
    /// [`super::sweep`].
    pub fn partial(&self) -> PathBuf {
        files::partial(&self.directory())
    }
}

/// Whether a directory looks like a checkpoint of ours, whole or not, rather than like weights from
/// elsewhere.
pub fn is_ours(directory: &Path) -> bool {
    files::is_partial(directory)
        || (directory.join(MANIFEST).exists() && directory.join(STATE).exists())
}

/// File of the weights of one of `units` units, counted from 0, as Hugging Face names shards.
pub(super) fn model_file(unit: usize, units: usize) -> String {
    format!("model-{:05}-of-{units:05}.safetensors", unit + 1)
}

/// File of the optimiser's states of a unit.
pub(super) fn optimizer_file(unit: usize, units: usize) -> String {
    format!("optimizer-{:05}-of-{units:05}.safetensors", unit + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_lie_in_their_generation_and_sort_as_they_count() {
        let target = Target {
            run_directory: "run".into(),
            generation: 12,
            step: 345,
        };
        assert_eq!(target.directory(), Path::new("run/gen-12/step-0000345"));
        assert_eq!(
            target.partial(),
            Path::new("run/gen-12/step-0000345.partial")
        );
    }
}
