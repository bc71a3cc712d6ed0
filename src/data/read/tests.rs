//! Parquet files as other programs write them, and damaged ones.

use std::path::Path;
use std::sync::Arc;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use serde_json::json;

use super::super::kind::Kind;
use super::super::record::choose_columns;
use super::*;

const SCHEMA: &str = "message schema {
    optional int64 id;
    optional binary text (STRING);
    optional group messages (LIST) {
        repeated group list {
            optional group element {
                optional binary content (STRING);
                optional binary role (STRING);
            }
        }
    }
}";

/// Two row groups of the same three rows: two messages, an empty list, a null list.
fn write(path: &Path, compression: Compression) {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let bytes = |texts: &[&str]| {
        texts
            .iter()
            .map(|&text| ByteArray::from(text))
            .collect::<Vec<_>>()
    };
    for _ in 0..2 {
        let mut group = writer.next_row_group().unwrap();
        let mut number = 0;
        while let Some(mut column) = group.next_column().unwrap() {
            let written = match number {
                0 => column
                    .typed::<Int64Type>()
                    .write_batch(&[1, 2, 3], Some(&[1, 1, 1]), None),
                1 => column.typed::<ByteArrayType>().write_batch(
                    &bytes(&["one", "two"]),
                    Some(&[1, 1, 0]),
                    None,
                ),
                _ => {
                    let texts = if number == 2 {
                        ["Hi", "Yo"]
                    } else {
                        ["user", "assistant"]
                    };
                    column.typed::<ByteArrayType>().write_batch(
                        &bytes(&texts),
                        Some(&[4, 4, 1, 0]),
                        Some(&[0, 1, 0, 0]),
                    )
                }
            };
            assert!(written.unwrap() >= 2);
            column.close().unwrap();
            number += 1;
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn rows(path: &Path, columns: &[&str]) -> Result<Vec<Value>, DataError> {
    let columns: Vec<String> = columns.iter().map(|name| name.to_string()).collect();
    let file = std::fs::File::open(path).unwrap();
    let choose = |available: &[&str]| choose_columns(&columns, available, Kind::Text);
    parquet::open(path, file, &choose)?
        .map(|document| match document?.content {
            Content::Row(row) => Ok(Value::Object(row)),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn parquet_columns_are_read_in_every_compression() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.parquet");
    let chat = json!({"messages": [{"content": "Hi", "role": "user"},
                                   {"content": "Yo", "role": "assistant"}]});
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::ZSTD(ZstdLevel::default()),
    ] {
        write(&path, compression);
        assert_eq!(
            parquet::rows(&path, std::fs::File::open(&path).unwrap()).unwrap(),
            6
        );
        let read = rows(&path, &[]).unwrap();
        let group = [
            chat.clone(),
            json!({"messages": []}),
            json!({"messages": null}),
        ];
        assert_eq!(read, [group.clone(), group].concat());
        let texts = rows(&path, &["text"]).unwrap();
        assert_eq!(
            texts[..3],
            [
                json!({"text": "one"}),
                json!({"text": "two"}),
                json!({"text": null})
            ]
        );
    }
    let error = rows(&path, &["body"]).unwrap_err().to_string();
    assert!(
        error.contains("it has no column body, but id, text, messages; name"),
        "{error}"
    );
}

#[test]
fn rows_are_counted_from_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.parquet");
    write(&path, Compression::SNAPPY);
    let choose = |available: &[&str]| choose_columns(&[], available, Kind::Text);
    let places: Vec<String> = parquet::open(&path, std::fs::File::open(&path).unwrap(), &choose)
        .unwrap()
        .map(|document| document.unwrap().place.to_string())
        .collect();
    assert!(places[0].ends_with("a.parquet: row 1") && places[5].ends_with("a.parquet: row 6"));
}

#[test]
fn a_damaged_parquet_file_is_an_error_and_never_a_panic() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.parquet");
    write(&path, Compression::SNAPPY);
    let whole = std::fs::read(&path).unwrap();
    let (mut tried, mut errors) = (0, 0);
    for at in (0..whole.len()).step_by(13) {
        tried += 1;
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        std::fs::write(&path, damaged).unwrap();
        errors += usize::from(rows(&path, &[]).is_err());
    }
    for length in (0..whole.len()).step_by(61) {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(rows(&path, &[]).is_err(), "{length} bytes");
    }
    // Many bytes belong to unused columns, or to texts.
    assert!(errors > tried / 4, "{errors} of {tried}");
}
