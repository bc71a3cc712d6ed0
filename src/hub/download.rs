//! Downloads into the cache. Of a model first the small files come, so that a model which does not train is refused by
//! its config.json, then the weights; of a data set its card, then the files that the caller chooses. What is in the
//! cache is not downloaded again, and a broken download continues.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256};

use super::cache::RepoCache;
use super::client::{Client, Listing, Part, RemoteFile, run};
use super::error::{Cause, HubError};
use super::id::{Kind, Repo};
use super::settings::Settings;
use crate::util::durable::{self, FileError, free_space};
use crate::util::format::bytes;
use crate::util::input::{CONFIG_BYTES, STATE_BYTES};
use crate::util::shards::{INDEX, Index, WHOLE};

const CONFIG: &str = "config.json";
/// The card of a data set, whose front matter may list its configs.
pub const CARD: &str = "README.md";
/// Weights in other formats, by the beginnings of their names.
const OTHER_WEIGHTS: [&str; 5] = [
    "pytorch_model",
    "consolidated",
    "tf_model",
    "flax_model",
    "adapter_model",
];
/// Bytes of an earlier part that are hashed at a time.
const HASHED: usize = 1 << 20;

/// Least bytes between two reports of progress.
const REPORTED: u64 = 4 << 20;

/// The progress of a download in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    pub bytes: u64,
    pub total: u64,
}

/// Which of a model's small files are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Small {
    /// Those of the tokenizer.
    Tokenizer,
    /// `config.json` and those of the tokenizer.
    All,
}

impl Small {
    fn has(self, name: &str) -> bool {
        let tokenizer = name.starts_with("tokenizer") && name.ends_with(".json");
        // Checkpoints get it, since llama.cpp reads it.
        let tokenizer = tokenizer || name == "tokenizer.model";
        let of_all = matches!(name, CONFIG | "generation_config.json");
        tokenizer
            || matches!(name, "special_tokens_map.json" | "chat_template.jinja")
            || (self == Small::All && of_all)
    }
}

/// The account of the token with which this machine asks the hub; `None`: it has no token.
pub fn account(settings: &Settings) -> Result<Option<String>, Cause> {
    let client = Client::new(settings, Kind::Model)?;
    run(&|| false, client.account())
}

/// Asks the hub whether a repository may be read.
pub fn readable(settings: &Settings, repo: &Repo) -> Result<(), Cause> {
    let client = Client::new(settings, repo.kind)?;
    run(&|| false, client.list(repo)).map(|_| ())
}

/// A download into the cache.
pub struct Download<'a> {
    repo: Repo,
    endpoint: String,
    client: Client,
    root: PathBuf,
    cached: RepoCache,
    listing: Listing,
    stopped: &'a dyn Fn() -> bool,
}

impl<'a> Download<'a> {
    /// Asks the hub for the commit and the files of a repository.
    pub fn begin(
        settings: &Settings,
        repo: &Repo,
        stopped: &'a dyn Fn() -> bool,
    ) -> Result<Download<'a>, HubError> {
        let begun = || {
            let root = settings.cache.clone().ok_or(Cause::NoCache)?;
            let client = Client::new(settings, repo.kind)?;
            let listing = run(stopped, client.list(repo))?;
            Ok(Download {
                repo: repo.clone(),
                endpoint: settings.endpoint.clone(),
                cached: RepoCache::of(&root, repo),
                client,
                root,
                listing,
                stopped,
            })
        };
        begun().map_err(|cause| HubError {
            repo: repo.clone(),
            endpoint: settings.endpoint.clone(),
            cause: Box::new(cause),
        })
    }

    fn failed(&self, cause: Cause) -> HubError {
        HubError {
            repo: self.repo.clone(),
            endpoint: self.endpoint.clone(),
            cause: Box::new(cause),
        }
    }

    /// The commit of the revision.
    pub fn commit(&self) -> &str {
        &self.listing.commit
    }

    /// The names of all files of the commit.
    pub fn listed(&self) -> &[String] {
        &self.listing.files
    }

    /// The directory of its files.
    pub fn snapshot(&self) -> PathBuf {
        self.cached.snapshot_of(self.commit())
    }

    /// Downloads the card of a data set, if it has one. From then on the snapshot has the listing of the commit.
    pub fn card(&self, progress: &mut dyn FnMut(Received)) -> Result<(), HubError> {
        let has = self.listing.files.iter().any(|name| name == CARD);
        let names: &[&str] = if has { &[CARD] } else { &[] };
        self.all(names, Some(CONFIG_BYTES), progress)
            .map_err(|cause| self.failed(cause))
    }

    pub fn files(
        &self,
        names: &[&str],
        progress: &mut dyn FnMut(Received),
    ) -> Result<(), HubError> {
        self.all(names, None, progress)
            .map_err(|cause| self.failed(cause))
    }

    /// Downloads small files of a model, `config.json` first.
    pub fn small(&self, which: Small, progress: &mut dyn FnMut(Received)) -> Result<(), HubError> {
        let files = self.listing.files.iter().map(String::as_str);
        let has = |file: &&str| self.repo.name_in(file).is_some_and(|name| which.has(name));
        let mut names: Vec<&str> = files.filter(has).collect();
        let config = self.repo.place_of(CONFIG);
        names.sort_by_key(|name| (*name != config, *name));
        self.all(&names, Some(STATE_BYTES), progress)
            .map_err(|cause| self.failed(cause))
    }

    pub fn weights(&self, progress: &mut dyn FnMut(Received)) -> Result<(), HubError> {
        self.weight_files(progress)
            .map_err(|cause| self.failed(cause))
    }

    fn weight_files(&self, progress: &mut dyn FnMut(Received)) -> Result<(), Cause> {
        let has = |place: &str| self.listing.files.iter().any(|file| file == place);
        let [whole, index] = [WHOLE, INDEX].map(|name| self.repo.place_of(name));
        if has(&whole) {
            return self.all(&[&whole], None, progress);
        }
        if !has(&index) {
            let mut files = self.listing.files.iter();
            let other = files.find(|file| {
                let Some(name) = self.repo.name_in(file) else {
                    return false;
                };
                let is_other = |beginning: &&str| name.starts_with(*beginning);
                OTHER_WEIGHTS.iter().any(is_other) || name.ends_with(".gguf")
            });
            return Err(other.map_or(Cause::NoWeights, |name| Cause::Format(name.clone())));
        }
        self.all(&[&index], Some(STATE_BYTES), progress)?;
        let path = self.snapshot().join(index);
        let unusable = |why: String| Cause::Answer(format!("{INDEX}: {why}"));
        let index = Index::read(&path).map_err(|error| unusable(error.to_string()))?;
        let files = index.files().into_iter();
        let shards: Vec<String> = files.map(|name| self.repo.place_of(name)).collect();
        let shards: Vec<&str> = shards.iter().map(String::as_str).collect();
        match shards.iter().find(|place| !has(place)) {
            Some(place) => Err(unusable(format!("the model has no file `{place}`"))),
            None => self.all(&shards, None, progress),
        }
    }

    /// Makes the commit that of the revision in the cache.
    pub fn finish(self) -> Result<(), HubError> {
        let referred = self.cached.refer(&self.repo.revision, self.commit());
        referred.map_err(|error| self.failed(error.into()))
    }

    /// Downloads files of at most `limit` bytes each.
    fn all(
        &self,
        names: &[&str],
        limit: Option<u64>,
        progress: &mut dyn FnMut(Received),
    ) -> Result<(), Cause> {
        self.cached.create(self.commit())?;
        if self.repo.kind == Kind::DataSet {
            let listed = &self.listing.files;
            self.cached.keep_listing(self.commit(), listed)?;
        }
        let mut files = Vec::new();
        for name in names {
            let described = self.client.describe(&self.repo, self.commit(), name);
            let file = run(self.stopped, described)?;
            if limit.is_some_and(|limit| file.bytes > limit) {
                let why = format!("{name} has {}, which is too large", bytes(file.bytes));
                return Err(Cause::Answer(why));
            }
            files.push(file);
        }
        let size = |path: &Path| path.metadata().map_or(0, |about| about.len());
        let present = |file: &RemoteFile| {
            let part = size(&self.cached.incomplete(&file.etag));
            part.max(size(&self.cached.blob(&file.etag)))
                .min(file.bytes)
        };
        let sum = |bytes: &dyn Fn(&RemoteFile) -> u64| {
            files
                .iter()
                .fold(0, |sum: u64, file| sum.saturating_add(bytes(file)))
        };
        let total = sum(&|file| file.bytes);
        let needed = total - sum(&present);
        let free = free_space(&self.root)?;
        if needed > free {
            return Err(Cause::File(FileError::NoSpace {
                path: self.snapshot(),
                needed,
                free: Some(free),
            }));
        }
        let mut before = 0;
        let mut reported = 0;
        for file in &files {
            let mut received = |bytes| {
                let bytes = before + bytes;
                if bytes >= reported + REPORTED || bytes == total {
                    reported = bytes;
                    progress(Received { bytes, total });
                }
            };
            self.one(file, &mut received)?;
            before += file.bytes;
        }
        Ok(())
    }

    fn one(&self, file: &RemoteFile, received: &mut dyn FnMut(u64)) -> Result<(), Cause> {
        let blob = self.cached.blob(&file.etag);
        let is_complete = || blob.metadata().is_ok_and(|about| about.len() == file.bytes);
        if !is_complete() {
            let _lock = self.cached.lock(&file.etag, self.stopped)?;
            // Another process may have completed it meanwhile.
            if !is_complete() {
                self.blob(file, &blob, received)?;
            }
        }
        Ok(self.cached.link(self.commit(), &file.name, &file.etag)?)
    }

    /// Completes the part of a blob, verifies it and gives it its name. A part that an earlier process has left and
    /// that turns out to be damaged is replaced once.
    fn blob(
        &self,
        file: &RemoteFile,
        blob: &Path,
        received: &mut dyn FnMut(u64),
    ) -> Result<(), Cause> {
        let path = self.cached.incomplete(&file.etag);
        let mut part = PartFile::open(path, file.bytes)?;
        let mut is_continued = part.bytes > 0;
        loop {
            received(part.bytes);
            run(self.stopped, self.client.fetch(file, &mut part, received))?;
            let checksum = part.checksum();
            if file
                .sha256()
                .is_none_or(|stated| stated.eq_ignore_ascii_case(&checksum))
            {
                break;
            }
            part.restart()?;
            if !is_continued {
                durable::remove(&part.path)?;
                return Err(Cause::Checksum {
                    file: file.name.clone(),
                });
            }
            is_continued = false;
        }
        part.file.sync_all().map_err(|error| part.failed(error))?;
        std::fs::rename(&part.path, blob).map_err(|error| part.failed(error))?;
        Ok(())
    }
}

/// A file `ETAG.incomplete`.
struct PartFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Bytes that the file will have.
    needed: u64,
    /// The hash of its bytes.
    hash: Context,
}

impl PartFile {
    /// Opens the part that an earlier download has left, or a new one.
    fn open(path: PathBuf, needed: u64) -> Result<PartFile, Cause> {
        let failed = |error| FileError::from_io("write", &path, needed, error);
        let mut options = File::options();
        let file = options.read(true).append(true).create(true);
        let mut part = PartFile {
            file: file.open(&path).map_err(failed)?,
            bytes: 0,
            needed,
            hash: Context::new(&SHA256),
            path,
        };
        let mut piece = vec![0; HASHED];
        loop {
            let read = part.file.read(&mut piece);
            let read = read.map_err(|error| part.failed(error))?;
            if read == 0 {
                break;
            }
            part.hash.update(&piece[..read]);
            part.bytes += read as u64;
        }
        if part.bytes > needed {
            part.restart()?;
        }
        Ok(part)
    }

    fn failed(&self, error: std::io::Error) -> FileError {
        FileError::from_io("write", &self.path, self.needed, error)
    }

    /// SHA-256 as hexadecimal digits.
    fn checksum(&self) -> String {
        let digest = self.hash.clone().finish();
        let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
        digits.collect()
    }
}

impl Part for PartFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn add(&mut self, piece: &[u8]) -> Result<(), Cause> {
        let written = self.file.write_all(piece);
        written.map_err(|error| self.failed(error))?;
        self.hash.update(piece);
        self.bytes += piece.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), Cause> {
        let emptied = self.file.set_len(0);
        emptied.map_err(|error| self.failed(error))?;
        self.hash = Context::new(&SHA256);
        self.bytes = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_training_reads_are_small_files() {
        let names = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "tokenizer.model",
            "tf_model.h5",
            "modeling_custom.py",
            "original/config.json",
            "model.safetensors",
        ];
        let chosen = |which: Small| names.map(|name| u8::from(which.has(name)));
        assert_eq!(chosen(Small::All), [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]);
        assert_eq!(chosen(Small::Tokenizer), [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn a_part_continues_with_the_hash_of_its_beginning() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("x.incomplete");
        let mut part = PartFile::open(path.clone(), 6).unwrap();
        part.add(b"abc").unwrap();
        drop(part);
        let mut part = PartFile::open(path.clone(), 6).unwrap();
        assert_eq!(part.bytes(), 3);
        part.add(b"def").unwrap();
        // printf abcdef | sha256sum
        let known = "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721";
        assert_eq!(part.checksum(), known);
        let shorter = PartFile::open(path, 5).unwrap();
        assert_eq!(shorter.bytes(), 0);
    }
}
