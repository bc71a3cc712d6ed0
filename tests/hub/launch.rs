//! Launches of the real binary with a model of the hub.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use evenkeel::hub::Kind;

use super::server::{Answer, COMMIT, Repository, Server, Trouble};

const ID: &str = "acme/tiny";
pub const NO_SERVER: &str = "http://127.0.0.1:1";

/// A Llama that transformers has written, with a tokenizer of words.
pub fn model() -> Repository {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = directory.join("tests/reference/transformers_sharded_bf16");
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        files.insert(name, std::fs::read(&path).unwrap());
    }
    let words = ["</s>", "<unk>", "a", "b", "c", "d"];
    let ids = words.iter().enumerate();
    let vocabulary: BTreeMap<&str, usize> = ids.map(|(id, word)| (*word, id)).collect();
    let end = json!({"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                     "normalized": false, "special": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    files.insert("tokenizer.json".to_owned(), tokenizer.to_string().into());
    Repository {
        kind: Kind::Model,
        id: ID,
        revision: "main",
        commit: COMMIT,
        files,
    }
}

/// A recipe in the native format.
pub fn native(spec: &Value) -> String {
    let recipe = json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "run"}, "spec": spec,
    });
    recipe.to_string()
}

/// A directory with a recipe, and the home of a user's caches.
pub struct Place {
    directory: tempfile::TempDir,
    endpoint: String,
}

impl Place {
    fn of(endpoint: &str, samples: u64) -> Place {
        let spec = json!({
            "objective": "language-modelling",
            "model": {"path": ID},
            "batch": {"global": 4, "per_device_batch_size": 2},
            "budget": {"samples": samples},
            "data": {"sequence_length": 8, "train": [{"path": "data.jsonl"}]},
        });
        let place = Place::with(endpoint, &native(&spec));
        let rows = "{\"text\": \"a b c d a b c d a b c d\"}\n".repeat(50);
        std::fs::write(place.path("data.jsonl"), rows).unwrap();
        place
    }

    pub fn with(endpoint: &str, recipe: &str) -> Place {
        let place = Place {
            directory: tempfile::tempdir().unwrap(),
            endpoint: endpoint.to_owned(),
        };
        std::fs::write(place.path("recipe.yaml"), recipe).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        let model = self.path("home/hub/models--acme--tiny");
        model.join("snapshots").join(commit)
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command
            .current_dir(self.directory.path())
            .args(words)
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.path("home"))
            .env("HF_TOKEN", "hf_secret")
            .stdin(Stdio::null());
        for name in ["HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
            command.env_remove(name);
        }
        command
    }

    /// Launches into the directory `run`.
    pub fn launch(&self, run: &str) -> Command {
        let words = ["launch", "recipe.yaml", "--procs", "1", "--device", "cpu"];
        self.command(&[&words[..], &["--quiet", "--out", run]].concat())
    }

    pub fn run_of(&self, name: &str) -> Value {
        let text = std::fs::read(self.path(name).join("run.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// The standard error, without the names of this test.
    pub fn text(&self, output: &Output) -> String {
        let text = String::from_utf8(output.stderr.clone()).unwrap();
        let place = self.directory.path().to_str().unwrap();
        text.replace(&self.endpoint, "[hub]")
            .replace(place, "[place]")
    }

    pub fn succeeds(&self, command: &mut Command) {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", self.text(&output));
    }

    /// Stops a launch into the directory `run` after its first step.
    pub fn drain(&self, mut command: Command, generation: u64) {
        let log = std::fs::File::create(self.path("log")).unwrap();
        let command = command.stdout(log.try_clone().unwrap()).stderr(log);
        let mut child = command.spawn().unwrap();
        let metrics = self.path(&format!("run/gen-{generation}/metrics.jsonl"));
        let start = Instant::now();
        while !std::fs::metadata(&metrics).is_ok_and(|about| about.len() > 0) {
            let log = || std::fs::read_to_string(self.path("log")).unwrap();
            assert_eq!(child.try_wait().unwrap(), None, "{}", log());
            assert!(start.elapsed() < Duration::from_secs(240), "{}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(143));
    }
}

/// What the agent of a pod starts: the cache is in the run's directory.
#[test]
fn a_pod_downloads_into_the_directory_of_its_run() {
    let server = Server::of(model());
    let place = Place::of(&server.endpoint, 16);
    let text = std::fs::read_to_string(place.path("recipe.yaml")).unwrap();
    let snapshot = json!([{"text": text}, "Exact"]);
    std::fs::write(place.path("snapshot.json"), snapshot.to_string()).unwrap();
    let prepare = |endpoint: &str| {
        let words = ["prepare", "snapshot.json", "--procs", "1", "--out", "run"];
        let mut command = place.command(&words);
        command.env_remove("HF_HOME").env("HF_ENDPOINT", endpoint);
        command
    };
    let output = prepare(NO_SERVER).output().unwrap();
    assert_eq!(output.status.code(), Some(74), "{}", place.text(&output));
    place.succeeds(&mut prepare(&server.endpoint));
    let cached = "run/hub/models--acme--tiny/snapshots";
    assert!(place.path(cached).join(COMMIT).is_dir());
    let path = place.run_of("run")["weights"].as_str().unwrap().to_owned();
    assert!(path.ends_with(&format!("{cached}/{COMMIT}")), "{path}");
}

#[test]
fn a_model_of_the_hub_is_downloaded_once_and_trained() {
    let server = Server::of(model());
    let place = Place::of(&server.endpoint, 16);
    for words in [
        &["plan", "recipe.yaml", "--trainer", "built-in"][..],
        &["check", "recipe.yaml", "--trainer", "built-in"],
    ] {
        place.succeeds(&mut place.command(words));
    }
    let output = place.launch("dry").arg("--dry-run").output().unwrap();
    let text = place.text(&output);
    assert!(
        text.contains("downloads acme/tiny at revision main"),
        "{text}"
    );
    assert!(server.asked().is_empty(), "a plan downloads nothing");

    place.succeeds(&mut place.launch("first"));
    let run = place.run_of("first");
    let snapshot = place.snapshot(COMMIT);
    assert_eq!(run["spec"]["model"]["path"], json!(snapshot));
    assert_eq!(run["weights"], json!(snapshot));
    assert_eq!(run["model"]["hidden_size"], 16);
    let asked = server.asked();
    assert_eq!(asked.iter().filter(|asked| asked.is_lfs).count(), 3);
    for asked in &asked {
        let token = (!asked.is_lfs).then_some("Bearer hf_secret");
        assert_eq!(asked.header("authorization"), token, "{asked:?}");
        assert!(!asked.path.ends_with("expected.json"));
    }

    // From the cache, with and without a network.
    place.succeeds(&mut place.launch("second"));
    place.succeeds(place.launch("third").env("HF_HUB_OFFLINE", "1"));
    assert_eq!(server.asked().len(), asked.len());

    // The cache of huggingface_hub, whose links are to a commit.
    let other = Place::of(NO_SERVER, 16);
    let folder = other.path("cache/models--acme--tiny");
    let theirs = folder.join("snapshots").join(COMMIT);
    for part in ["blobs", "refs", "snapshots"] {
        std::fs::create_dir_all(folder.join(part)).unwrap();
    }
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(folder.join("refs/main"), COMMIT).unwrap();
    for (number, (name, bytes)) in model().files.iter().enumerate() {
        std::fs::write(folder.join(format!("blobs/{number}")), bytes).unwrap();
        let blob = format!("../../blobs/{number}");
        std::os::unix::fs::symlink(blob, theirs.join(name)).unwrap();
    }
    let cache = other.path("cache");
    other.succeeds(other.launch("run").env("HF_HUB_CACHE", &cache));
    let weights = &other.run_of("run")["weights"];
    assert_eq!(weights, &json!(theirs));
}

#[test]
fn a_resume_needs_no_network_and_keeps_its_commit() {
    let server = Server::of(model());
    let place = Place::of(&server.endpoint, 10_000_000);
    place.drain(place.launch("run"), 1);
    let asked = server.asked().len();

    // The branch moves, here to a commit without files.
    let moved = COMMIT.replace('0', "f");
    std::fs::create_dir(place.snapshot(&moved)).unwrap();
    let main = place.path("home/hub/models--acme--tiny/refs/main");
    std::fs::write(&main, &moved).unwrap();
    let mut resume = place.launch("run");
    resume.arg("--resume").env("HF_ENDPOINT", NO_SERVER);
    place.drain(resume, 2);
    assert_eq!(server.asked().len(), asked);
    assert_eq!(std::fs::read_to_string(&main).unwrap(), moved);

    // Without its snapshot it names the commit.
    std::fs::remove_dir_all(place.snapshot(COMMIT)).unwrap();
    let output = place.launch("run").arg("--resume").output().unwrap();
    let text = place.text(&output);
    let help = format!("restore it with `hf download {ID} --revision {COMMIT}`");
    assert!(text.contains(&help), "{text}");
}

#[test]
fn a_model_that_does_not_train_is_refused_by_its_config() {
    let mut other = model();
    let config = json!({"model_type": "phi3", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 24,
                        "num_attention_heads": 4});
    other
        .files
        .insert("config.json".to_owned(), config.to_string().into());
    let server = Server::of(other);
    let place = Place::of(&server.endpoint, 16);
    let output = place.launch("run").output().unwrap();
    let text = place.text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("error[trainer-model]"), "{text}");
    assert!(text.contains("phi3"), "{text}");
    let is_weights = |path: &str| path.contains("safetensors");
    assert!(!server.asked().iter().any(|asked| is_weights(&asked.path)));
    assert!(!place.path("run").exists());
}

#[test]
fn what_cannot_be_downloaded_ends_with_the_next_command() {
    let gated: Trouble = Box::new(|_, _, _| Answer::of(403).with("X-Error-Code", "GatedRepo"));
    let mut without_safetensors = model();
    without_safetensors
        .files
        .retain(|name, _| !name.contains("safetensors"));
    let pytorch = "pytorch_model.bin".to_owned();
    without_safetensors.files.insert(pytorch, vec![0; 10]);
    let servers = [
        Server::with(vec![model()], gated),
        Server::of(without_safetensors),
    ];
    let mut texts = Vec::new();
    let endpoints = servers.iter().map(|server| server.endpoint.as_str());
    for endpoint in endpoints.chain([NO_SERVER]) {
        let place = Place::of(endpoint, 16);
        let output = place.launch("run").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(!place.path("run").exists());
        texts.push(place.text(&output));
    }
    let place = Place::of(NO_SERVER, 16);
    let output = place.launch("run").env("HF_HUB_OFFLINE", "1").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    texts.push(place.text(&output));
    insta::assert_snapshot!(texts.join("\n"));
}
