//! Where a run has its checkpoints: in its directory, or in its bucket if its hosts share no directory.

use std::path::PathBuf;

use super::{LaunchError, RunDir};
use crate::bucket::Bucket;
use crate::checkpoint::{self, CheckpointError, Committed, History, bucket_copy};
use crate::lifecycle::CheckpointRef;
use crate::train::{Run, TrainError, TrainState, checkpoint_ref};

/// The checkpoints of a run.
pub struct Checkpoints<'a> {
    run_dir: &'a RunDir,
    bucket: Option<Bucket>,
}

impl<'a> Checkpoints<'a> {
    /// Those of this run. Sends no request.
    pub fn of(run_dir: &'a RunDir, run: &Run) -> Result<Checkpoints<'a>, LaunchError> {
        let bucket = run.bucket.as_deref().map(Bucket::open).transpose()?;
        Ok(Checkpoints { run_dir, bucket })
    }

    /// All of them, by generation, then step.
    pub fn list(&self) -> Result<History, CheckpointError> {
        match &self.bucket {
            Some(bucket) => bucket_copy::list(bucket),
            None => checkpoint::list(self.run_dir.path()),
        }
    }

    /// Whether a generation committed one, even if it is damaged now.
    pub fn exist(&self) -> Result<bool, CheckpointError> {
        let found = self.list()?;
        Ok(!found.committed.is_empty() || !found.damaged.is_empty())
    }

    /// The reference to one of them; its state supplies the batch.
    pub fn refer(&self, committed: &Committed) -> Result<CheckpointRef, TrainError> {
        match &self.bucket {
            Some(bucket) => Ok(checkpoint_ref::in_bucket(bucket, committed)?),
            None => checkpoint_ref::of(committed, self.run_dir.path()),
        }
    }

    /// The path in [`Committed`] of the one that a reference names.
    pub fn path(&self, checkpoint_ref: &CheckpointRef) -> PathBuf {
        match &self.bucket {
            Some(_) => checkpoint_ref.path.as_str().into(),
            None => self.run_dir.path().join(&checkpoint_ref.path),
        }
    }

    /// Where one of them is, for people.
    pub fn place(&self, path: &std::path::Path) -> String {
        match &self.bucket {
            Some(bucket) => bucket.url(&path.to_string_lossy()),
            None => path.display().to_string(),
        }
    }

    /// The state of training in one of them. In a directory all of it is compared with its checksums; in a bucket only the
    /// manifest and this file: each host compares what it downloads.
    pub fn read(&self, checkpoint_ref: &CheckpointRef) -> Result<TrainState, TrainError> {
        match &self.bucket {
            Some(bucket) => {
                let manifest = checkpoint_ref::checksum(checkpoint_ref)?;
                let state =
                    checkpoint_ref::state_in_bucket(bucket, &checkpoint_ref.path, manifest)?;
                Ok(state)
            }
            None => {
                let checkpoint = checkpoint_ref::open(self.run_dir.path(), checkpoint_ref)?;
                TrainState::from_checkpoint(&checkpoint)
            }
        }
    }

    /// [`Checkpoints::read`], and all of it is compared with its checksums.
    pub fn read_whole(&self, checkpoint_ref: &CheckpointRef) -> Result<TrainState, TrainError> {
        if let Some(bucket) = &self.bucket {
            let manifest = checkpoint_ref::checksum(checkpoint_ref)?;
            bucket_copy::verify(bucket, &checkpoint_ref.path, manifest)?;
        }
        self.read(checkpoint_ref)
    }

    /// The newest one: the last of the highest generation that has any.
    pub fn latest(&self) -> Result<Option<Committed>, CheckpointError> {
        let Some(bucket) = &self.bucket else {
            return checkpoint::latest(self.run_dir.path());
        };
        for number in bucket_copy::generations(bucket)? {
            if let Some(newest) = bucket_copy::newest(bucket, number)? {
                return Ok(Some(newest));
            }
        }
        Ok(None)
    }

    /// The directory of one of them on this machine. One in a bucket is copied there, where each file that is there and whole
    /// stays.
    pub fn here(&self, committed: &Committed) -> Result<PathBuf, CheckpointError> {
        let Some(bucket) = &self.bucket else {
            return Ok(committed.path.clone());
        };
        let run = self.run_dir.path();
        bucket_copy::fetch(
            bucket,
            run,
            &committed.path.to_string_lossy(),
            committed.checksum,
        )?;
        Ok(run.join(&committed.path))
    }
}
