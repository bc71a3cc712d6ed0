//! The agent's HTTP servers: one for those who have the job's key, the controller, the agents of other pods and
//! the command line; one for everybody, with health for the kubelet and metrics for Prometheus.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use rustix::net::sockopt::set_ipv6_v6only;
use serde::Deserialize;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch::Receiver;

use super::{Input, event_log, metrics};
use crate::lifecycle::agent_state::AgentState;
use crate::lifecycle::authentication::{ANSWER, QUESTION, Question};
use crate::lifecycle::event_log::Position;
use crate::util::key::Key;
use crate::util::{openmetrics, serve};

/// Longest time that a request for a newer state waits.
const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(2);

/// Largest number of pending connections.
const BACKLOG: u32 = 1024;

/// Query of `/state`: the version that the caller already has.
#[derive(Debug, Default, Deserialize)]
struct After {
    #[serde(default)]
    after: u64,
}

#[derive(Debug, Deserialize)]
struct From {
    generation: u64,
    #[serde(default)]
    from: u64,
}

/// Listens on all addresses of this pod, IPv4 and IPv6.
pub async fn listen(port: u16) -> io::Result<TcpListener> {
    match both_families(port) {
        // A kernel without IPv6 has no such socket.
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
        }
        listening => listening,
    }
}

fn both_families(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    // Overrides the system setting `net.ipv6.bindv6only`.
    set_ipv6_v6only(&socket, false)?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    socket.listen(BACKLOG)
}

/// What the server for those who have the key needs.
#[derive(Clone)]
pub struct Service {
    pub key: Key,
    pub state: Receiver<AgentState>,
    /// The queue for requests of the controller.
    pub inputs: Sender<Input>,
    pub run: PathBuf,
}

/// Serves requests until the process ends, and only those with the proof of [`authentication`]: all others get
/// status 401. Answers with status 200 carry a proof, too.
///
/// * `GET /state?after=V`: the agent's state; waits up to 2 s for one newer than version V. Only
///   the controller requests it, so each request proves that the pod is not cut off.
/// * `GET /generation`: the newest generation whose ranks it has started, for other pods' agents.
/// * `GET /events?generation=N&from=I`: events of a generation from index I on, one JSON object a line
///   ([`crate::lifecycle::event_log`]); 404 if the volume has no event log of it.
///
/// [`authentication`]: crate::lifecycle::authentication
pub async fn serve(listener: TcpListener, service: Service) {
    let routes = Router::new()
        .route("/state", get(newer_state))
        .route("/generation", get(generation))
        .route("/events", get(events))
        .with_state(service);
    serve::serve(listener, routes).await;
}

/// Serves everybody until the process ends: nothing here is private or changes anything.
///
/// * `GET /healthz`: 200 while the agent runs.
/// * `GET /metrics`: the newest step, in the OpenMetrics text format.
pub async fn serve_metrics(listener: TcpListener, state: Receiver<AgentState>) {
    let routes = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(newest_metrics))
        .with_state(state);
    serve::serve(listener, routes).await;
}

/// A request whose proof is right.
struct Proven(Question);

impl FromRequestParts<Service> for Proven {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, of: &Service) -> Result<Proven, StatusCode> {
        let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
        let header = parts.headers.get(QUESTION);
        let question = header
            .and_then(|header| header.to_str().ok())
            .and_then(|header| Question::verified(&of.key, path, header));
        question.map(Proven).ok_or(StatusCode::UNAUTHORIZED)
    }
}

impl Proven {
    fn answer(&self, body: Vec<u8>) -> Response {
        ([(ANSWER, self.0.answer(&body))], body).into_response()
    }
}

async fn newer_state(
    question: Proven,
    State(mut service): State<Service>,
    Query(After { after }): Query<After>,
) -> Response {
    // Without the loop there are no ranks to stop.
    let _ = service.inputs.send(Input::Polled);
    // After the timeout the unchanged state is returned.
    let newer = service.state.wait_for(|state| state.version > after);
    let _ = tokio::time::timeout(LONG_POLL_TIMEOUT, newer).await;
    let json = serde_json::to_vec(&*service.state.borrow());
    match json {
        Ok(json) => question.answer(json),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn generation(question: Proven, State(service): State<Service>) -> Response {
    let number = service.state.borrow().generation;
    question.answer(format!("{number}\n").into_bytes())
}

async fn events(
    question: Proven,
    State(service): State<Service>,
    Query(from): Query<From>,
) -> Response {
    let from = Position {
        generation: from.generation,
        index: from.from,
    };
    // A volume may block.
    let read = move || event_log::read_from(&service.run, from);
    let read = tokio::task::spawn_blocking(read).await;
    match read {
        Ok(Ok(events)) => question.answer(events.into_bytes()),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            StatusCode::NOT_FOUND.into_response()
        }
        Ok(Err(_)) | Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn newest_metrics(State(state): State<Receiver<AgentState>>) -> impl IntoResponse {
    let text = metrics::text(&state.borrow());
    ([(CONTENT_TYPE, openmetrics::CONTENT_TYPE)], text)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver as Inputs, channel};

    use super::*;
    use crate::api::LogFormat;
    use crate::lifecycle::event_log::{LogLine, query};
    use crate::util::http::{Connection, HttpError, Limits};

    /// A server and its client.
    struct Served {
        port: u16,
        key: Key,
        state: tokio::sync::watch::Sender<AgentState>,
        heard: Inputs<Input>,
        run: tempfile::TempDir,
    }

    impl Served {
        async fn begin() -> Served {
            let listener = listen(0).await.unwrap();
            let (state, published) = tokio::sync::watch::channel(AgentState::default());
            let (inputs, heard) = channel();
            let served = Served {
                port: listener.local_addr().unwrap().port(),
                key: Key::random().unwrap(),
                state,
                heard,
                run: tempfile::tempdir().unwrap(),
            };
            let service = Service {
                key: served.key.clone(),
                state: published,
                inputs,
                run: served.run.path().to_path_buf(),
            };
            tokio::spawn(serve(listener, service));
            served
        }

        /// Asks with a key; the answer's proof must be right.
        async fn asked(&self, path: &str, key: &Key) -> Result<Vec<u8>, HttpError> {
            let question = Question::new(key.clone()).unwrap();
            let mut connection = connection(self.port).await;
            let asked = question.ask(&mut connection, path).await?;
            Ok(asked.body().await?.expect("the agent proves its answer"))
        }
    }

    async fn connection(port: u16) -> Connection {
        let limit = Duration::from_secs(10);
        let limits = Limits {
            connect: limit,
            head: limit,
            body: limit,
            bytes: 1 << 16,
        };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Connection::open(address, limits).await.unwrap()
    }

    #[tokio::test]
    async fn only_proven_requests_for_the_state_count_as_contact_with_the_controller() {
        let agent = Served::begin().await;
        agent.state.send_modify(|state| state.version = 1);
        agent.asked("/generation", &agent.key).await.unwrap();
        let stranger = Key::random().unwrap();
        for path in ["/state?after=0", "/generation", "/events?generation=1"] {
            let without = connection(agent.port).await.get(path, None).await;
            let with = agent.asked(path, &stranger).await;
            for refused in [without.err().unwrap(), with.unwrap_err()] {
                assert!(refused.to_string().contains("401"), "{refused}");
            }
        }
        for public in ["/healthz", "/metrics"] {
            let missing = agent.asked(public, &agent.key).await.unwrap_err();
            assert!(missing.to_string().contains("404"), "{missing}");
        }
        assert!(agent.heard.try_recv().is_err());
        agent.asked("/state?after=0", &agent.key).await.unwrap();
        assert!(matches!(agent.heard.try_recv(), Ok(Input::Polled)));
    }

    #[tokio::test]
    async fn everybody_may_ask_for_health_and_metrics_and_for_nothing_else() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (_sender, state) = tokio::sync::watch::channel(AgentState::default());
        tokio::spawn(serve_metrics(listener, state));
        for path in ["/healthz", "/metrics"] {
            connection(port).await.get(path, None).await.unwrap();
        }
        for path in ["/state", "/generation", "/events?generation=1"] {
            let missing = connection(port).await.get(path, None).await.err().unwrap();
            assert!(missing.to_string().contains("404"), "{missing}");
        }
    }

    #[tokio::test]
    async fn an_agent_serves_the_event_log_of_every_generation_from_a_position() {
        let agent = Served::begin().await;
        let run = agent.run.path();
        let mut log = super::super::EventLog::stdout(LogFormat::Text);
        for generation in [1, 2] {
            std::fs::create_dir(run.join(format!("gen-{generation}"))).unwrap();
            log.begin(run, generation, true);
            for number in 0..3 {
                let message = format!("{generation}.{number}");
                log.of_training(crate::telemetry::Event::Warning { message });
            }
        }
        let asked = async |generation, index| {
            let path = query(Position { generation, index });
            let body = agent.asked(&path, &agent.key).await?;
            let text = String::from_utf8(body).unwrap();
            let messages = text
                .lines()
                .map(|line| match LogLine::parse(line).unwrap().event {
                    crate::telemetry::Event::Warning { message } => message,
                    other => panic!("{other:?}"),
                });
            Ok::<Vec<String>, HttpError>(messages.collect())
        };
        assert_eq!(asked(1, 1).await.unwrap(), ["1.1", "1.2"]);
        assert_eq!(asked(2, 0).await.unwrap(), ["2.0", "2.1", "2.2"]);
        assert!(asked(2, 3).await.unwrap().is_empty());
        let none = asked(3, 0).await.unwrap_err().to_string();
        assert!(none.contains("404"), "{none}");
    }

    #[tokio::test]
    async fn an_agent_listens_on_ipv4_and_ipv6() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let reached = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await;
        reached.unwrap();
        // Only if this machine has IPv6.
        if std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            let reached = tokio::net::TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await;
            reached.unwrap();
        }
        let taken = listen(port).await.unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    }
}
