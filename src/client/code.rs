//! The working directory as an archive for a cluster: the files that git tracks or would track, or all files of a folder
//! without git.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use crate::util::format::{bytes, count};
use crate::util::key::sha256;

/// Most bytes of files.
const MOST: u64 = 256 << 20;
/// Largest archive in a ConfigMap, which holds 1 MiB.
pub const MOST_IN_CONFIG_MAP: usize = 900 << 10;

/// A working directory that cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum CodeError {
    #[error("cannot read {}: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("cannot list the files of {}: git says: {message}", directory.display())]
    Git { directory: PathBuf, message: String },
    #[error(
        "{} has {} in {} that git does not ignore, and at most {} are sent; the largest are {}. Add what the training \
         does not need to .gitignore, or send a smaller folder with --code DIR",
        directory.display(), bytes(*total), count(*files as u64, "file"), bytes(MOST), largest.join(", ")
    )]
    TooLarge {
        directory: PathBuf,
        total: u64,
        files: usize,
        largest: Vec<String>,
    },
    #[error(
        "the link {} points to {}, outside of the directory that is sent; copy what it points to, or add it to .gitignore",
        path.display(), target.display()
    )]
    Outside { path: PathBuf, target: PathBuf },
}

/// An archive and what identifies it.
#[derive(Debug, Clone)]
pub struct Code {
    /// A tar archive, compressed with gzip.
    pub archive: Vec<u8>,
    /// SHA-256 of the archive, in hexadecimal digits. The same files give the same archive.
    pub sha256: String,
    pub files: usize,
    /// Bytes of all files.
    pub bytes: u64,
}

/// The archive of a directory's files.
pub fn archive(directory: &Path) -> Result<Code, CodeError> {
    let files = files(directory)?;
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |error| CodeError::Unreadable { path, error }
    };
    let mut sizes = Vec::new();
    for file in &files {
        let path = directory.join(file);
        let about = path.symlink_metadata().map_err(failed(&path))?;
        sizes.push((about.len(), file));
    }
    let total = sizes.iter().map(|(size, _)| size).sum();
    if total > MOST {
        sizes.sort_by(|a, b| b.cmp(a));
        let largest = sizes.iter().take(3);
        let named =
            |(size, file): &(u64, &PathBuf)| format!("{} ({})", file.display(), bytes(*size));
        return Err(CodeError::TooLarge {
            directory: directory.to_path_buf(),
            total,
            files: files.len(),
            largest: largest.map(named).collect(),
        });
    }
    let mut builder = Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for file in &files {
        let path = directory.join(file);
        append(&mut builder, &path, file).map_err(|error| match error {
            Appended::Io(error) => failed(&path)(error),
            Appended::Outside(target) => CodeError::Outside { path, target },
        })?;
    }
    let archive = builder.into_inner().and_then(GzEncoder::finish);
    let archive = archive.map_err(failed(directory))?;
    Ok(Code {
        sha256: sha256(&archive),
        archive,
        files: files.len(),
        bytes: total,
    })
}

enum Appended {
    Io(io::Error),
    Outside(PathBuf),
}

impl From<io::Error> for Appended {
    fn from(error: io::Error) -> Appended {
        Appended::Io(error)
    }
}

/// Adds a file or a link, without times and owners. Links stay links, so a circle of them is harmless.
fn append(
    builder: &mut Builder<GzEncoder<Vec<u8>>>,
    path: &Path,
    name: &Path,
) -> Result<(), Appended> {
    use std::os::unix::fs::PermissionsExt;
    let about = path.symlink_metadata()?;
    let mut header = Header::new_gnu();
    if about.is_symlink() {
        let target = fs::read_link(path)?;
        if !stays_inside(name, &target) {
            return Err(Appended::Outside(target));
        }
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        return Ok(builder.append_link(&mut header, name, target)?);
    }
    let content = fs::read(path)?;
    header.set_entry_type(EntryType::Regular);
    header.set_size(content.len() as u64);
    let executable = about.permissions().mode() & 0o100 != 0;
    header.set_mode(if executable { 0o755 } else { 0o644 });
    Ok(builder.append_data(&mut header, name, content.as_slice())?)
}

/// Whether a link at `name` with this target points to a place in the directory.
fn stays_inside(name: &Path, target: &Path) -> bool {
    let mut depth = name.components().count() as i64 - 1;
    for part in target.components() {
        match part {
            Component::Normal(_) => depth += 1,
            Component::ParentDir => depth -= 1,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return false,
        }
        if depth < 0 {
            return false;
        }
    }
    true
}

/// The files to send, relative to the directory and sorted.
fn files(directory: &Path) -> Result<Vec<PathBuf>, CodeError> {
    let listed = Command::new("git")
        .arg("-C")
        .arg(directory)
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "--",
            ".",
        ])
        .output();
    let mut files = match listed {
        Ok(output) if output.status.success() => {
            use std::os::unix::ffi::OsStrExt;
            let names = output
                .stdout
                .split(|byte| *byte == 0)
                .filter(|name| !name.is_empty());
            let names = names.map(|name| PathBuf::from(std::ffi::OsStr::from_bytes(name)));
            // The index still has a deleted file. A submodule is a directory.
            names
                .filter(|name| is_sent(&directory.join(name)))
                .collect()
        }
        Ok(output)
            if directory
                .ancestors()
                .any(|above| above.join(".git").exists()) =>
        {
            return Err(CodeError::Git {
                directory: directory.to_path_buf(),
                message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            });
        }
        // No repository, or no git.
        _ => below(directory, Path::new(""))?,
    };
    files.sort();
    files.dedup();
    Ok(files)
}

fn is_sent(path: &Path) -> bool {
    let about = path.symlink_metadata();
    about.is_ok_and(|about| about.is_file() || about.is_symlink())
}

fn below(directory: &Path, relative: &Path) -> Result<Vec<PathBuf>, CodeError> {
    let place = directory.join(relative);
    let failed = |error| CodeError::Unreadable {
        path: place.clone(),
        error,
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(&place).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = relative.join(entry.file_name());
        match entry.file_type().map_err(failed)? {
            kind if kind.is_dir() => found.extend(below(directory, &name)?),
            kind if kind.is_file() || kind.is_symlink() => found.push(name),
            _ => {}
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn git(directory: &Path, arguments: &[&str]) {
        let output = Command::new("git")
            .arg("-C")
            .arg(directory)
            .args(arguments)
            .output();
        assert!(output.unwrap().status.success(), "git {arguments:?}");
    }

    fn names(code: &Code) -> Vec<String> {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(code.archive.as_slice()));
        let entries = archive.entries().unwrap();
        let name =
            |entry: io::Result<tar::Entry<_>>| entry.unwrap().path().unwrap().display().to_string();
        entries.map(name).collect()
    }

    #[test]
    fn git_decides_which_files_are_sent() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path();
        git(directory, &["init", "--quiet"]);
        for (file, text) in [
            (".gitignore", "*.bin\nruns/\n"),
            ("train.py", "print()"),
            ("scripts/sft.py", "pass"),
            ("weights.bin", "large"),
            ("runs/log", "old"),
            ("deleted.py", ""),
        ] {
            fs::create_dir_all(directory.join(file).parent().unwrap()).unwrap();
            fs::write(directory.join(file), text).unwrap();
        }
        git(directory, &["add", "train.py", "deleted.py"]);
        fs::remove_file(directory.join("deleted.py")).unwrap();
        symlink("scripts", directory.join("link")).unwrap();
        // A circle.
        symlink("circle", directory.join("circle")).unwrap();
        let code = archive(directory).unwrap();
        let expected = [".gitignore", "circle", "link", "scripts/sft.py", "train.py"];
        assert_eq!(names(&code), expected);
        assert_eq!(code.sha256, archive(directory).unwrap().sha256);
        // Only the folder that is sent counts.
        assert_eq!(
            names(&archive(&directory.join("scripts")).unwrap()),
            ["sft.py"]
        );
        fs::write(directory.join("train.py"), "other").unwrap();
        assert_ne!(code.sha256, archive(directory).unwrap().sha256);
    }

    #[test]
    fn a_folder_without_git_is_sent_whole() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("a")).unwrap();
        fs::write(place.path().join("a/b"), "x").unwrap();
        fs::write(place.path().join(".env"), "x").unwrap();
        assert_eq!(names(&archive(place.path()).unwrap()), [".env", "a/b"]);
    }

    #[test]
    fn links_out_of_the_directory_and_large_files_are_refused() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("a")).unwrap();
        for (target, is_sent) in [
            ("../b", true),
            ("../../b", false),
            ("/etc/passwd", false),
            ("b/../../../c", false),
        ] {
            let link = place.path().join("a/link");
            let _ = fs::remove_file(&link);
            symlink(target, &link).unwrap();
            assert_eq!(archive(place.path()).is_ok(), is_sent, "{target}");
        }
        fs::remove_file(place.path().join("a/link")).unwrap();
        fs::File::create(place.path().join("model.safetensors"))
            .unwrap()
            .set_len(MOST + 1)
            .unwrap();
        let error = archive(place.path()).unwrap_err().to_string();
        assert!(
            error.contains("model.safetensors (") && error.contains(".gitignore"),
            "{error}"
        );
    }
}
