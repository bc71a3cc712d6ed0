//! `evenkeel setup`: prepares a pod before its first ranks: unpacks the code that a launch has sent, and runs the job's
//! setup command in it.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use flate2::read::GzDecoder;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::bucket::{Bucket, Object, is_url};
use crate::lifecycle::protocol::exit;
use crate::util::child;
use crate::util::input;
use crate::util::key::sha256;
use crate::util::lock::lock;

/// Longest line of the setup command's output that is shown as one.
const LINE: u64 = 4096;
/// Time for the rest of the output after the command has ended.
const DRAIN: Duration = Duration::from_millis(500);
/// Lines of the setup command's output in an error.
const LAST_LINES: usize = 5;
/// Most bytes of an archive, of the files in it, and most of these.
const MOST: u64 = 512 << 20;
const MOST_FILES: usize = 100_000;

/// Prepare a pod (started by the agent).
#[derive(clap::Args)]
pub struct Args {
    /// File or URL of the code's archive.
    #[arg(long, env = "EVENKEEL_CODE")]
    code: Option<String>,
    /// SHA-256 of the archive.
    #[arg(long, env = "EVENKEEL_CODE_SHA256", default_value = "")]
    sha256: String,
    /// Directory for the files.
    #[arg(long, env = "EVENKEEL_CODE_DIRECTORY", default_value = ".")]
    into: PathBuf,
    /// Shell command to run in it.
    #[arg(long, env = "EVENKEEL_SETUP")]
    command: Option<String>,
    /// Seconds that the command may take.
    #[arg(long, env = "EVENKEEL_SETUP_SECONDS", default_value_t = 3600)]
    seconds: u32,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(code) = args.code.as_deref().filter(|code| !code.is_empty()) {
        let archive = match read(code) {
            Ok(archive) => archive,
            // The ConfigMap or the bucket may come back.
            Err(error) => return Ok(try_again(error)),
        };
        let found = sha256(&archive);
        if found != args.sha256 {
            bail!(
                "{code} has the SHA-256 {found}, and the job was created for {}; launch it again",
                args.sha256
            );
        }
        if let Err(error) = unpack(&archive, &args.into) {
            if error.is::<TooLarge>() {
                return Err(error);
            }
            // The disk may have been full.
            return Ok(try_again(error));
        }
    }
    let Some(command) = args.command.filter(|command| !command.is_empty()) else {
        return Ok(ExitCode::SUCCESS);
    };
    run_shell(&command, &args.into, args.seconds)
}

/// Runs a shell command. Its output is this process's; the end of it is also in the error.
fn run_shell(command: &str, directory: &Path, seconds: u32) -> anyhow::Result<ExitCode> {
    let (output, writer) = std::io::pipe()?;
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", command])
        .current_dir(directory)
        .process_group(0)
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = shell
        .spawn()
        .context("cannot start /bin/sh for the setup command; the image needs a shell")?;
    // Its copies of the pipe's end are closed.
    drop(shell);
    let last: Arc<Mutex<VecDeque<String>>> = Arc::default();
    let kept = Arc::clone(&last);
    let reader = std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while matches!((&mut output).take(LINE).read_until(b'\n', &mut line), Ok(read) if read > 0)
        {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            println!("setup: {text}");
            let mut last = lock(&kept);
            last.push_back(text);
            if last.len() > LAST_LINES {
                last.pop_front();
            }
            line.clear();
        }
    });
    let ended = child::ended_within(&mut child, Duration::from_secs(seconds.into()))?;
    if ended.is_none() {
        // What it has started may be what hangs.
        kill_process_group(Pid::from_child(&child), Signal::KILL)?;
        child.wait()?;
    }
    // What the command has left running may keep the pipe open.
    let until = Instant::now() + DRAIN;
    while !reader.is_finished() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    if ended.is_some_and(|ended| ended.success()) {
        return Ok(ExitCode::SUCCESS);
    }
    let how = match ended {
        Some(ended) => format!("ended with {ended}"),
        None => format!("did not end within {seconds} s (spec.trainer.setupSeconds)"),
    };
    let last: Vec<String> = lock(&last).iter().cloned().collect();
    let last = last.join(" · ");
    // An index of packages may come back.
    Ok(try_again(anyhow!(
        "the setup command `{command}` {how}: {last}"
    )))
}

/// Reports an error that a later attempt may not have.
fn try_again(error: anyhow::Error) -> ExitCode {
    super::failed(&error);
    ExitCode::from(exit::TRY_AGAIN)
}

fn read(code: &str) -> anyhow::Result<Vec<u8>> {
    let mut archive = Vec::new();
    if !is_url(code) {
        let file = input::open(Path::new(code)).with_context(|| format!("cannot open {code}"))?;
        file.take(MOST).read_to_end(&mut archive)?;
        return Ok(archive);
    }
    let (place, name) = code
        .rsplit_once('/')
        .context("the URL of the code has no name")?;
    let bucket = Bucket::open(place)?;
    let found = bucket
        .object(name)?
        .with_context(|| format!("{code} does not exist"))?;
    let most = Object {
        bytes: found.bytes.min(MOST),
        ..found
    };
    bucket.download(&most, |piece| {
        archive.extend_from_slice(piece);
        true
    })?;
    Ok(archive)
}

/// Why an archive is not unpacked, in every pod.
#[derive(Debug, thiserror::Error)]
#[error(
    "the code has more than {} MiB or {MOST_FILES} files when it is unpacked; keep data and models out of the folder, on \
     the volume or in the bucket",
    MOST >> 20
)]
struct TooLarge;

/// Replaces the directory's content by the archive's.
fn unpack(archive: &[u8], into: &Path) -> anyhow::Result<()> {
    let cannot = || format!("cannot unpack the code into {}", into.display());
    fs::create_dir_all(into).with_context(cannot)?;
    for entry in fs::read_dir(into).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        let is_directory = path.symlink_metadata().is_ok_and(|about| about.is_dir());
        match is_directory {
            true => fs::remove_dir_all(&path),
            false => fs::remove_file(&path),
        }
        .with_context(cannot)?;
    }
    // Headers count too, and the end of an archive may be as long as its files.
    let limited = GzDecoder::new(archive).take(2 * MOST);
    let mut archive = tar::Archive::new(limited);
    let mut bytes = 0u64;
    for (number, entry) in archive.entries().with_context(cannot)?.enumerate() {
        let mut entry = entry.with_context(cannot)?;
        bytes = bytes.saturating_add(entry.size());
        if bytes > MOST || number >= MOST_FILES {
            return Err(TooLarge.into());
        }
        // It skips entries that leave the directory.
        if !entry.unpack_in(into).with_context(cannot)? {
            let name = entry.path().unwrap_or_default().display().to_string();
            bail!("{}: {name} leaves it", cannot());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::code;

    fn setup(code: &Path, sha256: &str, into: &Path, command: &str) -> anyhow::Result<ExitCode> {
        run(Args {
            code: Some(code.display().to_string()),
            sha256: sha256.to_owned(),
            into: into.to_path_buf(),
            command: Some(command.to_owned()),
            seconds: 2,
        })
    }

    #[test]
    fn only_the_archive_of_the_job_is_unpacked() {
        let place = tempfile::tempdir().unwrap();
        let (folder, into) = (place.path().join("folder"), place.path().join("into"));
        std::fs::create_dir_all(folder.join("scripts")).unwrap();
        std::fs::write(folder.join("scripts/sft.py"), "print()").unwrap();
        std::os::unix::fs::symlink("scripts", folder.join("link")).unwrap();
        let code = code::archive(&folder).unwrap();
        let archive = place.path().join("code.tar.gz");
        std::fs::write(&archive, &code.archive).unwrap();
        std::fs::create_dir_all(into.join("old")).unwrap();
        let done = setup(
            &archive,
            &code.sha256,
            &into,
            "cat link/sft.py > made; test ! -e old",
        )
        .unwrap();
        assert_eq!(done, ExitCode::SUCCESS);
        assert_eq!(
            std::fs::read_to_string(into.join("made")).unwrap(),
            "print()"
        );
        let failed = setup(
            &archive,
            &code.sha256,
            &into,
            "echo no such package; exit 3",
        )
        .unwrap();
        assert_eq!(failed, ExitCode::from(exit::TRY_AGAIN));
        // Neither a process that stays nor bytes that are no text hold it up.
        let done = setup(
            &archive,
            &code.sha256,
            &into,
            "sleep 60 & printf '\\377\\n'",
        )
        .unwrap();
        assert_eq!(done, ExitCode::SUCCESS);
        let hangs = setup(
            &archive,
            &code.sha256,
            &into,
            "echo waiting; sleep 60 | cat",
        )
        .unwrap();
        assert_eq!(hangs, ExitCode::from(exit::TRY_AGAIN));
        std::fs::write(&archive, "another").unwrap();
        let error = setup(&archive, &code.sha256, &into, "")
            .unwrap_err()
            .to_string();
        assert!(error.contains("and the job was created for"), "{error}");
        let missing = setup(&place.path().join("nothing"), &code.sha256, &into, "").unwrap();
        assert_eq!(missing, ExitCode::from(exit::TRY_AGAIN));
    }

    #[test]
    fn an_archive_that_grows_too_large_is_refused_before_it_fills_the_disk() {
        use std::io::Write;
        let place = tempfile::tempdir().unwrap();
        let into = place.path().join("into");
        let gzip = |write: &dyn Fn(&mut tar::Builder<&mut dyn Write>)| {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            write(&mut tar::Builder::new(&mut packed));
            packed.finish().unwrap()
        };
        // Zeros of 700 MiB have 713 KB as an archive.
        let zeros = gzip(&|archive| {
            let mut header = tar::Header::new_gnu();
            header.set_size(700 << 20);
            header.set_cksum();
            let zeros = std::io::repeat(0).take(700 << 20);
            archive.append_data(&mut header, "zeros", zeros).unwrap();
        });
        let error = unpack(&zeros, &into).unwrap_err();
        assert!(error.is::<TooLarge>(), "{error}");
        insta::assert_snapshot!(error.to_string(), @"the code has more than 512 MiB or 100000 files when it is unpacked; keep data and models out of the folder, on the volume or in the bucket");
        assert!(!into.join("zeros").exists());
    }

    #[test]
    fn an_archive_does_not_leave_its_directory() {
        let place = tempfile::tempdir().unwrap();
        let mut builder = tar::Builder::new(flate2::write::GzEncoder::new(
            Vec::new(),
            flate2::Compression::fast(),
        ));
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        // `append_data` would refuse the name.
        header.as_gnu_mut().unwrap().name[..9].copy_from_slice(b"../escape");
        header.set_cksum();
        builder.append(&header, &b"x"[..]).unwrap();
        let archive = builder.into_inner().unwrap().finish().unwrap();
        let into = place.path().join("into");
        unpack(&archive, &into).unwrap_err();
        assert!(!place.path().join("escape").exists());
    }
}
