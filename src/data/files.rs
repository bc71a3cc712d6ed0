//! Resolves a source of the recipe to files: a file, a directory or a glob, on this machine or in a bucket.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::bucket::{self, Object, Reader};
use crate::hub;
use crate::recipe::schema::spec::{DataFormat, DataSource};

use super::error::DataError;
use super::names::{MAX_ENTRIES, belongs, file_name, fits, format_of, matches, visible, walk};
use super::remote::{Cache, Remote};
use super::repository::{Card, Local};
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
        if let Some(local) = Local::at(&root)? {
            return of_repository(request, source, path, &local);
        }
        let mut inner = walk(&root)?;
        if Card::of(&root).is_card {
            inner.retain(|inner| inner != Path::new(hub::CARD));
        }
        for inner in inner {
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

/// The files that a source names in a repository of the hub on this machine.
fn of_repository(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    path: &str,
    local: &Local<'_>,
) -> Result<Resolved, DataError> {
    let chosen = local.choose(source, path);
    let chosen = chosen.map_err(|unchosen| unchosen.error(source, path, request.key))?;
    if !local.has(&chosen) {
        let key = format!("{path}.path");
        if hub::repo_of_snapshot(Path::new(&source.path)).is_some() {
            return Err(missing(request, source, &key));
        }
        return Err(request.setting(
            &key,
            format!("{} has only some shards of its data", source.path),
            "complete its download",
        ));
    }
    let file = |inner: String| {
        let name = Path::new(&source.path).join(inner);
        Some(SourceFile {
            place: Place::Disk(request.base.join(&name)),
            format: format_of(&name)?,
            name,
        })
    };
    Ok(Resolved {
        files: chosen.into_iter().filter_map(file).collect(),
        note: None,
    })
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
                "end it in .jsonl, .jsonl.gz, .parquet, .txt or .bin, or set the source's format",
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
    // A mixture has a path as its key, which only an override of the whole mixture replaces.
    let mixture = spelled.strip_suffix(source.path.as_str());
    if let Some(repo) = hub::repo_of_snapshot(&place) {
        return request.setting(
            key,
            format!("the hub's cache lacks files of {repo}"),
            format!("restore them with `{}`", repo.download_command(None)),
        );
    }
    if is_on_hub(request.base, &source.path) {
        return request.setting(
            key,
            format!(
                "data set `{}` is neither in a local directory nor in the hub's cache",
                source.path
            ),
            match mixture {
                Some(_) => "download it into a directory of this name".to_owned(),
                None => format!("download it and override {spelled}=DIRECTORY"),
            },
        );
    }
    request.setting(
        key,
        format!("there is no {}", place.display()),
        match mixture {
            Some(mixture) => format!(
                "correct the path in the recipe, or override `{}={{/path/to/data.jsonl: 1.0}}`",
                mixture.trim_end_matches('.')
            ),
            None => format!("override {spelled}=/path/to/data.jsonl"),
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
}
