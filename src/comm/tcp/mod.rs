//! Collectives over TCP, for any number of ranks.
//!
//! Every pair of ranks has three connections, so that each rank observes each peer directly. A worker thread
//! serves the first one, for vectors, beside compute. The caller of [`Collective::exchange`] serves the
//! second one, for small messages. The heartbeat thread serves the third one, so that heartbeats continue
//! however long this rank computes. Between ranks of one host the first one is a Unix socket, see
//! [`same_host`].
//!
//! A peer whose connection breaks or whose heartbeats stop ends the world on every rank with the same
//! [`CommError::PeerLost`]; a slow peer does not.
//!
//! Floats travel in the processor's byte order, which is little-endian on every supported target.

mod acceptor;
mod connections;
mod control;
mod greeting;
mod heartbeat;
mod message;
mod rendezvous;
mod same_host;
mod vector;
mod wire;

use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use self::connections::Connections;
pub use self::greeting::Greeting;
use self::heartbeat::Heartbeat;
use self::message::{MESSAGE_LIMIT, Messages};
use self::vector::{Element, Scratches, Transfer};
use super::{Collective, CommError, Ended, Notify, Operation, Pending};
use crate::util::key::Key;
use crate::util::lock::lock;
use crate::util::stderr;

#[cfg(target_endian = "big")]
compile_error!("floats travel as they are: all ranks are taken to be little-endian");

/// Addresses, identity and time limits of a rank.
#[derive(Clone)]
pub struct TcpOptions {
    /// Host name or address of rank 0.
    pub master_address: String,
    /// TCP port of rank 0.
    pub master_port: u16,
    /// The identity of this rank.
    pub greeting: Greeting,
    /// The secret of the generation's ranks.
    pub key: Key,
    /// Time limit of the rendezvous.
    pub timeout: Duration,
    /// Time between two heartbeats.
    pub heartbeat_interval: Duration,
    /// A rank that is silent for longer than this is lost.
    pub heartbeat_timeout: Duration,
    /// A rank that an operation waits for longer than this is named; it does not become lost for it.
    pub patience: Duration,
    /// Whether vectors between ranks of one host use a Unix socket instead of TCP.
    pub unix_sockets: bool,
    /// Receives notices about refused connections and late ranks.
    pub notify: Notify,
    /// Called when a rank is lost or has left.
    pub ended: Ended,
}

impl TcpOptions {
    /// The defaults: 60 s for the rendezvous, a heartbeat every 0.5 s, a rank is lost after 3 s and named
    /// after 30 s on standard error.
    pub fn new(
        master_address: impl Into<String>,
        master_port: u16,
        greeting: Greeting,
        key: Key,
    ) -> Self {
        TcpOptions {
            master_address: master_address.into(),
            master_port,
            greeting,
            key,
            timeout: Duration::from_secs(60),
            heartbeat_interval: Duration::from_millis(500),
            heartbeat_timeout: Duration::from_secs(3),
            patience: Duration::from_secs(30),
            unix_sockets: true,
            notify: Arc::new(|line| stderr::line(format_args!("{line}"))),
            ended: Arc::new(|_| {}),
        }
    }
}

/// Connects to the other ranks. Rank 0 listens on the master address and port, every other rank on the interface
/// that reaches rank 0.
pub fn connect(options: &TcpOptions) -> Result<Arc<TcpCollective>, CommError> {
    meet(options, None)
}

/// Connects to the other ranks as rank 0, on a listener that is already bound.
pub fn host(options: &TcpOptions, listener: TcpListener) -> Result<Arc<TcpCollective>, CommError> {
    meet(options, Some(listener))
}

fn meet(
    options: &TcpOptions,
    listener: Option<TcpListener>,
) -> Result<Arc<TcpCollective>, CommError> {
    let mesh = rendezvous::meet(options, listener)?;
    TcpCollective::begin(options, mesh)
        .map(Arc::new)
        .map_err(|error| CommError::Rendezvous(format!("cannot start the collectives: {error}")))
}

/// One rank's end of a world that TCP connects.
pub struct TcpCollective {
    connections: Arc<Connections>,
    jobs: Mutex<Option<Sender<Job>>>,
    worker: Mutex<Option<JoinHandle<()>>>,
    heartbeat: Mutex<Option<JoinHandle<()>>>,
    exchanges: Mutex<u64>,
    /// Operations that have started and not completed.
    under_way: Arc<AtomicUsize>,
}

/// An operation and the place of its result.
type Job = Box<dyn FnOnce(&mut Worker) + Send>;

fn closed() -> CommError {
    CommError::Misuse("the world is closed".into())
}

impl TcpCollective {
    fn begin(options: &TcpOptions, mesh: rendezvous::Mesh) -> std::io::Result<Self> {
        for stream in mesh.all() {
            stream.set_nonblocking(true)?;
        }
        let (bell, rung) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        rung.set_nonblocking(true)?;
        let rank = options.greeting.rank;
        let notify = options.notify.clone();
        let ended = options.ended.clone();
        let connections = Connections::new(rank, mesh, options.patience, notify, ended, bell);
        let connections = Arc::new(connections);

        let (interval, timeout) = (options.heartbeat_interval, options.heartbeat_timeout);
        let heartbeat = Heartbeat::new(connections.clone(), rung, interval, timeout);
        let heartbeat = Builder::new()
            .name("heartbeat".into())
            .spawn(move || heartbeat.run())?;

        let (jobs, received) = channel();
        let under_way = Arc::new(AtomicUsize::new(0));
        let worker = Worker {
            connections: connections.clone(),
            under_way: under_way.clone(),
            scratches: Scratches::default(),
            operations: 0,
        };
        let worker = Builder::new()
            .name("collectives".into())
            .spawn(move || worker.run(&received))?;

        Ok(TcpCollective {
            connections,
            jobs: Mutex::new(Some(jobs)),
            worker: Mutex::new(Some(worker)),
            heartbeat: Mutex::new(Some(heartbeat)),
            exchanges: Mutex::new(0),
            under_way,
        })
    }
}

impl TcpCollective {
    fn enqueue<T: Element>(&self, mut operation: Operation<T>) -> Pending<T> {
        if let Err(error) = operation.check(self.connections.world) {
            return Pending::new(|| Err(error));
        }
        let (reply, result) = sync_channel(1);
        if let Some(jobs) = &*lock(&self.jobs) {
            self.under_way.fetch_add(1, Ordering::AcqRel);
            let job: Job = Box::new(move |worker| {
                let result = worker.transfer(&mut operation).map(|()| operation);
                worker.under_way.fetch_sub(1, Ordering::AcqRel);
                // The receiver may have been dropped.
                let _ = reply.send(result);
            });
            if jobs.send(job).is_err() {
                self.under_way.fetch_sub(1, Ordering::AcqRel);
            }
        }
        Pending::new(move || result.recv().unwrap_or_else(|_| Err(closed())))
    }
}

impl Collective for TcpCollective {
    fn rank(&self) -> usize {
        self.connections.rank
    }

    fn world(&self) -> usize {
        self.connections.world
    }

    fn start(&self, operation: Operation) -> Pending {
        self.enqueue(operation)
    }

    fn start_fixed(&self, operation: Operation<i64>) -> Pending<i64> {
        self.enqueue(operation)
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if message.len() > MESSAGE_LIMIT {
            return Err(CommError::Misuse(format!(
                "a message of {} bytes is longer than {MESSAGE_LIMIT}: large vectors go through \
                 `start`",
                message.len()
            )));
        }
        let mut exchanges = lock(&self.exchanges);
        if let Some(verdict) = self.connections.verdict() {
            return Err(verdict);
        }
        if self.connections.leaving() {
            return Err(closed());
        }
        let connections = &self.connections;
        *exchanges += 1;
        let mut messages = Messages::new(connections.rank, connections.world, *exchanges, message);
        connections.run("an exchange", &connections.mesh.exchange, &mut messages)?;
        Ok(messages.into_all())
    }

    fn check(&self) -> Result<(), CommError> {
        self.connections.verdict().map_or(Ok(()), Err)
    }

    fn abort(&self, reason: &str) {
        self.connections.declare(CommError::Aborted {
            rank: self.connections.rank,
            reason: reason.into(),
        });
    }

    fn close(&self) -> Result<(), CommError> {
        // Without a sender the worker ends after the last operation.
        lock(&self.jobs).take();
        let worker = lock(&self.worker).take();
        let worked = worker.is_none_or(|worker| worker.join().is_ok());
        if !worked {
            self.abort("its collective thread panicked");
        }
        let exchanges = lock(&self.exchanges);
        self.connections.leave();
        drop(exchanges);
        if let Some(heartbeat) = lock(&self.heartbeat).take() {
            // The result only says whether the thread panicked, which no rank can act on.
            let _ = heartbeat.join();
        }
        self.connections.verdict().map_or(Ok(()), Err)
    }
}

impl Drop for TcpCollective {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("it panicked");
        } else if self.under_way.load(Ordering::Acquire) > 0 {
            self.abort("it left with operations under way");
        }
        // A caller that needs the error calls `close`.
        let _ = self.close();
    }
}

/// Runs the vector operations one after the other, beside compute.
struct Worker {
    connections: Arc<Connections>,
    under_way: Arc<AtomicUsize>,
    scratches: Scratches,
    operations: u64,
}

impl Worker {
    fn run(mut self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            job(&mut self);
        }
    }

    fn transfer<T: Element>(&mut self, operation: &mut Operation<T>) -> Result<(), CommError> {
        let connections = &self.connections;
        if let Some(verdict) = connections.verdict() {
            return Err(verdict);
        }
        self.operations += 1;
        let name = operation.kind.name();
        let mut transfer = Transfer::new(
            connections.rank,
            connections.world,
            self.operations,
            operation,
            T::scratch(&mut self.scratches),
        );
        connections.run(name, &connections.mesh.data, &mut transfer)
    }
}

#[cfg(test)]
pub(crate) mod tests;
