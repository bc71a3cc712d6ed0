//! Progress of an external trainer. Its sources are the `KubeflowCallback` of transformers, which posts to
//! [`PostServer`]; the file that `EVENKEEL_PROGRESS` names; `trainer_state.json` in the newest checkpoint; and the
//! output of rank 0, searched with `trainer.progress_pattern`. The source with the latest step counts.
//!
//! Sources: transformers 5.23.0, `integrations/integration_utils.py` and `trainer_callback.py`.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use axum::routing::post;
use axum::{Json, Router};
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lifecycle::{Generation, files};
use crate::recipe::schema::progress_pattern;
use crate::telemetry::{ExternalStep, StepRecord, now};
use crate::util::input::{self, STATE_BYTES};
use crate::util::key::{hex, nonce};
use crate::util::lock::lock;
use crate::util::serve::serve;

/// Time between two looks at the files.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two looks for a checkpoint, whose directory may hold many.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(10);
/// Largest body of a post, bytes.
const BODY: usize = 64 << 10;
/// Largest count that is read from text: JSON numbers are exact up to here.
const MOST: f64 = (1_u64 << 53) as f64;

/// Longest text that is searched, bytes. The time of a search grows with the text and with the pattern.
const SEARCHED: usize = 4 << 10;

/// Progress as a trainer reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimiser steps so far, over all restarts.
    pub step: u64,
    /// Steps after which it ends.
    pub total_steps: Option<u64>,
    pub loss: Option<f64>,
    pub learning_rate: Option<f64>,
    pub grad_norm: Option<f64>,
    /// Tokens so far.
    pub tokens: Option<u64>,
}

/// Watches the progress of one generation.
pub struct ProgressWatch {
    file: PathBuf,
    /// The checkpoint whose progress is known: at first the one from which the generation continues.
    known: Option<PathBuf>,
    /// The newest post to a server.
    posted: Option<Progress>,
    pattern: Option<Regex>,
    /// The newest progress in the output.
    printed: Option<Progress>,
    /// The last progress that was returned, and its time.
    last: Option<(Progress, f64)>,
    started: f64,
    looked: Instant,
    looked_for_checkpoint: Instant,
}

impl ProgressWatch {
    /// Begins to watch; `pattern` is `trainer.progress_pattern`, and `resumed` the checkpoint from which the generation
    /// continues.
    pub fn start(
        run_dir: &Path,
        generation: u64,
        pattern: Option<&str>,
        resumed: Option<&Path>,
    ) -> ProgressWatch {
        let file = run_dir
            .join(files::generation(generation))
            .join(files::PROGRESS);
        // A repeated start of the generation must not read the older one's.
        let _ = fs::remove_file(&file);
        let now_at = Instant::now();
        ProgressWatch {
            file,
            known: resumed.map(Path::to_owned),
            posted: None,
            // The reader has refused invalid patterns.
            pattern: pattern.and_then(|pattern| progress_pattern::compile(pattern).ok()),
            printed: None,
            last: None,
            started: now(),
            looked: now_at,
            looked_for_checkpoint: now_at,
        }
    }

    /// The variable of the ranks on the host of rank 0.
    pub fn variable(&self) -> (&'static str, OsString) {
        ("EVENKEEL_PROGRESS", self.file.clone().into())
    }

    /// Takes what rank 0 has posted on its host.
    pub fn take_post(&mut self, progress: Progress) {
        self.posted = Some(progress);
    }

    /// Searches a line of rank 0's output. The texts of a progress bar are separated by carriage returns.
    pub fn search(&mut self, line: &str) {
        if let Some(pattern) = &self.pattern {
            let mut texts = line.rsplit('\r').filter(|text| text.len() <= SEARCHED);
            let newest = texts.find_map(|text| of_text(pattern, text));
            self.printed = newest.or(self.printed);
        }
    }

    #[cfg(test)]
    pub(crate) fn printed_step(&self) -> Option<u64> {
        Some(self.printed?.step)
    }

    /// The newest progress as a step of the generation, if it has changed. `ended`: the ranks have exited, so the
    /// files are read at once. `checkpoint` finds the trainer's newest checkpoint.
    pub fn next(
        &mut self,
        generation: &Generation,
        ended: bool,
        checkpoint: impl FnOnce() -> Option<PathBuf>,
    ) -> Option<StepRecord> {
        let sources = [
            self.saved(ended, checkpoint),
            self.printed.take(),
            self.written(ended),
            self.posted.take(),
        ];
        let newest = sources
            .into_iter()
            .flatten()
            .max_by_key(|found| found.step)?;
        let before = self.last.map(|(progress, _)| progress);
        if before.is_some_and(|before| newest.step <= before.step) {
            return None;
        }
        Some(self.record(newest, generation))
    }

    fn written(&mut self, ended: bool) -> Option<Progress> {
        if !ended && self.looked.elapsed() < INTERVAL {
            return None;
        }
        self.looked = Instant::now();
        let report = read(&self.file)?;
        of_numbers(|key| report[key].as_f64())
    }

    fn saved(
        &mut self,
        ended: bool,
        checkpoint: impl FnOnce() -> Option<PathBuf>,
    ) -> Option<Progress> {
        if !ended && self.looked_for_checkpoint.elapsed() < CHECKPOINT_INTERVAL {
            return None;
        }
        self.looked_for_checkpoint = Instant::now();
        let newest = checkpoint().filter(|path| Some(path) != self.known.as_ref())?;
        let progress = of_state(&read(&newest.join("trainer_state.json"))?)?;
        self.known = Some(newest);
        Some(progress)
    }

    fn record(&mut self, progress: Progress, generation: &Generation) -> StepRecord {
        let time = now();
        let (before, since) = self
            .last
            .unwrap_or_else(|| (Progress::default(), self.started));
        self.last = Some((progress, time));
        let plan = &generation.plan;
        let batch = plan.global_batch_size;
        // The first report covers the steps since the resumed checkpoint, whose number is unknown.
        let tokens = before.tokens.zip(progress.tokens);
        StepRecord {
            generation: generation.number,
            step: progress.step,
            samples: progress.step.saturating_mul(batch),
            batch,
            world: generation.world(),
            loss: progress.loss.unwrap_or(f64::NAN),
            tokens: tokens.map_or(0, |(before, after)| after.saturating_sub(before)),
            learning_rate: progress.learning_rate.unwrap_or(f64::NAN),
            gradient_norm: progress.grad_norm.unwrap_or(f64::NAN),
            seconds: (time - since).max(0.0),
            time,
            norm_test: None,
            coordinate_test: None,
            preferences: None,
            external: Some(ExternalStep {
                total_samples: progress
                    .total_steps
                    .map(|total| total.saturating_mul(batch)),
            }),
        }
    }
}

/// A file's JSON; `None` if it is missing, too large or half-written. Numbers that JSON does not have, as Python
/// writes them, become null.
fn read(file: &Path) -> Option<Value> {
    let text = String::from_utf8(input::read(file, STATE_BYTES).ok()?).ok()?;
    serde_json::from_str(&text)
        .or_else(|_| serde_json::from_str(&without_nan(&text)))
        .ok()
}

/// The text with null in place of `NaN`, `Infinity` and `-Infinity`.
fn without_nan(text: &str) -> String {
    let mut changed = String::with_capacity(text.len());
    let mut in_string = false;
    for part in text.split_inclusive('"') {
        let before = part.trim_end_matches('"');
        if in_string {
            let backslashes = before.len() - before.trim_end_matches('\\').len();
            in_string = backslashes % 2 == 1;
            changed.push_str(part);
        } else {
            in_string = true;
            let part = part.replace("-Infinity", "null");
            changed.push_str(&part.replace("Infinity", "null").replace("NaN", "null"));
        }
    }
    changed
}

/// The progress that numbers with the names of its fields state.
fn of_numbers(number: impl Fn(&str) -> Option<f64>) -> Option<Progress> {
    let count = |name: &str| number(name).and_then(count);
    Some(Progress {
        step: count("step")?,
        total_steps: count("total_steps"),
        loss: number("loss"),
        learning_rate: number("learning_rate"),
        grad_norm: number("grad_norm"),
        tokens: count("tokens"),
    })
}

/// The progress in transformers' `TrainerState`.
fn of_state(state: &Value) -> Option<Progress> {
    let logged = |key: &str| {
        let history = state["log_history"].as_array()?;
        history.iter().rev().find_map(|record| record[key].as_f64())
    };
    let total = state["max_steps"].as_u64();
    Some(Progress {
        step: state["global_step"].as_u64()?,
        total_steps: total.filter(|&total| total > 0),
        loss: logged("loss"),
        learning_rate: logged("learning_rate"),
        grad_norm: logged("grad_norm"),
        tokens: state["num_input_tokens_seen"]
            .as_u64()
            .filter(|&tokens| tokens > 0),
    })
}

/// The progress in a text of the output.
fn of_text(pattern: &Regex, text: &str) -> Option<Progress> {
    let found = pattern.captures(text)?;
    of_numbers(|name| found.name(name)?.as_str().parse().ok())
}

/// A count from a number that may have a fraction, as in `900.0`.
fn count(number: f64) -> Option<u64> {
    (0.0..=MOST).contains(&number).then_some(number as u64)
}

/// The URL to which `KubeflowCallback` posts.
const SERVER: &str = "KUBEFLOW_TRAINER_SERVER_URL";
/// The path of its token.
const TOKEN: &str = "KUBEFLOW_TRAINER_SERVER_TOKEN";

/// Answers `KubeflowCallback` on the loopback interface, until it is dropped. Only rank 0 posts, but the callback needs a
/// server wherever it is loaded.
pub struct PostServer {
    address: SocketAddr,
    /// The file of the token.
    token: PathBuf,
    newest: Arc<Mutex<Option<Progress>>>,
    _runtime: tokio::runtime::Runtime,
}

impl PostServer {
    /// Starts it for the ranks of a generation from `first` on; `None` if another one is named here, or it cannot listen.
    /// The other sources remain.
    pub fn start(run_dir: &Path, generation: u64, first: u64) -> Option<PostServer> {
        if std::env::var_os(SERVER).is_some() {
            return None;
        }
        let directory = run_dir.join(files::generation(generation));
        PostServer::listen(&directory.join(files::progress_token(first))).ok()
    }

    /// Environment variables of the ranks.
    pub fn variables(&self) -> [(&'static str, OsString); 2] {
        [
            (SERVER, format!("http://{}/", self.address).into()),
            (TOKEN, self.token.clone().into()),
        ]
    }

    /// The newest post since the last call.
    pub fn newest(&self) -> Option<Progress> {
        lock(&self.newest).take()
    }

    fn listen(token: &Path) -> io::Result<PostServer> {
        let secret = hex(&nonce()?);
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        io::Write::write_all(&mut options.open(token)?, secret.as_bytes())?;
        let newest = Arc::<Mutex<Option<Progress>>>::default();
        let posted = Arc::clone(&newest);
        let expected = format!("Bearer {secret}");
        let receive = async move |headers: HeaderMap, Json(body): Json<Value>| {
            let given = headers.get(AUTHORIZATION).map(|given| given.as_bytes());
            if given != Some(expected.as_bytes()) {
                return StatusCode::UNAUTHORIZED;
            }
            if let Some(progress) = of_post(&body) {
                *lock(&posted) = Some(progress);
            }
            StatusCode::OK
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("progress")
            .enable_all()
            .build()?;
        let listening = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = runtime.block_on(listening)?;
        let address = listener.local_addr()?;
        let routes = Router::new()
            .route("/", post(receive))
            .layer(DefaultBodyLimit::max(BODY));
        runtime.spawn(serve(listener, routes));
        Ok(PostServer {
            address,
            token: token.to_owned(),
            newest,
            _runtime: runtime,
        })
    }
}

/// The progress in a post: a list of metrics, each with a name and a value in Python's text. Its estimate of the
/// remaining time is wrong after a resume, so ours is computed from steps.
fn of_post(body: &Value) -> Option<Progress> {
    let metrics = body["trainerStatus"]["metrics"].as_array()?;
    let metric = |name: &str| -> Option<f64> {
        let found = metrics.iter().rev().find(|metric| metric["name"] == name)?;
        found["value"].as_str()?.parse().ok()
    };
    let count = |name| metric(name).and_then(count);
    Some(Progress {
        tokens: count("num_tokens").or_else(|| count("num_input_tokens_seen")),
        ..of_numbers(|name| metric(if name == "step" { "current_step" } else { name }))?
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::lifecycle::generation::testing;
    use crate::plan::{self, PlanRequest};
    use crate::recipe::read_text;
    use crate::recipe::schema::request::Request;

    fn generation() -> Generation {
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                    evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let recipe = read_text(&request, text.to_owned()).unwrap();
        let plan = plan::plan(&recipe, &PlanRequest::gpus(2)).unwrap();
        testing::record(3, Vec::new(), plan)
    }

    const PATTERN: &str =
        "step (?<step>[0-9]+)(?: of (?<total_steps>[0-9]+))?(?: loss=(?<loss>\\S+))?";

    fn watch(run_dir: &Path) -> ProgressWatch {
        fs::create_dir_all(run_dir.join("gen-3")).unwrap();
        ProgressWatch::start(run_dir, 3, Some(PATTERN), None)
    }

    #[test]
    fn a_written_file_is_a_step_of_the_plans_batch() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut watch = watch(run_dir.path());
        let (name, file) = watch.variable();
        assert_eq!(name, "EVENKEEL_PROGRESS");
        let mut next = |text: &str| {
            fs::write(&file, text).unwrap();
            watch.next(&generation(), true, || None)
        };
        let step = next(r#"{"step": 10, "total_steps": 40, "loss": 2.5, "tokens": 1000}"#).unwrap();
        assert_eq!((step.step, step.samples, step.batch), (10, 160, 16));
        assert_eq!((step.loss, step.tokens), (2.5, 0));
        assert_eq!(step.external.unwrap().total_samples, Some(640));
        let step = next(r#"{"step": 12, "tokens": 1600}"#).unwrap();
        assert_eq!((step.step, step.tokens), (12, 600));
        assert!(step.loss.is_nan());
        // Numbers as Python writes them, and values that are no numbers.
        let step = next(r#"{"step": 13.0, "loss": NaN, "tokens": "many", "note": "\"NaN"}"#);
        assert_eq!(step.unwrap().step, 13);
        for same_or_no_progress in [
            r#"{"step": 12}"#,
            r#"{"step": 11}"#,
            r#"{"step": "#,
            "[]",
            "",
        ] {
            assert_eq!(next(same_or_no_progress), None, "{same_or_no_progress}");
        }
    }

    #[test]
    fn the_newest_checkpoint_tells_the_progress_of_older_trainers() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut watch = watch(run_dir.path());
        let checkpoint = run_dir.path().join("checkpoint-20");
        fs::create_dir(&checkpoint).unwrap();
        let state = json!({"global_step": 20, "max_steps": 50, "num_input_tokens_seen": 0, "log_history": [
            {"step": 10, "loss": 3.0, "learning_rate": 1e-4, "grad_norm": "NaN"}, {"step": 20, "loss": 2.0}, {"eval_loss": 9.0}]});
        fs::write(
            checkpoint.join("trainer_state.json"),
            state.to_string().replace("\"NaN\"", "NaN"),
        )
        .unwrap();
        let step = watch
            .next(&generation(), true, || Some(checkpoint.clone()))
            .unwrap();
        assert_eq!((step.step, step.loss, step.learning_rate), (20, 2.0, 1e-4));
        assert_eq!(
            watch.next(&generation(), true, || Some(checkpoint.clone())),
            None
        );
        // The one from which it continues.
        let mut watch = ProgressWatch::start(run_dir.path(), 3, None, Some(&checkpoint));
        assert_eq!(watch.next(&generation(), true, || Some(checkpoint)), None);
    }

    #[test]
    fn the_newest_match_of_the_pattern_is_the_progress() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut watch = watch(run_dir.path());
        let mut next = |lines: &[&str]| {
            lines.iter().for_each(|line| watch.search(line));
            watch.next(&generation(), false, || None)
        };
        assert_eq!(next(&["epoch 1", "step x"]), None);
        let step = next(&["step 4 of 40 loss=3.5", "step 5 of 40 loss=3.25", "saved"]).unwrap();
        assert_eq!((step.step, step.samples, step.loss), (5, 80, 3.25));
        assert_eq!(step.external.unwrap().total_samples, Some(640));
        // A progress bar overwrites its text.
        let step = next(&["10%|step 6\r20%|step 7\r30%|"]).unwrap();
        assert_eq!(step.step, 7);
        assert!(step.loss.is_nan());
        // Lines of an evaluation.
        assert_eq!(next(&["step 1", "step 1e99"]), None);
    }

    #[test]
    fn the_source_with_the_latest_step_counts() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut watch = watch(run_dir.path());
        let (_, file) = watch.variable();
        let mut next = |printed: u64, written: u64| {
            watch.search(&format!("step {printed}"));
            fs::write(&file, json!({"step": written}).to_string()).unwrap();
            Some(watch.next(&generation(), true, || None)?.step)
        };
        assert_eq!(next(3, 2), Some(3));
        assert_eq!(next(3, 4), Some(4));
        assert_eq!(next(4, 3), None);
    }

    #[test]
    fn files_are_read_at_intervals_until_the_end() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut watch = watch(run_dir.path());
        let (_, file) = watch.variable();
        fs::write(&file, r#"{"step": 1}"#).unwrap();
        let no_checkpoint = || -> Option<PathBuf> { panic!("searched before its time") };
        assert_eq!(watch.next(&generation(), false, no_checkpoint), None);
        let step = watch.next(&generation(), true, || None).unwrap();
        assert_eq!(step.step, 1);
    }

    #[test]
    fn only_a_post_with_the_token_is_progress() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut watch = watch(run_dir.path());
        let server = PostServer::start(run_dir.path(), 3, 0).unwrap();
        let variables = server.variables();
        let value = |name: &str| {
            let (_, value) = variables.iter().find(|(of, _)| *of == name).unwrap();
            value.clone().into_string().unwrap()
        };
        let address = value(SERVER);
        let address = address.trim_start_matches("http://").trim_end_matches('/');
        let token = fs::read_to_string(value(TOKEN)).unwrap();
        let metrics = json!([{"name": "loss", "value": "1.5"}, {"name": "current_step", "value": "7"},
            {"name": "total_steps", "value": "70"}, {"name": "num_tokens", "value": "900.0"}]);
        let body =
            json!({"trainerStatus": {"progressPercentage": 10, "metrics": metrics}}).to_string();
        let post = |token: &str| {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            let request = format!(
                "POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
            let mut answer = String::new();
            io::Read::read_to_string(&mut stream, &mut answer).unwrap();
            answer[9..12].to_owned()
        };
        assert_eq!(post("guess"), "401");
        assert_eq!(server.newest(), None);
        assert_eq!(post(&token), "200");
        watch.take_post(server.newest().unwrap());
        let step = watch.next(&generation(), true, || None).unwrap();
        assert_eq!((step.step, step.samples, step.loss), (7, 112, 1.5));
        assert_eq!(step.external.unwrap().total_samples, Some(1120));
    }
}
