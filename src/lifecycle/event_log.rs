//! The event log of a job's generations, by position.
//!
//! The agent of rank 0's pod appends every training event of a generation to `gen-N/events.jsonl` on the run's
//! volume. The same line goes to the pod's log, which has other lines as well: output of ranks, and warnings of
//! the agent itself. Both number their lines from 0, so a reader knows what it has read and what it lacks,
//! whatever the clocks and connections did.

use serde::{Deserialize, Serialize};

use crate::telemetry::Event;

/// Port of the agent in every pod.
pub const AGENT_PORT: u16 = 8471;

/// Most bytes of events in one response of an agent; at least one event is always sent.
pub const RESPONSE_BYTES: usize = 256 << 10;

/// A position in a job's event log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    pub generation: u64,
    /// Index of the event in the generation's log, from 0.
    pub index: u64,
}

impl Position {
    /// The first event of a generation.
    pub fn first(generation: u64) -> Position {
        Position {
            generation,
            index: 0,
        }
    }
}

/// One line of a pod's log, or of a generation's event log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogLine {
    /// Index of the line in the pod's log, from 0. `None`: a rank's line as text, or another program or version
    /// printed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    /// `None`: the event is only in the pod's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<Position>,
    #[serde(flatten)]
    pub event: Event,
}

impl LogLine {
    /// Parses a line; `None` for text that no agent wrote.
    pub fn parse(line: &str) -> Option<LogLine> {
        let Some((rank, line)) = parse_text(line) else {
            return serde_json::from_str(line).ok();
        };
        let line = line.to_owned();
        Some(LogLine {
            seq: None,
            position: None,
            event: Event::Output { rank, line },
        })
    }
}

/// A rank's line as text of a pod's log, with its end: `[3] epoch 1`.
pub fn text_of_rank(rank: u64, line: &str) -> String {
    format!("[{rank}] {line}\n")
}

/// Rank and line of such a text.
fn parse_text(text: &str) -> Option<(u64, &str)> {
    let (rank, line) = text.strip_prefix('[')?.split_once("] ")?;
    Some((rank.parse().ok()?, line))
}

/// Path and query with which an agent is asked for the events from a position on.
pub fn query(from: Position) -> String {
    format!("/events?generation={}&from={}", from.generation, from.index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::StepRecord;

    #[test]
    fn a_line_with_and_without_positions_is_read_back() {
        let step = Event::Step(StepRecord {
            generation: 2,
            step: 7,
            samples: 84,
            batch: 12,
            world: 2,
            loss: f64::INFINITY,
            tokens: 384,
            learning_rate: 0.1 + 0.2,
            gradient_norm: 1e-300,
            seconds: 0.25,
            time: 1.7e9,
            norm_test: None,
            coordinate_test: None,
            preferences: None,
            external: None,
        });
        let position = Position {
            generation: 2,
            index: 6,
        };
        let line = LogLine {
            seq: Some(40),
            position: Some(position),
            event: step,
        };
        let json = serde_json::to_string(&line).unwrap();
        assert!(
            json.starts_with(
                "{\"seq\":40,\"position\":{\"generation\":2,\"index\":6},\"event\":\"step\""
            ),
            "{json}"
        );
        let read = LogLine::parse(&json).unwrap();
        assert_eq!((read.seq, read.position), (line.seq, line.position));
        // A loss that is no number is null in JSON.
        let Event::Step(step) = read.event else {
            panic!("{json}")
        };
        assert!(step.loss.is_nan() && step.learning_rate == 0.1 + 0.2);
        let output = r#"{"event":"output","rank":3,"line":"a b"}"#;
        let output = LogLine::parse(output).unwrap();
        assert_eq!((output.seq, output.position), (None, None));
        assert_eq!(LogLine::parse("plain words"), None);
        assert_eq!(LogLine::parse("[INFO] words"), None);
    }

    #[test]
    fn a_rank_s_line_as_text_is_read_back() {
        for line in [
            "epoch 1",
            "",
            "[1] {\"event\":\"finished\"}",
            " 50% |####",
            "]",
        ] {
            let text = text_of_rank(3, line);
            let read = LogLine::parse(text.strip_suffix('\n').unwrap()).unwrap();
            let line = line.to_owned();
            assert_eq!(read.event, Event::Output { rank: 3, line });
        }
    }
}
