//! The greeting and the other messages of the rendezvous.
//!
//! A message is `EVENKEEL`, its length as four little-endian bytes, and JSON. A connection that sends
//! anything else is refused. A length that an unknown peer announces is trusted only up to a limit.

use std::io::{self, Read};
use std::net::SocketAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Identity of a rank: ranks share a world only when all fields but the rank are equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Greeting {
    /// The job's unique id, at most 256 bytes.
    pub job_uid: String,
    /// The job generation; ranks of an older one are refused.
    pub generation: u64,
    /// This rank, counted from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world: usize,
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Purpose {
    /// Asks rank 0 for the table of addresses.
    Join {
        /// Address on which this rank accepts the other ranks.
        listen: SocketAddr,
    },
    /// One of a pair's three connections.
    Lane(Lane),
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

/// The first message on every connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Hello {
    pub greeting: Greeting,
    pub purpose: Purpose,
}

/// Rank 0's answer to a [`Purpose::Join`], and any rank's answer to a connection that it refuses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Reply {
    /// The addresses on which the ranks accept connections; rank 0's entry is the address that reached it.
    Table(Vec<SocketAddr>),
    /// The connection is refused, with the reason.
    Refused(Refusal),
    /// The rendezvous has failed, because this rank did not connect.
    Missing { rank: usize, reason: String },
}

/// Why a connection is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Refusal {
    pub reason: String,
    /// Whether the refused rank should try again, because the listener is the outdated side.
    pub retry: bool,
}

impl Refusal {
    pub fn final_because(reason: impl Into<String>) -> Self {
        Refusal {
            reason: reason.into(),
            retry: false,
        }
    }
}

impl Greeting {
    /// Checks the fields against each other; the error names the invalid one.
    pub(super) fn validate(&self) -> Result<(), String> {
        if self.rank >= self.world {
            return Err(format!(
                "rank {} is not below the world size {}",
                self.rank, self.world
            ));
        }
        if self.job_uid.len() > 256 {
            return Err(format!(
                "the job uid has {} bytes, more than 256",
                self.job_uid.len()
            ));
        }
        Ok(())
    }

    /// Whether `other` belongs to this rank's world.
    pub(super) fn admit(&self, other: &Greeting) -> Result<(), Refusal> {
        if other.job_uid != self.job_uid {
            return Err(Refusal::final_because(format!(
                "it belongs to job `{}`, not to `{}`",
                other.job_uid.escape_debug(),
                self.job_uid.escape_debug()
            )));
        }
        if other.generation != self.generation {
            return Err(Refusal {
                reason: format!(
                    "it belongs to generation {}, not to {}",
                    other.generation, self.generation
                ),
                retry: other.generation > self.generation,
            });
        }
        if other.world != self.world {
            return Err(Refusal::final_because(format!(
                "it expects a world of {} ranks, not of {}",
                other.world, self.world
            )));
        }
        other.validate().map_err(Refusal::final_because)?;
        if other.rank == self.rank {
            return Err(Refusal::final_because(format!(
                "rank {} is already taken",
                other.rank
            )));
        }
        Ok(())
    }
}

const MAGIC: &[u8; 8] = b"EVENKEEL";
const HEADER: usize = MAGIC.len() + 4;

/// Longest [`Hello`], in bytes.
pub(super) const HELLO_LIMIT: usize = 4096;

/// Longest [`Reply`] to a world of this size, in bytes.
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
            return Err(stranger(format!(
                "it announced a message of {length} bytes, more than {}",
                self.limit
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

    fn greeting() -> Greeting {
        Greeting {
            job_uid: "job".into(),
            generation: 4,
            rank: 0,
            world: 3,
        }
    }

    #[test]
    fn only_ranks_of_the_same_world_are_admitted() {
        let own = greeting();
        let other = |change: fn(&mut Greeting)| {
            let mut other = Greeting {
                rank: 1,
                ..greeting()
            };
            change(&mut other);
            own.admit(&other)
        };
        assert_eq!(other(|_| {}), Ok(()));
        let refused = |change| {
            let refusal: Refusal = other(change).unwrap_err();
            (refusal.reason, refusal.retry)
        };
        let cases = [
            refused(|it| it.job_uid = "other".into()),
            refused(|it| it.generation = 3),
            refused(|it| it.generation = 5),
            refused(|it| it.world = 2),
            refused(|it| it.rank = 3),
            refused(|it| it.rank = 0),
        ];
        let expected = [
            ("it belongs to job `other`, not to `job`", false),
            ("it belongs to generation 3, not to 4", false),
            ("it belongs to generation 5, not to 4", true),
            ("it expects a world of 2 ranks, not of 3", false),
            ("rank 3 is not below the world size 3", false),
            ("rank 0 is already taken", false),
        ];
        for ((reason, retry), (words, again)) in cases.iter().zip(expected) {
            assert_eq!((reason.as_str(), *retry), (words, again));
        }
    }

    proptest! {
        #[test]
        fn a_hello_survives_any_fragmentation(cut in 0usize..200) {
            let hello = Hello { greeting: greeting(), purpose: Purpose::Lane(Lane::Data) };
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
            "it announced a message of 4294967295 bytes, more than 4096"
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
