//! The checkpoints of an external trainer: where it writes them, the newest complete one, and how it resumes from it.
//! They are found by names only, because Evenkeel does not know the trainer's file formats.

use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::lifecycle::ExternalCheckpoint;
use crate::recipe::dialects::readers;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::placeholder::{self, Value};
use crate::recipe::schema::reader::{Checkpoints, Reader, Resume};
use crate::recipe::schema::spec::Spec;
use crate::recipe::{Recipe, trainer_command};
use crate::util::input::{self, STATE_BYTES};
use crate::util::time::micro_time;

/// Prefixes and suffixes that mark an unfinished checkpoint by convention.
const UNFINISHED: [&str; 4] = ["tmp", "partial", "incomplete", "lock"];

/// Sort key of checkpoints: the number in the name, else the modification time.
type Age = (Option<u64>, Option<SystemTime>);

/// The line of the per-device batch in `trainer_state.json`. transformers indents by 2, so the key is one of the state
/// itself.
const TRAIN_BATCH: &str = "\n  \"train_batch_size\": ";

/// The arguments for a checkpoint: the recipe's `trainer.resume`, else those of its dialect; `None`
/// if neither has any.
pub fn arguments(recipe: &Recipe, checkpoint: &Path) -> Option<Vec<String>> {
    let checkpoint = checkpoint.to_string_lossy();
    let arguments = &recipe.spec.trainer.resume;
    if !arguments.is_empty() {
        let value_of = |name: &str| {
            (name == placeholder::CHECKPOINT).then(|| Value::Word(checkpoint.clone().into_owned()))
        };
        return Some(placeholder::fill(arguments, value_of));
    }
    let (reader, resume) = of(recipe.dialect)?;
    Some(reader.argument(resume.key, &checkpoint))
}

/// The names of the checkpoints of a dialect's trainer.
pub fn checkpoints(dialect: Dialect) -> Checkpoints {
    of(dialect).map_or(Checkpoints::ANY, |(_, resume)| resume.checkpoints)
}

/// The directory of the trainer's checkpoints, as the user writes it: `trainer.checkpoint_dir`,
/// else the option of the command, else the recipe's output.
pub fn directory(dialect: Dialect, spec: &Spec) -> Option<String> {
    // The output of a native recipe is the run's directory.
    let output = || spec.output.clone().filter(|_| dialect != Dialect::Native);
    if let Some(directory) = &spec.trainer.checkpoint_dir {
        return Some(directory.clone());
    }
    let typed = of(dialect)
        .and_then(|(_, resume)| trainer_command::typed(&spec.trainer.command, resume.output));
    match typed {
        None => output(),
        Some((_, value)) if trainer_command::says_checkpoint_dir(std::slice::from_ref(&value)) => {
            output()
        }
        // Only the shell can expand this value.
        Some((_, value)) if value.contains(['$', '`']) || value.starts_with('~') => None,
        Some((_, value)) => placeholder::is_plain(&value).then_some(value),
    }
}

/// The warning for checkpoints in the filesystem of a container, which are lost when it ends.
pub fn lost_checkpoints(recipe: &Recipe) -> Option<String> {
    let directory = directory(recipe.dialect, &recipe.spec)?;
    let command = &recipe.spec.trainer.command;
    if Path::new(&directory).is_absolute() || trainer_command::says_checkpoint_dir(command) {
        return None;
    }
    Some(format!(
        "the trainer writes checkpoints to `{directory}`, which is lost when the container ends: \
         use `{{checkpoint_dir}}` in the command (`--output_dir {{checkpoint_dir}}`), or an absolute path \
         on the volume"
    ))
}

fn of(dialect: Dialect) -> Option<(&'static dyn Reader, Resume)> {
    let reader = readers::of(dialect)?;
    Some((reader, reader.resume()?))
}

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
pub fn state_with_batch(checkpoint: &Path, batch: u64) -> Option<(PathBuf, String)> {
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
    use crate::recipe::read_text;
    use crate::recipe::schema::request::Request;

    fn resumed(path: &str, text: &str) -> Option<String> {
        let request = Request {
            path: path.into(),
            ..Request::default()
        };
        let recipe = read_text(&request, text.to_owned()).unwrap();
        Some(arguments(&recipe, Path::new("out/checkpoint-40"))?.join(" "))
    }

    #[test]
    fn resume_arguments_are_those_of_the_dialect_or_the_recipe() {
        let handbook = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                        evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        assert_eq!(
            resumed("sft.yaml", handbook).unwrap(),
            "--resume_from_checkpoint out/checkpoint-40"
        );
        let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
                      batch: {global: 8, per_device_batch_size: 2}\n";
        assert_eq!(resumed("own.yaml", native), None);
        let native =
            format!("{native}  trainer: {{resume: ['--from={{checkpoint}}', --strict]}}\n");
        assert_eq!(
            resumed("own.yaml", &native).unwrap(),
            "--from=out/checkpoint-40 --strict"
        );
    }

    #[test]
    fn checkpoints_in_a_container_yield_a_warning() {
        let text = "per_device_train_batch_size: 8\noutput_dir: out\n\
                    evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let mut recipe = read_text(&request, text.to_owned()).unwrap();
        let mut lost = |command: &str| {
            recipe.spec.trainer.command = command.split(' ').map(str::to_owned).collect();
            lost_checkpoints(&recipe)
        };
        for command in ["train {recipe}", "train {args} --output_dir mine"] {
            let warning = lost(command).unwrap();
            assert!(
                warning.starts_with("the trainer writes checkpoints to `"),
                "{warning}"
            );
        }
        for command in [
            "train --output_dir {checkpoint_dir}",
            "train --output_dir $EVENKEEL_CHECKPOINT_DIR",
            "train --output_dir /volume/out",
            // Only the shell knows the directory; a note says so.
            "train --output_dir $SCRATCH/out",
        ] {
            assert_eq!(lost(command), None, "{command}");
        }
    }

    fn found(entries: &[&str], called: &Checkpoints) -> Option<String> {
        let directory = tempfile::tempdir().unwrap();
        for entry in entries {
            let path = directory.path().join(entry);
            match entry.ends_with('/') {
                true => fs::create_dir_all(path).unwrap(),
                false => {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(path, "").unwrap();
                }
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
            state_with_batch(place.path(), 3).map(|(_, text)| text)
        };
        assert_eq!(changed("6"), Some(state("3")));
        assert_eq!(changed("3"), None);
        assert_eq!(changed("null"), None);
        fs::remove_file(place.path().join("trainer_state.json")).unwrap();
        assert_eq!(state_with_batch(place.path(), 3), None);
    }
}
