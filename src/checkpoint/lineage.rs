//! The generations of a run that have begun, by the records on its volume or in its bucket.

use std::path::Path;

use super::CheckpointError;
use super::bucket_copy;
use super::history::numbered;
use crate::bucket::Bucket;
use crate::lifecycle::{Generation, files};
use crate::util::durable::{FileError, read_json};

/// The numbers of the generations with a directory, the newest first.
pub fn generations(run: &Path, bucket: Option<&Bucket>) -> Result<Vec<u64>, CheckpointError> {
    if let Some(bucket) = bucket {
        return bucket_copy::generations(bucket);
    }
    let numbered = numbered(run, files::parse_generation)?;
    Ok(numbered
        .into_iter()
        .rev()
        .map(|(number, _)| number)
        .collect())
}

/// The record of a generation; `None` if it was not written, or not completely. Only an answer of the volume or the bucket
/// proves that.
pub fn record(
    run: &Path,
    bucket: Option<&Bucket>,
    number: u64,
) -> Result<Option<Generation>, CheckpointError> {
    let name = format!("{}/{}", files::generation(number), files::RECORD);
    if let Some(bucket) = bucket {
        let bytes = bucket.get(&name)?;
        return Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()));
    }
    match read_json(&run.join(name)) {
        Ok(record) => Ok(Some(record)),
        Err(FileError::Json { .. }) => Ok(None),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The generation of the same job that has begun after this one, if any. A generation without a record is of no job.
pub(super) fn successor(
    run: &Path,
    bucket: Option<&Bucket>,
    generation: u64,
) -> Result<Option<u64>, CheckpointError> {
    // Every host with ranks of a generation has its record.
    let Some(own) = record(run, None, generation)? else {
        return Ok(None);
    };
    for number in generations(run, bucket)? {
        if number <= generation {
            break;
        }
        if record(run, bucket, number)?.is_some_and(|record| record.job == own.job) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
