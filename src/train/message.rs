//! The message that every rank sends to every other one at the end of a step: the step's scalars and its
//! flags. One exchange of some hundred bytes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::TrainError;
use super::bits;
use super::preferences::PreferenceSums;
use super::sums::{Merge, Parts};
use crate::comm::Collective;
use crate::norm::GroupSums;
use crate::samples::Digest;

/// What one rank says at the end of a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepMessage {
    pub sums: Parts<StepSums>,
    /// Seconds that the rank computed before the exchange.
    #[serde(with = "bits")]
    pub seconds: f64,
    /// The rank has received a request to drain.
    pub drain: bool,
    /// The rank has received a request to pause.
    pub pause: bool,
    /// The rank has written its part of the checkpoint in progress.
    pub written: bool,
}

/// Sums over samples of a step: those of one micro-batch, of one rank, or of all ranks together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "GroupSums")]
struct GroupBits {
    #[serde(with = "bits")]
    weighted: f64,
    units: u64,
    groups: u64,
}

impl Merge for StepSums {
    fn merge(&mut self, other: &StepSums) {
        self.loss += other.loss;
        self.targets += other.targets;
        self.count += other.count;
        self.preferences.merge(&other.preferences);
        self.groups.merge(&other.groups);
        self.digest += other.digest;
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
        let mut sums = Parts::new(false);
        *sums.next() = StepSums {
            loss: f64::NAN,
            groups: GroupSums {
                weighted: f64::INFINITY,
                units: 3,
                groups: 2,
            },
            ..StepSums::default()
        };
        let message = StepMessage {
            sums,
            seconds: 0.0,
            drain: false,
            pause: false,
            written: false,
        };
        let text = String::from_utf8(encode(&message)).unwrap();
        insta::assert_snapshot!(
            text,
            @r#"{"sums":[{"loss":9221120237041090560,"targets":0,"count":0,"preferences":{"chosen":{"count":0,"rewards":0,"logps":0},"rejected":{"count":0,"rewards":0,"logps":0},"pairs":0,"right":0,"kl":0},"weighted":9218868437227405312,"units":3,"groups":2,"digest":"00000000000000000000000000000000"}],"seconds":0,"drain":false,"pause":false,"written":false}"#
        );
        let read: StepMessage = decode(0, text.as_bytes()).unwrap();
        let [read, sums] = [&read.sums, &message.sums].map(|sums| Parts::total([sums]));
        assert_eq!(read.loss.to_bits(), sums.loss.to_bits());
        assert_eq!(read.groups, sums.groups);
    }

    /// Losses of samples, in `worlds` of any size: adjacent, and in turns.
    #[test]
    fn sums_of_samples_have_the_same_bits_in_every_world_and_those_of_ranks_have_not() {
        let losses: Vec<f64> = (1..40).map(|i| 1.0 / f64::from(i)).collect();
        let of_world = |world: usize, are_apart: bool, take_turns: bool| {
            let mut ranks = vec![Parts::<StepSums>::new(are_apart); world];
            for (i, loss) in losses.iter().enumerate() {
                let rank = match take_turns {
                    true => i % world,
                    false => i * world / losses.len(),
                };
                ranks[rank].next().loss += loss;
            }
            let total = match take_turns {
                true => Parts::total_in_turns(&ranks),
                false => Parts::total(&ranks),
            };
            total.loss.to_bits()
        };
        let expected = of_world(1, true, false);
        for take_turns in [true, false] {
            let worlds = 2..9;
            let mut differs = false;
            for world in worlds {
                assert_eq!(of_world(world, true, take_turns), expected, "{world}");
                differs |= of_world(world, false, take_turns) != expected;
            }
            assert!(differs, "the planted change must be visible");
        }
    }
}
