//! Looks on the volume or in the bucket for generations that the job's status does not have. They exist after the API server was
//! restored from an older copy of its data.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::thread::JoinHandle;

use super::{Identity, bucket_run};
use crate::bucket::Bucket;
use crate::checkpoint::{self, CheckpointError, bucket_copy};
use crate::lifecycle::agent_state::{LaterGeneration, Problem};
use crate::lifecycle::{CheckpointRef, Generation, files};
use crate::train::checkpoint_ref;
use crate::util::durable::read_json;

/// The search for one status of the job.
pub struct Search {
    /// The newest generation of the status.
    published: Option<Generation>,
    working: Option<JoinHandle<Result<Option<LaterGeneration>, Problem>>>,
    found: Result<Option<LaterGeneration>, Problem>,
}

impl Search {
    /// Begins to search; volume and bucket may block.
    pub fn begin(identity: &Identity, published: Option<&Generation>) -> Search {
        let (identity, newest) = (identity.clone(), published.cloned());
        Search {
            published: published.cloned(),
            working: Some(std::thread::spawn(move || {
                let place: &dyn Place = match &identity.bucket {
                    Some(bucket) => bucket,
                    None => &identity.run,
                };
                let found = find(place, &identity.job, newest.as_ref());
                found.map_err(|error| bucket_run::problem(&error))
            })),
            found: Ok(None),
        }
    }

    /// Whether it is the search for a status with this generation.
    pub fn is_for(&self, published: Option<&Generation>) -> bool {
        match (&self.published, published) {
            (Some(one), Some(other)) => is_same(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }

    /// What it has found, once it has ended; an error if the bucket did not answer.
    pub fn result(&mut self) -> Option<&Result<Option<LaterGeneration>, Problem>> {
        if let Some(working) = self.working.take_if(|working| working.is_finished()) {
            // It does not panic.
            self.found = working.join().unwrap_or(Ok(None));
        }
        self.working.is_none().then_some(&self.found)
    }
}

/// Whether two records are of one generation: an API server that was restored may have published another one with
/// its number.
fn is_same(one: &Generation, other: &Generation) -> bool {
    let published_together = (one.created - other.created).abs() < 1e-3;
    one.number == other.number && published_together && one.members == other.members
}

/// Where the pods of a job leave what they have done: a volume or a bucket.
trait Place {
    /// The numbers of its generations.
    fn generations(&self) -> Result<Vec<u64>, CheckpointError>;
    fn record(&self, number: u64) -> Result<Option<Generation>, CheckpointError>;
    /// Whether it has a checkpoint.
    fn has(&self, checkpoint: &CheckpointRef) -> Result<bool, CheckpointError>;
    /// The newest checkpoint of a generation.
    fn newest_of(&self, number: u64) -> Result<Option<CheckpointRef>, CheckpointError>;
}

/// A run directory on a volume. What cannot be read counts as absent: a start from there would fail too.
impl Place for PathBuf {
    fn generations(&self) -> Result<Vec<u64>, CheckpointError> {
        let entries = std::fs::read_dir(self).into_iter().flatten().flatten();
        let number = |name: &OsStr| files::parse_generation(name.to_str()?);
        Ok(entries
            .filter_map(|entry| number(&entry.file_name()))
            .collect())
    }

    fn record(&self, number: u64) -> Result<Option<Generation>, CheckpointError> {
        let path = self.join(files::generation(number)).join(files::RECORD);
        Ok(read_json(&path).ok())
    }

    fn has(&self, checkpoint: &CheckpointRef) -> Result<bool, CheckpointError> {
        Ok(self.join(&checkpoint.path).exists())
    }

    fn newest_of(&self, number: u64) -> Result<Option<CheckpointRef>, CheckpointError> {
        let committed = checkpoint::list(self).unwrap_or_default().committed;
        let newest = committed.iter().rfind(|one| one.generation == number);
        Ok(newest.and_then(|newest| checkpoint_ref::of(newest, self).ok()))
    }
}

impl Place for Bucket {
    fn generations(&self) -> Result<Vec<u64>, CheckpointError> {
        bucket_copy::generations(self)
    }

    fn record(&self, number: u64) -> Result<Option<Generation>, CheckpointError> {
        let key = format!("{}/{}", files::generation(number), files::RECORD);
        let bytes = self.get(&key)?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    fn has(&self, checkpoint: &CheckpointRef) -> Result<bool, CheckpointError> {
        bucket_copy::has(self, &checkpoint.path)
    }

    fn newest_of(&self, number: u64) -> Result<Option<CheckpointRef>, CheckpointError> {
        let committed = bucket_copy::list(self, number)?;
        let newest = committed
            .last()
            .map(|one| checkpoint_ref::in_bucket(self, one));
        newest.transpose()
    }
}

/// The newest generation of this job there, if the published one is older or another one of its number.
fn find(
    place: &dyn Place,
    job: &str,
    published: Option<&Generation>,
) -> Result<Option<LaterGeneration>, CheckpointError> {
    let mut numbers = place.generations()?;
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    let least = published.map_or(1, |generation| generation.number);
    for number in numbers.iter().copied().filter(|number| *number >= least) {
        let record = place.record(number)?;
        let Some(record) = record.filter(|record| record.job == job && record.number == number)
        else {
            continue;
        };
        if published.is_some_and(|published| is_same(published, &record)) {
            break;
        }
        let checkpoint = place.newest_of(number)?.or(record.start);
        return Ok(Some(LaterGeneration { number, checkpoint }));
    }
    match published {
        Some(published) => after_removed_start(place, &numbers, published),
        None => Ok(None),
    }
}

/// The newest checkpoint, if the one that the published generation starts from was removed after newer ones. So it is
/// if the ranks ended before the API server was restored, and no pod can tell what they have committed.
fn after_removed_start(
    place: &dyn Place,
    numbers: &[u64],
    published: &Generation,
) -> Result<Option<LaterGeneration>, CheckpointError> {
    let Some(start) = &published.start else {
        return Ok(None);
    };
    if place.has(start)? {
        return Ok(None);
    }
    for number in numbers
        .iter()
        .copied()
        .filter(|number| *number <= published.number)
    {
        if let Some(newest) = place.newest_of(number)? {
            return Ok((newest.samples > start.samples).then_some(LaterGeneration {
                number: published.number,
                checkpoint: Some(newest),
            }));
        }
    }
    Ok(None)
}
