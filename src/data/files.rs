//! Resolves a source of the recipe to files: a file, a directory, or a glob.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::recipe::schema::spec::{DataFormat, DataSource};

use super::error::DataError;
use super::request::PrepareRequest;

/// A file of data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SourceFile {
    /// Path on this machine.
    pub path: PathBuf,
    /// Path as the recipe names it.
    pub name: PathBuf,
    /// Storage format of the file.
    pub format: DataFormat,
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
    let named = |file: &Path| Path::new(&source.path).join(file);
    let single = place.is_file();
    let found: Vec<PathBuf> = if single {
        vec![PathBuf::new()]
    } else if place.is_dir() {
        walk(&place)?
    } else if source.path.contains(['*', '?']) {
        let matched = expand(request.base, &source.path)?;
        return finish(request, source, &key, matched, None);
    } else if let Some(kind) = special(&place) {
        return Err(no_file(request, &key, &place, kind));
    } else {
        return Err(missing(request, source, &key));
    };
    let files: Vec<(PathBuf, PathBuf)> = found
        .iter()
        .map(|file| match single {
            true => (place.clone(), PathBuf::from(&source.path)),
            false => (place.join(file), named(file)),
        })
        .collect();
    finish(request, source, &key, files, Some(&place))
}

/// Selects by format and split among files, given as (path, name).
fn finish(
    request: &PrepareRequest<'_>,
    source: &DataSource,
    key: &str,
    found: Vec<(PathBuf, PathBuf)>,
    root: Option<&Path>,
) -> Result<Resolved, DataError> {
    let single = found.len() == 1 && root == found.first().map(|(path, _)| path.as_path());
    let mut files = Vec::new();
    for (path, name) in found {
        let by_name = format_of(&path);
        let format = match source.format {
            Some(format) if single || by_name.is_none_or(|by_name| by_name == format) => {
                Some(format)
            }
            Some(_) => None,
            None => by_name,
        };
        match format {
            Some(_) if let Some(kind) = special(&path) => {
                return Err(no_file(request, key, &path, kind));
            }
            Some(format) => files.push(SourceFile { path, name, format }),
            None if single => {
                return Err(DataError::source(
                    &path,
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
    let Some(split) = &source.split else {
        return Ok(Resolved { files, note: None });
    };
    let chosen: Vec<SourceFile> = files
        .iter()
        .filter(|file| belongs(&file.path, root, split))
        .cloned()
        .collect();
    if !chosen.is_empty() {
        return Ok(Resolved {
            files: chosen,
            note: None,
        });
    }
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
fn belongs(path: &Path, root: Option<&Path>, split: &str) -> bool {
    let named = path
        .file_name()
        .map(|name| name.to_string_lossy())
        .is_some_and(|name| {
            name.strip_prefix(split)
                .is_some_and(|rest| rest.starts_with(['.', '-']))
        });
    let inside = root
        .and_then(|root| path.parent()?.strip_prefix(root).ok())
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
const MAX_ENTRIES: usize = 100_000;

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

/// Whether a name matches a pattern of `*` and `?`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut read) = (0, 0);
    // After the last `*`, and where the name continues after the bytes that the `*` has taken.
    let mut star: Option<(usize, usize)> = None;
    while read < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, read));
            }
            Some(&byte) if byte == b'?' || byte == name[read] => {
                at += 1;
                read += 1;
            }
            // Only the last `*` needs to take more: the earlier ones have matched what is between.
            _ => match &mut star {
                Some((after, taken)) => {
                    *taken += 1;
                    (at, read) = (*after, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let many = "*a".repeat(100) + "b";
        assert!(!matches(many.as_bytes(), "a".repeat(200).as_bytes()));
    }
}
