//! Apache Parquet: text columns, and lists of structures for messages.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::super::error::DataError;
use super::{Choose, Content, Document, Documents};

/// The number of rows of a file, from its footer.
pub(super) fn rows(name: &Path, file: File) -> Result<u64, DataError> {
    let reader = guarded(|| SerializedFileReader::new(file));
    Ok(rows_of(&reader.map_err(|error| damaged(name, &error))?))
}

fn rows_of(reader: &SerializedFileReader<File>) -> u64 {
    let rows = reader.metadata().file_metadata().num_rows();
    u64::try_from(rows).unwrap_or(0)
}

/// Reads only the required columns.
pub(super) fn open(name: &Path, file: File, choose: Choose<'_>) -> Result<Documents, DataError> {
    let failed = |error| damaged(name, &error);
    let size = file
        .metadata()
        .map_err(|error| DataError::read(name, error))?;
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(failed)?;
    let total = rows_of(&reader);
    let bytes = size.len() / total.max(1);
    let schema = reader.metadata().file_metadata().schema().clone();
    let fields = schema.get_fields();
    let available: Vec<&str> = fields.iter().map(|field| field.name()).collect();
    let columns =
        choose(&available).map_err(|fault| DataError::source(name, fault.problem, fault.help))?;
    let is_wanted = |field: &str| columns.iter().any(|name| name == field);
    let wanted = fields.iter().filter(|field| is_wanted(field.name()));
    let projection = Type::group_type_builder(schema.name())
        .with_fields(wanted.cloned().collect())
        .build();
    let mut rows = projection
        .and_then(|projection| {
            guarded(|| RowIter::from_file_into(Box::new(reader)).project(Some(projection)))
        })
        .map_err(failed)?;
    let name = name.to_path_buf();
    let mut numbers = 1..total + 1;
    Ok(Box::new(std::iter::from_fn(move || {
        let number = numbers.next()?;
        let document = match guarded(|| rows.next().transpose()) {
            Ok(Some(row)) => {
                let place = format!("{}: row {number}", name.display());
                document(row, place, bytes)
            }
            Ok(None) => Err(DataError::source(
                &name,
                format!("it ends after {} of {total} rows", number - 1),
                "write or download it again",
            )),
            Err(error) => Err(damaged(&name, &error)),
        };
        if document.is_err() {
            // Nothing follows an error.
            numbers = 0..0;
        }
        Some(document)
    })))
}

/// Turns panics into errors: the library asserts properties of files that a damaged one violates.
fn guarded<T>(read: impl FnOnce() -> ParquetResult<T>) -> ParquetResult<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        let problem = "its columns contradict one another".to_string();
        Err(ParquetError::General(problem))
    })
}

fn damaged(name: &Path, error: &ParquetError) -> DataError {
    DataError::source(
        name,
        format!("it cannot be read as Parquet: {error}"),
        "write or download it again",
    )
}

fn document(row: Row, place: String, bytes: u64) -> Result<Document, DataError> {
    let mut content = Map::new();
    for (name, field) in row.into_columns() {
        let value = value(field).map_err(|kind| {
            DataError::record(
                &place,
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
        bytes,
    })
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
        _ => return Err("a date or time"),
    })
}
