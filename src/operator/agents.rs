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
use crate::util::lock::lock;

/// Request timeout. An agent answers at once or after two seconds at most.
const ANSWER: Duration = Duration::from_millis(3500);
/// First pause between requests to a silent agent; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between requests to a silent agent.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Known state of an agent.
#[derive(Debug, Clone, Default)]
pub struct AgentStatus {
    /// Its last answer; `None` before the first.
    pub state: Option<AgentState>,
    /// Start of its silence; `None` while it answers.
    pub silent_since: Option<Instant>,
}

/// Polled agents, by the uids of their pods.
#[derive(Clone)]
pub struct Agents {
    polled: Arc<Mutex<HashMap<String, Entry>>>,
    http: reqwest::Client,
    wake: UnboundedSender<ObjectRef<TrainingJob>>,
}

struct Entry {
    job: ObjectRef<TrainingJob>,
    polled: AgentStatus,
    task: AbortHandle,
}

impl Agents {
    /// Starts without agents; `wake` receives the jobs whose agents report a change.
    pub fn new(wake: UnboundedSender<ObjectRef<TrainingJob>>) -> reqwest::Result<Agents> {
        Ok(Agents {
            polled: Arc::default(),
            http: reqwest::Client::builder()
                .timeout(ANSWER)
                .connect_timeout(Duration::from_secs(2))
                .no_proxy()
                .build()?,
            wake,
        })
    }

    /// Known state of a pod's agent; starts to poll it.
    pub fn poll(&self, uid: &str, ip: &str, job: &ObjectRef<TrainingJob>) -> AgentStatus {
        let mut all = lock(&self.polled);
        if let Some(entry) = all.get(uid) {
            return entry.polled.clone();
        }
        let task = tokio::spawn(self.clone().poll_until_dropped(
            uid.to_string(),
            ip.to_string(),
            job.clone(),
        ));
        let entry = Entry {
            job: job.clone(),
            polled: AgentStatus::default(),
            task: task.abort_handle(),
        };
        all.insert(uid.to_string(), entry);
        AgentStatus::default()
    }

    /// Stops polling those pods of a job that are not among `pods`.
    pub fn keep_only(&self, job: &ObjectRef<TrainingJob>, pods: &BTreeSet<String>) {
        let mut all = lock(&self.polled);
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
        lock(&self.polled).retain(|_, entry| {
            let keep = exists(&entry.job);
            if !keep {
                entry.task.abort();
            }
            keep
        });
    }

    async fn poll_until_dropped(self, uid: String, ip: String, job: ObjectRef<TrainingJob>) {
        let host = if ip.contains(':') {
            format!("[{ip}]")
        } else {
            ip
        };
        let mut version = 0;
        let mut answered = false;
        let mut pause = FIRST_PAUSE;
        loop {
            let address = format!("http://{host}:{AGENT_PORT}/state?after={version}");
            let answer = self.fetch(&address).await;
            let silent = answer.is_none();
            let news = match &answer {
                Some(state) => state.version > version,
                None => answered,
            };
            if let Some(state) = &answer {
                version = state.version;
                answered = true;
            }
            if !self.store(&uid, answer) {
                return;
            }
            if news && self.wake.send(job.clone()).is_err() {
                return;
            }
            if silent {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                pause = FIRST_PAUSE;
            }
        }
    }

    async fn fetch(&self, address: &str) -> Option<AgentState> {
        let response = self.http.get(address).send().await.ok()?;
        response.error_for_status().ok()?.json().await.ok()
    }

    /// Stores an answer or its absence; false if the agent is no longer polled.
    fn store(&self, uid: &str, answer: Option<AgentState>) -> bool {
        let mut all = lock(&self.polled);
        let Some(entry) = all.get_mut(uid) else {
            return false;
        };
        match answer {
            Some(state) => {
                entry.polled.state = Some(state);
                entry.polled.silent_since = None;
            }
            None => {
                entry.polled.silent_since.get_or_insert_with(Instant::now);
            }
        }
        true
    }
}
