//! XXH3-128 checksums: they detect accidents, at memory speed. They do not protect against a forged file with
//! a matching checksum.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::util::hex128::{self, NoChecksum};

/// Bytes that are read or written and hashed at a time: few enough for the processor's caches. Also, page
/// caches with large folios have been seen to take writes of 1 MiB and more to new files many times slower
/// than such pieces (Linux 6.18, ext4: 0.7 s against 0.1 s for 96 MB).
pub(super) const PIECE: usize = 128 << 10;

/// An XXH3-128 as 32 hexadecimal digits (the format of `xxh128sum`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Checksum(#[serde(with = "hex128")] u128);

/// Size and checksum of a file; every read of the file checks them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Size of the file, in bytes.
    pub bytes: u64,
    /// Checksum of the whole file.
    pub xxh3_128: Checksum,
}

impl Checksum {
    /// The checksum of bytes in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_128(bytes))
    }
}

impl FileEntry {
    /// The entry of a file with these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        FileEntry {
            bytes: bytes.len() as u64,
            xxh3_128: Checksum::of(bytes),
        }
    }

    /// The entry of a file with the content of a stream, which is read to its end.
    pub fn of_stream(mut stream: impl Read) -> io::Result<Self> {
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; PIECE];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(hasher.finish()),
                Ok(read) => hasher.update(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// An incremental checksum with the length so far.
#[derive(Default)]
pub(super) struct Hasher {
    state: Box<Xxh3>,
    bytes: u64,
}

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        self.state.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// The entry of a file with all bytes so far.
    pub fn finish(self) -> FileEntry {
        FileEntry {
            bytes: self.bytes,
            xxh3_128: Checksum(self.state.digest128()),
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for Checksum {
    type Err = NoChecksum;

    fn from_str(text: &str) -> Result<Self, NoChecksum> {
        hex128::parse(text).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_pieces_and_whole_have_the_same_checksum() {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let whole = FileEntry::of(&bytes);
        assert_eq!(whole.bytes, 3_000_000);
        assert_eq!(FileEntry::of_stream(&bytes[..]).unwrap(), whole);
        let mut hasher = Hasher::default();
        bytes.chunks(1013).for_each(|piece| hasher.update(piece));
        assert_eq!(hasher.finish(), whole);
    }

    #[test]
    fn text_form_matches_xxh128sum_and_reads_back() {
        // The published XXH3-128 of an empty input with seed 0.
        let empty = Checksum::of(b"");
        assert_eq!(empty.to_string(), "99aa06d3014798d86001c324468d497f");
        assert_eq!(empty.to_string().parse(), Ok(empty));
        for wrong in ["", "99aa", "+9aa06d3014798d86001c324468d497f"] {
            assert!(wrong.parse::<Checksum>().is_err(), "{wrong}");
        }
    }
}
