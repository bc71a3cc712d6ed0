//! Takes samples off the training part for evaluation.
//!
//! Whole samples are chosen by seed after all of them are written, so the count is exact whatever
//! was left out. They are copied to their own part and no longer in the training index; their
//! tokens stay where they were in the training part's file, which nothing points at any more.

use std::path::Path;

use crate::durable::FileError;

use super::error::DataError;
use super::manifest::PartRecord;
use super::pack::SampleWriter;
use super::request::{Stopped, go_on};
use super::selection::Selection;
use super::store::{INDEX, Store};
use super::writer::{IndexWriter, Token};

/// Keeps this choice apart from that of shares of sources.
const HELD_OUT: u64 = 0x6865_6c64;

/// Moves `count` samples of `train` to `evaluation`, both existing directories, and returns both
/// records.
pub(super) fn hold_out(
    train: &Path,
    record: &PartRecord,
    evaluation: &Path,
    count: u64,
    seed: u64,
    vocabulary_size: u64,
    stopped: Stopped<'_>,
) -> Result<(PartRecord, PartRecord), DataError> {
    let store = Store::open(train.to_path_buf(), record.clone(), vocabulary_size)?;
    let shorter = train.join("index.shorter");
    let mut kept = IndexWriter::create(shorter.clone())?;
    // Every sample is within its own length: nothing is cut or left out a second time.
    let longest = record.longest_sample - 1;
    let mut held = SampleWriter::create(evaluation, record.token_width, longest)?;
    let mut selection = Selection::new(&[seed, HELD_OUT], count, record.samples);
    for index in 0..record.samples {
        go_on(stopped)?;
        if !selection.next_is_chosen() {
            kept.append(store.entry(index)?)?;
            continue;
        }
        let sample = store.sample(index)?;
        let tokens = sample.tokens.iter().zip(&sample.loss_mask);
        held.document(tokens.map(|(&id, &target)| Token { id, target }).collect())?;
    }
    let kept = PartRecord {
        token_width: record.token_width,
        tokens_file: record.tokens_file.clone(),
        ..kept.finish()?
    };
    let index = train.join(INDEX);
    std::fs::rename(&shorter, &index)
        .map_err(|error| FileError::from_io("rename", &shorter, 0, error))?;
    Ok((kept, held.finish()?.0))
}
