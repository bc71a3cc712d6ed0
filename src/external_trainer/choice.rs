//! The checkpoint that a generation of an external trainer resumes from: chosen once, before any of its ranks starts, and
//! kept as `gen-N/call.json` in the run directory.
//!
//! The local launcher and the first member of a job's pods choose the newest; the other members wait for the file. Where
//! pods share no volume, the first member chooses in the bucket, and every pod writes the file once it has fetched the
//! checkpoint.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::lifecycle::{ExternalCheckpoint, Generation, files};
use crate::util::durable::{FileError, create_directory, read_json, write_json};

#[derive(Serialize, Deserialize)]
struct Choice {
    /// `None`: the trainer starts from the beginning.
    checkpoint: Option<ExternalCheckpoint>,
}

/// The file with the choice of a generation.
pub fn file(run_dir: &Path, record: &Generation) -> PathBuf {
    run_dir
        .join(files::generation(record.number))
        .join(files::CALL)
}

pub fn write(
    run_dir: &Path,
    record: &Generation,
    checkpoint: Option<ExternalCheckpoint>,
) -> Result<(), FileError> {
    create_directory(&run_dir.join(files::generation(record.number)))?;
    write_json(&file(run_dir, record), &Choice { checkpoint })
}

/// The choice that was written.
pub(super) fn read(
    run_dir: &Path,
    record: &Generation,
) -> Result<Option<ExternalCheckpoint>, FileError> {
    let choice: Choice = read_json(&file(run_dir, record))?;
    Ok(choice.checkpoint)
}
