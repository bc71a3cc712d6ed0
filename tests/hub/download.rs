//! The download into the cache: its requests, its files, and what a broken or hostile server may do.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use evenkeel::hub::{Cause, Download, Hub, HubError, Kind, Received, Repo, Settings, Small, Token};

use super::server::{Answer, Asked, COMMIT, Repository, Server, Trouble, etag};

const ID: &str = "acme/tiny";
const WEIGHTS: &str = "model.safetensors";
const BYTES: usize = 300_000;

/// A model whose weights are no tensors.
fn files() -> BTreeMap<String, Vec<u8>> {
    let weights: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
    let text = |text: &str| text.as_bytes().to_vec();
    BTreeMap::from([
        ("config.json".to_owned(), text("{}")),
        ("tokenizer.json".to_owned(), text("{\"words\": 1}")),
        ("README.md".to_owned(), text("# Tiny")),
        ("pytorch_model.bin".to_owned(), vec![1; 10]),
        ("onnx/model.safetensors".to_owned(), vec![2; 10]),
        (WEIGHTS.to_owned(), weights),
    ])
}

fn model(files: BTreeMap<String, Vec<u8>>) -> Repository {
    Repository {
        kind: Kind::Model,
        id: ID,
        revision: "main",
        commit: COMMIT,
        files,
    }
}

fn server(trouble: Trouble) -> Server {
    Server::with(vec![model(files())], trouble)
}

/// A client of a server, with an empty cache.
struct User {
    home: tempfile::TempDir,
    settings: Settings,
}

impl User {
    fn of(server: &Server) -> User {
        let home = tempfile::tempdir().unwrap();
        let settings = Settings {
            cache: Some(home.path().to_owned()),
            endpoint: server.endpoint.clone(),
            token: Some(Token("hf_secret".to_owned())),
            offline: false,
            pause: Duration::from_millis(1),
            ..Settings::none()
        };
        User { home, settings }
    }

    fn folder(&self) -> PathBuf {
        self.home.path().join("models--acme--tiny")
    }

    fn blob(&self, end: &str) -> PathBuf {
        let etag = etag(WEIGHTS, &files()[WEIGHTS]);
        self.folder().join("blobs").join(format!("{etag}{end}"))
    }

    fn download(&self) -> Result<Vec<Received>, HubError> {
        self.download_of(&Repo::model(ID, None), &|| false)
    }

    fn download_of(
        &self,
        repo: &Repo,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Vec<Received>, HubError> {
        let mut progress = Vec::new();
        let mut received = |received| progress.push(received);
        let download = Download::begin(&self.settings, repo, stopped)?;
        download.small(Small::All, &mut received)?;
        download.weights(&mut received)?;
        download.finish()?;
        Ok(progress)
    }

    fn refused(&self) -> Cause {
        *self.download().unwrap_err().cause
    }

    fn weights(&self) -> Vec<u8> {
        let hub = Hub::of(self.settings.clone());
        let snapshot = hub.snapshot_with(&Repo::model(ID, None), WEIGHTS).unwrap();
        std::fs::read(snapshot.join(WEIGHTS)).unwrap()
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn gets(server: &Server, end: &str) -> Vec<Asked> {
    let asked = server.asked().into_iter();
    asked.filter(|asked| asked.gets(end)).collect()
}

/// The requests to the server of the files in LFS.
fn of_lfs(server: &Server) -> Vec<Asked> {
    let asked = server.asked().into_iter();
    asked.filter(|asked| asked.is_lfs).collect()
}

#[test]
fn a_model_has_the_layout_of_huggingface_hub() {
    let server = Server::of(model(files()));
    let user = User::of(&server);
    let progress = user.download().unwrap();
    let end = progress.last().unwrap();
    assert_eq!((end.bytes, end.total), (BYTES as u64, BYTES as u64));

    let snapshot = user.folder().join("snapshots").join(COMMIT);
    let wanted = ["config.json", WEIGHTS, "tokenizer.json"];
    assert_eq!(names(&snapshot), wanted);
    for name in wanted {
        let content = &files()[name];
        assert_eq!(&std::fs::read(snapshot.join(name)).unwrap(), content);
        let blob = Path::new("../../blobs").join(etag(name, content));
        assert_eq!(snapshot.join(name).read_link().unwrap(), blob);
    }
    assert_eq!(names(&user.folder().join("blobs")).len(), wanted.len());
    let main = user.folder().join("refs/main");
    assert_eq!(std::fs::read_to_string(main).unwrap(), COMMIT);

    // The token stays with the host of the endpoint, and only what training reads is requested.
    for asked in server.asked() {
        let token = (!asked.is_lfs).then_some("Bearer hf_secret");
        assert_eq!(asked.header("authorization"), token, "{asked:?}");
        let is_wanted = wanted.iter().any(|name| asked.path.ends_with(name));
        assert!(is_wanted || asked.path.starts_with("/api/"), "{asked:?}");
    }
    assert_eq!(of_lfs(&server).len(), 1);
    assert!(server.asked()[1].path.ends_with("/config.json"));

    // What is there is not downloaded again.
    let before = gets(&server, "json").len() + of_lfs(&server).len();
    user.download().unwrap();
    let after = gets(&server, "json").len() + of_lfs(&server).len();
    assert_eq!(after, before);
    assert!(
        gets(&server, "json")
            .iter()
            .all(|asked| asked.header("range").is_none())
    );
}

#[test]
fn only_the_shards_that_the_index_names_are_downloaded() {
    let mut files = files();
    let weights = files.remove(WEIGHTS).unwrap();
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    files.insert("model.safetensors.index.json".to_owned(), index.into());
    for (name, size) in [("model-1", 10), ("model-2", 20), ("model-old", 30)] {
        files.insert(format!("{name}.safetensors"), weights[..size].to_vec());
    }
    let server = Server::of(model(files));
    let user = User::of(&server);
    let progress = user.download().unwrap();
    assert_eq!(progress.last().unwrap().total, 30);
    let snapshot = user.folder().join("snapshots").join(COMMIT);
    assert!(snapshot.join("model-2.safetensors").is_file());
    assert!(!snapshot.join("model-old.safetensors").exists());
}

#[test]
fn a_broken_connection_continues_with_a_range() {
    let server = server(Box::new(|asked, number, answer| match number {
        0 if asked.is_lfs => Answer {
            breaks_after: Some(100_000),
            ..answer
        },
        // A refusal in between loses nothing.
        1 if asked.is_lfs => Answer::of(503),
        _ => answer,
    }));
    let user = User::of(&server);
    user.download().unwrap();
    assert_eq!(user.weights(), files()[WEIGHTS]);
    let asked = of_lfs(&server);
    let ranges: Vec<_> = asked.iter().map(|asked| asked.header("range")).collect();
    let rest = Some("bytes=100000-");
    assert_eq!(ranges, [None, rest, rest]);
}

#[test]
fn the_part_of_an_earlier_process_is_continued_or_replaced() {
    for (left, ranges) in [
        (files()[WEIGHTS][..1000].to_vec(), vec![Some("bytes=1000-")]),
        // Damaged: the checksum of the whole is another one.
        (vec![9; 1000], vec![Some("bytes=1000-"), None]),
        (vec![9; BYTES], vec![None]),
        (vec![9; BYTES + 1], vec![None]),
    ] {
        let server = server(Box::new(|_, _, answer| answer));
        let user = User::of(&server);
        std::fs::create_dir_all(user.folder().join("blobs")).unwrap();
        std::fs::write(user.blob(".incomplete"), left).unwrap();
        user.download().unwrap();
        assert_eq!(user.weights(), files()[WEIGHTS]);
        assert!(!user.blob(".incomplete").exists());
        let asked = of_lfs(&server);
        let asked: Vec<_> = asked.iter().map(|asked| asked.header("range")).collect();
        assert_eq!(asked, ranges);
    }
}

#[test]
fn a_server_without_ranges_sends_the_file_again() {
    let server = server(Box::new(|asked, number, answer| {
        if asked.is_lfs && number == 0 {
            return Answer {
                breaks_after: Some(5),
                ..answer
            };
        }
        if asked.is_lfs {
            return Answer::of(200).body(files()[WEIGHTS].clone());
        }
        answer
    }));
    let user = User::of(&server);
    user.download().unwrap();
    assert_eq!(user.weights(), files()[WEIGHTS]);
    assert_eq!(of_lfs(&server).len(), 2);
}

#[test]
fn requests_that_may_succeed_later_are_repeated() {
    let server = server(Box::new(|_, number, answer| match number {
        0 => Answer::of(429).with("Retry-After", 0),
        1 => Answer::of(503),
        _ => answer,
    }));
    let user = User::of(&server);
    user.download().unwrap();
    assert_eq!(user.weights(), files()[WEIGHTS]);
    assert_eq!(gets(&server, "/revision/main").len(), 3);
}

#[test]
fn refusals_have_their_cause() {
    let causes = |status: u16, code: &'static str| {
        let server = server(Box::new(move |_, _, _| match code {
            "" => Answer::of(status),
            code => Answer::of(status).with("X-Error-Code", code),
        }));
        let user = User::of(&server);
        let error = user.download().unwrap_err();
        (error.to_string(), server.asked().len())
    };
    let lines = [
        (401, "GatedRepo"),
        (403, "GatedRepo"),
        (401, "RepoNotFound"),
        (404, "RepoNotFound"),
        (404, "RevisionNotFound"),
        (404, ""),
        (418, ""),
        (429, ""),
        (500, ""),
    ]
    .map(|(status, code)| {
        let (error, requests) = causes(status, code);
        format!("{status} {code}: {error} [requests: {requests}]")
    });
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn a_long_pause_is_not_waited_for() {
    let server = server(Box::new(|_, _, _| {
        Answer::of(429).with("Retry-After", 100_000)
    }));
    assert!(matches!(User::of(&server).refused(), Cause::Throttled));
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn other_bytes_than_the_hub_states_are_refused() {
    type Change = fn(Vec<u8>) -> Vec<u8>;
    let damaged: Change = |mut body| {
        body[7] ^= 1;
        body
    };
    let short: Change = |body| body[..10].to_vec();
    let long: Change = |mut body| {
        body.push(0);
        body
    };
    for (change, expected) in [
        (damaged, "another SHA-256"),
        (short, "has 10 bytes where the hub states 300000"),
        (long, "has 300001 bytes where the hub states 300000"),
    ] {
        let server = server(Box::new(move |asked, number, answer| {
            let is_changed = asked.is_lfs && (number == 0 || asked.header("range").is_none());
            if is_changed {
                let body = change(answer.body.clone());
                Answer { body, ..answer }
            } else if asked.is_lfs {
                Answer::of(206).with("Content-Range", "bytes 10-299999/300000")
            } else {
                answer
            }
        }));
        let user = User::of(&server);
        let error = user.refused().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!user.blob("").exists());
        let hub = Hub::of(user.settings.clone());
        assert_eq!(hub.snapshot_with(&Repo::model(ID, None), WEIGHTS), None);
    }
}

#[test]
fn names_of_a_hostile_server_stay_within_the_cache() {
    let hostile = |trouble: Trouble| {
        let server = server(trouble);
        let user = User::of(&server);
        let error = user.refused();
        assert!(matches!(error, Cause::Answer(_)), "{error}");
        assert_eq!(
            names(user.home.path().parent().unwrap())
                .iter()
                .find(|name| *name == "x"),
            None
        );
        error.to_string()
    };
    for name in ["../x", "/x", "a\\..\\x", "tokenizer/../../x.json"] {
        let error = hostile(Box::new(move |asked, _, answer| {
            let body = serde_json::json!({"sha": COMMIT, "siblings": [{"rfilename": name}]});
            if asked.path.starts_with("/api/") {
                return Answer::of(200).body(body.to_string());
            }
            answer
        }));
        assert!(error.contains("leaves the directory"), "{error}");
    }
    for tag in ["\"../../../x\"", "\"\"", "\"a/b\""] {
        hostile(Box::new(move |asked, _, answer| {
            if asked.path.starts_with("/api/") {
                return answer;
            }
            Answer::of(200).with("ETag", tag)
        }));
    }
    hostile(Box::new(|_, _, _| {
        Answer::of(200).body("{\"sha\": \"../x\", \"siblings\": []}")
    }));
    hostile(Box::new(|_, _, _| Answer::of(200).body("<html>")));
    hostile(Box::new(|_, _, _| {
        Answer::of(200).body(vec![b' '; 17 << 20])
    }));
    // A redirect without end.
    hostile(Box::new(|asked, _, _| {
        Answer::of(302).with("Location", &asked.path)
    }));
    let mut shards = files();
    shards.remove(WEIGHTS);
    let index = r#"{"weight_map": {"a": "../../../x"}}"#;
    shards.insert("model.safetensors.index.json".to_owned(), index.into());
    let server = Server::of(model(shards));
    let error = User::of(&server).refused().to_string();
    assert!(error.contains("is not the name of a file"), "{error}");
}

#[test]
fn weights_in_another_format_are_refused_before_they_are_requested() {
    let mut other = files();
    other.remove(WEIGHTS);
    let server = Server::of(model(other.clone()));
    let refused = User::of(&server).refused();
    assert!(matches!(refused, Cause::Format(name) if name == "pytorch_model.bin"));
    assert!(gets(&server, ".bin").is_empty());
    other.remove("pytorch_model.bin");
    let refused = User::of(&Server::of(model(other))).refused();
    assert!(matches!(refused, Cause::NoWeights));
}

#[test]
fn a_folder_of_a_repository_is_a_model() {
    let other = files()
        .into_iter()
        .map(|(name, bytes)| match name.as_str() {
            WEIGHTS => (format!("a/b/{name}"), vec![3; 20]),
            _ => (format!("a/b/{name}"), bytes),
        });
    let server = Server::of(model(files().into_iter().chain(other).collect()));
    let user = User::of(&server);
    let repo = Repo::model(ID, None).within(Some("a/b"));
    user.download_of(&repo, &|| false).unwrap();
    let hub = Hub::of(user.settings.clone());
    let directory = hub.snapshot_with(&repo, WEIGHTS).unwrap();
    assert!(directory.ends_with(format!("snapshots/{COMMIT}/a/b")));
    let expected = ["config.json", WEIGHTS, "tokenizer.json"];
    assert_eq!(names(&directory), expected);
    assert_eq!(std::fs::read(directory.join(WEIGHTS)).unwrap(), [3; 20]);
    assert_eq!(names(directory.parent().unwrap().parent().unwrap()), ["a"]);
    assert_eq!(
        repo.download_command(None),
        format!("hf download {ID} --include 'a/b/*'")
    );
    let elsewhere = Repo::model(ID, None).within(Some("c"));
    let refused = user.download_of(&elsewhere, &|| false).unwrap_err();
    assert!(matches!(*refused.cause, Cause::NoWeights));
}

#[test]
fn a_commit_needs_no_reference() {
    let server = Server::of(model(files()));
    let user = User::of(&server);
    let repo = Repo::model(ID, Some(COMMIT));
    user.download_of(&repo, &|| false).unwrap();
    assert!(!user.folder().join("refs").exists());
    let hub = Hub::of(user.settings.clone());
    assert!(hub.snapshot_with(&repo, WEIGHTS).is_some());
    assert_eq!(hub.snapshot_with(&Repo::model(ID, None), WEIGHTS), None);
}

#[test]
fn a_signal_ends_a_download_that_waits() {
    static STALLS: AtomicBool = AtomicBool::new(false);
    let server = server(Box::new(|asked, _, answer| {
        if asked.is_lfs {
            STALLS.store(true, Ordering::Relaxed);
            return Answer::of(503).with("Retry-After", 100);
        }
        answer
    }));
    let user = User::of(&server);
    let stopped = || STALLS.load(Ordering::Relaxed);
    let error = user.download_of(&Repo::model(ID, None), &stopped);
    assert!(matches!(*error.unwrap_err().cause, Cause::Stopped));
    assert!(!user.folder().join("refs").exists());
}

#[test]
fn two_downloads_at_once_request_the_weights_once() {
    let server = server(Box::new(|_, _, answer| answer));
    let user = User::of(&server);
    std::thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| user.download().unwrap()));
        for one in both {
            one.join().unwrap();
        }
    });
    assert_eq!(user.weights(), files()[WEIGHTS]);
    assert_eq!(of_lfs(&server).len(), 1);
}
