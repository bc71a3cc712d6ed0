//! Files that must survive crashes: atomic writes, directory locks, free space.
//!
//! Everything here works only on Linux file systems, local or shared: without a `rename` that replaces a file
//! there is no atomic write.

use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::format::{bytes, bytes_apart};
use super::input::{self, STATE_BYTES};

/// Why a file operation failed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file system (or the user's quota on it) is full, or too small for the write.
    #[error("no space left on the disk of {} while writing {}: {}", directory(path), path.display(), needed_of(*needed, *free))]
    NoSpace {
        /// The file or directory that was being written.
        path: PathBuf,
        /// Bytes that the write needs in total.
        needed: u64,
        /// Free bytes of the file system, if known.
        free: Option<u64>,
    },
    /// The file exceeds the limit of this process (`ulimit -f`) or of the file system.
    #[error(
        "{} exceeds the largest allowed file size (ulimit -f, or the largest file of its file \
         system): {} needed; raise the limit, or use another disk",
        path.display(), bytes(*needed)
    )]
    TooLarge {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes that the file needs in total.
        needed: u64,
    },
    /// Another process works in this directory.
    #[error("{} is in use by {}; wait for it to end, or stop it", directory.display(), holder(*pid))]
    HeldBy {
        /// The directory that was to be locked.
        directory: PathBuf,
        /// The process that holds the lock, if it has already written its number.
        pid: Option<u32>,
    },
    /// A small file is not the expected JSON.
    #[error(
        "{} cannot be parsed: {error}: it was cut short, edited, or written by another \
         version; put back a copy",
        path.display()
    )]
    Json {
        path: PathBuf,
        /// The first fault and its place.
        error: serde_json::Error,
    },
    /// Any other error of the system.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// The operation as a verb, for example `write`.
        doing: &'static str,
        /// The file or directory concerned.
        path: PathBuf,
        source: io::Error,
    },
}

impl FileError {
    /// Wraps an error of the system while `doing` something to `path`; the operation had to write `needed`
    /// bytes in total (0 for a read).
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

/// What a write needs, and what is free.
fn needed_of(needed: u64, free: Option<u64>) -> String {
    match free {
        Some(free) => {
            let [needed, free] = bytes_apart(needed, free);
            format!("{needed} needed, {free} free")
        }
        None => format!("{} needed", bytes(needed)),
    }
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(
        || "another process".to_string(),
        |pid| format!("process {pid}"),
    )
}

/// Prefix of the names of unfinished files.
const UNFINISHED: &str = ".writing-";

/// Whether a file is a leftover of a process that was killed in [`write_atomically`].
pub fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(UNFINISHED))
}

/// Creates a directory and its missing parents.
pub fn create_directory(path: &Path) -> Result<(), FileError> {
    std::fs::create_dir_all(path).map_err(|error| FileError::from_io("create", path, 0, error))
}

/// Removes a file, or a directory with all that is in it; nothing if there is none.
pub fn remove(path: &Path) -> Result<(), FileError> {
    let is_directory = path.symlink_metadata().is_ok_and(|about| about.is_dir());
    let removed = if is_directory {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_file(path)
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(FileError::from_io("remove", path, 0, error))
        }
        _ => Ok(()),
    }
}

/// Replaces `path` by `bytes`. A reader sees the old content or the new one, complete, even after a power
/// failure: the bytes go to a temporary file in the same directory, which is fsynced and renamed, and the
/// directory is fsynced.
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

/// Reads a file of [`write_json`].
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    parse_json(path, &read(path)?)
}

/// The bytes of a whole file, at most [`STATE_BYTES`].
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    input::read(path, STATE_BYTES).map_err(|source| FileError::from_io("read", path, 0, source))
}

/// Parses the bytes of a file of [`write_json`].
pub fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, FileError> {
    serde_json::from_slice(bytes).map_err(|error| FileError::Json {
        path: path.to_path_buf(),
        error,
    })
}

impl FileError {
    /// Whether the error says that the file does not exist.
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

/// A lock on a directory until the value is dropped or the process ends in any way (`flock` on a file `lock`
/// in it, which stays behind and holds the process's number).
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Locks an existing directory; the error names the process that holds it.
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
                let written = input::read(&path, 64).ok();
                let text = written.and_then(|bytes| String::from_utf8(bytes).ok());
                let pid = text.and_then(|text| text.trim().parse().ok());
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

    /// The lock file of a directory.
    pub fn file(directory: &Path) -> PathBuf {
        directory.join(LOCK)
    }

    /// Whether a process holds the lock of a directory; this check creates and changes nothing.
    pub fn is_held(directory: &Path) -> Result<bool, FileError> {
        let path = Lock::file(directory);
        let failed = |doing, source| FileError::from_io(doing, &path, 0, source);
        let file = match input::open(&path) {
            Ok(file) => file,
            // No process has ever held it.
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
        // An error here is harmless: the lock ends when the file closes.
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
        // A file cannot replace a directory that is not empty.
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("old"), b"old").unwrap();
        let error = write_atomically(&path, b"new").unwrap_err().to_string();
        assert!(error.starts_with("cannot write "), "{error}");
        assert_eq!(std::fs::read(path.join("old")).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_full_disk_is_an_error_with_the_bytes_needed() {
        let source = io::Error::from(io::ErrorKind::StorageFull);
        let error = FileError::from_io("write", Path::new("/dev/shm/x"), 12, source).to_string();
        assert!(
            error.starts_with(
                "no space left on the disk of /dev/shm while writing /dev/shm/x: 12 B needed, "
            ),
            "{error}"
        );
    }

    #[test]
    fn a_locked_directory_names_its_holder_and_is_free_after_drop() {
        let directory = tempfile::tempdir().unwrap();
        let lock = Lock::acquire(directory.path()).unwrap();
        match Lock::acquire(directory.path()) {
            Err(FileError::HeldBy { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        assert!(Lock::is_held(directory.path()).unwrap());
        drop(lock);
        // A child that a parallel test forked meanwhile inherits the lock until its exec.
        let deadline = Instant::now() + Duration::from_secs(60);
        while Lock::is_held(directory.path()).unwrap() {
            assert!(Instant::now() < deadline, "the lock is never free");
            std::thread::yield_now();
        }
        Lock::acquire(directory.path()).unwrap();
    }

    #[test]
    fn an_unreadable_lock_does_not_count_as_free() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!Lock::is_held(directory.path()).unwrap());
        // No process can open a link to itself.
        let lock = Lock::file(directory.path());
        std::os::unix::fs::symlink(&lock, &lock).unwrap();
        let message = Lock::is_held(directory.path()).unwrap_err().to_string();
        assert!(message.starts_with("cannot open "), "{message}");
    }

    #[test]
    fn json_is_read_back_and_invalid_json_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        let absent = read_json::<Vec<u64>>(&path).unwrap_err();
        assert!(absent.is_absent(), "{absent}");
        write_json(&path, &[1_u64, 2]).unwrap();
        assert_eq!(read_json::<Vec<u64>>(&path).unwrap(), [1, 2]);
        std::fs::write(&path, "[1,").unwrap();
        let error = read_json::<Vec<u64>>(&path).unwrap_err();
        assert!(!error.is_absent());
        let message = error.to_string();
        assert!(
            message.contains("state.json cannot be parsed: EOF"),
            "{message}"
        );
        assert!(message.ends_with("put back a copy"), "{message}");
    }

    #[test]
    fn killed_process_holds_no_lock() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "util::durable::tests::hold_lock", "--nocapture"])
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
        // Ends when the parent kills this process, or when the parent's end closes its input.
        let _ = io::stdin().read_line(&mut String::new());
    }
}
