//! Event files for TensorBoard: steps and evaluations as scalars, with the tags that transformers' `Trainer` has.
//!
//! Sources: tensorflow/tensorboard 149535a `summary/writer/record_writer.py` (a record is a length, its masked CRC-32C, the
//! message and its masked CRC-32C), 0034239 `compat/proto/event.proto`, 00bd827 `compat/proto/summary.proto`;
//! transformers 5.23.0 `integrations/integration_utils.py` (`rewrite_logs`).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::Metric;

/// The directory of a run's event files.
pub const DIRECTORY: &str = "tensorboard";

/// The event file of one generation.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    /// The newest step; evaluations are recorded at it.
    step: u64,
}

impl EventFile {
    /// Creates the file of a generation that continues after `step`. TensorBoard drops what an earlier generation
    /// recorded after that step and did not commit. `time`: seconds since the Unix epoch.
    pub fn create(
        directory: &Path,
        generation: u64,
        step: u64,
        time: f64,
    ) -> io::Result<EventFile> {
        fs::create_dir_all(directory)?;
        let name = format!("events.out.tfevents.{:010}.gen-{generation}", time as u64);
        let mut file = EventFile {
            file: File::create(directory.join(name))?,
            step,
        };
        let mut version = Message::event(time, 0);
        version.bytes(3, b"brain.Event:2");
        file.record(&version)?;
        let mut start = Message::default();
        start.integer(1, START);
        let mut event = Message::event(time, step + 1);
        event.bytes(7, &start.0);
        file.record(&event)?;
        Ok(file)
    }

    pub fn write(&mut self, metric: &Metric) -> io::Result<()> {
        let (part, time, mut scalars, preferences) = match metric {
            Metric::Step(step) => {
                self.step = step.step;
                let scalars = vec![
                    ("loss", step.loss),
                    ("learning_rate", step.learning_rate),
                    ("grad_norm", step.gradient_norm),
                    ("batch", step.batch as f64),
                    ("samples", step.samples as f64),
                ];
                ("train", step.time, scalars, &step.preferences)
            }
            Metric::Evaluation(evaluation) => {
                let scalars = vec![("loss", evaluation.loss)];
                ("eval", evaluation.time, scalars, &evaluation.preferences)
            }
        };
        if let Some(preferences) = preferences {
            let means = [
                ("rewards/chosen", preferences.reward_chosen),
                ("rewards/rejected", preferences.reward_rejected),
                ("rewards/accuracies", preferences.accuracy),
                ("rewards/margins", preferences.margin()),
                ("logps/chosen", preferences.logps_chosen),
                ("logps/rejected", preferences.logps_rejected),
                ("kl", preferences.kl),
            ];
            let known = |(name, mean): (_, Option<f64>)| mean.map(|mean| (name, mean));
            scalars.extend(means.into_iter().filter_map(known));
        }
        let mut summary = Message::default();
        for (name, value) in scalars {
            let tag = format!("{part}/{name}");
            let mut scalar = Message::default();
            scalar.bytes(1, tag.as_bytes());
            scalar.float(2, value as f32);
            summary.bytes(1, &scalar.0);
        }
        let mut event = Message::event(time, self.step);
        event.bytes(5, &summary.0);
        self.record(&event)
    }

    fn record(&mut self, message: &Message) -> io::Result<()> {
        let length = (message.0.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&message.0);
        record.extend(masked_crc(&message.0).to_le_bytes());
        // One write a record, so that a reader sees whole records.
        self.file.write_all(&record)
    }
}

/// `SessionLog.SessionStatus.START`.
const START: u64 = 1;

/// A protocol buffer message in the making.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn event(time: f64, step: u64) -> Message {
        let mut event = Message::default();
        event.key(1, 1);
        event.0.extend(time.to_le_bytes());
        event.integer(2, step);
        event
    }

    /// The number of a field and its wire type: 0 a varint, 1 eight bytes, 2 bytes with their length, 5 four bytes.
    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint((field << 3) | wire_type);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn integer(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

/// The CRC-32C of some bytes, rotated and shifted as TFRecords have it.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The CRC-32 with Castagnoli's polynomial.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{EvaluationRecord, StepRecord};

    /// The messages of a file's records, whose checksums must be right.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let (crc, rest) = rest.split_at(4);
            assert_eq!(masked_crc(length).to_le_bytes(), crc);
            let (message, rest) =
                rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (crc, rest) = rest.split_at(4);
            assert_eq!(masked_crc(message).to_le_bytes(), crc);
            found.push(message.to_vec());
            bytes = rest;
        }
        found
    }

    /// RFC 3720, B.4: 32 bytes of zeros and of ones, and the digits 1 to 9.
    #[test]
    fn checksums_are_those_of_castagnolis_polynomial() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn steps_and_evaluations_are_scalars_of_a_session() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join(DIRECTORY);
        let mut file = EventFile::create(&directory, 2, 300, 5.0).unwrap();
        let step = StepRecord {
            generation: 2,
            step: 301,
            samples: 4816,
            batch: 16,
            world: 2,
            loss: 2.5,
            tokens: 64,
            learning_rate: 1e-3,
            gradient_norm: 0.5,
            seconds: 1.0,
            time: 6.0,
            norm_test: None,
            coordinate_test: None,
            preferences: None,
            external: None,
        };
        file.write(&Metric::Step(step)).unwrap();
        file.write(&Metric::Evaluation(EvaluationRecord {
            generation: 2,
            samples: 16,
            loss: 1.5,
            tokens: 1,
            time: 6.0,
            preferences: None,
        }))
        .unwrap();
        let bytes = fs::read(directory.join("events.out.tfevents.0000000005.gen-2")).unwrap();
        let records = records(&bytes);
        assert_eq!(records.len(), 4);
        let five = [&[0x09][..], &5.0f64.to_le_bytes()].concat();
        // `step` 0 and the version; then step 301 (two bytes), a session that starts.
        assert_eq!(
            records[0],
            [&five[..], &[0x10, 0, 0x1a, 13], b"brain.Event:2"].concat()
        );
        assert_eq!(
            records[1],
            [&five[..], &[0x10, 0xad, 2, 0x3a, 2, 0x08, 1]].concat()
        );
        let holds = |record: &[u8], tag: &str, value: f32| {
            let scalar = [
                &[0x0a, tag.len() as u8][..],
                tag.as_bytes(),
                &[0x15],
                &value.to_le_bytes(),
            ]
            .concat();
            record.windows(scalar.len()).any(|window| window == scalar)
        };
        assert!(holds(&records[2], "train/loss", 2.5) && holds(&records[2], "train/batch", 16.0));
        assert!(holds(&records[3], "eval/loss", 1.5));
        assert!(
            records[3][9..].starts_with(&[0x10, 0xad, 2]),
            "at the newest step"
        );
    }
}
