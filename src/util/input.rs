//! Opening files whose paths come from someone else: a recipe, a run directory or a data source. A device, a
//! socket or a file of the kernel such as `/proc/kmsg` may block its reader forever or never end.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatfs};

use super::format;

/// The largest config that people write: a model's config.json, a chat template, bytes.
pub const CONFIG_BYTES: u64 = 4 << 20;
/// The largest file of state or indices that a program writes, bytes.
pub const STATE_BYTES: u64 = 64 << 20;

/// File systems of the kernel's own files, by `statfs(2)`: proc, sysfs, debugfs, tracefs. These files look
/// regular.
const KERNEL: [u64; 4] = [0x9fa0, 0x6265_6572, 0x6462_6720, 0x7472_6163];
/// The file system of pipes without a name, by `statfs(2)`.
const PIPES: u64 = 0x5049_5045;
/// Paths of files that this process has already open.
const OPENED: [&str; 3] = ["/dev/stdin", "/dev/fd", "/proc/self/fd"];

/// Opens a regular file for reading.
pub fn open(path: &Path) -> io::Result<File> {
    open_either(path, false)
}

/// As [`open`]; also opens a pipe that a shell has opened, `<(…)` or `/dev/stdin`. Other named pipes are
/// refused: their reader waits for a writer.
pub fn open_or_pipe(path: &Path) -> io::Result<File> {
    open_either(path, true)
}

/// The bytes of a regular file with at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let limit = format::bytes(limit);
        let message = format!("it has more than {limit}; check that this is the right file");
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    Ok(bytes)
}

/// The kind is checked after opening, so no other process can replace the file in between. Opening and
/// reading never wait for a pipe's writer or a device.
fn open_either(path: &Path, pipes: bool) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits();
    let opened = File::options()
        .read(true)
        .custom_flags(flags.cast_signed())
        .open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        // The error of opening a socket.
        Some(6) => refused("a socket"),
        _ => error,
    })?;
    let kind = file.metadata()?.file_type();
    let system = u64::try_from(fstatfs(&file)?.f_type).unwrap_or_default();
    if kind.is_file() && !KERNEL.contains(&system) {
        return Ok(file);
    }
    if kind.is_file() {
        return Err(refused("a file of the kernel"));
    }
    if kind.is_dir() {
        return Err(refused("a directory"));
    }
    if !kind.is_fifo() {
        return Err(refused("a device"));
    }
    if !pipes {
        return Err(refused("a pipe"));
    }
    if system != PIPES && !OPENED.iter().any(|opened| path.starts_with(opened)) {
        return Err(io::Error::other(
            "it is a named pipe (write `<(COMMAND)`, or read it as /dev/stdin)",
        ));
    }
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

fn refused(kind: &str) -> io::Error {
    io::Error::other(format!("it is {kind}, not a regular file"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn special_files_are_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let _socket = UnixListener::bind(at("socket")).unwrap();
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for (name, target) in [
            ("kernel", "/proc/self/environ"),
            ("sysfs", "/sys/kernel/uevent_seqnum"),
            ("zero", "/dev/zero"),
            ("folder", "/"),
        ] {
            symlink(target, at(name)).unwrap();
        }
        for (name, kind) in [
            ("socket", "a socket"),
            ("pipe", "a pipe"),
            ("kernel", "a file of the kernel"),
            ("sysfs", "a file of the kernel"),
            ("zero", "a device"),
            ("folder", "a directory"),
        ] {
            let error = read(&at(name), 9).unwrap_err().to_string();
            assert_eq!(error, format!("it is {kind}, not a regular file"), "{name}");
            let error = open_or_pipe(&at(name)).unwrap_err().to_string();
            assert!(error.starts_with("it is "), "{name}: {error}");
        }
    }

    #[test]
    fn open_pipes_are_read_to_their_end() {
        let (reader, mut writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let mut file = open_or_pipe(Path::new(&path)).unwrap();
        let written = std::thread::spawn(move || writer.write_all(&[b'x'; 1 << 20]));
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        written.join().unwrap().unwrap();
        assert_eq!(bytes.len(), 1 << 20);
    }

    #[test]
    fn sizes_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        insta::assert_snapshot!(
            read(&path, 4).unwrap_err(),
            @"it has more than 4 B; check that this is the right file"
        );
    }
}
