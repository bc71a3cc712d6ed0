//! The message that every rank sends to every other one at the end of a step: the step's scalars and its
//! flags. One exchange of some hundred bytes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::comm::Collective;
use crate::norm::GroupSums;
use crate::samples::Digest;

/// A floating-point number transferred bit by bit, because JSON has no NaN.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Bits(u64);

impl From<f64> for Bits {
    fn from(value: f64) -> Self {
        Bits(value.to_bits())
    }
}

impl Bits {
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// The message of one rank for one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Message {
    /// Sum of the cross-entropies over this rank's target tokens.
    pub loss: Bits,
    /// Number of this rank's target tokens.
    pub targets: u64,
    /// Sum over this rank's groups of ‖G_i‖²/n_i.
    pub weighted: Bits,
    /// Units (target tokens) in those groups.
    pub units: u64,
    /// Number of this rank's groups.
    pub groups: u64,
    /// Digest of the samples that entered this rank's forward passes.
    pub digest: Digest,
    /// Seconds that this rank computed before the exchange.
    pub seconds: Bits,
    /// This rank has received a request to drain.
    pub drain: bool,
    /// This rank has written its part of the checkpoint in progress.
    pub written: bool,
}

/// The messages of all ranks for one step, added in rank order, so that the result is the same on every rank.
#[derive(Debug, Clone)]
pub struct Totals {
    /// Sum of the cross-entropies over all target tokens.
    pub loss: f64,
    /// Target tokens of the global batch.
    pub targets: u64,
    /// Sums of the norm test's groups.
    pub groups: GroupSums,
    /// Digest of the step.
    pub digest: Digest,
    /// At least one rank has received a request to drain.
    pub drain: bool,
    /// Computing seconds by rank.
    pub seconds: Vec<f64>,
    /// All ranks have written their part of the checkpoint in progress.
    pub written: bool,
}

impl Totals {
    /// Adds up the messages of all ranks.
    pub fn of(messages: &[Message]) -> Totals {
        let mut groups = GroupSums::default();
        for message in messages {
            groups.merge(&GroupSums {
                weighted: message.weighted.get(),
                units: message.units,
                groups: message.groups,
            });
        }
        Totals {
            loss: messages.iter().map(|m| m.loss.get()).sum(),
            targets: messages.iter().map(|m| m.targets).sum(),
            groups,
            digest: messages.iter().map(|m| m.digest).sum(),
            drain: messages.iter().any(|m| m.drain),
            seconds: messages.iter().map(|m| m.seconds.get()).collect(),
            written: messages.iter().all(|m| m.written),
        }
    }
}

/// The values of all ranks, in rank order; collective.
pub fn exchange<T: Serialize + DeserializeOwned>(
    world: &dyn Collective,
    value: &T,
) -> Result<Vec<T>, TrainError> {
    let everyones = world.exchange(&encode(value))?;
    let everyones = everyones.iter().enumerate();
    everyones
        .map(|(rank, message)| decode(rank, message))
        .collect()
}

/// A value as a message.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // These types contain only numbers, strings and lists, so that encoding never fails.
    serde_json::to_vec(value).unwrap_or_default()
}

/// The value in a rank's message.
pub fn decode<T: DeserializeOwned>(rank: usize, message: &[u8]) -> Result<T, TrainError> {
    serde_json::from_slice(message).map_err(|error| TrainError::Message { rank, error })
}
