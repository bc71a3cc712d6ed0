//! Files to and from a bucket, in parts of bounded memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use object_store::{GetOptions, MultipartUpload, ObjectStore, ObjectStoreExt};

use super::{Bucket, BucketError, Cause, Object};

/// Bytes of a part. S3 takes parts from 5 MiB.
pub(super) const PART: u64 = 8 << 20;
/// Most parts of an S3 object.
const PARTS: u64 = 10_000;
/// Parts in memory at a time: 4 × 8 MiB.
const AT_ONCE: usize = 4;

impl Bucket {
    /// Writes a file as an object, which becomes visible when all its bytes are there.
    pub fn upload(&self, file: &Path, key: &str) -> Result<(), BucketError> {
        let local = |error: io::Error| {
            let message = format!("{}: {error}", file.display());
            BucketError::new("write", &self.url(key), Cause::Disk, message)
        };
        let mut opened = File::open(file).map_err(local)?;
        let size = opened.metadata().map_err(local)?.len();
        if size <= PART {
            let mut bytes = Vec::with_capacity(size as usize);
            opened.read_to_end(&mut bytes).map_err(local)?;
            return self.put(key, bytes);
        }
        let path = self.path(key);
        let failed = self.failed("write", key);
        let begun = self.runtime.block_on(self.store.put_multipart(&path));
        let mut upload = begun.map_err(&failed)?;
        let part = PART.max(size.div_ceil(PARTS));
        let sent = self.runtime.block_on(async {
            let mut under_way = stream::FuturesUnordered::new();
            for from in (0..size).step_by(part as usize) {
                if under_way.len() == AT_ONCE {
                    let sent: Option<()> = under_way.try_next().await.map_err(&failed)?;
                    debug_assert!(sent.is_some());
                }
                let mut bytes = vec![0; part.min(size - from) as usize];
                opened.read_exact_at(&mut bytes, from).map_err(local)?;
                under_way.push(upload.put_part(bytes.into()));
            }
            under_way.try_collect::<()>().await.map_err(&failed)
        });
        match sent {
            Ok(()) => (self.runtime.block_on(upload.complete()).map(drop)).map_err(failed),
            Err(error) => {
                // A rule of the bucket may remove unfinished uploads too.
                let _ = self.runtime.block_on(upload.abort());
                Err(error)
            }
        }
    }

    /// Reads an object in order. Gives each piece to `sink`, until it returns false.
    ///
    /// # Errors
    /// [`Cause::Changed`] if the object has another version.
    pub fn download(
        &self,
        object: &Object,
        sink: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), BucketError> {
        self.read(&self.path(&object.key), object, sink)
    }

    /// [`Self::download`] of an object at this path.
    pub(super) fn read(
        &self,
        path: &object_store::path::Path,
        object: &Object,
        mut sink: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), BucketError> {
        let Object { key, bytes, .. } = object;
        let ranges = (0..bytes.div_ceil(PART))
            .map(|number| number * PART..*bytes.min(&((number + 1) * PART)));
        let pieces = stream::iter(ranges).map(|range| {
            let (store, path) = (Arc::clone(&self.store), path.clone());
            let options = GetOptions {
                if_match: object.etag.clone(),
                range: Some(range.into()),
                ..GetOptions::default()
            };
            self.runtime
                .spawn(async move { store.get_opts(&path, options).await?.bytes().await })
        });
        let mut pieces = std::pin::pin!(pieces.buffered(AT_ONCE));
        while let Some(piece) = self.runtime.block_on(pieces.next()) {
            let piece = piece.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
            let piece = piece.map_err(self.failed("read", key))?;
            if !sink(&piece) {
                break;
            }
        }
        Ok(())
    }
}
