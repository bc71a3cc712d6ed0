//! States of the agents, read over HTTP. One task per pod waits for the next change, stores it and
//! triggers a reconciliation of the job. An agent that has never answered triggers none: it is still
//! starting, or the pod has no agent.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;

use super::build::AGENT_PORT;
use crate::api::TrainingJob;
use crate::lifecycle::agent_state::AgentState;
use crate::util::lock::locked;

/// Request timeout. An agent answers at once or after two seconds at most.
const ANSWER: Duration = Duration::from_millis(3500);
/// First pause between requests to a silent agent; it doubles up to [`RARELY`].
const AGAIN: Duration = Duration::from_millis(100);
/// Longest pause between requests to a silent agent.
const RARELY: Duration = Duration::from_secs(2);

/// Known state of an agent.
#[derive(Debug, Clone, Default)]
pub struct Heard {
    /// Its last answer; `None` before the first.
    pub state: Option<AgentState>,
    /// Start of its silence; `None` while it answers.
    pub silent_since: Option<Instant>,
}

/// Polled agents, by the uids of their pods.
#[derive(Clone)]
pub struct Agents {
    heard: Arc<Mutex<HashMap<String, Entry>>>,
    http: reqwest::Client,
    wake: UnboundedSender<ObjectRef<TrainingJob>>,
}

struct Entry {
    job: ObjectRef<TrainingJob>,
    heard: Heard,
    task: AbortHandle,
}

impl Agents {
    /// Starts without agents; `wake` receives the jobs whose agents report a change.
    pub fn new(wake: UnboundedSender<ObjectRef<TrainingJob>>) -> reqwest::Result<Agents> {
        Ok(Agents {
            heard: Arc::default(),
            http: reqwest::Client::builder()
                .timeout(ANSWER)
                .connect_timeout(Duration::from_secs(2))
                .no_proxy()
                .build()?,
            wake,
        })
    }

    /// Known state of a pod's agent; starts to poll it.
    pub fn heard(&self, uid: &str, ip: &str, job: &ObjectRef<TrainingJob>) -> Heard {
        let mut all = locked(&self.heard);
        if let Some(entry) = all.get(uid) {
            return entry.heard.clone();
        }
        let task = tokio::spawn(
            self.clone()
                .listen(uid.to_string(), ip.to_string(), job.clone()),
        );
        let entry = Entry {
            job: job.clone(),
            heard: Heard::default(),
            task: task.abort_handle(),
        };
        all.insert(uid.to_string(), entry);
        Heard::default()
    }

    /// Stops polling those pods of a job that are not among `pods`.
    pub fn keep_only(&self, job: &ObjectRef<TrainingJob>, pods: &BTreeSet<String>) {
        let mut all = locked(&self.heard);
        all.retain(|uid, entry| {
            let keep = entry.job != *job || pods.contains(uid);
            if !keep {
                entry.task.abort();
            }
            keep
        });
    }

    /// Stops polling the pods of jobs that no longer exist.
    pub fn keep_jobs(&self, exists: impl Fn(&ObjectRef<TrainingJob>) -> bool) {
        locked(&self.heard).retain(|_, entry| {
            let keep = exists(&entry.job);
            if !keep {
                entry.task.abort();
            }
            keep
        });
    }

    async fn listen(self, uid: String, ip: String, job: ObjectRef<TrainingJob>) {
        let host = if ip.contains(':') {
            format!("[{ip}]")
        } else {
            ip
        };
        let mut version = 0;
        let mut answered = false;
        let mut pause = AGAIN;
        loop {
            let address = format!("http://{host}:{AGENT_PORT}/state?after={version}");
            let answer = self.ask(&address).await;
            let silent = answer.is_none();
            let news = match &answer {
                Some(state) => state.version > version,
                None => answered,
            };
            if let Some(state) = &answer {
                version = state.version;
                answered = true;
            }
            if !self.note(&uid, answer) {
                return;
            }
            if news && self.wake.send(job.clone()).is_err() {
                return;
            }
            if silent {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RARELY);
            } else {
                pause = AGAIN;
            }
        }
    }

    async fn ask(&self, address: &str) -> Option<AgentState> {
        let response = self.http.get(address).send().await.ok()?;
        response.error_for_status().ok()?.json().await.ok()
    }

    /// Stores an answer or its absence; false if the agent is no longer polled.
    fn note(&self, uid: &str, answer: Option<AgentState>) -> bool {
        let mut all = locked(&self.heard);
        let Some(entry) = all.get_mut(uid) else {
            return false;
        };
        match answer {
            Some(state) => {
                entry.heard.state = Some(state);
                entry.heard.silent_since = None;
            }
            None => {
                entry.heard.silent_since.get_or_insert_with(Instant::now);
            }
        }
        true
    }
}
