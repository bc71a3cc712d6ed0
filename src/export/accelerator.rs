//! Batch numbers in `accelerator_config`, and numbers whose meaning it changes.

use super::{BatchNumbers, EmitError, name_of};
use crate::recipe::Recipe;
use crate::recipe::batch_arguments::num_steps;
use crate::recipe::syntax::source::FileId;

/// Refuses to write the accumulation twice. `numbers`: an argument with the same value is not
/// written. `file`: the file in which the number itself can change.
pub(super) fn refuse_num_steps(
    recipe: &Recipe,
    numbers: Option<&BatchNumbers>,
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
