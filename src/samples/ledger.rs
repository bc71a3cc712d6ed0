//! The sample ledger: per step, the consumed positions and the digest of the samples fed.
//!
//! A ledger of counters proves nothing. Here the digest comes from the buffers that entered the forward pass,
//! summed over the ranks. [`verify`] compares it with one recomputed offline from the data. The two are equal
//! only if every rank fed exactly the samples of the step, each at its position.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::digest::Digest;

/// One row per optimiser step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Optimiser steps so far including this one, over all generations.
    pub step: u64,
    /// The first position that it consumed.
    pub start: u64,
    /// Number of samples that it consumed.
    pub batch: u64,
    /// The digest of all samples that it fed, over all ranks.
    pub digest: Digest,
}

impl Row {
    /// The positions that the step consumed, clamped to the last possible one if a corrupt row claims more.
    pub fn positions(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.batch)
    }
}

/// A fault of a ledger. `E` is the error of reading the data again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault<E = std::convert::Infallible> {
    #[error(
        "step {step} starts at sample {}; samples {}..{} were never consumed",
        .missing.end, .missing.start, .missing.end
    )]
    Gap {
        /// The step after the gap.
        step: u64,
        missing: Range<u64>,
    },
    #[error("step {step} consumed samples {}..{} again", .positions.start, .positions.end)]
    Repeated {
        /// The step that repeats them.
        step: u64,
        /// The positions that were already consumed.
        positions: Range<u64>,
    },
    /// A step's number does not follow the previous one.
    #[error("found step {found} in place of step {expected}")]
    StepOrder {
        /// The next number in sequence.
        expected: u64,
        /// The number in the row.
        found: u64,
    },
    /// A step consumed no samples, or more than can be counted.
    #[error("step {step} claims {batch} samples from sample {start}, which is impossible")]
    Batch {
        step: u64,
        /// Position of its first sample.
        start: u64,
        /// Number of samples in the row.
        batch: u64,
    },
    /// The samples fed differ from the data.
    #[error(
        "step {step} fed other data than samples {}..{}: digest {recorded} recorded, \
         {recomputed} recomputed from the data",
        .positions.start, .positions.end
    )]
    Mismatch {
        step: u64,
        /// Positions of the step.
        positions: Range<u64>,
        /// The digest of the tokens that entered the forward pass.
        recorded: Digest,
        /// The digest of the tokens in the data.
        recomputed: Digest,
    },
    /// The data could not be read again.
    #[error("the samples {}..{} of step {step} cannot be recomputed", .positions.start, .positions.end)]
    Unreadable {
        step: u64,
        /// Positions of the step.
        positions: Range<u64>,
        source: E,
    },
}

/// The number and the start of the next step in a history without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Next {
    step: u64,
    start: u64,
}

impl Next {
    /// A run's first step.
    const FIRST: Next = Next { step: 1, start: 0 };

    /// The successor of `row`, if `row` itself is valid.
    fn after<E>(self, row: &Row) -> Result<Next, Fault<E>> {
        let step = row.step;
        let end = row
            .start
            .checked_add(row.batch)
            .filter(|&end| end > row.start)
            .ok_or(Fault::Batch {
                step,
                start: row.start,
                batch: row.batch,
            })?;
        if row.start > self.start {
            return Err(Fault::Gap {
                step,
                missing: self.start..row.start,
            });
        }
        if row.start < self.start {
            return Err(Fault::Repeated {
                step,
                positions: row.start..self.start.min(end),
            });
        }
        if step != self.step {
            return Err(Fault::StepOrder {
                expected: self.step,
                found: step,
            });
        }
        Ok(Next {
            step: step.saturating_add(1),
            start: end,
        })
    }
}

/// A history of steps without gap or overlap, from a run's start. Only its rows are
/// stored; reading refuses rows that do not follow each other from the run's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<Row>", try_from = "Vec<Row>")]
pub struct Ledger {
    rows: Vec<Row>,
    next: Next,
}

impl From<Ledger> for Vec<Row> {
    fn from(ledger: Ledger) -> Self {
        ledger.rows
    }
}

impl TryFrom<Vec<Row>> for Ledger {
    type Error = Fault;

    fn try_from(rows: Vec<Row>) -> Result<Self, Fault> {
        let mut ledger = Ledger::default();
        for row in rows {
            ledger.push(row)?;
        }
        Ok(ledger)
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Ledger {
            rows: Vec::new(),
            next: Next::FIRST,
        }
    }
}

impl Ledger {
    /// Appends a step; a step that does not follow is an error.
    pub fn push(&mut self, row: Row) -> Result<(), Fault> {
        self.next = self.next.after(&row)?;
        self.rows.push(row);
        Ok(())
    }

    /// Removes the steps that end beyond `samples`: a generation ran them after the checkpoint that the next
    /// generation starts from. A step that crosses `samples` is removed too.
    pub fn truncate(&mut self, samples: u64) {
        while let Some(row) = self.rows.pop_if(|row| row.positions().end > samples) {
            self.next = Next {
                step: row.step,
                start: row.start,
            };
        }
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The position at which the next step starts: samples consumed so far.
    pub fn samples(&self) -> u64 {
        self.next.start
    }
}

/// The result of a verified ledger: every position below `samples` was fed exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    pub steps: u64,
    /// Number of samples, over all epochs.
    pub samples: u64,
    /// The sum of all digests.
    pub digest: Digest,
}

impl Proof {
    /// The number of passes over the data, with `epoch_length` samples each.
    pub fn epochs(&self, epoch_length: u64) -> f64 {
        self.samples as f64 / epoch_length as f64
    }
}

/// Verifies a run's committed history from its first step: the rows follow each other from position 0 without
/// gap or overlap, and each digest equals that of `recompute`, which reads the positions from the data. The
/// first fault ends the verification.
pub fn verify<E>(
    rows: impl IntoIterator<Item = Row>,
    mut recompute: impl FnMut(Range<u64>) -> Result<Digest, E>,
) -> Result<Proof, Fault<E>> {
    let (mut next, mut digest) = (Next::FIRST, Digest::default());
    for row in rows {
        next = next.after(&row)?;
        let (step, positions) = (row.step, row.positions());
        let recomputed = recompute(positions.clone()).map_err(|source| Fault::Unreadable {
            step,
            positions: positions.clone(),
            source,
        })?;
        if recomputed != row.digest {
            return Err(Fault::Mismatch {
                step,
                positions,
                recorded: row.digest,
                recomputed,
            });
        }
        digest += recomputed;
    }
    Ok(Proof {
        steps: next.step - 1,
        samples: next.start,
        digest,
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;
    use crate::samples::{Order, micro_batches};

    /// The row fed at position `position`: tokens of the sample of that position.
    fn fed(order: &Order, position: u64) -> Digest {
        digest(position, order.at(position) as u32)
    }

    /// A synthetic row of tokens, derived from the sample's index.
    fn digest(position: u64, index: u32) -> Digest {
        let row: Vec<u32> = (0..5).map(|i| index * 31 + i).collect();
        Digest::of(position, &row[..4], &row[1..], u32::MAX)
    }

    fn recompute(order: &Order) -> impl FnMut(Range<u64>) -> Result<Digest, Infallible> + '_ {
        |positions| Ok(positions.map(|position| fed(order, position)).sum())
    }

    /// A run of `batches`, each fed by hands that add up their own digests.
    fn train(order: &Order, steps: impl IntoIterator<Item = (u64, Vec<u64>)>) -> Ledger {
        let mut ledger = Ledger::default();
        for (micro_batch, hands) in steps {
            let start = ledger.samples();
            let mut digest = Digest::default();
            for hand in (0..hands.len()).rev() {
                digest += micro_batches(start, micro_batch, &hands, hand)
                    .flatten()
                    .map(|position| fed(order, position))
                    .sum();
            }
            ledger
                .push(Row {
                    step: ledger.rows().len() as u64 + 1,
                    start,
                    batch: hands.iter().sum::<u64>() * micro_batch,
                    digest,
                })
                .unwrap();
        }
        ledger
    }

    fn order() -> Order {
        Order::new(1, 30, true).unwrap()
    }

    fn run() -> Vec<Row> {
        let steps = [
            (4, vec![2, 1]),
            (2, vec![2, 2, 2]),
            (4, vec![3]),
            (6, vec![2, 2]),
        ];
        train(&order(), steps).rows().to_vec()
    }

    #[test]
    fn a_run_over_changing_worlds_verifies() {
        let order = order();
        let proof = verify(run(), recompute(&order)).unwrap();
        assert_eq!((proof.steps, proof.samples), (4, 60));
        assert_eq!(proof.epochs(order.epoch_length()), 2.0);
    }

    #[test]
    fn faults_are_named_with_step_and_positions() {
        let order = order();
        let fault = |change: fn(&mut Vec<Row>)| {
            let mut rows = run();
            change(&mut rows);
            verify(rows, recompute(&order)).unwrap_err().to_string()
        };
        let faults = [
            fault(|rows| rows.retain(|row| row.step != 2)),
            fault(|rows| rows.retain(|row| row.step != 1)),
            fault(|rows| rows.insert(2, rows[1])),
            fault(|rows| rows[2].start -= 5),
            fault(|rows| rows[3].step = 9),
            fault(|rows| rows[1].batch = 0),
            fault(|rows| rows[3].batch = u64::MAX),
            fault(|rows| rows[2].digest.0 ^= 1),
            fault(|rows| rows[1].batch += 12),
        ];
        insta::assert_snapshot!(faults.join("\n"));
    }

    #[test]
    fn a_sample_fed_twice_in_place_of_another_is_a_mismatch() {
        // Counters cannot detect this: 12 samples were counted, but one rank fed position 3 twice.
        let order = order();
        let mut rows = run();
        rows[0].digest = [0, 1, 2, 3, 4, 5, 6, 3, 8, 9, 10, 11]
            .map(|position| fed(&order, position))
            .into_iter()
            .sum();
        let fault = verify(rows, recompute(&order)).unwrap_err();
        assert!(
            matches!(&fault, Fault::Mismatch { step: 1, positions, .. } if *positions == (0..12)),
            "{fault}"
        );
    }

    #[test]
    fn another_seed_is_a_mismatch() {
        let other = Order::new(2, 30, true).unwrap();
        let fault = verify(run(), recompute(&other)).unwrap_err();
        assert!(matches!(fault, Fault::Mismatch { step: 1, .. }));
    }

    #[test]
    fn unreadable_data_is_a_fault() {
        let fault = verify(run(), |positions| {
            if positions.start < 12 {
                recompute(&order())(positions).map_err(|never| match never {})
            } else {
                Err("the file is gone")
            }
        })
        .unwrap_err();
        assert_eq!(
            fault,
            Fault::Unreadable {
                step: 2,
                positions: 12..24,
                source: "the file is gone"
            }
        );
    }

    #[test]
    fn an_empty_history_proves_zero_samples() {
        let proof = verify([], recompute(&order())).unwrap();
        assert_eq!((proof.steps, proof.samples), (0, 0));
    }

    #[test]
    fn steps_after_the_referenced_checkpoint_are_removed_and_run_again() {
        let rows = run();
        let mut ledger = Ledger::default();
        rows[..3].iter().for_each(|row| ledger.push(*row).unwrap());
        ledger.truncate(24);
        assert_eq!((ledger.rows().len(), ledger.samples()), (2, 24));
        assert!(matches!(
            ledger.push(rows[3]),
            Err(Fault::Gap { step: 4, .. })
        ));
        rows[2..].iter().for_each(|row| ledger.push(*row).unwrap());
        assert_eq!(ledger.rows(), rows);
        ledger.truncate(30);
        assert_eq!(ledger.samples(), 24, "half a step is not committed");
        ledger.truncate(0);
        assert_eq!(ledger, Ledger::default());
    }

    #[test]
    fn a_row_is_one_line_of_json() {
        let row = Row {
            step: 3,
            start: 24,
            batch: 12,
            digest: Digest(255),
        };
        let json = serde_json::to_string(&row).unwrap();
        insta::assert_snapshot!(json, @r#"{"step":3,"start":24,"batch":12,"digest":"000000000000000000000000000000ff"}"#);
        assert_eq!(serde_json::from_str::<Row>(&json).unwrap(), row);
    }

    proptest! {
        #[test]
        fn whatever_was_dealt_is_proved_and_no_two_positions_can_be_swapped(
            seed in any::<u64>(),
            samples in 1..40u64,
            steps in prop::collection::vec((1..4u64, prop::collection::vec(1..4u64, 1..4)), 1..8),
            swap in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let order = Order::new(seed, samples, true).unwrap();
            let rows = train(&order, steps).rows().to_vec();
            let end = rows.last().unwrap().positions().end;
            let proof = verify(rows.clone(), recompute(&order)).unwrap();
            prop_assert_eq!(proof.samples, end);

            let (a, b) = (swap.0.index(end as usize) as u64, swap.1.index(end as usize) as u64);
            let swapped = |position: u64| match position {
                p if p == a => b,
                p if p == b => a,
                p => p,
            };
            let (sample_a, sample_b) = (order.at(a), order.at(b));
            let outcome = verify(rows, |positions| {
                Ok::<_, Infallible>(
                    positions
                        .map(|position| digest(position, order.at(swapped(position)) as u32))
                        .sum(),
                )
            });
            prop_assert_eq!(outcome.is_ok(), sample_a == sample_b);
        }
    }
}
