//! What all ranks agree on when they enter a generation.

use super::TrainError;
use super::run::{Run, sharded};
use crate::comm::{Collective, CommError};
use crate::data::Kind;
use crate::engine::{Engine, EngineError};
use crate::norm::Conditions;
use crate::plan::Plan;

/// What the controller of the batch has to know of a plan.
pub fn conditions(run: &Run, plan: &Plan) -> Result<Conditions, TrainError> {
    Ok(Conditions {
        base_batch: plan.global_batch_size,
        quantum: plan.quantum,
        budget: run.budget()?,
        micro_batch: plan.per_device_batch_size,
        workers: plan.data_parallel_size,
        sharded: sharded(plan.facts.strategy),
    })
}

/// Samples of the largest micro-batch, of training and of evaluations.
fn largest_micro_batch(plan: &Plan) -> u64 {
    let of_evaluations = plan.facts.eval_batch_size.unwrap_or(0);
    plan.per_device_batch_size.max(of_evaluations)
}

/// Refuses a micro-batch whose samples have sums in common, where the bits must be the same in every world.
pub fn check_coupling(run: &Run, plan: &Plan) -> Result<(), TrainError> {
    let micro_batch = largest_micro_batch(plan);
    if run.is_deterministic_in_every_world() && micro_batch > 1 {
        return Err(TrainError::CoupledSamples { micro_batch });
    }
    Ok(())
}

/// Every rank reserves its memory before the first step and reports a failure to all, so that no rank waits
/// in a collective for one that has left.
pub fn agree_on_memory(
    run: &Run,
    plan: &Plan,
    engine: &mut dyn Engine,
    world: &dyn Collective,
) -> Result<(), TrainError> {
    let rows = largest_micro_batch(plan);
    let rows = rows * Kind::of(run.spec.objective).rows();
    let reserved = engine.reserve(rows as usize, run.spec.data.sequence_length as usize);
    let everyones = world.exchange(&[u8::from(reserved.is_err())])?;
    reserved?;
    match everyones.iter().position(|message| message != &[0]) {
        Some(rank) => Err(TrainError::Engine(EngineError::Comm(CommError::Aborted {
            rank,
            reason: "out of memory".into(),
        }))),
        None => Ok(()),
    }
}
