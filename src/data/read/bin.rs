//! Ready-made token ids: consecutive little-endian integers.
//!
//! Three kinds exist. llm.c's files begin with 256 32-bit integers (20240520, version 1: ids of 16 bits;
//! 20240801, version 7: ids of 32 bits; then the count). A file name `….u16.bin` or `….u32.bin` states the
//! size. Any other file holds plain ids in nanoGPT's format, of 16 bits unless the vocabulary has more than
//! 65536.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::super::error::DataError;
use super::{Content, Document, Documents, SEGMENT};

/// Bytes of llm.c's header.
const HEADER: u64 = 1024;
/// Bytes that are checked for ids wider than assumed.
const SAMPLE: u64 = 4096;

/// Opens a file of ids below `vocabulary_size`.
pub(super) fn open(name: &Path, file: File, vocabulary_size: u64) -> Result<Documents, DataError> {
    let failed = |error| DataError::read(name, error);
    let size = file.metadata().map_err(failed)?.len();
    let mut start = vec![0; size.min(SAMPLE) as usize];
    file.read_exact_at(&mut start, 0).map_err(failed)?;
    let (width, header) = layout(name, size, &start, vocabulary_size)?;
    let bytes = size - header;
    if bytes % width != 0 {
        return Err(DataError::source(
            name,
            format!("{bytes} bytes are not a whole number of ids of {width} bytes"),
            "it was cut off, or its ids are of another size: end its name in .u16.bin or .u32.bin",
        ));
    }
    let ids = Ids {
        name: name.to_path_buf(),
        file,
        width,
        vocabulary_size,
    };
    let mut at = header;
    Ok(Box::new(std::iter::from_fn(move || {
        let length = (size - at).min(SEGMENT as u64);
        let segment = (length > 0).then(|| ids.segment(at, length, at > header));
        // Nothing follows an error.
        at = match segment {
            Some(Err(_)) => size,
            _ => at + length,
        };
        segment
    })))
}

/// Bytes of an id, and of the header before the first.
fn layout(
    name: &Path,
    size: u64,
    start: &[u8],
    vocabulary_size: u64,
) -> Result<(u64, u64), DataError> {
    let word = |i: usize| {
        let bytes = start.get(4 * i..4 * i + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let width = match (word(0), word(1)) {
        (Some(20_240_520), Some(1)) => Some(2),
        (Some(20_240_801), Some(7)) => Some(4),
        _ => None,
    };
    if let (Some(width), Some(count)) = (width, word(2)) {
        let expected = HEADER + u64::from(count) * width;
        if size != expected {
            return Err(DataError::source(
                name,
                format!("its header says {expected} bytes, it has {size}"),
                "write or download it again",
            ));
        }
        return Ok((width, HEADER));
    }
    let text = name.to_string_lossy();
    if text.ends_with(".u32.bin") || vocabulary_size > 1 << 16 {
        return Ok((4, 0));
    }
    let padded = start.len() >= 64 && start.chunks_exact(4).all(|id| id[2..] == [0, 0]);
    if padded && !text.ends_with(".u16.bin") {
        return Err(DataError::source(
            name,
            "every second id of 16 bits is 0, so its ids probably have 32",
            "end its name in .u32.bin (or in .u16.bin if that is meant)",
        ));
    }
    Ok((2, 0))
}

/// The ids of a file.
struct Ids {
    name: PathBuf,
    file: File,
    width: u64,
    vocabulary_size: u64,
}

impl Ids {
    /// The ids in the `length` bytes from `at` on.
    fn segment(&self, at: u64, length: u64, continues: bool) -> Result<Document, DataError> {
        let place = |byte| format!("{}: byte {byte}", self.name.display());
        let mut bytes = vec![0; length as usize];
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|error| DataError::read(&self.name, error))?;
        let mut ids = Vec::with_capacity(bytes.len() / self.width as usize);
        for (i, bytes) in bytes.chunks_exact(self.width as usize).enumerate() {
            let id = bytes
                .iter()
                .rev()
                .fold(0u32, |id, &byte| id << 8 | u32::from(byte));
            if u64::from(id) >= self.vocabulary_size {
                return Err(DataError::record(
                    &place(at + i as u64 * self.width),
                    format!("the id {id}, the vocabulary has {}", self.vocabulary_size),
                    "set vocab_size to that of the model the ids were made for, or end the file's \
                     name in .u16.bin or .u32.bin if its ids are of another size",
                ));
            }
            ids.push(id);
        }
        Ok(Document {
            place: place(at),
            content: Content::Ids(ids),
            continues,
            bytes: length,
        })
    }
}
