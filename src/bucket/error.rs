//! Errors of an object store, with what the user can do about them.

use std::error::Error;

/// A request that failed after all retries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {doing} {url}: {cause}{}", detail(message))]
pub struct BucketError {
    /// The operation as a verb.
    doing: &'static str,
    /// The object or prefix concerned.
    url: String,
    pub cause: Cause,
    /// The answer of the server, if the cause does not say all of it.
    message: String,
}

fn detail(message: &str) -> String {
    match message {
        "" => String::new(),
        message => format!(" ({message})"),
    }
}

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    #[error(
        "the URL is not usable; write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    )]
    Url,
    #[error("the provider's settings are incomplete; set its environment variables")]
    Settings,
    #[error(
        "an object has a name that is no path: with an empty part, `.` or `..`; rename it, or choose another prefix"
    )]
    Name,
    #[error("there is no such bucket; create it, or correct the URL")]
    NoBucket,
    #[error("the bucket is in another region; set AWS_REGION to it")]
    Region,
    #[error(
        "there are no credentials; set those of the pod's service account, or the provider's environment variables"
    )]
    NoCredentials,
    #[error("the credentials have expired; renew them")]
    Expired,
    #[error("the credentials are refused; check key and secret")]
    Credentials,
    #[error(
        "access is denied; the identity needs permission to read and list below the prefix, and for a run to write and \
         delete"
    )]
    Denied,
    #[error("the clock of this machine differs too much from the server's; synchronise it")]
    Clock,
    #[error(
        "the server refuses further requests for now; raise the bucket's request rate, or make fewer requests"
    )]
    Throttled,
    #[error("the server cannot be reached; check the endpoint and the network")]
    Unreachable,
    #[error("the object does not exist; restore it from a copy, or create the job again")]
    Missing,
    #[error("another writer was first: this one does not belong to the run any more")]
    Taken,
    #[error("the object is not what was written")]
    Damaged,
    #[error("the object was replaced while it was read; start again when no process writes to it")]
    Changed,
    #[error("the local disk failed")]
    Disk,
    #[error("the server refused the request")]
    Other,
}

impl Cause {
    /// Whether the same request may succeed soon.
    pub fn may_pass(self) -> bool {
        matches!(
            self,
            Cause::Unreachable
                | Cause::Throttled
                | Cause::Expired
                | Cause::NoCredentials
                | Cause::Other
        )
    }

    /// Whether the same request may succeed after a change of the bucket, its server or the credentials.
    pub fn may_be_mended(self) -> bool {
        !matches!(self, Cause::Url | Cause::Settings | Cause::Name)
    }
}

impl BucketError {
    pub(super) fn invalid(url: &str, message: String) -> BucketError {
        BucketError::new("open", url, Cause::Url, message)
    }

    /// The library cannot make a client.
    pub(super) fn settings(url: &str, error: &object_store::Error) -> BucketError {
        BucketError::new("open", url, Cause::Settings, answer(&chain(error)))
    }

    /// An object that must exist and does not.
    pub fn missing(url: &str) -> BucketError {
        BucketError::new("read", url, Cause::Missing, String::new())
    }

    /// An object without the content that its reader expects.
    pub fn damaged(url: &str, message: String) -> BucketError {
        BucketError::new("read", url, Cause::Damaged, message)
    }

    pub(super) fn new(
        doing: &'static str,
        url: &str,
        cause: Cause,
        message: String,
    ) -> BucketError {
        BucketError {
            doing,
            url: url.to_owned(),
            cause,
            message,
        }
    }

    /// The error of the library. Its variants do not tell most causes apart, so the texts of the chain do: the
    /// servers' error codes are part of them.
    pub(super) fn of(doing: &'static str, url: &str, error: &object_store::Error) -> BucketError {
        let texts = chain(error);
        let cause = match error {
            object_store::Error::InvalidPath { .. } => Cause::Name,
            object_store::Error::Precondition { .. } if doing == "read" => Cause::Changed,
            object_store::Error::AlreadyExists { .. }
            | object_store::Error::Precondition { .. } => Cause::Taken,
            _ => cause_of(&texts).unwrap_or(match error {
                object_store::Error::NotFound { .. } => Cause::Missing,
                object_store::Error::PermissionDenied { .. } => Cause::Denied,
                object_store::Error::Unauthenticated { .. } => Cause::Credentials,
                _ => Cause::Other,
            }),
        };
        let message = match cause {
            Cause::NoBucket | Cause::Missing | Cause::Taken | Cause::Changed => String::new(),
            _ => answer(&texts),
        };
        BucketError::new(doing, url, cause, message)
    }
}

/// Error codes of the servers and messages of the library, and what they mean.
/// <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>,
/// <https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes>
const CODES: [(&str, Cause); 25] = [
    ("NoSuchBucket", Cause::NoBucket),
    ("ContainerNotFound", Cause::NoBucket),
    ("The specified bucket does not exist", Cause::NoBucket),
    ("AuthorizationHeaderMalformed", Cause::Region),
    ("PermanentRedirect", Cause::Region),
    ("IllegalLocationConstraint", Cause::Region),
    ("incorrectly configured region", Cause::Region),
    ("ExpiredToken", Cause::Expired),
    ("TokenRefreshRequired", Cause::Expired),
    ("RequestTimeTooSkewed", Cause::Clock),
    ("InvalidAccessKeyId", Cause::Credentials),
    ("SignatureDoesNotMatch", Cause::Credentials),
    ("InvalidToken", Cause::Credentials),
    ("UserNotFound", Cause::Credentials),
    ("AuthenticationFailed", Cause::Credentials),
    ("AccessDenied", Cause::Denied),
    ("AuthorizationPermissionMismatch", Cause::Denied),
    ("SlowDown", Cause::Throttled),
    ("ServerBusy", Cause::Throttled),
    ("429 Too Many Requests", Cause::Throttled),
    // Without credentials the library asks the metadata server of a cloud's machine.
    ("169.254.", Cause::NoCredentials),
    ("latest/meta-data", Cause::NoCredentials),
    ("computeMetadata", Cause::NoCredentials),
    ("error sending request", Cause::Unreachable),
    ("HTTP error", Cause::Unreachable),
];

fn cause_of(texts: &str) -> Option<Cause> {
    let (_, cause) = CODES.iter().find(|(code, _)| texts.contains(code))?;
    Some(*cause)
}

fn chain(error: &dyn Error) -> String {
    let mut texts = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !texts.contains(&text) {
            texts = format!("{texts}: {text}");
        }
        cause = error.source();
    }
    texts
}

/// The message of an S3 error document, or the end of the chain.
fn answer(texts: &str) -> String {
    let within = |tag: &str| {
        let (_, rest) = texts.split_once(&format!("<{tag}>"))?;
        let (text, _) = rest.split_once(&format!("</{tag}>"))?;
        let text = text.replace("&#34;", "\"").replace("&quot;", "\"");
        Some(text.replace("&amp;", "&"))
    };
    match (within("Code"), within("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code,
        _ => {
            let line = texts.split_whitespace().collect::<Vec<_>>().join(" ");
            line.chars().take(300).collect()
        }
    }
}
