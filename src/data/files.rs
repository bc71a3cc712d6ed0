//! Resolves a source of the recipe to files: a file, a directory or a glob, on this machine or in a bucket.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bucket::{self, Object, Reader};
use crate::hub;
use crate::recipe::schema::spec::{DataFormat, DataSource};
use crate::util::durable::FileError;
use crate::util::tree;

use super::error::DataError;
use super::remote::{Cache, Remote};
use super::request::{PrepareRequest, Stopped, check_stopped};

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
    Disk(PathBuf),
    Bucket(Remote),
}

impl Place {
    /// The path or URL of a file with this name, for messages.
    fn shown<'a>(&'a self, name: &'a Path) -> &'a Path {
        match self {
            Place::Disk(path) => path,
            Place::Bucket(_) => name,
        }
    }
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
        self.place.shown(&self.name)
    }

    /// Its size now.
    pub fn bytes(&self) -> Result<u64, DataError> {
        match &self.place {
            Place::Disk(path) => std::fs::metadata(path)
                .map(|metadata| metadata.len())
                .map_err(|error| DataError::read(path, error)),
            Place::Bucket(remote) => Ok(remote.object.bytes),
        }
    }

    /// The ETag of an object.
    pub fn etag(&self) -> Option<&str> {
        match &self.place {
            Place::Disk(_) => None,
            Place::Bucket(remote) => remote.object.etag.as_deref(),
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

/// The files of a source in order of their names; never empty.
pub(super) struct Resolved {
    pub files: Vec<SourceFile>,
    /// A note on the choice of files, for people.
    pub note: Option<String>,
}

/// A file that a source may mean.
struct Candidate {
    place: Place,
    /// Path as the recipe names it.
    name: PathBuf,
    /// Its name, below a directory with that directory's: both may name a split.
    inner: PathBuf,
}

/// Finds the files of a source on this machine; `path` is its native path in the recipe, `data.train.0`.
pub(super) fn resolve(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    path: &str,
) -> Result<Resolved, DataError> {
    let key = format!("{path}.path");
    if source.path.is_empty() {
        return Err(request.setting(&key, "no path is given", "set it to a file of data"));
    }
    let root = request.base.join(&source.path);
    let mut found = Vec::new();
    let mut add = |name: PathBuf, inner: PathBuf| {
        let place = Place::Disk(request.base.join(&name));
        found.push(Candidate { place, name, inner });
    };
    let single = root.is_file();
    if single {
        add(PathBuf::from(&source.path), file_name(&root));
    } else if root.is_dir() {
        for inner in walk(&root)? {
            add(Path::new(&source.path).join(&inner), inner);
        }
    } else if source.path.contains(['*', '?']) {
        for name in expand(request.base, &source.path)? {
            let inner = file_name(&name);
            add(name, inner);
        }
    } else if let Some(kind) = special(&root) {
        return Err(no_file(request, &key, &root, kind));
    } else {
        return Err(missing(request, source, &key));
    }
    select(request, source, &key, found, single)
}

/// Finds the objects of a source in a bucket; `path` is its native path in the recipe, `data.train.0`.
pub(super) fn resolve_in_bucket(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    path: &str,
    cache: &Arc<Cache>,
) -> Result<Resolved, DataError> {
    let key = &format!("{path}.path");
    let (url, named) = bucket::split(&source.path)?;
    let reader = Reader::open(url)?;
    let (prefix, pattern) = split(named);
    let mut objects = below(&reader, prefix, request.stopped)?;
    if let Some(pattern) = pattern {
        objects.retain(|(_, inner)| fits(pattern, inner));
        for (_, inner) in &mut objects {
            *inner = file_name(inner);
        }
    }
    let single = pattern.is_none() && objects.is_empty();
    if single {
        let Some(object) = reader.object(prefix)? else {
            return Err(request.setting(
                key,
                format!("there is no object {}, and none below it", source.path),
                format!("override {}=s3://BUCKET/data.jsonl", (request.key)(key)),
            ));
        };
        objects.push((object, file_name(Path::new(prefix))));
    }
    let candidate = |(object, inner): (Object, PathBuf)| Candidate {
        name: PathBuf::from(reader.url(&object.key)),
        place: Place::Bucket(Remote::new(&reader, object, cache)),
        inner,
    };
    let found = objects.into_iter().map(candidate).collect();
    select(request, source, key, found, single)
}

fn file_name(path: &Path) -> PathBuf {
    PathBuf::from(path.file_name().unwrap_or_default())
}

/// Selects by format and split. `single`: the source names one file, which must be readable.
fn select(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    key: &str,
    found: Vec<Candidate>,
    single: bool,
) -> Result<Resolved, DataError> {
    let (mut chosen, mut others) = (Vec::new(), Vec::new());
    for Candidate { place, name, inner } in found {
        let by_name = format_of(&inner);
        let format = source.format.or(by_name);
        let other = by_name.is_some_and(|by_name| format != Some(by_name));
        if !single && (other || format.is_none()) {
            continue;
        }
        let Some(format) = format else {
            let shown = place.shown(&name);
            return Err(DataError::source(
                shown,
                "its name does not state its format",
                "end it in .jsonl, .parquet, .txt or .bin (unpacked, not .gz), or set the \
                 source's format",
            ));
        };
        if let Place::Disk(path) = &place
            && let Some(kind) = special(path)
        {
            return Err(no_file(request, key, path, kind));
        }
        let split = source.split.as_ref();
        let in_split = split.is_none_or(|split| belongs(&inner, split));
        let files = if in_split { &mut chosen } else { &mut others };
        files.push(SourceFile {
            place,
            name,
            format,
        });
    }
    if chosen.is_empty() && others.is_empty() {
        return Err(request.setting(
            key,
            format!("{} holds no data", source.path),
            "give .jsonl, .parquet, .txt or .bin files",
        ));
    }
    let (Some(split), true) = (&source.split, chosen.is_empty()) else {
        return Ok(Resolved {
            files: chosen,
            note: None,
        });
    };
    let what = match others.as_slice() {
        [file] => format!("{} is read whole", file.name.display()),
        files => format!("all {} files of {} are read", files.len(), source.path),
    };
    Ok(Resolved {
        files: others,
        note: Some(format!(
            "{}: no file is named after the split {split}; {what}",
            (request.key)(key)
        )),
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

/// Whether a path names a model of the hub that is not on this machine.
pub fn is_model_on_hub(base: &Path, name: &str) -> bool {
    let owned = name.contains('/');
    is_on_hub(base, name) || (!owned && hub::is_model(name) && !base.join(name).exists())
}

/// Whether a path names a data set of the hub that is not on this machine. A path beside existing files, or
/// with a file extension, does not.
pub fn is_on_hub(base: &Path, path: &str) -> bool {
    let place = base.join(path);
    let local = place.exists() || place.parent().is_some_and(Path::is_dir);
    hub::is_id(path) && !local && format_of(&place).is_none()
}

fn missing(request: &PrepareRequest<'_>, source: &DataSource, key: &str) -> DataError {
    let spelled = (request.key)(key);
    let place = request.base.join(&source.path);
    // A mixture has a path as its key, which no override replaces.
    let in_mixture = spelled.ends_with(&source.path);
    if is_on_hub(request.base, &source.path) {
        return request.setting(
            key,
            format!(
                "{} is a data set of the hub; it is not on this machine, and nothing is downloaded",
                source.path
            ),
            match in_mixture {
                true => "download it, and write its path into the recipe in place of the name".to_owned(),
                false => format!(
                    "download it and override {spelled}=/path/to/data.jsonl (or .parquet, or a directory of them)"
                ),
            },
        );
    }
    request.setting(
        key,
        format!("there is no {}", place.display()),
        match in_mixture {
            true => "correct the path in the recipe".to_owned(),
            false => format!("override {spelled}=/path/to/data.jsonl"),
        },
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
const MAX_ENTRIES: usize = 100_000;

/// Files under a directory, relative to it, in order; hidden ones are excluded. Links that lead back to a
/// directory above end at the limit.
fn walk(root: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut entries = 0;
    let mut directories = vec![root.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for path in visible(&directory)? {
            entries += 1;
            if entries > MAX_ENTRIES {
                return Err(DataError::source(
                    root,
                    format!("it holds more than {MAX_ENTRIES} files and directories"),
                    "name a directory with only the data, or join files",
                ));
            }
            if path.is_dir() {
                directories.push(path);
            } else {
                files.push(path.strip_prefix(root).unwrap_or(&path).to_path_buf());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The paths right below a directory that are not hidden, in order.
fn visible(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    std::fs::metadata(directory)
        .map_err(|error| FileError::from_io("list", directory, 0, error))?;
    let mut paths = tree::entries(directory)?;
    paths.retain(|path| !file_name(path).as_os_str().as_bytes().starts_with(b"."));
    // The manifest is JSON, which has no other names.
    if let Some(path) = paths.iter().find(|path| path.to_str().is_none()) {
        return Err(DataError::source(
            path,
            "its name is not UTF-8",
            "rename it",
        ));
    }
    Ok(paths)
}

/// Files that match a path with `*` and `?` (within a name) and `**` (any directories), in order.
fn expand(base: &Path, pattern: &str) -> Result<Vec<PathBuf>, DataError> {
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
                let names = visible(&place)?;
                let names = names.iter().filter_map(|path| path.file_name());
                let names = names.filter(|name| matches(part.as_bytes(), name.as_bytes()));
                next.extend(names.map(|name| directory.join(name)));
            }
        }
        next.sort();
        next.dedup();
        found = next;
    }
    found.retain(|name| base.join(name).is_file());
    Ok(found)
}

/// Splits a key before its first name with a wildcard.
fn split(key: &str) -> (&str, Option<&str>) {
    let Some(wildcard) = key.find(['*', '?']) else {
        return (key.trim_end_matches('/'), None);
    };
    match key[..wildcard].rsplit_once('/') {
        None => ("", Some(key)),
        Some((prefix, _)) => (prefix, Some(&key[prefix.len() + 1..])),
    }
}

/// The objects below a prefix with their paths below it, in the order of files below a directory. Hidden ones are
/// excluded.
fn below(
    reader: &Reader,
    prefix: &str,
    stopped: Stopped<'_>,
) -> Result<Vec<(Object, PathBuf)>, DataError> {
    let mut found = Vec::new();
    let mut listed = 0;
    reader.list(prefix, |object| {
        listed += 1;
        let inner = object.key[prefix.len()..].trim_start_matches('/');
        if !inner.split('/').any(|part| part.starts_with('.')) {
            let inner = PathBuf::from(inner);
            found.push((object, inner));
        }
        listed <= MAX_ENTRIES && !stopped()
    })?;
    check_stopped(stopped)?;
    if listed > MAX_ENTRIES {
        return Err(DataError::source(
            Path::new(&reader.url(prefix)),
            format!("more than {MAX_ENTRIES} objects are below it"),
            "name a prefix with only the data, or join objects",
        ));
    }
    found.sort_by(|(_, one), (_, other)| one.cmp(other));
    Ok(found)
}

/// Whether a path matches a pattern, in which `**` matches any directories.
fn fits(pattern: &str, path: &Path) -> bool {
    let pattern = pattern.split('/').filter(|part| !part.is_empty());
    let pattern: Vec<&[u8]> = pattern.map(str::as_bytes).collect();
    let path: Vec<&[u8]> = path.iter().map(OsStr::as_bytes).collect();
    let part = |pattern: &&[u8], name: &&[u8]| matches(pattern, name);
    glob(&pattern, &path, |part| *part == b"**", part)
}

/// Whether a name matches a pattern of `*` and `?`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let byte = |pattern: &u8, byte: &u8| *pattern == b'?' || pattern == byte;
    glob(pattern, name, |byte| *byte == b'*', byte)
}

/// Whether a text matches a pattern. An element of the pattern matches any number of the text's if `is_star`, otherwise
/// one that it `fits`.
fn glob<E>(
    pattern: &[E],
    text: &[E],
    is_star: impl Fn(&E) -> bool,
    fits: impl Fn(&E, &E) -> bool,
) -> bool {
    let (mut at, mut read) = (0, 0);
    // After the last star, and where the text continues after what the star has taken.
    let mut star: Option<(usize, usize)> = None;
    while read < text.len() {
        match pattern.get(at) {
            Some(element) if is_star(element) => {
                at += 1;
                star = Some((at, read));
            }
            Some(element) if fits(element, &text[read]) => {
                at += 1;
                read += 1;
            }
            // Only the last star needs to take more: the earlier ones have matched what is between.
            _ => match &mut star {
                Some((after, taken)) => {
                    *taken += 1;
                    (at, read) = (*after, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(is_star)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::tests::in_memory;

    #[test]
    fn a_key_names_an_object_a_prefix_or_a_pattern() {
        for (key, expected) in [
            ("data", ("data", None)),
            ("data/", ("data", None)),
            ("*.txt", ("", Some("*.txt"))),
            ("x/**/y?.txt", ("x", Some("**/y?.txt"))),
        ] {
            assert_eq!(split(key), expected, "{key}");
        }
    }

    #[test]
    fn objects_are_read_by_the_keys_that_they_have_in_the_order_of_files() {
        let bucket = in_memory();
        let reader = Reader::of(bucket.clone());
        let keys = [
            "a.txt",
            "a/x.txt",
            "a/y/z.txt",
            "a/.hidden",
            ".git/d.txt",
            "notes~1.txt",
            "b%3A.txt",
        ];
        for key in keys {
            reader.put(&format!("data/{key}"), key.as_bytes()).unwrap();
        }
        reader.put("data/marker", b"").unwrap();
        let found = below(&reader, "data", &|| false).unwrap();
        let inner: Vec<&str> = found
            .iter()
            .map(|(_, inner)| inner.to_str().unwrap())
            .collect();
        assert_eq!(
            inner,
            ["a/x.txt", "a/y/z.txt", "a.txt", "b%3A.txt", "notes~1.txt"]
        );
        for (object, inner) in &found {
            let mut read = Vec::new();
            let sink = |piece: &[u8]| {
                read.extend_from_slice(piece);
                true
            };
            reader.download(object, sink).unwrap();
            assert_eq!(read, inner.to_str().unwrap().as_bytes());
        }
        let matched = |pattern: &str| {
            let found = found.iter().filter(|(_, inner)| fits(pattern, inner));
            found
                .map(|(_, inner)| inner.to_str().unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(matched("*.txt"), ["a.txt", "b%3A.txt", "notes~1.txt"]);
        assert_eq!(matched("a/**/?.txt"), ["a/x.txt", "a/y/z.txt"]);
        let odd = below(&reader, "data//x", &|| false).unwrap_err();
        assert!(odd.to_string().contains("rename"), "{odd}");
        let stopped = below(&reader, "data", &|| true).unwrap_err();
        assert!(matches!(stopped, DataError::Stopped), "{stopped}");
    }

    #[test]
    fn patterns_match_in_time_even_with_many_stars() {
        for (pattern, name, fits) in [
            ("", "", true),
            ("*", "", true),
            ("a*b?d", "axxbcd", true),
            ("*ab", "aab", true),
            ("a*", "b", false),
            ("?", "", false),
            ("**a", "ba", true),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), name.as_bytes()),
                fits,
                "{pattern}"
            );
        }
        let fit = |pattern: &str, path: &str| super::fits(pattern, Path::new(path));
        assert!(fit("**/*.txt", "a.txt") && fit("**/*.txt", "x/y/a.txt") && fit("x/*/a", "x/y/a"));
        assert!(!fit("*.txt", "x/a.txt") && !fit("x/**/b", "x/a") && !fit("a", "a/b"));
        let many = "*a".repeat(100) + "b";
        assert!(!matches(many.as_bytes(), "a".repeat(200).as_bytes()));
        assert!(!fit(&("**/a/".repeat(100) + "b"), &"a/".repeat(200)));
    }
}
