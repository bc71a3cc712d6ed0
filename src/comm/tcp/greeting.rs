//! The greeting and the other messages of the rendezvous.
//!
//! A message is `EVENKEEL`, its length as four little-endian bytes, and JSON. A connection that sends
//! anything else is refused. A length that an unknown peer announces is trusted only up to a limit.
//!
//! Both sides prove that they have the generation's key before either says anything about the world:
//!
//! 1. A rank opens a connection to rank 0 with a nonce. Rank 0 answers with its own nonce and the proof for both.
//! 2. The rank says which one it is and where it listens, with the proof for that and both nonces.
//! 3. Once all have joined, rank 0 sends the table of addresses and the nonce of this rendezvous. From the latter and
//!    the generation's key follows the key for the lanes.
//! 4. A lane begins with its rank, its kind, a nonce and the proof for them and the rank that it connects to. That
//!    rank answers with a proof for the same.
//!
//! What follows on a connection is not encrypted: a person who can change packets between the hosts can change it.

use std::io::{self, Read};
use std::net::SocketAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::util::format::bytes_apart;
use crate::util::key::{Key, Nonce, Proof};

/// Identity of a rank in the world of its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Greeting {
    /// This rank, counted from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
}

/// A message to a rank that listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Hello {
    /// Asks rank 0 for the proof that it has the key.
    Open {
        nonce: Nonce,
    },
    /// Asks rank 0 for the table of addresses.
    Join {
        join: Join,
        proof: Proof,
    },
    Lane {
        lane: LaneOf,
        proof: Proof,
    },
}

/// A rank that asks for the table of addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Join {
    pub greeting: Greeting,
    /// Address on which this rank accepts the other ranks.
    pub listen: SocketAddr,
}

/// One of a pair's three connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LaneOf {
    /// The rank that connects.
    pub rank: usize,
    pub lane: Lane,
    pub nonce: Nonce,
}

/// The nonces of both sides of a connection to rank 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nonces {
    pub guest: Nonce,
    pub host: Nonce,
}

impl Nonces {
    /// What rank 0 proves.
    pub fn of_host(&self) -> [&[u8]; 3] {
        [b"rank 0", &self.guest, &self.host]
    }

    /// What a rank proves that says this.
    fn of_guest<'a>(&'a self, said: &'a [u8]) -> [&'a [u8]; 4] {
        [b"join", &self.guest, &self.host, said]
    }
}

impl Join {
    /// The message with its proof.
    pub fn proven(self, key: &Key, nonces: &Nonces) -> io::Result<Hello> {
        let said = serde_json::to_vec(&self)?;
        let proof = key.prove(&nonces.of_guest(&said));
        Ok(Hello::Join { join: self, proof })
    }

    /// Whether a proof is that of this message.
    pub fn is_proven(&self, key: &Key, nonces: &Nonces, proof: &Proof) -> bool {
        let said = serde_json::to_vec(self).unwrap_or_default();
        key.verify(&nonces.of_guest(&said), proof)
    }
}

/// The key for the lanes of one rendezvous.
pub(super) fn lane_key(key: &Key, rendezvous: &Nonce) -> Key {
    key.derive(&[b"lanes", rendezvous])
}

impl LaneOf {
    /// The proof of one side of a lane to rank `to`.
    pub fn proof(&self, lanes: &Key, to: usize, side: Side) -> Proof {
        lanes.prove(&self.parts(to, side).each_ref().map(Vec::as_slice))
    }

    /// Whether a proof is that of one side of a lane to rank `to`.
    pub fn is_proven(&self, lanes: &Key, to: usize, side: Side, proof: &Proof) -> bool {
        let parts = self.parts(to, side);
        lanes.verify(&parts.each_ref().map(Vec::as_slice), proof)
    }

    fn parts(&self, to: usize, side: Side) -> [Vec<u8>; 2] {
        let numbers = [self.rank as u64, to as u64, self.lane as u64, side as u64];
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        [numbers.collect(), self.nonce.to_vec()]
    }
}

/// A side of a lane.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    Connects,
    Accepts,
}

/// The connections of a pair: each kind of traffic has its own, so that none waits for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Lane {
    Data,
    /// Small messages of [`super::TcpCollective`]'s exchanges.
    Exchange,
    /// Heartbeats and lost ranks.
    Heartbeat,
}

/// The answer of a rank that listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Reply {
    /// Rank 0's answer to [`Hello::Open`].
    Challenge { nonce: Nonce, proof: Proof },
    /// Rank 0's answer to [`Hello::Join`].
    Table {
        /// The addresses on which the ranks accept connections; rank 0's entry is the address that reached it.
        addresses: Vec<SocketAddr>,
        /// The nonce of this rendezvous.
        rendezvous: Nonce,
    },
    /// The answer to [`Hello::Lane`].
    Admitted(Proof),
    /// The connection is refused, with the reason.
    Refused(String),
    /// The rendezvous has failed, because this rank did not connect.
    Missing { rank: usize, reason: String },
}

impl Greeting {
    /// Checks the fields against each other; the error is the reason to refuse them.
    pub(super) fn validate(&self) -> Result<(), String> {
        let Greeting { rank, world } = self;
        if rank < world {
            return Ok(());
        }
        Err(format!("rank {rank} is not below the world size {world}"))
    }

    /// Whether `other` belongs to this rank's world; the error is the reason to refuse it.
    pub(super) fn admit(&self, other: &Greeting) -> Result<(), String> {
        if other.world != self.world {
            return Err(format!(
                "it expects a world of {} ranks, not of {}",
                other.world, self.world
            ));
        }
        other.validate()?;
        if other.rank == self.rank {
            return Err(format!("rank {} is already taken", other.rank));
        }
        Ok(())
    }
}

const MAGIC: &[u8; 8] = b"EVENKEEL";
const HEADER: usize = MAGIC.len() + 4;

/// Longest [`Hello`], in bytes.
pub(super) const HELLO_LIMIT: usize = 4096;

/// Longest [`Reply`] to a world of this size, in bytes. An address takes at most 80.
pub(super) fn reply_limit(world: usize) -> usize {
    HELLO_LIMIT + 80 * world
}

pub(super) fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).map_err(io::Error::other)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

/// A partly received message. It reads no byte past the message's end, because the lane's traffic follows.
#[derive(Debug)]
pub(super) struct Intake {
    bytes: Vec<u8>,
    limit: usize,
}

impl Intake {
    pub fn new(limit: usize) -> Self {
        Intake {
            bytes: Vec::new(),
            limit,
        }
    }

    /// Whether no byte has arrived yet.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Reads the bytes that have arrived: `None` until the message is complete. An I/O error is the stream's;
    /// [`io::ErrorKind::InvalidData`] is an invalid message and holds the reason to refuse it.
    pub fn read<T: DeserializeOwned>(&mut self, mut stream: impl Read) -> io::Result<Option<T>> {
        loop {
            let missing = self.missing()?;
            if missing == 0 {
                return serde_json::from_slice(&self.bytes[HEADER..])
                    .map(Some)
                    .map_err(|error| stranger(format!("its greeting is malformed: {error}")));
            }
            let mut chunk = [0; HELLO_LIMIT];
            let wanted = missing.min(chunk.len());
            match stream.read(&mut chunk[..wanted]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.bytes.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn missing(&self) -> io::Result<usize> {
        let begun = self.bytes.len().min(MAGIC.len());
        if self.bytes[..begun] != MAGIC[..begun] {
            let words = String::from_utf8_lossy(&self.bytes);
            return Err(stranger(format!(
                "it is not a rank of Evenkeel: it began with `{}`",
                words.escape_debug()
            )));
        }
        let Some(length) = self.bytes.get(MAGIC.len()..HEADER) else {
            return Ok(HEADER - self.bytes.len());
        };
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
        if length > self.limit {
            let [size, limit] = bytes_apart(length as u64, self.limit as u64);
            return Err(stranger(format!(
                "it announced a message of {size}, more than {limit}"
            )));
        }
        Ok(HEADER + length - self.bytes.len())
    }
}

fn stranger(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_ranks_of_the_same_world_are_admitted() {
        let own = Greeting { rank: 0, world: 3 };
        let admitted = |rank, world| own.admit(&Greeting { rank, world });
        assert_eq!(admitted(1, 3), Ok(()));
        let refused =
            [admitted(1, 2), admitted(3, 3), admitted(0, 3)].map(|refused| refused.unwrap_err());
        assert_eq!(
            refused,
            [
                "it expects a world of 2 ranks, not of 3",
                "rank 3 is not below the world size 3",
                "rank 0 is already taken",
            ]
        );
    }

    /// A proof holds for one message, one pair of nonces, one pair of ranks and one side only.
    #[test]
    fn no_proof_serves_for_something_else() {
        let key = Key::random().unwrap();
        let [guest, host, other] = [[1; 32], [2; 32], [3; 32]];
        let nonces = Nonces { guest, host };
        let listen = ([127, 0, 0, 1], 1).into();
        let join = |rank| Join {
            greeting: Greeting { rank, world: 3 },
            listen,
        };
        let Hello::Join { join: said, proof } = join(1).proven(&key, &nonces).unwrap() else {
            unreachable!()
        };
        assert!(said.is_proven(&key, &nonces, &proof));
        assert!(!join(2).is_proven(&key, &nonces, &proof));
        for others in [Nonces { guest: other, host }, Nonces { guest, host: other }] {
            assert!(!said.is_proven(&key, &others, &proof));
            assert!(!key.verify(&others.of_host(), &key.prove(&nonces.of_host())));
        }
        assert!(key.verify(&nonces.of_host(), &key.prove(&nonces.of_host())));

        let lanes = lane_key(&key, &other);
        let lane = LaneOf {
            rank: 2,
            lane: Lane::Data,
            nonce: guest,
        };
        let proof = lane.proof(&lanes, 1, Side::Connects);
        assert!(lane.is_proven(&lanes, 1, Side::Connects, &proof));
        assert!(!lane.is_proven(&lanes, 1, Side::Accepts, &proof));
        assert!(!lane.is_proven(&lanes, 0, Side::Connects, &proof));
        assert!(!lane.is_proven(&lane_key(&key, &host), 1, Side::Connects, &proof));
        for changed in [
            LaneOf { rank: 3, ..lane },
            LaneOf {
                lane: Lane::Heartbeat,
                ..lane
            },
            LaneOf {
                nonce: host,
                ..lane
            },
        ] {
            assert!(!changed.is_proven(&lanes, 1, Side::Connects, &proof));
        }
    }

    proptest! {
        #[test]
        fn a_hello_survives_any_fragmentation(cut in 0usize..200) {
            let hello = Hello::Open { nonce: [7; 32] };
            let mut bytes = encode(&hello).unwrap();
            let whole = bytes.len();
            bytes.extend_from_slice(b"traffic");
            let mut intake = Intake::new(HELLO_LIMIT);
            let cut = cut.min(whole - 1);
            let early = intake.read::<Hello>(&bytes[..cut]).unwrap_err();
            prop_assert_eq!(early.kind(), io::ErrorKind::UnexpectedEof);
            let mut rest = &bytes[cut..];
            prop_assert_eq!(intake.read::<Hello>(&mut rest).unwrap(), Some(hello));
            prop_assert_eq!(rest, b"traffic");
        }

        #[test]
        fn garbage_is_refused_and_costs_little(garbage in prop::collection::vec(any::<u8>(), 12..64)) {
            let mut intake = Intake::new(HELLO_LIMIT);
            let error = intake.read::<Hello>(&garbage[..]).unwrap_err();
            prop_assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            prop_assert!(intake.bytes.capacity() <= HELLO_LIMIT);
        }
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_allocated() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        let mut intake = Intake::new(HELLO_LIMIT);
        let error = intake.read::<Hello>(&bytes[..]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "it announced a message of 4.00 GiB, more than 4.00 KiB"
        );
        assert!(intake.bytes.capacity() < 64);
    }

    #[test]
    fn a_browser_is_recognised_by_its_first_bytes() {
        let mut intake = Intake::new(HELLO_LIMIT);
        let error = intake
            .read::<Hello>(&b"GET / HTTP/1.1\r\n"[..])
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "it is not a rank of Evenkeel: it began with `GET / HTTP/1`"
        );
    }
}
