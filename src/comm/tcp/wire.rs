//! Moves bytes to and from all peers at once.
//!
//! One thread serves both directions and blocks in neither. If every rank sent before it received, full
//! socket buffers would make all of them wait for each other.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Most bytes that move in one direction before the other has its turn.
const TURN: usize = 1 << 18;

/// Connections of one kind to every peer, indexed by rank (`None` at this rank's index).
pub(super) type Streams = Vec<Option<TcpStream>>;

/// The content of one operation: a virtual stream to and one from every peer.
pub(super) trait Flow {
    /// The next bytes for `peer` that are ready; empty when none are.
    fn outgoing(&self, peer: usize) -> &[u8];
    /// Records that `bytes` bytes were sent.
    fn sent(&mut self, peer: usize, bytes: usize);
    /// The buffer for the next bytes of `peer`; empty while none are expected.
    fn incoming(&mut self, peer: usize) -> &mut [u8];
    /// Records that `bytes` bytes arrived; the error says why they are invalid.
    fn received(&mut self, peer: usize, bytes: usize) -> Result<(), String>;
    /// Computes whatever is possible between two rounds.
    fn advance(&mut self) {}
    /// Whether everything is sent, received and computed.
    fn done(&self) -> bool;
    /// The peers that the flow waits for.
    fn late(&self) -> Vec<usize>;
}

#[derive(Debug)]
pub(super) enum Stop {
    /// The connection to a peer broke.
    Broken { peer: usize, reason: String },
    /// A peer runs a different operation.
    Mismatch { reason: String },
}

/// Runs a flow to its end. It calls `late` with the ranks that it waits for, and the time waited, after
/// `patience`, twice that, four times that, and so on.
pub(super) fn drive(
    streams: &Streams,
    flow: &mut impl Flow,
    patience: Duration,
    late: &dyn Fn(&[usize], Duration),
) -> Result<(), Stop> {
    let begun = Instant::now();
    let mut report = patience;
    loop {
        flow.advance();
        if flow.done() {
            return Ok(());
        }
        let mut moved = false;
        for (peer, stream) in peers(streams) {
            moved |= send(peer, stream, flow)?;
            moved |= receive(peer, stream, flow)?;
        }
        if moved {
            continue;
        }
        let mut fds: Vec<PollFd<'_>> = peers(streams)
            .filter_map(|(peer, stream)| {
                let mut interest = PollFlags::empty();
                interest.set(PollFlags::OUT, !flow.outgoing(peer).is_empty());
                interest.set(PollFlags::IN, !flow.incoming(peer).is_empty());
                (!interest.is_empty()).then(|| PollFd::new(stream, interest))
            })
            .collect();
        let limit = report.saturating_sub(begun.elapsed());
        if let Err(error) = wait(&mut fds, limit) {
            let peer = flow.late().first().copied().unwrap_or_default();
            let reason = format!("cannot poll: {error}");
            return Err(Stop::Broken { peer, reason });
        }
        if begun.elapsed() >= report {
            late(&flow.late(), begun.elapsed());
            report *= 2;
        }
    }
}

/// Waits until one of `fds` is ready or `limit` has passed; a signal ends the wait early.
pub(super) fn wait(fds: &mut [PollFd<'_>], limit: Duration) -> io::Result<()> {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    match poll(fds, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The streams of a lane with their ranks.
pub(super) fn peers<S>(lane: &[Option<S>]) -> impl Iterator<Item = (usize, &S)> {
    let all = lane.iter().enumerate();
    all.filter_map(|(rank, stream)| Some((rank, stream.as_ref()?)))
}

fn send(peer: usize, mut stream: impl Write, flow: &mut impl Flow) -> Result<bool, Stop> {
    let bytes = flow.outgoing(peer);
    if bytes.is_empty() {
        return Ok(false);
    }
    let sent = stream.write(&bytes[..bytes.len().min(TURN)]);
    let Some(sent) = moved(peer, sent)? else {
        return Ok(false);
    };
    flow.sent(peer, sent);
    Ok(true)
}

fn receive(peer: usize, mut stream: impl Read, flow: &mut impl Flow) -> Result<bool, Stop> {
    let place = flow.incoming(peer);
    if place.is_empty() {
        return Ok(false);
    }
    let wanted = place.len().min(TURN);
    let received = stream.read(&mut place[..wanted]);
    let Some(received) = moved(peer, received)? else {
        return Ok(false);
    };
    flow.received(peer, received)
        .map_err(|reason| Stop::Mismatch { reason })?;
    Ok(true)
}

/// The number of bytes moved; `None` when the socket was not ready.
fn moved(peer: usize, result: io::Result<usize>) -> Result<Option<usize>, Stop> {
    let reason = match result {
        Ok(0) => "connection closed".into(),
        Ok(bytes) => return Ok(Some(bytes)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Ok(None),
            _ => error.to_string(),
        },
    };
    Err(Stop::Broken { peer, reason })
}
