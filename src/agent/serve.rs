//! The agent's HTTP server: state for the controller, health for the kubelet, metrics for
//! Prometheus.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use rustix::net::sockopt::set_ipv6_v6only;
use serde::Deserialize;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch::Receiver;

use super::input::Input;
use super::{event_log, metrics};
use crate::lifecycle::agent_state::AgentState;
use crate::lifecycle::event_log::Position;
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

/// Query of `/events`.
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

/// State for responses, and the queue for requests of the controller.
#[derive(Clone)]
struct Answers {
    state: Receiver<AgentState>,
    inputs: Sender<Input>,
    /// The run directory.
    run: Arc<Path>,
}

/// Serves requests until the process ends.
///
/// * `GET /state?after=V`: the agent's state; waits up to 2 s for one newer than version V. Only
///   the controller requests it, so each request proves that the pod is not cut off.
/// * `GET /generation`: the newest generation whose ranks it has started, for other pods' agents.
/// * `GET /events?generation=N&from=I`: events of a generation from index I on, one JSON object a line
///   ([`crate::lifecycle::event_log`]); 404 if the volume has no event log of it.
/// * `GET /healthz`: 200 while the agent runs.
/// * `GET /metrics`: the newest step, in the OpenMetrics text format.
pub async fn serve(
    listener: TcpListener,
    state: Receiver<AgentState>,
    inputs: Sender<Input>,
    run: PathBuf,
) -> io::Result<()> {
    let run = Arc::from(run);
    let routes = Router::new()
        .route("/state", get(newer_state))
        .route("/generation", get(generation))
        .route("/events", get(events))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/metrics", get(newest_metrics))
        .with_state(Answers { state, inputs, run });
    serve::serve(listener, routes).await;
    Ok(())
}

async fn newer_state(
    State(Answers {
        mut state, inputs, ..
    }): State<Answers>,
    Query(After { after }): Query<After>,
) -> Json<AgentState> {
    // Without the loop there are no ranks to stop.
    let _ = inputs.send(Input::Polled);
    // After the timeout the unchanged state is returned.
    let newer = state.wait_for(|state| state.version > after);
    let _ = tokio::time::timeout(LONG_POLL_TIMEOUT, newer).await;
    Json(state.borrow().clone())
}

async fn generation(State(Answers { state, .. }): State<Answers>) -> String {
    format!("{}\n", state.borrow().generation)
}

async fn events(
    State(Answers { run, .. }): State<Answers>,
    Query(From { generation, from }): Query<From>,
) -> Result<String, StatusCode> {
    let from = Position {
        generation,
        index: from,
    };
    // A volume may block.
    let read = tokio::task::spawn_blocking(move || event_log::read_from(&run, from)).await;
    match read {
        Ok(Ok(events)) => Ok(events),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => Err(StatusCode::NOT_FOUND),
        Ok(Err(_)) | Err(_) => Err(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

async fn newest_metrics(State(Answers { state, .. }): State<Answers>) -> impl IntoResponse {
    let text = metrics::text(&state.borrow());
    ([(CONTENT_TYPE, openmetrics::CONTENT_TYPE)], text)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::lifecycle::event_log::{LogLine, query};
    use crate::util::http::{Connection, Limits};

    #[tokio::test]
    async fn only_requests_for_the_state_count_as_contact_with_the_controller() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, state) = tokio::sync::watch::channel(AgentState::default());
        let (inputs, heard) = channel();
        let run = tempfile::tempdir().unwrap();
        tokio::spawn(serve(listener, state, inputs, run.path().to_path_buf()));
        sender.send_modify(|state| state.version = 1);
        let asked = async |path: &str| {
            let limit = Duration::from_secs(10);
            let limits = Limits {
                connect: limit,
                head: limit,
                body: limit,
                bytes: 1 << 16,
            };
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let mut connection = Connection::open(address, limits).await.unwrap();
            connection.get(path).await.unwrap();
        };
        for path in ["/healthz", "/metrics", "/generation"] {
            asked(path).await;
        }
        assert!(heard.try_recv().is_err());
        asked("/state?after=0").await;
        assert!(matches!(heard.try_recv(), Ok(Input::Polled)));
    }

    #[tokio::test]
    async fn an_agent_serves_the_event_log_of_every_generation_from_a_position() {
        let listener = listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (_sender, state) = tokio::sync::watch::channel(AgentState::default());
        let run = tempfile::tempdir().unwrap();
        let mut log = super::super::EventLog::stdout();
        for generation in [1, 2] {
            std::fs::create_dir(run.path().join(format!("gen-{generation}"))).unwrap();
            log.begin(run.path(), generation, true);
            for number in 0..3 {
                let message = format!("{generation}.{number}");
                log.of_training(crate::telemetry::Event::Warning { message });
            }
        }
        let run_directory = run.path().to_path_buf();
        tokio::spawn(serve(listener, state, channel().0, run_directory));
        let asked = async |generation, index| {
            let limit = Duration::from_secs(10);
            let limits = Limits {
                connect: limit,
                head: limit,
                body: limit,
                bytes: 1 << 16,
            };
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let mut connection = Connection::open(address, limits).await.unwrap();
            let path = query(Position { generation, index });
            let body = connection.get(&path).await?.body().await?;
            let text = String::from_utf8(body).unwrap();
            let messages = text
                .lines()
                .map(|line| match LogLine::parse(line).unwrap().event {
                    crate::telemetry::Event::Warning { message } => message,
                    other => panic!("{other:?}"),
                });
            Ok::<Vec<String>, crate::util::http::HttpError>(messages.collect())
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
