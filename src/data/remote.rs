//! An object of data, and its copy on this disk while it is read.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use crate::bucket::{Bucket, Cause, Object, Reader};
use crate::util::durable::{self, FileError, create_directory};
use crate::util::lock::lock;

use super::error::DataError;
use super::manifest::{Checksum, FileRecord};
use super::publish;
use super::request::{Stopped, check_stopped};

/// Most bytes of copies on this disk. A larger object is copied too, and is then the only one.
const MOST: u64 = 4 << 30;

/// An object of data.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    reader: Reader,
    pub object: Object,
    cache: Arc<Cache>,
    /// Path of its copy.
    copy: PathBuf,
    /// The content that was read first. Later downloads must have the same.
    first: Arc<OnceLock<FileRecord>>,
}

/// Copies of objects. They are removed with it.
#[derive(Debug)]
pub(super) struct Cache {
    directory: PathBuf,
    most: u64,
    /// The copies with their sizes, in the order of their downloads.
    held: Mutex<VecDeque<(PathBuf, u64)>>,
}

impl Cache {
    /// A cache of at most `most` bytes; `None`: of the usual number. Creates no directory yet.
    pub fn at(directory: PathBuf, most: Option<u64>) -> Arc<Cache> {
        Arc::new(Cache {
            directory,
            most: most.unwrap_or(MOST),
            held: Mutex::default(),
        })
    }

    /// Removes copies until `bytes` more are within the limit, and counts them as `copy`.
    fn make_room(&self, copy: &Path, bytes: u64) -> Result<(), FileError> {
        let mut held = lock(&self.held);
        if held.is_empty() {
            // A preparation that was killed leaves its copies.
            durable::remove(&self.directory)?;
            create_directory(&self.directory)?;
        }
        held.retain(|(other, _)| other != copy);
        while held.iter().map(|(_, bytes)| bytes).sum::<u64>() + bytes > self.most {
            let Some((oldest, _)) = held.pop_front() else {
                break;
            };
            // A reader still has the file open.
            durable::remove(&oldest)?;
        }
        held.push_back((copy.to_path_buf(), bytes));
        Ok(())
    }

    fn holds(&self, copy: &Path) -> bool {
        lock(&self.held).iter().any(|(held, _)| held == copy)
    }

    fn forget(&self, copy: &Path) {
        lock(&self.held).retain(|(held, _)| held != copy);
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = durable::remove(&self.directory);
    }
}

/// The directory for copies while the data in `data` are prepared.
pub fn directory(data: &Path) -> PathBuf {
    publish::beside(data, "cache")
}

impl Remote {
    pub fn new(reader: &Reader, object: Object, cache: &Arc<Cache>) -> Remote {
        let mut checksum = Checksum::default();
        checksum.update(reader.identity(&object).as_bytes());
        Remote {
            reader: reader.clone(),
            object,
            cache: Arc::clone(cache),
            copy: cache.directory.join(checksum.hex()),
            first: Arc::default(),
        }
    }

    /// Which object it is, whatever the spelling of its URL.
    pub fn identity(&self) -> String {
        self.reader.identity(&self.object)
    }

    /// Accepts no other content than this from now on.
    pub fn expect(&self, content: &FileRecord) {
        let _ = self.first.set(content.clone());
    }

    /// The path of its copy, which is downloaded unless it is still there.
    pub fn fetch(&self, stopped: Stopped<'_>) -> Result<PathBuf, DataError> {
        if !self.cache.holds(&self.copy) {
            self.download(&mut |_| check_stopped(stopped))?;
        }
        Ok(self.copy.clone())
    }

    /// Downloads it and passes the bytes of every piece to `progress`.
    pub fn download(
        &self,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        self.cache.make_room(&self.copy, self.object.bytes)?;
        let written = self.write(progress).and_then(|record| {
            if *self.first.get_or_init(|| record.clone()) == record {
                Ok(record)
            } else {
                Err(self.replaced())
            }
        });
        if written.is_err() {
            self.cache.forget(&self.copy);
        }
        written
    }

    fn replaced(&self) -> DataError {
        DataError::source(
            Path::new(&self.reader.url(&self.object.key)),
            "it was replaced or removed while it was read",
            "launch again when no process writes to it",
        )
    }

    /// Downloads it, from its beginning again for a while if the server cannot be reached.
    fn write(
        &self,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        let failed = |error| FileError::from_io("write", &self.copy, self.object.bytes, error);
        let mut reported = 0;
        let written = Bucket::patiently(|| {
            let mut file = match File::create(&self.copy) {
                Ok(file) => file,
                Err(error) => return Ok(Err(failed(error).into())),
            };
            if let Err(stopped) = progress(0) {
                return Ok(Err(stopped));
            }
            let mut checksum = Checksum::default();
            let (mut bytes, mut interrupted) = (0, None);
            let received = self.reader.download(&self.object, |piece| {
                checksum.update(piece);
                bytes += piece.len() as u64;
                let news = bytes.saturating_sub(reported);
                reported += news;
                let written = file.write_all(piece).map_err(|error| failed(error).into());
                interrupted = written.and_then(|()| progress(news)).err();
                interrupted.is_none()
            });
            if let Some(error) = interrupted {
                return Ok(Err(error));
            }
            received?;
            let checksum = checksum.hex();
            Ok(Ok(FileRecord { bytes, checksum }))
        });
        match written {
            Ok(written) => written,
            Err(error) if matches!(error.cause, Cause::Changed | Cause::Missing) => {
                Err(self.replaced())
            }
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::bucket::tests::in_memory;

    #[test]
    fn copies_stay_within_the_limit_and_are_removed_at_the_end() {
        let bucket = in_memory();
        let place = tempfile::tempdir().unwrap();
        let directory = directory(&place.path().join("data"));
        // Left by a preparation that was killed.
        fs::create_dir_all(directory.join("old")).unwrap();
        let cache = Cache::at(directory.clone(), Some(10));
        let reader = Reader::of(bucket.clone());
        let remotes = ["a.txt", "b.txt", "c.txt"].map(|key| {
            bucket.put(key, key.as_bytes().to_vec()).unwrap();
            let object = reader.object(&format!("run/{key}")).unwrap().unwrap();
            Remote::new(&reader, object, &cache)
        });
        let on_disk = || fs::read_dir(&directory).unwrap().count();
        for remote in &remotes {
            let copy = remote.fetch(&|| false).unwrap();
            let text = fs::read_to_string(copy).unwrap();
            assert_eq!(format!("run/{text}"), remote.object.key);
        }
        assert_eq!(on_disk(), 2, "each has 5 of 10 bytes");
        let stopped = remotes[0].fetch(&|| true).unwrap_err();
        assert!(matches!(stopped, DataError::Stopped), "{stopped}");

        bucket.put("c.txt", b"other".to_vec()).unwrap();
        remotes[2].fetch(&|| false).unwrap();
        let is_replaced = |remote: &Remote| {
            let error = remote.download(&mut |_| Ok(())).unwrap_err();
            error.to_string().contains("was replaced")
        };
        assert!(is_replaced(&remotes[2]));
        let mut without_etag = remotes[2].clone();
        without_etag.object.etag = None;
        assert!(is_replaced(&without_etag));
        drop((remotes, without_etag, cache));
        assert!(!directory.exists());
    }
}
