//! The working directory as an archive for a cluster: the files that git tracks or would track, or all files of a folder
//! without git.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, Header, HeaderMode};

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
        append(&mut builder, directory, file)?;
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

/// Adds a file or a link, without times and owners. Links stay links, so a circle of them is harmless.
fn append(
    builder: &mut Builder<GzEncoder<Vec<u8>>>,
    directory: &Path,
    name: &Path,
) -> Result<(), CodeError> {
    let path = directory.join(name);
    let failed = failed(&path);
    let about = path.symlink_metadata().map_err(&failed)?;
    let mut header = Header::new_gnu();
    header.set_metadata_in_mode(&about, HeaderMode::Deterministic);
    let appended = if about.is_symlink() {
        let target = fs::read_link(&path).map_err(&failed)?;
        if !stays_inside(name, &target) {
            return Err(CodeError::Outside { path, target });
        }
        header.set_size(0);
        builder.append_link(&mut header, name, target)
    } else {
        let content = fs::read(&path).map_err(&failed)?;
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, name, content.as_slice())
    };
    appended.map_err(&failed)
}

fn failed(path: &Path) -> impl Fn(io::Error) -> CodeError + use<> {
    let path = path.to_path_buf();
    move |error| CodeError::Unreadable {
        path: path.clone(),
        error,
    }
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
    let mut files: Vec<PathBuf> = match listed {
        Ok(output) if output.status.success() => {
            let names = output.stdout.split(|byte| *byte == 0);
            let names = names.filter(|name| !name.is_empty());
            names.map(|name| OsStr::from_bytes(name).into()).collect()
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
    // The index still has a deleted file. A submodule is a directory.
    files.retain(|name| {
        let about = directory.join(name).symlink_metadata();
        about.is_ok_and(|about| about.is_file() || about.is_symlink())
    });
    files.sort();
    files.dedup();
    Ok(files)
}

fn below(directory: &Path, relative: &Path) -> Result<Vec<PathBuf>, CodeError> {
    let place = directory.join(relative);
    let failed = failed(&place);
    let mut found = Vec::new();
    for entry in fs::read_dir(&place).map_err(&failed)? {
        let entry = entry.map_err(&failed)?;
        let name = relative.join(entry.file_name());
        if entry.file_type().map_err(&failed)?.is_dir() {
            found.extend(below(directory, &name)?);
        } else {
            found.push(name);
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
