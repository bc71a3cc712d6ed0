//! The bucket of a run whose hosts share no directory. This machine has the small files: `run.json`, `state.json`, records,
//! metrics and logs, as the hosts report them. The bucket has the prepared data and the checkpoints.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::Launcher;
use crate::bucket::Bucket;
use crate::checkpoint::{CheckpointError, Retention, bucket_copy, lineage};
use crate::host::{Event as RankEvent, News};
use crate::launch::LaunchError;
use crate::lifecycle::{CheckpointRef, End, Generation, files};
use crate::telemetry::Metric;
use crate::telemetry::metrics::{self, Writer as MetricsWriter};
use crate::train::run_files::key_of;
use crate::train::{Run, checkpoint_ref, rank};
use crate::util::durable::{self, FileError};

/// Time for which the launcher repeats requests to a bucket that does not answer.
const PATIENCE: Duration = Duration::from_secs(300);

/// The bucket of a run, for its launcher.
pub(super) struct BucketRun {
    bucket: Bucket,
    /// The metrics of the running generation on this machine.
    metrics: Option<MetricsWriter>,
    retention: Retention<CheckpointError>,
}

impl BucketRun {
    /// That of this run; `None` if its hosts share its directory.
    pub(super) fn of(run: &Run) -> Result<Option<BucketRun>, LaunchError> {
        let Some(url) = &run.bucket else {
            return Ok(None);
        };
        Ok(Some(BucketRun {
            bucket: Bucket::open(url)?,
            metrics: None,
            retention: Retention::default(),
        }))
    }

    pub(super) fn bucket(&self) -> &Bucket {
        &self.bucket
    }
}

impl Launcher<'_> {
    /// The highest generation so far, 0 if there is none: on this machine, and in the bucket, which has more of them if the run
    /// directory was restored from a copy.
    pub(super) fn last_generation(&self) -> Result<u64, LaunchError> {
        let here = self.run_dir.last_generation(&self.state)?;
        let Some(bucket_run) = &self.bucket_run else {
            return Ok(here);
        };
        let there = self.patiently(|_| bucket_copy::generations(&bucket_run.bucket))?;
        Ok(here.max(there.first().copied().unwrap_or(0)))
    }

    /// Begins a generation in the bucket. First closes the earlier ones, whose ranks may live on behind a cut network: they
    /// commit nothing from then on. Returns the generation from the newest checkpoint that they have committed, which no rank
    /// may have been able to report.
    pub(super) fn begin_in_bucket(
        &mut self,
        generation: Generation,
    ) -> Result<Generation, LaunchError> {
        let Some(bucket) = self.bucket_run.as_ref().map(|it| it.bucket.clone()) else {
            return Ok(generation);
        };
        let last = self.state.generations.last().map(|row| row.number);
        let newest = self.patiently(|run| {
            lineage::close_earlier(run, Some(&bucket), &generation)?;
            let newest = last.map(|last| bucket_copy::newest(&bucket, last));
            let newest = newest.transpose()?.flatten();
            let newest = newest.map(|newest| checkpoint_ref::in_bucket(&bucket, &newest));
            newest.transpose()
        })?;
        let mut generation = generation;
        if let Some(newest) = newest.filter(|it| it.samples > self.state.committed_samples()) {
            self.state.checkpoint_ref = Some(newest);
            let reached = self.state.reached(&self.run);
            generation.plan = self.worlds.plan(generation.world(), reached)?;
            generation.start.clone_from(&self.state.checkpoint_ref);
        }
        self.patiently(|run| {
            if let (Some(last), Some(start)) = (last, &generation.start) {
                complete_metrics(&bucket, run, last, start)?;
            }
            let key = key_of(generation.number, files::RECORD);
            Ok(bucket.put_json(&key, &generation.sealed())?)
        })?;
        generation.write(self.run_dir.path())?;
        let metrics = rank::metrics_file(self.run_dir.path(), &self.run, &generation)?;
        if let Some(bucket_run) = &mut self.bucket_run {
            bucket_run.metrics = Some(metrics);
        }
        Ok(generation)
    }

    /// Repeats an operation while the bucket does not answer and the user does not stop the run. It gets the run directory.
    fn patiently<T>(
        &self,
        mut operation: impl FnMut(&Path) -> Result<T, CheckpointError>,
    ) -> Result<T, LaunchError> {
        let begun = Instant::now();
        loop {
            match operation(self.run_dir.path()) {
                Err(CheckpointError::Bucket(error))
                    if error.cause.may_pass()
                        && begun.elapsed() < PATIENCE
                        && self.signals.load(Ordering::Relaxed) == 0 =>
                {
                    thread::sleep(Duration::from_secs(1));
                }
                result => return Ok(result?),
            }
        }
    }

    /// Records a step or an evaluation, which ranks on this machine or on a shared directory record themselves.
    pub(super) fn record(&mut self, metric: &Metric) -> Result<(), LaunchError> {
        let bucket_run = self.bucket_run.as_mut();
        match bucket_run.and_then(|it| it.metrics.as_mut()) {
            Some(metrics) => Ok(metrics.write(metric)?),
            None => Ok(()),
        }
    }

    /// Keeps what a rank has written on the disk of its host.
    pub(super) fn keep_output(&self, event: &RankEvent) -> Result<(), LaunchError> {
        let (file, text, appends) = match &event.news {
            News::Printed(line) => {
                let log = files::rank_log(event.generation, event.rank);
                (log, format!("{line}\n"), true)
            }
            News::Stacks(stacks) => {
                let file = files::stacks(event.generation, event.rank);
                (file, stacks.clone(), false)
            }
            News::Report(_) | News::Posted(_) | News::Exited(_) => return Ok(()),
        };
        let file = self.run_dir.path().join(file);
        durable::create_directory(file.parent().unwrap_or(self.run_dir.path()))?;
        let mut options = File::options();
        let options = options.create(true).write(true);
        let opened = match appends {
            true => options.append(true).open(&file),
            false => options.truncate(true).open(&file),
        };
        let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
        Ok(
            written
                .map_err(|error| FileError::from_io("write", &file, text.len() as u64, error))?,
        )
    }

    /// Lets the hosts and the bucket forget checkpoints that this one made obsolete; false without a bucket.
    pub(super) fn retain_in_bucket(&mut self, newest: &CheckpointRef) -> bool {
        let keep = self.run.spec.checkpoint.keep;
        let start = self.current.as_ref().and_then(|current| {
            let start = current.host.record.start.as_ref();
            start.map(|start| start.path.clone())
        });
        let Some(bucket_run) = &mut self.bucket_run else {
            return false;
        };
        let bucket = bucket_run.bucket.clone();
        let path = newest.path.clone();
        let problem = bucket_run.retention.tend(newest, || {
            thread::spawn(move || bucket_copy::retain(&bucket, keep, &path, start.as_deref()))
        });
        if let Some(current) = &mut self.current {
            current.host.committed(&newest.path);
        }
        // A surplus copy does not stop training.
        if let Some(problem) = problem {
            self.warn(problem);
        }
        true
    }

    /// Ends the work for the bucket. The disks of hosts keep only a run that may continue.
    pub(super) fn end_in_bucket(&mut self, end: &End) {
        if self.bucket_run.is_none() {
            return;
        }
        let newest = self.state.checkpoint_ref.clone();
        // The last removal may have been left out while another one ran.
        for _ in 0..2 {
            let ended = self.bucket_run.as_mut().and_then(|it| it.retention.wait());
            if let Some(problem) = ended {
                self.warn(problem);
            }
            if let Some(newest) = &newest {
                self.retain_in_bucket(newest);
            }
        }
        self.current = None;
        let continues = match end {
            End::Finished => false,
            End::Drained => self.stop != Some(super::Stop::Cancel),
            End::Failed { .. } => true,
        };
        if let Some(hosts) = self.hosts.as_ref().filter(|_| !continues) {
            hosts.clear(&self.run.job);
        }
    }
}

/// Completes the metrics of a generation up to its checkpoint, which has them in the bucket: a host that is lost may have
/// reported less.
fn complete_metrics(
    bucket: &Bucket,
    run: &Path,
    generation: u64,
    newest: &CheckpointRef,
) -> Result<(), CheckpointError> {
    let of_it = files::parse_checkpoint_path(&newest.path);
    if of_it.is_none_or(|(number, _)| number != generation) {
        return Ok(());
    }
    let key = key_of(generation, files::METRICS);
    let file = run.join(&key);
    if metrics::last_step(&file).is_some_and(|last| last.step >= newest.step) {
        return Ok(());
    }
    let Some(object) = bucket.object(&key)? else {
        return Ok(());
    };
    let partial = files::partial(&file);
    bucket_copy::download(bucket, &key, &partial, object.bytes)?;
    let renamed = fs::rename(&partial, &file);
    Ok(renamed.map_err(|error| FileError::from_io("rename", &partial, 0, error))?)
}
