//! Checkpoints of an external trainer whose pods share no volume: copied to the bucket when they are finished, and
//! brought back before a generation starts.
//!
//! ```text
//! gen-N/call.json                        the checkpoint that the generation resumes from
//! gen-N/external-SSSSSS/announced.json   the first pod's: a finished checkpoint, and which files it adds
//! gen-N/external-SSSSSS/NAME             its files, of all pods
//! gen-N/external-SSSSSS/part-K-of-M.json what the K-th of M pods has added
//! gen-N/last.json                        the first pod announces no more
//! gen-N/ended-K.json                     the K-th pod adds no more
//! gen-N/output/                          what else is in the checkpoint directory at the end
//! ```
//!
//! A checkpoint is whole when all parts exist, but for those of lost pods that have never added a file. Each pod adds what the trainer wrote on its disk, the newest checkpoint
//! first, and repeats what fails.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use crate::bucket::{Bucket, BucketError};
use crate::checkpoint::{CheckpointError, FileEntry, bucket_copy};
use crate::external_trainer::ExternalCall;
use crate::lifecycle::{ExternalCheckpoint, Generation, Reason, files};
use crate::util::durable::{self, FileError, create_directory};
use crate::util::input;
use crate::util::lock::lock;
use crate::util::priority;
use crate::util::tree::{entries, files_below, relative};

/// Pause between two looks at the trainer's directory.
const LOOK: Duration = Duration::from_secs(1);
/// Pause between two looks for what the first pod has announced.
const LISTEN: Duration = Duration::from_secs(5);
/// A checkpoint whose files have not changed for this time is finished: ranks may still write theirs after the one
/// whose file marks it as complete.
const SETTLED: Duration = Duration::from_secs(3);
/// Pause between two searches for checkpoints that the trainer has removed.
const EXPIRY: Duration = Duration::from_secs(30);
/// Longest wait for a pod that may be lost, and for one that lives. One that leaves has the time of its drain.
const LOST: Duration = Duration::from_secs(20);
const LIVES: Duration = Duration::from_secs(900);
/// Least time for a pod that leaves, and time of its agent beside its drain.
const LEAVES: Duration = Duration::from_secs(75);
const AGENT: Duration = Duration::from_secs(15);

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
    shared: Arc<Shared>,
    /// Uid of the first pod.
    first: Option<String>,
    thread: JoinHandle<()>,
}

/// What the agent and the thread tell each other.
#[derive(Default)]
struct Shared {
    /// How the ranks of this pod have ended.
    end: AtomicU8,
    /// The world lost a rank.
    lost: AtomicBool,
    /// The first pod is lost.
    first_lost: AtomicBool,
    warnings: Mutex<Vec<String>>,
}

impl Mirror {
    /// Starts for the pod `member` of a generation, whose disk has the checkpoint that it resumes from.
    pub fn start(
        bucket: &Bucket,
        record: &Generation,
        member: usize,
        external: Arc<ExternalCall>,
    ) -> Mirror {
        let shared = Arc::<Shared>::default();
        let mut copier = Copier {
            bucket: bucket.clone(),
            generation: record.number,
            member,
            members: record.members.len(),
            external,
            known: None,
            shared: Arc::clone(&shared),
        };
        copier.known = copier.newest();
        Mirror {
            shared,
            first: record.pods().next().map(|pod| pod.uid.clone()),
            thread: std::thread::spawn(move || {
                priority::lower();
                copier.copy();
            }),
        }
    }

    /// Tells it that the ranks of this pod have ended, and whether they have `finished` their work; true once everything
    /// is in the bucket.
    pub fn end(&self, finished: bool) -> bool {
        let end = if finished { FINISHED } else { ENDED_EARLY };
        self.shared.end.store(end, Ordering::SeqCst);
        self.thread.is_finished()
    }

    /// Tells it that the world lost a rank: the first pod may announce no more. `pods`: uids of those that are lost.
    pub fn rank_lost(&self, pods: &[String]) {
        self.shared.lost.store(true, Ordering::SeqCst);
        if self
            .first
            .as_ref()
            .is_some_and(|first| pods.contains(first))
        {
            self.shared.first_lost.store(true, Ordering::SeqCst);
        }
    }

    /// What went wrong since the last call.
    pub fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.shared.warnings))
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // After the end of the ranks it completes instead.
        let (order, end) = (Ordering::SeqCst, &self.shared.end);
        let _ = end.compare_exchange(RUNNING, CANCELLED, order, order);
    }
}

struct Copier {
    bucket: Bucket,
    generation: u64,
    member: usize,
    members: usize,
    external: Arc<ExternalCall>,
    /// The newest checkpoint at the start.
    known: Option<Version>,
    shared: Arc<Shared>,
}

/// A checkpoint and its last change: a trainer may write another one of the same name.
type Version = (PathBuf, Option<SystemTime>);

impl Copier {
    fn copy(&self) {
        let announced = Mutex::default();
        std::thread::scope(|scope| {
            // An upload may take longer than the next checkpoint.
            let announces =
                (self.member == 0).then(|| scope.spawn(|| self.announce_all(&announced)));
            let added = self.add_all(&announced);
            // It ends with the ranks too.
            if let Some(Err(panic)) = announces.map(|announces| announces.join()) {
                std::panic::resume_unwind(panic);
            }
            if added {
                self.repeat(|| {
                    if self.member == 0 && self.end() == FINISHED {
                        self.add_output(&lock(&announced))?;
                    }
                    self.mark(&ended_key(self.generation, self.member))
                });
            }
        });
    }

    /// Announces every finished checkpoint, and at last that none follows.
    fn announce_all(&self, announced: &Mutex<Announcements>) {
        let mut known = self.known.clone();
        let mut number = 0;
        loop {
            let ended = self.has_ended();
            let newest = self.newest();
            if newest != known
                && let Some((path, _)) = &newest
                && (ended || settled(path))
            {
                number += 1;
                lock(announced).insert(number, path.clone());
                self.repeat(|| self.announce(number, path));
                known = newest;
            }
            if ended {
                return self.repeat(|| self.mark(&self.key(NO_MORE)));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Adds this pod's files to the announced checkpoints; false if there may be announcements that it does not know.
    fn add_all(&self, announced: &Mutex<Announcements>) -> bool {
        let mut state = Adding::default();
        let mut ended_since: Option<Instant> = None;
        let mut listened: Option<Instant> = None;
        let mut tidied = Instant::now();
        loop {
            if self.end() == CANCELLED {
                return false;
            }
            if self.has_ended() {
                ended_since.get_or_insert_with(Instant::now);
            }
            if self.member != 0 {
                state.see(&self.external.call.checkpoint_dir);
            }
            let news = lock(announced)
                .keys()
                .any(|number| !state.done.contains(number));
            if news || ended_since.is_some() || listened.is_none_or(|at| at.elapsed() > LISTEN) {
                listened = Some(Instant::now());
                // Read before the announcements: none follows it.
                let last = self.bucket.has(&self.key(NO_MORE)).unwrap_or(false);
                let all = self.add_announced(&mut state, ended_since.is_some());
                let all = self.warn(&all) && all.is_ok_and(|all| all);
                if ended_since.is_some() && last && all {
                    return true;
                }
                let lost = self.shared.lost.load(Ordering::SeqCst);
                let patience = match self.shared.first_lost.load(Ordering::SeqCst) {
                    true => Duration::ZERO,
                    false if lost => LOST,
                    false => LIVES,
                };
                if ended_since.is_some_and(|since| !last && since.elapsed() > patience) {
                    return true;
                }
            }
            if self.member == 0 && tidied.elapsed() > EXPIRY {
                tidied = Instant::now();
                self.warn(&self.remove_expired(&lock(announced).clone()));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Adds to every announced checkpoint, the newest first; whether all are done.
    fn add_announced(&self, state: &mut Adding, ended: bool) -> Result<bool, CheckpointError> {
        let mut all = true;
        for number in numbers(&self.bucket, &files::generation(self.generation))? {
            if state.done.contains(&number) {
                continue;
            }
            let key = announced_key(&self.prefix(number));
            // Without it another pod is about to remove the checkpoint.
            let Some(first) = self.bucket.read_json::<Announced>(&key)? else {
                continue;
            };
            inside(&self.bucket, &key, first.files.iter().chain([&first.name]))?;
            if self.add_to(number, &first, state, ended)? {
                _ = state.done.insert(number)
            } else {
                all = false
            }
        }
        Ok(all)
    }

    /// Adds this pod's files to an announced checkpoint; false if they may still change. A pod adds no part if its files
    /// are gone or may be of another version: then the checkpoint never becomes whole.
    fn add_to(
        &self,
        number: u64,
        first: &Announced,
        state: &mut Adding,
        ended: bool,
    ) -> Result<bool, CheckpointError> {
        let path = self.external.call.checkpoint_dir.join(&first.name);
        let exists = path.symlink_metadata().is_ok();
        if exists && !ended && !settled(&path) {
            return Ok(false);
        }
        if self.member == 0 {
            let before = states(&path)?;
            let files = before.keys().map(|file| self.relative(file));
            if files.collect::<BTreeSet<_>>() == first.files
                && self.add(number, &path, |_| false)?
            {
                return Ok(true);
            }
            // It was replaced or removed: the next announcement is of the new version.
            remove(&self.bucket, &self.prefix(number), self.members)?;
            return Ok(true);
        }
        let again = state
            .names
            .insert(first.name.clone(), number)
            .is_some_and(|other| other != number);
        if state.seen.contains(&first.name) && (!exists || again) {
            return Ok(true);
        }
        self.add(number, &path, |file| first.files.contains(file))
    }

    /// Writes an object whose existence says everything.
    fn mark(&self, key: &str) -> Result<(), CheckpointError> {
        Ok(self.bucket.put_json(key, &serde_json::json!({}))?)
    }

    /// Tells all pods of a finished checkpoint.
    fn announce(&self, number: u64, path: &Path) -> Result<(), CheckpointError> {
        let files = files_below(path)?;
        let announced = Announced {
            name: self.relative(path),
            files: files.iter().map(|file| self.relative(file)).collect(),
        };
        let key = announced_key(&self.prefix(number));
        Ok(self.bucket.put_json(&key, &announced)?)
    }

    /// Adds a checkpoint's files on this disk, except those that the bucket `has`, and then this pod's part; false if they
    /// changed meanwhile.
    fn add(
        &self,
        number: u64,
        path: &Path,
        has: impl Fn(&str) -> bool,
    ) -> Result<bool, CheckpointError> {
        let before = states(path)?;
        let mut part = Part {
            name: self.relative(path),
            files: BTreeMap::new(),
        };
        for file in before.keys() {
            let name = self.relative(file);
            if has(&name) {
                continue;
            }
            let key = format!("{}/{name}", self.prefix(number));
            part.files.insert(name, entry(file)?);
            Bucket::patiently(|| self.bucket.upload(file, &key))?;
        }
        if states(path)? != before {
            return Ok(false);
        }
        let key = self.part_key(number, self.member);
        self.bucket.put_json(&key, &part)?;
        Ok(true)
    }

    /// Removes copies of checkpoints that the trainer has removed or replaced, and those beyond the recipe's limit. A
    /// whole one that is newer than them stays, and so does everything once a later generation may have chosen from it.
    fn remove_expired(&self, copied: &Announcements) -> Result<(), CheckpointError> {
        if copied.is_empty() {
            return Ok(());
        }
        let keep = self.external.recipe.spec.checkpoint.keep;
        let keep = keep.map_or(usize::MAX, |keep| keep.max(1) as usize);
        let mut there = numbers(&self.bucket, &files::generation(self.generation))?;
        there.retain(|number| copied.contains_key(number));
        let mut generations = bucket_copy::generations(&self.bucket)?;
        if generations.iter().any(|number| *number > self.generation) {
            return Ok(());
        }
        // Until the newest whole one is found.
        let mut kept = 0;
        for number in there {
            let prefix = self.prefix(number);
            if kept == 0 {
                kept += usize::from(is_whole(&self.bucket, &prefix, self.members)?);
                continue;
            }
            let path = &copied[&number];
            let is_replaced = copied.range(number + 1..).any(|(_, later)| later == path);
            if kept >= keep || is_replaced || !path.exists() {
                remove(&self.bucket, &prefix, self.members)?;
            } else {
                kept += 1;
            }
        }
        if kept == 0 || keep == usize::MAX {
            return Ok(());
        }
        // Of earlier generations the newest stay, and the one that this generation resumed from.
        let chosen: Option<Chosen> = self.bucket.read_json(&self.key(files::CALL))?;
        let chosen = chosen.and_then(|chosen| chosen.prefix);
        generations.retain(|number| *number < self.generation);
        for generation in generations.into_iter().map(files::generation) {
            for number in numbers(&self.bucket, &generation)? {
                let prefix = prefix(&generation, number);
                if chosen.as_ref() == Some(&prefix) {
                    continue;
                }
                kept += 1;
                if kept > keep {
                    remove(&self.bucket, &prefix, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Adds what the trainer wrote beside its checkpoints, such as the final model.
    fn add_output(&self, copied: &Announcements) -> Result<(), CheckpointError> {
        let directory = &self.external.call.checkpoint_dir;
        for path in entries(directory)? {
            let is_copied = copied.values().any(|copied| *copied == path);
            if is_copied || self.external.names_checkpoint(&path) {
                continue;
            }
            for file in files_below(&path)? {
                let key = self.key(&format!("output/{}", self.relative(&file)));
                Bucket::patiently(|| self.bucket.upload(&file, &key))?;
            }
        }
        Ok(())
    }

    fn newest(&self) -> Option<Version> {
        let path = self.external.newest()?.path;
        let changed = changed(&path);
        Some((path, changed))
    }

    fn end(&self) -> u8 {
        self.shared.end.load(Ordering::SeqCst)
    }

    fn has_ended(&self) -> bool {
        self.end() != RUNNING
    }

    /// Repeats an operation until it succeeds, or the pod has started no ranks after all.
    fn repeat(&self, operation: impl Fn() -> Result<(), CheckpointError>) {
        while self.end() != CANCELLED && !self.warn(&operation()) {
            std::thread::sleep(LISTEN);
        }
    }

    /// Whether it succeeded. A failure is a warning, since the next attempt may succeed.
    fn warn<T>(&self, result: &Result<T, CheckpointError>) -> bool {
        if let Err(error) = result {
            let warning = format!("a checkpoint is not copied yet: {error}");
            let mut warnings = lock(&self.shared.warnings);
            if warnings.last() != Some(&warning) {
                warnings.push(warning);
            }
        }
        result.is_ok()
    }

    fn relative(&self, path: &Path) -> String {
        relative(path, &self.external.call.checkpoint_dir)
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", files::generation(self.generation))
    }

    fn prefix(&self, number: u64) -> String {
        prefix(&files::generation(self.generation), number)
    }

    fn part_key(&self, number: u64, member: usize) -> String {
        part_key(&self.prefix(number), member, self.members)
    }
}

/// The announced checkpoints of a generation, by their numbers.
type Announcements = BTreeMap<u64, PathBuf>;

/// What a pod has added.
#[derive(Default)]
struct Adding {
    done: BTreeSet<u64>,
    /// The number under which each name was announced last.
    names: BTreeMap<String, u64>,
    /// What was in the checkpoint directory of this pod at any time.
    seen: BTreeSet<String>,
}

impl Adding {
    fn see(&mut self, directory: &Path) {
        let paths = entries(directory).unwrap_or_default();
        self.seen
            .extend(paths.iter().map(|path| relative(path, directory)));
    }
}

const EXTERNAL: &str = "external-";

fn prefix(generation: &str, number: u64) -> String {
    format!("{generation}/{EXTERNAL}{number:06}")
}

/// The numbers of a generation's checkpoints, the newest first.
fn numbers(bucket: &Bucket, generation: &str) -> Result<Vec<u64>, BucketError> {
    let names = bucket.directories(generation)?;
    let number = |name: &String| name.strip_prefix(EXTERNAL)?.parse().ok();
    let mut numbers: Vec<u64> = names.iter().filter_map(number).collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    Ok(numbers)
}

fn is_whole(bucket: &Bucket, prefix: &str, members: usize) -> Result<bool, BucketError> {
    Ok(absent_parts(bucket, prefix, members)?.is_empty())
}

/// The members of a generation whose parts of a checkpoint are absent.
fn absent_parts(
    bucket: &Bucket,
    prefix: &str,
    members: usize,
) -> Result<BTreeSet<usize>, BucketError> {
    let mut absent = BTreeSet::new();
    for member in 0..members {
        if !bucket.has(&part_key(prefix, member, members))? {
            absent.insert(member);
        }
    }
    Ok(absent)
}

/// Whether the first pods alone have written the whole checkpoints of these generations; false if there is none.
fn only_first_pods_write(bucket: &Bucket, generations: &[u64]) -> Result<bool, CheckpointError> {
    let mut found = false;
    for generation in generations {
        // A world of one pod shows nothing.
        let record = started(bucket, *generation)?.filter(|record| record.members.len() > 1);
        let Some(record) = record else { continue };
        let (generation, members) = (files::generation(*generation), record.members.len());
        for number in numbers(bucket, &generation)? {
            let prefix = prefix(&generation, number);
            if !is_whole(bucket, &prefix, members)? {
                continue;
            }
            for member in 1..members {
                let part = part(bucket, &part_key(&prefix, member, members))?;
                if part.is_some_and(|part| !part.files.is_empty()) {
                    return Ok(false);
                }
            }
            found = true;
        }
    }
    Ok(found)
}

fn announced_key(prefix: &str) -> String {
    format!("{prefix}/announced.json")
}

fn ended_key(generation: u64, member: usize) -> String {
    format!("{}/ended-{member}.json", files::generation(generation))
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

fn part(bucket: &Bucket, key: &str) -> Result<Option<Part>, CheckpointError> {
    let part: Option<Part> = bucket.read_json(key)?;
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
    /// Those that were lost before they had said that they add nothing.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    without: BTreeSet<usize>,
}

/// The newest whole checkpoint of the generations before `record`, or the one that the last of them resumed from. `None`
/// while pods of the previous generation may still add one; `waited` is the time since the first call, and `drain` the
/// time that a pod that leaves has for its ranks.
pub fn choose(
    bucket: &Bucket,
    record: &Generation,
    waited: Duration,
    drain: Duration,
) -> Result<Option<Chosen>, CheckpointError> {
    let mut earlier = bucket_copy::generations(bucket)?;
    earlier.retain(|number| *number < record.number);
    let mut lost = record.lost.clone();
    let mut is_previous = true;
    for (index, number) in earlier.iter().enumerate() {
        // Without a record no ranks were started.
        let Some(found) = started(bucket, *number)? else {
            continue;
        };
        if is_previous && may_still_add(bucket, record, &found, waited, drain)? {
            return Ok(None);
        }
        is_previous = false;
        let generation = files::generation(*number);
        let members = found.members.len();
        let is_lost = |member: &usize| {
            let pod = found.members[*member].pod.as_ref();
            *member > 0 && pod.is_some_and(|pod| lost.contains(&pod.uid))
        };
        // Asked only if a part is absent, and once.
        let mut only_first = None;
        for number in numbers(bucket, &generation)? {
            let prefix = prefix(&generation, number);
            let without = absent_parts(bucket, &prefix, members)?;
            let is_whole = if without.is_empty() || !without.iter().all(is_lost) {
                without.is_empty()
            } else if let Some(known) = only_first {
                known
            } else {
                *only_first.insert(only_first_pods_write(bucket, &earlier[index..])?)
            };
            if is_whole {
                return Ok(Some(Chosen {
                    prefix: Some(prefix),
                    members,
                    without,
                }));
            }
        }
        // What older generations have added since then is not of the run's history.
        let resumed = format!("{generation}/{}", files::CALL);
        if let Some(resumed) = bucket.read_json::<Chosen>(&resumed)?
            && resumed.is_whole(bucket)?
        {
            return Ok(Some(resumed));
        }
        lost = found.lost;
    }
    Ok(Some(Chosen::default()))
}

/// The record of a generation whose ranks were started.
fn started(bucket: &Bucket, generation: u64) -> Result<Option<Generation>, BucketError> {
    let key = format!("{}/{}", files::generation(generation), files::RECORD);
    bucket.read_json(&key)
}

impl Chosen {
    /// Whether the bucket has all its parts. A start from nothing needs none.
    fn is_whole(&self, bucket: &Bucket) -> Result<bool, BucketError> {
        let Some(prefix) = &self.prefix else {
            return Ok(true);
        };
        Ok(absent_parts(bucket, prefix, self.members)?.is_subset(&self.without))
    }
}

/// Whether a pod of the previous generation may still add to a checkpoint.
fn may_still_add(
    bucket: &Bucket,
    record: &Generation,
    previous: &Generation,
    waited: Duration,
    drain: Duration,
) -> Result<bool, BucketError> {
    for (number, member) in previous.members.iter().enumerate() {
        if let Some(pod) = &member.pod
            && record.lost.contains(&pod.uid)
        {
            continue;
        }
        let mut others = record.members.iter();
        let stays = others.any(|other| other.pod.is_some() && other.pod == member.pod);
        let limit = match &record.reason {
            _ if stays => LIVES,
            Reason::RankLost { .. } => LOST,
            _ => LEAVES.max(drain + AGENT),
        };
        if waited < limit && !bucket.has(&ended_key(previous.number, number))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes a chosen checkpoint of which an object is missing or damaged an incomplete one, so that it is not chosen again.
pub fn refuse(bucket: &Bucket, chosen: &Chosen) -> Result<(), BucketError> {
    match &chosen.prefix {
        Some(prefix) => bucket.delete(&part_key(prefix, 0, chosen.members)),
        None => Ok(()),
    }
}

/// Completes the chosen checkpoint below `directory`, and returns it. Other checkpoints there are removed, those whose
/// names differ from it in digits or begin with `prefix`: the bucket has those that count, and they would hide new ones.
pub fn fetch(
    bucket: &Bucket,
    directory: &Path,
    prefix: &str,
    chosen: &Chosen,
) -> Result<Option<ExternalCheckpoint>, CheckpointError> {
    let mut parts = Vec::new();
    if let Some(prefix) = &chosen.prefix {
        for member in (0..chosen.members).filter(|member| !chosen.without.contains(member)) {
            let key = part_key(prefix, member, chosen.members);
            let part =
                part(bucket, &key)?.ok_or_else(|| BucketError::missing(&bucket.url(&key)))?;
            parts.push((key, part));
        }
    }
    let name = parts.first().map(|(_, first)| first.name.clone());
    let pattern = |name: &str| name.replace(|c: char| c.is_ascii_digit(), "");
    let wanted = name.as_deref().map(pattern);
    for path in entries(directory)? {
        let found = relative(&path, directory);
        let is_checkpoint = !prefix.is_empty() && found.starts_with(prefix)
            || wanted.as_ref() == Some(&pattern(&found));
        if is_checkpoint && Some(&found) != name.as_ref() {
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
            create_directory(file.parent().unwrap_or(directory))?;
            let key = format!("{prefix}/{name}");
            bucket_copy::complete(bucket, &key, &file, expected)?;
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
    let files = files_below(path).ok()?.into_iter();
    let changes = files.filter_map(|file| file.metadata().ok()?.modified().ok());
    changes.max()
}

/// Size, time of the last change in seconds and nanoseconds, and number of a file: they tell whether it has changed.
type FileState = (u64, i64, i64, u64);

/// The states of the files below a path.
fn states(path: &Path) -> Result<BTreeMap<PathBuf, FileState>, FileError> {
    let mut states = BTreeMap::new();
    for file in files_below(path)? {
        let about = file.metadata();
        let about = about.map_err(|error| FileError::from_io("read", &file, 0, error))?;
        let state = (about.size(), about.mtime(), about.mtime_nsec(), about.ino());
        states.insert(file, state);
    }
    Ok(states)
}

fn entry(file: &Path) -> Result<FileEntry, FileError> {
    let entry = input::open(file).and_then(FileEntry::of_stream);
    entry.map_err(|error| FileError::from_io("read", file, 0, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::external::{Source, external_call};
    use crate::api::recipe_snapshot::RecipeSnapshot;
    use crate::bucket::tests::in_memory;
    use crate::external_trainer::choice;
    use crate::lifecycle::generation::{Member, PodRef, testing};
    use crate::plan::{self, PlanRequest};
    use crate::recipe;
    use crate::recipe::schema::spec::Remainder;

    const RECIPE: &str = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                          evenkeel: {objective: sft, batch: {gpus: 2}}\n";

    fn snapshot() -> RecipeSnapshot {
        RecipeSnapshot {
            text: RECIPE.to_owned(),
            ..RecipeSnapshot::default()
        }
    }

    fn record(number: u64) -> Generation {
        let request = snapshot().request(Remainder::Exact, &[]).unwrap();
        let recipe = recipe::read(&request).unwrap();
        let member = |_| Member {
            pod: None,
            slot: 0,
            ranks: 1,
            carries: Vec::new(),
        };
        let plan = plan::plan(&recipe, &PlanRequest::gpus(2)).unwrap();
        testing::record(number, (0..2).map(member).collect(), plan)
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
            remainder: Remainder::Exact,
            command: &command,
        };
        choice::write(disk.path(), &record, None).unwrap();
        let external = external_call(&source, disk.path(), &record).unwrap();
        let copier = Copier {
            bucket: bucket.clone(),
            generation: number,
            member,
            members: 2,
            external: Arc::new(external),
            known: None,
            shared: Arc::default(),
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
            self.copier.shared.end.store(how, Ordering::SeqCst);
            self.copier.copy();
        }
    }

    /// The bucket after pods have started a generation.
    fn started(bucket: &Bucket, number: u64) {
        let key = format!("gen-{number}/record.json");
        bucket.put_json(&key, &record(number)).unwrap();
    }

    fn chosen(bucket: &Bucket, number: u64, waited: Duration) -> Option<Option<String>> {
        let chosen = choose(bucket, &record(number), waited, Duration::ZERO).unwrap();
        chosen.map(|chosen| chosen.prefix)
    }

    const AT_ONCE: Duration = Duration::ZERO;

    /// What generation 2 chooses after both pods of generation 1 have copied a checkpoint.
    fn copied(bucket: &Bucket) -> Chosen {
        started(bucket, 1);
        let (first, second) = (pod(bucket, 0, 1), pod(bucket, 1, 1));
        first.write("checkpoint-9/trainer_state.json", "{}");
        first.end(ENDED_EARLY);
        second.end(ENDED_EARLY);
        choose(bucket, &record(2), AT_ONCE, AT_ONCE)
            .unwrap()
            .unwrap()
    }

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
            Some(Some("gen-1/external-000001".to_owned()))
        );
        let disk = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(disk.path().join("checkpoint-12/of-a-lost-world")).unwrap();
        let chosen = choose(&bucket, &record(2), AT_ONCE, AT_ONCE)
            .unwrap()
            .unwrap();
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
        assert_eq!(chosen(&bucket, 2, LEAVES), Some(None));
        let second = pod(&bucket, 1, 1);
        second.end(ENDED_EARLY);
        let whole = Some(Some("gen-1/external-000001".to_owned()));
        assert_eq!(chosen(&bucket, 2, AT_ONCE), whole);
        // That of an older generation counts, if the newest one has none.
        started(&bucket, 2);
        assert_eq!(chosen(&bucket, 3, LEAVES), whole);
    }

    /// A record whose second pod, and that of the generation before, are `pods`.
    fn without_second(number: u64) -> (Generation, Generation) {
        let mut before = record(number - 1);
        for (index, member) in before.members.iter_mut().enumerate() {
            let name = format!("pod-{index}");
            member.pod = Some(PodRef {
                uid: name.clone(),
                ip: "10.0.0.1".to_owned(),
                node: name.clone(),
                name,
            });
        }
        let after = Generation {
            lost: vec![before.members[1].pod.clone().unwrap().uid],
            members: before.members[..1].to_vec(),
            ..record(number)
        };
        (before, after)
    }

    #[test]
    fn the_empty_part_of_a_lost_pod_is_not_missed() {
        let bucket = in_memory();
        let (before, after) = without_second(2);
        bucket.put_json("gen-1/record.json", &before).unwrap();
        let (first, second) = (pod(&bucket, 0, 1), pod(&bucket, 1, 1));
        let chosen = || choose(&bucket, &after, AT_ONCE, AT_ONCE).unwrap();
        let prefix = || Some(chosen()?.prefix);
        // The first pod stays, and has not said yet that it adds no more.
        assert_eq!(prefix(), None);
        let mut state = Adding::default();
        let announce = |number: u64| {
            let name = format!("checkpoint-{number}");
            first.write(&format!("{name}/trainer_state.json"), "{}");
            let path = first.copier.external.call.checkpoint_dir.join(name);
            first.copier.announce(number, &path).unwrap();
            let mut of_first = Adding::default();
            first.copier.add_announced(&mut of_first, true).unwrap();
        };
        announce(1);
        first.copier.mark(&ended_key(1, 0)).unwrap();
        // Nothing shows what the other pod would have added.
        assert_eq!(prefix(), Some(None));
        second.copier.add_announced(&mut state, true).unwrap();
        announce(2);
        assert_eq!(prefix(), Some(Some("gen-1/external-000002".to_owned())));
        let disk = tempfile::tempdir().unwrap();
        let fetched = fetch(&bucket, disk.path(), "checkpoint-", &chosen().unwrap()).unwrap();
        assert_eq!(fetched.unwrap().path, disk.path().join("checkpoint-2"));
        // A later generation that has committed none resumes from it, too.
        bucket
            .put_json("gen-2/call.json", &chosen().unwrap())
            .unwrap();
        bucket.put_json("gen-2/record.json", &after).unwrap();
        let third = Generation {
            number: 3,
            ..after.clone()
        };
        let chosen = choose(&bucket, &third, LEAVES + LIVES, AT_ONCE).unwrap();
        assert_eq!(chosen.unwrap().prefix.unwrap(), "gen-1/external-000002");
        // Where the other pod has added files, none is complete without them.
        second.write("checkpoint-1/rng_state_1.pth", "random");
        let path = second
            .copier
            .external
            .call
            .checkpoint_dir
            .join("checkpoint-1");
        second.copier.add(1, &path, |_| false).unwrap();
        bucket.delete("gen-2/call.json").unwrap();
        assert_eq!(prefix(), Some(Some("gen-1/external-000001".to_owned())));
    }

    #[test]
    fn a_generation_that_never_started_hides_none_that_may_still_copy() {
        let bucket = in_memory();
        started(&bucket, 1);
        // Its ranks never started, so that it has no record.
        bucket
            .put_json("gen-2/call.json", &Chosen::default())
            .unwrap();
        assert_eq!(chosen(&bucket, 3, AT_ONCE), None);
        assert_eq!(chosen(&bucket, 3, LEAVES), Some(None));
    }

    #[test]
    fn a_pod_whose_files_are_gone_or_of_another_version_adds_no_part() {
        let bucket = in_memory();
        let (first, second) = (pod(&bucket, 0, 1), pod(&bucket, 1, 1));
        let mut state = Adding::default();
        let mut announce = |number: u64, name: &str| {
            first.write(&format!("{name}/trainer_state.json"), "{}");
            first
                .copier
                .announce(
                    number,
                    &first.copier.external.call.checkpoint_dir.join(name),
                )
                .unwrap();
            state.see(&second.copier.external.call.checkpoint_dir);
            assert!(second.copier.add_announced(&mut state, true).unwrap());
            part(&bucket, &second.copier.part_key(number, 1))
                .unwrap()
                .map(|part| part.files.len())
        };
        assert_eq!(announce(1, "checkpoint-1"), Some(0), "it never had files");
        second.write("checkpoint-2/rng_state_1.pth", "");
        assert_eq!(announce(2, "checkpoint-2"), Some(1));
        second.write("checkpoint-3/rng_state_1.pth", "");
        announce(4, "checkpoint-4");
        std::fs::remove_dir_all(
            second
                .copier
                .external
                .call
                .checkpoint_dir
                .join("checkpoint-3"),
        )
        .unwrap();
        assert_eq!(
            announce(3, "checkpoint-3"),
            None,
            "they were removed before"
        );
        assert_eq!(
            announce(5, "checkpoint-2"),
            None,
            "they may be of the earlier version"
        );
    }

    #[test]
    fn expired_copies_leave_the_bucket_once_a_newer_one_is_whole() {
        let bucket = in_memory();
        let (first, second) = (pod(&bucket, 0, 1), pod(&bucket, 1, 1));
        let mut copied = Announcements::new();
        let (mut of_first, mut of_second) = (Adding::default(), Adding::default());
        for number in 1..=3 {
            first.write(&format!("checkpoint-{number}/trainer_state.json"), "{}");
            let (path, _) = first.copier.newest().unwrap();
            first.copier.announce(number, &path).unwrap();
            first.copier.add_announced(&mut of_first, true).unwrap();
            if number < 3 {
                second.copier.add_announced(&mut of_second, true).unwrap();
            }
            copied.insert(number, path);
        }
        for number in 1..=2 {
            std::fs::remove_dir_all(&copied[&number]).unwrap();
        }
        first.copier.remove_expired(&copied).unwrap();
        assert_eq!(numbers(&bucket, "gen-1").unwrap(), [3, 2]);
        second.copier.add_announced(&mut of_second, true).unwrap();
        started(&bucket, 2);
        first.copier.remove_expired(&copied).unwrap();
        assert_eq!(
            numbers(&bucket, "gen-1").unwrap(),
            [3, 2],
            "generation 2 may have chosen it"
        );
        bucket.delete("gen-2/record.json").unwrap();
        first.copier.remove_expired(&copied).unwrap();
        assert_eq!(numbers(&bucket, "gen-1").unwrap(), [3]);
    }

    #[test]
    fn a_generation_without_a_checkpoint_leaves_the_one_that_it_resumed_from() {
        let bucket = in_memory();
        let resumed = copied(&bucket);
        bucket.put_json("gen-2/call.json", &resumed).unwrap();
        started(&bucket, 2);
        // A fenced pod completes another one.
        for key in [
            "gen-1/external-000002/part-0-of-2.json",
            "gen-1/external-000002/part-1-of-2.json",
        ] {
            bucket.put_json(key, &Part::default()).unwrap();
        }
        assert_eq!(
            chosen(&bucket, 3, LEAVES),
            Some(Some("gen-1/external-000001".to_owned()))
        );
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
        assert!(!first.copier.add(1, &path, replace).unwrap());
        assert!(
            part(&bucket, "gen-1/external-000001/part-0-of-2.json")
                .unwrap()
                .is_none()
        );
        first.end(ENDED_EARLY);
        let copied = part(&bucket, "gen-1/external-000001/part-0-of-2.json")
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
        let chosen = copied(&bucket);
        let key = "gen-1/external-000001/checkpoint-9/trainer_state.json";
        bucket.put(key, b"[]".to_vec()).unwrap();
        let disk = tempfile::tempdir().unwrap();
        let error = fetch(&bucket, disk.path(), "", &chosen)
            .unwrap_err()
            .to_string();
        assert!(error.contains("not what was written"), "{error}");
        refuse(&bucket, &chosen).unwrap();
        assert_eq!(super::tests::chosen(&bucket, 2, AT_ONCE), Some(None));
    }
}
