//! States of the agents, read over HTTP. One task per pod waits for the next change, stores it and
//! triggers a reconciliation of the job. An agent that has never answered triggers none: it is still
//! starting, or the pod has no agent.
//!
//! The answers of hostile agents are limited in memory and time. A request that waits for an answer takes
//! a connection with a buffer of 8 KiB, so every pod of a job may have one: a job of 1,024 nodes must learn
//! of changes as fast as a small one. Only the bodies need more memory, so few agents of one job send
//! theirs at the same time. This limit is per job: slow agents delay no other job.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::agent_answer::{ANSWER, Rejection, Sender, receive};
use super::pace::{POLLS, Pace};
use crate::api::TrainingJob;
use crate::lifecycle::agent_state::{AgentState, MESSAGE};
use crate::lifecycle::authentication::{self, Question};
use crate::util::format::shorten;
use crate::util::http::{Connection, HttpError, Limits};
use crate::util::key::Key;
use crate::util::lock::lock;

/// Time in which an agent answers: at once if it has news, and at the end of this time otherwise.
const ANSWERS: Duration = Duration::from_secs(2);
/// Limits of a request.
const LIMITS: Limits = Limits {
    connect: Duration::from_secs(2),
    head: Duration::from_millis(3500),
    body: Duration::from_secs(1),
    bytes: ANSWER,
};
/// Bodies that are read at the same time for one job. Together they take at most 1 MiB.
const BODIES: usize = 16;
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
    /// Why the last answer was ignored; `None` if it was not, or if there was none.
    pub rejection: Option<String>,
}

/// Polled agents, by the uids of their pods.
#[derive(Clone)]
pub struct Agents {
    polled: Arc<Mutex<HashMap<String, Entry>>>,
    key: Key,
    news: UnboundedSender<ObjectRef<TrainingJob>>,
}

struct Entry {
    job: ObjectRef<TrainingJob>,
    polled: AgentStatus,
    bodies: Arc<Semaphore>,
    /// Polls the agent until it is dropped.
    _task: JoinSet<()>,
}

/// The result of one request. The error is `None` if there was no answer.
type Polled = Result<AgentState, Option<Rejection>>;

impl Agents {
    /// Starts without agents, which are asked with the controller's key. `news` receives the jobs whose agents report
    /// a change.
    pub fn new(news: UnboundedSender<ObjectRef<TrainingJob>>, key: Key) -> Agents {
        Agents {
            polled: Arc::default(),
            key,
            news,
        }
    }

    /// Known state of a pod's agent; starts to poll it.
    pub fn poll(&self, sender: &Sender, job: &ObjectRef<TrainingJob>) -> AgentStatus {
        let mut all = lock(&self.polled);
        if let Some(entry) = all.get(&sender.pod) {
            return entry.polled.clone();
        }
        let others = all.values().find(|entry| entry.job == *job);
        let bodies = others.map(|other| other.bodies.clone());
        let bodies = bodies.unwrap_or_else(|| Arc::new(Semaphore::new(BODIES)));
        let (agents, bodies_of_job) = (self.clone(), bodies.clone());
        let poll = agents.poll_until_dropped(sender.clone(), job.clone(), bodies_of_job);
        let entry = Entry {
            job: job.clone(),
            polled: AgentStatus::default(),
            bodies,
            _task: [poll].into_iter().collect(),
        };
        all.insert(sender.pod.clone(), entry);
        AgentStatus::default()
    }

    /// Stops polling the pods that `keep` does not want, by their jobs and uids.
    pub fn retain(&self, keep: impl Fn(&ObjectRef<TrainingJob>, &str) -> bool) {
        lock(&self.polled).retain(|uid, entry| keep(&entry.job, uid));
    }

    /// Sets the state of a pod's agent, which is not polled then.
    #[cfg(test)]
    pub fn answer(&self, pod: &str, job: ObjectRef<TrainingJob>, polled: AgentStatus) {
        let entry = Entry {
            job,
            polled,
            bodies: Arc::new(Semaphore::new(BODIES)),
            _task: JoinSet::new(),
        };
        lock(&self.polled).insert(pod.to_owned(), entry);
    }

    async fn poll_until_dropped(
        self,
        sender: Sender,
        job: ObjectRef<TrainingJob>,
        bodies: Arc<Semaphore>,
    ) {
        let job_key = authentication::job_key(&self.key, &sender.job);
        let key = authentication::agent_key(&job_key, &sender.pod);
        let mut version = None;
        let mut pause = FIRST_PAUSE;
        let mut pace = Pace::new(POLLS, Instant::now());
        let mut connection = None;
        loop {
            sleep_until(pace.next(Instant::now())).await;
            let asked = Instant::now();
            let polled = request(
                &mut connection,
                &sender,
                &key,
                version.unwrap_or(0),
                &bodies,
            )
            .await;
            let silent = polled.is_err();
            let changed = match &polled {
                // The version of a restarted agent is lower.
                Ok(state) => version.replace(state.version) != Some(state.version),
                Err(_) => version.is_some(),
            };
            let Some(rejected) = self.store(&sender.pod, polled, asked + ANSWERS) else {
                return;
            };
            if (changed || rejected) && self.news.send(job.clone()).is_err() {
                return;
            }
            if silent {
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                pause = FIRST_PAUSE;
            }
        }
    }

    /// Stores a result. `None` if the agent is no longer polled, else whether there is a new rejection. `due`: when it should
    /// have answered.
    fn store(&self, pod: &str, polled: Polled, due: Instant) -> Option<bool> {
        let mut all = lock(&self.polled);
        let known = &mut all.get_mut(pod)?.polled;
        let rejection = match polled {
            Ok(state) => {
                known.state = Some(state);
                known.silent_since = None;
                None
            }
            Err(rejection) => {
                let since = due.min(Instant::now());
                known.silent_since.get_or_insert(since);
                rejection.map(|rejection| {
                    let mut text = rejection.to_string();
                    // It may quote the answer.
                    shorten(&mut text, MESSAGE);
                    text
                })
            }
        };
        let new = rejection.is_some() && known.rejection != rejection;
        known.rejection = rejection;
        Some(new)
    }
}

/// Requests the state of an agent that is newer than `version`. Keeps the connection for the next request.
async fn request(
    connection: &mut Option<Connection>,
    sender: &Sender,
    key: &Key,
    version: u64,
    bodies: &Semaphore,
) -> Polled {
    let address = sender.address;
    let path = format!("/state?after={version}");
    let Ok(question) = Question::new(key.clone()) else {
        return Err(None);
    };
    let received = async {
        let mut open = match connection.take() {
            Some(open) => open,
            None => Connection::open(address, LIMITS).await?,
        };
        let asked = question.ask(&mut open, &path).await?;
        // The semaphore is never closed.
        let _permit = bodies.acquire().await;
        let body = asked.body().await?;
        *connection = Some(open);
        Ok::<_, HttpError>(match body {
            Some(body) => receive(&body, sender),
            None => Err(Rejection::NoProof { address }),
        })
    };
    match received.await {
        Ok(received) => received.map_err(Some),
        Err(HttpError::Status(StatusCode::UNAUTHORIZED)) => {
            let secret = authentication::secret_name(&sender.job);
            Err(Some(Rejection::AnotherKey { address, secret }))
        }
        Err(error) if error.is_response() => Err(Some(Rejection::NoAgent {
            address,
            reason: error.to_string(),
        })),
        Err(_) => Err(None),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
    use tokio::time::timeout;

    use super::*;
    use crate::util::http::testing::{Reply, Server, serve};

    const DEADLINE: Duration = Duration::from_secs(60);

    fn key() -> Key {
        "5".repeat(64).parse().unwrap()
    }

    /// Responds as the agent of a pod of the job, with the proof.
    fn proven(reply: &mut Reply, pod: &str, body: &str) -> std::io::Result<()> {
        let key = authentication::agent_key(&authentication::job_key(&key(), "job"), pod);
        let question = reply.header(authentication::QUESTION).unwrap();
        let question = Question::verified(&key, &reply.path, question).unwrap();
        let name = authentication::ANSWER;
        let header = format!("{name}: {}\r\n", question.answer(body.as_bytes()));
        reply.body_after(&header, body)
    }

    /// The agents of a job with one pod, whose agent is `server`.
    struct Job {
        agents: Agents,
        sender: Sender,
        reference: ObjectRef<TrainingJob>,
        news: UnboundedReceiver<ObjectRef<TrainingJob>>,
    }

    impl Job {
        fn of(server: &Server) -> Job {
            let (news, heard) = unbounded_channel();
            let job = Job {
                agents: Agents::new(news, key()),
                sender: Sender {
                    job: "job".into(),
                    pod: "pod".into(),
                    address: server.address,
                    ranks: 1,
                },
                reference: ObjectRef::new("j"),
                news: heard,
            };
            assert!(job.status().state.is_none());
            job
        }

        fn status(&self) -> AgentStatus {
            self.agents.poll(&self.sender, &self.reference)
        }

        /// Waits for news; returns the status then.
        async fn next(&mut self) -> AgentStatus {
            let job = timeout(DEADLINE, self.news.recv()).await.unwrap();
            assert_eq!(job, Some(self.reference.clone()));
            self.status()
        }
    }

    fn state(pod: &str, version: u64) -> String {
        let state = AgentState {
            job: "job".into(),
            pod: pod.into(),
            version,
            ..AgentState::default()
        };
        serde_json::to_string(&state).unwrap()
    }

    fn after(reply: &Reply) -> u64 {
        let (_, version) = reply.path.split_once("after=").unwrap();
        version.parse().unwrap()
    }

    #[tokio::test]
    async fn an_answer_that_is_not_the_agents_is_ignored_and_counts_as_silence() {
        type Respond = fn(&mut Reply) -> std::io::Result<()>;
        let cases: [(Respond, &str); 10] = [
            (
                |reply| proven(reply, "pod", &state("another", 7)),
                "of another pod",
            ),
            (
                |reply| reply.body(&state("pod", 7)),
                "does not prove that it is the pod's agent",
            ),
            (
                |reply| reply.response("401 Unauthorized", "", ""),
                "has another key",
            ),
            (|reply| proven(reply, "pod", "7"), "not one of an agent"),
            (
                |reply| proven(reply, "pod", r#"{"ranks": [{"ending": "\u001b[2J"}]}"#),
                "unknown variant ` [2J`",
            ),
            (|reply| reply.body(&"0".repeat(70_000)), "64.0 KiB"),
            (
                |reply| write!(reply, "HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n"),
                "302",
            ),
            (
                |reply| write!(reply, "HTTP/1.1 200 OK\r\nX: {:0>64000}\r\n\r\n", 1),
                "too large",
            ),
            (
                |reply| {
                    loop {
                        write!(reply, "HTTP/1.1 100 Continue\r\n\r\n")?;
                    }
                },
                "larger than 72.0 KiB",
            ),
            (
                |reply| {
                    let ranks = vec!["{}"; 20_000].join(",");
                    proven(reply, "pod", &format!("{{\"ranks\":[{ranks}]}}"))
                },
                "at most 64 ranks",
            ),
        ];
        for (respond, expected) in cases {
            let mut job = Job::of(&serve(respond));
            let status = job.next().await;
            let rejection = status.rejection.unwrap();
            assert!(rejection.contains(expected), "{rejection}");
            assert!(status.state.is_none() && status.silent_since.is_some());
        }
    }

    #[tokio::test]
    async fn a_version_that_rises_with_every_answer_is_not_polled_without_pause() {
        let begun = Instant::now();
        let server = serve(|reply| {
            let version = after(reply).saturating_add(1 << 40);
            proven(reply, "pod", &state("pod", version))
        });
        let mut job = Job::of(&server);
        for _ in 0..POLLS.burst + 2 {
            assert!(job.next().await.state.is_some());
        }
        // The requests after the burst wait.
        assert!(begun.elapsed() >= 2 * POLLS.refill);
    }

    #[tokio::test]
    async fn a_version_that_falls_is_news_and_the_next_request_is_for_a_newer_one() {
        let versions = AtomicU64::new(u64::MAX);
        let server = serve(move |reply| {
            let asked = after(reply);
            let version = versions.swap(3, Ordering::Relaxed);
            if asked == 3 {
                std::thread::sleep(DEADLINE);
            }
            proven(reply, "pod", &state("pod", version))
        });
        let mut job = Job::of(&server);
        while job.next().await.state.unwrap().version != 3 {}
    }

    #[tokio::test]
    async fn slow_bodies_of_one_job_delay_no_other_job() {
        let drip = serve(|reply| {
            write!(reply, "HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")?;
            loop {
                write!(reply, " ")?;
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let slow = Job::of(&drip);
        for pod in 0..4 * BODIES {
            let sender = Sender {
                pod: pod.to_string(),
                ..slow.sender.clone()
            };
            slow.agents.poll(&sender, &slow.reference);
        }
        let mut other = Job {
            agents: slow.agents.clone(),
            sender: Sender {
                pod: "other".into(),
                address: serve(|reply| proven(reply, "other", &state("other", after(reply) + 1)))
                    .address,
                ..slow.sender.clone()
            },
            reference: ObjectRef::new("other"),
            news: slow.news,
        };
        assert!(other.status().state.is_none());
        let answered = async {
            loop {
                let job = other.news.recv().await.unwrap();
                if job == other.reference {
                    return other.status();
                }
            }
        };
        let status = timeout(DEADLINE, answered).await.unwrap();
        assert!(status.state.is_some());
    }
}
