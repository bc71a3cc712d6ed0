//! The message that every rank sends to every other one at the end of a step: the step's scalars and its
//! flags. One exchange of some hundred bytes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::TrainError;
use super::bits;
use super::preferences::PreferenceSums;
use crate::comm::Collective;
use crate::norm::GroupSums;
use crate::samples::Digest;

/// The part of one rank in a step, or of all ranks together.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct StepSums {
    /// Sum of the losses: of the cross-entropies over the target tokens, or of an objective's over the samples.
    #[serde(with = "bits")]
    pub loss: f64,
    /// Number of target tokens.
    pub targets: u64,
    /// What the loss is a mean over: target tokens, or samples.
    pub count: u64,
    pub preferences: PreferenceSums,
    /// Sums of the norm test's groups.
    #[serde(flatten, with = "GroupBits")]
    pub groups: GroupSums,
    /// Digest of the samples that entered the forward passes.
    pub digest: Digest,
    /// Seconds that the rank computed before the exchange; 0 in a sum over ranks.
    #[serde(with = "bits")]
    pub seconds: f64,
    /// The rank, or at least one, has received a request to drain.
    pub drain: bool,
    /// The rank, or every one, has written its part of the checkpoint in progress.
    pub written: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "GroupSums")]
struct GroupBits {
    #[serde(with = "bits")]
    weighted: f64,
    units: u64,
    groups: u64,
}

impl StepSums {
    /// Adds up the parts of all ranks in rank order, so that the result is the same on every rank.
    pub fn of_all(ranks: &[StepSums]) -> StepSums {
        let mut sums = StepSums {
            drain: ranks.iter().any(|rank| rank.drain),
            written: ranks.iter().all(|rank| rank.written),
            ..StepSums::default()
        };
        for rank in ranks {
            sums.loss += rank.loss;
            sums.targets += rank.targets;
            sums.count += rank.count;
            sums.preferences.merge(&rank.preferences);
            sums.groups.merge(&rank.groups);
            sums.digest += rank.digest;
        }
        sums
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_keeps_every_bit_and_numbers_that_json_does_not_have() {
        let sums = StepSums {
            loss: f64::NAN,
            groups: GroupSums {
                weighted: f64::INFINITY,
                units: 3,
                groups: 2,
            },
            ..StepSums::default()
        };
        let text = String::from_utf8(encode(&sums)).unwrap();
        insta::assert_snapshot!(
            text,
            @r#"{"loss":9221120237041090560,"targets":0,"count":0,"preferences":{"chosen":{"count":0,"rewards":0,"logps":0},"rejected":{"count":0,"rewards":0,"logps":0},"pairs":0,"right":0,"kl":0},"weighted":9218868437227405312,"units":3,"groups":2,"digest":"00000000000000000000000000000000","seconds":0,"drain":false,"written":false}"#
        );
        let read: StepSums = decode(0, text.as_bytes()).unwrap();
        assert_eq!(read.loss.to_bits(), sums.loss.to_bits());
        assert_eq!(read.groups, sums.groups);
    }
}
