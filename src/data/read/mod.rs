//! Readers: one file per format, all with the same stream of documents as output.

mod bin;
mod jsonl;
mod lines;
mod parquet;
mod text;

use serde_json::{Map, Value};

use super::error::{DataError, RecordPosition};
use super::files::SourceFile;
use super::request::{Stopped, check_stopped};
use crate::recipe::schema::spec::DataFormat;

pub(super) use self::bin::Ids;
pub(super) use self::jsonl::parse as parse_json;

/// Least bytes of a piece of a text stream or a token file.
const SEGMENT: usize = 64 << 10;

/// A piece of a source, not yet parsed: parsing runs in parallel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Document {
    /// Position of its beginning.
    pub place: RecordPosition,
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

pub(super) type Documents = Box<dyn Iterator<Item = Result<Document, DataError>>>;

/// Settings of the readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    /// Whether a text file is one document instead of one per block.
    pub packing: bool,
    /// Ids of `.bin` files that do not state their size.
    pub ids: Ids,
}

/// Opens a file. `columns` are those that the recipe names.
pub(super) fn open(
    file: &SourceFile,
    columns: &[String],
    reading: Reading,
    stopped: Stopped<'_>,
) -> Result<Documents, DataError> {
    let path = file.fetch(stopped)?;
    let documents = match file.format {
        DataFormat::Jsonl => jsonl::open(&path),
        DataFormat::Parquet => parquet::open(&path, columns),
        DataFormat::Text if reading.packing => text::stream(&path),
        DataFormat::Text => text::blocks(&path),
        DataFormat::Bin => bin::open(&path, reading.ids),
    };
    // Messages name the object and not its copy.
    let shown = file.shown().to_path_buf();
    let documents = documents.map_err(|error| error.at(&shown))?;
    Ok(Box::new(documents.map(move |document| {
        let mut document = document.map_err(|error| error.at(&shown))?;
        document.place.path.clone_from(&shown);
        Ok(document)
    })))
}

/// Counts the documents of a file.
pub(super) fn count(
    file: &SourceFile,
    reading: Reading,
    stopped: Stopped<'_>,
) -> Result<u64, DataError> {
    if file.format == DataFormat::Parquet {
        return parquet::rows(&file.fetch(stopped)?).map_err(|error| error.at(file.shown()));
    }
    let mut documents = 0;
    for document in open(file, &[], reading, stopped)? {
        check_stopped(stopped)?;
        document?;
        documents += 1;
    }
    Ok(documents)
}

#[cfg(test)]
mod tests;
