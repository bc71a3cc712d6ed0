//! A run on the disk of a host that shares no directory with its launcher: the run directory is below the host's cache, and
//! a bucket has what it needs before ranks start. One thread does in order what waits for the bucket.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::bucket::{Bucket, BucketError, Cause};
use crate::checkpoint::{self, CheckpointError};
use crate::lifecycle::Generation;
use crate::train::run_files::{self, Brought};
use crate::util::durable::{self, FileError, Lock};
use crate::util::key;

/// Longest wait for a host process of an earlier connection, which ends when that is silent.
const OLD_HOST: Duration = Duration::from_secs(30);

/// Work that waits for the bucket or the disk.
pub enum Task {
    /// Tests whether the bucket has this text under this key, and can be written.
    Check {
        url: String,
        key: String,
        text: String,
    },
    /// Brings what the ranks of a generation read.
    Bring {
        url: String,
        run_dir: PathBuf,
        generation: Box<Generation>,
    },
    /// Removes copies of checkpoints before `newest`.
    RemoveCopies {
        run_dir: PathBuf,
        newest: String,
        start: Option<String>,
    },
    /// Removes the run from this disk.
    Clear { run_dir: PathBuf },
}

/// What became of a task.
#[derive(Debug)]
pub enum Done {
    Checked {
        problem: Option<String>,
    },
    Brought {
        generation: u64,
        result: Result<(), NotBrought>,
    },
    Cleared,
}

/// Why the ranks of a generation lack files.
#[derive(Debug, thiserror::Error)]
pub enum NotBrought {
    /// This host does not reach the bucket, or may not use it.
    #[error(transparent)]
    Bucket(BucketError),
    /// The bucket has no such run, or another content than was written.
    #[error("{0}")]
    Damaged(String),
    /// This host's disk does not take the files.
    #[error(transparent)]
    Disk(FileError),
}

impl From<CheckpointError> for NotBrought {
    fn from(error: CheckpointError) -> NotBrought {
        match error {
            CheckpointError::File(error) => NotBrought::Disk(error),
            CheckpointError::Bucket(error) if !is_damage(&error) => NotBrought::Bucket(error),
            error => NotBrought::Damaged(error.to_string()),
        }
    }
}

impl From<FileError> for NotBrought {
    fn from(error: FileError) -> NotBrought {
        NotBrought::Disk(error)
    }
}

/// Whether other hosts would find the same.
fn is_damage(error: &BucketError) -> bool {
    matches!(
        error.cause,
        Cause::Damaged | Cause::Missing | Cause::Changed | Cause::Taken | Cause::Name
    )
}

/// The directory of a run on this host: `run` below `evenkeel/runs` in the user's cache.
pub fn directory(run: &Path) -> io::Result<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let cache = folder("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(folder("HOME")?).join(".cache")));
    let cache = cache.ok_or_else(|| {
        io::Error::other("this host has no cache directory; set XDG_CACHE_HOME for the launch")
    })?;
    Ok(cache.join("evenkeel/runs").join(run))
}

/// Starts the thread. It ends with its tasks.
pub fn start(tasks: Receiver<Task>, done: Sender<Done>) -> io::Result<()> {
    let mut disk = OwnDisk { held: None };
    let work = move || {
        for task in tasks {
            if let Some(result) = disk.work(task)
                && done.send(result).is_err()
            {
                return;
            }
        }
    };
    thread::Builder::new().spawn(work).map(drop)
}

struct OwnDisk {
    /// The directory that no other host process may use, with its lock.
    held: Option<(PathBuf, Lock)>,
}

impl OwnDisk {
    fn work(&mut self, task: Task) -> Option<Done> {
        match task {
            Task::Check { url, key, text } => Some(Done::Checked {
                problem: check(&url, &key, &text),
            }),
            Task::Bring {
                url,
                run_dir,
                generation,
            } => Some(Done::Brought {
                generation: generation.number,
                result: self.bring(&url, &run_dir, &generation),
            }),
            Task::RemoveCopies {
                run_dir,
                newest,
                start,
            } => {
                // A surplus copy does not stop training.
                let _ = checkpoint::remove_copies(&run_dir, &newest, start.as_deref());
                None
            }
            Task::Clear { run_dir } => {
                self.held = None;
                // What cannot be removed takes space only.
                let _ = durable::remove(&run_dir);
                if let Some(of_run) = run_dir.parent() {
                    // Another host may share this cache.
                    let _ = std::fs::remove_dir(of_run);
                }
                Some(Done::Cleared)
            }
        }
    }

    fn bring(
        &mut self,
        url: &str,
        run_dir: &Path,
        generation: &Generation,
    ) -> Result<(), NotBrought> {
        durable::create_directory(run_dir)?;
        self.hold(run_dir)?;
        checkpoint::sweep(run_dir, generation.number)?;
        if let Some(start) = &generation.start {
            checkpoint::remove_copies(run_dir, &start.path, Some(&start.path))?;
        }
        let bucket = Bucket::open(url).map_err(CheckpointError::from)?;
        if run_files::bring(&bucket, run_dir, generation, false)? == Brought::Unprepared {
            let missing = format!("{url} has no run.json; put back what was there");
            return Err(NotBrought::Damaged(missing));
        }
        Ok(run_files::bring_inputs(&bucket, run_dir)?)
    }

    /// Locks the run directory. A host process whose connection was cut uses it until it notices.
    fn hold(&mut self, run_dir: &Path) -> Result<(), FileError> {
        if self.held.as_ref().is_some_and(|(held, _)| held == run_dir) {
            return Ok(());
        }
        let begun = Instant::now();
        loop {
            match Lock::acquire(run_dir) {
                Err(FileError::HeldBy { .. }) if begun.elapsed() < OLD_HOST => {
                    thread::sleep(Duration::from_millis(100));
                }
                locked => {
                    self.held = Some((run_dir.to_owned(), locked?));
                    return Ok(());
                }
            }
        }
    }
}

/// Why ranks on this host cannot use the bucket; `None`: they can.
fn check(url: &str, key: &str, text: &str) -> Option<String> {
    let write = || -> Result<Option<String>, BucketError> {
        let bucket = Bucket::open(url)?;
        if bucket.get(key)?.is_none_or(|found| found != text) {
            return Ok(Some(format!(
                "{url} is not the launcher's: it has no {key} of the launcher; use one endpoint, as AWS_ENDPOINT_URL"
            )));
        }
        let nonce = key::nonce().map(|nonce| key::hex(&nonce[..8]));
        let own = format!(".evenkeel-host-{}", nonce.unwrap_or_default());
        bucket.put(&own, text.as_bytes().to_vec())?;
        bucket.delete(&own)?;
        Ok(None)
    };
    write().unwrap_or_else(|error| Some(error.to_string()))
}
