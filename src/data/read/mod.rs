//! Readers: one for each format, all with the same stream of documents as output.

mod array;
mod bin;
mod lines;
mod parquet;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::read::MultiGzDecoder;
use serde_json::{Map, Value};

use super::error::DataError;
use super::files::SourceFile;
use super::names::is_packed;
use super::record::{Fault, parse_json};
use super::request::{Stopped, check_stopped};
use crate::recipe::schema::spec::DataFormat;
use crate::util::input;

/// Least bytes of a piece of a text stream or a token file.
const SEGMENT: usize = 64 << 10;

/// A piece of a source, not yet parsed: parsing runs in parallel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Document {
    /// Position of its beginning, for messages: `a.jsonl:2`, `a.parquet: row 2` or `a.bin: byte 2048`.
    pub place: String,
    pub content: Content,
    /// Whether it continues the piece before it: a later piece of a stream.
    pub continues: bool,
    /// Bytes of the source that it covers.
    pub bytes: u64,
}

/// The content of a document.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// A line of JSON.
    Json(String),
    /// A row of a table.
    Row(Map<String, Value>),
    Text(String),
    Ids(Vec<u32>),
}

impl Content {
    /// The row of a line or a table.
    pub fn row(&self) -> Result<Map<String, Value>, Fault> {
        match self {
            Content::Json(line) => parse_json(line),
            Content::Row(row) => Ok(row.clone()),
            Content::Text(_) | Content::Ids(_) => Err(Fault::new(
                "prompts and completions are rows with columns",
                "give JSONL or Parquet",
            )),
        }
    }
}

/// The bytes of a file of lines.
type Bytes = Box<dyn Read>;

pub(super) type Documents = Box<dyn Iterator<Item = Result<Document, DataError>>>;

/// Settings of the readers.
#[derive(Clone, Copy)]
pub(super) struct Reading<'a> {
    /// Whether a text file is one document instead of one per block.
    pub packing: bool,
    /// Ids of `.bin` files are below this.
    pub vocabulary_size: u64,
    pub stopped: Stopped<'a>,
}

/// Chooses the columns to read among those of a table.
pub(super) type Choose<'a> = &'a dyn Fn(&[&str]) -> Result<Vec<String>, Fault>;

/// Opens a file. Messages name an object and not its copy.
pub(super) fn open(
    file: &SourceFile,
    choose: Choose<'_>,
    reading: Reading<'_>,
) -> Result<Documents, DataError> {
    let path = file.fetch(reading.stopped)?;
    let opened = input::open(&path).map_err(|error| DataError::read(&path, error))?;
    let name = file.shown();
    match file.format {
        DataFormat::Jsonl => {
            let mut opened = lines::buffered(unpacked(name, opened));
            Ok(match array::begins(name, &mut opened)? {
                true => Box::new(array::Objects::of(name, opened)),
                false => lines::jsonl(name, opened),
            })
        }
        DataFormat::Parquet => parquet::open(name, opened, choose),
        DataFormat::Text if reading.packing => Ok(lines::stream(name, unpacked(name, opened))),
        DataFormat::Text => Ok(lines::blocks(name, unpacked(name, opened))),
        DataFormat::Bin => bin::open(name, opened, reading.vocabulary_size),
    }
}

fn unpacked(name: &Path, file: File) -> Bytes {
    if is_packed(name) {
        Box::new(MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    }
}

/// Counts the documents of a file.
pub(super) fn count(file: &SourceFile, reading: Reading<'_>) -> Result<u64, DataError> {
    if file.format == DataFormat::Parquet {
        let path = file.fetch(reading.stopped)?;
        let opened = input::open(&path).map_err(|error| DataError::read(&path, error))?;
        return parquet::rows(file.shown(), opened);
    }
    let mut documents = 0;
    for document in open(file, &|_| Ok(Vec::new()), reading)? {
        check_stopped(reading.stopped)?;
        document?;
        documents += 1;
    }
    Ok(documents)
}

#[cfg(test)]
mod tests;
