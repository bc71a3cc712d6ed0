//! Names of data files: below a directory, of a format, of a split, and those that a pattern matches.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::error::DataError;
use crate::recipe::schema::spec::DataFormat;
use crate::util::durable::FileError;
use crate::util::tree;

pub(super) fn file_name(path: &Path) -> PathBuf {
    PathBuf::from(path.file_name().unwrap_or_default())
}

/// The format that the extension states. Files of lines may be compressed.
pub(super) fn format_of(path: &Path) -> Option<DataFormat> {
    let is_packed = is_packed(path);
    let inner: &Path = if is_packed {
        path.file_stem()?.as_ref()
    } else {
        path
    };
    let ending = inner.extension()?.to_str()?.to_ascii_lowercase();
    Some(match ending.as_str() {
        "jsonl" | "ndjson" | "json" => DataFormat::Jsonl,
        "txt" | "text" | "md" => DataFormat::Text,
        "parquet" if !is_packed => DataFormat::Parquet,
        "bin" if !is_packed => DataFormat::Bin,
        _ => return None,
    })
}

/// Whether the extension states compression with gzip.
pub(super) fn is_packed(path: &Path) -> bool {
    let ending = path.extension();
    ending.is_some_and(|ending| ending.eq_ignore_ascii_case("gz"))
}

/// Whether a file belongs to a split: `train.jsonl`, `train-00000-of-00002.parquet`, or anything
/// in a directory `train` under the source's own.
pub(super) fn belongs(inner: &Path, split: &str) -> bool {
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

/// The most files and directories below a directory of data.
pub(super) const MAX_ENTRIES: usize = 100_000;

/// Files under a directory, relative to it, in order; hidden ones are excluded. Links that lead back to a
/// directory above end at the limit.
pub(super) fn walk(root: &Path) -> Result<Vec<PathBuf>, DataError> {
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
pub(super) fn visible(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
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

/// Whether a path matches a pattern, in which `**` matches any directories.
pub(super) fn fits(pattern: &str, path: &Path) -> bool {
    let pattern = pattern.split('/').filter(|part| !part.is_empty());
    let pattern: Vec<&[u8]> = pattern.map(str::as_bytes).collect();
    let path: Vec<&[u8]> = path.iter().map(OsStr::as_bytes).collect();
    let part = |pattern: &&[u8], name: &&[u8]| matches(pattern, name);
    glob(&pattern, &path, |part| *part == b"**", part)
}

/// Whether a name matches a pattern of `*` and `?`.
pub(super) fn matches(pattern: &[u8], name: &[u8]) -> bool {
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
