//! Lets ranks of this world in and keeps everyone else out.
//!
//! One thread serves all connections side by side, so that a stranger who says nothing, or speaks
//! slowly, holds nobody up.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::greeting::{Greeting, HELLO_LIMIT, Hello, Intake, Refusal, Reply, encode};
use super::poll::wait;
use crate::comm::{CommError, Notify};

/// How long a new connection may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How many connections that have not said who they are may be open; the oldest makes room.
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

/// What happened at the door.
pub(super) enum Arrival {
    /// A rank of this world; its stream is non-blocking.
    Rank(TcpStream, Hello),
    /// A watched connection ended.
    Ended(usize),
    /// Nobody came until the deadline.
    Nobody,
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

    /// Waits for a rank of this world. `watched` are connections that should stay silent, with
    /// the ranks behind them.
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
                return Ok(Arrival::Nobody);
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

    /// Says no, tells the stranger why, and logs it.
    pub fn refuse(&self, stream: TcpStream, refusal: Refusal) {
        let from = stream
            .peer_addr()
            .map_or("a stranger".into(), |from| from.to_string());
        (self.notify)(&format!("refused {from}: {}", refusal.reason));
        if let Ok(reply) = encode(&Reply::Refused(refusal)) {
            // It may be gone already, or not listen: that is its loss.
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
                            Refusal::final_because("too many connections that say nothing"),
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
                    // A connection that broke at once, or no file descriptor left: candidates
                    // time out and give theirs back.
                    (self.notify)(&format!("cannot accept a connection: {error}"));
                    std::thread::sleep(Duration::from_millis(50));
                    return;
                }
            }
        }
    }

    /// Reads what candidates said; the first that is admitted comes back.
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
                        (self.notify)(&format!("{from} left in the middle of a word: {error}"));
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
