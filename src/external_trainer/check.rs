//! What is refused or noted of an external trainer's command before it starts.

use std::path::Path;

use super::{Call, ExternalTrainer, ExternalTrainerError, resume};
use crate::plan::Plan;
use crate::recipe::schema::placeholder;
use crate::recipe::spec::MASTER_PORT;
use crate::recipe::{Recipe, trainer_command};

/// Refuses a command that a pod would also refuse. Returns notes about an accepted command, one per line.
pub fn command(
    recipe: &Recipe,
    plan: &Plan,
    typed: &[String],
) -> Result<Vec<String>, ExternalTrainerError> {
    overrides(recipe, typed)?;
    if let Some(lost) = resume::lost_checkpoints(recipe) {
        return Err(ExternalTrainerError::Lost(lost));
    }
    let trainer = ExternalTrainer {
        recipe,
        run_dir: Path::new("."),
        base: None,
        most_on_a_host: u64::MAX,
    };
    let call = trainer.call(0, plan, None)?;
    let mut notes = notes(recipe, call);
    let port = recipe.spec.trainer.environment.get(MASTER_PORT);
    if let Some(port) = port.filter(|port| *port != "0") {
        notes.push(format!(
            "port {port} is not used on a cluster: the pods of each generation listen on a port of their own, which \
             {MASTER_PORT} states"
        ));
    }
    Ok(notes)
}

/// Refuses overrides that the trainer would not see.
pub fn overrides(recipe: &Recipe, typed: &[String]) -> Result<(), ExternalTrainerError> {
    let lost = trainer_command::lost_override(recipe, typed);
    lost.map_or(Ok(()), |lost| Err(ExternalTrainerError::Lost(lost)))
}

/// Notes for the user about an accepted command.
pub fn notes(recipe: &Recipe, call: Call) -> Vec<String> {
    let command = &recipe.spec.trainer.command;
    let mut notes = Vec::new();
    if !placeholder::takes_numbers(command) {
        notes.push(
            "the command uses none of the plan's numbers ({args}, {recipe}, {per_device_batch_size}): \
             the global batch stays the same only if the program reads \
             EVENKEEL_PER_DEVICE_BATCH_SIZE and EVENKEEL_GRADIENT_ACCUMULATION_STEPS"
                .to_owned(),
        );
    }
    let restarts = "it restarts at step 0 whenever the world changes";
    let expected = call.checkpoint_dir.display();
    if !placeholder::is_used(command, placeholder::RESUME_ARGS) {
        notes.push(format!(
            "the command does not use {{resume_args}}: unless the trainer finds its checkpoints \
             itself or reads EVENKEEL_CHECKPOINT, {restarts}"
        ));
    } else if !placeholder::is_used(command, placeholder::CHECKPOINT_DIR)
        && resume::directory(recipe.dialect, &recipe.spec).is_none()
    {
        notes.push(format!(
            "the trainer's checkpoint directory is not set ({{checkpoint_dir}}): evenkeel expects \
             checkpoints in {expected}; unless the trainer writes them there, {restarts}"
        ));
    }
    notes.extend(call.remarks);
    notes
}
