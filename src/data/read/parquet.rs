//! Apache Parquet: text columns, and lists of structures for messages.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::super::error::{DataError, RecordPosition, Unit};
use super::super::record::Columns;
use super::{Content, Document, Documents};
use crate::util::input;

/// The number of rows of a file, from its footer.
pub(super) fn rows(path: &Path) -> Result<u64, DataError> {
    Ok(rows_of(&reader(path)?))
}

fn rows_of(reader: &SerializedFileReader<File>) -> u64 {
    let rows = reader.metadata().file_metadata().num_rows();
    u64::try_from(rows).unwrap_or(0)
}

/// Reads only the required columns.
pub(super) fn open(path: &Path, listed: &[String]) -> Result<Documents, DataError> {
    let reader = reader(path)?;
    let total = rows_of(&reader);
    let size = std::fs::metadata(path)
        .map_err(|error| DataError::read(path, error))?
        .len();
    let schema = reader.metadata().file_metadata().schema().clone();
    let available: Vec<&str> = schema
        .get_fields()
        .iter()
        .map(|field| field.name())
        .collect();
    let columns = Columns::choose(listed, &available)
        .map_err(|fault| DataError::source(path, fault.problem, fault.help))?;
    let wanted: Vec<Arc<Type>> = schema
        .get_fields()
        .iter()
        .filter(|field| columns.names().any(|name| name == field.name()))
        .cloned()
        .collect();
    let projection = Type::group_type_builder(schema.name())
        .with_fields(wanted)
        .build();
    let rows = projection
        .and_then(|projection| {
            guarded(|| RowIter::from_file_into(Box::new(reader)).project(Some(projection)))
        })
        .map_err(|error| damaged(path, &error))?;
    Ok(Box::new(Rows {
        path: path.to_path_buf(),
        rows,
        number: 0,
        total,
        bytes: size / total.max(1),
        failed: false,
    }))
}

fn reader(path: &Path) -> Result<SerializedFileReader<File>, DataError> {
    let file = input::open(path).map_err(|error| DataError::read(path, error))?;
    guarded(|| SerializedFileReader::new(file)).map_err(|error| damaged(path, &error))
}

/// Turns panics into errors: the library asserts properties of files that a damaged one violates.
fn guarded<T>(read: impl FnOnce() -> parquet::errors::Result<T>) -> parquet::errors::Result<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err(parquet::errors::ParquetError::General(
            "its columns contradict one another".to_string(),
        ))
    })
}

fn damaged(path: &Path, error: &parquet::errors::ParquetError) -> DataError {
    DataError::source(
        path,
        format!("it cannot be read as Parquet: {error}"),
        "write or download it again",
    )
}

struct Rows {
    path: PathBuf,
    rows: RowIter<'static>,
    number: u64,
    total: u64,
    bytes: u64,
    failed: bool,
}

impl Rows {
    fn document(&mut self, row: Row) -> Result<Document, DataError> {
        let place = RecordPosition {
            path: self.path.clone(),
            unit: Unit::Row,
            number: self.number,
        };
        let mut content = Map::new();
        for (name, field) in row.into_columns() {
            let value = value(field).map_err(|kind| {
                DataError::record(
                    place.clone(),
                    format!("column {name} holds {kind}"),
                    "name a column of texts, or of lists of messages, in the source's columns",
                )
            })?;
            content.insert(name, value);
        }
        Ok(Document {
            place,
            content: Content::Row(content),
            continues: false,
            bytes: self.bytes,
        })
    }
}

impl Iterator for Rows {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.number == self.total {
            return None;
        }
        self.number += 1;
        let rows = &mut self.rows;
        let row = guarded(|| rows.next().transpose());
        let document = match row {
            Ok(Some(row)) => self.document(row),
            Ok(None) => {
                let problem = format!("it ends after {} of {} rows", self.number - 1, self.total);
                Err(DataError::source(
                    &self.path,
                    problem,
                    "write or download it again",
                ))
            }
            Err(error) => Err(damaged(&self.path, &error)),
        };
        self.failed = document.is_err();
        Some(document)
    }
}

/// A field as JSON, or the name of a type that text cannot represent.
fn value(field: Field) -> Result<Value, &'static str> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(it) => it.into(),
        Field::Byte(it) => it.into(),
        Field::Short(it) => it.into(),
        Field::Int(it) => it.into(),
        Field::Long(it) => it.into(),
        Field::UByte(it) => it.into(),
        Field::UShort(it) => it.into(),
        Field::UInt(it) => it.into(),
        Field::ULong(it) => it.into(),
        Field::Float(it) => it.into(),
        Field::Double(it) => it.into(),
        Field::Str(it) => it.into(),
        // Some writers omit the annotation for text.
        Field::Bytes(it) => String::from_utf8(it.data().to_vec())
            .map_err(|_| "bytes that are no text")?
            .into(),
        Field::Group(row) => row
            .into_columns()
            .into_iter()
            .map(|(name, field)| Ok((name, value(field)?)))
            .collect::<Result<Map<_, _>, &'static str>>()?
            .into(),
        Field::ListInternal(list) => list
            .elements()
            .iter()
            .map(|field| value(field.clone()))
            .collect::<Result<Vec<_>, &'static str>>()?
            .into(),
        Field::MapInternal(_) => return Err("a map"),
        Field::Decimal(_) => return Err("a decimal number"),
        Field::Float16(_) => return Err("a 16-bit number"),
        Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => return Err("a date or time"),
    })
}
