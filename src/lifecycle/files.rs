//! File names of a run, shared by the launcher or controller, the agents and the ranks. All paths
//! are relative to the run directory.
//!
//! ```text
//! run.json                settings common to all ranks: written once
//! data/                   the prepared data
//! hub/                    in pods: the cache of Hugging Face's hub
//! inputs/                 in a bucket of hosts: the weights and the tokenizer with which the run begins
//! inputs.json             in a bucket of hosts: these files, with their checksums
//! gen-N/record.json       the generation's record: written once
//! gen-N/starting.json     the same, written before the agents search for a newer start checkpoint
//! gen-N/call.json         the checkpoint from which an external trainer resumes: written once
//! gen-N/metrics.jsonl     its steps and evaluations
//! gen-N/events.jsonl      in pods: its events, for followers
//! gen-N/ranks.lock        locked while ranks of the generation live
//! gen-N/logs/rank-R.log   output of a rank
//! gen-N/stacks/rank-R.txt the stacks of a rank that made no progress
//! gen-N/step-NNNNNNN/     a checkpoint, named by its optimiser step
//! ```

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

/// Settings common to all ranks of all generations.
pub const RUN: &str = "run.json";
/// Directory of the prepared data.
pub const DATA: &str = "data";
/// A pod's cache of Hugging Face's hub.
pub const HUB: &str = "hub";
/// The weights and the tokenizer with which a run begins, for hosts without the launcher's disk.
const INPUTS: &str = "inputs";
/// The list of these files.
pub const INPUTS_LIST: &str = "inputs.json";
/// The generation record, in the generation's directory.
pub const RECORD: &str = "record.json";
/// The record of a generation that closes the earlier ones, in the generation's directory.
pub const STARTING: &str = "starting.json";
/// The checkpoint from which an external trainer resumes, in the generation's directory.
pub const CALL: &str = "call.json";
/// Steps and evaluations, in the generation's directory.
pub const METRICS: &str = "metrics.jsonl";
/// Progress that an external trainer writes.
pub const PROGRESS: &str = "progress.json";
/// Token of the server to which the ranks of an external trainer post their progress, on the host whose first rank this is.
pub fn progress_token(first: u64) -> String {
    format!("progress-{first}.token")
}
/// Lock that every rank holds until its process ends, in the generation's directory.
pub const RANKS_LOCK: &str = "ranks.lock";

/// The copy of a folder with weights, below the run directory and in the bucket. Its name says where the launcher has it.
pub fn input_folder(folder: &Path) -> String {
    let hash = xxh3_64(folder.as_os_str().as_encoded_bytes());
    format!("{INPUTS}/{hash:016x}")
}

/// The copy of a file with which a run begins.
pub fn input(file: &Path) -> String {
    let folder = file.parent().unwrap_or(Path::new(""));
    let name = file.file_name().unwrap_or_default();
    format!("{}/{}", input_folder(folder), name.to_string_lossy())
}

/// Whether a key is that of such a copy.
pub fn is_input(key: &str) -> bool {
    let parts: Vec<&str> = key.split('/').collect();
    let odd = ["", ".", ".."];
    parts.len() == 3 && parts[0] == INPUTS && !parts.iter().any(|part| odd.contains(part))
}

const GENERATION: &str = "gen-";
const CHECKPOINT: &str = "step-";
const PARTIAL: &str = ".partial";
const WITHDRAWN: &str = "withdrawn";

/// Directory of a generation. No other generation writes to it; a later one withdraws partial checkpoints there.
pub fn generation(number: u64) -> String {
    format!("{GENERATION}{number}")
}

/// The generation in a directory name, or `None` for other directories.
pub fn parse_generation(name: &str) -> Option<u64> {
    digits(name.strip_prefix(GENERATION)?)
}

/// Log file with a rank's output.
pub fn rank_log(generation: u64, rank: u64) -> PathBuf {
    format!("{GENERATION}{generation}/logs/rank-{rank}.log").into()
}

/// Log file of a process that stands by, started beside a generation.
pub fn spare_log(generation: u64, number: u64) -> PathBuf {
    format!("{GENERATION}{generation}/logs/spare-{number}.log").into()
}

/// File with the stacks of a rank that made no progress.
pub fn stacks(generation: u64, rank: u64) -> PathBuf {
    format!("{GENERATION}{generation}/stacks/rank-{rank}.txt").into()
}

/// Event log of a generation ([`super::event_log`]).
pub fn events(generation: u64) -> PathBuf {
    format!("{GENERATION}{generation}/events.jsonl").into()
}

/// Directory of a checkpoint, in its generation's directory.
pub fn checkpoint(step: u64) -> String {
    format!("{CHECKPOINT}{step:07}")
}

/// The step in a checkpoint directory's name, and whether the name is that of a partial checkpoint.
pub fn parse_checkpoint(name: &str) -> Option<(u64, bool)> {
    let name = name.strip_prefix(CHECKPOINT)?;
    match name.strip_suffix(PARTIAL) {
        Some(step) => Some((digits(step)?, true)),
        None => Some((digits(name)?, false)),
    }
}

/// Path of a checkpoint below the run directory.
pub fn checkpoint_path(generation: u64, step: u64) -> String {
    format!("{}/{}", self::generation(generation), checkpoint(step))
}

/// Generation and step in the path of a checkpoint below the run directory; `None` for other paths and partial
/// checkpoints.
pub fn parse_checkpoint_path(path: &str) -> Option<(u64, u64)> {
    let (generation, checkpoint) = path.split_once('/')?;
    let (step, partial) = parse_checkpoint(checkpoint)?;
    let generation = parse_generation(generation)?;
    (!partial).then_some((generation, step))
}

/// Path under which a checkpoint is written until it is complete.
pub fn partial(checkpoint: &Path) -> PathBuf {
    let mut name = checkpoint.as_os_str().to_owned();
    name.push(PARTIAL);
    PathBuf::from(name)
}

/// Path to which a later generation moves a partial checkpoint, so that it is never committed.
pub fn withdrawn(partial: &Path) -> PathBuf {
    partial.with_extension(WITHDRAWN)
}

/// Whether a directory has the name of a withdrawn checkpoint.
pub fn is_withdrawn(directory: &Path) -> bool {
    directory
        .extension()
        .is_some_and(|found| found == WITHDRAWN)
}

/// Whether a directory has a partial checkpoint's name; its content is not checked.
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
    fn the_copies_of_inputs_say_where_the_launcher_has_them() {
        let folder = Path::new("/models/small");
        let key = input(&folder.join("config.json"));
        assert_eq!(key, format!("{}/config.json", input_folder(folder)));
        assert_ne!(
            input_folder(folder),
            input_folder(Path::new("/other/small"))
        );
        assert!(is_input(&key));
        for other in ["inputs/../run.json", "inputs/a", "data/a/b", "inputs//b"] {
            assert!(!is_input(other), "{other}");
        }
    }

    #[test]
    fn only_generated_names_parse() {
        assert_eq!(parse_generation(&generation(12)), Some(12));
        assert_eq!(parse_checkpoint(&checkpoint(345)), Some((345, false)));
        let partial = partial(Path::new(&checkpoint(345)));
        assert!(is_partial(&partial));
        let name = partial.to_str().unwrap();
        assert_eq!(parse_checkpoint(name), Some((345, true)));
        let withdrawn = withdrawn(&partial);
        assert_eq!(withdrawn, Path::new("step-0000345.withdrawn"));
        assert!(is_withdrawn(&withdrawn) && !is_withdrawn(&partial));
        assert_eq!(parse_checkpoint_path("gen-2/step-0000345"), Some((2, 345)));
        for other in [
            "gen-2",
            "gen-2/step-1.partial",
            "gen-2/step-1/model",
            "a/step-1",
        ] {
            assert_eq!(parse_checkpoint_path(other), None, "{other}");
        }
        let many = checkpoint(123_456_789);
        assert_eq!(parse_checkpoint(&many), Some((123_456_789, false)));
        for other in [
            "step-",
            "step-+1",
            "step-1.withdrawn",
            "state.json",
            "gen-1",
        ] {
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
