//! Finds the newest complete checkpoint of an external trainer. It goes by names only, because
//! Evenkeel does not know the trainer's file formats.

use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::lifecycle::ExternalCheckpoint;
use crate::recipe::schema::reader::Checkpoints;
use crate::util::input::{self, STATE_BYTES};
use crate::util::time::micro_time;

/// Prefixes and suffixes that mark an unfinished checkpoint by convention.
const UNFINISHED: [&str; 4] = ["tmp", "partial", "incomplete", "lock"];

/// The line of the per-device batch in `trainer_state.json`. transformers indents by 2, so the key is one of the state itself.
const TRAIN_BATCH: &str = "\n  \"train_batch_size\": ";

/// Sort key of checkpoints: the number in the name, else the modification time.
type Age = (Option<u64>, Option<SystemTime>);

/// The newest complete checkpoint in `directory`; `None` if there is none or the directory does not
/// exist.
pub fn newest(directory: &Path, called: &Checkpoints) -> Option<ExternalCheckpoint> {
    let entries = fs::read_dir(directory).ok()?;
    let found = entries.flatten().filter_map(|entry| age(&entry, called));
    let ((_, changed), path) = found.max()?;
    let since = |at: SystemTime| {
        Some(micro_time(
            at.duration_since(UNIX_EPOCH).ok()?.as_secs_f64(),
        ))
    };
    // A changed directory does not prove progress.
    let changed = changed.filter(|_| path.is_file()).and_then(since);
    Some(ExternalCheckpoint { path, changed })
}

/// Age and path of an entry if it is a complete checkpoint.
fn age(entry: &DirEntry, called: &Checkpoints) -> Option<(Age, PathBuf)> {
    let path = entry.path();
    let name = path.file_name()?.to_str()?;
    let ending = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let begins = |word: &&str| {
        let rest = name.strip_prefix(*word);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
    };
    if name.starts_with('.') || UNFINISHED.contains(&ending) || UNFINISHED.iter().any(begins) {
        return None;
    }
    let whole = called.needs.iter().all(|file| path.join(file).is_file());
    let refused = called.unless.is_some_and(|file| path.join(file).exists());
    if !whole || refused {
        return None;
    }
    let number = match called.prefix {
        // An unknown trainer: `step_40`, `ckpt-40.pt`, or a name without a number.
        "" => {
            // DeepSpeed saves `zero_to_fp32.py` beside its steps.
            if ending == "py" {
                return None;
            }
            let stem = path.file_stem()?.to_str()?;
            let digits = stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
            stem[digits..].parse().ok()
        }
        prefix => Some(name.strip_prefix(prefix)?.parse().ok()?),
    };
    let changed = entry.metadata().and_then(|about| about.modified()).ok();
    Some(((number, changed), path))
}

/// The state's file of a checkpoint of transformers, with this per-device batch; `None` if it states no other. Versions
/// up to 5.1 resume with it, whatever the arguments state (`Trainer.train`), and would train another global batch in
/// another world.
pub fn with_batch(checkpoint: &Path, batch: u64) -> Option<(PathBuf, String)> {
    let path = checkpoint.join("trainer_state.json");
    // The rest is not interpreted: Python writes numbers such as NaN, which JSON does not have.
    let text = String::from_utf8(input::read(&path, STATE_BYTES).ok()?).ok()?;
    let (before, rest) = text.split_once(TRAIN_BATCH)?;
    let (digits, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
    let other = !digits.is_empty() && digits != batch.to_string();
    other.then(|| (path, format!("{before}{TRAIN_BATCH}{batch}{after}")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn found(entries: &[&str], called: &Checkpoints) -> Option<String> {
        let directory = tempfile::tempdir().unwrap();
        for entry in entries {
            let path = directory.path().join(entry);
            if entry.ends_with('/') {
                fs::create_dir_all(path).unwrap()
            } else {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
        }
        let newest = newest(directory.path(), called)?.path;
        Some(newest.file_name().unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn checkpoint_numbers_sort_numerically_and_incomplete_checkpoints_are_skipped() {
        let trainer = |entries: &[&str]| found(entries, &Checkpoints::TRANSFORMERS);
        let state = "trainer_state.json";
        let whole = ["9", "40", "100"].map(|n| format!("checkpoint-{n}/{state}"));
        let mut entries: Vec<&str> = whole.iter().map(String::as_str).collect();
        entries.extend([
            "checkpoint-200/model.safetensors",
            "checkpoint-x/",
            "runs/",
            "all.json",
        ]);
        assert_eq!(trainer(&entries).unwrap(), "checkpoint-100");
        entries.push("checkpoint-100/checkpoint-is-incomplete.txt");
        assert_eq!(trainer(&entries).unwrap(), "checkpoint-40");
        assert_eq!(trainer(&["checkpoint-200/model.safetensors"]), None);
    }

    #[test]
    fn a_rewritten_file_is_a_new_checkpoint_and_a_changed_directory_is_not() {
        let place = tempfile::tempdir().unwrap();
        let newest = || newest(place.path(), &Checkpoints::ANY).unwrap();
        let file = place.path().join("last.pt");
        let written = |seconds| {
            let file = fs::File::create(&file).unwrap();
            file.set_modified(UNIX_EPOCH + Duration::from_secs(seconds))
                .unwrap();
            newest()
        };
        assert_ne!(written(1000), written(2000));
        assert_eq!(newest().changed, Some(micro_time(2000.0)));
        fs::create_dir(place.path().join("step-3")).unwrap();
        assert_eq!(newest().changed, None);
    }

    #[test]
    fn checkpoints_of_an_unknown_trainer_sort_by_their_trailing_number() {
        let any = |entries: &[&str]| found(entries, &Checkpoints::ANY);
        assert_eq!(
            any(&["step_9.pt", "step_10.pt", "step_11.pt.tmp", ".step_12.pt"]).unwrap(),
            "step_10.pt"
        );
        assert_eq!(
            any(&["step-3/", "tmp-step-4/", "tmp", "partial_5"]).unwrap(),
            "step-3"
        );
        assert_eq!(any(&["tmpfs-3/"]).unwrap(), "tmpfs-3");
        assert_eq!(any(&["last.pt"]).unwrap(), "last.pt");
        assert_eq!(any(&[]), None);
        assert_eq!(newest(Path::new("/nowhere"), &Checkpoints::ANY), None);
    }

    #[test]
    fn a_checkpoint_gets_the_batch_of_the_new_world_and_nothing_else_changes() {
        let place = tempfile::tempdir().unwrap();
        let state = |batch: &str| {
            format!(
                "{{\n  \"global_step\": 20,\n  \"log_history\": [\n    {{\n      \"grad_norm\": NaN,\n      \
                 \"train_batch_size\": 1\n    }}\n  ],\n  \"train_batch_size\": {batch},\n  \"trial_name\": null\n}}\n"
            )
        };
        let changed = |batch: &str| {
            fs::write(place.path().join("trainer_state.json"), state(batch)).unwrap();
            with_batch(place.path(), 3).map(|(_, text)| text)
        };
        assert_eq!(changed("6"), Some(state("3")));
        assert_eq!(changed("3"), None);
        assert_eq!(changed("null"), None);
        fs::remove_file(place.path().join("trainer_state.json")).unwrap();
        assert_eq!(with_batch(place.path(), 3), None);
    }
}
