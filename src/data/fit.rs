//! Best-fit decreasing: documents are packed whole, the longest first, each into the fullest sample where it fits
//! (Ding et al., 2024, arXiv 2404.10830; TRL 1.16, `data_utils.py`, `_pack_bfd`).

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufReader, Read};
use std::path::Path;

use crate::util::durable::FileError;
use crate::util::input;

use super::dataset::{ENTRY, Entry, INDEX, PACKS};
use super::error::DataError;
use super::manifest::PartRecord;
use super::pack::{IndexWriter, Output};
use super::request::{Stopped, check_stopped};

/// Documents that are packed together: upstream maps its data sets in batches of as many.
const WINDOW: usize = 1000;

/// The documents of each sample, from their sizes, which are at least 1 and at most the `whole` of a sample.
fn best_fit(sizes: &[u64], whole: u64) -> Vec<Vec<usize>> {
    let mut longest_first: Vec<usize> = (0..sizes.len()).collect();
    // Stable, as upstream.
    longest_first.sort_by_key(|&document| std::cmp::Reverse(sizes[document]));
    let mut samples: Vec<Vec<usize>> = Vec::new();
    // Samples by what is left of them, in the order in which it became that.
    let mut by_rest: BTreeMap<u64, VecDeque<usize>> = BTreeMap::new();
    for document in longest_first {
        let size = sizes[document];
        let fullest = by_rest.range_mut(size..).next();
        let (left, sample) = match fullest.and_then(|(&left, all)| Some((left, all.pop_front()?))) {
            Some((left, sample)) => {
                if by_rest.get(&left).is_some_and(VecDeque::is_empty) {
                    by_rest.remove(&left);
                }
                (left, sample)
            }
            None => {
                samples.push(Vec::new());
                (whole, samples.len() - 1)
            }
        };
        samples[sample].push(document);
        by_rest
            .entry(left.saturating_sub(size))
            .or_default()
            .push_back(sample);
    }
    samples
}

/// Packs the samples of a part, which become the documents of larger samples: puts their entries in the order of these, and
/// writes where each begins. A document takes as much of the `sequence_length` as it has tokens, but `extra`.
pub(super) fn pack(
    directory: &Path,
    record: PartRecord,
    (sequence_length, extra): (u64, u64),
    stopped: Stopped<'_>,
) -> Result<PartRecord, DataError> {
    let index = directory.join(INDEX);
    let file = input::open(&index).map_err(|error| DataError::read(&index, error))?;
    let mut entries = BufReader::new(file);
    let packed = directory.join("index.packed");
    let mut written = IndexWriter::create(packed.clone())?;
    let mut packs = Output::create(directory.join(PACKS))?;
    let (mut samples, mut longest_sample, mut begun) = (0, 0, 0u64);
    let mut left = record.samples;
    while left > 0 {
        check_stopped(stopped)?;
        let window = left.min(WINDOW as u64);
        left -= window;
        let mut documents = Vec::with_capacity(WINDOW);
        for _ in 0..window {
            let mut bytes = [0; ENTRY as usize];
            let read = entries.read_exact(&mut bytes);
            read.map_err(|error| DataError::read(&index, error))?;
            documents.push(Entry::from_bytes(bytes));
        }
        let sizes = documents
            .iter()
            .map(|entry| u64::from(entry.length) - extra);
        let sizes: Vec<u64> = sizes.collect();
        for sample in best_fit(&sizes, sequence_length) {
            packs.write(&begun.to_le_bytes())?;
            begun += sample.len() as u64;
            samples += 1;
            let tokens = sample
                .iter()
                .map(|&document| u64::from(documents[document].length));
            longest_sample = longest_sample.max(tokens.sum());
            for document in sample {
                written.append(documents[document])?;
            }
        }
    }
    packs.write(&begun.to_le_bytes())?;
    let written = written.finish()?;
    std::fs::rename(&packed, &index)
        .map_err(|error| FileError::from_io("rename", &packed, 0, error))?;
    Ok(PartRecord {
        samples,
        longest_sample,
        index_file: written.index_file,
        packs_file: Some(packs.finish()?),
        ..record
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fullest_sample_where_a_document_fits_is_chosen() {
        // As in TRL's example, and where two samples have as much left.
        assert_eq!(best_fit(&[4, 2, 3, 1], 4), [vec![0], vec![2, 3], vec![1]]);
        assert_eq!(
            best_fit(&[3, 6, 3, 6, 2, 1, 4], 10),
            [vec![1, 6], vec![3, 0, 5], vec![2, 4]]
        );
        assert_eq!(best_fit(&[], 4), Vec::<Vec<usize>>::new());
    }

    proptest! {
        #[test]
        fn every_document_is_in_one_sample_and_at_most_one_is_half_empty(
            whole in 1u64..50,
            sizes in prop::collection::vec(1u64..50, 0..300),
        ) {
            let sizes: Vec<u64> = sizes.into_iter().map(|size| size.min(whole)).collect();
            let samples = best_fit(&sizes, whole);
            let mut all = samples.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
            let filled: Vec<u64> = (samples.iter())
                .map(|sample| sample.iter().map(|&document| sizes[document]).sum())
                .collect();
            prop_assert!(filled.iter().all(|&filled| filled <= whole));
            // At most 11/9 of the optimum and 6/9, which is at least the sum.
            let least = sizes.iter().sum::<u64>().div_ceil(whole);
            let halves = filled.iter().filter(|&&filled| 2 * filled <= whole).count();
            prop_assert!(halves <= 1 && samples.len() as u64 <= 2 * least);
        }
    }
}
