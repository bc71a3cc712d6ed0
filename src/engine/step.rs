//! The progress of one step on a rank, and what follows from it for the gradient of its next micro-batch.

use super::{EngineError, Measure};

/// The purpose of a walk over the units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// A forward pass without gradients.
    Evaluation,
    /// The tokens continue the engine's sequence, for the logits of the token after them.
    Prediction,
    /// A micro-batch forward and backward.
    Training(Training),
}

impl Pass {
    /// What a walk that trains does with the gradient.
    pub fn training(self) -> Option<Training> {
        match self {
            Pass::Evaluation | Pass::Prediction => None,
            Pass::Training(training) => Some(training),
        }
    }
}

/// What is done with a micro-batch's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Training {
    /// The step has no gradient yet, so this one overwrites it.
    pub first: bool,
    /// The last of the step on this rank.
    pub last: bool,
    /// The gradient is kept apart from the step's until it is measured, or reduced to shards.
    pub apart: bool,
    /// ‖gradient of this micro-batch‖² is computed.
    pub measured: bool,
    /// The micro-batch is a group of the coordinate-wise test.
    pub micro_batch_squares: bool,
    /// The whole step is one.
    pub step_squares: bool,
}

/// How a rank keeps the gradient of a step.
#[derive(Debug, Clone, Copy)]
pub struct Keeps {
    /// It is whole until the step is reduced. Otherwise every micro-batch's gradient is reduced to shards at once.
    pub whole: bool,
    /// Gradients of micro-batches are added in fixed point, each rounded on its own.
    pub in_fixed_point: bool,
    /// The measurements that any step may request; their memory is reserved.
    pub measure: Measure,
}

/// The micro-batches of a step so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Step {
    /// Micro-batches whose gradients the rank's gradient holds.
    pub accumulated: u64,
    /// Their target tokens, or samples, and those of the micro-batch in progress.
    pub targets: u64,
    /// Those of the latest micro-batch.
    pub latest: u64,
    /// Walks of training, including joined ones: the same on every rank of a sharded model.
    pub walks: u64,
}

impl Step {
    /// Begins a micro-batch with this many target tokens, or samples.
    ///
    /// # Errors
    /// No memory is reserved for the measurement, or the rank's gradient will never be whole.
    pub fn begin(
        &mut self,
        keeps: Keeps,
        measure: Measure,
        (targets, last): (u64, bool),
    ) -> Result<Training, EngineError> {
        let reserved = keeps.measure;
        if measure.micro_batches && !reserved.micro_batches
            || measure.coordinates && !reserved.coordinates
        {
            return Err(EngineError::Shape(
                "the engine has no memory for this measurement; create it with the measurement"
                    .to_owned(),
            ));
        }
        if measure.whole_step() && !keeps.whole && self.accumulated > 0 {
            return Err(no_worker_gradient());
        }
        if keeps.in_fixed_point && (measure.worker || measure.coordinates) {
            return Err(EngineError::Shape(
                "gradients in fixed point are measured by micro-batch only".to_owned(),
            ));
        }
        self.targets += targets;
        self.latest = targets;
        let follows = self.accumulated > 0;
        Ok(if keeps.whole {
            Training {
                first: !follows,
                last,
                apart: keeps.in_fixed_point || follows && reserved.micro_batches,
                measured: measure.micro_batches,
                micro_batch_squares: measure.coordinates && measure.micro_batches,
                step_squares: measure.coordinates && !measure.micro_batches && last,
            }
        } else {
            Training {
                first: self.walks == 0,
                last: false,
                apart: true,
                // A rank's gradient is whole only within a micro-batch.
                measured: measure.micro_batches || measure.worker,
                micro_batch_squares: measure.coordinates,
                step_squares: false,
            }
        })
    }

    /// The micro-batch is done.
    pub fn end(&mut self) {
        self.accumulated += 1;
        self.walks += 1;
    }

    /// The rank has joined a walk of the others without a micro-batch.
    pub fn join(&mut self) {
        self.walks += 1;
    }
}

/// The error for a norm of a gradient that never exists.
pub fn no_worker_gradient() -> EngineError {
    EngineError::Shape(
        "the norm of a rank's accumulated gradient does not exist under full sharding with more than one \
         micro-batch a step: measure micro-batches, or accumulate unsharded"
            .to_owned(),
    )
}
