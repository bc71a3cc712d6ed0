//! Batch numbers in `accelerator_config`, and numbers whose meaning it changes.

use super::{EmitError, Numbers, name_of};
use crate::recipe::Recipe;
use crate::recipe::handbook::accelerator::{NUM_STEPS, SPLIT_BATCHES};
use crate::recipe::source::FileId;

/// A number, as an argument of the trainer.
pub(super) struct Argument {
    pub key: &'static str,
    pub value: u64,
    /// The recipe states the same value.
    pub unchanged: bool,
}

/// With accelerate's `split_batches` all processes share the batch of one loader. The key of the
/// per-device batch then holds the samples of all devices.
pub(super) fn split_batches(recipe: &Recipe, numbers: &Numbers) -> Option<[Argument; 2]> {
    if !splits_batches(recipe) {
        return None;
    }
    let batch = &recipe.spec.batch;
    let passes = batch.accumulation.unwrap_or(1).max(1);
    let size = numbers.micro * numbers.data_parallel;
    let accumulation = num_steps(recipe).map_or("gradient_accumulation_steps", |(key, _)| key);
    Some([
        Argument {
            key: "per_device_train_batch_size",
            value: size,
            unchanged: batch.global.map(|global| global / passes) == Some(size),
        },
        Argument {
            key: accumulation,
            value: numbers.accumulation,
            unchanged: passes == numbers.accumulation,
        },
    ])
}

/// Whether the key of the per-device batch holds the samples of all devices.
pub fn splits_batches(recipe: &Recipe) -> bool {
    let place = recipe.places.get("batch.global");
    place.is_some_and(|place| place.key == SPLIT_BATCHES)
}

/// The accumulation, where `accelerator_config` holds it.
fn num_steps(recipe: &Recipe) -> Option<(&'static str, FileId)> {
    let place = recipe.places.get("batch.accumulation")?;
    (place.key == NUM_STEPS).then_some((NUM_STEPS, place.span.file))
}

/// Refuses to write the accumulation twice. `numbers`: an argument with the same value is not
/// written. `file`: the file in which the number itself can change.
pub(super) fn refuse_num_steps(
    recipe: &Recipe,
    numbers: Option<&Numbers>,
    file: Option<FileId>,
) -> Result<(), EmitError> {
    let same = numbers.is_some_and(|n| recipe.spec.batch.accumulation == Some(n.accumulation));
    match num_steps(recipe) {
        Some((key, at)) if !same && Some(at) != file => Err(EmitError::NumSteps {
            key,
            file: name_of(recipe, at),
        }),
        _ => Ok(()),
    }
}
