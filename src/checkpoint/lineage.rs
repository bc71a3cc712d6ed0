//! The generations of a run that have begun, by the records on its volume or in its bucket.

use std::path::Path;

use super::CheckpointError;
use super::bucket_copy;
use super::history::{numbered, withdraw};
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
    record_in(run, bucket, number, files::RECORD)
}

/// [`record`] in a file of this name.
fn record_in(
    run: &Path,
    bucket: Option<&Bucket>,
    number: u64,
    file: &str,
) -> Result<Option<Generation>, CheckpointError> {
    let name = format!("{}/{file}", files::generation(number));
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

/// Closes the generations before this one: afterwards none of them commits a checkpoint. A search that follows finds every
/// checkpoint that they will ever have.
///
/// A rank writes its partial checkpoint first, then looks for a successor, then commits. If it finds none, its partial
/// checkpoint was there before [`files::STARTING`], so this function finds it and makes its commit fail.
pub fn close_earlier(
    run: &Path,
    bucket: Option<&Bucket>,
    record: &Generation,
) -> Result<(), CheckpointError> {
    // Without a run directory there is no earlier generation, and perhaps no volume.
    if record.number <= 1 || (bucket.is_none() && !run.is_dir()) {
        return Ok(());
    }
    match bucket {
        Some(bucket) => {
            let key = format!("{}/{}", files::generation(record.number), files::STARTING);
            bucket.put_json(&key, &record.sealed())?;
        }
        None => record.write_as(run, files::STARTING)?,
    }
    let numbers = generations(run, bucket)?.into_iter();
    for number in numbers.filter(|number| *number < record.number) {
        match bucket {
            Some(bucket) => bucket_copy::withdraw(bucket, number)?,
            None => withdraw(run, number)?,
        }
        // It has closed the earlier ones before it began.
        if self::record(run, bucket, number)?.is_some_and(|begun| begun.job == record.job) {
            break;
        }
    }
    Ok(())
}

/// The generation of the same job that starts or has begun after this one, if any. A generation without a record is of no
/// job.
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
        for file in [files::STARTING, files::RECORD] {
            let record = record_in(run, bucket, number, file)?;
            if record.is_some_and(|record| record.job == own.job) {
                return Ok(Some(number));
            }
        }
    }
    Ok(None)
}
