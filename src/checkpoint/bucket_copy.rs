//! Checkpoints in a bucket: the same files under the same names, and the manifest as the last object.
//!
//! A pod's disk is a cache of them. [`fetch`] completes a checkpoint there before ranks read it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::checksum::{FileEntry, Hasher, PIECE};
use super::manifest::Manifest;
use super::names::{Committed, MANIFEST};
use super::{CheckpointError, Checksum, History, verified};
use crate::bucket::{Bucket, BucketError, Cause, Object};
use crate::lifecycle::files;
use crate::util::durable::{self, FileError};
use crate::util::input;

/// Content of the manifest of a checkpoint that is never committed.
const WITHDRAWN: &[u8] = b"";

/// Completes the checkpoint `path`, below the run directory, from the bucket: every file is there afterwards and has
/// the manifest's checksum. Files that the disk has are kept. A file is read once, and hashed meanwhile. Returns how many
/// bytes came from the bucket.
pub fn fetch(
    bucket: &Bucket,
    run: &Path,
    path: &str,
    expected: Checksum,
) -> Result<u64, CheckpointError> {
    let directory = run.join(path);
    let bytes = pinned(bucket, path, &directory, expected)?;
    let manifest = Manifest::parse(&directory, &bytes)?;
    let partial = files::partial(&directory);
    durable::create_directory(&directory)?;
    let mut downloaded = 0;
    for (name, entry) in &manifest.files {
        let (file, partial) = (directory.join(name), partial.join(name));
        if verified::verify(&partial, *entry).is_ok() {
            std::fs::rename(partial, &file)
                .map_err(|error| FileError::from_io("rename", &file, 0, error))?;
        } else if complete(bucket, &format!("{path}/{name}"), &file, *entry)? {
            downloaded += entry.bytes;
        }
    }
    durable::write_atomically(&directory.join(MANIFEST), &bytes)?;
    durable::remove(&partial)?;
    Ok(downloaded)
}

/// The manifest of a checkpoint with this checksum.
fn pinned(
    bucket: &Bucket,
    path: &str,
    directory: &Path,
    expected: Checksum,
) -> Result<Vec<u8>, CheckpointError> {
    let bytes = bucket.require(&format!("{path}/{MANIFEST}"))?;
    let found = Checksum::of(&bytes);
    if found != expected {
        return Err(CheckpointError::NotThePinned {
            path: directory.to_path_buf(),
            found,
            expected,
        });
    }
    Ok(bytes.to_vec())
}

/// Downloads a file unless the disk has it; returns whether it was downloaded.
pub fn complete(
    bucket: &Bucket,
    key: &str,
    file: &Path,
    entry: FileEntry,
) -> Result<bool, CheckpointError> {
    if verified::verify(file, entry).is_ok() {
        return Ok(false);
    }
    let found = download(bucket, key, file, entry.bytes)?;
    check(bucket, key, found, entry)?;
    Ok(true)
}

/// Uploads a file and returns its entry for [`complete`].
pub fn upload(bucket: &Bucket, file: &Path, key: &str) -> Result<FileEntry, CheckpointError> {
    let entry = input::open(file).and_then(FileEntry::of_stream);
    let entry = entry.map_err(|error| FileError::from_io("read", file, 0, error))?;
    bucket.upload(file, key)?;
    Ok(entry)
}

/// Downloads an object of `size` bytes and returns its checksum.
pub fn download(
    bucket: &Bucket,
    key: &str,
    file: &Path,
    size: u64,
) -> Result<Checksum, CheckpointError> {
    let failed = |error| FileError::from_io("write", file, size, error);
    let mut written = File::create(file).map_err(failed)?;
    let mut hasher = Hasher::default();
    let mut local = Ok(());
    let received = bucket.download(&Object::of(key, size), |piece| {
        local = piece.chunks(PIECE).try_for_each(|piece| {
            hasher.update(piece);
            written.write_all(piece)
        });
        local.is_ok()
    });
    local.map_err(failed)?;
    received?;
    Ok(hasher.finish().xxh3_128)
}

/// The generations that have objects in the bucket, the newest first.
pub fn generations(bucket: &Bucket) -> Result<Vec<u64>, CheckpointError> {
    let names = bucket.directories("")?;
    let numbers = names
        .iter()
        .filter_map(|name| files::parse_generation(name));
    let mut numbers: Vec<u64> = numbers.collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    Ok(numbers)
}

/// The newest checkpoint of one generation in the bucket with a valid manifest.
pub fn newest(bucket: &Bucket, generation: u64) -> Result<Option<Committed>, CheckpointError> {
    let directory = files::generation(generation);
    let names = bucket.directories(&directory)?;
    let paths = names.iter().map(|name| format!("{directory}/{name}"));
    let placed = |path: String| Some((files::parse_checkpoint_path(&path)?, path));
    let mut paths: Vec<_> = paths.filter_map(placed).collect();
    paths.sort_unstable();
    for (_, path) in paths.iter().rev() {
        // One without a manifest is not committed.
        if let Some(bytes) = bucket.get(&format!("{path}/{MANIFEST}"))?
            && let Ok(manifest) = Manifest::parse(Path::new(path), &bytes)
        {
            let committed = manifest.committed(Path::new(path), Checksum::of(&bytes));
            return Ok(Some(committed));
        }
    }
    Ok(None)
}

/// All checkpoints in the bucket, as [`super::list`] lists those of a directory. Their paths are keys.
pub fn list(bucket: &Bucket) -> Result<History, CheckpointError> {
    let mut history = History::default();
    let objects = bucket.list("")?;
    for ((_, path), objects) in stored(&objects) {
        if !is_committed(path, &objects) {
            continue;
        }
        let Some(bytes) = bucket.get(&manifest_of(path))? else {
            continue;
        };
        let path = Path::new(path);
        match Manifest::parse(path, &bytes) {
            Ok(manifest) => {
                let committed = manifest.committed(path, Checksum::of(&bytes));
                history.committed.push(committed);
            }
            Err(error) => history.damaged.push(error),
        }
    }
    Ok(history)
}

/// Reads all of a checkpoint and compares it with its manifest, which has this checksum.
pub fn verify(bucket: &Bucket, path: &str, expected: Checksum) -> Result<(), CheckpointError> {
    let directory = Path::new(path);
    let bytes = pinned(bucket, path, directory, expected)?;
    for (name, entry) in &Manifest::parse(directory, &bytes)?.files {
        let key = format!("{path}/{name}");
        let mut hasher = Hasher::default();
        bucket.download(&Object::of(&key, entry.bytes), |piece| {
            hasher.update(piece);
            true
        })?;
        check(bucket, &key, hasher.finish().xxh3_128, *entry)?;
    }
    Ok(())
}

/// Refuses content with another checksum than its entry has.
fn check(
    bucket: &Bucket,
    key: &str,
    found: Checksum,
    entry: FileEntry,
) -> Result<(), CheckpointError> {
    if found == entry.xxh3_128 {
        return Ok(());
    }
    let message = format!(
        "its checksum is {found} where {} was written",
        entry.xxh3_128
    );
    Err(BucketError::damaged(&bucket.url(key), message).into())
}

/// The key of a checkpoint's manifest.
fn manifest_of(path: &str) -> String {
    format!("{path}/{MANIFEST}")
}

/// The objects of each checkpoint, by its generation and step, and its path; the oldest checkpoint first.
fn stored(objects: &[Object]) -> BTreeMap<((u64, u64), &str), Vec<&Object>> {
    let mut stored: BTreeMap<_, Vec<&Object>> = BTreeMap::new();
    for object in objects {
        if let Some((path, _)) = object.key.rsplit_once('/')
            && let Some(place) = files::parse_checkpoint_path(path)
        {
            stored.entry((place, path)).or_default().push(object);
        }
    }
    stored
}

/// Whether the objects of a checkpoint have a manifest that was not withdrawn.
fn is_committed(path: &str, objects: &[&Object]) -> bool {
    let manifest = manifest_of(path);
    let mut manifests = objects.iter().filter(|object| object.key == manifest);
    manifests.any(|object| object.bytes > WITHDRAWN.len() as u64)
}

/// Gives every checkpoint of a generation that has no manifest an empty one, with which it is none: a manifest is created
/// once, so its ranks cannot commit it any more.
pub(super) fn withdraw(bucket: &Bucket, generation: u64) -> Result<(), CheckpointError> {
    let directory = files::generation(generation);
    for name in bucket.directories(&directory)? {
        if files::parse_checkpoint(&name).is_none() {
            continue;
        }
        match bucket.create(
            &format!("{directory}/{name}/{MANIFEST}"),
            WITHDRAWN.to_vec(),
        ) {
            // It is committed.
            Err(error) if error.cause == Cause::Taken => {}
            created => created?,
        }
    }
    Ok(())
}

/// A small file of a committed checkpoint, checked against its manifest. `expected`: the manifest's checksum, if it is known.
pub fn read(
    bucket: &Bucket,
    path: &str,
    expected: Option<Checksum>,
    name: &str,
) -> Result<Vec<u8>, CheckpointError> {
    let manifest = match expected {
        Some(expected) => pinned(bucket, path, Path::new(path), expected)?,
        None => bucket.require(&format!("{path}/{MANIFEST}"))?.to_vec(),
    };
    let manifest = Manifest::parse(Path::new(path), &manifest)?;
    let key = format!("{path}/{name}");
    let bytes = bucket.require(&key)?;
    let entry = manifest.files.get(name).map(|entry| entry.xxh3_128);
    if entry != Some(Checksum::of(&bytes)) {
        let message = "it differs from its checkpoint's manifest".to_owned();
        return Err(BucketError::damaged(&bucket.url(&key), message).into());
    }
    Ok(bytes.to_vec())
}

/// Removes the oldest checkpoints except the `keep` newest up to `newest`, as [`super::retain_in_run`] does, and the
/// objects of checkpoints that were never committed, of generations before that of `newest`. A manifest goes first, so
/// that a partly removed checkpoint is none. `None` keeps all checkpoints.
pub fn retain(
    bucket: &Bucket,
    keep: Option<u64>,
    newest: &str,
    start: Option<&str>,
) -> Result<(), CheckpointError> {
    let Some(known) = files::parse_checkpoint_path(newest) else {
        return Ok(());
    };
    let objects = bucket.list("")?;
    let stored = stored(&objects);
    let committed = stored
        .iter()
        .filter(|((place, path), objects)| *place <= known && is_committed(path, objects));
    let mut surplus = keep.map_or(0, |keep| {
        (committed.count() as u64).saturating_sub(keep.max(1))
    });
    for ((place, path), objects) in &stored {
        let is_removed = if is_committed(path, objects) {
            *place <= known && surplus > 0
        } else {
            place.0 < known.0
        };
        if !is_removed {
            continue;
        }
        surplus -= u64::from(is_committed(path, objects));
        if start != Some(*path) {
            bucket.delete(&manifest_of(path))?;
            for object in objects {
                bucket.delete(&object.key)?;
            }
        }
    }
    Ok(())
}
