//! Control messages on the heartbeat connections: heartbeats, lost ranks and goodbyes.

use crate::comm::CommError;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ControlMessage {
    /// The sender is alive.
    Beat,
    /// The sender leaves because this rank is lost.
    Lost { rank: usize, reason: String },
    /// The sender leaves because this rank (perhaps itself) stopped the collectives.
    Aborted { rank: usize, reason: String },
    /// The sender is done and leaves.
    Goodbye,
}

/// Bytes that are no control message.
#[derive(Debug, thiserror::Error)]
#[error("its control message is malformed")]
pub(super) struct Malformed;

/// Kind (one byte), rank (four bytes, little-endian), length of the reason (two).
const HEADER: usize = 7;

/// Longest reason, in bytes; longer ones are cut.
const REASON_LIMIT: usize = 1024;

impl ControlMessage {
    /// The message that announces a verdict.
    pub fn about(verdict: &CommError) -> Self {
        match verdict {
            CommError::PeerLost { rank, reason } => ControlMessage::Lost {
                rank: *rank,
                reason: reason.clone(),
            },
            CommError::Aborted { rank, reason } => ControlMessage::Aborted {
                rank: *rank,
                reason: reason.clone(),
            },
            CommError::Rendezvous(_) | CommError::Misuse(_) => ControlMessage::Goodbye,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let (kind, rank, reason) = match self {
            ControlMessage::Beat => (b'.', 0, ""),
            ControlMessage::Lost { rank, reason } => (b'L', *rank, reason.as_str()),
            ControlMessage::Aborted { rank, reason } => (b'A', *rank, reason.as_str()),
            ControlMessage::Goodbye => (b'G', 0, ""),
        };
        let mut end = reason.len().min(REASON_LIMIT);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&(rank as u32).to_le_bytes());
        bytes.extend_from_slice(&(end as u16).to_le_bytes());
        bytes.extend_from_slice(&reason.as_bytes()[..end]);
        bytes
    }

    /// Takes the first message off `inbox`: `None` while it is incomplete, an error when it is malformed.
    pub fn decode(inbox: &mut Vec<u8>) -> Result<Option<Self>, Malformed> {
        let Some(&[kind, r0, r1, r2, r3, l0, l1]) = inbox.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let rank = u32::from_le_bytes([r0, r1, r2, r3]) as usize;
        let end = HEADER + u16::from_le_bytes([l0, l1]) as usize;
        if end > HEADER + REASON_LIMIT {
            return Err(Malformed);
        }
        if inbox.len() < end {
            return Ok(None);
        }
        let reason = String::from_utf8_lossy(&inbox[HEADER..end]).into_owned();
        inbox.drain(..end);
        match kind {
            b'.' => Ok(Some(ControlMessage::Beat)),
            b'L' => Ok(Some(ControlMessage::Lost { rank, reason })),
            b'A' => Ok(Some(ControlMessage::Aborted { rank, reason })),
            b'G' => Ok(Some(ControlMessage::Goodbye)),
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn control_message() -> impl Strategy<Value = ControlMessage> {
        let fields = (0usize..5000, ".{0,80}");
        prop_oneof![
            Just(ControlMessage::Beat),
            Just(ControlMessage::Goodbye),
            fields
                .clone()
                .prop_map(|(rank, reason)| ControlMessage::Lost { rank, reason }),
            fields.prop_map(|(rank, reason)| ControlMessage::Aborted { rank, reason }),
        ]
    }

    proptest! {
        #[test]
        fn control_messages_survive_any_fragmentation(
            sent in prop::collection::vec(control_message(), 0..8),
            step in 1usize..50,
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(ControlMessage::encode).collect();
            let mut inbox = Vec::new();
            let mut received = Vec::new();
            for piece in bytes.chunks(step) {
                inbox.extend_from_slice(piece);
                while let Some(message) = ControlMessage::decode(&mut inbox).unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert!(inbox.is_empty());
        }

        #[test]
        fn malformed_messages_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut inbox = bytes;
            while let Ok(Some(_)) = ControlMessage::decode(&mut inbox) {}
        }
    }

    #[test]
    fn long_reasons_are_cut_between_characters() {
        let reason = "ü".repeat(REASON_LIMIT);
        let mut inbox = ControlMessage::Lost {
            rank: 1,
            reason: format!("x{reason}"),
        }
        .encode();
        let Ok(Some(ControlMessage::Lost { reason, .. })) = ControlMessage::decode(&mut inbox)
        else {
            panic!("it decodes");
        };
        assert_eq!(reason.len(), REASON_LIMIT - 1);
    }
}
