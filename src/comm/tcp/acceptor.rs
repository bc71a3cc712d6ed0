//! Admits the ranks of this world, which have its key, and refuses every other connection.
//!
//! One thread serves all connections concurrently, so that a silent or slow stranger delays no other
//! connection.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::greeting::{
    Greeting, HELLO_LIMIT, Hello, Intake, Join, LaneOf, Nonces, Reply, Side, encode,
};
use super::wire::wait;
use crate::comm::{CommError, Notify};
use crate::util::key::{Key, nonce};

/// Time within which a new connection must prove that it has the key.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Most open connections that have not sent a greeting; beyond it the oldest is closed.
const CANDIDATES: usize = 256;

pub(super) struct Acceptor {
    listener: TcpListener,
    own: Greeting,
    key: Key,
    /// The key for the lanes; `None` until this rank has the table of addresses.
    lanes: Option<Key>,
    candidates: Vec<Candidate>,
    notify: Notify,
}

struct Candidate {
    stream: TcpStream,
    from: SocketAddr,
    intake: Intake,
    /// Set once this rank has proven its own key to it.
    nonces: Option<Nonces>,
    since: Instant,
}

/// A rank of this world that has proven itself.
pub(super) enum Admitted {
    /// It asks for the table of addresses.
    Join(Join),
    /// It connects a lane.
    Lane(LaneOf),
}

/// The next event of the listener.
pub(super) enum Arrival {
    /// A rank of this world connected; its stream is non-blocking.
    Rank(TcpStream, Admitted),
    /// A watched connection ended.
    Ended(usize),
    /// The deadline passed without an event.
    Timeout,
}

impl Acceptor {
    /// Listens for the ranks of a world.
    pub fn new(
        listener: TcpListener,
        own: Greeting,
        key: Key,
        notify: Notify,
    ) -> Result<Self, CommError> {
        listener
            .set_nonblocking(true)
            .map_err(|error| CommError::Rendezvous(format!("cannot listen: {error}")))?;
        Ok(Acceptor {
            listener,
            own,
            key,
            lanes: None,
            candidates: Vec::new(),
            notify,
        })
    }

    /// From now on lanes that are proven with this key are admitted.
    pub fn admit_lanes(&mut self, lanes: Key) {
        self.lanes = Some(lanes);
    }

    /// Waits for a rank of this world. `watched` holds connections that must stay silent, with their ranks.
    pub fn next(
        &mut self,
        deadline: Instant,
        watched: &[(usize, &TcpStream)],
    ) -> Result<Arrival, CommError> {
        loop {
            if let Some(arrival) = self.listen_to_candidates() {
                return Ok(arrival);
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
            wait(&mut fds, until.saturating_duration_since(now))
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
    pub fn refuse(&self, stream: TcpStream, reason: impl Into<String>) {
        let reason = reason.into();
        let from = stream
            .peer_addr()
            .map_or("a stranger".into(), |from| from.to_string());
        (self.notify)(&format!("refused {from}: {reason}"));
        if let Ok(reply) = encode(&Reply::Refused(reason)) {
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
                        self.refuse(oldest.stream, "too many connections without a greeting");
                    }
                    if stream.set_nonblocking(true).is_ok() {
                        self.candidates.push(Candidate {
                            stream,
                            from,
                            intake: Intake::new(HELLO_LIMIT),
                            nonces: None,
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
    fn listen_to_candidates(&mut self) -> Option<Arrival> {
        let now = Instant::now();
        let mut index = 0;
        while index < self.candidates.len() {
            let candidate = &mut self.candidates[index];
            let read = candidate.intake.read::<Hello>(&candidate.stream);
            let expired = now.duration_since(candidate.since) >= HELLO_TIMEOUT;
            let step = match read {
                Ok(Some(hello)) => self.judge(index, hello),
                Ok(None) if expired => Err(format!(
                    "it did not say who it is within {} s",
                    HELLO_TIMEOUT.as_secs()
                )),
                Ok(None) => {
                    index += 1;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(error.to_string()),
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
            // A challenged candidate may have answered already.
            if let Ok(None) = step {
                continue;
            }
            let stream = self.candidates.remove(index).stream;
            match step {
                Ok(Some(admitted)) => return Some(Arrival::Rank(stream, admitted)),
                Ok(None) => {}
                Err(reason) => self.refuse(stream, reason),
            }
        }
        None
    }

    /// Checks a candidate's message: `None` if it must still prove its key. The error is the reason to refuse it.
    fn judge(&mut self, index: usize, hello: Hello) -> Result<Option<Admitted>, String> {
        let candidate = &mut self.candidates[index];
        match (hello, &candidate.nonces, &self.lanes) {
            (Hello::Open { nonce: guest }, None, _) => {
                let host = nonce().map_err(|error| error.to_string())?;
                let nonces = Nonces { guest, host };
                let proof = self.key.prove(&nonces.of_host());
                let challenge = encode(&Reply::Challenge { nonce: host, proof });
                let challenge = challenge.map_err(|error| error.to_string())?;
                // It fits into an empty buffer. A peer that has left is noticed when it is read.
                let _ = (&candidate.stream).write(&challenge);
                candidate.nonces = Some(nonces);
                candidate.intake = Intake::new(HELLO_LIMIT);
                Ok(None)
            }
            (Hello::Join { join, proof }, Some(nonces), _)
                if join.is_proven(&self.key, nonces, &proof) =>
            {
                self.own.admit(&join.greeting)?;
                Ok(Some(Admitted::Join(join)))
            }
            (Hello::Lane { lane, proof }, _, Some(lanes))
                if lane.is_proven(lanes, self.own.rank, Side::Connects, &proof) =>
            {
                Ok(Some(Admitted::Lane(lane)))
            }
            _ => Err("it does not prove that it has the key of this generation".into()),
        }
    }
}
