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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::bucket::tests::in_memory;
    use crate::launch::testing::Launched;
    use crate::lifecycle::{files, generation};
    use crate::train::run_files::{self, Brought};
    use crate::util::durable::write_json;

    #[test]
    fn a_disk_gets_the_run_its_data_and_its_weights_from_the_bucket() {
        let place = tempfile::tempdir().unwrap();
        let batch = "batch: {global: 12, per_device_batch_size: 2}";
        let launched = Launched::at(place.path(), batch, &[]);
        let run_dir = launched.run_dir.path();
        let model = place.path().join("model");
        std::fs::create_dir(&model).unwrap();
        let content = |name: &str| format!("the content of {name}");
        for name in [
            "model.safetensors",
            "config.json",
            "optimizer-00001-of-00001.safetensors",
        ] {
            std::fs::write(model.join(name), content(name)).unwrap();
        }
        let tokenizer = place.path().join("tokenizer.model");
        std::fs::write(&tokenizer, content("tokenizer.model")).unwrap();
        let mut run = launched.prepared.run.clone();
        let built_in = run.built_in.as_mut().unwrap();
        built_in.weights = Some(model.clone());
        built_in.companions = vec![model.join("config.json"), tokenizer.clone()];
        write_json(&run_dir.join(files::RUN), &run).unwrap();

        let bucket = in_memory();
        let record = generation::testing::record(1, Vec::new(), launched.planned.plan.clone());
        let disk = tempfile::tempdir().unwrap();
        let bring = || {
            let brought = run_files::bring(&bucket, disk.path(), &record, false)?;
            run_files::bring_inputs(&bucket, disk.path())?;
            Ok::<_, CheckpointError>(brought)
        };
        assert_eq!(bring().unwrap(), Brought::Unprepared);
        // A launch that is stopped has not published the run, and the next one continues.
        assert!(!run_files::publish(&bucket, run_dir, &mut |done, _| done == 0).unwrap());
        assert_eq!(bring().unwrap(), Brought::Unprepared);
        let mut bytes = Vec::new();
        let mut progress = |done, total| {
            bytes.push((done, total));
            true
        };
        assert!(run_files::publish(&bucket, run_dir, &mut progress).unwrap());
        assert!(bytes.iter().all(|(done, total)| done <= total), "{bytes:?}");
        for _ in 0..2 {
            assert_eq!(bring().unwrap(), Brought::Ready);
        }
        let read = Run::read(disk.path()).unwrap();
        assert!(read.prepared(&Run::data(disk.path())).unwrap());
        let built_in = read.built_in.unwrap();
        let weights = built_in.weights.unwrap();
        assert!(weights.starts_with(disk.path()), "{weights:?}");
        let names = |directory: &Path| {
            let mut names: Vec<_> = std::fs::read_dir(directory).unwrap().collect();
            names.sort_by_key(|entry| entry.as_ref().unwrap().file_name());
            let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
            names.into_iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(&weights), ["config.json", "model.safetensors"]);
        for companion in &built_in.companions {
            assert!(companion.starts_with(disk.path()), "{companion:?}");
            let name = companion.file_name().unwrap().to_str().unwrap();
            assert_eq!(std::fs::read_to_string(companion).unwrap(), content(name));
        }
        // The launcher's own run reads its own files.
        let own = Run::read(run_dir).unwrap().built_in.unwrap();
        assert_eq!(own.weights, Some(model));
        assert_eq!(own.companions[1], tokenizer);
        // What a resume changes replaces what was there.
        run.overrides = vec!["changed".to_owned()];
        write_json(&run_dir.join(files::RUN), &run).unwrap();
        assert!(run_files::publish(&bucket, run_dir, &mut |_, _| true).unwrap());
        assert_eq!(bring().unwrap(), Brought::Ready);
        assert_eq!(Run::read(disk.path()).unwrap().overrides, ["changed"]);
    }
}
