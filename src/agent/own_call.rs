//! What the user's own program of a TrainingJob is called with in this pod.

use std::path::Path;

use super::recipe_files::{self, RecipeError};
use super::volume::volume_problem;
use super::{Call, Foreign, Membership};
use crate::job::agent_state::Problem;
use crate::job::generation::Generation;
use crate::recipe::spec::DrainSignal;

/// Its command in a generation, with what it reads written, and the signal that asks it to leave.
pub(super) fn own_call(
    job: &Membership,
    run: &Path,
    record: &Generation,
) -> Result<(Call, DrainSignal), Problem> {
    let refused = |message: String| Problem {
        reason: "CommandRefused".into(),
        message,
        deterministic: true,
    };
    let mut recipe = recipe_files::read(&job.recipe).map_err(|error| match error {
        RecipeError::File(error) => volume_problem(&error),
        error => refused(error.to_string()),
    })?;
    recipe.spec.trainer.command.clone_from(&job.command);
    let foreign = Foreign {
        recipe: &recipe,
        run,
        // Nothing outlives a container but the volume.
        base: None,
    };
    let call = foreign.call(record.number, &record.plan);
    let call = call.map_err(|error| refused(error.to_string()))?;
    call.write().map_err(|error| volume_problem(&error))?;
    Ok((call, recipe.spec.trainer.drain_signal))
}
