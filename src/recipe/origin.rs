//! Where the files of a recipe are: on this machine's disk, or carried from another one, as a
//! TrainingJob does. A carried file stands where its own machine had it, seen from the folder that it
//! was started in, so that whatever names it finds it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Where files are looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// On disk; names begin in this process's working directory.
    #[default]
    Disk,
    /// Among these, by their paths, which have no `.` and no `..`.
    Carried(Arc<BTreeMap<PathBuf, String>>),
}

impl Origin {
    /// Files by their paths. An error names one that does not stay below the folder that they begin in.
    pub fn carried(
        files: impl IntoIterator<Item = (PathBuf, String)>,
    ) -> Result<Origin, OutsidePath> {
        let inside = |(path, text): (PathBuf, String)| match normal(&path) {
            Some(inside) if !inside.as_os_str().is_empty() => Ok((inside, text)),
            _ => Err(OutsidePath(path)),
        };
        let files: Result<_, _> = files.into_iter().map(inside).collect();
        Ok(Origin::Carried(Arc::new(files?)))
    }

    /// Whether there is such a regular file: a device or a pipe would be read without end.
    pub fn is_file(&self, path: &Path) -> bool {
        match self {
            Origin::Disk => path.is_file(),
            Origin::Carried(files) => normal(path).is_some_and(|path| files.contains_key(&path)),
        }
    }

    /// Whether there is such a folder.
    pub fn is_dir(&self, path: &Path) -> bool {
        match self {
            Origin::Disk => path.is_dir(),
            Origin::Carried(_) => !self.names(path).is_empty(),
        }
    }

    /// The names of what is in a folder.
    pub fn names(&self, folder: &Path) -> BTreeSet<String> {
        match self {
            Origin::Disk => {
                let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
                let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
                names.collect()
            }
            Origin::Carried(files) => {
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

    /// The bytes of a file, at most so many.
    pub fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match self {
            Origin::Disk => open(path)?.take(limit).read_to_end(&mut bytes)?,
            Origin::Carried(files) => {
                let text = normal(path).and_then(|path| files.get(&path));
                let text = text.ok_or_else(|| {
                    io::Error::new(io::ErrorKind::NotFound, "the job does not carry it")
                })?;
                text.as_bytes().take(limit).read_to_end(&mut bytes)?
            }
        };
        Ok(bytes)
    }
}

/// A path that leads out of the folder that carried files begin in, or to no file of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is no path of a file inside of a folder: begin it with a name, and leave `..` out", .0.display())]
pub struct OutsidePath(pub PathBuf);

/// A relative path without `.` and `..`; `None` where it leads out of its folder.
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

/// Opens a file to be read. A pipe with a name is refused: where nobody writes into it, opening it would
/// wait for ever. `/dev/stdin` and a shell's `<(…)` are pipes that somebody has opened already.
fn open(path: &Path) -> io::Result<File> {
    let opened = ["/dev", "/proc"];
    let named = !opened.iter().any(|folder| path.starts_with(folder));
    if named && std::fs::metadata(path)?.file_type().is_fifo() {
        return Err(io::Error::other(
            "it is a named pipe (write `<(COMMAND)`, or read it as /dev/stdin)",
        ));
    }
    File::open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carried(paths: &[&str]) -> Result<Origin, OutsidePath> {
        let files = paths.iter().map(|path| (path.into(), format!("{path}!")));
        Origin::carried(files)
    }

    #[test]
    fn carried_files_are_found_by_every_spelling_of_their_paths() {
        let origin = carried(&["config/config.yaml", "./config/loss/dpo.yaml"]).unwrap();
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
    fn paths_that_lead_out_are_refused_and_never_found() {
        for path in ["/etc/passwd", "../a", "a/../../b", "", ".", "a/.."] {
            assert_eq!(carried(&[path]), Err(OutsidePath(path.into())), "{path}");
        }
        let origin = carried(&["a"]).unwrap();
        assert!(!origin.is_file(Path::new("/etc/passwd")));
        assert!(origin.read(Path::new("/etc/passwd"), 9).is_err());
        assert!(origin.names(Path::new("..")).is_empty());
    }
}
