//! What ranks send each other: frames of a tag, a length and a payload.

use std::fmt;
use std::io::{self, Read};

use super::reduce::{Element, Reduction};

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    AllReduce = 0,
    ReduceScatter = 1,
    AllGather = 2,
    Broadcast = 3,
    Reduce = 4,
}

impl Kind {
    const ALL: [Kind; 5] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::Broadcast,
        Kind::Reduce,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllGather => "all_gather",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
        }
    }

    pub fn has_reduction(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce)
    }
}

/// What all ranks of an operation must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub element: Element,
    pub reduction: Reduction,
    pub root: u32,
    /// Elements, as the call counts them.
    pub count: u64,
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, element) = (self.kind.name(), self.element.name());
        write!(f, "{kind} of {} {element}", self.count)?;
        if self.kind.has_reduction() {
            write!(f, " ({})", self.reduction.name())?;
        }
        if self.kind.has_root() {
            write!(f, " with root {}", self.root)?;
        }
        Ok(())
    }
}

/// A message from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// The rank's part in its n-th operation, from 0.
    Operation {
        sequence: u64,
        header: Header,
        data: Vec<u8>,
    },
    /// What the rank waits for.
    Status(String),
    /// The rank leaves, and why.
    Goodbye(String),
}

const HEADER: usize = 8 + 3 + 4 + 8;

impl Frame {
    pub fn encode(&self) -> Vec<u8> {
        let (tag, payload) = match self {
            Frame::Operation {
                sequence,
                header,
                data,
            } => {
                let mut payload = Vec::with_capacity(HEADER + data.len());
                payload.extend(sequence.to_le_bytes());
                let Header {
                    kind,
                    element,
                    reduction,
                    root,
                    count,
                } = *header;
                payload.extend([kind as u8, element as u8, reduction as u8]);
                payload.extend(root.to_le_bytes());
                payload.extend(count.to_le_bytes());
                payload.extend(data);
                (0, payload)
            }
            Frame::Status(text) => (1, text.clone().into_bytes()),
            Frame::Goodbye(text) => (2, text.clone().into_bytes()),
        };
        let mut bytes = vec![tag];
        bytes.extend((payload.len() as u64).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// Reads a frame. The peers are this library, so a wrong frame is only an error of the connection.
    pub fn read(from: &mut impl Read) -> io::Result<Frame> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let mut start = [0; 9];
        from.read_exact(&mut start)?;
        let (tag, length) = (start[0], start[1..].try_into().map_err(|_| invalid())?);
        let mut payload = Vec::new();
        from.take(u64::from_le_bytes(length))
            .read_to_end(&mut payload)?;
        if payload.len() as u64 != u64::from_le_bytes(length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let text = |payload| String::from_utf8_lossy(payload).into_owned();
        match tag {
            0 => Frame::operation(payload).ok_or_else(invalid),
            1 => Ok(Frame::Status(text(&payload))),
            2 => Ok(Frame::Goodbye(text(&payload))),
            _ => Err(invalid()),
        }
    }

    fn operation(mut payload: Vec<u8>) -> Option<Frame> {
        let header = payload.get(..HEADER)?;
        let sequence = u64::from_le_bytes(header[..8].try_into().ok()?);
        let header = Header {
            kind: *Kind::ALL.get(usize::from(header[8]))?,
            element: Element::new(header[9].into())?,
            reduction: *Reduction::ALL.get(usize::from(header[10]))?,
            root: u32::from_le_bytes(header[11..15].try_into().ok()?),
            count: u64::from_le_bytes(header[15..HEADER].try_into().ok()?),
        };
        Some(Frame::Operation {
            sequence,
            header,
            data: payload.split_off(HEADER),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_are_written() {
        let header = Header {
            kind: Kind::Reduce,
            element: Element::Bf16,
            reduction: Reduction::Max,
            root: 3,
            count: 1 << 40,
        };
        let operation = Frame::Operation {
            sequence: 7,
            header,
            data: vec![1, 2, 3],
        };
        for frame in [
            operation,
            Frame::Status("waits".into()),
            Frame::Goodbye(String::new()),
        ] {
            let bytes = frame.encode();
            assert_eq!(Frame::read(&mut &bytes[..]).unwrap(), frame);
            for end in 0..bytes.len() {
                assert!(Frame::read(&mut &bytes[..end]).is_err());
            }
        }
        assert_eq!(
            header.to_string(),
            "reduce of 1099511627776 bf16 (max) with root 3"
        );
    }
}
