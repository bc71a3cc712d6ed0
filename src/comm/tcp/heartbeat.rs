//! The heartbeat thread: sends heartbeats and decides which peers are lost.
//!
//! Only this thread judges peers, from all the evidence. A peer's last message outweighs its closed
//! connection, because a survivor that leaves for a lost peer reports that peer first.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::wire::{peers, wait};
use crate::comm::CommError;
use crate::comm::tcp::connections::{Connections, GRACE};
use crate::comm::tcp::control::ControlMessage;

/// Time that a leaving rank allows its peers to read its reason.
const LINGER: Duration = Duration::from_millis(500);

pub(super) struct Heartbeat {
    connections: Arc<Connections>,
    bell: UnixStream,
    interval: Duration,
    timeout: Duration,
    peers: Vec<Peer>,
}

#[derive(Clone, Default)]
struct Peer {
    inbox: Vec<u8>,
    /// The peer sent a goodbye.
    done: bool,
    /// The peer's connection is closed.
    gone: bool,
}

/// Evidence that the world has ended; an earlier variant is closer to the root cause.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Evidence {
    Told,
    Closed,
    Silent,
}

impl Heartbeat {
    pub fn new(
        connections: Arc<Connections>,
        bell: UnixStream,
        interval: Duration,
        timeout: Duration,
    ) -> Self {
        let peers = vec![Peer::default(); connections.world];
        Heartbeat {
            connections,
            bell,
            interval,
            timeout,
            peers,
        }
    }

    /// Runs until this rank leaves or the world ends.
    pub fn run(mut self) {
        let mut next_beat = Instant::now();
        while !self.connections.leaving() && self.connections.verdict().is_none() {
            let now = Instant::now();
            if now >= next_beat {
                self.connections.broadcast(&ControlMessage::Beat);
                next_beat = now + self.interval;
            }
            let until = self
                .next_deadline()
                .map_or(next_beat, |due| due.min(next_beat));
            if let Err(error) = self.sleep_until(until) {
                self.connections.declare(CommError::Aborted {
                    rank: self.connections.rank,
                    reason: format!("cannot poll: {error}"),
                });
                break;
            }
            // This process was suspended or starved: it must not blame its peers for its own silence.
            let overslept = Instant::now().saturating_duration_since(until) > self.interval;
            if let Some(verdict) = self.judge_peers(overslept) {
                self.connections.declare(verdict);
            }
        }
        self.linger();
    }

    /// The latest time at which a silent peer or a suspect becomes lost.
    fn next_deadline(&self) -> Option<Instant> {
        let now = Instant::now();
        let silent = self
            .alive()
            .into_iter()
            .map(|rank| now + self.timeout.saturating_sub(self.connections.silence(rank)));
        let suspects = self.connections.suspects();
        silent
            .chain(suspects.iter().map(|suspect| suspect.since + GRACE))
            .min()
    }

    /// Peers whose connection is not closed.
    fn connected(&self) -> Vec<usize> {
        let open = |&rank: &usize| rank != self.connections.rank && !self.peers[rank].gone;
        (0..self.peers.len()).filter(open).collect()
    }

    /// Peers that should be sending heartbeats.
    fn alive(&self) -> Vec<usize> {
        let mut alive = self.connected();
        alive.retain(|&rank| !self.peers[rank].done);
        alive
    }

    /// Waits for a control message, a wake-up, or the deadline.
    fn sleep_until(&mut self, until: Instant) -> io::Result<()> {
        let open = peers(&self.connections.mesh.heartbeat)
            .filter(|(rank, _)| !self.peers[*rank].gone)
            .map(|(_, stream)| PollFd::new(stream, PollFlags::IN));
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        fds.extend(open);
        wait(&mut fds, until.saturating_duration_since(Instant::now()))?;
        let mut rung = [0; 64];
        while matches!((&self.bell).read(&mut rung), Ok(read) if read == rung.len()) {}
        Ok(())
    }

    /// Reads all control messages, then judges the peers.
    fn judge_peers(&mut self, overslept: bool) -> Option<CommError> {
        let mut found: Vec<(Evidence, CommError)> = Vec::new();
        for rank in self.connected() {
            found.extend(self.read_peer(rank));
        }
        for rank in self.alive() {
            let silence = self.connections.silence(rank);
            if overslept {
                self.connections.record_message_from(rank);
            } else if silence >= self.timeout {
                let reason = format!("no heartbeat for {:.1} s", silence.as_secs_f64());
                found.push((Evidence::Silent, CommError::PeerLost { rank, reason }));
            }
        }
        for suspect in self.connections.suspects() {
            let rank = suspect.rank;
            let reason = if self.peers[rank].done {
                "it finished and left while this rank still needed it".into()
            } else if suspect.since.elapsed() >= GRACE {
                suspect.reason
            } else {
                continue;
            };
            found.push((Evidence::Silent, CommError::PeerLost { rank, reason }));
        }
        let first = found.into_iter().min_by_key(|(evidence, _)| *evidence);
        first.map(|(_, error)| error)
    }

    /// Reads the control messages of a peer.
    fn read_peer(&mut self, rank: usize) -> Option<(Evidence, CommError)> {
        let stream = self.connections.mesh.heartbeat[rank].as_ref()?;
        let peer = &mut self.peers[rank];
        let mut bytes = [0; 1024];
        let ended = loop {
            match { stream }.read(&mut bytes) {
                Ok(0) => break Some("connection closed".to_owned()),
                Ok(read) => peer.inbox.extend_from_slice(&bytes[..read]),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break None,
                    io::ErrorKind::Interrupted => {}
                    _ => break Some(error.to_string()),
                },
            }
            loop {
                match ControlMessage::decode(&mut peer.inbox) {
                    Ok(None) => break,
                    Ok(Some(ControlMessage::Beat)) => self.connections.record_message_from(rank),
                    Ok(Some(ControlMessage::Goodbye)) => peer.done = true,
                    Ok(Some(ControlMessage::Lost { rank, reason })) => {
                        return Some((Evidence::Told, CommError::PeerLost { rank, reason }));
                    }
                    Ok(Some(ControlMessage::Aborted { rank, reason })) => {
                        return Some((Evidence::Told, CommError::Aborted { rank, reason }));
                    }
                    Err(malformed) => {
                        let reason = malformed.to_string();
                        return Some((Evidence::Closed, CommError::PeerLost { rank, reason }));
                    }
                }
            }
        };
        let reason = ended?;
        peer.gone = true;
        // Answers a goodbye; the peer's last message has arrived.
        let _ = stream.shutdown(Shutdown::Write);
        (!peer.done).then_some((Evidence::Closed, CommError::PeerLost { rank, reason }))
    }

    /// Closes the sending side and waits briefly until the peers have closed theirs. Closing a socket with
    /// unread data would discard this rank's last message.
    fn linger(&mut self) {
        for (_, stream) in peers(&self.connections.mesh.heartbeat) {
            let _ = stream.shutdown(Shutdown::Write);
        }
        let until = Instant::now() + LINGER;
        while !self.connected().is_empty()
            && Instant::now() < until
            && self.sleep_until(until).is_ok()
        {
            for rank in self.connected() {
                // The verdict is final, whatever the peer says.
                self.read_peer(rank);
            }
        }
    }
}
