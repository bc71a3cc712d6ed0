//! What the controller must do on time whatever its reconciliations do: answer the kubelet and renew the
//! Lease. Both run on a separate thread with a separate runtime.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use kube::Client;
use tokio::sync::oneshot;
use tokio::sync::watch::Receiver;

use super::leader::{self, Candidate};
use super::metrics::Metrics;
use crate::util::lock::lock;
use crate::util::openmetrics;
use crate::util::serve::serve;

/// Interval at which the runtime of the reconciliations shows that it runs.
const BEAT: Duration = Duration::from_secs(1);
/// Time without a beat after which `/healthz` reports the controller as dead.
const DEAD: Duration = Duration::from_secs(60);

/// Time of the last beat of the reconciliations' runtime.
#[derive(Clone)]
pub struct Pulse(Arc<Mutex<Instant>>);

impl Pulse {
    pub fn new() -> Pulse {
        Pulse(Arc::new(Mutex::new(Instant::now())))
    }

    pub async fn beat(self) {
        loop {
            *lock(&self.0) = Instant::now();
            tokio::time::sleep(BEAT).await;
        }
    }

    fn age(&self) -> Duration {
        lock(&self.0).elapsed()
    }
}

/// The thread of the vital tasks.
pub struct Vital {
    /// Whether this replica leads; `None` without leader election.
    pub leads: Option<Receiver<bool>>,
    /// Receives the error that ended the thread.
    pub ended: oneshot::Receiver<anyhow::Error>,
    /// Address of `/healthz` and `/metrics`.
    pub address: SocketAddr,
}

/// Starts the thread; returns once it listens and, as a candidate, competes for the Lease.
pub async fn start(
    listen: SocketAddr,
    candidate: Option<Candidate>,
    metrics: Arc<Metrics>,
    pulse: Pulse,
) -> anyhow::Result<Vital> {
    let (ready, started) = oneshot::channel();
    let (end, ended) = oneshot::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let run = async move {
        let listener = tokio::net::TcpListener::bind(listen).await;
        let listener = listener.with_context(|| {
            format!(
                "cannot listen on {listen}; give another address with `--listen`, or stop the process that has it \
                 (`ss -ltnp` lists them)"
            )
        })?;
        let address = listener.local_addr()?;
        let leads = match candidate {
            // A client works only on the runtime on which it was made.
            Some(it) => Some(leader::campaign(Client::try_default().await?, &it)),
            None => None,
        };
        // The caller waits for it.
        let _ = ready.send((leads, address));
        serve(listener, routes(metrics, pulse)).await;
        Ok(())
    };
    std::thread::Builder::new()
        .name("vital".into())
        .spawn(move || {
            let result: anyhow::Result<()> = runtime.block_on(run);
            let error = result.err();
            // After the controller has ended, the receiver is gone.
            let _ = end.send(error.unwrap_or_else(|| anyhow::anyhow!("the health server ended")));
        })?;
    match started.await {
        Ok((leads, address)) => Ok(Vital {
            leads,
            ended,
            address,
        }),
        Err(_) => Err(ended.await?),
    }
}

fn routes(metrics: Arc<Metrics>, pulse: Pulse) -> Router {
    let health = move || async move {
        let age = pulse.age();
        if age < DEAD {
            return (StatusCode::OK, "ok\n".to_owned());
        }
        let text = format!("no reconciliation has run for {} s\n", age.as_secs());
        (StatusCode::SERVICE_UNAVAILABLE, text)
    };
    let scrape = async move || ([(CONTENT_TYPE, openmetrics::CONTENT_TYPE)], metrics.text());
    Router::new()
        .route("/healthz", get(health))
        .route("/metrics", get(scrape))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    async fn started(listen: &str, pulse: Pulse) -> anyhow::Result<Vital> {
        start(listen.parse().unwrap(), None, Arc::default(), pulse).await
    }

    /// Status and body of `/healthz`, read by this thread alone.
    fn healthz(address: SocketAddr) -> (u16, String) {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    #[tokio::test]
    async fn health_is_answered_while_the_reconciliations_block_their_runtime() {
        let vital = started("127.0.0.1:0", Pulse::new()).await;
        let address = vital.unwrap().address;
        // It blocks the only thread of the test's runtime.
        assert_eq!(healthz(address), (200, "ok\n".into()));
    }

    #[tokio::test]
    async fn health_reports_a_runtime_that_stopped() {
        let pulse = Pulse::new();
        *lock(&pulse.0) = Instant::now().checked_sub(DEAD).unwrap();
        let vital = started("127.0.0.1:0", pulse.clone()).await.unwrap();
        let (status, text) = healthz(vital.address);
        assert_eq!((status, text.starts_with("no reconciliation")), (503, true));
        let beating = tokio::spawn(pulse.clone().beat());
        while pulse.age() > BEAT {
            tokio::task::yield_now().await;
        }
        assert_eq!(healthz(vital.address).0, 200);
        beating.abort();
    }

    #[tokio::test]
    async fn an_address_in_use_is_an_error_at_the_start() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = taken.local_addr().unwrap().to_string();
        let error = started(&listen, Pulse::new()).await.err().unwrap();
        let cause = error.downcast_ref::<std::io::Error>().unwrap();
        assert_eq!(cause.kind(), std::io::ErrorKind::AddrInUse);
        let message = error.to_string();
        assert!(message.starts_with(&format!(
            "cannot listen on {listen}; give another address with `--listen`"
        )));
    }
}
