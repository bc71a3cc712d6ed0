//! Progress of an external trainer, from one of three sources: the `KubeflowCallback` of transformers, which
//! posts to [`Server`]; the file that `EVENKEEL_PROGRESS` names; `trainer_state.json` in the newest
//! checkpoint.
//!
//! Sources: transformers 5.23.0, `integrations/integration_utils.py` and `trainer_callback.py`.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::Value;

use crate::lifecycle::{Generation, files};
use crate::telemetry::{ExternalStep, StepRecord, now};
use crate::util::input;

/// Time between two looks at the files.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two looks for a checkpoint, whose directory may hold many.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(10);
/// Largest body of a post, bytes.
const BODY: usize = 64 << 10;
/// Largest file that is read, bytes. transformers' state has a record for each logged step.
const FILE: u64 = 64 << 20;

/// Progress as a trainer reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Progress {
    /// Optimiser steps so far, over all restarts.
    pub step: u64,
    /// Steps after which it ends.
    #[serde(default)]
    pub total_steps: Option<u64>,
    #[serde(default)]
    pub loss: Option<f64>,
    #[serde(default)]
    pub learning_rate: Option<f64>,
    #[serde(default)]
    pub grad_norm: Option<f64>,
    /// Tokens so far.
    #[serde(default)]
    pub tokens: Option<u64>,
}

/// Watches the progress of one generation on the host of rank 0.
pub struct ProgressWatch {
    file: PathBuf,
    server: Option<Server>,
    /// The last progress that was returned, and its time.
    last: Option<(Progress, f64)>,
    started: f64,
    looked: Instant,
    looked_for_checkpoint: Instant,
}

impl ProgressWatch {
    /// Begins to watch. Without a server, the other sources remain.
    pub fn start(run: &Path, generation: u64) -> ProgressWatch {
        let directory = run.join(files::generation(generation));
        let file = directory.join(files::PROGRESS);
        // A repeated start of the generation must not read the older one's.
        let _ = fs::remove_file(&file);
        let used = std::env::var_os(SERVER).is_some();
        let server = (!used).then(|| Server::start(&directory.join(files::PROGRESS_TOKEN)).ok());
        let now_at = Instant::now();
        ProgressWatch {
            file,
            server: server.flatten(),
            last: None,
            started: now(),
            looked: now_at,
            looked_for_checkpoint: now_at,
        }
    }

    /// Environment variables of the ranks.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![("EVENKEEL_PROGRESS", self.file.clone().into())];
        if let Some(server) = &self.server {
            variables.push((SERVER, format!("http://{}/", server.address).into()));
            variables.push((TOKEN, server.token.clone().into()));
        }
        variables
    }

    /// The next look at the files does not wait.
    pub fn look_at_once(&mut self) {
        for looked in [&mut self.looked, &mut self.looked_for_checkpoint] {
            *looked = looked.checked_sub(CHECKPOINT_INTERVAL).unwrap_or(*looked);
        }
    }

    /// The newest progress as a step of the generation, if it has changed. `checkpoint` finds the trainer's newest
    /// checkpoint.
    pub fn next(
        &mut self,
        generation: &Generation,
        checkpoint: impl FnOnce() -> Option<PathBuf>,
    ) -> Option<StepRecord> {
        let posted = self.server.as_ref().and_then(Server::take);
        let found = posted
            .or_else(|| self.written())
            .or_else(|| self.saved(checkpoint))?;
        let before = self.last.map(|(progress, _)| progress);
        // The file's and the checkpoint's may be older than a posted one.
        if before.is_some_and(|before| found.step <= before.step) {
            return None;
        }
        Some(self.record(found, generation))
    }

    fn written(&mut self) -> Option<Progress> {
        if self.looked.elapsed() < INTERVAL {
            return None;
        }
        self.looked = Instant::now();
        serde_json::from_value(read(&self.file)?).ok()
    }

    fn saved(&mut self, checkpoint: impl FnOnce() -> Option<PathBuf>) -> Option<Progress> {
        if self.looked_for_checkpoint.elapsed() < CHECKPOINT_INTERVAL {
            return None;
        }
        self.looked_for_checkpoint = Instant::now();
        of_state(&read(&checkpoint()?.join("trainer_state.json"))?)
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
            external: Some(ExternalStep {
                total_samples: progress
                    .total_steps
                    .map(|total| total.saturating_mul(batch)),
            }),
        }
    }
}

/// A file's JSON; `None` if it is missing, too large or half-written.
fn read(file: &Path) -> Option<Value> {
    serde_json::from_slice(&input::read(file, FILE).ok()?).ok()
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

/// The URL to which `KubeflowCallback` posts.
const SERVER: &str = "KUBEFLOW_TRAINER_SERVER_URL";
/// The path of its token.
const TOKEN: &str = "KUBEFLOW_TRAINER_SERVER_TOKEN";

/// Answers `KubeflowCallback` on the loopback interface, until it is dropped.
struct Server {
    address: SocketAddr,
    /// The file of the token.
    token: PathBuf,
    newest: Arc<Mutex<Option<Progress>>>,
    _runtime: tokio::runtime::Runtime,
}

#[derive(Clone)]
struct Expected {
    authorization: Arc<str>,
    newest: Arc<Mutex<Option<Progress>>>,
}

impl Server {
    fn start(token: &Path) -> io::Result<Server> {
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let secret = format!("{:032x}", u128::from_le_bytes(random));
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        io::Write::write_all(&mut options.open(token)?, secret.as_bytes())?;
        let newest = Arc::default();
        let expected = Expected {
            authorization: format!("Bearer {secret}").into(),
            newest: Arc::clone(&newest),
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
            .layer(DefaultBodyLimit::max(BODY))
            .with_state(expected);
        runtime.spawn(async move { axum::serve(listener, routes).await });
        Ok(Server {
            address,
            token: token.to_owned(),
            newest,
            _runtime: runtime,
        })
    }

    /// The progress posted since the last call.
    fn take(&self) -> Option<Progress> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.take()
    }
}

async fn receive(
    State(expected): State<Expected>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> StatusCode {
    let given = headers.get(AUTHORIZATION).map(|given| given.as_bytes());
    if given != Some(expected.authorization.as_bytes()) {
        return StatusCode::UNAUTHORIZED;
    }
    if let Some(progress) = of_post(&body) {
        let mut newest = expected
            .newest
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *newest = Some(progress);
    }
    StatusCode::OK
}

/// The progress in a post: a list of metrics, each with a name and a value in Python's text. Its estimate of the
/// remaining time is wrong after a resume, so ours is computed from steps.
fn of_post(body: &Value) -> Option<Progress> {
    let metrics = body["trainerStatus"]["metrics"].as_array()?;
    let metric = |name: &str| -> Option<f64> {
        let found = metrics.iter().rev().find(|metric| metric["name"] == name)?;
        found["value"].as_str()?.parse().ok()
    };
    let count = |name| metric(name).map(|value| value as u64);
    Some(Progress {
        step: count("current_step")?,
        total_steps: count("total_steps"),
        loss: metric("loss"),
        learning_rate: metric("learning_rate"),
        grad_norm: metric("grad_norm"),
        tokens: count("num_tokens").or_else(|| count("num_input_tokens_seen")),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::lifecycle::Reason;
    use crate::lifecycle::generation::Address;
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
        Generation {
            job: "job".to_owned(),
            number: 3,
            reason: Reason::Started,
            members: Vec::new(),
            plan: plan::plan(&recipe, &PlanRequest::gpus(2)).unwrap(),
            start: None,
            master: Address {
                host: String::new(),
                port: 0,
            },
            created: 0.0,
        }
    }

    fn watch(run: &Path) -> ProgressWatch {
        fs::create_dir_all(run.join("gen-3")).unwrap();
        let mut watch = ProgressWatch::start(run, 3);
        watch.look_at_once();
        watch
    }

    #[test]
    fn a_written_file_is_a_step_of_the_plans_batch() {
        let run = tempfile::tempdir().unwrap();
        let mut watch = watch(run.path());
        let (name, file) = watch.variables().remove(0);
        assert_eq!(name, "EVENKEEL_PROGRESS");
        let mut next = |text: &str| {
            fs::write(&file, text).unwrap();
            watch.look_at_once();
            watch.next(&generation(), || None)
        };
        let step = next(r#"{"step": 10, "total_steps": 40, "loss": 2.5, "tokens": 1000}"#).unwrap();
        assert_eq!((step.step, step.samples, step.batch), (10, 160, 16));
        assert_eq!((step.loss, step.tokens), (2.5, 0));
        assert_eq!(step.external.unwrap().total_samples, Some(640));
        let step = next(r#"{"step": 12, "tokens": 1600}"#).unwrap();
        assert_eq!((step.step, step.tokens), (12, 600));
        assert!(step.loss.is_nan());
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
        let run = tempfile::tempdir().unwrap();
        let mut watch = watch(run.path());
        let checkpoint = run.path().join("checkpoint-20");
        fs::create_dir(&checkpoint).unwrap();
        let state = json!({"global_step": 20, "max_steps": 50, "num_input_tokens_seen": 0, "log_history": [
            {"step": 10, "loss": 3.0, "learning_rate": 1e-4}, {"step": 20, "loss": 2.0}, {"eval_loss": 9.0}]});
        fs::write(checkpoint.join("trainer_state.json"), state.to_string()).unwrap();
        let step = watch
            .next(&generation(), || Some(checkpoint.clone()))
            .unwrap();
        assert_eq!((step.step, step.loss, step.learning_rate), (20, 2.0, 1e-4));
        assert_eq!(watch.next(&generation(), || Some(checkpoint)), None);
    }

    #[test]
    fn only_a_post_with_the_token_is_progress() {
        let run = tempfile::tempdir().unwrap();
        let mut watch = watch(run.path());
        let variables = watch.variables();
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
        assert_eq!(watch.next(&generation(), || None), None);
        assert_eq!(post(&token), "200");
        let step = watch.next(&generation(), || None).unwrap();
        assert_eq!((step.step, step.samples, step.loss), (7, 112, 1.5));
        assert_eq!(step.external.unwrap().total_samples, Some(1120));
    }
}
