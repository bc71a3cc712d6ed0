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

/// A history of steps without gap or overlap, from a run's start or from a checkpoint. Only its rows are
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
        Ledger::after(0, 0)
    }
}

impl Ledger {
    /// An empty ledger that continues after `steps` steps and `samples` samples.
    pub fn after(steps: u64, samples: u64) -> Self {
        Ledger {
            rows: Vec::new(),
            next: Next {
                step: steps + 1,
                start: samples,
            },
        }
    }

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
    /// The digest of all samples fed.
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
    let mut next = Next::FIRST;
    let mut digest = Digest::default();
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
        digest += row.digest;
    }
    Ok(Proof {
        steps: next.step - 1,
        samples: next.start,
        digest,
    })
}

#[cfg(test)]
mod tests;
