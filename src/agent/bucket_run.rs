//! The part of a pod's work that waits for a bucket, in threads: the files of a run whose pods share no volume
//! ([`run_files`]).

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Membership, external, mirror};
use crate::bucket::{Bucket, Cause};
use crate::checkpoint::CheckpointError;
use crate::external_trainer::choice;
use crate::lifecycle::agent_state::Problem;
use crate::lifecycle::{Generation, files};
use crate::train::run_files::{self, Brought, key_of};

/// Pause before a pod looks again for what another pod prepares.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Longest time for which a pod that must end waits for the upload of its logs.
const LOGS: Duration = Duration::from_secs(10);

/// The part of a generation's start that waits for the bucket, in a thread.
#[derive(Default)]
pub struct BucketRun {
    /// The generation and its thread.
    working: Option<(u64, JoinHandle<Result<Brought, Problem>>)>,
    /// The first member has prepared nothing by then.
    unprepared: Option<Instant>,
    /// Since when a generation waits for the pods of the previous one.
    waiting: Option<(u64, Instant)>,
    /// The generation whose logs are kept, and their thread.
    logs: Option<(u64, Instant, JoinHandle<()>)>,
}

impl BucketRun {
    /// Brings what the ranks of a generation read to this pod's disk; `None` while that is under way. The first member
    /// (`mine`) takes what it has prepared to the bucket.
    pub fn bring(
        &mut self,
        bucket: &Bucket,
        run: &Path,
        job: &Arc<Membership>,
        record: &Generation,
        mine: bool,
    ) -> Option<Result<Brought, Problem>> {
        if (self.unprepared).is_some_and(|since| since.elapsed() < LOOK_AGAIN) {
            return Some(Ok(Brought::Unprepared));
        }
        let Some((number, working)) = self.working.take() else {
            let (bucket, run, record) = (bucket.clone(), run.to_path_buf(), record.clone());
            let job = Arc::clone(job);
            let number = record.number;
            let waiting = self.waiting.take_if(|(waiting, _)| *waiting == number);
            let waiting = self
                .waiting
                .insert(waiting.unwrap_or((number, Instant::now())));
            let waited = waiting.1.elapsed();
            let thread = std::thread::spawn(move || {
                let brought = if job.command.is_empty() {
                    run_files::bring(&bucket, &run, &record, mine)
                } else {
                    let waited = mine.then_some(waited);
                    let place = external::checkpoints(&job.trainer_source(), &run)?;
                    bring_external(&bucket, &run, &record, waited, job.drain, &place)
                };
                brought.map_err(problem)
            });
            self.working = Some((number, thread));
            return None;
        };
        if !working.is_finished() {
            self.working = Some((number, working));
            return None;
        }
        let brought = working
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if number != record.number {
            return None;
        }
        let unprepared = matches!(brought, Ok(Brought::Unprepared));
        self.unprepared = unprepared.then(Instant::now);
        Some(brought)
    }

    /// Keeps the logs of a generation whose ranks here have ended; true when that is done or takes too long.
    pub fn keep_logs(
        &mut self,
        bucket: &Bucket,
        run: &Path,
        generation: u64,
        ranks: Range<u64>,
    ) -> bool {
        let logs = self.logs.take_if(|(number, _, _)| *number == generation);
        let logs = logs.unwrap_or_else(|| {
            let (bucket, run) = (bucket.clone(), run.to_path_buf());
            let thread = std::thread::spawn(move || upload_logs(&bucket, &run, generation, ranks));
            (generation, Instant::now(), thread)
        });
        let (_, since, thread) = self.logs.insert(logs);
        thread.is_finished() || since.elapsed() > LOGS
    }
}

/// Brings the checkpoint that the first member has chosen. The others follow once that one has it: before, the choice may
/// be withdrawn. `waited`: how long the first member, and only that one, has waited for pods of the previous generation.
fn bring_external(
    bucket: &Bucket,
    run: &Path,
    record: &Generation,
    waited: Option<Duration>,
    drain: Duration,
    (directory, prefix): &(PathBuf, &str),
) -> Result<Brought, CheckpointError> {
    let key = key_of(record.number, files::CALL);
    if waited.is_none() && !bucket.has(&key_of(record.number, files::RECORD))? {
        return Ok(Brought::Unprepared);
    }
    let chosen = match (bucket.read_json::<mirror::Chosen>(&key)?, waited) {
        (Some(chosen), _) => chosen,
        (None, None) => return Ok(Brought::Unprepared),
        (None, Some(waited)) => {
            let Some(chosen) = mirror::choose(bucket, record, waited, drain)? else {
                return Ok(Brought::Unprepared);
            };
            bucket.create_json(&key, &chosen)?;
            chosen
        }
    };
    let fetched = mirror::fetch(bucket, directory, prefix, &chosen);
    if let Err(CheckpointError::Bucket(error)) = &fetched
        && waited.is_some()
        && matches!(error.cause, Cause::Damaged | Cause::Missing)
    {
        mirror::refuse(bucket, &chosen)?;
        bucket.delete(&key)?;
    }
    choice::write(run, record, fetched?)?;
    if waited.is_some() {
        bucket.put_json(&key_of(record.number, files::RECORD), &record.sealed())?;
    }
    Ok(Brought::Ready)
}

/// Writes the logs and stacks of these ranks to the bucket.
fn upload_logs(bucket: &Bucket, run: &Path, generation: u64, ranks: Range<u64>) {
    let logs = ranks.flat_map(|rank| {
        [
            files::rank_log(generation, rank),
            files::stacks(generation, rank),
        ]
    });
    for file in logs {
        let path = run.join(&file);
        if path.is_file() {
            // A missing log stops no training.
            if let Err(error) = bucket.upload(&path, &file.to_string_lossy()) {
                tracing::warn!("{error}");
            }
        }
    }
}

/// The problem of a pod that cannot read or write its run in the bucket.
pub fn problem(error: CheckpointError) -> Problem {
    let cause = match error {
        CheckpointError::File(error) => return error.into(),
        CheckpointError::Bucket(ref error) => error.cause,
        _ => Cause::Damaged,
    };
    let reason = match cause {
        Cause::NoBucket | Cause::Url | Cause::Settings => "BucketMissing",
        Cause::Region
        | Cause::NoCredentials
        | Cause::Expired
        | Cause::Credentials
        | Cause::Denied
        | Cause::Clock => "BucketDenied",
        Cause::Missing | Cause::Damaged | Cause::Taken | Cause::Changed | Cause::Name => {
            "BucketDamaged"
        }
        Cause::Disk => "VolumeFull",
        Cause::Throttled | Cause::Unreachable | Cause::Other => "BucketUnreachable",
    };
    Problem::new(reason, error.to_string())
}
