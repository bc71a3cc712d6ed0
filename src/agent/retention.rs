//! Which checkpoints an agent removes. The agent of rank 0 removes the obsolete ones of the run while training runs, up to
//! the checkpoint reference that the controller committed; it never decides by itself which checkpoint is the newest. With
//! a bucket, every agent also removes the copies on its pod's disk.

use std::path::Path;
use std::thread::JoinHandle;

use super::Identity;
use crate::bucket::Bucket;
use crate::checkpoint::{self, bucket_copy};
use crate::lifecycle::CheckpointRef;
use crate::train::{Run, TrainError};

/// Starts to remove the checkpoints that `newest` made obsolete. `first`: this is the agent of rank 0. `start` is the
/// checkpoint that the running generation started from.
pub fn begin(
    identity: &Identity,
    first: bool,
    newest: &CheckpointRef,
    start: Option<&CheckpointRef>,
) -> JoinHandle<Result<(), TrainError>> {
    let (run, bucket) = (identity.run.clone(), identity.bucket.clone());
    let newest = newest.path.clone();
    let start = start.map(|start| start.path.clone());
    std::thread::spawn(move || remove(&run, bucket.as_ref(), first, &newest, start.as_deref()))
}

fn remove(
    run: &Path,
    bucket: Option<&Bucket>,
    first: bool,
    newest: &str,
    start: Option<&str>,
) -> Result<(), TrainError> {
    if bucket.is_some() {
        checkpoint::remove_copies(run, newest, start)?;
    }
    if !first {
        return Ok(());
    }
    let keep = Run::read(run)?.spec.checkpoint.keep;
    if let Some(bucket) = bucket {
        bucket_copy::retain(bucket, keep, newest, start)?;
    } else if let Some(keep) = keep {
        let start = start.map(|start| run.join(start));
        checkpoint::retain_in_run(run, keep, &run.join(newest), start.as_deref())?;
    }
    Ok(())
}
