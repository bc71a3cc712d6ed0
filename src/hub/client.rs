//! Requests to the hub. Its answers are not trusted: every part is bounded in size and time, and the token stays with
//! the host of the endpoint.
//! <https://huggingface.co/docs/hub/api>, huggingface_hub `file_download.py`

use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName,
    HeaderValue, LOCATION, RANGE, RETRY_AFTER,
};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Method, Response, StatusCode, Url};
use serde::Deserialize;
use tokio::time::{sleep, timeout};

use super::cache::LISTING_BYTES;
use super::error::Cause;
use super::id::{Kind, Repo, is_commit};
use super::settings::Settings;
use crate::util::causes::innermost;
use crate::util::format::bytes;
use crate::util::shards::is_file_name;
use crate::util::tls;

/// Redirects of one request.
const REDIRECTS: usize = 10;
/// Repetitions of a request without progress.
const REPETITIONS: u32 = 6;
/// Repetitions of a connection that cannot be opened.
const RECONNECTIONS: u32 = 2;
/// Longest pause before a repetition.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// Time in which the description of a repository arrives. It has at most [`LISTING_BYTES`].
const LISTING_TIME: Duration = Duration::from_secs(120);
/// Interval in which a signal ends an operation.
const STOP_POLL: Duration = Duration::from_millis(100);

/// Characters that a URL has without encoding.
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

pub(super) struct Client {
    http: reqwest::Client,
    endpoint: Url,
    token: Option<HeaderValue>,
    settings: Settings,
    /// What it asks for.
    kind: Kind,
}

/// The files of a repository at a revision.
#[derive(Debug)]
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<String>,
}

/// A file of a commit.
#[derive(Debug, Clone)]
pub(super) struct RemoteFile {
    pub name: String,
    /// Name of its blob. Of a file in LFS it is the SHA-256.
    pub etag: String,
    pub bytes: u64,
    url: Url,
}

impl RemoteFile {
    /// The SHA-256, if the hub states it.
    pub fn sha256(&self) -> Option<&str> {
        let is_sha256 = self.etag.len() == 64 && self.etag.bytes().all(|b| b.is_ascii_hexdigit());
        is_sha256.then_some(self.etag.as_str())
    }
}

enum Failure {
    /// It may succeed after a pause of this length.
    Later(Cause, Option<Duration>),
    Final(Cause),
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Failure {
        Failure::Final(cause)
    }
}

/// Which redirects a request follows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follow {
    /// Those of the endpoint to itself: of a renamed repository.
    Endpoint,
    All,
}

impl Client {
    pub fn new(settings: &Settings, kind: Kind) -> Result<Client, Cause> {
        if settings.offline {
            return Err(Cause::Offline);
        }
        let invalid = |why: String| Cause::Endpoint(format!("{} ({why})", settings.endpoint));
        let endpoint =
            Url::parse(&settings.endpoint).map_err(|error| invalid(error.to_string()))?;
        if !matches!(endpoint.scheme(), "http" | "https") {
            return Err(invalid("another scheme".to_owned()));
        }
        tls::use_ring();
        let mut builder = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(settings.etag_timeout)
            .user_agent(concat!("evenkeel/", env!("CARGO_PKG_VERSION")));
        if let Some(roots) = tls::roots_in_place_of_systems() {
            builder =
                builder.tls_certs_only(roots.filter_map(|root| Certificate::from_der(root).ok()));
        }
        let http = builder
            .build()
            .map_err(|error| invalid(innermost(&error)))?;
        let token = settings.token.as_ref().and_then(|token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.0)).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Ok(Client {
            http,
            endpoint,
            token,
            settings: settings.clone(),
            kind,
        })
    }

    fn url(&self, path: &str) -> Result<Url, Cause> {
        let url = format!("{}/{path}", self.settings.endpoint);
        Url::parse(&url).map_err(|error| Cause::Endpoint(format!("{url} ({error})")))
    }

    /// The commit and the files of a revision.
    pub async fn list(&self, repo: &Repo) -> Result<Listing, Cause> {
        #[derive(Deserialize)]
        struct Info {
            sha: Option<String>,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
        }
        let revision = utf8_percent_encode(&repo.revision, UNRESERVED);
        let kind = repo.kind.plural();
        let url = self.url(&format!("api/{kind}/{}/revision/{revision}", repo.id))?;
        let body = self.again(async || self.answer(&url).await).await?;
        let unusable = |why: String| Cause::Answer(format!("{url}: {why}"));
        let info: Info =
            serde_json::from_slice(&body).map_err(|error| unusable(error.to_string()))?;
        let commit = info.sha.filter(|sha| is_commit(sha));
        let commit = commit.ok_or_else(|| unusable("it states no commit".to_owned()))?;
        let files: Vec<String> = info.siblings.into_iter().map(|it| it.rfilename).collect();
        match files.iter().find(|name| !is_relative(name)) {
            Some(name) => Err(unusable(format!(
                "`{}` leaves the directory of the {}",
                name.escape_debug(),
                self.kind
            ))),
            None => Ok(Listing { commit, files }),
        }
    }

    /// The name of the token's account; `None` without a token. One request.
    pub async fn account(&self) -> Result<Option<String>, Cause> {
        #[derive(Deserialize)]
        struct Account {
            name: String,
        }
        let path = match self.token {
            Some(_) => "api/whoami-v2",
            None => "api/models?limit=1",
        };
        let url = self.url(path)?;
        let body = self.answer(&url).await.map_err(|failure| match failure {
            Failure::Final(Cause::Denied(_) | Cause::Gated) if self.token.is_some() => Cause::Token,
            Failure::Later(cause, _) | Failure::Final(cause) => cause,
        })?;
        if self.token.is_none() {
            return Ok(None);
        }
        let account: Result<Account, _> = serde_json::from_slice(&body);
        match account {
            Ok(account) => Ok(Some(account.name)),
            Err(error) => Err(Cause::Answer(format!("{url}: {error}"))),
        }
    }

    /// Describes a file of a commit.
    pub async fn describe(
        &self,
        repo: &Repo,
        commit: &str,
        name: &str,
    ) -> Result<RemoteFile, Cause> {
        let encoded = name
            .split('/')
            .map(|part| utf8_percent_encode(part, UNRESERVED).to_string());
        let encoded = encoded.collect::<Vec<_>>().join("/");
        let url = self.url(&format!("{}/resolve/{commit}/{encoded}", repo.page()))?;
        self.again(async || {
            let answer = self.send(Method::HEAD, &url, HeaderMap::new(), Follow::Endpoint);
            let answer = answer.await?;
            let answer = if answer.status().is_redirection() {
                answer
            } else {
                self.accepted(answer)?
            };
            let header = |name: &str| answer.headers().get(name)?.to_str().ok();
            let unusable = |why: &str| Failure::Final(Cause::Answer(format!("{url}: {why}")));
            if header("x-repo-commit").is_some_and(|stated| stated != commit) {
                return Err(unusable("it is of another commit"));
            }
            let linked = header("x-linked-etag");
            let etag = linked.or_else(|| header(ETAG.as_str()));
            let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
            let etag = etag.filter(|etag| is_blob_name(etag));
            let etag = etag.ok_or_else(|| unusable("it states no ETag"))?;
            // The length of a redirect is not that of the file.
            let length = header(CONTENT_LENGTH.as_str()).filter(|_| answer.status().is_success());
            let bytes = header("x-linked-size").or(length);
            let bytes = bytes.and_then(|bytes| bytes.parse().ok());
            Ok(RemoteFile {
                name: name.to_owned(),
                etag: etag.to_owned(),
                bytes: bytes.ok_or_else(|| unusable("it states no size"))?,
                url: url.clone(),
            })
        })
        .await
    }

    /// Adds what is missing of a file to `part`, with as many requests as it takes. `received` hears of all bytes of
    /// the part.
    pub async fn fetch(
        &self,
        file: &RemoteFile,
        part: &mut impl Part,
        received: &mut dyn FnMut(u64),
    ) -> Result<(), Cause> {
        let mut repetitions = 0;
        let mut most = part.bytes();
        while part.bytes() < file.bytes {
            let Err(failure) = self.receive(file, part, received).await else {
                continue;
            };
            if part.bytes() > most {
                most = part.bytes();
                repetitions = 0;
            }
            self.pause(failure, &mut repetitions).await?;
        }
        Ok(())
    }

    async fn receive(
        &self,
        file: &RemoteFile,
        part: &mut impl Part,
        received: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let from = part.bytes();
        let mut headers = HeaderMap::new();
        if from > 0
            && let Ok(range) = format!("bytes={from}-").parse()
        {
            headers.insert(RANGE, range);
        }
        let answer = self
            .send(Method::GET, &file.url, headers, Follow::All)
            .await?;
        match answer.status() {
            // The server sends the whole file.
            StatusCode::OK => part.restart()?,
            StatusCode::PARTIAL_CONTENT if begins_at(&answer, from) => {}
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                part.restart()?;
                let cause = Cause::Answer(format!("{}: another range than asked for", file.name));
                return Err(Failure::Later(cause, None));
            }
            // A refusal keeps the part.
            _ => {}
        }
        let mut answer = self.accepted(answer)?;
        while let Some(piece) = self.piece(&mut answer).await? {
            if part.bytes() + piece.len() as u64 > file.bytes {
                return Err(Failure::Final(Cause::Size {
                    file: file.name.clone(),
                    found: part.bytes() + piece.len() as u64,
                    stated: file.bytes,
                }));
            }
            part.add(&piece)?;
            received(part.bytes());
        }
        if part.bytes() < file.bytes {
            let cause = Cause::Size {
                file: file.name.clone(),
                found: part.bytes(),
                stated: file.bytes,
            };
            return Err(Failure::Later(cause, None));
        }
        Ok(())
    }

    async fn piece(&self, answer: &mut Response) -> Result<Option<bytes::Bytes>, Failure> {
        let piece = timeout(self.settings.download_timeout, answer.chunk()).await;
        piece.map_err(|_| slow())?.map_err(|error| broken(&error))
    }

    async fn body(&self, mut answer: Response, limit: usize) -> Result<Vec<u8>, Failure> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece(&mut answer).await? {
            if piece.len() > limit - body.len() {
                let why = format!("it has more than {}", bytes(limit as u64));
                return Err(Cause::Answer(why).into());
            }
            body.extend_from_slice(&piece);
        }
        Ok(body)
    }

    /// What the hub's API answers.
    async fn answer(&self, url: &Url) -> Result<Vec<u8>, Failure> {
        let answer = self.send(Method::GET, url, HeaderMap::new(), Follow::Endpoint);
        let answer = self.accepted(answer.await?)?;
        let body = timeout(LISTING_TIME, self.body(answer, LISTING_BYTES));
        body.await.unwrap_or_else(|_| Err(slow()))
    }

    /// Repeats a request while it may succeed later.
    async fn again<T>(
        &self,
        mut request: impl AsyncFnMut() -> Result<T, Failure>,
    ) -> Result<T, Cause> {
        let mut repetitions = 0;
        loop {
            match request().await {
                Ok(answer) => return Ok(answer),
                Err(failure) => self.pause(failure, &mut repetitions).await?,
            }
        }
    }

    async fn pause(&self, failure: Failure, repetitions: &mut u32) -> Result<(), Cause> {
        let (cause, asked) = match failure {
            Failure::Final(cause) => return Err(cause),
            Failure::Later(cause, asked) => (cause, asked),
        };
        let usual = self.settings.pause * 2_u32.pow(*repetitions);
        let pause = asked.unwrap_or(usual);
        let most = match cause {
            Cause::NoConnection(_) => RECONNECTIONS,
            _ => REPETITIONS,
        };
        if *repetitions >= most || pause > LONGEST_PAUSE {
            return Err(cause);
        }
        *repetitions += 1;
        sleep(pause).await;
        Ok(())
    }

    /// Sends a request and follows its redirects. The token is sent to the endpoint's host only.
    async fn send(
        &self,
        method: Method,
        url: &Url,
        headers: HeaderMap,
        follow: Follow,
    ) -> Result<Response, Failure> {
        let mut url = url.clone();
        for _ in 0..REDIRECTS {
            let mut request = self.http.request(method.clone(), url.clone());
            request = request.headers(headers.clone());
            request = request.header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| self.is_endpoint(&url)) {
                request = request.header(AUTHORIZATION, token);
            }
            let answer = timeout(self.settings.etag_timeout, request.send()).await;
            let answer = answer.map_err(|_| slow())?;
            let answer = answer.map_err(|error| broken(&error))?;
            let described = answer.headers().contains_key(&LINKED_ETAG);
            if !answer.status().is_redirection() || (follow == Follow::Endpoint && described) {
                return Ok(answer);
            }
            let location = answer.headers().get(LOCATION);
            let location = location.and_then(|to| to.to_str().ok());
            let next = location.and_then(|to| url.join(to).ok());
            let unusable = |why: &str| Failure::Final(Cause::Answer(format!("{url}: {why}")));
            let next = next.ok_or_else(|| unusable("a redirect without a URL"))?;
            if follow == Follow::Endpoint && !self.is_endpoint(&next) {
                return Ok(answer);
            }
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(unusable("a redirect to a connection without TLS"));
            }
            url = next;
        }
        Err(Cause::Answer(format!("{url}: more than {REDIRECTS} redirects")).into())
    }

    fn is_endpoint(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }

    /// An answer with status 200 or 206.
    fn accepted(&self, answer: Response) -> Result<Response, Failure> {
        let status = answer.status();
        if matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
            return Ok(answer);
        }
        let header = |name: &str| answer.headers().get(name)?.to_str().ok();
        let cause = match (status.as_u16(), header("x-error-code")) {
            (401 | 403, Some("GatedRepo")) => Cause::Gated,
            // Without a token, the hub answers 401 for a repository that does not exist.
            (401 | 403, _) => Cause::Denied(self.kind),
            (404, Some("RevisionNotFound")) => Cause::NoRevision(self.kind),
            (404, Some("EntryNotFound")) => {
                Cause::Answer("a listed file does not exist".to_owned())
            }
            (404, _) => Cause::NoRepo(self.kind),
            (429, _) => Cause::Throttled,
            (other, _) => Cause::Status(other),
        };
        if matches!(status.as_u16(), 408 | 429 | 500..) {
            let after = header(RETRY_AFTER.as_str());
            let after = after.and_then(|seconds| seconds.trim().parse().ok());
            return Err(Failure::Later(cause, after.map(Duration::from_secs)));
        }
        Err(cause.into())
    }
}

const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");

/// The first part of a file, which a download completes.
pub(super) trait Part {
    fn bytes(&self) -> u64;
    fn add(&mut self, piece: &[u8]) -> Result<(), Cause>;
    fn restart(&mut self) -> Result<(), Cause>;
}

/// Runs an operation until it ends or a signal arrives.
pub(super) fn run<T>(
    stopped: &dyn Fn() -> bool,
    operation: impl Future<Output = Result<T, Cause>>,
) -> Result<T, Cause> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Cause::NoConnection(error.to_string()))?;
    let signal = async {
        while !stopped() {
            sleep(STOP_POLL).await;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            ended = operation => ended,
            () = signal => Err(Cause::Stopped),
        }
    })
}

/// Whether the range of an answer begins at this byte.
fn begins_at(answer: &Response, from: u64) -> bool {
    let range = answer.headers().get(CONTENT_RANGE);
    let range = range.and_then(|range| range.to_str().ok());
    range.is_some_and(|range| range.starts_with(&format!("bytes {from}-")))
}

fn slow() -> Failure {
    Failure::Later(Cause::Broken("no answer in time".to_owned()), None)
}

fn broken(error: &reqwest::Error) -> Failure {
    let cause = if error.is_connect() {
        Cause::NoConnection(innermost(error))
    } else {
        Cause::Broken(innermost(error))
    };
    Failure::Later(cause, None)
}

/// Whether a name stays below the directory of its repository.
fn is_relative(name: &str) -> bool {
    name.split('/').all(is_file_name)
}

fn is_blob_name(etag: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=128).contains(&etag.len()) && etag.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_directory_are_known() {
        for name in ["config.json", "onnx/model.onnx", "a..b"] {
            assert!(is_relative(name), "{name}");
        }
        for name in [
            "",
            "/etc/passwd",
            "../x",
            "a/../../x",
            "a\\..\\x",
            "a//b",
            ".",
            "a\nb",
        ] {
            assert!(!is_relative(name), "{name}");
        }
        assert!(is_blob_name(&"a1".repeat(32)));
        for etag in ["", "../x", "a/b", "a.incomplete", &"a".repeat(129)] {
            assert!(!is_blob_name(etag), "{etag}");
        }
    }

    #[test]
    fn an_endpoint_needs_http_and_no_offline() {
        let settings = |endpoint: &str| {
            let variable = |name: &str| (name == "HF_ENDPOINT").then(|| endpoint.to_owned());
            Settings::of(&variable)
        };
        let new = |settings: &Settings| Client::new(settings, Kind::Model);
        assert!(new(&settings("https://huggingface.co")).is_ok());
        for endpoint in ["huggingface.co", "ftp://huggingface.co", "file:///x"] {
            let refused = new(&settings(endpoint)).err();
            assert!(matches!(refused, Some(Cause::Endpoint(_))), "{endpoint}");
        }
        let refused = new(&Settings::none()).err();
        assert!(matches!(refused, Some(Cause::Offline)));
    }
}
