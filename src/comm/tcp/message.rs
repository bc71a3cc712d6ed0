//! An exchange: every rank sends a small message to every other rank.

use super::wire::Flow;
use crate::util::format::bytes_apart;

/// Longest message, in bytes.
pub(super) const MESSAGE_LIMIT: usize = 64 << 20;

/// Number and length, each as eight little-endian bytes.
const HEADER: usize = 16;

/// Bytes that are allocated ahead of the data received, whatever length a message announces.
const AHEAD: usize = 64 << 10;

/// One exchange in progress.
pub(super) struct Messages<'a> {
    rank: usize,
    number: u64,
    header: [u8; HEADER],
    message: &'a [u8],
    peers: Vec<Peer>,
}

#[derive(Clone, Default)]
struct Peer {
    sent: usize,
    received: usize,
    header: [u8; HEADER],
    length: usize,
    message: Vec<u8>,
}

impl<'a> Messages<'a> {
    /// `number` counts the exchanges of this world.
    pub fn new(rank: usize, world: usize, number: u64, message: &'a [u8]) -> Self {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&number.to_le_bytes());
        header[8..].copy_from_slice(&(message.len() as u64).to_le_bytes());
        Messages {
            rank,
            number,
            header,
            message,
            peers: vec![Peer::default(); world],
        }
    }

    /// The messages of all ranks, in rank order.
    pub fn into_all(self) -> Vec<Vec<u8>> {
        let mut all: Vec<Vec<u8>> = self.peers.into_iter().map(|peer| peer.message).collect();
        all[self.rank] = self.message.to_vec();
        all
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let own = self.rank;
        let all = self.peers.iter().enumerate();
        all.filter(move |&(peer, _)| peer != own)
    }
}

impl Flow for Messages<'_> {
    fn outgoing(&self, peer: usize) -> &[u8] {
        let at = self.peers[peer].sent;
        match at.checked_sub(HEADER) {
            None => &self.header[at..],
            Some(at) => &self.message[at..],
        }
    }

    fn sent(&mut self, peer: usize, bytes: usize) {
        self.peers[peer].sent += bytes;
    }

    fn incoming(&mut self, peer: usize) -> &mut [u8] {
        let peer = &mut self.peers[peer];
        let Some(at) = peer.received.checked_sub(HEADER) else {
            return &mut peer.header[peer.received..];
        };
        let end = peer.length.min(at + AHEAD);
        peer.message.resize(end, 0);
        &mut peer.message[at..]
    }

    fn received(&mut self, peer: usize, bytes: usize) -> Result<(), String> {
        let rank = peer;
        let peer = &mut self.peers[peer];
        peer.received += bytes;
        if peer.received != HEADER {
            return Ok(());
        }
        let (number, length) = peer.header.split_at(8);
        if number != self.number.to_le_bytes() {
            return Err(format!(
                "rank {rank} is not in exchange {} of this world",
                self.number
            ));
        }
        let mut bytes = [0; 8];
        bytes.copy_from_slice(length);
        let length = u64::from_le_bytes(bytes);
        if length > MESSAGE_LIMIT as u64 {
            let [size, limit] = bytes_apart(length, MESSAGE_LIMIT as u64);
            return Err(format!(
                "rank {rank} announced a message of {size}, more than {limit}"
            ));
        }
        peer.length = length as usize;
        Ok(())
    }

    fn done(&self) -> bool {
        self.others().all(|(_, peer)| {
            peer.sent == HEADER + self.message.len()
                && peer.received >= HEADER
                && peer.received == HEADER + peer.length
        })
    }

    fn late(&self) -> Vec<usize> {
        let late = |peer: &Peer| peer.received < HEADER || peer.received < HEADER + peer.length;
        let late = self.others().filter(|(_, peer)| late(peer));
        late.map(|(rank, _)| rank).collect()
    }
}
