//! An object store as the home of a run: a bucket of Amazon S3 (or of a server that speaks its protocol), Google Cloud
//! Storage or Azure Blob Storage.
//!
//! All calls block. They retry what may succeed later: lost connections, throttling, errors of the server. A value
//! becomes visible with its last byte. [`Bucket::create`] is the only operation that decides between two writers.

mod access;
mod error;
mod reader;
mod transfer;

#[cfg(test)]
pub mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::{Path, PathPart};
use object_store::{
    BackoffConfig, ClientOptions, ObjectMeta, ObjectStore, ObjectStoreExt, ObjectStoreScheme,
    PutMode, PutOptions, RetryConfig,
};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::Runtime;

use crate::util::format::bytes;
use crate::util::{priority, tls};

pub use access::Environment;
pub use error::{BucketError, Cause};
pub use reader::{Reader, split};

/// Limit of one request. The parts of [`transfer::PART`] bytes that are under way at once need it on a connection of 560
/// kB/s.
const REQUEST: Duration = Duration::from_secs(60);
/// Time after which a request is not retried any more.
const RETRY: Duration = Duration::from_secs(20);
/// Time for which [`Bucket::patiently`] repeats an operation. It is below the shortest time after which a rank counts
/// as stalled.
const PATIENCE: Duration = Duration::from_secs(300);
/// Largest object that is read into memory at once.
const SMALL: u64 = 64 << 20;

/// A prefix of a bucket. Keys are relative to it.
#[derive(Clone)]
pub struct Bucket {
    url: String,
    prefix: Path,
    store: Arc<dyn ObjectStore>,
    runtime: Arc<Runtime>,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// An object below a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Relative to the [`Bucket`].
    pub key: String,
    pub bytes: u64,
    /// Its ETag, which changes with its content; `None` for any content.
    pub etag: Option<String>,
}

impl Object {
    /// An object with any content of this size.
    pub fn of(key: &str, bytes: u64) -> Object {
        Object {
            key: key.to_owned(),
            bytes,
            etag: None,
        }
    }

    fn found(key: &str, about: ObjectMeta) -> Object {
        Object {
            etag: about.e_tag.filter(|tag| !tag.is_empty()).map(quoted),
            ..Object::of(key, about.size)
        }
    }
}

/// An ETag as a header has it. Azure's listings have it without quotes.
fn quoted(etag: String) -> String {
    if etag.ends_with('"') {
        etag
    } else {
        format!("\"{etag}\"")
    }
}

/// Whether a path is the URL of a bucket.
pub fn is_url(path: &str) -> bool {
    path.contains("://")
}

fn parse(url: &str) -> Result<(ObjectStoreScheme, Path), BucketError> {
    let invalid = |why: String| BucketError::invalid(url, why);
    let parsed = reqwest::Url::parse(url).map_err(|error| invalid(error.to_string()))?;
    if parsed.query().or(parsed.fragment()).is_some() {
        return Err(invalid("`?` and `#` end the prefix of a URL".into()));
    }
    ObjectStoreScheme::parse(&parsed).map_err(|error| invalid(error.to_string()))
}

impl Bucket {
    /// A bucket by its URL: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. Credentials, region
    /// and endpoint come from the environment: the variables of each provider's own tools, with the identity of the
    /// pod or the machine if they are not set. Sends no request.
    pub fn open(url: &str) -> Result<Bucket, BucketError> {
        Bucket::open_with(url, access::with_profile(access::environment()))
    }

    /// [`Bucket::open`] with these variables.
    pub fn open_with(url: &str, environment: Environment) -> Result<Bucket, BucketError> {
        let (scheme, prefix) = parse(url)?;
        tls::use_ring();
        let retry = RetryConfig {
            backoff: BackoffConfig {
                init_backoff: Duration::from_millis(100),
                max_backoff: Duration::from_secs(5),
                base: 2.0,
            },
            max_retries: 20,
            retry_timeout: RETRY,
        };
        let endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
        let endpoint = endpoint.iter().find_map(|name| environment.get(*name));
        let client = ClientOptions::new()
            .with_timeout(REQUEST)
            .with_connect_timeout(Duration::from_secs(5))
            .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")));
        let client = access::with_certificates(client);
        // The builders have these methods in common, and no trait.
        macro_rules! store {
            ($builder:ident, $prefix:literal) => {{
                let mut builder = $builder::new();
                for (name, value) in &environment {
                    let name = name.to_ascii_lowercase();
                    if let (true, Ok(key)) = (name.starts_with($prefix), name.parse()) {
                        builder = builder.with_config(key, value);
                    }
                }
                let builder = builder
                    .with_url(url)
                    .with_retry(retry)
                    .with_client_options(client);
                builder
                    .build()
                    .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
            }};
        }
        let store = match scheme {
            ObjectStoreScheme::AmazonS3 => store!(AmazonS3Builder, "aws_"),
            ObjectStoreScheme::GoogleCloudStorage => store!(GoogleCloudStorageBuilder, "google_"),
            ObjectStoreScheme::MicrosoftAzure => store!(MicrosoftAzureBuilder, "azure_"),
            _ => {
                return Err(BucketError::invalid(
                    url,
                    "its scheme is none of s3, gs and az".into(),
                ));
            }
        };
        let store = store.map_err(|error| BucketError::settings(url, &error))?;
        Bucket::with_store(url, prefix, store)
    }

    fn with_store(
        url: &str,
        prefix: Path,
        store: Arc<dyn ObjectStore>,
    ) -> Result<Bucket, BucketError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("bucket")
            .on_thread_start(priority::lower)
            .enable_all()
            .build()
            .map_err(|error| BucketError::invalid(url, error.to_string()))?;
        Ok(Bucket {
            url: url.trim_end_matches('/').to_owned(),
            prefix,
            store,
            runtime: Arc::new(runtime),
        })
    }

    /// The URL of the prefix.
    pub fn base(&self) -> &str {
        &self.url
    }

    /// The URL of a key.
    pub fn url(&self, key: &str) -> String {
        match key {
            "" => self.url.clone(),
            key => format!("{}/{key}", self.url),
        }
    }

    fn path(&self, key: &str) -> Path {
        let parts = key.split('/').filter(|part| !part.is_empty());
        parts.fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn failed(
        &self,
        doing: &'static str,
        key: &str,
    ) -> impl Fn(object_store::Error) -> BucketError {
        let url = self.url(key);
        move |error| BucketError::of(doing, &url, &error)
    }

    /// Repeats an operation, each time with new credentials, while the server cannot be reached or refuses for now.
    pub fn patiently<T>(
        operation: impl FnMut() -> Result<T, BucketError>,
    ) -> Result<T, BucketError> {
        Bucket::patiently_since(Instant::now(), operation)
    }

    /// [`Bucket::patiently`] for one of several operations that have the time of one.
    pub fn patiently_since<T>(
        began: Instant,
        mut operation: impl FnMut() -> Result<T, BucketError>,
    ) -> Result<T, BucketError> {
        loop {
            match operation() {
                Err(error) if error.cause.may_pass() && began.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_secs(1));
                }
                result => return result,
            }
        }
    }

    /// Writes a small object, replacing the one of its key.
    pub fn put(&self, key: &str, bytes: Vec<u8>) -> Result<(), BucketError> {
        let path = self.path(key);
        let put = self.store.put(&path, bytes.into());
        (self.runtime.block_on(put).map(drop)).map_err(self.failed("write", key))
    }

    /// Writes a small object if its key has none. Of several writers exactly one succeeds. A repetition of the
    /// successful one succeeds too: the reply to it may have been lost.
    ///
    /// # Errors
    /// [`Cause::Taken`] if the key has other content.
    pub fn create(&self, key: &str, bytes: Vec<u8>) -> Result<(), BucketError> {
        let bytes = Bytes::from(bytes);
        let path = self.path(key);
        let create = PutOptions::from(PutMode::Create);
        let put = self.store.put_opts(&path, bytes.clone().into(), create);
        match self.runtime.block_on(put) {
            Ok(_) => Ok(()),
            Err(object_store::Error::AlreadyExists { .. }) => match self.get(key)? {
                Some(found) if found == bytes => Ok(()),
                _ => {
                    let url = self.url(key);
                    Err(BucketError::new("write", &url, Cause::Taken, String::new()))
                }
            },
            Err(error) => Err(self.failed("write", key)(error)),
        }
    }

    /// A small object; `None` if the key has none.
    pub fn get(&self, key: &str) -> Result<Option<Bytes>, BucketError> {
        let path = self.path(key);
        let get = async {
            let found = self.store.get(&path).await?;
            if found.meta.size > SMALL {
                return Ok(Err(format!("it has {}", bytes(found.meta.size))));
            }
            found.bytes().await.map(Ok)
        };
        match self.runtime.block_on(get) {
            Ok(Ok(bytes)) => Ok(Some(bytes)),
            Ok(Err(too_large)) => Err(BucketError::damaged(&self.url(key), too_large)),
            Err(object_store::Error::NotFound { .. }) => {
                self.missing_key_not_bucket(key)?;
                Ok(None)
            }
            Err(error) => Err(self.failed("read", key)(error)),
        }
    }

    /// The object of a key, if there is one.
    pub fn object(&self, key: &str) -> Result<Option<Object>, BucketError> {
        self.object_at(&self.path(key), key)
    }

    fn object_at(&self, path: &Path, key: &str) -> Result<Option<Object>, BucketError> {
        match self.runtime.block_on(self.store.head(path)) {
            Ok(found) => Ok(Some(Object::found(key, found))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("read", key)(error)),
        }
    }

    /// Whether the key has an object.
    pub fn has(&self, key: &str) -> Result<bool, BucketError> {
        Ok(self.object(key)?.is_some())
    }

    /// A small object that must exist.
    pub fn require(&self, key: &str) -> Result<Bytes, BucketError> {
        let found = self.get(key)?;
        found.ok_or_else(|| BucketError::missing(&self.url(key)))
    }

    /// A small object as JSON; `None` if the key has none.
    pub fn read_json<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, BucketError> {
        let Some(bytes) = self.get(key)? else {
            return Ok(None);
        };
        let read = serde_json::from_slice(&bytes).map(Some);
        read.map_err(|error| BucketError::damaged(&self.url(key), error.to_string()))
    }

    /// Writes a value as a small object, replacing the one of its key.
    pub fn put_json(&self, key: &str, value: &impl Serialize) -> Result<(), BucketError> {
        self.put(key, self.json(key, value)?)
    }

    /// [`Bucket::create`] with a value.
    pub fn create_json(&self, key: &str, value: &impl Serialize) -> Result<(), BucketError> {
        self.create(key, self.json(key, value)?)
    }

    fn json(&self, key: &str, value: &impl Serialize) -> Result<Vec<u8>, BucketError> {
        let json = serde_json::to_vec_pretty(value);
        json.map_err(|error| BucketError::damaged(&self.url(key), error.to_string()))
    }

    /// A missing bucket answers like a missing key, but not to a listing.
    fn missing_key_not_bucket(&self, key: &str) -> Result<(), BucketError> {
        let path = self.path(key);
        let first = async { self.store.list(Some(&path)).try_next().await };
        (self.runtime.block_on(first).map(drop)).map_err(self.failed("list", key))
    }

    /// All objects below a prefix, sorted by key. The prefix is a whole number of path segments.
    pub fn list(&self, prefix: &str) -> Result<Vec<Object>, BucketError> {
        let path = self.path(prefix);
        let list = self.store.list(Some(&path)).try_collect::<Vec<_>>();
        let found = self.runtime.block_on(list);
        let found = found.map_err(self.failed("list", prefix))?;
        let objects = found.into_iter().filter_map(|meta| {
            let parts = meta.location.prefix_match(&self.prefix)?;
            let decoded = |part: PathPart<'_>| {
                let part = percent_decode_str(part.as_ref());
                part.decode_utf8_lossy().into_owned()
            };
            let parts: Vec<String> = parts.map(decoded).collect();
            // Nothing here writes such names. As a path, one would leave its directory.
            let is_odd = |part: &String| matches!(part.as_str(), "." | "..") || part.contains('/');
            (!parts.iter().any(is_odd)).then_some(())?;
            let key = parts.join("/");
            Some(Object::found(&key, meta))
        });
        let mut objects: Vec<Object> = objects.collect();
        objects.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(objects)
    }

    /// The names of the directories right below a prefix.
    pub fn directories(&self, prefix: &str) -> Result<Vec<String>, BucketError> {
        let path = self.path(prefix);
        let list = self.store.list_with_delimiter(Some(&path));
        let found = self.runtime.block_on(list);
        let found = found.map_err(self.failed("list", prefix))?;
        let names = found.common_prefixes.iter().filter_map(Path::filename);
        Ok(names.map(str::to_owned).collect())
    }

    /// Deletes an object; one that does not exist is no error.
    pub fn delete(&self, key: &str) -> Result<(), BucketError> {
        match self.runtime.block_on(self.store.delete(&self.path(key))) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("delete", key)(error)),
        }
    }
}
