//! The external trainer of a pod: its recipe, and the checkpoint that all pods of a generation resume from.

use std::path::{Path, PathBuf};

use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::external_trainer::{
    ExternalCall, ExternalTrainer, ExternalTrainerError, choice, launcher, resume,
};
use crate::lifecycle::agent_state::Problem;
use crate::lifecycle::generation::Generation;
use crate::recipe::Recipe;
use crate::recipe::schema::spec::Remainder;
use crate::telemetry::now;

/// Where a pod finds the recipe and the command of its external trainer.
pub struct Source<'a> {
    pub recipe: &'a RecipeSnapshot,
    /// What happens to a batch that no number of ranks splits exactly.
    pub remainder: Remainder,
    /// The command, not empty.
    pub command: &'a [String],
}

/// Longest wait for the first member's choice, seconds. Agents of older versions write none; then
/// each pod resumes from the newest checkpoint that it finds.
const CHOICE_TIMEOUT: f64 = 60.0;

/// Fixes the checkpoint that the trainer resumes from; `false` while it is unknown. Pods may see
/// the shared volume at different times, and ranks must not resume from different checkpoints. So
/// the first member (`mine`) chooses, and the others wait.
pub fn choose(
    source: &Source<'_>,
    run: &Path,
    record: &Generation,
    mine: bool,
) -> Result<bool, Problem> {
    if choice::file(run, record).exists() {
        return Ok(true);
    }
    if !mine && now() - record.created < CHOICE_TIMEOUT {
        return Ok(false);
    }
    external_trainer(&recipe(source)?, run).choose(record)?;
    Ok(true)
}

/// The trainer's checkpoint directory, and how the names of its checkpoints begin, if that is known.
pub fn checkpoints(source: &Source<'_>, run: &Path) -> Result<(PathBuf, &'static str), Problem> {
    let recipe = recipe(source)?;
    let directory = external_trainer(&recipe, run).checkpoint_dir();
    Ok((directory, resume::checkpoints(recipe.dialect).prefix))
}

/// Builds the command and writes the files that it reads.
pub fn external_call(
    source: &Source<'_>,
    run: &Path,
    record: &Generation,
) -> Result<ExternalCall, Problem> {
    let recipe = recipe(source)?;
    let begun = external_trainer(&recipe, run).begin(record);
    begun.map_err(|error| match error {
        ExternalTrainerError::File(error) => error.into(),
        error => refused(error.to_string()),
    })
}

fn refused(message: String) -> Problem {
    Problem {
        reason: "CommandRefused".into(),
        message,
        deterministic: true,
    }
}

/// The recipe with the job's command.
fn recipe(source: &Source<'_>) -> Result<Recipe, Problem> {
    let request = source.recipe.request(source.remainder, source.command);
    let request = request.map_err(|invalid| refused(invalid.to_string()))?;
    launcher::read(&request).map_err(|error| refused(error.to_string()))
}

fn external_trainer<'a>(recipe: &'a Recipe, run: &'a Path) -> ExternalTrainer<'a> {
    ExternalTrainer {
        recipe,
        run_dir: run,
        // Only the volume outlives a container.
        base: None,
        most_on_a_host: u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::generation::testing;
    use crate::plan::{self, PlanRequest};
    use crate::recipe::schema::spec::DrainSignal;

    const OVER: [&str; 1] = ["per_device_train_batch_size=8"];

    /// The result of a pod in generation 2 with three devices for this command.
    fn external_call_of(
        place: &Path,
        overrides: &[&str],
        command: &[&str],
    ) -> Result<ExternalCall, String> {
        let text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                    evenkeel: {objective: sft, batch: {gpus: 3}, \
                    trainer: {drain_signal: SIGUSR1}}\n";
        let snapshot = RecipeSnapshot {
            text: text.to_owned(),
            overrides: overrides.iter().map(|&text| text.to_owned()).collect(),
            ..RecipeSnapshot::default()
        };
        external_call_of_snapshot(place, &snapshot, command)
    }

    fn external_call_of_snapshot(
        place: &Path,
        snapshot: &RecipeSnapshot,
        command: &[&str],
    ) -> Result<ExternalCall, String> {
        let command: Vec<String> = command.iter().map(|&word| word.to_owned()).collect();
        let job = Source {
            recipe: snapshot,
            remainder: Remainder::Exact,
            command: &command,
        };
        let recipe = recipe(&job).map_err(|problem| problem.message)?;
        let plan = plan::plan(&recipe, &PlanRequest::gpus(3)).unwrap();
        let record = Generation {
            created: now(),
            ..testing::record(2, Vec::new(), plan)
        };
        let run = place.join("run");
        let as_text = |problem: Problem| format!("{}: {}", problem.reason, problem.message);
        // Other members wait for the first member's choice, which is written once.
        assert!(!choose(&job, &run, &record, false).unwrap());
        assert!(choose(&job, &run, &record, true).map_err(as_text)?);
        checkpoint(&run, 9);
        assert!(choose(&job, &run, &record, true).unwrap());
        assert!(choose(&job, &run, &record, false).unwrap());
        external_call(&job, &run, &record).map_err(as_text)
    }

    /// A checkpoint in the layout of transformers.
    fn checkpoint(run: &Path, step: u64) -> PathBuf {
        let checkpoint = run.join(format!("checkpoints/checkpoint-{step}"));
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("trainer_state.json"), "{}").unwrap();
        checkpoint
    }

    #[test]
    fn a_pod_and_the_local_launcher_fill_in_the_same_command() {
        let place = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(&place.path().join("run"), 7);
        let external =
            external_call_of(place.path(), &OVER, &["train", "{args}", "{resume_args}"]).unwrap();
        let (call, drain) = (&external.call, external.recipe.spec.trainer.drain_signal);
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
    }

    #[test]
    fn a_pod_replaces_a_launcher_whose_config_is_in_the_snapshot() {
        let place = tempfile::tempdir().unwrap();
        let text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                    evenkeel: {objective: sft}\n";
        let mut snapshot = RecipeSnapshot {
            text: text.to_owned(),
            ..RecipeSnapshot::default()
        };
        let command = [
            "accelerate",
            "launch",
            "--config_file",
            "fsdp.yaml",
            "train.py",
            "{args}",
        ];
        let refused = external_call_of_snapshot(place.path(), &snapshot, &command);
        insta::assert_snapshot!(refused.unwrap_err(), @"command:1:33: `fsdp.yaml` cannot be read: not in the recipe snapshot (put its text into `spec.recipe.files` under this path, or create the job with `evenkeel launch --nodes`, which does it)");
        let config = "distributed_type: FSDP\nnum_processes: 3\nfsdp_config: {fsdp_version: 2}\n";
        snapshot.files.insert("fsdp.yaml".into(), config.into());
        let call = external_call_of_snapshot(place.path(), &snapshot, &command)
            .unwrap()
            .call;
        assert_eq!(
            call.command.join(" "),
            "python3 -u train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
        );
        assert_eq!(call.environment["ACCELERATE_USE_FSDP"], "true");
        assert_eq!(call.environment["FSDP_VERSION"], "2");
    }

    #[test]
    fn every_pod_writes_the_recipe_of_its_generation() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path().join("run");
        let external = external_call_of(place.path(), &[], &["train", "{recipe}"]).unwrap();
        let call = external.call;
        assert_eq!(
            call.command[1],
            run.join("gen-2/recipe.yaml").display().to_string()
        );
        assert!(run.join("gen-2/recipe.yaml").is_file());
    }
}
