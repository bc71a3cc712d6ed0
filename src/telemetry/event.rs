//! What happens in a run, for those who watch it.
//!
//! `evenkeel launch --log json` prints every event as one JSON object a line, told apart by their
//! `event`. The schema only grows: fields are added, never renamed or removed.

use serde::{Deserialize, Serialize};

use super::{EvaluationRecord, StepRecord, nan};

/// One event of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The plan stands; nothing has been started.
    Planned {
        /// The run: its directory, on a cluster the name of its TrainingJob.
        name: String,
        /// The batch arithmetic, for example `8 × 16 × 1 = 128`.
        proof: String,
        /// Ranks.
        world: u64,
        /// The base global batch, samples.
        global_batch: u64,
        /// The budget, samples; 0 where nobody knows it.
        budget: u64,
        /// What the ranks run on, one line.
        devices: String,
        /// The lowest loss that can be had, nats per token, when the data's entropy is known.
        floor: Option<f64>,
    },
    /// Data are being read, tokenised or packed.
    Preparing {
        /// What, for example `tokenising train.jsonl`.
        what: String,
        /// How much of it is done.
        done: u64,
        /// How much there is; 0 when that is not known.
        total: u64,
    },
    /// A generation of ranks has met and trains.
    GenerationStarted {
        /// Its number, from 1.
        generation: u64,
        /// Ranks.
        world: u64,
        /// The batch arithmetic.
        proof: String,
        /// Why it was started.
        reason: String,
        /// Samples consumed before it.
        start_samples: u64,
    },
    /// An optimiser step.
    Step(StepRecord),
    /// An evaluation.
    Evaluation(EvaluationRecord),
    /// A checkpoint is whole and can be loaded.
    Checkpoint {
        /// Samples consumed in it.
        samples: u64,
        /// From its start until it was whole, seconds.
        seconds: f64,
        /// Its size.
        bytes: u64,
    },
    /// The step that was told last had another global batch than the one before it.
    BatchChanged {
        /// Samples consumed before that step.
        samples: u64,
        /// The batch before it, samples.
        from: u64,
        /// Its batch, samples.
        to: u64,
        /// The norm test's r, when it decided.
        ratio: Option<f64>,
        /// The norm test's η², when it decided.
        threshold: Option<f64>,
        /// Why.
        reason: String,
    },
    /// Nothing trains, and why: devices are missing, or pods are being placed.
    Waiting {
        /// One line, lower case.
        why: String,
    },
    /// A rank's program printed a line.
    Said {
        /// Which rank.
        rank: u64,
        /// The line, without its end.
        line: String,
    },
    /// A rank is gone.
    RankLost {
        /// Which.
        rank: u64,
        /// What was seen.
        reason: String,
    },
    /// The run is being stopped in good order.
    Draining {
        /// Why.
        why: String,
    },
    /// The reason to stop is gone before the ranks did: they stay.
    Staying {
        /// Why.
        why: String,
    },
    /// Training goes on in another world.
    Rescaled {
        /// Ranks before.
        from: u64,
        /// Ranks now.
        to: u64,
        /// From the moment the reason was seen (a request, a lost rank) to the end of the new
        /// world's first step, seconds.
        seconds: f64,
        /// Why.
        why: String,
    },
    /// A rank took unusually long for its part of a step, and the others waited for it.
    Straggler {
        /// Which.
        rank: u64,
        /// What its part took, seconds.
        seconds: f64,
        /// What the slowest rank of a usual step takes, seconds.
        usual: f64,
    },
    /// Something that a person should know.
    Warning {
        /// One line, lower case.
        message: String,
    },
    /// The budget is used up.
    Finished {
        /// Samples consumed.
        samples: u64,
        /// Optimiser steps.
        steps: u64,
        /// The last evaluation's loss, or the last step's where nothing was evaluated.
        #[serde(deserialize_with = "nan::from_null")]
        loss: f64,
        /// Wall-clock seconds of this launch.
        seconds: f64,
    },
}
