//! Removes old checkpoints of a run on a cluster. The agent of rank 0 removes them while training
//! runs, up to the checkpoint reference that the controller committed; it never decides by itself
//! which checkpoint is the newest. With a bucket, every agent also removes the copies on its pod's disk.

use std::path::Path;
use std::thread::JoinHandle;

use super::Identity;
use crate::bucket::Bucket;
use crate::checkpoint::{self, bucket_copy};
use crate::lifecycle::CheckpointRef;
use crate::train::{Run, TrainError};

/// Removes old checkpoints, one at a time.
#[derive(Default)]
pub struct Retention {
    /// The last checkpoint reference that was processed.
    done: Option<CheckpointRef>,
    working: Option<JoinHandle<Result<(), String>>>,
}

impl Retention {
    /// Starts to remove the checkpoints that `checkpoint_ref` made obsolete, unless that was done or another
    /// removal runs. `first`: this is the agent of rank 0. `start` is the checkpoint that the running generation
    /// started from. Returns the error of the previous removal; a surplus copy does not stop training.
    pub fn tend(
        &mut self,
        identity: &Identity,
        first: bool,
        checkpoint_ref: &CheckpointRef,
        start: Option<&CheckpointRef>,
    ) -> Option<String> {
        let ended = (self.working).take_if(|working| working.is_finished());
        let problem = ended.and_then(|ended| ended.join().ok()?.err());
        if self.working.is_some() || self.done.as_ref() == Some(checkpoint_ref) {
            return problem;
        }
        self.done = Some(checkpoint_ref.clone());
        let (run, bucket) = (identity.run.clone(), identity.bucket.clone());
        let newest = checkpoint_ref.path.clone();
        let start = start.map(|start| start.path.clone());
        self.working = Some(std::thread::spawn(move || {
            let removed = remove(&run, bucket.as_ref(), first, &newest, start.as_deref());
            removed.map_err(|error| error.to_string())
        }));
        problem
    }
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
