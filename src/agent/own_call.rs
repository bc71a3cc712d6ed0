//! What the user's own program of a TrainingJob is called with in this pod.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::volume::volume_problem;
use super::{Call, Foreign, Membership};
use crate::durable::{create_directory, read_json, write_json};
use crate::job::agent_state::Problem;
use crate::job::generation::Generation;
use crate::job::{OwnCheckpoint, files};
use crate::recipe::spec::DrainSignal;
use crate::recipe::{self, Recipe};
use crate::telemetry::now;

/// What a generation's program goes on from: said once, by its first member, for all of them.
#[derive(Serialize, Deserialize)]
struct Chosen {
    /// The newest checkpoint that there was.
    checkpoint: Option<OwnCheckpoint>,
}

/// How long the first member's word is waited for, seconds. Agents of an older version say nothing; each
/// of them goes on from what it finds.
const WORD: f64 = 60.0;

/// Chooses from which checkpoint the program goes on; false while that is not known. Each pod may see
/// the volume as it was at another moment, and ranks that go on from different checkpoints are no
/// world: the first member (`mine`) looks, the others wait for its word.
pub(super) fn choose(
    job: &Membership,
    run: &Path,
    record: &Generation,
    mine: bool,
) -> Result<bool, Problem> {
    let file = call_file(run, record);
    if file.exists() {
        return Ok(true);
    }
    if !mine && now() - record.created < WORD {
        return Ok(false);
    }
    let checkpoint = foreign(&recipe(job)?, run).newest();
    create_directory(&run.join(files::generation(record.number)))
        .and_then(|()| write_json(&file, &Chosen { checkpoint }))
        .map_err(|error| volume_problem(&error))?;
    Ok(true)
}

/// How the program is called in a generation.
#[derive(Debug)]
pub(super) struct OwnCall {
    recipe: Recipe,
    pub call: Call,
    /// What it goes on from.
    pub checkpoint: Option<OwnCheckpoint>,
}

impl OwnCall {
    /// The signal that asks it to leave.
    pub fn drain(&self) -> DrainSignal {
        self.recipe.spec.trainer.drain_signal
    }

    /// Its newest checkpoint by now.
    pub fn newest(&self, run: &Path) -> Option<OwnCheckpoint> {
        foreign(&self.recipe, run).newest()
    }
}

/// Its call, with what it reads written.
pub(super) fn own_call(
    job: &Membership,
    run: &Path,
    record: &Generation,
) -> Result<OwnCall, Problem> {
    let recipe = recipe(job)?;
    let chosen: Chosen =
        read_json(&call_file(run, record)).map_err(|error| volume_problem(&error))?;
    let checkpoint = chosen.checkpoint;
    let call = foreign(&recipe, run).call(record.number, &record.plan, checkpoint.clone());
    let call = call.map_err(|error| refused(error.to_string()))?;
    call.write().map_err(|error| volume_problem(&error))?;
    Ok(OwnCall {
        recipe,
        call,
        checkpoint,
    })
}

pub(super) fn call_file(run: &Path, record: &Generation) -> PathBuf {
    run.join(files::generation(record.number)).join(files::CALL)
}

fn refused(message: String) -> Problem {
    Problem {
        reason: "CommandRefused".into(),
        message,
        deterministic: true,
    }
}

/// The recipe with the job's command.
fn recipe(job: &Membership) -> Result<Recipe, Problem> {
    let request = job.recipe.request(job.remainder).map_err(refused)?;
    let mut recipe = recipe::read(&request).map_err(|error| refused(error.to_string()))?;
    recipe.spec.trainer.command.clone_from(&job.command);
    Ok(recipe)
}

fn foreign<'a>(recipe: &'a Recipe, run: &'a Path) -> Foreign<'a> {
    Foreign {
        recipe,
        run,
        // Nothing outlives a container but the volume.
        base: None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::batch::{self, PlanRequest};
    use crate::job::Reason;
    use crate::job::api::RemainderPolicy;
    use crate::job::api::status::RecipeSnapshot;
    use crate::job::generation::Address;

    const OVER: [&str; 1] = ["per_device_train_batch_size=8"];

    /// What a pod makes of a job with this command, in generation 2 on three devices.
    fn called(place: &Path, overrides: &[&str], command: &[&str]) -> Result<OwnCall, String> {
        let text = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                    evenkeel: {objective: sft, batch: {gpus: 3}, \
                    trainer: {drain_signal: SIGUSR1}}\n";
        let job = Membership {
            recipe: RecipeSnapshot {
                text: text.to_owned(),
                overrides: overrides.iter().map(|&text| text.to_owned()).collect(),
                ..RecipeSnapshot::default()
            },
            remainder: RemainderPolicy::Exact,
            name: "own".to_owned(),
            rank_memory: None,
            command: command.iter().map(|&word| word.to_owned()).collect(),
            generation: None,
            checkpoint: None,
            fence_after: Duration::ZERO,
            over: false,
        };
        let recipe = recipe(&job).map_err(|problem| problem.message).unwrap();
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
            created: now(),
        };
        let run = place.join("run");
        let told = |problem: Problem| format!("{}: {}", problem.reason, problem.message);
        // Others wait for the first member's word, and the word is said once.
        assert!(!choose(&job, &run, &record, false).unwrap());
        assert!(choose(&job, &run, &record, true).map_err(told)?);
        checkpoint(&run, 9);
        assert!(choose(&job, &run, &record, true).unwrap());
        assert!(choose(&job, &run, &record, false).unwrap());
        own_call(&job, &run, &record).map_err(told)
    }

    /// A checkpoint of transformers' kind.
    fn checkpoint(run: &Path, step: u64) -> PathBuf {
        let checkpoint = run.join(format!("checkpoints/checkpoint-{step}"));
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("trainer_state.json"), "{}").unwrap();
        checkpoint
    }

    #[test]
    fn a_pod_fills_a_command_in_as_the_local_launcher_does() {
        let place = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(&place.path().join("run"), 7);
        let own = called(place.path(), &OVER, &["train", "{args}", "{resume_args}"]).unwrap();
        let (call, drain) = (&own.call, own.drain());
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
    fn every_pod_writes_the_recipe_of_its_generation() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path().join("run");
        let own = called(place.path(), &[], &["train", "{recipe}"]).unwrap();
        let call = own.call;
        assert_eq!(
            call.command[1],
            run.join("gen-2/recipe.yaml").display().to_string()
        );
        assert!(run.join("gen-2/recipe.yaml").is_file());
    }
}
