//! Two servers on the loopback interface that speak the protocol of Hugging Face's hub: the hub, and the one to which it
//! redirects the files in LFS. Every request is recorded.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use evenkeel::hub::Kind;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Debug, Clone)]
pub struct Asked {
    pub method: String,
    pub path: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    /// Sent to the server of the files in LFS.
    pub is_lfs: bool,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Whether it asks for the bytes of a file whose path ends so.
    pub fn gets(&self, end: &str) -> bool {
        self.method == "GET" && self.path.ends_with(end)
    }
}

#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Bytes after which the connection breaks.
    pub breaks_after: Option<usize>,
}

impl Answer {
    pub fn of(status: u16) -> Answer {
        Answer {
            status,
            ..Answer::default()
        }
    }

    pub fn with(mut self, name: &'static str, value: impl ToString) -> Answer {
        self.headers.push((name, value.to_string()));
        self
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Answer {
        self.body = body.into();
        self
    }
}

/// A change of an answer. The number counts the requests to the same server with the same method and path, from 0.
pub type Trouble = Box<dyn Fn(&Asked, usize, Answer) -> Answer + Send + Sync>;

/// A commit of a repository on the hub.
pub struct Repository {
    pub kind: Kind,
    pub id: &'static str,
    pub revision: &'static str,
    pub commit: &'static str,
    pub files: BTreeMap<String, Vec<u8>>,
}

pub struct Server {
    pub endpoint: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

/// What both servers share.
struct State {
    repositories: Vec<Repository>,
    trouble: Trouble,
    lfs: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
}

pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of a file's blob in the cache.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    if is_lfs(name) {
        return hexadecimal(digest(&SHA256, bytes).as_ref());
    }
    let git = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hexadecimal(digest(&SHA1_FOR_LEGACY_USE_ONLY, &git).as_ref())
}

fn is_lfs(name: &str) -> bool {
    [".safetensors", ".bin", ".parquet"]
        .iter()
        .any(|end| name.ends_with(end))
}

impl Server {
    pub fn of(repository: Repository) -> Server {
        Server::with(vec![repository], Box::new(|_, _, answer| answer))
    }

    pub fn with(repositories: Vec<Repository>, trouble: Trouble) -> Server {
        let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (hub, lfs) = (listen(), listen());
        let asked = Arc::<Mutex<Vec<Asked>>>::default();
        let state = Arc::new(State {
            repositories,
            trouble,
            lfs: lfs.local_addr().unwrap(),
            asked: asked.clone(),
        });
        let endpoint = format!("http://{}", hub.local_addr().unwrap());
        for (listener, is_lfs) in [(hub, false), (lfs, true)] {
            let state = state.clone();
            thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    let state = state.clone();
                    thread::spawn(move || serve(&state, stream, is_lfs));
                }
            });
        }
        Server { endpoint, asked }
    }

    /// All requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(state: &State, stream: TcpStream, is_lfs: bool) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    while let Some(Ok(first)) = lines.next() {
        let mut words = first.split(' ').map(str::to_owned);
        let (method, path) = (words.next()?, words.next()?);
        let headers = lines.by_ref().map_while(Result::ok);
        let headers = headers.take_while(|line| !line.is_empty());
        let headers = headers.filter_map(|line| {
            let (name, value) = line.split_once(": ")?;
            Some((name.to_ascii_lowercase(), value.to_owned()))
        });
        let asked = Asked {
            headers: headers.collect(),
            method,
            path,
            is_lfs,
        };
        let number = {
            let mut all = state.asked.lock().unwrap();
            let is_same = |other: &&Asked| {
                other.is_lfs == asked.is_lfs
                    && other.method == asked.method
                    && other.path == asked.path
            };
            let number = all.iter().filter(is_same).count();
            all.push(asked.clone());
            number
        };
        let answer = (state.trouble)(&asked, number, usual(state, &asked));
        send(&stream, &asked, &answer).ok()?;
        if answer.breaks_after.is_some() {
            let _ = stream.shutdown(Shutdown::Both);
            return None;
        }
    }
    None
}

fn send(mut stream: &TcpStream, asked: &Asked, answer: &Answer) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} x\r\n", answer.status);
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !answer
        .headers
        .iter()
        .any(|(name, _)| *name == "Content-Length")
    {
        head += &format!("Content-Length: {}\r\n", answer.body.len());
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    if asked.method == "HEAD" {
        return Ok(());
    }
    let sent = answer.breaks_after.unwrap_or(answer.body.len());
    stream.write_all(&answer.body[..sent])
}

/// The answer of a hub without trouble.
fn usual(state: &State, asked: &Asked) -> Answer {
    let absent = |code: &str| Answer::of(404).with("X-Error-Code", code);
    if asked.path == "/api/whoami-v2" {
        return match asked.header("authorization") {
            Some("Bearer hf_secret") => Answer::of(200).body(r#"{"name": "ada"}"#),
            _ => Answer::of(401),
        };
    }
    let api = |it: &Repository| match it.kind {
        Kind::Model => format!("/api/models/{}/revision/", it.id),
        Kind::DataSet => format!("/api/datasets/{}/revision/", it.id),
    };
    let all = || state.repositories.iter();
    if let Some(first) = all().find(|it| asked.path.starts_with(&api(it))) {
        let revision = asked.path[api(first).len()..].replace("%2F", "/");
        let is_asked = |it: &&Repository| {
            api(it) == api(first) && [it.revision, it.commit].contains(&&*revision)
        };
        let Some(Repository { files, commit, .. }) = all().find(is_asked) else {
            return absent("RevisionNotFound");
        };
        let siblings = files
            .keys()
            .map(|name| serde_json::json!({"rfilename": name}));
        let siblings: Vec<_> = siblings.collect();
        let info = serde_json::json!({"sha": commit, "siblings": siblings});
        return Answer::of(200).body(info.to_string());
    }
    let resolve = |it: &Repository| match it.kind {
        Kind::Model => format!("/{}/resolve/{}/", it.id, it.commit),
        Kind::DataSet => format!("/datasets/{}/resolve/{}/", it.id, it.commit),
    };
    let found = all().find(|it| asked.path.starts_with(&resolve(it)));
    let Some(it @ Repository { files, commit, .. }) = found else {
        return absent("RepoNotFound");
    };
    let name = &asked.path[resolve(it).len()..];
    let Some(bytes) = files.get(name) else {
        return absent("EntryNotFound");
    };
    if is_lfs(name) && !asked.is_lfs {
        let to = format!("http://{}{}", state.lfs, asked.path);
        return Answer::of(302)
            .with("Location", to)
            .with("X-Repo-Commit", commit)
            .with("X-Linked-Size", bytes.len())
            .with("X-Linked-Etag", format!("\"{}\"", etag(name, bytes)));
    }
    let answer = Answer::of(200)
        .with("ETag", format!("\"{}\"", etag(name, bytes)))
        .with("X-Repo-Commit", commit);
    if asked.method == "HEAD" {
        return answer.with("Content-Length", bytes.len());
    }
    let from = asked.header("range").and_then(|range| {
        let from = range.strip_prefix("bytes=")?.strip_suffix('-')?;
        from.parse::<usize>().ok()
    });
    match from {
        None => answer.body(bytes.clone()),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
            let answer = Answer {
                status: 206,
                ..answer
            };
            answer
                .with("Content-Range", range)
                .body(bytes[from..].to_vec())
        }
    }
}
