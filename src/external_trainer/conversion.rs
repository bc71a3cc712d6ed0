//! Converts a checkpoint of DeepSpeed's ZeRO, which only as many ranks load as have written it, to DeepSpeed's
//! universal form, which every world loads.
//!
//! ```text
//! checkpoint-40/latest                                  the name of the step: global_step40
//! checkpoint-40/global_step40/*zero_pp_rank_R_*_optim_states.pt   the shard of data-parallel rank R
//! checkpoint-40/global_step40_universal/                the universal form
//! checkpoint-40/latest_universal                        written last: global_step40_universal
//! ```
//!
//! Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, `runtime/engine.py` (`_get_zero_ckpt_name`,
//! `load_checkpoint`).

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use crate::util::durable::{self, FileError};
use crate::util::input::{self, STATE_BYTES};

/// Prefix of a shard that the last save of its step did not have.
const STALE: &str = "stale-";
/// Longest `latest` file, bytes.
const MAX_NAME: u64 = 4096;

/// Reasons why a checkpoint was not converted.
#[derive(Debug, thiserror::Error)]
pub enum ConversionError {
    #[error("cannot start `{python} -m {MODULE}`: {error}")]
    Start { python: String, error: io::Error },
    #[error(
        "`{python} -m {MODULE}` could not convert {} for the new world: {status}; its output is above",
        step.display()
    )]
    Failed {
        python: String,
        step: PathBuf,
        status: ExitStatus,
    },
    #[error(transparent)]
    File(#[from] FileError),
}

/// The Python module that is DeepSpeed's converter.
const MODULE: &str = "deepspeed.checkpoint.ds_to_universal";

/// The directory of a checkpoint's step, if ZeRO sharded it over another number of data-parallel ranks. A step that was
/// saved again by fewer ranks still has shards of the others, so its own record counts.
pub fn needed(checkpoint: &Path, ranks: u64) -> Option<PathBuf> {
    let latest = || {
        let name = name_in(&checkpoint.join("latest"))?;
        Some(checkpoint.join(Path::new(&name).file_name()?))
    };
    // A program that calls DeepSpeed itself names the step's directory.
    let step = latest().unwrap_or_else(|| checkpoint.to_owned());
    let shards = shards(&step).into_iter().map(|(rank, _)| rank);
    let shards: BTreeSet<u64> = shards.collect();
    if shards.is_empty() {
        return None;
    }
    let written = recorded_ranks(&step).unwrap_or(shards.len() as u64);
    (written != ranks).then_some(step)
}

/// The name in a file `latest` or `latest_universal`.
fn name_in(file: &Path) -> Option<String> {
    let text = String::from_utf8(input::read(file, MAX_NAME).ok()?).ok()?;
    Some(text.trim().to_owned())
}

/// The shards of a step, each with its data-parallel rank.
fn shards(step: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(step).into_iter().flatten().flatten();
    let shards =
        entries.filter_map(|entry| Some((shard(entry.file_name().to_str()?)?, entry.path())));
    shards.collect()
}

/// The number of data-parallel ranks that saved a step: `dp_world_size` in the state of its first rank. torch's file
/// begins with a pickle of protocol 2, in which a key is followed by its value (Python 3.13 `Lib/pickle.py`).
fn recorded_ranks(step: &Path) -> Option<u64> {
    const KEY: &[u8] = b"dp_world_size";
    let names = [
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ];
    let file = names
        .iter()
        .find_map(|name| input::open(&step.join(name)).ok())?;
    let mut start = Vec::new();
    file.take(STATE_BYTES).read_to_end(&mut start).ok()?;
    let at = start.windows(KEY.len()).position(|window| window == KEY)?;
    // The memo of the key: BINPUT with one byte, or LONG_BINPUT with four.
    let value = match &start[at + KEY.len()..] {
        [b'q', _, value @ ..] | [b'r', _, _, _, _, value @ ..] => value,
        value => value,
    };
    match *value {
        [b'K', count, ..] => Some(count.into()),
        [b'M', low, high, ..] => Some(u16::from_le_bytes([low, high]).into()),
        [b'J', a, b, c, d, ..] => Some(u32::from_le_bytes([a, b, c, d]).into()),
        _ => None,
    }
}

/// Renames the shards of ranks that the last save of a step did not have, so that the converter leaves them out.
fn set_stale_aside(step: &Path) -> Result<(), FileError> {
    let Some(ranks) = recorded_ranks(step) else {
        return Ok(());
    };
    for (rank, path) in shards(step) {
        let mut name = OsString::from(STALE);
        name.push(path.file_name().unwrap_or_default());
        if rank >= ranks {
            fs::rename(&path, path.with_file_name(name)).map_err(|error| {
                FileError::from_io("rename the shard of an earlier save,", &path, 0, error)
            })?;
        }
    }
    Ok(())
}

/// The data-parallel rank in the name of a shard's file.
fn shard(name: &str) -> Option<u64> {
    let (_, rest) = name
        .split_once("zero_pp_rank_")
        .filter(|_| !name.starts_with(STALE))?;
    let ends = ["_optim_states.pt", "_model_states.pt"];
    let rest = ends.iter().find_map(|end| rest.strip_suffix(end))?;
    let (rank, _) = rest.split_once('_')?;
    rank.parse().ok()
}

/// The directory of the converted step, beside it.
pub fn universal(step: &Path) -> PathBuf {
    let mut name = step.file_name().unwrap_or_default().to_owned();
    name.push("_universal");
    step.with_file_name(name)
}

/// Whether a step has been converted. The converter writes `latest_universal` last.
fn is_converted(step: &Path) -> bool {
    let universal = universal(step);
    let newest = name_in(&step.with_file_name("latest_universal"));
    newest.is_some_and(|name| universal.file_name() == Some(name.as_ref())) && universal.is_dir()
}

/// Waits until another rank has converted a step of [`needed`]. The agent ends the wait if that rank fails.
pub fn wait(step: &Path) {
    while !is_converted(step) {
        thread::sleep(Duration::from_millis(500));
    }
}

/// Converts a step of [`needed`], unless that has been done. `program`: the trainer's, whose Python has DeepSpeed.
pub fn convert(step: &Path, program: &str) -> Result<(), ConversionError> {
    if is_converted(step) {
        return Ok(());
    }
    set_stale_aside(step)?;
    let universal = universal(step);
    // What an interrupted conversion has left.
    durable::remove(&universal)?;
    let is_python = Path::new(program)
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("python"));
    let python = if is_python { program } else { "python3" }.to_owned();
    let converted = Command::new(&python)
        .args(["-m", MODULE, "--input_folder"])
        .arg(step)
        .arg("--output_folder")
        .arg(&universal)
        // Trainers other than Megatron-DeepSpeed do not write what it calls the universal checkpoint's info.
        .arg("--inject_missing_state")
        .status();
    match converted {
        Err(error) => Err(ConversionError::Start { python, error }),
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(ConversionError::Failed {
            python,
            step: step.to_owned(),
            status,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing::write_program;

    /// A checkpoint of ZeRO with this many shards.
    fn checkpoint(place: &Path, prefix: &str, shards: u64) -> PathBuf {
        let step = place.join("checkpoint-4/global_step4");
        fs::create_dir_all(&step).unwrap();
        fs::write(place.join("checkpoint-4/latest"), "global_step4\n").unwrap();
        fs::write(step.join("mp_rank_00_model_states.pt"), "").unwrap();
        for rank in 0..shards {
            let name = format!("{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
            fs::write(step.join(name), "").unwrap();
        }
        place.join("checkpoint-4")
    }

    #[test]
    fn a_checkpoint_of_another_number_of_ranks_needs_a_conversion() {
        for prefix in ["", "bf16_"] {
            let place = tempfile::tempdir().unwrap();
            let checkpoint = checkpoint(place.path(), prefix, 11);
            let step = checkpoint.join("global_step4");
            assert_eq!(needed(&checkpoint, 11), None);
            assert_eq!(needed(&checkpoint, 4), Some(step.clone()));
            assert_eq!(needed(&step, 4), Some(step));
        }
        // Without ZeRO, and of another trainer.
        let place = tempfile::tempdir().unwrap();
        assert_eq!(needed(&checkpoint(place.path(), "", 0), 4), None);
        assert_eq!(needed(place.path(), 4), None);
        assert_eq!(needed(&place.path().join("absent"), 4), None);
        // A name that leaves the checkpoint.
        let checkpoint = checkpoint(place.path(), "", 2);
        fs::write(checkpoint.join("latest"), "../../elsewhere").unwrap();
        assert_eq!(needed(&checkpoint, 4), None);
    }

    #[test]
    fn a_step_that_fewer_ranks_saved_again_has_their_number_and_stale_shards() {
        for (value, ranks) in [
            (&b"q\x05K\x02X"[..], 2),
            (b"r\x49\x01\0\0K\x02X", 2),
            (b"q\x05M\x2c\x01X", 300),
            (b"q\x05J\0\0\x01\0X", 65536),
        ] {
            let place = tempfile::tempdir().unwrap();
            let checkpoint = checkpoint(place.path(), "", 4);
            let step = checkpoint.join("global_step4");
            let state = [b"PK..X\x0d\0\0\0dp_world_size", value].concat();
            fs::write(step.join("mp_rank_00_model_states.pt"), state).unwrap();
            assert_eq!(needed(&checkpoint, ranks), None);
            assert_eq!(needed(&checkpoint, 4), Some(step.clone()));
            set_stale_aside(&step).unwrap();
            assert_eq!(shards(&step).len() as u64, ranks.min(4));
        }
    }

    /// A Python of a test: a script for a shell, which gets the converter's arguments.
    fn python(place: &Path, script: &str) -> String {
        let path = place.join("python3");
        write_program(&path, script);
        path.display().to_string()
    }

    #[test]
    fn an_interrupted_conversion_is_repeated_and_a_complete_one_is_not() {
        let place = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(place.path(), "", 2);
        let step = checkpoint.join("global_step4");
        let cut = python(place.path(), "mkdir -p $6 && touch $6/half && exit 3");
        let error = convert(&step, &cut).unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(checkpoint.join("global_step4_universal/half").exists());
        let whole = python(
            place.path(),
            "mkdir $6 && echo $* >$6/arguments && basename $6 >$(dirname $6)/latest_universal",
        );
        convert(&step, &whole).unwrap();
        assert!(!checkpoint.join("global_step4_universal/half").exists());
        let arguments = checkpoint.join("global_step4_universal/arguments");
        let arguments = fs::read_to_string(arguments).unwrap();
        assert!(
            arguments.starts_with(&format!("-m {MODULE} --input_folder ")),
            "{arguments}"
        );
        let fails = python(place.path(), "exit 1");
        convert(&step, &fails).unwrap();
    }
}
