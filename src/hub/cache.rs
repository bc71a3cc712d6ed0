//! The cache of huggingface_hub, which other programs share:
//! `models--OWNER--NAME/{blobs/ETAG, refs/REVISION, snapshots/COMMIT/FILE -> ../../blobs/ETAG}`, and likewise
//! `datasets--OWNER--NAME`. A blob is there when it is complete; its first part is `ETAG.incomplete`. Who writes a blob
//! holds the lock `.locks/models--OWNER--NAME/ETAG.lock`. `.listings/COMMIT` is Evenkeel's own.
//! <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::Cause;
use super::id::{Kind, Repo, is_commit};
use crate::util::durable::{self, FileError, create_directory};
use crate::util::input;
use crate::util::shards::is_file_name;

/// Interval between two tries for a lock.
const LOCK_POLL: Duration = Duration::from_millis(100);

/// Directory of the listings, one for each commit: the names of all its files, one a line. A snapshot may have only
/// some of them.
const LISTINGS: &str = ".listings";
/// Largest listing, bytes.
pub(super) const LISTING_BYTES: usize = 16 << 20;

/// The cache of one repository.
#[derive(Debug, Clone)]
pub(super) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub fn of(cache: &Path, repo: &Repo) -> RepoCache {
        let name = format!("{}--{}", repo.kind.plural(), repo.id.replace('/', "--"));
        RepoCache {
            locks: cache.join(".locks").join(&name),
            folder: cache.join(name),
        }
    }

    /// The snapshot of a revision, complete or not.
    pub fn snapshot(&self, revision: &str) -> Option<PathBuf> {
        let commit = if is_commit(revision) {
            revision.to_owned()
        } else {
            let path = self.reference(revision)?;
            let text = String::from_utf8(input::read(&path, 64).ok()?).ok()?;
            text.trim().to_owned()
        };
        let found = is_commit(&commit).then(|| self.snapshot_of(&commit))?;
        found.is_dir().then_some(found)
    }

    /// The directory of a commit.
    pub fn snapshot_of(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The file with the commit of a revision; `None`: the revision is no path.
    fn reference(&self, revision: &str) -> Option<PathBuf> {
        let is_path = revision.split('/').all(is_file_name);
        is_path.then(|| self.folder.join("refs").join(revision))
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    pub fn incomplete(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(format!("{etag}.incomplete"))
    }

    pub fn create(&self, commit: &str) -> Result<(), FileError> {
        create_directory(&self.folder.join("blobs"))?;
        create_directory(&self.locks)?;
        create_directory(&self.snapshot_of(commit))
    }

    /// Makes a blob the file of a commit.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), FileError> {
        let path = self.snapshot_of(commit).join(file);
        let above = "../".repeat(2 + file.matches('/').count());
        let target = Path::new(&above).join("blobs").join(etag);
        if path.read_link().is_ok_and(|found| found == target) {
            return Ok(());
        }
        durable::remove(&path)?;
        if let Some(parent) = path.parent() {
            create_directory(parent)?;
        }
        match symlink(&target, &path) {
            // Another process has just made it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked.map_err(|error| FileError::from_io("write", &path, 0, error)),
        }
    }

    /// Keeps the names of a commit's files.
    pub fn keep_listing(&self, commit: &str, files: &[String]) -> Result<(), FileError> {
        let directory = self.folder.join(LISTINGS);
        create_directory(&directory)?;
        durable::write_atomically(&directory.join(commit), files.join("\n").as_bytes())
    }

    /// Makes a commit that of its revision.
    pub fn refer(&self, revision: &str, commit: &str) -> Result<(), FileError> {
        if is_commit(revision) {
            return Ok(());
        }
        let Some(path) = self.reference(revision) else {
            return Ok(());
        };
        if let Some(parent) = path.parent() {
            create_directory(parent)?;
        }
        durable::write_atomically(&path, commit.as_bytes())
    }

    /// Waits for the lock of a blob.
    pub fn lock(&self, etag: &str, stopped: &dyn Fn() -> bool) -> Result<BlobLock, Cause> {
        let path = self.locks.join(format!("{etag}.lock"));
        let failed = |source| FileError::from_io("lock", &path, 0, source);
        loop {
            let mut options = File::options();
            let file = options.read(true).write(true).create(true).truncate(false);
            let file = file.open(&path).map_err(failed)?;
            match file.try_lock() {
                // Its last holder may have removed the file that was opened.
                Ok(()) if is_at(&file, &path) => return Ok(BlobLock { _file: file }),
                Ok(()) => continue,
                Err(TryLockError::WouldBlock) if stopped() => return Err(Cause::Stopped),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_POLL),
                Err(TryLockError::Error(source)) => return Err(failed(source).into()),
            }
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(held), Ok(found)) = (file.metadata(), path.metadata()) else {
        return false;
    };
    (held.dev(), held.ino()) == (found.dev(), found.ino())
}

/// The lock of a blob, until it is dropped or the process ends (`flock`, as that of huggingface_hub).
#[derive(Debug)]
pub(super) struct BlobLock {
    _file: File,
}

/// The repository and the commit of a directory in the layout of the cache.
pub fn repo_of_snapshot(directory: &Path) -> Option<Repo> {
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
    let commit = name(directory).filter(|commit| is_commit(commit))?;
    let snapshots = directory.parent()?;
    let folder = name(snapshots.parent()?)?;
    let (plural, id) = folder.split_once("--")?;
    let kinds = [Kind::Model, Kind::DataSet];
    let kind = kinds.into_iter().find(|kind| kind.plural() == plural)?;
    let id = id.replacen("--", "/", 1);
    (name(snapshots)? == "snapshots").then(|| Repo::of(kind, &id, Some(&commit)))
}

/// The same of a model's directory, which may be a folder of a snapshot.
pub fn model_of_snapshot(directory: &Path) -> Option<Repo> {
    let of_snapshot = |above: &Path| {
        let repo = repo_of_snapshot(above).filter(|repo| repo.kind == Kind::Model)?;
        let folder = directory.strip_prefix(above).ok()?.to_str()?;
        Some(repo.within((!folder.is_empty()).then_some(folder)))
    };
    directory.ancestors().find_map(of_snapshot)
}

/// The names of all files of a snapshot's commit; `None`: Evenkeel has downloaded none of them.
pub fn files_of_snapshot(directory: &Path) -> Option<Vec<String>> {
    let commit = repo_of_snapshot(directory)?.revision;
    let folder = directory.parent()?.parent()?;
    let path = folder.join(LISTINGS).join(commit);
    let text = String::from_utf8(input::read(&path, LISTING_BYTES as u64).ok()?).ok()?;
    Some(text.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn a_snapshot_is_found_by_branch_pull_request_and_commit() {
        let place = tempfile::tempdir().unwrap();
        let cached = RepoCache::of(place.path(), &Repo::model("acme/tiny", None));
        assert_eq!(cached.snapshot("main"), None);
        cached.create(COMMIT).unwrap();
        let snapshot = place
            .path()
            .join("models--acme--tiny/snapshots")
            .join(COMMIT);
        assert_eq!(cached.snapshot(COMMIT), Some(snapshot.clone()));
        assert_eq!(cached.snapshot("main"), None);
        for revision in ["main", "refs/pr/1"] {
            cached.refer(revision, COMMIT).unwrap();
            assert_eq!(cached.snapshot(revision), Some(snapshot.clone()));
        }
        let refs = place.path().join("models--acme--tiny/refs");
        std::fs::write(refs.join("main"), "../../../other").unwrap();
        assert_eq!(cached.snapshot("main"), None);
        std::fs::write(place.path().join("secret"), COMMIT).unwrap();
        assert_eq!(cached.snapshot("../../secret"), None);
        let repo = repo_of_snapshot(&snapshot).unwrap();
        assert_eq!(repo, Repo::model("acme/tiny", Some(COMMIT)));
        assert_eq!(repo_of_snapshot(place.path()), None);
        assert_eq!(model_of_snapshot(&snapshot), Some(repo.clone()));
        let within = repo.within(Some("a/b"));
        assert_eq!(model_of_snapshot(&snapshot.join("a/b")), Some(within));
        assert_eq!(model_of_snapshot(place.path()), None);
    }

    #[test]
    fn a_file_is_a_relative_link_to_its_blob() {
        let place = tempfile::tempdir().unwrap();
        let cached = RepoCache::of(place.path(), &Repo::model("gpt2", None));
        cached.create(COMMIT).unwrap();
        for etag in ["one", "two", "two"] {
            std::fs::write(cached.blob(etag), etag).unwrap();
            cached.link(COMMIT, "config.json", etag).unwrap();
            let file = cached.snapshot_of(COMMIT).join("config.json");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), etag);
            assert_eq!(
                file.read_link().unwrap(),
                Path::new("../../blobs").join(etag)
            );
        }
    }

    #[test]
    fn a_data_set_has_its_own_directory_with_files_below_it() {
        let place = tempfile::tempdir().unwrap();
        let repo = Repo::data_set("acme/chats", Some(COMMIT));
        let cached = RepoCache::of(place.path(), &repo);
        cached.create(COMMIT).unwrap();
        let snapshot = cached.snapshot(COMMIT).unwrap();
        assert!(snapshot.starts_with(place.path().join("datasets--acme--chats")));
        assert_eq!(repo_of_snapshot(&snapshot), Some(repo));
        std::fs::write(cached.blob("one"), "1").unwrap();
        let file = "en/train/0.parquet";
        cached.link(COMMIT, file, "one").unwrap();
        assert_eq!(std::fs::read_to_string(snapshot.join(file)).unwrap(), "1");

        assert_eq!(files_of_snapshot(&snapshot), None);
        let listing = ["README.md", file].map(str::to_owned);
        cached.keep_listing(COMMIT, &listing).unwrap();
        assert_eq!(files_of_snapshot(&snapshot).unwrap(), listing);
    }

    #[test]
    fn a_lock_excludes_other_writers_of_its_blob_only() {
        let place = tempfile::tempdir().unwrap();
        let cached = RepoCache::of(place.path(), &Repo::model("acme/tiny", None));
        cached.create(COMMIT).unwrap();
        let held = cached.lock("one", &|| false).unwrap();
        let refused = cached.lock("one", &|| true).unwrap_err();
        assert!(matches!(refused, Cause::Stopped), "{refused}");
        cached.lock("two", &|| true).unwrap();
        drop(held);
        cached.lock("one", &|| false).unwrap();
    }
}
