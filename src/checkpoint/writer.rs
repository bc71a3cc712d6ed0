//! Writes a rank's units beside training.
//!
//! The writer takes ownership of a snapshot and a thread writes it, so that a step stops only for the copy
//! out of the engine. The thread fsyncs after it has written the last file: if training must wait, it waits
//! for the page cache and not for the disk. If the run has a bucket, the thread then uploads the files, and that of rank
//! 0 the metrics so far: they include every step of the checkpoint.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::CheckpointError;
use super::history::not_written;
use super::manifest::Part;
use super::names::Target;
use super::unit_file::{self, Content, UnitShape, unit_shapes};
use crate::bucket::Bucket;
use crate::engine::{Layout, UnitState};
use crate::util::durable::{self, FileError};
use crate::util::priority;

/// Most bytes of snapshots in the queue. A larger unit goes directly to the thread, so that at most two of
/// those exist.
const QUEUE: usize = 256 << 20;

/// Writes one rank's units of one checkpoint.
///
/// Only [`Writer::finish`] fails. A rank with a full disk still has to take part in the collectives of the
/// other ranks while the units are gathered, and reports the failure at the end together with them. A dropped
/// writer ends after it has written the units in its queue.
#[derive(Debug)]
pub struct Writer {
    rank: usize,
    world: usize,
    units: SyncSender<(usize, UnitState)>,
    thread: io::Result<JoinHandle<Result<Part, CheckpointError>>>,
    partial: PathBuf,
    abandoned: Arc<AtomicBool>,
}

impl Writer {
    /// Starts the thread, which first checks that the disk has space for the whole checkpoint. Every rank of
    /// the world begins with the same target and layout.
    pub fn begin(target: &Target, layout: &Layout, rank: usize, world: usize) -> Self {
        let shapes = unit_shapes(layout);
        let state_bytes = |unit: &UnitShape| 3 * size_of::<f32>() * unit.elements();
        let largest = shapes.iter().map(state_bytes).max();
        let depth = (QUEUE / largest.unwrap_or(0).max(1)).min(shapes.len());
        let (units, queue) = sync_channel(depth);
        let abandoned = Arc::default();
        let job = Job {
            target: target.clone(),
            shapes,
            rank,
            world,
            abandoned: Arc::clone(&abandoned),
        };
        Self {
            rank,
            world,
            units,
            thread: std::thread::Builder::new()
                .name("checkpoint".to_string())
                .spawn(move || job.run(queue)),
            partial: target.partial(),
            abandoned,
        }
    }

    /// Ends the thread soon, and waits for that: another writer may write the same files next.
    pub fn abandon(self) {
        self.abandoned.store(true, Ordering::SeqCst);
        // What it has written will not be committed.
        let _ = self.finish();
    }

    /// Whether this rank writes a unit: the unit's number modulo the world size is the rank.
    pub fn owns(&self, unit: usize) -> bool {
        unit % self.world == self.rank
    }

    /// Hands over the state of a unit; units of other ranks are dropped. Waits while the queue is full.
    pub fn write_unit(&self, unit: usize, state: UnitState) {
        if self.owns(unit) {
            // The thread has ended only if it failed; `finish` returns the reason.
            let _ = self.units.send((unit, state));
        }
    }

    /// Whether [`Writer::finish`] would return without waiting for the disk, once every unit was handed over.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().map_or(true, JoinHandle::is_finished)
    }

    /// Waits until every unit of this rank is durable, in the bucket if there is one.
    pub fn finish(self) -> Result<Part, CheckpointError> {
        drop(self.units);
        let thread = self.thread.map_err(|source| FileError::Io {
            doing: "start a thread to write",
            path: self.partial,
            source,
        })?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// State of the writer's thread.
struct Job {
    target: Target,
    shapes: Vec<UnitShape>,
    rank: usize,
    world: usize,
    abandoned: Arc<AtomicBool>,
}

impl Job {
    fn run(self, queue: Receiver<(usize, UnitState)>) -> Result<Part, CheckpointError> {
        let written = self.write(queue);
        written.map_err(|error| not_written(&self.target, error))
    }

    fn write(&self, queue: Receiver<(usize, UnitState)>) -> Result<Part, CheckpointError> {
        let partial = self.target.partial();
        create_durably(&partial)?;
        self.check_space(&partial)?;
        let units = self.shapes.len();
        let mut written = vec![false; units];
        let mut left = (self.rank..units).step_by(self.world).count();
        let mut open = Vec::new();
        let mut part = Part {
            rank: self.rank,
            world: self.world,
            generation: self.target.generation,
            step: self.target.step,
            files: BTreeMap::new(),
        };
        while left > 0 {
            let next = queue.recv();
            if self.abandoned.load(Ordering::SeqCst) {
                return Ok(part);
            }
            let Ok((unit, state)) = next else {
                return Err(CheckpointError::Misuse(format!(
                    "rank {} was never handed the states of {left} of its units",
                    self.rank
                )));
            };
            self.check_unit(unit, &state, &written)?;
            for content in Content::ALL {
                let name = content.file_name(unit, &self.shapes);
                let path = partial.join(&name);
                let (header, size) = self.header(content, unit)?;
                let (file, entry) = unit_file::write(&path, &header, content, &state)
                    .map_err(|error| FileError::from_io("write", &path, size, error))?;
                open.push((path, file, size));
                part.files.insert(name, entry);
            }
            written[unit] = true;
            left -= 1;
        }
        for (path, file, size) in open {
            if self.abandoned.load(Ordering::SeqCst) {
                return Ok(part);
            }
            file.sync_all()
                .map_err(|error| FileError::from_io("write", &path, size, error))?;
        }
        if let Some(bucket) = &self.target.bucket {
            // The steps that are computed meanwhile need the processors.
            priority::lower();
            let metrics = self.target.metrics();
            let files = part.files.keys();
            let files = files.map(|name| (partial.join(name), self.target.key(name)));
            let metrics = (self.target.run_directory.join(&metrics), metrics);
            let metrics = Some(metrics).filter(|(file, _)| self.rank == 0 && file.is_file());
            for (file, key) in files.chain(metrics) {
                Bucket::patiently(|| {
                    if self.abandoned.load(Ordering::SeqCst) {
                        Ok(())
                    } else {
                        bucket.upload(&file, &key)
                    }
                })?;
            }
        }
        Ok(part)
    }

    /// Refuses early if the tensors of all ranks cannot fit. The bytes already written are measured after the
    /// free space, so that the error favours trying.
    fn check_space(&self, partial: &Path) -> Result<(), CheckpointError> {
        let free = durable::free_space(partial)?;
        let mut needed = 0;
        for unit in 0..self.shapes.len() {
            for content in Content::ALL {
                let (_, size) = self.header(content, unit)?;
                let path = partial.join(content.file_name(unit, &self.shapes));
                let there = std::fs::metadata(path).map_or(0, |found| found.len());
                needed += size.saturating_sub(there);
            }
        }
        if needed > free {
            return Err(CheckpointError::File(FileError::NoSpace {
                path: partial.to_path_buf(),
                needed,
                free: Some(free),
            }));
        }
        Ok(())
    }

    fn check_unit(
        &self,
        unit: usize,
        state: &UnitState,
        written: &[bool],
    ) -> Result<(), CheckpointError> {
        let misuse = |text: String| Err(CheckpointError::Misuse(text));
        if written.get(unit) != Some(&false) {
            return misuse(format!(
                "unit {unit} of {} was handed to rank {}, which has it already or never will",
                written.len(),
                self.rank
            ));
        }
        let elements = self.shapes[unit].elements();
        let lengths = [&state.parameters, &state.exp_avg, &state.exp_avg_sq].map(Vec::len);
        if lengths != [elements; 3] {
            return misuse(format!(
                "unit `{}` has {elements} elements and its state {lengths:?}",
                self.shapes[unit].name
            ));
        }
        Ok(())
    }

    fn header(&self, content: Content, unit: usize) -> Result<(Vec<u8>, u64), CheckpointError> {
        content.header(&self.shapes[unit]).map_err(|error| {
            CheckpointError::Misuse(format!("unit `{}`: {error}", self.shapes[unit].name))
        })
    }
}

/// Creates a directory and its missing parents, each entry durable in its parent.
fn create_durably(directory: &Path) -> Result<(), FileError> {
    if directory.is_dir() {
        return Ok(());
    }
    let parent = directory.parent().filter(|parent| *parent != Path::new(""));
    if let Some(parent) = parent {
        create_durably(parent)?;
    }
    match std::fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(FileError::from_io("create", directory, 0, error))
        }
        _ => durable::sync_directory(parent.unwrap_or(Path::new("."))),
    }
}
