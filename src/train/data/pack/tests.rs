//! Packing: every token of the stream except the first is a target exactly once.

use proptest::prelude::*;

use super::super::store::Store;
use super::*;

/// Writes with `write` and reads the samples back as (id, target) pairs.
fn samples(
    sequence_length: u64,
    write: impl FnOnce(&mut SampleWriter),
) -> (Vec<Vec<(u32, bool)>>, Summary) {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = SampleWriter::create(directory.path(), 2, sequence_length).unwrap();
    write(&mut writer);
    let (record, summary) = writer.finish().unwrap();
    let store = Store::open(directory.path().to_path_buf(), record.clone(), 1 << 15).unwrap();
    let read: Vec<Vec<(u32, bool)>> = (0..record.samples)
        .map(|index| {
            let sample = store.sample(index).unwrap();
            let targets = sample.loss_mask[1..]
                .iter()
                .filter(|&&target| target)
                .count();
            assert_eq!(store.entry(index).unwrap().targets as usize, targets);
            sample.tokens.into_iter().zip(sample.loss_mask).collect()
        })
        .collect();
    let count = |of: fn(&[(u32, bool)]) -> usize| read.iter().map(|s| of(s) as u64).sum::<u64>();
    assert_eq!(record.tokens, count(|sample| sample.len()));
    assert_eq!(
        record.target_tokens,
        count(|sample| sample[1..].iter().filter(|token| token.1).count())
    );
    (read, summary)
}

fn tokens(flags: &[bool]) -> Vec<Token> {
    let ids = 0u32..;
    flags
        .iter()
        .zip(ids)
        .map(|(&target, id)| Token { id, target })
        .collect()
}

proptest! {
    // Every case fsyncs two files.
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn packing_loses_and_repeats_no_target(
        length in 1u64..20,
        flags in prop::collection::vec(any::<bool>(), 0..200),
        pieces in prop::collection::vec(1usize..40, 1..20),
    ) {
        let stream = tokens(&flags);
        let (samples, _) = samples(length, |writer| {
            let mut rest = &stream[..];
            for &piece in pieces.iter().cycle() {
                let (now, later) = rest.split_at(piece.min(rest.len()));
                writer.pack(now).unwrap();
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
        });
        let mut learned = Vec::new();
        for sample in &samples {
            prop_assert!((2..=length as usize + 1).contains(&sample.len()));
            prop_assert!(sample.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0));
            learned.extend(sample[1..].iter().filter(|token| token.1).map(|token| token.0));
        }
        let expected: Vec<u32> = stream.iter().skip(1).filter(|t| t.target).map(|t| t.id).collect();
        prop_assert_eq!(learned, expected);
    }

    #[test]
    fn documents_of_their_own_share_nothing(
        length in 1u64..20,
        documents in prop::collection::vec(prop::collection::vec(any::<bool>(), 0..30), 0..20),
    ) {
        let (samples, summary) = samples(length, |writer| {
            documents.iter().for_each(|flags| writer.document(tokens(flags)).unwrap());
        });
        let kept: Vec<Vec<(u32, bool)>> = documents
            .iter()
            .map(|flags| flags[..flags.len().min(length as usize + 1)].to_vec())
            .filter(|flags| flags.iter().skip(1).any(|&target| target))
            .map(|flags| (0..).zip(flags).collect())
            .collect();
        prop_assert_eq!(&samples, &kept);
        prop_assert_eq!(
            summary.skipped.without_targets,
            (documents.len() - samples.len()) as u64
        );
    }
}
