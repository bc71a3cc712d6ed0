//! Ready-made token ids: consecutive little-endian integers.
//!
//! Three kinds exist. llm.c's files begin with 256 32-bit integers (20240520, version 1: ids of 16 bits;
//! 20240801, version 7: ids of 32 bits; then the count). A file name `….u16.bin` or `….u32.bin` states the
//! size. Any other file holds plain ids in nanoGPT's format, of 16 bits unless the vocabulary has more than
//! 65536.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use super::super::error::{DataError, RecordPosition, Unit};
use super::{Content, Document, Documents, SEGMENT};
use crate::util::input;

/// Bytes of llm.c's header.
const HEADER: u64 = 1024;
/// Bytes that are checked for ids wider than assumed.
const SAMPLE: usize = 4096;

/// The allowed ids of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) struct Ids {
    /// Ids are below this.
    pub vocabulary_size: u64,
}

pub(super) fn open(path: &Path, ids: Ids) -> Result<Documents, DataError> {
    let failed = |error| DataError::read(path, error);
    let file = input::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let mut file = BufReader::with_capacity(1 << 20, file);
    let mut start = Vec::new();
    (&mut file)
        .take(SAMPLE as u64)
        .read_to_end(&mut start)
        .map_err(failed)?;
    let (width, header) = layout(path, size, &start, ids)?;
    let bytes = size - header;
    if bytes % width != 0 {
        return Err(DataError::source(
            path,
            format!("{bytes} bytes are not a whole number of ids of {width} bytes"),
            "it was cut off, or its ids are of another size: end its name in .u16.bin or .u32.bin",
        ));
    }
    let start = start.split_off((header as usize).min(start.len()));
    Ok(Box::new(Segments {
        path: path.to_path_buf(),
        file: std::io::Cursor::new(start).chain(file),
        at: header,
        size,
        width,
        ids,
        continues: false,
    }))
}

/// Bytes of an id, and of the header before the first.
fn layout(path: &Path, size: u64, start: &[u8], ids: Ids) -> Result<(u64, u64), DataError> {
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
                path,
                format!("its header says {expected} bytes, it has {size}"),
                "write or download it again",
            ));
        }
        return Ok((width, HEADER));
    }
    let name = path.to_string_lossy();
    if name.ends_with(".u32.bin") || ids.vocabulary_size > 1 << 16 {
        return Ok((4, 0));
    }
    let padded = start.len() >= 64 && start.chunks_exact(4).all(|id| id[2..] == [0, 0]);
    if padded && !name.ends_with(".u16.bin") {
        return Err(DataError::source(
            path,
            "every second id of 16 bits is 0, so its ids probably have 32",
            "end its name in .u32.bin (or in .u16.bin if that is meant)",
        ));
    }
    Ok((2, 0))
}

struct Segments<R> {
    path: PathBuf,
    file: R,
    at: u64,
    size: u64,
    width: u64,
    ids: Ids,
    continues: bool,
}

impl<R: Read> Segments<R> {
    fn segment(&mut self) -> Result<Document, DataError> {
        let place = |number| RecordPosition {
            path: self.path.clone(),
            unit: Unit::Byte,
            number,
        };
        let length = (self.size - self.at).min(SEGMENT as u64);
        let mut bytes = vec![0; length as usize];
        self.file
            .read_exact(&mut bytes)
            .map_err(|error| DataError::read(&self.path, error))?;
        let mut ids = Vec::with_capacity(bytes.len() / self.width as usize);
        for (i, bytes) in bytes.chunks_exact(self.width as usize).enumerate() {
            let id = bytes
                .iter()
                .rev()
                .fold(0u32, |id, &byte| id << 8 | u32::from(byte));
            if u64::from(id) >= self.ids.vocabulary_size {
                return Err(DataError::record(
                    place(self.at + i as u64 * self.width),
                    format!(
                        "the id {id}, the vocabulary has {}",
                        self.ids.vocabulary_size
                    ),
                    "set vocab_size to that of the model the ids were made for, or end the file's \
                     name in .u16.bin or .u32.bin if its ids are of another size",
                ));
            }
            ids.push(id);
        }
        let document = Document {
            place: place(self.at),
            content: Content::Ids(ids),
            continues: std::mem::replace(&mut self.continues, true),
            bytes: length,
        };
        self.at += length;
        Ok(document)
    }
}

impl<R: Read> Iterator for Segments<R> {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.size {
            return None;
        }
        let segment = self.segment();
        if segment.is_err() {
            self.at = self.size;
        }
        Some(segment)
    }
}
