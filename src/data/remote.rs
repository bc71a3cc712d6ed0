//! An object of data, and its copy on this disk while it is read.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::bucket::{Bucket, Object};
use crate::util::durable::{FileError, create_directory};
use crate::util::lock::lock;

use super::error::DataError;
use super::manifest::{Checksum, FileRecord};
use super::request::{Stopped, check_stopped};

/// Most bytes of copies on this disk. An object that is larger than that is there alone.
const MOST: u64 = 4 << 30;

/// An object of data.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    bucket: Bucket,
    object: Object,
    cache: Arc<Cache>,
}

/// The copies of objects, the ones that were last downloaded last. They are removed with it.
#[derive(Debug)]
pub(super) struct Cache {
    directory: PathBuf,
    most: u64,
    held: Mutex<VecDeque<(PathBuf, u64)>>,
}

impl Cache {
    /// A cache beside the prepared data. Creates no directory yet.
    pub fn beside(data: &Path) -> Arc<Cache> {
        let name = data.file_name().unwrap_or_default();
        Cache::at(
            data.with_file_name(format!(".{}.cache", name.display())),
            MOST,
        )
    }

    fn at(directory: PathBuf, most: u64) -> Arc<Cache> {
        Arc::new(Cache {
            directory,
            most,
            held: Mutex::default(),
        })
    }

    /// Removes copies until `bytes` more are within the limit, and counts them.
    fn make_room(&self, path: PathBuf, bytes: u64) -> Result<(), FileError> {
        let mut held = lock(&self.held);
        if held.is_empty() {
            // A preparation that was killed leaves its copies.
            remove(&self.directory)?;
        }
        while held.iter().map(|(_, bytes)| bytes).sum::<u64>() + bytes > self.most {
            let Some((oldest, _)) = held.pop_front() else {
                break;
            };
            // Whoever still reads the file has it open.
            remove(&oldest)?;
        }
        create_directory(&path)?;
        held.push_back((path, bytes));
        Ok(())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = remove(&self.directory);
    }
}

fn remove(directory: &Path) -> Result<(), FileError> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(FileError::from_io("remove", directory, 0, error))
        }
        _ => Ok(()),
    }
}

impl Remote {
    pub fn new(bucket: &Bucket, object: Object, cache: &Arc<Cache>) -> Remote {
        Remote {
            bucket: bucket.clone(),
            object,
            cache: Arc::clone(cache),
        }
    }

    pub fn url(&self) -> String {
        self.bucket.url(&self.object.key)
    }

    pub fn bytes(&self) -> u64 {
        self.object.bytes
    }

    /// Which content it has: its ETag.
    pub fn version(&self) -> Option<&str> {
        self.object.version.as_deref()
    }

    /// The path of its copy. The name is the object's, since it may state the format.
    fn copy(&self) -> PathBuf {
        let mut url = Checksum::default();
        url.update(self.url().as_bytes());
        let name = self.object.key.rsplit('/').next().unwrap_or_default();
        self.cache.directory.join(url.hex()).join(name)
    }

    /// The path of its copy, which is downloaded unless it is still there.
    pub fn fetch(&self, stopped: Stopped<'_>) -> Result<PathBuf, DataError> {
        let copy = self.copy();
        let is_held = |(path, _): &(PathBuf, u64)| copy.parent() == Some(path);
        if !lock(&self.cache.held).iter().any(is_held) {
            self.download(&mut |_| check_stopped(stopped))?;
        }
        Ok(copy)
    }

    /// Downloads it and passes the bytes of every piece to `progress`.
    pub fn download(
        &self,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        let copy = self.copy();
        let directory = copy.parent().unwrap_or(&copy).to_path_buf();
        lock(&self.cache.held).retain(|(held, _)| *held != directory);
        self.cache.make_room(directory.clone(), self.bytes())?;
        let written = self.write(&copy, progress);
        if written.is_err() {
            lock(&self.cache.held).retain(|(held, _)| *held != directory);
        }
        written
    }

    fn write(
        &self,
        copy: &Path,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        let failed = |error| FileError::from_io("write", copy, self.bytes(), error);
        let mut file = File::create(copy).map_err(failed)?;
        let mut checksum = Checksum::default();
        let mut interrupted = None;
        self.bucket.download(&self.object, |piece| {
            checksum.update(piece);
            let written = file.write_all(piece).map_err(|error| failed(error).into());
            let done = written.and_then(|()| progress(piece.len() as u64));
            interrupted = done.err();
            interrupted.is_none()
        })?;
        match interrupted {
            Some(error) => Err(error),
            None => Ok(FileRecord {
                bytes: self.bytes(),
                checksum: checksum.hex(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::tests::in_memory;

    #[test]
    fn copies_stay_within_the_limit_and_are_removed_at_the_end() {
        let bucket = in_memory();
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join(".data.cache");
        // Left by a preparation that was killed.
        fs::create_dir_all(directory.join("old")).unwrap();
        let cache = Cache::at(directory.clone(), 10);
        let remotes = ["a.txt", "b.txt", "c.txt"].map(|key| {
            bucket.put(key, key.as_bytes().to_vec()).unwrap();
            Remote::new(&bucket, bucket.object(key).unwrap().unwrap(), &cache)
        });
        let on_disk = || fs::read_dir(&directory).unwrap().count();
        for remote in &remotes {
            let copy = remote.fetch(&|| false).unwrap();
            let text = fs::read_to_string(copy).unwrap();
            assert_eq!(text, remote.object.key);
        }
        assert_eq!(on_disk(), 2, "each has 5 of 10 bytes");
        bucket.put("c.txt", b"other".to_vec()).unwrap();
        remotes[2].fetch(&|| false).unwrap();
        let error = remotes[2].download(&mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("was replaced"), "{error}");
        let stopped = remotes[0].fetch(&|| true).unwrap_err();
        assert!(matches!(stopped, DataError::Stopped), "{stopped}");
        drop(remotes);
        drop(cache);
        assert!(!directory.exists());
    }
}
