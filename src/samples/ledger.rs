//! The ledger: per step, which positions were consumed and the digest of what was fed.
//!
//! A ledger that is written from counters proves nothing. Here the digest comes from the buffers
//! that entered the forward pass, summed over the ranks, and [`verify`] compares it with one
//! recomputed offline from the data: only if every rank fed exactly the samples of the step, each
//! at its place, do they agree.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::digest::Digest;

/// One optimiser step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Optimiser steps so far including this one, over all generations.
    pub step: u64,
    /// The first position that it consumed.
    pub start: u64,
    /// Samples that it consumed.
    pub batch: u64,
    /// The digest of all samples that it fed, over all ranks.
    pub digest: Digest,
}

impl Row {
    /// The positions that the step consumed; up to the last one there is, should a corrupt row
    /// claim more.
    pub fn positions(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.batch)
    }
}

/// What is wrong with a ledger. `E` is why the data could not be read again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault<E = std::convert::Infallible> {
    /// Samples were passed over.
    #[error(
        "step {step} starts at sample {}; samples {}..{} were never consumed",
        .missing.end, .missing.start, .missing.end
    )]
    Gap {
        /// The step after the gap.
        step: u64,
        /// The positions that are missing.
        missing: Range<u64>,
    },
    /// Samples were consumed twice.
    #[error("step {step} consumed samples {}..{} again", .positions.start, .positions.end)]
    Repeated {
        /// The step that repeats.
        step: u64,
        /// The positions that were already consumed.
        positions: Range<u64>,
    },
    /// A step's number does not follow the one before.
    #[error("step {found} stands where step {expected} belongs")]
    StepOrder {
        /// The number that belongs there.
        expected: u64,
        /// The number that stands there.
        found: u64,
    },
    /// A step that consumed nothing, or more than can be counted.
    #[error("step {step} claims {batch} samples from sample {start}, which cannot be")]
    Batch {
        /// The step.
        step: u64,
        /// Its first position.
        start: u64,
        /// The samples it claims.
        batch: u64,
    },
    /// What was fed is not what the data holds.
    #[error(
        "step {step} fed something else than samples {}..{}: digest {recorded} recorded, \
         {recomputed} recomputed from the data",
        .positions.start, .positions.end
    )]
    Mismatch {
        /// The step.
        step: u64,
        /// Its positions.
        positions: Range<u64>,
        /// The digest of what entered the forward pass.
        recorded: Digest,
        /// The digest of what should have.
        recomputed: Digest,
    },
    /// The data could not be read again.
    #[error("the samples {}..{} of step {step} cannot be recomputed", .positions.start, .positions.end)]
    Unreadable {
        /// The step.
        step: u64,
        /// Its positions.
        positions: Range<u64>,
        /// Why.
        source: E,
    },
}

/// What comes next in a history without gaps: where a step must start, and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Next {
    step: u64,
    start: u64,
}

impl Next {
    /// A run's first step.
    const FIRST: Next = Next { step: 1, start: 0 };

    /// What follows `row`, if `row` itself follows.
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

/// A history of steps without gap or overlap, from a run's start or from a checkpoint. Stored as
/// its rows; rows that do not follow each other from the run's start are refused when read.
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
    /// An empty ledger that goes on after `steps` steps and `samples` samples.
    pub fn after(steps: u64, samples: u64) -> Self {
        Ledger {
            rows: Vec::new(),
            next: Next {
                step: steps + 1,
                start: samples,
            },
        }
    }

    /// Appends a step; one that does not follow is refused and named.
    pub fn push(&mut self, row: Row) -> Result<(), Fault> {
        self.next = self.next.after(&row)?;
        self.rows.push(row);
        Ok(())
    }

    /// Takes back the steps that end beyond `samples`: what a generation did after the checkpoint
    /// that the next one starts from. A step that straddles is taken back too.
    pub fn truncate(&mut self, samples: u64) {
        while let Some(row) = self.rows.pop_if(|row| row.positions().end > samples) {
            self.next = Next {
                step: row.step,
                start: row.start,
            };
        }
    }

    /// The steps.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The position at which the next step starts: samples consumed so far.
    pub fn samples(&self) -> u64 {
        self.next.start
    }
}

/// What a verified ledger proves: every position below `samples` was fed exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// Steps.
    pub steps: u64,
    /// Samples, over all epochs.
    pub samples: u64,
    /// The digest of everything that was fed.
    pub digest: Digest,
}

impl Proof {
    /// How many passes over the data these samples make, `epoch_length` samples each.
    pub fn epochs(&self, epoch_length: u64) -> f64 {
        self.samples as f64 / epoch_length as f64
    }
}

/// Proves a run's committed history from its first step: the rows follow each other from position
/// 0 without gap or overlap, and each digest is what `recompute` gives for the positions, from the
/// data. The first fault ends it.
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
