//! Checkpoints of an external trainer whose pods share no volume: copied to the bucket when they are finished, and
//! brought back before a generation starts.
//!
//! ```text
//! gen-N/call.json                        the checkpoint that the generation resumes from
//! gen-N/external-SSSS/announced.json     the first pod's: a finished checkpoint, and which files it adds
//! gen-N/external-SSSS/NAME               its files, of all pods
//! gen-N/external-SSSS/part-K-of-M.json   what the K-th of M pods has added
//! gen-N/last.json                        the first pod announces no more
//! gen-N/ended-K.json                     the K-th pod adds no more
//! gen-N/output/                          what else is in the checkpoint directory at the end
//! ```
//!
//! A checkpoint is whole when all parts exist. Each pod adds what the trainer wrote on its disk.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bucket::{Bucket, BucketError};
use crate::checkpoint::{CheckpointError, Checksum, FileEntry, bucket_copy};
use crate::external_trainer::call::ExternalCall;
use crate::lifecycle::{ExternalCheckpoint, Generation, Reason, files};
use crate::util::durable::{self, FileError, create_directory};
use crate::util::input;
use crate::util::lock::lock;

/// Pause between two looks at the trainer's directory.
const LOOK: Duration = Duration::from_secs(1);
/// Pause between two looks for what the first pod has announced.
const LISTEN: Duration = Duration::from_secs(5);
/// A checkpoint whose files have not changed for this time is finished: ranks may still write theirs after the one
/// whose file marks it as complete.
const SETTLED: Duration = Duration::from_secs(3);
/// Pause between two searches for checkpoints that the trainer has removed.
const EXPIRY: Duration = Duration::from_secs(30);
/// Longest wait for a first pod that may be lost to announce its last checkpoint.
const LAST: Duration = Duration::from_secs(20);
/// Longest waits for the parts of a pod that is not in the next generation: it may be lost, or it may leave.
const LOST: Duration = Duration::from_secs(20);
const LEFT: Duration = Duration::from_secs(75);
/// Longest wait for a pod that is in the next generation.
const STAYS: Duration = Duration::from_secs(900);

const NO_MORE: &str = "last.json";

/// How the ranks of this pod have ended.
const RUNNING: u8 = 0;
const ENDED_EARLY: u8 = 1;
const FINISHED: u8 = 2;
const CANCELLED: u8 = 3;

/// A finished checkpoint of the first pod.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Announced {
    /// Its name in the checkpoint directory.
    name: String,
    /// Its files on the first pod's disk, by their paths below the checkpoint directory.
    files: BTreeSet<String>,
}

/// The files that a pod has added, by their paths below the checkpoint directory.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Part {
    /// The checkpoint's name in the directory.
    name: String,
    files: BTreeMap<String, FileEntry>,
}

/// Copies the checkpoints of one generation, in a thread.
pub struct Mirror {
    end: Arc<AtomicU8>,
    warnings: Arc<Mutex<Vec<String>>>,
    thread: JoinHandle<()>,
}

impl Mirror {
    /// Starts for the pod `member` of a generation, whose disk has the checkpoint that it resumes from.
    pub fn start(
        bucket: &Bucket,
        run: &Path,
        record: &Generation,
        member: usize,
        external: Arc<ExternalCall>,
    ) -> Mirror {
        let end = Arc::new(AtomicU8::new(RUNNING));
        let warnings = Arc::default();
        let mut copier = Copier {
            bucket: bucket.clone(),
            run: run.to_path_buf(),
            generation: record.number,
            member,
            members: record.members.len(),
            external,
            known: None,
            end: Arc::clone(&end),
            warnings: Arc::clone(&warnings),
        };
        copier.known = copier.newest();
        Mirror {
            end,
            warnings,
            thread: std::thread::spawn(move || copier.copy()),
        }
    }

    /// Tells it that the ranks of this pod have ended, and whether they have `finished` their work; true once everything
    /// is in the bucket.
    pub fn end(&self, finished: bool) -> bool {
        let end = if finished { FINISHED } else { ENDED_EARLY };
        self.end.store(end, Ordering::SeqCst);
        self.thread.is_finished()
    }

    /// What went wrong since the last call.
    pub fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.warnings))
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // After the end of the ranks it completes instead.
        let (order, end) = (Ordering::SeqCst, &self.end);
        let _ = end.compare_exchange(RUNNING, CANCELLED, order, order);
    }
}

struct Copier {
    bucket: Bucket,
    run: PathBuf,
    generation: u64,
    member: usize,
    members: usize,
    external: Arc<ExternalCall>,
    /// The newest checkpoint at the start.
    known: Option<Version>,
    end: Arc<AtomicU8>,
    warnings: Arc<Mutex<Vec<String>>>,
}

/// A checkpoint and its last change: a trainer may write another one of the same name.
type Version = (PathBuf, Option<SystemTime>);

impl Copier {
    fn copy(&self) {
        match self.member {
            0 => self.copy_as_first(),
            _ => self.copy_as_other(),
        }
        let ended = self.key(&format!("ended-{}.json", self.member));
        if self.end() != CANCELLED {
            self.warn(Bucket::patiently(|| {
                self.bucket.put(&ended, b"{}".to_vec())
            }));
        }
    }

    fn copy_as_first(&self) {
        let mut known = self.known.clone();
        let mut number = 0;
        let mut copied: Vec<(u64, PathBuf)> = Vec::new();
        let mut tidied = Instant::now();
        loop {
            let end = self.end();
            if end == CANCELLED {
                return;
            }
            let ended = end != RUNNING;
            let newest = self
                .newest()
                .filter(|newest| Some(newest) != known.as_ref());
            let mut added = false;
            if let Some(newest) = newest
                && (ended || settled(&newest.0))
            {
                number += 1;
                added = self.warn(
                    self.announce(number, &newest.0, ended)
                        .and_then(|()| self.add(number, &newest.0, |_| false)),
                );
                if added {
                    copied.push((number, newest.0.clone()));
                    known = Some(newest);
                }
            }
            if added || tidied.elapsed() > EXPIRY {
                tidied = Instant::now();
                self.warn(self.remove_expired(&mut copied));
            }
            if ended {
                let no_more = self.key(NO_MORE);
                self.warn(Bucket::patiently(|| {
                    self.bucket.put(&no_more, b"{}".to_vec())
                }));
                if end == FINISHED {
                    self.warn(self.add_output(&copied));
                }
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Adds this pod's files to the checkpoints that the first pod has announced.
    fn copy_as_other(&self) {
        let mut done = BTreeSet::new();
        let mut ended_since: Option<Instant> = None;
        let mut listened: Option<Instant> = None;
        loop {
            match self.end() {
                RUNNING => {}
                CANCELLED => return,
                _ => _ = ended_since.get_or_insert_with(Instant::now),
            }
            if ended_since.is_some() || listened.is_none_or(|at| at.elapsed() > LISTEN) {
                listened = Some(Instant::now());
                // Read before the announcements: none follows it.
                let last = self
                    .bucket
                    .size(&self.key(NO_MORE))
                    .is_ok_and(|found| found.is_some());
                let all = self.warn(self.add_announced(&mut done, ended_since.is_some()));
                if ended_since.is_some_and(|since| (last && all) || since.elapsed() > LAST) {
                    return;
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    fn add_announced(&self, done: &mut BTreeSet<u64>, ended: bool) -> Result<(), CheckpointError> {
        for directory in self
            .bucket
            .directories(&files::generation(self.generation))?
        {
            let number = directory
                .strip_prefix(EXTERNAL)
                .and_then(|digits| digits.parse().ok());
            let Some(number) = number.filter(|number| !done.contains(number)) else {
                continue;
            };
            let key = announced_key(&self.prefix(number));
            let Some(first) = read::<Announced>(&self.bucket, &key)? else {
                continue;
            };
            inside(&self.bucket, &key, first.files.iter().chain([&first.name]))?;
            let path = self.external.call.checkpoint_dir.join(&first.name);
            if ended || settled(&path) {
                self.add(number, &path, |file| first.files.contains(file))?;
                done.insert(number);
            }
        }
        Ok(())
    }

    /// Tells the other pods of a finished checkpoint, so that they add their files meanwhile. `last`: none follows.
    fn announce(&self, number: u64, path: &Path, last: bool) -> Result<(), CheckpointError> {
        let directory = &self.external.call.checkpoint_dir;
        let files = files_below(path)?;
        let announced = Announced {
            name: relative(path, directory),
            files: files.iter().map(|file| relative(file, directory)).collect(),
        };
        let key = announced_key(&self.prefix(number));
        Bucket::patiently(|| self.bucket.put(&key, json(&announced)))?;
        if last {
            let no_more = self.key(NO_MORE);
            Bucket::patiently(|| self.bucket.put(&no_more, b"{}".to_vec()))?;
        }
        Ok(())
    }

    /// Adds a checkpoint's files on this disk, except those that the bucket `has`, and then this pod's part.
    fn add(
        &self,
        number: u64,
        path: &Path,
        has: impl Fn(&str) -> bool,
    ) -> Result<(), CheckpointError> {
        let directory = &self.external.call.checkpoint_dir;
        let before = states(path)?;
        let mut part = Part {
            name: relative(path, directory),
            files: BTreeMap::new(),
        };
        for file in before.keys() {
            let name = relative(file, directory);
            if has(&name) {
                continue;
            }
            let key = format!("{}/{name}", self.prefix(number));
            part.files.insert(name, entry(file)?);
            Bucket::patiently(|| self.bucket.upload(file, &key))?;
        }
        if states(path)? != before {
            let message = format!("{} changed while it was copied", path.display());
            return Err(CheckpointError::Misuse(message));
        }
        let key = self.part_key(number, self.member);
        Ok(Bucket::patiently(|| self.bucket.put(&key, json(&part)))?)
    }

    /// Removes copies of checkpoints that the trainer has removed or replaced, and those beyond the recipe's limit. A
    /// whole one that is newer than them stays, and so does everything once a later generation may have chosen from it.
    fn remove_expired(&self, copied: &mut Vec<(u64, PathBuf)>) -> Result<(), CheckpointError> {
        let keep = self
            .external
            .keep()
            .map_or(usize::MAX, |keep| keep.max(1) as usize);
        let is_replaced = |at: usize| {
            copied[at + 1..]
                .iter()
                .any(|(_, later)| *later == copied[at].1)
        };
        let expired: Vec<u64> = (0..copied.len())
            .filter(|at| copied.len() - at > keep || is_replaced(*at) || !copied[*at].1.exists())
            .map(|at| copied[at].0)
            .collect();
        let first = copied.first().map(|(number, _)| *number);
        if expired.is_empty() && (first != Some(1) || keep == usize::MAX) {
            return Ok(());
        }
        let generations = self.bucket.directories("")?;
        let generations: Vec<u64> = generations
            .iter()
            .filter_map(|name| files::parse_generation(name))
            .collect();
        if generations.iter().any(|number| *number > self.generation) {
            return Ok(());
        }
        let mut whole = None;
        for (number, _) in copied.iter().rev() {
            let mut all = true;
            for member in 0..self.members {
                all = all && self.bucket.size(&self.part_key(*number, member))?.is_some();
            }
            if all {
                whole = Some(*number);
                break;
            }
        }
        let Some(whole) = whole else {
            return Ok(());
        };
        for number in expired.into_iter().filter(|number| *number < whole) {
            remove(&self.bucket, &self.prefix(number), self.members)?;
            copied.retain(|(other, _)| *other != number);
        }
        if keep != usize::MAX {
            self.remove_earlier(generations, keep.saturating_sub(copied.len()))?;
        }
        Ok(())
    }

    /// Removes the copies of earlier generations except the `keep` newest and the one that this generation resumed from.
    fn remove_earlier(
        &self,
        mut generations: Vec<u64>,
        keep: usize,
    ) -> Result<(), CheckpointError> {
        let chosen: Option<Chosen> = read(&self.bucket, &self.key(files::CALL))?;
        let chosen = chosen.and_then(|chosen| chosen.prefix);
        generations.retain(|number| *number < self.generation);
        generations.sort_unstable_by(|a, b| b.cmp(a));
        let mut kept = 0;
        for generation in generations.into_iter().map(files::generation) {
            let mut names = self.bucket.directories(&generation)?;
            names.retain(|name| name.starts_with(EXTERNAL));
            names.sort_unstable_by(|a, b| b.cmp(a));
            for prefix in names.iter().map(|name| format!("{generation}/{name}")) {
                kept += 1;
                if kept > keep && chosen.as_ref() != Some(&prefix) {
                    remove(&self.bucket, &prefix, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Adds what the trainer wrote beside its checkpoints, such as the final model.
    fn add_output(&self, copied: &[(u64, PathBuf)]) -> Result<(), CheckpointError> {
        let directory = &self.external.call.checkpoint_dir;
        for path in entries(directory)? {
            let is_copied = copied.iter().any(|(_, copied)| *copied == path);
            if is_copied || self.external.names_checkpoint(&path) {
                continue;
            }
            for file in files_below(&path)? {
                let key = self.key(&format!("output/{}", relative(&file, directory)));
                Bucket::patiently(|| self.bucket.upload(&file, &key))?;
            }
        }
        Ok(())
    }

    fn newest(&self) -> Option<Version> {
        let path = self.external.newest(&self.run)?.path;
        let changed = changed(&path);
        Some((path, changed))
    }

    fn end(&self) -> u8 {
        self.end.load(Ordering::SeqCst)
    }

    /// Whether it succeeded. A failure is a warning, since the next attempt may succeed.
    fn warn(&self, result: Result<impl Sized, impl std::fmt::Display>) -> bool {
        if let Err(error) = &result {
            lock(&self.warnings).push(format!("a checkpoint was not copied: {error}"));
        }
        result.is_ok()
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", files::generation(self.generation))
    }

    fn prefix(&self, number: u64) -> String {
        self.key(&format!("{EXTERNAL}{number:04}"))
    }

    fn part_key(&self, number: u64, member: usize) -> String {
        part_key(&self.prefix(number), member, self.members)
    }
}

const EXTERNAL: &str = "external-";

fn announced_key(prefix: &str) -> String {
    format!("{prefix}/announced.json")
}

fn part_key(prefix: &str, member: usize, members: usize) -> String {
    format!("{prefix}/part-{member}-of-{members}.json")
}

/// Removes a checkpoint of `members` pods, its parts first: without them it is not whole.
fn remove(bucket: &Bucket, prefix: &str, members: usize) -> Result<(), CheckpointError> {
    for member in 0..members {
        bucket.delete(&part_key(prefix, member, members))?;
    }
    let mut objects = bucket.list(prefix)?;
    objects.sort_by_key(|object| !object.key.contains("/part-"));
    for object in objects {
        bucket.delete(&object.key)?;
    }
    Ok(())
}

fn json(value: &impl Serialize) -> Vec<u8> {
    // These types have nothing that JSON lacks.
    serde_json::to_vec(value).unwrap_or_default()
}

fn read<T: DeserializeOwned>(bucket: &Bucket, key: &str) -> Result<Option<T>, CheckpointError> {
    let Some(bytes) = bucket.get(key)? else {
        return Ok(None);
    };
    let read = serde_json::from_slice(&bytes);
    Ok(Some(read.map_err(|error| {
        BucketError::damaged(&bucket.url(key), error.to_string())
    })?))
}

fn part(bucket: &Bucket, key: &str) -> Result<Option<Part>, CheckpointError> {
    let part: Option<Part> = read(bucket, key)?;
    if let Some(part) = &part {
        inside(bucket, key, part.files.keys().chain([&part.name]))?;
    }
    Ok(part)
}

/// Refuses names that leave the checkpoint directory.
fn inside<'a>(
    bucket: &Bucket,
    key: &str,
    mut names: impl Iterator<Item = &'a String>,
) -> Result<(), CheckpointError> {
    let leaves = |name: &&String| {
        let mut parts = Path::new(name).components();
        name.is_empty() || !parts.all(|part| matches!(part, Component::Normal(_)))
    };
    match names.find(leaves) {
        Some(name) => {
            let message = format!("it names `{name}`, outside of the directory");
            Err(BucketError::damaged(&bucket.url(key), message).into())
        }
        None => Ok(()),
    }
}

/// The checkpoint that a generation resumes from, as the first pod has chosen it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Chosen {
    /// The prefix of the checkpoint in the bucket; `None` if there is none.
    prefix: Option<String>,
    /// Pods that wrote it.
    members: usize,
}

/// The newest whole checkpoint of the generations before `record`. `None` while pods of the previous generation may still
/// add one; `waited` is the time since the first call.
pub fn choose(
    bucket: &Bucket,
    record: &Generation,
    waited: Duration,
) -> Result<Option<Chosen>, CheckpointError> {
    let names = bucket.directories("")?;
    let mut earlier: Vec<u64> = names
        .iter()
        .filter_map(|name| files::parse_generation(name))
        .collect();
    earlier.retain(|number| *number < record.number);
    earlier.sort_unstable_by(|a, b| b.cmp(a));
    for (age, number) in earlier.into_iter().enumerate() {
        let generation = files::generation(number);
        let objects = bucket.list(&generation)?;
        let keys: BTreeSet<&str> = objects.iter().map(|object| object.key.as_str()).collect();
        if age == 0 && may_still_add(bucket, record, &generation, &keys, waited)? {
            return Ok(None);
        }
        let first_parts = keys.iter().rev().filter_map(|key| {
            let (prefix, members) = key.strip_suffix(".json")?.rsplit_once("/part-0-of-")?;
            Some((prefix.to_owned(), members.parse::<usize>().ok()?))
        });
        let whole = first_parts.into_iter().find(|(prefix, members)| {
            (0..*members).all(|member| keys.contains(part_key(prefix, member, *members).as_str()))
        });
        if let Some((prefix, members)) = whole {
            return Ok(Some(Chosen {
                prefix: Some(prefix),
                members,
            }));
        }
    }
    Ok(Some(Chosen::default()))
}

/// Whether a pod of the previous generation may still add to a checkpoint.
fn may_still_add(
    bucket: &Bucket,
    record: &Generation,
    generation: &str,
    keys: &BTreeSet<&str>,
    waited: Duration,
) -> Result<bool, CheckpointError> {
    let previous: Option<Generation> = read(bucket, &format!("{generation}/{}", files::RECORD))?;
    // Without it no ranks were started.
    let members = previous
        .map(|previous| previous.members)
        .unwrap_or_default();
    Ok(members.iter().enumerate().any(|(number, member)| {
        let stays = record
            .members
            .iter()
            .any(|other| other.pod.is_some() && other.pod == member.pod);
        let limit = match &record.reason {
            _ if stays => STAYS,
            Reason::RankLost { .. } => LOST,
            _ => LEFT,
        };
        !keys.contains(format!("{generation}/ended-{number}.json").as_str()) && waited < limit
    }))
}

/// Makes a chosen checkpoint of which an object is missing or damaged an incomplete one, so that it is not chosen again.
pub fn refuse(bucket: &Bucket, chosen: &Chosen) -> Result<(), BucketError> {
    match &chosen.prefix {
        Some(prefix) => bucket.delete(&part_key(prefix, 0, chosen.members)),
        None => Ok(()),
    }
}

/// Completes the chosen checkpoint below `directory`, and returns it. Other checkpoints there, with names that begin with
/// `prefix`, are removed: the bucket has those that count.
pub fn fetch(
    bucket: &Bucket,
    directory: &Path,
    prefix: &str,
    chosen: &Chosen,
) -> Result<Option<ExternalCheckpoint>, CheckpointError> {
    let mut parts = Vec::new();
    for member in 0..chosen.prefix.as_ref().map_or(0, |_| chosen.members) {
        let key = part_key(
            chosen.prefix.as_deref().unwrap_or_default(),
            member,
            chosen.members,
        );
        let part = part(bucket, &key)?.ok_or_else(|| BucketError::missing(&bucket.url(&key)))?;
        parts.push((key, part));
    }
    let name = parts.first().map(|(_, first)| first.name.clone());
    for path in entries(directory)? {
        let found = relative(&path, directory);
        if !prefix.is_empty() && found.starts_with(prefix) && Some(&found) != name.as_ref() {
            durable::remove(&path)?;
        }
    }
    let (Some(name), Some(prefix)) = (name, &chosen.prefix) else {
        return Ok(None);
    };
    for (key, part) in parts {
        if part.name != name {
            let message = format!("it is of {}, not of {name}", part.name);
            return Err(BucketError::damaged(&bucket.url(&key), message).into());
        }
        for (name, expected) in part.files {
            let file = directory.join(&name);
            if entry(&file).is_ok_and(|found| found == expected) {
                continue;
            }
            create_directory(file.parent().unwrap_or(directory))?;
            let key = format!("{prefix}/{name}");
            let found = bucket_copy::download(bucket, &key, &file, expected.bytes)?;
            if found != expected.xxh3_128 {
                let message = format!(
                    "its checksum is {found} where {} was written",
                    expected.xxh3_128
                );
                return Err(BucketError::damaged(&bucket.url(&key), message).into());
            }
        }
    }
    Ok(Some(ExternalCheckpoint {
        path: directory.join(name),
        changed: None,
    }))
}

/// Whether no file below a path has changed lately; a path that does not exist is settled.
fn settled(path: &Path) -> bool {
    let age = changed(path).map(|at| SystemTime::now().duration_since(at).unwrap_or_default());
    age.is_none_or(|age| age >= SETTLED)
}

/// The last change of a file below a path.
fn changed(path: &Path) -> Option<SystemTime> {
    let files = files_below(path).ok()?;
    files
        .iter()
        .filter_map(|file| file.metadata().ok()?.modified().ok())
        .max()
}

/// Size, time of the last change in seconds and nanoseconds, and number of a file: they tell whether it has changed.
type FileState = (u64, i64, i64, u64);

/// The states of the files below a path.
fn states(path: &Path) -> Result<BTreeMap<PathBuf, FileState>, FileError> {
    let state = |file: PathBuf| {
        let about = file.metadata();
        let about = about.map_err(|error| FileError::from_io("read", &file, 0, error))?;
        Ok((
            file,
            (about.size(), about.mtime(), about.mtime_nsec(), about.ino()),
        ))
    };
    files_below(path)?.into_iter().map(state).collect()
}

fn entry(file: &Path) -> Result<FileEntry, FileError> {
    let opened = input::open(file).and_then(Checksum::of_stream);
    let (xxh3_128, bytes) = opened.map_err(|error| FileError::from_io("read", file, 0, error))?;
    Ok(FileEntry { bytes, xxh3_128 })
}

fn relative(path: &Path, directory: &Path) -> String {
    path.strip_prefix(directory)
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let failed = |error| FileError::from_io("list", directory, 0, error);
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let paths: Result<Vec<PathBuf>, _> = entries
        .map(|entry| Ok(entry.map_err(failed)?.path()))
        .collect();
    let mut paths = paths?;
    paths.sort();
    Ok(paths)
}

/// The regular files below a path; none if it does not exist. Links are not followed.
fn files_below(path: &Path) -> Result<Vec<PathBuf>, FileError> {
    let Ok(about) = path.symlink_metadata() else {
        return Ok(Vec::new());
    };
    if about.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    if !about.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for below in entries(path)? {
        found.extend(files_below(&below)?);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::RemainderPolicy;
    use crate::api::status::RecipeSnapshot;
    use crate::bucket::tests::in_memory;
    use crate::external_trainer::call::{self, Source, external_call};
    use crate::lifecycle::Reason;
    use crate::lifecycle::generation::{Address, Member};
    use crate::plan::{self, PlanRequest};
    use crate::recipe;

    const RECIPE: &str = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                          evenkeel: {objective: sft, batch: {gpus: 2}}\n";

    fn snapshot() -> RecipeSnapshot {
        RecipeSnapshot {
            text: RECIPE.to_owned(),
            ..RecipeSnapshot::default()
        }
    }

    fn record(number: u64) -> Generation {
        let request = snapshot().request(RemainderPolicy::Exact, &[]).unwrap();
        let recipe = recipe::read(&request).unwrap();
        Generation {
            job: "uid".to_owned(),
            number,
            reason: Reason::Started,
            members: (0..2)
                .map(|_| Member {
                    pod: None,
                    slot: 0,
                    ranks: 1,
                })
                .collect(),
            plan: plan::plan(&recipe, &PlanRequest::gpus(2)).unwrap(),
            start: None,
            master: Address {
                host: String::new(),
                port: 0,
            },
            created: 0.0,
        }
    }

    /// A pod of a generation with two pods, which has its own disk.
    struct Pod {
        _disk: tempfile::TempDir,
        copier: Copier,
    }

    fn pod(bucket: &Bucket, member: usize, number: u64) -> Pod {
        let disk = tempfile::tempdir().unwrap();
        let record = record(number);
        let snapshot = snapshot();
        let command = ["train", "--output_dir={checkpoint_dir}", "{args}"].map(str::to_owned);
        let source = Source {
            recipe: &snapshot,
            remainder: RemainderPolicy::Exact,
            command: &command,
        };
        call::write_choice(disk.path(), &record, None).unwrap();
        let external = external_call(&source, disk.path(), &record).unwrap();
        let copier = Copier {
            bucket: bucket.clone(),
            run: disk.path().to_path_buf(),
            generation: number,
            member,
            members: 2,
            external: Arc::new(external),
            known: None,
            end: Arc::new(AtomicU8::new(RUNNING)),
            warnings: Arc::default(),
        };
        Pod {
            _disk: disk,
            copier,
        }
    }

    impl Pod {
        fn write(&self, file: &str, text: &str) {
            let file = self.copier.external.call.checkpoint_dir.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }

        /// Ends the ranks and copies what is left.
        fn end(&self, how: u8) {
            self.copier.end.store(how, Ordering::SeqCst);
            self.copier.copy();
        }
    }

    /// The bucket after pods have started a generation.
    fn started(bucket: &Bucket, number: u64) {
        let key = format!("gen-{number}/record.json");
        bucket.put(&key, json(&record(number))).unwrap();
    }

    fn chosen(bucket: &Bucket, number: u64, waited: Duration) -> Option<Option<String>> {
        let chosen = choose(bucket, &record(number), waited).unwrap();
        chosen.map(|chosen| chosen.prefix)
    }

    const AT_ONCE: Duration = Duration::ZERO;

    #[test]
    fn the_disks_of_all_pods_make_one_checkpoint() {
        let bucket = in_memory();
        started(&bucket, 1);
        let (first, second) = (pod(&bucket, 0, 1), pod(&bucket, 1, 1));
        first.write("checkpoint-9/trainer_state.json", "{}");
        first.write("checkpoint-9/model.safetensors", "weights");
        first.write("config.json", "model");
        first.write("checkpoint-10/unfinished", "");
        second.write("checkpoint-9/rng_state_1.pth", "random");
        second.write("checkpoint-9/trainer_state.json", "of another rank");
        first.end(FINISHED);
        assert_eq!(chosen(&bucket, 2, AT_ONCE), None);
        second.end(FINISHED);
        assert_eq!(
            chosen(&bucket, 2, AT_ONCE),
            Some(Some("gen-1/external-0001".to_owned()))
        );
        let disk = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(disk.path().join("checkpoint-12/of-a-lost-world")).unwrap();
        let chosen = choose(&bucket, &record(2), AT_ONCE).unwrap().unwrap();
        let fetched = fetch(&bucket, disk.path(), "checkpoint-", &chosen)
            .unwrap()
            .unwrap();
        assert_eq!(fetched.path, disk.path().join("checkpoint-9"));
        assert_eq!(
            entries(disk.path()).unwrap(),
            [disk.path().join("checkpoint-9")]
        );
        let text = |file: &str| std::fs::read_to_string(fetched.path.join(file)).unwrap();
        let files = ["model.safetensors", "rng_state_1.pth", "trainer_state.json"];
        assert_eq!(files.map(text), ["weights", "random", "{}"]);
        let output = bucket.list("gen-1/output").unwrap();
        let output: Vec<&str> = output.iter().map(|object| object.key.as_str()).collect();
        assert_eq!(output, ["gen-1/output/config.json"]);
    }

    #[test]
    fn a_checkpoint_without_the_part_of_a_lost_pod_does_not_count() {
        let bucket = in_memory();
        started(&bucket, 1);
        let first = pod(&bucket, 0, 1);
        first.write("checkpoint-9/trainer_state.json", "{}");
        first.end(ENDED_EARLY);
        // The other pod may still add its part.
        assert_eq!(chosen(&bucket, 2, AT_ONCE), None);
        assert_eq!(chosen(&bucket, 2, LEFT), Some(None));
        let second = pod(&bucket, 1, 1);
        second.end(ENDED_EARLY);
        let whole = Some(Some("gen-1/external-0001".to_owned()));
        assert_eq!(chosen(&bucket, 2, AT_ONCE), whole);
        // That of an older generation counts, if the newest one has none.
        started(&bucket, 2);
        assert_eq!(chosen(&bucket, 3, LEFT), whole);
    }

    #[test]
    fn numbers_of_removed_checkpoints_are_not_used_again() {
        let bucket = in_memory();
        let (first, second) = (pod(&bucket, 0, 1), pod(&bucket, 1, 1));
        let (mut copied, mut done) = (Vec::new(), BTreeSet::new());
        for number in 1..=3 {
            first.write(&format!("checkpoint-{number}/trainer_state.json"), "{}");
            let (path, _) = first.copier.newest().unwrap();
            first.copier.announce(number, &path, false).unwrap();
            first.copier.add(number, &path, |_| false).unwrap();
            copied.push((number, path));
            if number < 3 {
                second.copier.add_announced(&mut done, true).unwrap();
            }
        }
        for (_, path) in &copied[..2] {
            std::fs::remove_dir_all(path).unwrap();
        }
        first.copier.remove_expired(&mut copied).unwrap();
        // The newest is not whole yet, and the one before it is the only other.
        assert_eq!(
            bucket.directories("gen-1").unwrap(),
            ["external-0002", "external-0003"]
        );
        second.copier.add_announced(&mut done, true).unwrap();
        first.copier.remove_expired(&mut copied).unwrap();
        assert_eq!(bucket.directories("gen-1").unwrap(), ["external-0003"]);
        // A later generation may resume from any of them.
        first.write("checkpoint-4/trainer_state.json", "{}");
        std::fs::remove_dir_all(&copied[0].1).unwrap();
        copied.push((4, first.copier.newest().unwrap().0));
        started(&bucket, 2);
        first.copier.remove_expired(&mut copied).unwrap();
        assert_eq!(copied.len(), 2);
    }

    #[test]
    fn a_checkpoint_that_changes_meanwhile_is_copied_again() {
        let bucket = in_memory();
        let first = pod(&bucket, 0, 1);
        first.write("checkpoint-9/trainer_state.json", "{}");
        let (path, _) = first.copier.newest().unwrap();
        let replace = |_: &str| {
            first.write("checkpoint-9/trainer_state.json", "{\"step\": 9}");
            false
        };
        let error = first.copier.add(1, &path, replace).unwrap_err().to_string();
        assert!(error.contains("changed while it was copied"), "{error}");
        assert!(
            part(&bucket, "gen-1/external-0001/part-0-of-2.json")
                .unwrap()
                .is_none()
        );
        first.end(ENDED_EARLY);
        let copied = part(&bucket, "gen-1/external-0001/part-0-of-2.json")
            .unwrap()
            .unwrap();
        assert_eq!(copied.files["checkpoint-9/trainer_state.json"].bytes, 11);
    }

    #[test]
    fn a_part_names_no_file_outside_of_the_directory() {
        let bucket = in_memory();
        for name in ["../x", "/etc/x", "a/../../x", ""] {
            let text = serde_json::json!({"name": "a", "files": {name: {"bytes": 1, "xxh3_128": "0".repeat(32)}}});
            bucket
                .put("part.json", text.to_string().into_bytes())
                .unwrap();
            let error = part(&bucket, "part.json").unwrap_err().to_string();
            assert!(error.contains("outside of the directory"), "{error}");
        }
    }

    #[test]
    fn a_changed_object_is_refused_and_not_chosen_again() {
        let bucket = in_memory();
        started(&bucket, 1);
        let (first, second) = (pod(&bucket, 0, 1), pod(&bucket, 1, 1));
        first.write("checkpoint-9/trainer_state.json", "{}");
        first.end(ENDED_EARLY);
        second.end(ENDED_EARLY);
        let key = "gen-1/external-0001/checkpoint-9/trainer_state.json";
        bucket.put(key, b"[]".to_vec()).unwrap();
        let chosen = choose(&bucket, &record(2), AT_ONCE).unwrap().unwrap();
        let disk = tempfile::tempdir().unwrap();
        let error = fetch(&bucket, disk.path(), "", &chosen)
            .unwrap_err()
            .to_string();
        assert!(error.contains("not what was written"), "{error}");
        refuse(&bucket, &chosen).unwrap();
        assert_eq!(super::tests::chosen(&bucket, 2, AT_ONCE), Some(None));
    }
}
