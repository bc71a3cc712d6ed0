//! An HTTP server that strangers cannot silence: they can open connections, but not keep them all.

use std::collections::VecDeque;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

/// Connections at the same time. Each has a buffer of a few KiB.
const CONNECTIONS: usize = 256;
/// Time for the headers of a request, from the end of the previous response.
const HEAD: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example because the process has no free file descriptor.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves requests over HTTP/1 until it is dropped. A new connection beyond [`CONNECTIONS`] ends the oldest one.
pub async fn serve(listener: TcpListener, routes: Router) {
    serve_within(HEAD, listener, routes).await;
}

async fn serve_within(head: Duration, listener: TcpListener, routes: Router) {
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        if open.len() >= CONNECTIONS {
            open.retain(|connection| !connection.is_finished());
        }
        if open.len() >= CONNECTIONS
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        let connection = tokio::spawn(answer(stream, routes.clone(), head));
        open.push_back(connection.abort_handle());
    }
}

/// Answers the requests of one connection. Its errors concern only the peer.
async fn answer(stream: tokio::net::TcpStream, routes: Router, head: Duration) {
    // Small responses go at once.
    let _ = stream.set_nodelay(true);
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(head);
    let service = TowerToHyperService::new(routes);
    let _ = server.serve_connection(TokioIo::new(stream), service).await;
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, SocketAddr, TcpStream};

    use axum::routing::get;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    async fn started(head: Duration) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/", get(|| async { "well" }));
        tokio::spawn(serve_within(head, listener, routes));
        address
    }

    fn connected(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    fn asked(stream: &mut TcpStream) -> String {
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut answer = [0; 1024];
        let count = stream.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..count]).into_owned()
    }

    // The clients block.
    #[tokio::test(flavor = "multi_thread")]
    async fn half_open_connections_of_a_stranger_do_not_keep_others_out() {
        let address = started(LONG).await;
        let mut strangers = Vec::new();
        for _ in 0..2 * CONNECTIONS {
            let mut stream = connected(address);
            stream.write_all(b"GET / HT").unwrap();
            strangers.push(stream);
        }
        let mut own = connected(address);
        for _ in 0..2 {
            let answer = asked(&mut own);
            assert!(answer.ends_with("well"), "{answer}");
        }
        let mut byte = [0];
        let oldest = strangers[0].read(&mut byte);
        assert!(!matches!(oldest, Ok(1)), "it is closed");
        let newest = strangers.last_mut().unwrap();
        newest.write_all(b"TP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert_eq!(newest.read(&mut byte).unwrap(), 1, "it is answered");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_connection_without_a_request_ends() {
        let address = started(Duration::from_millis(10)).await;
        let mut silent = connected(address);
        let mut byte = [0];
        let read = silent.read(&mut byte);
        assert!(matches!(read, Ok(0)), "{read:?}");
    }
}
