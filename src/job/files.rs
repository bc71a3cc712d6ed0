//! How the files of a run are named, for everybody who writes or reads them: whoever makes the
//! generations, the agents, the ranks. All of it is relative to the run's directory.
//!
//! ```text
//! run.json                what every rank needs to know: written once
//! data/                   the prepared data
//! gen-N/record.json       the generation's record: written once
//! gen-N/call.json         in pods: from which checkpoint the user's own program goes on: written once
//! gen-N/metrics.jsonl     its steps and evaluations
//! gen-N/ranks.lock        held while ranks of it live
//! gen-N/logs/rank-R.log   what a rank printed
//! gen-N/step-NNNNNNN/     a checkpoint, by its optimiser steps
//! ```

use std::path::{Path, PathBuf};

/// What every rank of every generation needs to know.
pub const RUN: &str = "run.json";
/// The prepared data.
pub const DATA: &str = "data";
/// A generation's record, in its directory.
pub const RECORD: &str = "record.json";
/// What the user's own program of a generation goes on from, in its directory.
pub const CALL: &str = "call.json";
/// A generation's steps and evaluations, in its directory.
pub const METRICS: &str = "metrics.jsonl";
/// Held by every rank of a generation until its process ends, in the generation's directory.
pub const RANKS_LOCK: &str = "ranks.lock";

const GENERATION: &str = "gen-";
const CHECKPOINT: &str = "step-";
const PARTIAL: &str = ".partial";

/// The directory that only this generation writes.
pub fn generation(number: u64) -> String {
    format!("{GENERATION}{number}")
}

/// The generation of a directory's name, if it is one.
pub fn parse_generation(name: &str) -> Option<u64> {
    digits(name.strip_prefix(GENERATION)?)
}

/// What a rank printed.
pub fn rank_log(generation: u64, rank: u64) -> PathBuf {
    Path::new(&self::generation(generation))
        .join("logs")
        .join(format!("rank-{rank}.log"))
}

/// A checkpoint's directory, in its generation's.
pub fn checkpoint(step: u64) -> String {
    format!("{CHECKPOINT}{step:07}")
}

/// The step of a checkpoint directory's name and whether it is a partial one, if it is either.
pub fn parse_checkpoint(name: &str) -> Option<(u64, bool)> {
    let name = name.strip_prefix(CHECKPOINT)?;
    match name.strip_suffix(PARTIAL) {
        Some(step) => Some((digits(step)?, true)),
        None => Some((digits(name)?, false)),
    }
}

/// The name under which a checkpoint is written until it is whole, beside its own.
pub fn partial(checkpoint: &Path) -> PathBuf {
    let mut name = checkpoint.as_os_str().to_owned();
    name.push(PARTIAL);
    PathBuf::from(name)
}

/// Whether a directory has a partial checkpoint's name, whatever is in it.
pub fn is_partial(directory: &Path) -> bool {
    let name = directory.file_name().map(|name| name.as_encoded_bytes());
    name.is_some_and(|name| name.ends_with(PARTIAL.as_bytes()))
}

fn digits(text: &str) -> Option<u64> {
    let all = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    all.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_nothing_else_does() {
        assert_eq!(parse_generation(&generation(12)), Some(12));
        assert_eq!(parse_checkpoint(&checkpoint(345)), Some((345, false)));
        let partial = partial(Path::new(&checkpoint(345)));
        assert!(is_partial(&partial));
        let name = partial.to_str().unwrap();
        assert_eq!(parse_checkpoint(name), Some((345, true)));
        let many = checkpoint(123_456_789);
        assert_eq!(parse_checkpoint(&many), Some((123_456_789, false)));
        for other in ["step-", "step-+1", "step-1.removed", "state.json", "gen-1"] {
            assert_eq!(parse_checkpoint(other), None, "{other}");
        }
        for other in [
            "gen-",
            "gen-+1",
            "gen-1.old",
            "generation-1",
            "step-0000001",
        ] {
            assert_eq!(parse_generation(other), None, "{other}");
        }
        assert_eq!(rank_log(3, 1), Path::new("gen-3/logs/rank-1.log"));
    }
}
