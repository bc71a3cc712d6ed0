//! Reads objects that other programs have written, by their keys as they are. The keys that [`Bucket`] writes are encoded.

use futures::TryStreamExt;
use object_store::ObjectStore;
use object_store::path::Path;

use super::{Bucket, BucketError, Object};

/// A bucket of other programs.
#[derive(Debug, Clone)]
pub struct Reader(pub(super) Bucket);

/// Splits `s3://BUCKET/KEY`, `gs://BUCKET/KEY` or `az://CONTAINER/KEY` into the bucket's URL and the key, as it is.
pub fn split(url: &str) -> Result<(&str, &str), BucketError> {
    let after_scheme = ["s3://", "gs://", "az://"]
        .iter()
        .find_map(|scheme| url.strip_prefix(scheme));
    let Some(rest) = after_scheme.filter(|rest| !rest.is_empty() && !rest.starts_with('/')) else {
        let message = "it begins with none of s3://, gs:// and az://, or has no bucket";
        return Err(BucketError::invalid(url, message.to_owned()));
    };
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    let scheme = url.len() - rest.len();
    Ok((&url[..scheme + bucket.len()], key))
}

impl Reader {
    /// A reader of the bucket with this URL. See [`Bucket::open`] for credentials.
    pub fn open(url: &str) -> Result<Reader, BucketError> {
        Ok(Reader(Bucket::open(url)?))
    }

    /// The URL of a key.
    pub fn url(&self, key: &str) -> String {
        self.0.url(key)
    }

    /// Which object this is, whatever the spelling of its URL.
    pub fn identity(&self, object: &Object) -> String {
        format!("{}/{}", self.0.store, object.key)
    }

    /// The object of a key, if there is one.
    pub fn object(&self, key: &str) -> Result<Option<Object>, BucketError> {
        self.0.object_at(&self.path(key)?, key)
    }

    /// Gives the objects below a prefix to `sink`, until it returns false. Empty objects that mark directories are left
    /// out: the prefix itself, and names without an extension.
    pub fn list(
        &self,
        prefix: &str,
        mut sink: impl FnMut(Object) -> bool,
    ) -> Result<(), BucketError> {
        let path = self.path(prefix)?;
        let mut found = self.0.store.list(Some(&path));
        let mut next = || self.0.runtime.block_on(found.try_next());
        while let Some(about) = next().map_err(self.0.failed("list", prefix))? {
            // The library has removed the slash at the end of a marker's key.
            let is_marker =
                about.size == 0 && (about.location == path || about.location.extension().is_none());
            let key = about.location.to_string();
            if !is_marker && !sink(Object::found(&key, about)) {
                break;
            }
        }
        Ok(())
    }

    /// [`Bucket::download`] by the key as it is.
    pub fn download(
        &self,
        object: &Object,
        sink: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), BucketError> {
        self.0.read(&self.path(&object.key)?, object, sink)
    }

    pub(super) fn path(&self, key: &str) -> Result<Path, BucketError> {
        let parsed = Path::parse(key);
        parsed.map_err(|source| self.0.failed("read", key)(source.into()))
    }
}
