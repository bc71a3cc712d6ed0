//! One rank's communicator: its connections, and its operations as tasks of streams.
//!
//! Every rank sends its part of an operation to every other rank and computes its own result. Operations of
//! different ranks belong together by their order.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::forming::{Problem, UniqueId, join};
use super::reduce::{Element, reduce, scale};
use super::wire::{Frame, Header, Kind};
use super::{Code, communicators, count, settings};
use crate::driver;
use crate::launch::{Failure, GlobalMemory, LaunchError, MemoryFault};
use crate::memory::POISON;
use crate::stream::{Access, Mark, Progress, Task};

/// How long a leaving rank waits for what it still sends.
const FLUSH: Duration = Duration::from_secs(5);

/// Operations of the process that started.
static STARTED: AtomicU64 = AtomicU64::new(0);

/// One rank's side of a group of ranks.
pub struct Communicator {
    pub rank: usize,
    pub world: usize,
    pub device: usize,
    /// Calls return when they are done, not `ncclInProgress`.
    pub is_blocking: bool,
    /// The same on all ranks.
    key: u64,
    state: Mutex<State>,
    /// Held while deferred operations are issued, so that no call takes them for issued before.
    issuing: Mutex<()>,
    /// Signals the end of [`Phase::Forming`].
    formed: Condvar,
}

/// Where a communicator is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Other ranks did not join yet.
    Forming,
    Ready,
    /// `ncclCommFinalize` was called.
    Finalizing,
    Destroyed,
    Aborted,
}

pub struct State {
    pub phase: Phase,
    /// The asynchronous error, which stays.
    pub error: Option<Code>,
    /// The last problem, for people.
    pub message: String,
    /// By rank; `None` for this one.
    peers: Vec<Option<Peer>>,
    /// Operations that started.
    started: u64,
    /// Operations that started and did not end, by their numbers in the streams.
    flights: HashMap<u64, Flight>,
    /// The end of the last issued operation.
    pub last: Option<Mark>,
    /// Operations of a non-blocking communicator that are not in their streams yet.
    pub deferred: Vec<(usize, Collective)>,
    /// When the first of them was called.
    pub deferred_at: Instant,
    /// The program has asked once for the state of the deferred operations.
    pub has_polled: bool,
    /// Factors of `ncclRedOpCreatePreMulSum`, by number; `None` once destroyed.
    pub factors: Vec<Option<(Element, Factor)>>,
}

struct Peer {
    socket: TcpStream,
    outbox: Option<Sender<Vec<u8>>>,
    writer: Option<JoinHandle<()>>,
    /// Its parts in operations that did not end here.
    inbox: BTreeMap<u64, (Header, Vec<u8>)>,
    /// Operations that it started.
    started: u64,
    /// Why the connection is gone.
    lost: Option<String>,
    /// What it waits for, if it has said so.
    status: Option<String>,
}

/// An operation that has started.
struct Flight {
    sequence: u64,
    /// This rank's part.
    own: Vec<u8>,
    begun: Instant,
    has_failed: bool,
    has_warned: bool,
    is_stalled: bool,
    has_mismatch: bool,
}

/// The factor of a pre-multiplied sum.
#[derive(Debug, Clone)]
pub enum Factor {
    Value(Vec<u8>),
    /// Its address on the device.
    Device(u64),
}

/// A call of a collective.
#[derive(Debug, Clone)]
pub struct Collective {
    pub header: Header,
    pub send: u64,
    pub receive: u64,
    pub factor: Option<Factor>,
}

impl Collective {
    /// Bytes that are read and bytes that are written by a rank.
    pub fn operands(&self, rank: usize, world: usize) -> (u64, u64) {
        let header = &self.header;
        let bytes = header.count.saturating_mul(header.element.bytes() as u64);
        let all = bytes.saturating_mul(world as u64);
        let is_root = header.root as usize == rank;
        match header.kind {
            Kind::AllReduce => (bytes, bytes),
            Kind::ReduceScatter => (all, bytes),
            Kind::AllGather => (bytes, all),
            Kind::Broadcast => (if is_root { bytes } else { 0 }, bytes),
            Kind::Reduce => (bytes, if is_root { bytes } else { 0 }),
        }
    }

    /// Whether the buffers overlap otherwise than NCCL allows.
    pub fn overlaps(&self, rank: usize, world: usize) -> bool {
        let (read, written) = self.operands(rank, world);
        let (send, receive) = (self.send, self.receive);
        let is_apart =
            send.saturating_add(read) <= receive || receive.saturating_add(written) <= send;
        let in_place = match self.header.kind {
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce => send == receive,
            Kind::ReduceScatter => receive == send + rank as u64 * written,
            Kind::AllGather => send == receive + rank as u64 * read,
        };
        read > 0 && written > 0 && !is_apart && !in_place
    }

    /// Bytes of the larger operand, and those that each rank sends in a ring.
    fn traffic(&self, world: usize) -> (u64, u64) {
        let header = &self.header;
        let bytes = header.count * header.element.bytes() as u64;
        let world = world as u64;
        match header.kind {
            Kind::AllReduce => (bytes, 2 * (world - 1) * bytes / world),
            Kind::ReduceScatter | Kind::AllGather => (bytes * world, (world - 1) * bytes),
            Kind::Broadcast | Kind::Reduce => (bytes, if world > 1 { bytes } else { 0 }),
        }
    }
}

impl Communicator {
    pub fn new(
        key: u64,
        (rank, world): (usize, usize),
        device: usize,
        is_blocking: bool,
    ) -> Arc<Communicator> {
        Arc::new(Communicator {
            rank,
            world,
            device,
            is_blocking,
            key,
            state: Mutex::new(State {
                phase: Phase::Forming,
                error: None,
                message: String::new(),
                peers: Vec::new(),
                started: 0,
                flights: HashMap::new(),
                last: None,
                deferred: Vec::new(),
                deferred_at: Instant::now(),
                has_polled: false,
                factors: Vec::new(),
            }),
            issuing: Mutex::new(()),
            formed: Condvar::new(),
        })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator for people.
    pub fn name(&self) -> String {
        let Communicator {
            key, rank, world, ..
        } = self;
        format!("rank {rank} of {world} of communicator {:08x}", key >> 32)
    }

    pub fn is_aborted(&self) -> bool {
        self.state().phase == Phase::Aborted
    }

    /// Joins the other ranks on a thread. `device` is the device's index among all of the machine.
    pub fn form(self: &Arc<Self>, id: UniqueId, device: usize, fails: bool) {
        let communicator = self.clone();
        std::thread::spawn(move || {
            let joined = if fails {
                Err(Problem {
                    code: Code::System,
                    message: "the initialisation fails because the test asks for it".to_owned(),
                })
            } else {
                join(&communicator, id, device)
            };
            let mut state = communicator.state();
            match joined {
                Ok(None) => {}
                Ok(Some(_)) if state.phase == Phase::Aborted => {}
                Ok(Some(streams)) => {
                    state.phase = Phase::Ready;
                    let peers = streams.into_iter().enumerate();
                    let peers = peers.map(|(peer, stream)| communicator.connect(peer, stream?));
                    state.peers = peers.collect();
                }
                Err(Problem { code, message }) => {
                    eprintln!("emulated GPU: NCCL: {}: {message}", communicator.name());
                    (state.error, state.message) = (Some(code), message);
                }
            }
            drop(state);
            communicator.formed.notify_all();
        });
    }

    /// Waits until the communicator is formed, has failed or is aborted.
    pub fn wait_formed(&self) {
        let forming = |state: &mut State| state.phase == Phase::Forming && state.error.is_none();
        let state = self.formed.wait_while(self.state(), forming);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }

    /// Starts the threads of a connection.
    fn connect(self: &Arc<Self>, peer: usize, stream: TcpStream) -> Option<Peer> {
        let (socket, reading) = (stream.try_clone().ok()?, stream.try_clone().ok()?);
        let (outbox, messages) = channel();
        let communicator = self.clone();
        std::thread::spawn(move || communicator.receive(peer, reading));
        Some(Peer {
            socket,
            outbox: Some(outbox),
            writer: Some(std::thread::spawn(move || send_all(stream, &messages))),
            inbox: BTreeMap::new(),
            started: 0,
            lost: None,
            status: None,
        })
    }

    /// Receives a peer's messages until the connection ends.
    fn receive(&self, rank: usize, mut from: TcpStream) {
        loop {
            let frame = Frame::read(&mut from);
            let mut state = self.state();
            let Some(Some(peer)) = state.peers.get_mut(rank) else {
                return;
            };
            match frame {
                Ok(Frame::Operation {
                    sequence,
                    header,
                    data,
                }) => {
                    (peer.started, peer.status) = (sequence + 1, None);
                    peer.inbox.insert(sequence, (header, data));
                }
                Ok(Frame::Status(text)) => peer.status = Some(text).filter(|text| !text.is_empty()),
                Ok(Frame::Goodbye(reason)) => peer.lost = Some(reason),
                Err(error) => {
                    let lost = &mut peer.lost;
                    lost.get_or_insert_with(|| format!("the connection ended: {error}"));
                    return;
                }
            }
        }
    }

    /// Appends an operation to a stream.
    pub fn issue(self: &Arc<Self>, stream: usize, collective: Collective) -> Result<(), Code> {
        let after: Vec<Mark> = self.state().last.clone().into_iter().collect();
        let communicator = self.clone();
        let task = Task::collective(collective.header.kind.name(), move |access| {
            communicator.run(&collective, access)
        });
        let mark = driver::with(|machine| machine.submit_after(stream, task, &after));
        match mark {
            Ok(mark) => {
                let mut state = self.state();
                state.last = mark.or(state.last.take());
                Ok(())
            }
            Err(status) => {
                self.fail(Code::UnhandledCuda, &status.to_string());
                Err(Code::UnhandledCuda)
            }
        }
    }

    /// Issues operations that a non-blocking call has left.
    pub fn issue_deferred(self: &Arc<Self>) {
        let _issuing = self.issuing();
        let deferred = std::mem::take(&mut self.state().deferred);
        for (stream, collective) in deferred {
            // The error is the communicator's.
            let _ = self.issue(stream, collective);
        }
    }

    /// Waits while another thread issues operations.
    pub fn issuing(&self) -> MutexGuard<'_, ()> {
        self.issuing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the asynchronous error, if there is none.
    fn fail(&self, code: Code, message: &str) {
        self.state().fail(code, message);
    }

    /// Runs an operation as far as the other ranks allow.
    fn run(
        &self,
        collective: &Collective,
        access: &mut Access<'_>,
    ) -> Result<Progress, LaunchError> {
        access.limit_to(self.device);
        let mut state = self.state();
        if state.phase == Phase::Aborted {
            state.flights.remove(&access.operation);
            let (_, written) = collective.operands(self.rank, self.world);
            // The program may have freed the memory, as it may after an abort.
            let _ = access.fill(collective.receive, &[POISON], written);
            return Ok(Progress::Done);
        }
        if state.phase == Phase::Destroyed {
            let message = format!("{} is destroyed", self.name());
            return Err(LaunchError::new(Failure::Launch, message));
        }
        let flight = state.flights.remove(&access.operation);
        let mut flight = match flight {
            Some(flight) => flight,
            None => self.start(&mut state, collective, access)?,
        };
        let ready = self.check(&mut state, collective, &mut flight, access);
        if !ready || flight.begun.elapsed() < settings().delay {
            state.flights.insert(access.operation, flight);
            return Ok(Progress::Pending);
        }
        let mut parts = state.take_parts(flight.sequence);
        if flight.has_warned {
            self.tell_all(&state, String::new());
        }
        drop(state);
        let own = part_for(&collective.header, &flight.own, self.rank, self.world);
        parts[self.rank] = own.to_vec();
        self.finish(collective, &parts, access)?;
        count(collective.header.kind, collective.traffic(self.world));
        Ok(Progress::Done)
    }

    /// Reads the operand and sends it.
    fn start(
        &self,
        state: &mut State,
        collective: &Collective,
        access: &mut Access<'_>,
    ) -> Result<Flight, LaunchError> {
        let header = &collective.header;
        let (read, _) = collective.operands(self.rank, self.world);
        let mut own = vec![0; read as usize];
        access.read(collective.send, &mut own)?;
        if let Some(factor) = &collective.factor {
            let factor = factor.get(header.element, access)?;
            own = scale(header.element, &own, &factor);
        }
        let sequence = state.started;
        state.started += 1;
        let is_of_rank = [-1, self.rank as i64].contains(&settings().fail_rank);
        let nth = STARTED.fetch_add(1, Ordering::Relaxed) + 1;
        let has_failed = nth == settings().fail && is_of_rank;
        if has_failed {
            state.fail(
                Code::Remote,
                "the operation fails because the test asks for it",
            );
        } else {
            for (rank, peer) in state.peers.iter().enumerate() {
                let Some(peer) = peer else { continue };
                let frame = Frame::Operation {
                    sequence,
                    header: *header,
                    data: part_for(header, &own, rank, self.world).to_vec(),
                };
                peer.send(&frame);
            }
        }
        Ok(Flight {
            sequence,
            own,
            begun: Instant::now(),
            has_failed,
            has_warned: false,
            is_stalled: false,
            has_mismatch: false,
        })
    }

    /// Whether all parts are there; what is wrong becomes an error and a finding.
    fn check(
        &self,
        state: &mut State,
        collective: &Collective,
        flight: &mut Flight,
        access: &mut Access<'_>,
    ) -> bool {
        let (mut missing, mut wrong, mut lost) = (Vec::new(), Vec::new(), None);
        for (rank, peer) in state.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            match peer.inbox.get(&flight.sequence) {
                Some((header, _)) if *header != collective.header => wrong.push((rank, *header)),
                Some(_) => {}
                None => {
                    missing.push(rank);
                    let reason = peer.lost.as_ref();
                    lost = lost.or(reason.map(|reason| format!("rank {rank}: {reason}")));
                }
            }
        }
        if !wrong.is_empty() && !flight.has_mismatch {
            flight.has_mismatch = true;
            let (message, details) = self.mismatch(collective, flight.sequence, &wrong);
            state.fail(Code::InvalidUsage, &message);
            access.findings.push(("nccl_mismatch", message, details));
        }
        if let Some(lost) = lost
            && !settings().silent_loss
        {
            state.fail(Code::Remote, &lost);
        }
        if flight.has_failed || flight.has_mismatch {
            return false;
        }
        if missing.is_empty() {
            return true;
        }
        let timeout = settings().timeout;
        if !flight.has_warned && flight.begun.elapsed() > timeout / 10 {
            flight.has_warned = true;
            let status = self.waits(collective, flight.sequence, &missing);
            self.tell_all(state, status);
        }
        if !flight.is_stalled && flight.begun.elapsed() > timeout {
            flight.is_stalled = true;
            let waits = self.waits(collective, flight.sequence, &missing);
            let mut peers = BTreeMap::new();
            for &rank in &missing {
                peers.insert(rank, state.peers[rank].as_ref().map(Peer::situation));
            }
            let listed = peers.iter().map(|(rank, situation)| {
                let situation = situation.as_deref().unwrap_or("not connected");
                format!("rank {rank}: {situation}")
            });
            let listed = listed.collect::<Vec<_>>().join("; ");
            let seconds = timeout.as_secs_f64();
            let message = format!("{waits}, for {seconds} s; {listed}");
            let details = json!({
                "rank": self.rank, "operation": flight.sequence,
                "communicator": format!("{:08x}", self.key >> 32),
                "call": collective.header.to_string(), "waits_for": missing, "peers": peers,
            });
            access.findings.push(("nccl_stalled", message, details));
        }
        false
    }

    /// Tells the peers of all communicators of the process what this rank waits for: a rank may wait in one
    /// communicator for a peer that waits in another one. An empty text means that the wait is over.
    fn tell_all(&self, state: &State, status: String) {
        let status = Frame::Status(status);
        state.tell(&status);
        // No other task runs now, and calls of the host lock one state at a time.
        for other in communicators() {
            if !std::ptr::eq(&*other, self) {
                other.state().tell(&status);
            }
        }
    }

    fn mismatch(
        &self,
        collective: &Collective,
        sequence: u64,
        wrong: &[(usize, Header)],
    ) -> (String, Value) {
        let mut calls = BTreeMap::from([(self.rank, collective.header.to_string())]);
        calls.extend(
            wrong
                .iter()
                .map(|(rank, header)| (*rank, header.to_string())),
        );
        let listed = calls
            .iter()
            .map(|(rank, call)| format!("rank {rank}: {call}"));
        let listed = listed.collect::<Vec<_>>().join("; ");
        let communicator = format!("{:08x}", self.key >> 32);
        let message = format!(
            "ranks disagree on operation {sequence} of communicator {communicator}: {listed}"
        );
        let details = json!({
            "rank": self.rank, "operation": sequence, "communicator": communicator, "calls": calls,
        });
        (message, details)
    }

    /// What this rank waits for.
    fn waits(&self, collective: &Collective, sequence: u64, missing: &[usize]) -> String {
        let header = &collective.header;
        format!(
            "{} (pid {}) waits in operation {sequence}, {header}, for {}",
            self.name(),
            std::process::id(),
            ranks(missing.iter().map(|&rank| rank as u64))
        )
    }

    /// Computes and writes the result. `parts` are those of all ranks.
    fn finish(
        &self,
        collective: &Collective,
        parts: &[Vec<u8>],
        access: &mut Access<'_>,
    ) -> Result<(), MemoryFault> {
        let header = &collective.header;
        let (_, written) = collective.operands(self.rank, self.world);
        let result = match header.kind {
            _ if written == 0 => return Ok(()),
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                reduce(header.element, header.reduction, &parts)
            }
            Kind::AllGather => parts.concat(),
            Kind::Broadcast => parts[header.root as usize].clone(),
        };
        access.write(collective.receive, &result)
    }

    /// Leaves the group after all operations: what was sent still arrives.
    pub fn leave(&self) {
        let mut state = self.state();
        state.phase = Phase::Destroyed;
        let peers = std::mem::take(&mut state.peers);
        drop(state);
        for peer in peers.iter().flatten() {
            peer.send(&Frame::Goodbye(
                "it has destroyed its communicator".to_owned(),
            ));
        }
        let begun = Instant::now();
        for mut peer in peers.into_iter().flatten() {
            drop(peer.outbox.take());
            let Some(writer) = peer.writer.take() else {
                continue;
            };
            while !writer.is_finished() && begun.elapsed() < FLUSH {
                std::thread::sleep(Duration::from_micros(200));
            }
            let _ = peer.socket.shutdown(Shutdown::Both);
        }
    }

    /// Ends all operations at once.
    pub fn abort(&self) {
        let mut state = self.state();
        state.phase = Phase::Aborted;
        state.deferred.clear();
        state.tell(&Frame::Goodbye(
            "it has aborted its communicator".to_owned(),
        ));
        for mut peer in std::mem::take(&mut state.peers).into_iter().flatten() {
            // The writer sends what it has if the peer receives, and ends on its own.
            drop(peer.outbox.take());
            let _ = peer.socket.shutdown(Shutdown::Read);
        }
        drop(state);
        self.formed.notify_all();
    }

    /// Reports that ranks do not join.
    pub fn report_absent(&self, joined: &Value) {
        let joined: Vec<u64> = joined.as_array().map_or_else(Vec::new, |ranks| {
            ranks.iter().filter_map(Value::as_u64).collect()
        });
        let absent: Vec<u64> = (0..self.world as u64)
            .filter(|rank| !joined.contains(rank))
            .collect();
        let message = format!(
            "{} (pid {}) waits for {} to join, for {} s",
            self.name(),
            std::process::id(),
            ranks(absent.iter().copied()),
            settings().timeout.as_secs_f64()
        );
        let details = json!({
            "rank": self.rank, "call": "initialisation", "waits_for": absent,
            "communicator": format!("{:08x}", self.key >> 32),
        });
        // Without a driver there is no report, and the message is on standard error.
        let _ = driver::with(|machine| {
            machine.finding("nccl_stalled", &message, details);
            Ok(())
        });
    }
}

impl State {
    fn fail(&mut self, code: Code, message: &str) {
        if self.error.is_none() {
            self.error = Some(code);
            message.clone_into(&mut self.message);
        }
    }

    fn tell(&self, frame: &Frame) {
        for peer in self.peers.iter().flatten() {
            peer.send(frame);
        }
    }

    /// The parts of the other ranks, by rank; empty for this one.
    fn take_parts(&mut self, sequence: u64) -> Vec<Vec<u8>> {
        let parts = self.peers.iter_mut().map(|peer| {
            let part = peer.as_mut().and_then(|peer| peer.inbox.remove(&sequence));
            part.map(|(_, data)| data).unwrap_or_default()
        });
        parts.collect()
    }
}

impl Peer {
    fn send(&self, frame: &Frame) {
        if let Some(outbox) = &self.outbox {
            // The writer ends with the connection, which the reader reports.
            let _ = outbox.send(frame.encode());
        }
    }

    /// What is known of the peer.
    fn situation(&self) -> String {
        match (&self.lost, &self.status) {
            (Some(lost), _) => lost.clone(),
            (None, Some(status)) => status.clone(),
            (None, None) => format!("has started {} operations of it", self.started),
        }
    }
}

impl Factor {
    fn get(&self, element: Element, access: &Access<'_>) -> Result<Vec<u8>, MemoryFault> {
        match self {
            Factor::Value(bytes) => Ok(bytes.clone()),
            Factor::Device(address) => {
                let mut bytes = vec![0; element.bytes()];
                access.read(*address, &mut bytes)?;
                Ok(bytes)
            }
        }
    }
}

/// The bytes of a rank's operand that another rank needs.
fn part_for<'a>(header: &Header, own: &'a [u8], rank: usize, world: usize) -> &'a [u8] {
    match header.kind {
        Kind::ReduceScatter => {
            let chunk = own.len() / world;
            &own[rank * chunk..(rank + 1) * chunk]
        }
        Kind::Reduce if header.root as usize != rank => &[],
        _ => own,
    }
}

/// Writes messages until there are no more or the connection ends.
fn send_all(mut to: TcpStream, messages: &Receiver<Vec<u8>>) {
    for message in messages {
        if to.write_all(&message).is_err() {
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// A list of ranks.
fn ranks(ranks: impl Iterator<Item = u64>) -> String {
    let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", ranks.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::reduce::Reduction;

    fn collective(kind: Kind, send: u64, receive: u64) -> Collective {
        let header = Header {
            kind,
            element: Element::F32,
            reduction: Reduction::Sum,
            root: 1,
            count: 4,
        };
        Collective {
            header,
            send,
            receive,
            factor: None,
        }
    }

    #[test]
    fn bytes_of_a_ring_follow_the_formula() {
        let traffic = |kind, world| collective(kind, 0, 0).traffic(world);
        assert_eq!(traffic(Kind::AllReduce, 4), (16, 24));
        assert_eq!(traffic(Kind::ReduceScatter, 4), (64, 48));
        assert_eq!(traffic(Kind::AllGather, 4), (64, 48));
        assert_eq!(traffic(Kind::Broadcast, 1), (16, 0));
    }

    #[test]
    fn only_the_documented_places_are_in_place() {
        assert!(!collective(Kind::AllReduce, 100, 100).overlaps(0, 2));
        assert!(collective(Kind::AllReduce, 100, 104).overlaps(0, 2));
        assert!(!collective(Kind::AllReduce, 100, 116).overlaps(0, 2));
        assert!(!collective(Kind::AllGather, 116, 100).overlaps(1, 2));
        assert!(collective(Kind::AllGather, 100, 100).overlaps(1, 2));
        assert!(!collective(Kind::ReduceScatter, 100, 116).overlaps(1, 2));
        assert!(collective(Kind::ReduceScatter, 100, 100).overlaps(1, 2));
        assert!(
            !collective(Kind::Broadcast, 100, 104).overlaps(0, 2),
            "not the root"
        );
    }
}
