//! The events of a run, for people and programs that watch it.
//!
//! `evenkeel launch --log json` prints every event as one JSON object a line; the field `event` names its
//! kind. The schema only grows: fields are added, never renamed or removed.

use serde::{Deserialize, Serialize};

use super::{EvaluationRecord, StepRecord, nan};

/// One event of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The plan is final; no rank has started.
    Planned {
        /// The run's directory; on a cluster the name of its TrainingJob.
        name: String,
        /// The batch arithmetic, for example `8 × 16 × 1 = 128`.
        formula: String,
        world: u64,
        /// The base global batch, samples.
        global_batch: u64,
        /// The budget, in samples; 0 when it is unknown.
        budget: u64,
        /// The devices of the ranks, one line.
        devices: String,
        /// The lowest possible loss, nats per token, when the data's entropy is known.
        floor: Option<f64>,
    },
    /// Data are being read, tokenised or packed.
    Preparing {
        /// The activity, for example `tokenising train.jsonl`.
        what: String,
        /// Amount done so far.
        done: u64,
        /// Total amount; 0 when it is unknown.
        total: u64,
    },
    /// What a launch has made of the recipe.
    Note {
        message: String,
    },
    /// The ranks of a generation have connected and train.
    GenerationStarted {
        /// Job generation, counted from 1.
        generation: u64,
        world: u64,
        /// The batch arithmetic, as in `Planned`.
        formula: String,
        /// Why the generation was started.
        reason: String,
        /// Samples consumed before this generation.
        start_samples: u64,
    },
    /// An optimiser step has finished.
    Step(StepRecord),
    Evaluation(EvaluationRecord),
    /// A checkpoint is complete and can be loaded.
    Checkpoint {
        /// Samples consumed at the checkpoint.
        samples: u64,
        /// Seconds from its start until it was complete.
        seconds: f64,
        /// Its size, in bytes.
        bytes: u64,
    },
    /// The last reported step has another global batch than the step before it.
    BatchChanged {
        /// Samples consumed before that step.
        samples: u64,
        /// The batch before it, samples.
        from: u64,
        /// Its batch, in samples.
        to: u64,
        /// The norm test's r, when it decided.
        ratio: Option<f64>,
        /// The norm test's η², when it decided.
        threshold: Option<f64>,
        /// The reason for the change.
        reason: String,
    },
    /// Nothing trains, because devices are missing or pods are being placed.
    Waiting {
        /// The reason, one lower-case line.
        message: String,
    },
    /// A rank's program printed a line.
    Output {
        /// The rank that printed it.
        rank: u64,
        /// The line, without its end.
        line: String,
    },
    /// A rank was lost.
    RankLost {
        rank: u64,
        /// The symptom, for example a closed connection.
        reason: String,
    },
    /// The run stops in an orderly way.
    Draining {
        /// The reason for the stop.
        message: String,
    },
    /// The reason to stop disappeared before the ranks agreed on a step; they continue.
    DrainCancelled {
        /// Why the ranks continue.
        message: String,
    },
    /// Training continues in another world.
    Rescaled {
        /// Number of ranks before.
        from: u64,
        /// Number of ranks now.
        to: u64,
        /// Seconds from the reason (a request, a lost rank) to the end of the new world's first step.
        seconds: f64,
        /// The reason for the rescale.
        message: String,
    },
    /// A rank took unusually long for its part of a step, and the others waited for it.
    Straggler {
        rank: u64,
        /// Seconds that its part took.
        seconds: f64,
        /// Seconds that the slowest rank of a usual step takes.
        usual: f64,
    },
    /// A condition that a person should know about.
    Warning {
        /// The warning, one lower-case line.
        message: String,
    },
    /// The budget is used up.
    Finished {
        /// Samples consumed in total.
        samples: u64,
        /// Optimiser steps in total.
        steps: u64,
        /// The loss of the last evaluation, or of the last step if there was no evaluation.
        #[serde(deserialize_with = "nan::from_null")]
        loss: f64,
        /// Wall-clock seconds of this launch.
        seconds: f64,
    },
}
