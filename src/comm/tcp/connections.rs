//! State that the three lanes of a rank share: the connections and the verdict that ends the world.
//!
//! The first verdict is final. This rank sends it to every peer before it acts on it, so that a peer that
//! sees this rank leave already knows the root cause.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::rendezvous::Mesh;
use super::wire::{Flow, Stop, Streams, drive};
use crate::comm::tcp::control::ControlMessage;
use crate::comm::{CommError, Ended, Notify};
use crate::util::lock::lock;

/// Time allowed for a suspect's own reason for leaving to arrive.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// Connections and verdict of one rank in one world.
pub(super) struct Connections {
    pub rank: usize,
    pub world: usize,
    pub mesh: Mesh,
    patience: Duration,
    notify: Notify,
    ended: Ended,
    verdict: Mutex<Option<CommError>>,
    decided: Condvar,
    suspects: Mutex<Vec<Suspect>>,
    /// Keeps control messages of different threads from interleaving.
    sending: Mutex<()>,
    /// Wakes the heartbeat thread.
    bell: UnixStream,
    leaving: AtomicBool,
    begun: Instant,
    /// Milliseconds after `begun` at which each rank was last heard from.
    last_heard: Vec<AtomicU64>,
}

/// A peer whose data or exchange connection broke.
#[derive(Debug, Clone)]
pub(super) struct Suspect {
    pub rank: usize,
    pub reason: String,
    pub since: Instant,
}

impl Connections {
    pub fn new(
        rank: usize,
        mesh: Mesh,
        patience: Duration,
        notify: Notify,
        ended: Ended,
        bell: UnixStream,
    ) -> Self {
        let world = mesh.data.len();
        Connections {
            rank,
            world,
            mesh,
            patience,
            notify,
            ended,
            verdict: Mutex::new(None),
            decided: Condvar::new(),
            suspects: Mutex::new(Vec::new()),
            sending: Mutex::new(()),
            bell,
            leaving: AtomicBool::new(false),
            begun: Instant::now(),
            last_heard: (0..world).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The reason why the world ended; `None` while it has not.
    pub fn verdict(&self) -> Option<CommError> {
        lock(&self.verdict).clone()
    }

    /// Ends the world with this error unless it has ended already. Sends the verdict to every peer, then
    /// wakes every thread that waits for a peer.
    pub fn declare(&self, mut error: CommError) {
        let mut verdict = lock(&self.verdict);
        if verdict.is_some() {
            return;
        }
        self.broadcast(&ControlMessage::about(&error));
        if let CommError::PeerLost { rank, reason } = &mut error
            && *rank == self.rank
        {
            *reason = format!("the other ranks gave up on this rank: {reason}");
        }
        *verdict = Some(error.clone());
        drop(verdict);
        self.decided.notify_all();
        (self.ended)(&error);
        // The peers may have closed them already.
        for stream in self.mesh.data.iter().chain(&self.mesh.exchange).flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.wake_heartbeat();
    }

    /// Sends a control message to every peer. A failed write is ignored: reading detects a lost peer, and the
    /// peer's last message must be read first.
    pub fn broadcast(&self, message: &ControlMessage) {
        let bytes = message.encode();
        let _sending = lock(&self.sending);
        for mut stream in self.mesh.heartbeat.iter().flatten() {
            let _ = stream.write(&bytes);
        }
    }

    /// Runs an operation's flow to its end.
    pub fn run(
        &self,
        operation: &str,
        streams: &Streams,
        flow: &mut impl Flow,
    ) -> Result<(), CommError> {
        let late = |ranks: &[usize], waited| self.late(operation, ranks, waited);
        drive(streams, flow, self.patience, &late).map_err(|stop| self.explain(stop))
    }

    /// Turns a flow's stop into an error. A broken connection waits for the heartbeat thread to find the root
    /// cause: the peer may have left because it lost another one.
    fn explain(&self, stop: Stop) -> CommError {
        match stop {
            Stop::Mismatch { reason } => {
                let misuse = CommError::Misuse(reason);
                self.declare(CommError::Aborted {
                    rank: self.rank,
                    reason: misuse.to_string(),
                });
                misuse
            }
            Stop::Broken { peer, reason } => {
                lock(&self.suspects).push(Suspect {
                    rank: peer,
                    reason: reason.clone(),
                    since: Instant::now(),
                });
                self.wake_heartbeat();
                let mut verdict = lock(&self.verdict);
                // Counts waits instead of time, because this process may have been suspended.
                for _ in 0..4 {
                    if let Some(verdict) = &*verdict {
                        return verdict.clone();
                    }
                    let wait = self.decided.wait_timeout(verdict, GRACE);
                    verdict = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
                drop(verdict);
                let lost = CommError::PeerLost { rank: peer, reason };
                self.declare(lost.clone());
                self.verdict().unwrap_or(lost)
            }
        }
    }

    /// The peers whose connections broke.
    pub fn suspects(&self) -> Vec<Suspect> {
        lock(&self.suspects).clone()
    }

    /// Leaves in order: sends a goodbye to every peer and lets the heartbeat thread end.
    pub fn leave(&self) {
        if self.verdict().is_none() {
            self.broadcast(&ControlMessage::Goodbye);
        }
        self.leaving.store(true, Ordering::Release);
        self.wake_heartbeat();
    }

    /// Whether [`Connections::leave`] was called.
    pub fn leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Wakes the heartbeat thread.
    fn wake_heartbeat(&self) {
        // A full pipe means that a wake-up is already pending.
        let _ = (&self.bell).write(&[1]);
    }

    /// Records that a rank was heard from just now.
    pub fn record_message_from(&self, rank: usize) {
        let now = self.begun.elapsed().as_millis() as u64;
        self.last_heard[rank].store(now, Ordering::Relaxed);
    }

    /// Time since a rank was last heard from.
    pub fn silence(&self, rank: usize) -> Duration {
        let last_heard = Duration::from_millis(self.last_heard[rank].load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(last_heard)
    }

    /// Names the ranks that an operation waits for; slowness alone never makes a rank lost.
    fn late(&self, operation: &str, ranks: &[usize], waited: Duration) {
        for &rank in ranks {
            let silence = self.silence(rank).as_secs_f64();
            (self.notify)(&format!(
                "waiting for rank {rank} for {:.0} s in {operation} (it is alive: last heartbeat \
                 {silence:.1} s ago)",
                waited.as_secs_f64()
            ));
        }
    }
}
