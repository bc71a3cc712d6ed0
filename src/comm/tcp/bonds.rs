//! What all lanes of a rank share: the connections, and the one verdict when the world ends.
//!
//! The first verdict stands. It is told to everyone before this rank acts on it, so that whoever
//! sees this rank leave knows already whose fault that is.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::gossip::Gossip;
use super::rendezvous::Mesh;
use super::wire::Stop;
use crate::comm::{CommError, Ended, Notify};

/// How long a suspect's own words on why it left may be on their way.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// Connections and verdict of one rank in one world.
pub(super) struct Bonds {
    pub rank: usize,
    pub world: usize,
    pub mesh: Mesh,
    pub patience: Duration,
    notify: Notify,
    ended: Ended,
    verdict: Mutex<Option<CommError>>,
    decided: Condvar,
    suspects: Mutex<Vec<Suspect>>,
    /// Makes sure that gossip does not interleave.
    speaking: Mutex<()>,
    /// Wakes the heartbeat thread.
    bell: UnixStream,
    leaving: AtomicBool,
    begun: Instant,
    /// Milliseconds after `begun` at which each rank was last heard of.
    heard: Vec<AtomicU64>,
}

/// A peer whose data or exchange connection broke.
#[derive(Debug, Clone)]
pub(super) struct Suspect {
    pub rank: usize,
    pub reason: String,
    pub since: Instant,
}

impl Bonds {
    pub fn new(
        rank: usize,
        mesh: Mesh,
        patience: Duration,
        notify: Notify,
        ended: Ended,
        bell: UnixStream,
    ) -> Self {
        let world = mesh.data.len();
        Bonds {
            rank,
            world,
            mesh,
            patience,
            notify,
            ended,
            verdict: Mutex::new(None),
            decided: Condvar::new(),
            suspects: Mutex::new(Vec::new()),
            speaking: Mutex::new(()),
            bell,
            leaving: AtomicBool::new(false),
            begun: Instant::now(),
            heard: (0..world).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Why the world ended, if it has.
    pub fn verdict(&self) -> Option<CommError> {
        lock(&self.verdict).clone()
    }

    /// Ends the world for this reason, unless it has ended already: tells everyone, then wakes
    /// whatever waits for a peer.
    pub fn declare(&self, mut error: CommError) {
        let mut verdict = lock(&self.verdict);
        if verdict.is_some() {
            return;
        }
        self.tell(&Gossip::about(&error));
        if let CommError::PeerLost { rank, reason } = &mut error
            && *rank == self.rank
        {
            *reason = format!("the other ranks gave this rank up: {reason}");
        }
        *verdict = Some(error.clone());
        drop(verdict);
        self.decided.notify_all();
        (self.ended)(&error);
        // They may be closed already.
        for stream in self.mesh.data.iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for stream in self.mesh.exchange.iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.ring();
    }

    /// Tells every peer. A peer that cannot be told is found out by reading, not here: what it
    /// said last must be read first.
    pub fn tell(&self, gossip: &Gossip) {
        let bytes = gossip.encode();
        let _speaking = lock(&self.speaking);
        for mut stream in self.mesh.heartbeat.iter().flatten() {
            let _ = stream.write(&bytes);
        }
    }

    /// Turns a flow's stop into an error. A broken connection waits for the heartbeat thread to
    /// find the root cause: the peer may have left because of another.
    pub fn explain(&self, stop: Stop) -> CommError {
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
                self.ring();
                let mut verdict = lock(&self.verdict);
                // Counted, not timed: this process may have been stopped.
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

    /// Peers whose connections broke.
    pub fn suspects(&self) -> Vec<Suspect> {
        lock(&self.suspects).clone()
    }

    /// This rank leaves in order: tells everyone, and lets the heartbeat thread end.
    pub fn leave(&self) {
        if self.verdict().is_none() {
            self.tell(&Gossip::Goodbye);
        }
        self.leaving.store(true, Ordering::Release);
        self.ring();
    }

    /// Whether [`Bonds::leave`] was called.
    pub fn leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Wakes the heartbeat thread.
    fn ring(&self) {
        // Full means that it is rung already.
        let _ = (&self.bell).write(&[1]);
    }

    /// Notes that a rank was heard of just now.
    pub fn hear(&self, rank: usize) {
        let now = self.begun.elapsed().as_millis() as u64;
        self.heard[rank].store(now, Ordering::Relaxed);
    }

    /// How long ago a rank was heard of.
    pub fn silence(&self, rank: usize) -> Duration {
        let heard = Duration::from_millis(self.heard[rank].load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(heard)
    }

    /// Names those who are waited for; nobody is given up for being slow.
    pub fn late(&self, operation: &str, ranks: &[usize], waited: Duration) {
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

/// A thread that panicked while it held the lock left nothing half done that others could trip
/// over.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
