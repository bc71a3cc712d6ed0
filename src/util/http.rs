//! GET requests to a server that is not trusted: a program in a user's pod. Every part of a response is
//! limited in size and time. Redirects, compression and proxies do not exist here, so that a response can
//! neither choose the next address nor expand in memory.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::HOST;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, ReadBuf, join};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::format::bytes;

/// Largest status line and headers of a response, and size of the read buffer, bytes. hyper's default of
/// 408 KiB is too much for thousands of connections.
const HEAD: usize = 8192;

/// Limits of a request.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time until the connection is established.
    pub connect: Duration,
    /// Time from the request to the end of the response's headers.
    pub head: Duration,
    /// Time from the headers to the end of the body.
    pub body: Duration,
    /// Largest body, bytes.
    pub bytes: usize,
}

/// Failure of a request. Its connection must not be used again.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("no {0} within {1:?}")]
    Timeout(&'static str, Duration),
    #[error("the status is {0}, not 200")]
    Status(StatusCode),
    #[error("the body is larger than {}", bytes(*.0 as u64))]
    TooLarge(usize),
    /// Everything that the server sent, also interim responses and the framing of chunks.
    #[error("the response, with headers and framing, is larger than {}", bytes(*.0 as u64))]
    Excess(usize),
    /// The connection ended, or the response is not valid HTTP.
    #[error("{0}")]
    Http(#[from] hyper::Error),
}

impl HttpError {
    /// Whether a server responded, and not as it should.
    pub fn is_response(&self) -> bool {
        match self {
            HttpError::Connect(_) => false,
            HttpError::Timeout(part, _) => *part == BODY,
            HttpError::Status(_) | HttpError::TooLarge(_) | HttpError::Excess(_) => true,
            HttpError::Http(error) => error.is_parse(),
        }
    }
}

const BODY: &str = "end of the body";

/// A stream that reads a limited number of bytes for each request, with the excess of one read at most.
/// hyper limits its buffer and not the sum: it skips endless interim responses (1xx) without a pause.
struct Metered {
    stream: OwnedReadHalf,
    budget: Budget,
}

/// Bytes that may still be read for a request.
#[derive(Clone)]
struct Budget {
    left: Arc<AtomicUsize>,
    limits: Limits,
}

impl Budget {
    fn total(&self) -> usize {
        self.limits.bytes.saturating_add(HEAD)
    }

    fn renew(&self) {
        self.left.store(self.total(), Ordering::Relaxed);
    }

    fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    /// The reason for an error of hyper.
    fn explain(&self, error: hyper::Error) -> HttpError {
        if self.left() == 0 {
            HttpError::Excess(self.total())
        } else {
            HttpError::Http(error)
        }
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let left = self.budget.left();
        if left == 0 {
            return Poll::Ready(Err(io::ErrorKind::FileTooLarge.into()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let bytes = buffer.filled().len() - before;
        // A request may renew the budget at the same time.
        let subtract = |left: usize| Some(left.saturating_sub(bytes));
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.budget.left.fetch_update(set, fetch, subtract);
        read
    }
}

/// A connection for one request after the other. It closes when dropped.
pub struct Connection {
    sender: SendRequest<String>,
    host: String,
    budget: Budget,
    _driver: JoinSet<()>,
}

impl Connection {
    /// Connects to a server.
    pub async fn open(address: SocketAddr, limits: Limits) -> Result<Connection, HttpError> {
        let stream = timeout(limits.connect, TcpStream::connect(address)).await;
        let stream = stream
            .map_err(|_| HttpError::Timeout("connection", limits.connect))?
            .map_err(HttpError::Connect)?;
        let (stream, writer) = stream.into_split();
        let budget = Budget {
            left: Arc::default(),
            limits,
        };
        budget.renew();
        let reader = Metered {
            stream,
            budget: budget.clone(),
        };
        let mut builder = http1::Builder::new();
        let (sender, connection) = builder
            .max_buf_size(HEAD)
            .handshake(TokioIo::new(join(reader, writer)))
            .await?;
        let mut driver = JoinSet::new();
        // Its error is the error of the request.
        driver.spawn(async move { drop(connection.await) });
        Ok(Connection {
            sender,
            host: address.to_string(),
            budget,
            _driver: driver,
        })
    }

    /// Requests a path, with a header of the caller; returns the response before its body is read.
    pub async fn get(
        &mut self,
        path: &str,
        header: Option<(&'static str, String)>,
    ) -> Result<Answer, HttpError> {
        let head = self.budget.limits.head;
        self.budget.renew();
        let exchange = async {
            self.sender.ready().await?;
            let mut request = Request::new(String::new());
            if let Ok(path) = path.parse() {
                *request.uri_mut() = path;
            }
            if let Ok(host) = self.host.parse() {
                request.headers_mut().insert(HOST, host);
            }
            if let Some((name, value)) = header
                && let Ok(value) = value.parse()
            {
                request.headers_mut().insert(name, value);
            }
            self.sender.send_request(request).await
        };
        let response = timeout(head, exchange).await;
        let response = response
            .map_err(|_| HttpError::Timeout("response", head))?
            .map_err(|error| self.budget.explain(error))?;
        if response.status() != StatusCode::OK {
            return Err(HttpError::Status(response.status()));
        }
        Ok(Answer {
            response,
            budget: self.budget.clone(),
        })
    }
}

/// A response with status 200. At most [`HEAD`] bytes of its body are in memory.
pub struct Answer {
    response: Response<Incoming>,
    budget: Budget,
}

impl Answer {
    /// The text of a header.
    pub fn header(&self, name: &str) -> Option<String> {
        let value = self.response.headers().get(name)?;
        Some(value.to_str().ok()?.to_owned())
    }

    pub async fn body(self) -> Result<Vec<u8>, HttpError> {
        let Limits {
            body: time, bytes, ..
        } = self.budget.limits;
        let body = self.response.into_body();
        let body = timeout(time, read(body, bytes, &self.budget)).await;
        body.map_err(|_| HttpError::Timeout(BODY, time))?
    }
}

async fn read(mut body: Incoming, limit: usize, budget: &Budget) -> Result<Vec<u8>, HttpError> {
    let mut read = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        // Trailers are ignored.
        let frame = frame.map_err(|error| budget.explain(error))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if data.len() > limit - read.len() {
            return Err(HttpError::TooLarge(limit));
        }
        read.extend_from_slice(&data);
    }
    Ok(read)
}

#[cfg(test)]
pub mod testing {
    //! Servers on the loopback interface that respond as a test wants.

    use std::io::{self, BufRead, BufReader, Write};
    use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    /// A server, one thread per connection.
    pub struct Server {
        pub address: SocketAddr,
        /// Bytes that the sockets have accepted.
        pub written: Arc<AtomicUsize>,
    }

    /// The response to one request.
    pub struct Reply {
        stream: TcpStream,
        written: Arc<AtomicUsize>,
        /// Path and query of the request.
        pub path: String,
        /// Names in lower case and values of the request's headers.
        pub headers: Vec<(String, String)>,
    }

    impl Write for Reply {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let sent = self.stream.write(bytes)?;
            self.written.fetch_add(sent, Ordering::Relaxed);
            Ok(sent)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Reply {
        /// A header of the request.
        pub fn header(&self, name: &str) -> Option<&str> {
            let mut headers = self.headers.iter();
            let (_, value) = headers.find(|(known, _)| known == name)?;
            Some(value)
        }

        /// Responds with this body.
        pub fn body(&mut self, body: &str) -> io::Result<()> {
            self.body_after("", body)
        }

        /// Responds with this body after a header line, which ends with CRLF.
        pub fn body_after(&mut self, header: &str, body: &str) -> io::Result<()> {
            self.response("200 OK", header, body)
        }

        /// Responds with this status, header line and body.
        pub fn response(&mut self, status: &str, header: &str, body: &str) -> io::Result<()> {
            let length = body.len();
            write!(
                self,
                "HTTP/1.1 {status}\r\n{header}Content-Length: {length}\r\n\r\n{body}"
            )
        }
    }

    /// Starts a server. A connection closes when `respond` fails, for example because the client has
    /// closed it.
    pub fn serve(respond: impl Fn(&mut Reply) -> io::Result<()> + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let written = Arc::<AtomicUsize>::default();
        let (respond, counted) = (Arc::new(respond), written.clone());
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (respond, written) = (respond.clone(), counted.clone());
                thread::spawn(move || connection(stream, written, &*respond));
            }
        });
        Server { address, written }
    }

    fn connection(
        stream: TcpStream,
        written: Arc<AtomicUsize>,
        respond: &dyn Fn(&mut Reply) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        while let Some(first) = lines.next() {
            let path = first?.split(' ').nth(1).unwrap_or_default().to_owned();
            let headers = lines.by_ref().map_while(Result::ok);
            let headers = headers.take_while(|line| !line.is_empty());
            let headers = headers.filter_map(|line| {
                let (name, value) = line.split_once(": ")?;
                Some((name.to_ascii_lowercase(), value.to_owned()))
            });
            let headers = headers.collect();
            respond(&mut Reply {
                stream: stream.try_clone()?,
                written: written.clone(),
                path,
                headers,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    use super::testing::{Reply, Server, serve};
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// Socket buffers of the loopback interface, at most, bytes.
    const SOCKET_BUFFERS: usize = 8 << 20;

    fn limits() -> Limits {
        Limits {
            connect: LONG,
            head: LONG,
            body: LONG,
            bytes: 1 << 16,
        }
    }

    async fn get(server: &Server, limits: Limits) -> Result<Vec<u8>, HttpError> {
        let mut connection = Connection::open(server.address, limits).await?;
        connection.get("/state", None).await?.body().await
    }

    /// Sends zeros until the client closes the connection; then `closed` hears of it.
    fn endless(reply: &mut Reply, head: &str, closed: &UnboundedSender<()>) -> io::Result<()> {
        write!(reply, "HTTP/1.1 200 OK\r\n{head}\r\n\r\n")?;
        let chunk = [b"8000\r\n".as_slice(), &[b'0'; 0x8000], b"\r\n"].concat();
        let sent = loop {
            if let Err(error) = reply.write_all(&chunk) {
                break Err(error);
            }
        };
        let _ = closed.send(());
        sent
    }

    #[tokio::test]
    async fn an_endless_body_is_not_read_beyond_its_limit() {
        for head in [
            "Transfer-Encoding: chunked",
            // Neither length nor chunks: the body ends with the connection.
            "Connection: close",
            "Content-Length: 99999999999",
        ] {
            let (closes, mut closed) = unbounded_channel();
            let server = serve(move |reply| endless(reply, head, &closes));
            let result = get(&server, limits()).await;
            assert!(
                matches!(result, Err(HttpError::TooLarge(65536))),
                "{result:?}"
            );
            timeout(LONG, closed.recv()).await.unwrap().unwrap();
            let written = server.written.load(Ordering::Relaxed);
            assert!(written < (1 << 16) + SOCKET_BUFFERS, "{head}: {written}");
        }
    }

    #[tokio::test]
    async fn endless_headers_are_not_read_beyond_their_limit() {
        let (closes, mut closed) = unbounded_channel();
        let server = serve(move |reply| {
            write!(reply, "HTTP/1.1 200 OK\r\n")?;
            let sent = loop {
                if let Err(error) = write!(reply, "X-Header: {:0>60000}\r\n", 1) {
                    break Err(error);
                }
            };
            let _ = closes.send(());
            sent
        });
        let error = get(&server, limits()).await.unwrap_err();
        assert!(error.is_response(), "{error}");
        assert!(error.to_string().contains("too large"), "{error}");
        timeout(LONG, closed.recv()).await.unwrap().unwrap();
        assert!(server.written.load(Ordering::Relaxed) < SOCKET_BUFFERS);
    }

    #[tokio::test]
    async fn interim_responses_framing_and_trailers_are_not_read_beyond_a_limit() {
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (first, repeated) in [
            ("", "HTTP/1.1 100 Continue\r\n\r\n"),
            ("", "HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n"),
            // One byte of body in six.
            (chunked, "1\r\n0\r\n"),
        ] {
            let (closes, mut closed) = unbounded_channel();
            let server = serve(move |reply| {
                write!(reply, "{first}")?;
                let many = repeated.repeat(1000);
                let sent = loop {
                    if let Err(error) = reply.write_all(many.as_bytes()) {
                        break Err(error);
                    }
                };
                let _ = closes.send(());
                sent
            });
            let limited = Limits {
                head: Duration::from_secs(10),
                ..limits()
            };
            let error = get(&server, limited).await.unwrap_err();
            assert!(error.is_response(), "{error}");
            insta::allow_duplicates! {
                insta::assert_snapshot!(error, @"the response, with headers and framing, is larger than 72.0 KiB");
            }
            timeout(LONG, closed.recv()).await.unwrap().unwrap();
            let written = server.written.load(Ordering::Relaxed);
            assert!(written < SOCKET_BUFFERS, "{repeated}: {written}");
        }
    }

    #[tokio::test]
    async fn each_request_of_a_connection_may_read_as_much() {
        let server = serve(|reply| reply.body(&"0".repeat(60_000)));
        let mut connection = Connection::open(server.address, limits()).await.unwrap();
        for _ in 0..4 {
            let body = connection.get("/state", None).await.unwrap().body().await;
            assert_eq!(body.unwrap().len(), 60_000);
        }
    }

    #[tokio::test]
    async fn a_slow_response_is_given_up() {
        let drip = |text: &'static str| {
            serve(move |reply| {
                write!(reply, "{text}")?;
                loop {
                    write!(reply, "1")?;
                    std::thread::sleep(Duration::from_millis(5));
                }
            })
        };
        let short = Duration::from_millis(200);
        let server = drip("HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n");
        let limited = Limits {
            body: short,
            ..limits()
        };
        let error = get(&server, limited).await.unwrap_err();
        assert!(error.is_response(), "{error}");
        assert_eq!(error.to_string(), "no end of the body within 200ms");
        let server = drip("HTTP/1.1 200 OK\r\nX-Header: ");
        let limited = Limits {
            head: short,
            ..limits()
        };
        let error = get(&server, limited).await.unwrap_err();
        assert_eq!(error.to_string(), "no response within 200ms");
    }

    #[tokio::test]
    async fn redirects_and_other_statuses_are_refused() {
        let reached = Arc::<AtomicUsize>::default();
        let counted = reached.clone();
        let inner = serve(move |reply| {
            counted.fetch_add(1, Ordering::Relaxed);
            reply.body("secret")
        });
        for status in [301, 302, 303, 307, 308, 204, 404, 500] {
            let to = inner.address;
            let server = serve(move |reply| {
                write!(
                    reply,
                    "HTTP/1.1 {status} Other\r\nLocation: http://{to}/\r\n\r\n"
                )
            });
            let error = get(&server, limits()).await.unwrap_err();
            assert!(matches!(error, HttpError::Status(_)), "{error}");
        }
        assert_eq!(reached.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_compressed_body_is_returned_as_it_is() {
        // 20 zero bytes, compressed.
        const GZIP: &[u8] =
            b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x63\x60\xc0\x0f\0\xdd\x3f\x17\xf7\x14\0\0\0";
        let server = serve(|reply| {
            let length = GZIP.len();
            write!(
                reply,
                "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {length}\r\n\r\n"
            )?;
            reply.write_all(GZIP)
        });
        assert_eq!(get(&server, limits()).await.unwrap(), GZIP);
    }

    #[tokio::test]
    async fn requests_share_a_connection() {
        let server = serve(|reply| {
            let path = reply.path.clone();
            reply.body(&path)
        });
        let mut connection = Connection::open(server.address, limits()).await.unwrap();
        for path in ["/state?after=1", "/state?after=2"] {
            let body = connection
                .get(path, None)
                .await
                .unwrap()
                .body()
                .await
                .unwrap();
            assert_eq!(body, path.as_bytes());
        }
    }
}
