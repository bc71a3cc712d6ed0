//! Resolves a source of the recipe to files: a file, a directory, or a glob. `in_bucket` does it for a bucket.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::recipe::schema::spec::{DataFormat, DataSource};

use super::error::DataError;
use super::manifest::FileRecord;
use super::pattern::matches;
use super::remote::Remote;
use super::request::{PrepareRequest, Stopped};

/// A file of data.
#[derive(Debug, Clone)]
pub(super) struct SourceFile {
    pub place: Place,
    /// Path as the recipe names it.
    pub name: PathBuf,
    /// Storage format of the file.
    pub format: DataFormat,
}

/// Where a file of data is.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// On this machine.
    Disk(PathBuf),
    Bucket(Remote),
}

impl SourceFile {
    /// A path on this machine with its content.
    pub fn fetch(&self, stopped: Stopped<'_>) -> Result<PathBuf, DataError> {
        match &self.place {
            Place::Disk(path) => Ok(path.clone()),
            Place::Bucket(remote) => remote.fetch(stopped),
        }
    }

    /// Its path or URL, for messages.
    pub fn shown(&self) -> &Path {
        match &self.place {
            Place::Disk(path) => path,
            Place::Bucket(_) => &self.name,
        }
    }

    /// Its size now.
    pub fn bytes(&self) -> Result<u64, DataError> {
        match &self.place {
            Place::Disk(path) => std::fs::metadata(path)
                .map(|metadata| metadata.len())
                .map_err(|error| DataError::read(path, error)),
            Place::Bucket(remote) => Ok(remote.bytes()),
        }
    }

    /// Reads all of it and passes the bytes of every read to `progress`.
    pub fn record(
        &self,
        progress: &mut dyn FnMut(u64) -> Result<(), DataError>,
    ) -> Result<FileRecord, DataError> {
        match &self.place {
            Place::Disk(path) => FileRecord::of(path, progress),
            Place::Bucket(remote) => remote.download(progress),
        }
    }

    /// Accepts no other content of an object than this from now on.
    pub fn expect(&self, content: &FileRecord) {
        if let Place::Bucket(remote) = &self.place {
            remote.expect(content);
        }
    }

    /// The ETag of an object.
    pub fn etag(&self) -> Option<&str> {
        match &self.place {
            Place::Disk(_) => None,
            Place::Bucket(remote) => remote.etag(),
        }
    }

    /// Equal for two files that are the same, whatever their names.
    pub fn identity(&self) -> PathBuf {
        match &self.place {
            Place::Disk(path) => path.canonicalize().unwrap_or_else(|_| path.clone()),
            Place::Bucket(remote) => PathBuf::from(remote.identity()),
        }
    }
}

/// A file that a source may mean.
pub(super) struct Candidate {
    pub place: Place,
    /// Path as the recipe names it.
    pub name: PathBuf,
    /// Its name, below a directory with that directory's: both may name a split.
    pub inner: PathBuf,
}

/// The files of a source in order of their names; never empty.
pub(super) struct Resolved {
    pub files: Vec<SourceFile>,
    /// A note on the choice of files, for people.
    pub note: Option<String>,
}

/// Finds the files of a source; `path` is its native path in the recipe, `data.train.0`.
pub(super) fn resolve(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    path: &str,
) -> Result<Resolved, DataError> {
    let key = format!("{path}.path");
    if source.path.is_empty() {
        return Err(request.setting(&key, "no path is given", "set it to a file of data"));
    }
    let place = request.base.join(&source.path);
    let single = place.is_file();
    let found: Vec<Candidate> = if single {
        vec![on_disk(&place, PathBuf::from(&source.path), None)]
    } else if place.is_dir() {
        let named = |file: &PathBuf| Path::new(&source.path).join(file);
        let files = walk(&place)?;
        let files = files.into_iter();
        files
            .map(|file| on_disk(&place.join(&file), named(&file), Some(file)))
            .collect()
    } else if source.path.contains(['*', '?']) {
        let matched = expand(request.base, &source.path)?.into_iter();
        matched
            .map(|(path, name)| on_disk(&path, name, None))
            .collect()
    } else if let Some(kind) = special(&place) {
        return Err(no_file(request, &key, &place, kind));
    } else {
        return Err(missing(request, source, &key));
    };
    select(request, source, &key, found, single)
}

fn on_disk(path: &Path, name: PathBuf, inner: Option<PathBuf>) -> Candidate {
    let file_name = || PathBuf::from(path.file_name().unwrap_or_default());
    Candidate {
        place: Place::Disk(path.to_path_buf()),
        name,
        inner: inner.unwrap_or_else(file_name),
    }
}

/// Selects by format and split. `single`: the source names one file, which must be readable.
pub(super) fn select(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    key: &str,
    found: Vec<Candidate>,
    single: bool,
) -> Result<Resolved, DataError> {
    let mut files = Vec::new();
    for Candidate { place, name, inner } in found {
        let by_name = format_of(&inner);
        let format = match source.format {
            Some(format) if single || by_name.is_none_or(|by_name| by_name == format) => {
                Some(format)
            }
            Some(_) => None,
            None => by_name,
        };
        match format {
            Some(_)
                if let Place::Disk(path) = &place
                    && let Some(kind) = special(path) =>
            {
                return Err(no_file(request, key, path, kind));
            }
            Some(format) => {
                let file = SourceFile {
                    place,
                    name,
                    format,
                };
                files.push((file, inner));
            }
            None if single => {
                let shown = match &place {
                    Place::Disk(path) => path,
                    Place::Bucket(_) => &name,
                };
                return Err(DataError::source(
                    shown,
                    "its name does not state its format",
                    "end it in .jsonl, .parquet, .txt or .bin (unpacked, not .gz), or set the \
                     source's format",
                ));
            }
            None => {}
        }
    }
    if files.is_empty() {
        return Err(request.setting(
            key,
            format!("{} holds no data", source.path),
            "give .jsonl, .parquet, .txt or .bin files",
        ));
    }
    let split = source.split.as_ref();
    let (chosen, others): (Vec<_>, Vec<_>) = files
        .into_iter()
        .partition(|(_, inner)| split.is_none_or(|split| belongs(inner, split)));
    let only_files = |files: Vec<(SourceFile, PathBuf)>| -> Vec<SourceFile> {
        files.into_iter().map(|(file, _)| file).collect()
    };
    let Some(split) = split.filter(|_| chosen.is_empty()) else {
        return Ok(Resolved {
            files: only_files(chosen),
            note: None,
        });
    };
    let files = only_files(others);
    let what = match files.len() {
        1 => format!("{} is read whole", files[0].name.display()),
        count => format!("all {count} files of {} are read", source.path),
    };
    Ok(Resolved {
        note: Some(format!(
            "{}: no file is named after the split {split}; {what}",
            (request.key)(key)
        )),
        files,
    })
}

/// Whether a file belongs to a split: `train.jsonl`, `train-00000-of-00002.parquet`, or anything
/// in a directory `train` under the source's own.
fn belongs(inner: &Path, split: &str) -> bool {
    let named = inner
        .file_name()
        .map(|name| name.to_string_lossy())
        .is_some_and(|name| {
            name.strip_prefix(split)
                .is_some_and(|rest| rest.starts_with(['.', '-']))
        });
    let inside = inner
        .parent()
        .is_some_and(|parents| parents.iter().any(|parent| parent == split));
    named || inside
}

pub(super) fn format_of(path: &Path) -> Option<DataFormat> {
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    Some(match ending.as_str() {
        "jsonl" | "ndjson" | "json" => DataFormat::Jsonl,
        "parquet" => DataFormat::Parquet,
        "txt" | "text" | "md" => DataFormat::Text,
        "bin" => DataFormat::Bin,
        _ => return None,
    })
}

/// Whether a missing path looks like a data set or model of the hub.
pub fn is_hub_id(path: &str) -> bool {
    let mut parts = path.split('/');
    let mut next = || parts.next().is_some_and(is_hub_name);
    next() && next() && parts.next().is_none()
}

fn is_hub_name(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with('.')
        && part
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// Whether a missing model looks like one of the hub. The oldest models there have no owner: `gpt2`,
/// `bert-base-uncased`. None of these names has a dot, unlike file names.
pub fn is_hub_model(name: &str) -> bool {
    is_hub_id(name) || (is_hub_name(name) && !name.contains('.'))
}

/// Whether a path names a model of the hub that is not on this machine.
pub(super) fn is_model_on_hub(base: &Path, name: &str) -> bool {
    let owned = name.contains('/');
    is_on_hub(base, name) || (!owned && is_hub_model(name) && !base.join(name).exists())
}

/// Whether a path names a data set of the hub that is not on this machine. A path beside existing files, or
/// with a file extension, does not.
pub(super) fn is_on_hub(base: &Path, path: &str) -> bool {
    let place = base.join(path);
    let local = place.exists() || place.parent().is_some_and(Path::is_dir);
    is_hub_id(path) && !local && format_of(&place).is_none()
}

fn missing(request: &PrepareRequest<'_>, source: &DataSource, key: &str) -> DataError {
    let spelled = (request.key)(key);
    let place = request.base.join(&source.path);
    if is_on_hub(request.base, &source.path) {
        return request.setting(
            key,
            format!(
                "{} is a data set of the hub; it is not on this machine, and nothing is downloaded",
                source.path
            ),
            format!("download it and override {spelled}=/path/to/data.jsonl (or .parquet, or a directory of them)"),
        );
    }
    request.setting(
        key,
        format!("there is no {}", place.display()),
        format!("override {spelled}=/path/to/data.jsonl"),
    )
}

/// The kind of a path that is neither a file nor a directory; `None` for these two and for a missing path.
pub(super) fn special(path: &Path) -> Option<&'static str> {
    let kind = std::fs::metadata(path).ok()?.file_type();
    if kind.is_fifo() {
        Some("a pipe")
    } else if kind.is_socket() {
        Some("a socket")
    } else if kind.is_char_device() || kind.is_block_device() {
        Some("a device")
    } else {
        None
    }
}

/// The error for a path that is not a regular file: sources are read several times, and need a size.
fn no_file(request: &PrepareRequest<'_>, key: &str, path: &Path, kind: &str) -> DataError {
    request.setting(
        key,
        format!("{} is {kind}, not a file of data", path.display()),
        "copy its content into a file and name that file",
    )
}

/// The most files and directories below a directory of data.
pub(super) const MAX_ENTRIES: usize = 100_000;

/// Files under a directory, relative to it, in order; hidden ones are excluded. Links that lead back to a
/// directory above end at the limit.
fn walk(root: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut entries = 0;
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for name in names(&root.join(&directory))? {
            entries += 1;
            if entries > MAX_ENTRIES {
                return Err(DataError::source(
                    root,
                    format!("it holds more than {MAX_ENTRIES} files and directories"),
                    "name a directory with only the data, or join files",
                ));
            }
            let path = directory.join(name);
            if root.join(&path).is_dir() {
                directories.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Names in a directory that are not hidden, in order.
fn names(directory: &Path) -> Result<Vec<String>, DataError> {
    let failed = |error| DataError::read(directory, error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with('.') {
            names.push(name.into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Files that match a path with `*` and `?` (within a name) and `**` (any directories), as (path, name), in
/// order.
fn expand(base: &Path, pattern: &str) -> Result<Vec<(PathBuf, PathBuf)>, DataError> {
    let (root, relative) = match pattern.strip_prefix('/') {
        Some(rest) => (PathBuf::from("/"), rest),
        None => (PathBuf::new(), pattern),
    };
    let mut found = vec![root];
    for part in relative.split('/').filter(|part| !part.is_empty()) {
        let mut next = Vec::new();
        for directory in &found {
            let place = base.join(directory);
            if part == "**" {
                next.push(directory.clone());
                for file in walk(&place)? {
                    next.extend(file.ancestors().skip(1).map(|inner| directory.join(inner)));
                }
            } else if !part.contains(['*', '?']) {
                next.push(directory.join(part));
            } else if place.is_dir() {
                next.extend(
                    names(&place)?
                        .into_iter()
                        .filter(|name| matches(part.as_bytes(), name.as_bytes()))
                        .map(|name| directory.join(name)),
                );
            }
        }
        next.sort();
        next.dedup();
        found = next;
    }
    Ok(found
        .into_iter()
        .map(|name| (base.join(&name), name))
        .filter(|(path, _)| path.is_file())
        .collect())
}
