//! Unix sockets between ranks of one host, which replace their TCP connections.
//!
//! Ranks share a host when both ends of their TCP connection have the same address. The lower rank then sends
//! the name of a socket in Linux's abstract namespace, and a token, over TCP. A rank that connects to the
//! socket must show the token. The TCP connection stays in use where this fails (one address for several
//! network namespaces) or is not wanted.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use super::wire::{Streams, peers};
use crate::util::key::{Nonce, hex, nonce};

/// Bytes of an offer by the lower rank of a pair: the socket's name and the token, or zeros.
const OFFER: usize = 2 * size_of::<Nonce>();
const NO_OFFER: [u8; OFFER] = [0; OFFER];

/// Replaces the TCP connections to ranks of this host where both ends want that. Every rank of the world
/// calls it at the same time; an error names the peer.
pub(super) fn unix_where_shared(
    rank: usize,
    lane: Streams,
    wanted: bool,
    patience: Duration,
) -> Result<Streams, (usize, io::Error)> {
    for (peer, stream) in peers(&lane) {
        let blocking = stream.set_nonblocking(false);
        blocking
            .and_then(|()| stream.set_read_timeout(Some(patience)))
            .map_err(|error| (peer, error))?;
    }
    // All offers are sent first, so that no two ranks wait for each other.
    let mut offers: Vec<Option<Offer>> = lane.iter().map(|_| None).collect();
    for (peer, mut stream) in peers(&lane).filter(|&(peer, _)| peer > rank) {
        offers[peer] = (wanted && on_this_host(stream))
            .then(|| Offer::new().ok())
            .flatten();
        let bytes = offers[peer].as_ref().map_or(NO_OFFER, Offer::bytes);
        stream.write_all(&bytes).map_err(|error| (peer, error))?;
    }
    let mut taken: Vec<Option<UnixStream>> = lane.iter().map(|_| None).collect();
    for (peer, stream) in peers(&lane).filter(|&(peer, _)| peer < rank) {
        taken[peer] = answer(stream, wanted).map_err(|error| (peer, error))?;
    }
    for (peer, mut stream) in peers(&lane).filter(|&(peer, _)| peer > rank) {
        let mut taken_up = [0];
        stream
            .read_exact(&mut taken_up)
            .map_err(|error| (peer, error))?;
        if let (Some(offer), [1]) = (&offers[peer], taken_up) {
            taken[peer] = Some(offer.accept().map_err(|error| (peer, error))?);
        }
    }
    let lane = lane.into_iter().zip(taken);
    // The methods of a `TcpStream` that follow are those of every connected socket: `recv`, `send`, `shutdown`.
    let as_tcp = |unix| TcpStream::from(OwnedFd::from(unix));
    Ok(lane.map(|(tcp, unix)| unix.map(as_tcp).or(tcp)).collect())
}

fn on_this_host(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(own), Ok(theirs)) => own.ip() == theirs.ip(),
        _ => false,
    }
}

/// Reads the offer of a lower rank; `None` when this rank declines it.
fn answer(mut stream: &TcpStream, wanted: bool) -> io::Result<Option<UnixStream>> {
    let mut offer = NO_OFFER;
    stream.read_exact(&mut offer)?;
    let (name, token) = offer.split_at(size_of::<Nonce>());
    let unix = (wanted && offer != NO_OFFER)
        .then(|| take_up(name, token).ok())
        .flatten();
    stream.write_all(&[u8::from(unix.is_some())])?;
    Ok(unix)
}

fn take_up(name: &[u8], token: &[u8]) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect_addr(&address(name)?)?;
    stream.write_all(token)?;
    Ok(stream)
}

/// A listening socket for one rank.
struct Offer {
    listener: UnixListener,
    name: Nonce,
    token: Nonce,
}

impl Offer {
    fn new() -> io::Result<Offer> {
        let (name, token) = (nonce()?, nonce()?);
        let listener = UnixListener::bind_addr(&address(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Offer {
            listener,
            name,
            token,
        })
    }

    fn bytes(&self) -> [u8; OFFER] {
        let mut bytes = NO_OFFER;
        let (name, token) = bytes.split_at_mut(size_of::<Nonce>());
        name.copy_from_slice(&self.name);
        token.copy_from_slice(&self.token);
        bytes
    }

    /// Returns the connection that shows the token. The rank has already connected and written, so that this
    /// call never blocks, not even for a stranger that connects and stays silent.
    fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let (mut stream, _) = self.listener.accept()?;
            stream.set_nonblocking(true)?;
            let mut shown = Nonce::default();
            if stream.read_exact(&mut shown).is_ok() && shown == self.token {
                return Ok(stream);
            }
        }
    }
}

/// An address in the abstract namespace: it has no file and disappears with its socket.
fn address(name: &[u8]) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("evenkeel-{}", hex(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_stranger_is_not_waited_for() {
        let offer = Offer::new().unwrap();
        let _silent = UnixStream::connect_addr(&address(&offer.name).unwrap()).unwrap();
        let error = offer.accept().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_connection_without_the_token_is_refused() {
        let offer = Offer::new().unwrap();
        let mut stranger = take_up(&offer.name, &[7; 32]).unwrap();
        let mut invited = take_up(&offer.name, &offer.token).unwrap();
        let mut accepted = offer.accept().unwrap();
        accepted.write_all(b"welcome").unwrap();
        let mut received = [0; 7];
        invited.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"welcome");
        assert_eq!(stranger.read(&mut received).unwrap(), 0, "closed");
    }
}
