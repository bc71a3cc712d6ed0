//! How the directories and files of checkpoints are named.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What is written last; a directory without it is no checkpoint.
pub const MANIFEST: &str = "manifest.json";
/// The training loop's state.
pub const STATE: &str = "state.json";
/// Hugging Face's description of the model.
pub const CONFIG: &str = "config.json";
/// Hugging Face's map from tensors to files.
pub const INDEX: &str = "model.safetensors.index.json";

const PARTIAL: &str = ".partial";

/// Where a checkpoint goes: `<run>/gen-<generation>/step-<step, 7 digits>`.
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
        generation_directory(&self.run_directory, self.generation)
            .join(format!("step-{:07}", self.step))
    }

    /// The directory in which it is written; never read, and removed by its own generation or by
    /// [`super::sweep`].
    pub fn partial(&self) -> PathBuf {
        partial(&self.directory())
    }
}

/// The only directory in which ranks of a generation create or remove anything.
pub fn generation_directory(run_directory: &Path, generation: u64) -> PathBuf {
    run_directory.join(format!("gen-{generation}"))
}

/// The generation of a directory's name, if it is one.
pub(super) fn parse_generation(name: &str) -> Option<u64> {
    digits(name.strip_prefix("gen-")?)
}

/// The step of a checkpoint directory's name and whether it is a partial one, if it is either.
pub(super) fn parse_step(name: &str) -> Option<(u64, bool)> {
    let name = name.strip_prefix("step-")?;
    match name.strip_suffix(PARTIAL) {
        Some(step) => Some((digits(step)?, true)),
        None => Some((digits(name)?, false)),
    }
}

/// The partial name beside a checkpoint's.
pub(super) fn partial(directory: &Path) -> PathBuf {
    let mut name = directory.as_os_str().to_owned();
    name.push(PARTIAL);
    PathBuf::from(name)
}

/// Whether a directory looks like a checkpoint of ours, whole or not, rather than like weights from
/// elsewhere.
pub fn is_ours(directory: &Path) -> bool {
    is_partial(directory) || (directory.join(MANIFEST).exists() && directory.join(STATE).exists())
}

/// Whether a directory has a partial checkpoint's name, whatever is in it.
pub(super) fn is_partial(directory: &Path) -> bool {
    let name = directory.file_name().map(|name| name.as_encoded_bytes());
    name.is_some_and(|name| name.ends_with(PARTIAL.as_bytes()))
}

/// File of the weights of one of `units` units, counted from 0, as Hugging Face names shards.
pub(super) fn model_file(unit: usize, units: usize) -> String {
    format!("model-{:05}-of-{units:05}.safetensors", unit + 1)
}

/// File of the optimiser's states of a unit.
pub(super) fn optimizer_file(unit: usize, units: usize) -> String {
    format!("optimizer-{:05}-of-{units:05}.safetensors", unit + 1)
}

fn digits(text: &str) -> Option<u64> {
    let all = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    all.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_sort_as_they_count() {
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
        assert_eq!(parse_generation("gen-12"), Some(12));
        assert_eq!(parse_step("step-0000345"), Some((345, false)));
        assert_eq!(parse_step("step-0000345.partial"), Some((345, true)));
        assert_eq!(parse_step("step-123456789"), Some((123_456_789, false)));
        for other in ["step-", "step-+1", "step-1.removed", "state.json"] {
            assert_eq!(parse_step(other), None, "{other}");
        }
    }
}
