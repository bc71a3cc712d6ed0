//! Small helpers for files that must survive crashes: atomic writes, directory locks, free space.
//!
//! Everything here works on Linux file systems, local or shared, and on nothing else: a place
//! without `rename` over an existing file has no atomic write.

use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file system (or the user's quota on it) is full, or was about to be.
    #[error("no space left on the disk of {} while writing {}: {needed} bytes needed{}", directory(path), path.display(), but_free(*free))]
    NoSpace {
        /// The file or directory that was being written.
        path: PathBuf,
        /// Bytes that it needs altogether.
        needed: u64,
        /// Bytes that are free there, when known.
        free: Option<u64>,
    },
    /// No file of this process may become so large (`ulimit -f`, or the file system's own limit).
    #[error(
        "{} may not become as large as it has to be (ulimit -f, or the largest file of its file \
         system): {needed} bytes needed; raise the limit, or use another disk",
        path.display()
    )]
    TooLarge {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes that it needs altogether.
        needed: u64,
    },
    /// Another process works in this directory.
    #[error("{} is in use by {}; wait for it to end, or stop it", directory.display(), holder(*pid))]
    HeldBy {
        /// The directory that was to be locked.
        directory: PathBuf,
        /// The process that holds it, when it has written its number already.
        pid: Option<u32>,
    },
    /// A small file is not the JSON that it should be.
    #[error(
        "{} cannot be understood: {error}: it was cut short, edited, or written by another \
         version; put back a copy",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// What does not fit, and where.
        error: serde_json::Error,
    },
    /// Anything else, in the system's words.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// The verb, for example `write`.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl FileError {
    /// Wraps what the system said while `doing` something to `path`, of which `needed` bytes were
    /// to be written (0 when nothing was).
    pub fn from_io(doing: &'static str, path: &Path, needed: u64, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FileError::NoSpace {
                path: path.to_path_buf(),
                needed,
                free: free_space(&directory_of(path)).ok(),
            },
            io::ErrorKind::FileTooLarge => FileError::TooLarge {
                path: path.to_path_buf(),
                needed,
            },
            _ => FileError::Io {
                doing,
                path: path.to_path_buf(),
                source,
            },
        }
    }
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

fn directory(path: &Path) -> String {
    directory_of(path).display().to_string()
}

fn but_free(free: Option<u64>) -> String {
    free.map_or_else(String::new, |free| format!(", {free} free"))
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(
        || "another process".to_string(),
        |pid| format!("process {pid}"),
    )
}

/// What the names of files begin with that are not whole yet.
const UNFINISHED: &str = ".writing-";

/// Whether a file is what a process left that was killed in [`write_atomically`].
pub fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(UNFINISHED))
}

/// Makes a directory and those above it, where they are not there.
pub fn create_directory(path: &Path) -> Result<(), FileError> {
    std::fs::create_dir_all(path).map_err(|error| FileError::from_io("create", path, 0, error))
}

/// Replaces `path` by `bytes`, so that a reader sees the old content or the new, whole, even after
/// a power failure: a temporary file in the same directory, fsynced, renamed, directory fsynced.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let needed = bytes.len() as u64;
    let failed = |source| FileError::from_io("write", path, needed, source);
    let parent = directory_of(path);
    let mut temporary = tempfile::Builder::new()
        .prefix(UNFINISHED)
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .tempfile_in(&parent)
        .map_err(failed)?;
    temporary.write_all(bytes).map_err(failed)?;
    temporary.as_file().sync_all().map_err(failed)?;
    temporary
        .persist(path)
        .map_err(|error| failed(error.error))?;
    sync_directory(&parent)
}

/// Replaces `path` by the JSON form of `value`, as [`write_atomically`] does.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FileError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| FileError::from_io("write", path, 0, error.into()))?;
    write_atomically(path, &bytes)
}

/// Reads what [`write_json`] wrote.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    let bytes =
        std::fs::read(path).map_err(|source| FileError::from_io("read", path, 0, source))?;
    serde_json::from_slice(&bytes).map_err(|error| FileError::Json {
        path: path.to_path_buf(),
        error,
    })
}

impl FileError {
    /// Whether the file is not there.
    pub fn is_absent(&self) -> bool {
        matches!(self, FileError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Makes renames, creations and removals in a directory durable.
pub fn sync_directory(directory: &Path) -> Result<(), FileError> {
    File::open(directory)
        .and_then(|handle| handle.sync_all())
        .map_err(|source| FileError::from_io("fsync", directory, 0, source))
}

/// Bytes that this user may still write on the file system of an existing `path`.
pub fn free_space(path: &Path) -> Result<u64, FileError> {
    let found = rustix::fs::statvfs(path).map_err(|source| {
        FileError::from_io("ask for the free space of", path, 0, source.into())
    })?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

const LOCK: &str = "lock";

/// A directory held by this process until the value is dropped or the process ends, however it
/// ends (`flock` on a file named `lock` in it, which stays behind and holds the process's number).
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Locks an existing directory, or says who has it.
    pub fn acquire(directory: &Path) -> Result<Self, FileError> {
        let path = Lock::file(directory);
        let failed = |source| FileError::from_io("lock", &path, 0, source);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let pid = std::fs::read_to_string(&path)
                    .ok()
                    .and_then(|text| text.trim().parse().ok());
                return Err(FileError::HeldBy {
                    directory: directory.to_path_buf(),
                    pid,
                });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        file.set_len(0).map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { file })
    }

    /// The file that is locked in a directory.
    pub fn file(directory: &Path) -> PathBuf {
        directory.join(LOCK)
    }

    /// Whether somebody holds a directory now; nothing is made or changed to find out.
    pub fn is_held(directory: &Path) -> Result<bool, FileError> {
        let path = Lock::file(directory);
        let failed = |doing, source| FileError::from_io(doing, &path, 0, source);
        let file = match File::open(&path) {
            Ok(file) => file,
            // Nobody has ever held it.
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(failed("open", source)),
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(source)) => Err(failed("look at", source)),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Nobody is helped by an error here: the lock itself goes when the file closes.
        let _ = self.file.set_len(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn atomic_write_replaces_and_leaves_nothing_else_behind() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_atomically(&path, b"old").unwrap();
        write_atomically(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn failed_atomic_write_keeps_the_old_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        // A directory with something in it cannot be replaced by a file.
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("old"), b"old").unwrap();
        let error = write_atomically(&path, b"new").unwrap_err().to_string();
        assert!(error.starts_with("cannot write "), "{error}");
        assert_eq!(std::fs::read(path.join("old")).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_full_disk_is_named_with_what_was_needed() {
        let source = io::Error::from(io::ErrorKind::StorageFull);
        let error = FileError::from_io("write", Path::new("/dev/shm/x"), 12, source).to_string();
        assert!(
            error.starts_with(
                "no space left on the disk of /dev/shm while writing /dev/shm/x: 12 bytes needed, "
            ),
            "{error}"
        );
    }

    #[test]
    fn locked_directory_names_its_holder_and_is_free_after_drop() {
        let directory = tempfile::tempdir().unwrap();
        let lock = Lock::acquire(directory.path()).unwrap();
        match Lock::acquire(directory.path()) {
            Err(FileError::HeldBy { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        assert!(Lock::is_held(directory.path()).unwrap());
        drop(lock);
        // A child that a parallel test forked meanwhile holds our files until its exec.
        let deadline = Instant::now() + Duration::from_secs(60);
        while Lock::is_held(directory.path()).unwrap() {
            assert!(Instant::now() < deadline, "the lock is never free");
            std::thread::yield_now();
        }
        Lock::acquire(directory.path()).unwrap();
    }

    #[test]
    fn a_lock_that_cannot_be_looked_at_is_not_taken_for_a_free_one() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!Lock::is_held(directory.path()).unwrap());
        // A link to itself opens for nobody, whoever asks.
        let lock = Lock::file(directory.path());
        std::os::unix::fs::symlink(&lock, &lock).unwrap();
        let said = Lock::is_held(directory.path()).unwrap_err().to_string();
        assert!(said.starts_with("cannot open "), "{said}");
    }

    #[test]
    fn json_is_read_back_and_what_is_none_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        let absent = read_json::<Vec<u64>>(&path).unwrap_err();
        assert!(absent.is_absent(), "{absent}");
        write_json(&path, &[1_u64, 2]).unwrap();
        assert_eq!(read_json::<Vec<u64>>(&path).unwrap(), [1, 2]);
        std::fs::write(&path, "[1,").unwrap();
        let error = read_json::<Vec<u64>>(&path).unwrap_err();
        assert!(!error.is_absent());
        let said = error.to_string();
        assert!(
            said.contains("state.json cannot be understood: EOF"),
            "{said}"
        );
        assert!(said.ends_with("put back a copy"), "{said}");
    }

    #[test]
    fn killed_process_holds_no_lock() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "durable::tests::hold_lock", "--nocapture"])
            .env("EVENKEEL_TEST_LOCK", directory.path())
            .stdout(Stdio::piped())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("locked") {
            line.clear();
            assert_ne!(io::BufRead::read_line(&mut output, &mut line).unwrap(), 0);
        }
        let error = Lock::acquire(directory.path()).unwrap_err().to_string();
        assert!(
            error.contains(&format!("in use by process {}", child.id())),
            "{error}"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        Lock::acquire(directory.path()).unwrap();
    }

    /// The child of [`killed_process_holds_no_lock`]; does nothing when run as a test.
    #[test]
    fn hold_lock() {
        let Some(directory) = std::env::var_os("EVENKEEL_TEST_LOCK") else {
            return;
        };
        let _lock = Lock::acquire(Path::new(&directory)).unwrap();
        println!("locked");
        // Ends when the parent kills us, or when it is gone and our input closes.
        let _ = io::stdin().read_line(&mut String::new());
    }
}
