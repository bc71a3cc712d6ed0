//! Admits the ranks of this world and refuses every other connection.
//!
//! One thread serves all connections concurrently, so that a silent or slow stranger delays no other
//! connection.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::greeting::{Greeting, HELLO_LIMIT, Hello, Intake, Refusal, Reply, encode};
use super::poll::wait;
use crate::comm::{CommError, Notify};

/// Time within which a new connection must send its greeting.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Most open connections that have not sent a greeting; beyond it the oldest is closed.
const CANDIDATES: usize = 256;

pub(super) struct Acceptor {
    listener: TcpListener,
    own: Greeting,
    candidates: Vec<Candidate>,
    notify: Notify,
}

struct Candidate {
    stream: TcpStream,
    from: SocketAddr,
    intake: Intake,
    since: Instant,
}

/// The next event of the listener.
pub(super) enum Arrival {
    /// A rank of this world connected; its stream is non-blocking.
    Rank(TcpStream, Hello),
    /// A watched connection ended.
    Ended(usize),
    /// The deadline passed without an event.
    Timeout,
}

impl Acceptor {
    pub fn new(listener: TcpListener, own: Greeting, notify: Notify) -> Result<Self, CommError> {
        listener
            .set_nonblocking(true)
            .map_err(|error| CommError::Rendezvous(format!("cannot listen: {error}")))?;
        Ok(Acceptor {
            listener,
            own,
            candidates: Vec::new(),
            notify,
        })
    }

    /// Waits for a rank of this world. `watched` holds connections that must stay silent, with their ranks.
    pub fn next(
        &mut self,
        deadline: Instant,
        watched: &[(usize, &TcpStream)],
    ) -> Result<Arrival, CommError> {
        loop {
            if let Some((stream, hello)) = self.listen_to_candidates() {
                return Ok(Arrival::Rank(stream, hello));
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(Arrival::Timeout);
            }
            let until = self
                .candidates
                .iter()
                .map(|candidate| candidate.since + HELLO_TIMEOUT)
                .fold(deadline, Instant::min);

            let silent = watched.iter().map(|&(_, stream)| stream);
            let talking = self.candidates.iter().map(|candidate| &candidate.stream);
            let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
            fds.extend(silent.chain(talking).map(|s| PollFd::new(s, PollFlags::IN)));
            wait(&mut fds, Some(until.saturating_duration_since(now)))
                .map_err(|error| CommError::Rendezvous(format!("cannot poll: {error}")))?;
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();

            let ended = watched.iter().zip(&ready[1..]).find(|&(_, &ready)| ready);
            if let Some((&(rank, _), _)) = ended {
                return Ok(Arrival::Ended(rank));
            }
            if ready[0] {
                self.accept();
            }
        }
    }

    /// Refuses a connection: sends the reason to it and logs the reason.
    pub fn refuse(&self, stream: TcpStream, refusal: Refusal) {
        let from = stream
            .peer_addr()
            .map_or("a stranger".into(), |from| from.to_string());
        (self.notify)(&format!("refused {from}: {}", refusal.reason));
        if let Ok(reply) = encode(&Reply::Refused(refusal)) {
            // The peer may have closed the connection or may not read it; the reply is optional.
            let _ = (&stream).write(&reply);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if self.candidates.len() == CANDIDATES {
                        let oldest = self.candidates.remove(0);
                        self.refuse(
                            oldest.stream,
                            Refusal::final_because("too many connections without a greeting"),
                        );
                    }
                    if stream.set_nonblocking(true).is_ok() {
                        self.candidates.push(Candidate {
                            stream,
                            from,
                            intake: Intake::new(HELLO_LIMIT),
                            since: Instant::now(),
                        });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // The connection broke at once, or the process has no file descriptor left. Candidates
                    // time out and release theirs.
                    (self.notify)(&format!("cannot accept a connection: {error}"));
                    std::thread::sleep(Duration::from_millis(50));
                    return;
                }
            }
        }
    }

    /// Reads from the candidates; returns the first one that is admitted.
    fn listen_to_candidates(&mut self) -> Option<(TcpStream, Hello)> {
        let now = Instant::now();
        let mut index = 0;
        while index < self.candidates.len() {
            let candidate = &mut self.candidates[index];
            let read = candidate.intake.read::<Hello>(&candidate.stream);
            let expired = now.duration_since(candidate.since) >= HELLO_TIMEOUT;
            let outcome = match read {
                Ok(Some(hello)) => self.own.admit(&hello.greeting).map(|()| hello),
                Ok(None) if expired => Err(Refusal::final_because(format!(
                    "it did not say who it is within {} s",
                    HELLO_TIMEOUT.as_secs()
                ))),
                Ok(None) => {
                    index += 1;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    Err(Refusal::final_because(error.to_string()))
                }
                Err(error) => {
                    if !candidate.intake.is_empty() {
                        let from = candidate.from;
                        (self.notify)(&format!(
                            "{from} left in the middle of its greeting: {error}"
                        ));
                    }
                    // A port scan or a health check: it connected and left.
                    self.candidates.remove(index);
                    continue;
                }
            };
            let candidate = self.candidates.remove(index);
            match outcome {
                Ok(hello) => return Some((candidate.stream, hello)),
                Err(refusal) => self.refuse(candidate.stream, refusal),
            }
        }
        None
    }
}
