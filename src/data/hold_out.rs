//! Moves samples of the training part to the evaluation part.
//!
//! The seed chooses whole samples after all of them are written, so the count is exact. They are copied to
//! the evaluation part and removed from the training index. Their tokens stay in the training part's file,
//! where no index entry refers to them.

use std::path::Path;

use crate::util::durable::FileError;

use super::error::DataError;
use super::manifest::PartRecord;
use super::pack::SampleWriter;
use super::request::{Stopped, check_stopped};
use super::selection::Selection;
use super::store::{INDEX, Store};
use super::writer::{IndexWriter, Token};

/// Key that separates this choice from that of shares of sources.
const HELD_OUT: u64 = 0x6865_6c64;

/// Moves `count` samples of `train` to `evaluation`, both existing directories; returns both records.
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
    // The limit is the longest sample, so nothing is cut or skipped a second time.
    let longest = record.longest_sample - 1;
    let mut held = SampleWriter::create(evaluation, record.token_width, longest)?;
    let mut selection = Selection::new(&[seed, HELD_OUT], count, record.samples);
    for index in 0..record.samples {
        check_stopped(stopped)?;
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
