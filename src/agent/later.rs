//! Searches the volume or the bucket for generations and checkpoints that the job's status does not have. They exist
//! after the API server was restored from an older copy of its data.

use std::thread::JoinHandle;

use super::{Identity, bucket_run};
use crate::checkpoint::{self, CheckpointError, bucket_copy, lineage};
use crate::lifecycle::agent_state::{LaterGeneration, Problem};
use crate::lifecycle::{CheckpointRef, Generation};
use crate::train::{TrainError, checkpoint_ref};

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
                search(&identity, newest.as_ref()).map_err(bucket_run::problem)
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

/// Searches the bucket, or the run directory on a volume. If this pod is a member of the published generation, it first
/// closes the earlier ones: they commit nothing after the search. Only what is damaged counts as absent: what cannot be
/// read now may be the newest checkpoint.
fn search(
    identity: &Identity,
    published: Option<&Generation>,
) -> Result<Option<LaterGeneration>, CheckpointError> {
    let (run, bucket) = (&identity.run, identity.bucket.as_ref());
    if let Some(published) = published.filter(|its| its.ranks_of_pod(&identity.pod).is_some()) {
        lineage::close_earlier(run, bucket, published)?;
    }
    let newest_of = |number| {
        if let Some(bucket) = bucket {
            let newest = bucket_copy::newest(bucket, number)?;
            let newest = newest.map(|newest| checkpoint_ref::in_bucket(bucket, &newest));
            return newest.transpose();
        }
        let Some(newest) = checkpoint::newest(run, number)? else {
            return Ok(None);
        };
        match checkpoint_ref::of(&newest, run) {
            Ok(newest) => Ok(Some(newest)),
            Err(TrainError::Checkpoint(error)) if error.is_unread() => Err(error),
            Err(_) => Ok(None),
        }
    };
    let numbers = lineage::generations(run, bucket)?;
    let record = |number| lineage::record(run, bucket, number);
    find(numbers, record, newest_of, &identity.job, published)
}

/// The newest generation of this job that has begun, if the published one is older, another one of its number, or starts
/// before the newest checkpoint. The last happens if no pod could tell the controller what it had committed. `numbers` are
/// those of the generations that exist, the newest first; `newest_of` finds the newest checkpoint of one.
fn find(
    numbers: Vec<u64>,
    record: impl Fn(u64) -> Result<Option<Generation>, CheckpointError>,
    newest_of: impl Fn(u64) -> Result<Option<CheckpointRef>, CheckpointError>,
    job: &str,
    published: Option<&Generation>,
) -> Result<Option<LaterGeneration>, CheckpointError> {
    for number in numbers {
        let Some(record) = record(number)? else {
            continue;
        };
        if record.job != job || record.number != number {
            continue;
        }
        if published.is_some_and(|published| is_same(published, &record)) {
            return Ok(None);
        }
        let checkpoint = newest_of(number)?.or(record.start);
        let samples = checkpoint.as_ref().map_or(0, |newest| newest.samples);
        let is_older = published.is_some_and(|published| {
            number < published.number && samples <= published.start_samples()
        });
        return Ok((!is_older).then_some(LaterGeneration { number, checkpoint }));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::files;
    use crate::lifecycle::generation::testing;
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::{self, Request};

    /// The job's generations, each with its newest checkpoint.
    struct Known(Vec<(Generation, Option<CheckpointRef>)>);

    impl Known {
        fn of(&self, number: u64) -> Option<&(Generation, Option<CheckpointRef>)> {
            self.0.iter().find(|(record, _)| record.number == number)
        }
    }

    fn generation(number: u64, start: Option<CheckpointRef>) -> Generation {
        let recipe =
            "per_device_train_batch_size: 4\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let recipe = recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
        let plan = plan(&recipe, &PlanRequest::gpus(2)).unwrap();
        Generation {
            start,
            ..testing::record(number, Vec::new(), plan)
        }
    }

    fn checkpoint(generation: u64, step: u64) -> Option<CheckpointRef> {
        Some(CheckpointRef {
            path: files::checkpoint_path(generation, step),
            step,
            samples: 8 * step,
            batch: 8,
            checksum: "0".repeat(32),
        })
    }

    fn found(place: &Known, published: &Generation) -> Option<LaterGeneration> {
        let numbers = place
            .0
            .iter()
            .rev()
            .map(|(record, _)| record.number)
            .collect();
        let record = |number| Ok(place.of(number).map(|(record, _)| record.clone()));
        let newest_of = |number| Ok(place.of(number).and_then(|(_, newest)| newest.clone()));
        find(numbers, record, newest_of, "uid", Some(published)).unwrap()
    }

    #[test]
    fn a_generation_begins_only_from_the_newest_checkpoint_of_the_last_one() {
        // Generation 3 has not committed, and another job's does not count.
        let mut of_another_job = generation(4, None);
        of_another_job.job = "another".to_owned();
        let mut place = Known(vec![
            (generation(1, None), checkpoint(1, 3)),
            (generation(2, checkpoint(1, 3)), checkpoint(2, 9)),
            (generation(3, checkpoint(2, 9)), None),
            (of_another_job, checkpoint(4, 12)),
        ]);
        for start in [None, checkpoint(1, 3), checkpoint(2, 6)] {
            let expected = LaterGeneration {
                number: 3,
                checkpoint: checkpoint(2, 9),
            };
            assert_eq!(found(&place, &generation(5, start)), Some(expected));
        }
        let published = generation(5, checkpoint(2, 9));
        assert_eq!(found(&place, &published), None);
        // A fenced rank commits.
        place.0[1].1 = checkpoint(2, 12);
        assert_eq!(found(&place, &published), None);
        // Once it has begun, its own checkpoints say nothing about its start.
        place.0.push((published.clone(), checkpoint(5, 15)));
        assert_eq!(found(&place, &published), None);
    }
}
