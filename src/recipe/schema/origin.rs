//! The source of a recipe's files: this machine's disk, or a recipe snapshot as in a TrainingJob. A snapshot
//! keeps the files' paths relative to the submitting machine's working directory, so that names within the
//! files stay valid.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::util::input;

/// Where files are read from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// The disk. Relative paths start from this process's working directory.
    #[default]
    Disk,
    /// A recipe snapshot: texts by relative path, without `.` and `..`.
    Snapshot(Arc<BTreeMap<PathBuf, String>>),
}

impl Origin {
    /// An origin with the files of a recipe snapshot. The error names a path outside of the snapshot's folder.
    pub fn snapshot(
        files: impl IntoIterator<Item = (PathBuf, String)>,
    ) -> Result<Origin, OutsidePath> {
        let inside = |(path, text): (PathBuf, String)| match normal(&path) {
            Some(inside) if !inside.as_os_str().is_empty() => Ok((inside, text)),
            _ => Err(OutsidePath(path)),
        };
        let files: Result<_, _> = files.into_iter().map(inside).collect();
        Ok(Origin::Snapshot(Arc::new(files?)))
    }

    /// Whether a path is a regular file.
    pub fn is_file(&self, path: &Path) -> bool {
        match self {
            Origin::Disk => at_home(path).is_file(),
            Origin::Snapshot(files) => normal(path).is_some_and(|path| files.contains_key(&path)),
        }
    }

    /// Whether a path is a folder.
    pub fn is_dir(&self, path: &Path) -> bool {
        match self {
            Origin::Disk => at_home(path).is_dir(),
            Origin::Snapshot(_) => !self.names(path).is_empty(),
        }
    }

    /// The names of the entries of a folder.
    pub fn names(&self, folder: &Path) -> BTreeSet<String> {
        match self {
            Origin::Disk => {
                let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
                let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
                names.collect()
            }
            Origin::Snapshot(files) => {
                let Some(folder) = normal(folder) else {
                    return BTreeSet::new();
                };
                let inside = files
                    .keys()
                    .filter_map(|path| path.strip_prefix(&folder).ok());
                let first = inside.filter_map(|path| path.iter().next()?.to_str());
                first.map(str::to_owned).collect()
            }
        }
    }

    /// The first `limit` bytes of a file.
    pub fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match self {
            Origin::Disk => input::open_or_pipe(&at_home(path))?
                .take(limit)
                .read_to_end(&mut bytes)?,
            Origin::Snapshot(files) => {
                let text = normal(path).and_then(|path| files.get(&path));
                let text = text.ok_or_else(|| {
                    io::Error::new(io::ErrorKind::NotFound, "not in the recipe snapshot")
                })?;
                text.as_bytes().take(limit).read_to_end(&mut bytes)?
            }
        };
        Ok(bytes)
    }
}

/// A path that leads out of a recipe snapshot's folder, or names no file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is not a relative path of a file: begin it with a name and remove `..`", .0.display())]
pub struct OutsidePath(pub PathBuf);

/// Removes `.` and `..` from a relative path. `None`: it leads out of its folder.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut inside = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => inside.push(name),
            Component::CurDir => {}
            Component::ParentDir if inside.pop() => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(inside)
}

/// The path that a shell makes of `~/…`.
fn at_home(path: &Path) -> Cow<'_, Path> {
    let home = path.strip_prefix("~").ok().zip(std::env::var_os("HOME"));
    home.map_or(Cow::Borrowed(path), |(rest, home)| {
        Cow::Owned(Path::new(&home).join(rest))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(paths: &[&str]) -> Result<Origin, OutsidePath> {
        let files = paths.iter().map(|path| (path.into(), format!("{path}!")));
        Origin::snapshot(files)
    }

    #[test]
    fn snapshot_files_are_found_by_every_spelling_of_their_paths() {
        let origin = snapshot(&["config/config.yaml", "./config/loss/dpo.yaml"]).unwrap();
        for path in ["config/config.yaml", "./config//loss/../config.yaml"] {
            assert!(origin.is_file(Path::new(path)), "{path}");
            let bytes = origin.read(Path::new(path), 6).unwrap();
            assert_eq!(bytes, b"config");
        }
        assert!(origin.is_dir(Path::new("config/loss")));
        assert!(origin.is_dir(Path::new("")));
        assert!(!origin.is_dir(Path::new("conf")));
        assert!(!origin.is_file(Path::new("config/loss")));
        let names = origin.names(Path::new("config"));
        assert_eq!(names, BTreeSet::from(["config.yaml".into(), "loss".into()]));
    }

    #[test]
    fn paths_outside_of_the_snapshot_are_refused_and_never_found() {
        for path in ["/etc/passwd", "../a", "a/../../b", "", ".", "a/.."] {
            assert_eq!(snapshot(&[path]), Err(OutsidePath(path.into())), "{path}");
        }
        let origin = snapshot(&["a"]).unwrap();
        assert!(!origin.is_file(Path::new("/etc/passwd")));
        assert!(origin.read(Path::new("/etc/passwd"), 9).is_err());
        assert!(origin.names(Path::new("..")).is_empty());
    }
}
