//! What the user's own program of a TrainingJob is called with in this pod.

use std::path::Path;

use super::recipe_files::{self, RecipeError};
use super::volume::volume_problem;
use super::{Call, Foreign, Membership};
use crate::job::agent_state::Problem;
use crate::job::files;
use crate::job::generation::Generation;
use crate::recipe::placeholder;
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
    // On the volume: a container's own disk may be read-only.
    let given = run.join(files::generation(record.number)).join("recipe");
    let mut recipe = recipe_files::read(&job.recipe, &given).map_err(|error| match error {
        RecipeError::File(error) => volume_problem(&error),
        error => refused(error.to_string()),
    })?;
    recipe.spec.trainer.command.clone_from(&job.command);
    if let Some(lost) = placeholder::lost_override(&job.command, &job.recipe.overrides) {
        return Err(refused(lost));
    }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::batch::{self, PlanRequest};
    use crate::job::Reason;
    use crate::job::api::status::RecipeSnapshot;
    use crate::job::generation::Address;

    const OVER: [&str; 1] = ["per_device_train_batch_size=8"];

    /// What a pod makes of a job with this command, in generation 2 on three devices.
    fn called(
        place: &Path,
        overrides: &[&str],
        command: &[&str],
    ) -> Result<(Call, DrainSignal), String> {
        let text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                    output_dir: out\nevenkeel: {objective: sft, batch: {gpus: 3}, \
                    trainer: {drain_signal: SIGUSR1}}\n";
        let job = Membership {
            recipe: RecipeSnapshot {
                text: text.to_owned(),
                accelerate: None,
                overrides: overrides.iter().map(|&text| text.to_owned()).collect(),
                hash: String::new(),
            },
            name: "own".to_owned(),
            rank_memory: None,
            command: command.iter().map(|&word| word.to_owned()).collect(),
            generation: None,
            checkpoint: None,
            fence_after: Duration::ZERO,
            over: false,
        };
        let recipe = recipe_files::read(&job.recipe, &place.join("files")).unwrap();
        let record = Generation {
            job: "uid".to_owned(),
            number: 2,
            reason: Reason::Started,
            members: Vec::new(),
            plan: batch::plan(&recipe, &PlanRequest::gpus(3)).unwrap(),
            start: None,
            master: Address {
                host: String::new(),
                port: 0,
            },
            created: 0.0,
        };
        let run = place.join("run");
        let called = own_call(&job, &run, &record);
        called.map_err(|problem| format!("{}: {}", problem.reason, problem.message))
    }

    #[test]
    fn a_pod_fills_a_command_in_as_the_local_launcher_does() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path().join("run");
        let checkpoint = run.join("checkpoints/checkpoint-7");
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("trainer_state.json"), "{}").unwrap();
        let (call, drain) =
            called(place.path(), &OVER, &["train", "{args}", "{resume_args}"]).unwrap();
        let from = checkpoint.display().to_string();
        assert_eq!(
            call.command[1..],
            [
                "--per_device_train_batch_size",
                "8",
                "--gradient_accumulation_steps",
                "2",
                "--resume_from_checkpoint",
                &from
            ]
        );
        assert_eq!(drain, DrainSignal::Usr1);
        let refused = called(place.path(), &OVER, &["train", "{recipe}"]).unwrap_err();
        assert!(
            refused.starts_with("CommandRefused: `per_device_train_batch_size=8` would not be in"),
            "{refused}"
        );
    }

    #[test]
    fn every_pod_writes_the_recipe_of_its_generation() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path().join("run");
        let (call, _) = called(place.path(), &[], &["train", "{recipe}"]).unwrap();
        assert_eq!(
            call.command[1],
            run.join("gen-2/recipe.yaml").display().to_string()
        );
        assert!(run.join("gen-2/recipe.yaml").is_file());
    }
}
