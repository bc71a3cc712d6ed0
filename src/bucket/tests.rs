//! A bucket in memory. `tests/endurance/bucket.rs` repeats the rules that matter on a real server.

use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;

use super::*;

impl Reader {
    /// A reader of the whole bucket with this prefix.
    pub fn of(bucket: Bucket) -> Reader {
        Reader(bucket)
    }

    /// Writes an object under the key as it is.
    pub fn put(&self, key: &str, bytes: &[u8]) -> Result<(), BucketError> {
        let path = self.path(key)?;
        let put = self.0.store.put(&path, bytes.to_vec().into());
        (self.0.runtime.block_on(put).map(drop)).map_err(self.0.failed("write", key))
    }
}

/// An empty bucket in memory.
pub fn in_memory() -> Bucket {
    Bucket::with_store(
        "s3://memory/run",
        Path::from("run"),
        Arc::new(InMemory::new()),
    )
    .unwrap()
}

#[test]
fn a_created_object_is_never_replaced() {
    let bucket = in_memory();
    bucket.create("manifest.json", b"one".to_vec()).unwrap();
    // The reply to the first request may have been lost.
    bucket.create("manifest.json", b"one".to_vec()).unwrap();
    let error = bucket.create("manifest.json", b"two".to_vec()).unwrap_err();
    assert_eq!(error.cause, Cause::Taken);
    assert_eq!(
        error.to_string(),
        "cannot write s3://memory/run/manifest.json: another writer was first: this one does not belong to the run \
         any more"
    );
    assert_eq!(bucket.get("manifest.json").unwrap().unwrap(), "one");
}

#[test]
fn keys_are_relative_to_the_prefix() {
    let bucket = in_memory();
    for key in [
        "gen-1/step-2/a",
        "gen-1/step-2/b",
        "gen-10/record.json",
        "run.json",
    ] {
        bucket.put(key, key.as_bytes().to_vec()).unwrap();
    }
    let keys = |prefix: &str| -> Vec<String> {
        let objects = bucket.list(prefix).unwrap();
        objects.into_iter().map(|object| object.key).collect()
    };
    assert_eq!(keys("gen-1"), ["gen-1/step-2/a", "gen-1/step-2/b"]);
    assert_eq!(keys("").len(), 4);
    assert_eq!(bucket.directories("").unwrap(), ["gen-1", "gen-10"]);
    assert_eq!(bucket.url("gen-1/x"), "s3://memory/run/gen-1/x");
    bucket.delete("run.json").unwrap();
    bucket.delete("run.json").unwrap();
    assert_eq!(bucket.get("run.json").unwrap(), None);
    let odd = "gen-2/a b#[é]%20~";
    bucket.put(odd, b"x".to_vec()).unwrap();
    assert_eq!(keys("gen-2"), [odd]);
    assert_eq!(bucket.get(odd).unwrap().unwrap(), "x");
    bucket.delete(odd).unwrap();
    assert_eq!(keys("gen-2"), [""; 0]);
}

#[test]
fn files_of_any_size_come_back_the_same() {
    let bucket = in_memory();
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("file");
    for size in [
        0,
        1,
        transfer::PART,
        transfer::PART + 1,
        3 * transfer::PART + 5,
    ] {
        let bytes: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        std::fs::write(&file, &bytes).unwrap();
        bucket.upload(&file, "file").unwrap();
        let mut read = Vec::new();
        let sink = |piece: &[u8]| {
            read.extend_from_slice(piece);
            true
        };
        bucket.download(&Object::of("file", size), sink).unwrap();
        assert!(read == bytes, "{size} bytes");
    }
    let nothing = Object::of("nothing", 5);
    let error = bucket.download(&nothing, |_| true).unwrap_err();
    assert_eq!(error.cause, Cause::Missing);
    let error = bucket
        .upload(&place.path().join("nothing"), "file")
        .unwrap_err();
    assert_eq!(error.cause, Cause::Disk);
}

#[test]
fn a_replaced_object_is_not_read_as_the_one_that_was_found() {
    let bucket = in_memory();
    bucket.put("data/x", b"one".to_vec()).unwrap();
    let found = bucket.object("data/x").unwrap().unwrap();
    assert_eq!(bucket.list("data").unwrap(), std::slice::from_ref(&found));
    bucket.download(&found, |piece| piece == b"one").unwrap();
    bucket.put("data/x", b"two".to_vec()).unwrap();
    let error = bucket.download(&found, |_| true).unwrap_err();
    assert_eq!(error.cause, Cause::Changed);
    assert_eq!(bucket.object("data/y").unwrap(), None);
}

#[test]
fn a_url_that_names_no_bucket_is_refused() {
    for url in ["s3://", "ftp://bucket/x", "file:///tmp", "http//x", "s3:/x"] {
        let error = Bucket::open_with(url, Environment::new()).unwrap_err();
        assert_eq!(error.cause, Cause::Url, "{url}: {error}");
    }
    for url in ["s3://bucket", "s3://bucket/a/b/", "gs://bucket/x"] {
        let bucket = Bucket::open_with(url, Environment::new()).unwrap();
        assert_eq!(bucket.base(), url.trim_end_matches('/'));
    }
}
