//! Readers: one file per format, all of them to the same stream of documents.

mod bin;
mod jsonl;
mod lines;
mod parquet;
mod text;

use serde_json::{Map, Value};

use super::error::{DataError, Place};
use super::files::SourceFile;
use super::request::{Stopped, go_on};
use crate::recipe::spec::DataFormat;

pub(super) use self::bin::Ids;
pub(super) use self::jsonl::parse as parse_json;

/// Text streams and token files are handed on in pieces of at least so many bytes.
const SEGMENT: usize = 64 << 10;

/// A piece of a source, not yet understood: that is done in parallel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Document {
    /// Where it begins.
    pub place: Place,
    /// What it holds.
    pub content: Content,
    /// It goes on where the one before it ended: a later piece of a stream.
    pub continues: bool,
    /// Bytes of the source that it stands for.
    pub bytes: u64,
}

/// What a document holds.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// A line of JSON.
    Json(String),
    /// A row of a table.
    Row(Map<String, Value>),
    /// Text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// A stream of documents.
pub(super) type Documents = Box<dyn Iterator<Item = Result<Document, DataError>>>;

/// How sources are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    /// Text files are one document each instead of one per block.
    pub packing: bool,
    /// Token ids of `.bin` files that say nothing themselves.
    pub ids: Ids,
}

/// Opens a file. `columns` are those that the recipe names.
pub(super) fn open(
    file: &SourceFile,
    columns: &[String],
    reading: Reading,
) -> Result<Documents, DataError> {
    match file.format {
        DataFormat::Jsonl => jsonl::open(&file.path),
        DataFormat::Parquet => parquet::open(&file.path, columns),
        DataFormat::Text if reading.packing => text::stream(&file.path),
        DataFormat::Text => text::blocks(&file.path),
        DataFormat::Bin => bin::open(&file.path, reading.ids),
    }
}

/// Documents of a file.
pub(super) fn count(
    file: &SourceFile,
    reading: Reading,
    stopped: Stopped<'_>,
) -> Result<u64, DataError> {
    if file.format == DataFormat::Parquet {
        return parquet::rows(&file.path);
    }
    let mut documents = 0;
    for document in open(file, &[], reading)? {
        go_on(stopped)?;
        document?;
        documents += 1;
    }
    Ok(documents)
}

#[cfg(test)]
mod tests;
