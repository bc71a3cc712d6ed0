//! Names of the directories and files of checkpoints, and what identifies a committed one.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Checksum;
use crate::bucket::Bucket;
use crate::lifecycle::files;

/// The manifest, written last; a directory without it is not a checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// State of the training loop.
pub const STATE: &str = "state.json";
/// Hugging Face's description of the model.
pub const CONFIG: &str = "config.json";
/// Hugging Face's map from tensors to files.
pub const INDEX: &str = "model.safetensors.index.json";
/// PEFT's description of adapters, in place of [`CONFIG`].
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// PEFT's file of adapters.
pub const ADAPTER_MODEL: &str = "adapter_model.safetensors";
/// The chat template that the data were rendered with, if it is not the tokenizer's own.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Location of a checkpoint: `<run>/gen-<generation>/step-<step, 7 digits>`. The ranks of a generation create
/// and remove files only in its directory.
#[derive(Debug, Clone)]
pub struct Target {
    /// The run directory. Without a bucket, several machines must share it.
    pub run_directory: PathBuf,
    /// Where the run's checkpoints are committed, if not in the run directory.
    pub bucket: Option<Bucket>,
    /// The generation that writes it.
    pub generation: u64,
    /// Optimiser steps so far.
    pub step: u64,
}

impl Target {
    /// The checkpoint's directory after the commit.
    pub fn directory(&self) -> PathBuf {
        self.run_directory.join(self.path())
    }

    /// Its path below the run directory.
    fn path(&self) -> String {
        files::checkpoint_path(self.generation, self.step)
    }

    /// The key of one of its files in the bucket.
    pub fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.path())
    }

    /// The metrics of its generation, below the run directory and in the bucket.
    pub fn metrics(&self) -> String {
        format!("{}/{}", files::generation(self.generation), files::METRICS)
    }

    /// The directory in which the checkpoint is written. It is never read; its own generation or
    /// [`super::sweep`] removes it.
    pub fn partial(&self) -> PathBuf {
        files::partial(&self.directory())
    }
}

/// A committed checkpoint; a generation's record references it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    pub path: PathBuf,
    /// The generation that wrote it.
    pub generation: u64,
    /// Optimiser steps so far, over all generations.
    pub step: u64,
    /// Samples consumed so far.
    pub samples: u64,
    /// Checksum of its manifest, which holds the checksums of all other files.
    pub checksum: Checksum,
}

/// Whether a directory looks like a checkpoint of Evenkeel, complete or not, rather than like other weights.
pub fn is_evenkeel_checkpoint(directory: &Path) -> bool {
    files::is_partial(directory)
        || (directory.join(MANIFEST).exists() && directory.join(STATE).exists())
}

/// File of the weights of one of `units` units, counted from 0, with Hugging Face's name of a shard.
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
    fn checkpoints_are_in_their_generations_directory_and_sort_by_step() {
        let target = Target {
            run_directory: "run".into(),
            bucket: None,
            generation: 12,
            step: 345,
        };
        assert_eq!(target.directory(), Path::new("run/gen-12/step-0000345"));
        assert_eq!(
            target.partial(),
            Path::new("run/gen-12/step-0000345.partial")
        );
        assert_eq!(target.key(MANIFEST), "gen-12/step-0000345/manifest.json");
    }
}
