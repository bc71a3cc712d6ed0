//! The recipes with which jobs plan, and their worlds, by the rules of `evenkeel launch`.
//!
//! Jobs of a namespace with the same recipe share its worlds: which are feasible is needed in every
//! reconciliation. A tenant's recipe is never shared with another tenant.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use kube::ResourceExt;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::conditions::Refusal;
use super::recipe_source::{plan_refused, read};
use super::turns::AtWork;
use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::api::status::{KeptRecipe, TrainingJobStatus};
use crate::api::{RemainderPolicy, TrainingJob};
use crate::external_trainer;
use crate::launch;
use crate::plan::{
    AskedRunner, DeviceKind, KnownWorlds, Plan, PlanRequest, Reached, Runner, Worlds,
};
use crate::recipe::Recipe;
use crate::util::lock::lock;
use crate::util::size;

/// Which recipe it is, without its texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecipeId {
    /// Hash of the snapshot.
    pub hash: String,
    /// GPUs for which it counts as written.
    pub gpus: Option<u64>,
}

impl From<&KeptRecipe> for RecipeId {
    fn from(kept: &KeptRecipe) -> RecipeId {
        RecipeId {
            hash: kept.hash.clone(),
            gpus: kept.gpus,
        }
    }
}

impl From<&RecipeSnapshot> for RecipeId {
    fn from(snapshot: &RecipeSnapshot) -> RecipeId {
        RecipeId {
            hash: snapshot.hash.clone(),
            gpus: snapshot.gpus,
        }
    }
}

/// What the reading of a recipe depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RecipeKey {
    namespace: String,
    /// Hash of the snapshot.
    hash: String,
    gpus: Option<u64>,
    gpus_per_node: u32,
    remainder: RemainderPolicy,
    command: Vec<String>,
    device: DeviceKind,
    rank_memory: Option<String>,
}

impl RecipeKey {
    fn of(job: &TrainingJob, id: &RecipeId) -> RecipeKey {
        let RecipeId { hash, gpus } = id.clone();
        RecipeKey {
            namespace: job.namespace().unwrap_or_default(),
            hash,
            gpus,
            gpus_per_node: job.spec.gpus_per_node,
            remainder: job.spec.elasticity.remainder,
            command: job.spec.trainer.command.clone(),
            device: job.spec.trainer.device.on(&job.spec.resource_name),
            rank_memory: job.spec.trainer.rank_memory.clone(),
        }
    }
}

/// What the plans of a job depend on. The pool is not among it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanInput {
    recipe: RecipeKey,
    /// `metadata.generation`.
    edit: Option<i64>,
    reached: Reached,
    /// The job has not run yet.
    starts: bool,
}

impl PlanInput {
    pub fn of(job: &TrainingJob, status: &TrainingJobStatus, recipe: &RecipeId) -> PlanInput {
        PlanInput {
            recipe: RecipeKey::of(job, recipe),
            edit: job.metadata.generation,
            reached: reached(status),
            starts: status.generation.is_none(),
        }
    }
}

/// Most bytes of all recipes that are kept, by [`weight`].
const MOST_BYTES: usize = 32 << 20;
/// Bytes of the place and the key of one value of a recipe.
const PLACE: usize = 256;
/// Recipes that are read at one time. The reading of 1 MiB may take 64 MiB.
const READ_AT_ONCE: usize = 2;

/// A recipe that several jobs may have, and its worlds.
pub struct JobRecipe {
    key: RecipeKey,
    worlds: Worlds,
    weight: usize,
}

impl JobRecipe {
    fn read(
        key: RecipeKey,
        job: &TrainingJob,
        snapshot: &RecipeSnapshot,
    ) -> Result<JobRecipe, Refusal> {
        let mut recipe = read(job, snapshot)?;
        // Findings need only the places of values.
        recipe.sources.forget_texts();
        if key.command.is_empty() && recipe.spec.trainer.is_external() {
            return Err(plan_refused(
                "the recipe starts an external trainer: set spec.trainer.command to its command \
                 and spec.image to an image with its dependencies"
                    .into(),
            ));
        }
        let rank_memory = key.rank_memory.as_deref().map(size::parse).transpose();
        let rank_memory = rank_memory
            .map_err(|error| plan_refused(format!("spec.trainer.rankMemory: {error}")))?;
        let runner = Runner::of(&recipe.spec, AskedRunner::Launch, key.device, rank_memory);
        let request = PlanRequest {
            gpus_per_node: Some(key.gpus_per_node.into()),
            flaws: launch::stated_flaws(&recipe, runner),
            ..PlanRequest::of(runner, 1)
        };
        // The pool's memory is not known.
        Ok(JobRecipe::new(key, Worlds::new(recipe, request, None)))
    }

    fn new(key: RecipeKey, worlds: Worlds) -> JobRecipe {
        JobRecipe {
            key,
            weight: weight(worlds.recipe()),
            worlds,
        }
    }

    /// Whether it is this recipe of the job.
    pub fn is_of(&self, job: &TrainingJob, recipe: &RecipeId) -> bool {
        self.key == RecipeKey::of(job, recipe)
    }

    pub fn recipe(&self) -> &Recipe {
        self.worlds.recipe()
    }

    /// What is known of its worlds without a turn to plan.
    pub fn known(&self) -> KnownWorlds<'_> {
        self.worlds.known()
    }

    /// Its worlds, which may be planned in a turn.
    pub fn worlds(&self, _: &AtWork) -> &Worlds {
        &self.worlds
    }

    /// Refuses what each pod would refuse of an external trainer's command.
    pub fn check_command(
        &self,
        job: &TrainingJob,
        snapshot: &RecipeSnapshot,
        plan: &Plan,
    ) -> Result<(), Refusal> {
        if !self.worlds.request().runner.is_external() {
            return Ok(());
        }
        // The shared recipe has no texts, in which the command's files are written.
        let recipe = read(job, snapshot)?;
        external_trainer::check::command(&recipe, plan, &snapshot.overrides)
            .map_err(|error| plan_refused(error.to_string()))?;
        Ok(())
    }
}

/// The recipes that were used last. A job whose recipe is no longer among them reads it again.
pub struct Recipes {
    kept: Mutex<Kept>,
    reading: Semaphore,
}

/// The recipes with the number of their last use.
#[derive(Default)]
struct Kept {
    recipes: HashMap<RecipeKey, (Arc<JobRecipe>, u64)>,
    uses: u64,
}

impl Default for Recipes {
    fn default() -> Recipes {
        Recipes {
            kept: Mutex::default(),
            reading: Semaphore::new(READ_AT_ONCE),
        }
    }
}

impl Recipes {
    /// Permission to read a recipe, while it is held.
    pub async fn reading(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.reading.acquire().await.ok()
    }

    /// The job's recipe, read unless another job of its namespace has the same.
    pub fn read(
        &self,
        job: &TrainingJob,
        snapshot: &RecipeSnapshot,
    ) -> Result<Arc<JobRecipe>, Refusal> {
        let key = RecipeKey::of(job, &snapshot.into());
        match self.get(&key) {
            Some(kept) => Ok(kept),
            None => Ok(self.put(JobRecipe::read(key, job, snapshot)?)),
        }
    }

    /// A recipe that was used before, unless others have taken its place.
    pub fn again(&self, before: &Weak<JobRecipe>) -> Option<Arc<JobRecipe>> {
        self.get(&before.upgrade()?.key)
    }

    fn get(&self, key: &RecipeKey) -> Option<Arc<JobRecipe>> {
        let mut kept = lock(&self.kept);
        kept.uses += 1;
        let now = kept.uses;
        let (recipe, used) = kept.recipes.get_mut(key)?;
        *used = now;
        Some(recipe.clone())
    }

    fn put(&self, recipe: JobRecipe) -> Arc<JobRecipe> {
        let recipe = Arc::new(recipe);
        let mut kept = lock(&self.kept);
        kept.uses += 1;
        let now = kept.uses;
        kept.recipes
            .insert(recipe.key.clone(), (recipe.clone(), now));
        let mut bytes: usize = kept.recipes.values().map(|(kept, _)| kept.weight).sum();
        while bytes > MOST_BYTES && kept.recipes.len() > 1 {
            let oldest = kept.recipes.iter().min_by_key(|(_, (_, used))| *used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else {
                break;
            };
            bytes -= kept
                .recipes
                .remove(&oldest)
                .map_or(0, |(kept, _)| kept.weight);
        }
        recipe
    }
}

/// Estimate of the bytes that a recipe takes without its texts.
fn weight(recipe: &Recipe) -> usize {
    let settings = serde_json::to_vec(&recipe.spec).map_or(0, |text| text.len());
    16 * 1024 + 2 * settings + PLACE * recipe.value_sources.len()
}

/// Progress of a job that restricts its next plans.
pub fn reached(status: &TrainingJobStatus) -> Reached {
    Reached {
        global_batch_size: status.plan.as_ref().map(|plan| plan.global_batch_size),
        per_device_batch_size_limit: status.per_device_batch_size_limit,
        batch: status.checkpoint.as_ref().map(|c| c.batch),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(namespace: &str, name: &str, batch: u64) -> (TrainingJob, RecipeSnapshot) {
        let recipe = json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "r"},
            "spec": {
                "batch": {"global": batch},
                "model": {"init": "random", "config": {
                    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 32}},
                "data": {"sequence_length": 32, "train": [{"path": "s",
                    "synthetic": {"vocabulary": 64, "branching": 4, "samples": 1_u64 << 40}}]},
                "budget": {"samples": 1_u64 << 40},
            },
        });
        let job: TrainingJob = serde_json::from_value(json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": namespace, "uid": name},
            "spec": {
                "nodes": 1024, "gpusPerNode": 1, "image": "i", "checkpoint": {"claim": "c"},
                "recipe": {"inline": recipe.to_string()},
            },
        }))
        .unwrap();
        let source = &job.spec.recipe;
        let mut snapshot = RecipeSnapshot::of(source, source.inline.clone(), &[]);
        snapshot.hash = format!("{batch}");
        (job, snapshot)
    }

    fn read_job(recipes: &Recipes, namespace: &str, name: &str, batch: u64) -> Arc<JobRecipe> {
        let (job, snapshot) = job(namespace, name, batch);
        let read = recipes.read(&job, &snapshot).unwrap();
        assert!(read.is_of(&job, &(&snapshot).into()));
        read
    }

    #[test]
    fn the_recipes_that_were_used_last_are_kept() {
        let recipes = Recipes::default();
        // Each takes a third of the allowed bytes.
        let heavy = |batch: u64| {
            let read = read_job(&recipes, "a", &format!("j{batch}"), batch);
            let mut recipe = read.recipe().clone();
            let place = recipe.value_sources.values().next().unwrap().clone();
            for key in 0..MOST_BYTES / PLACE / 3 {
                recipe.value_sources.insert(key.to_string(), place.clone());
            }
            let worlds = Worlds::new(recipe, PlanRequest::gpus(1), None);
            Arc::downgrade(&recipes.put(JobRecipe::new(read.key.clone(), worlds)))
        };
        let is_kept = |recipe: &Weak<JobRecipe>| recipes.again(recipe).is_some();
        let [first, second] = [heavy(8), heavy(16)];
        assert!(is_kept(&first));
        let third = heavy(24);
        assert!(is_kept(&third) && !is_kept(&second) && is_kept(&first));
    }

    #[test]
    fn only_worlds_that_divide_the_batch_are_planned() {
        let recipes = Recipes::default();
        let recipe = read_job(&recipes, "a", "j", 1 << 32);
        let (worlds, known, reached) = (&recipe.worlds, recipe.known(), Reached::default());
        let all_known = || (1..=1024).all(|ranks| known.is_feasible(ranks, reached).is_some());
        assert!(!all_known());
        let feasible: Vec<u64> = (1..=1024)
            .filter(|ranks| worlds.is_feasible(*ranks, reached))
            .collect();
        assert_eq!(feasible, (0..=10).map(|n| 1 << n).collect::<Vec<u64>>());
        assert_eq!(worlds.evaluated(), 11);
        assert!(all_known());
        let refusal = worlds.refusal(3, reached).unwrap().to_string();
        assert!(refusal.starts_with("batch-divisible"), "{refusal}");
    }

    #[test]
    fn the_config_of_a_launcher_in_a_jobs_command_must_be_among_its_files() {
        let (mut job, mut snapshot) = job("a", "j", 96);
        let command = "accelerate launch --config_file fsdp.yaml train.py {per_device_batch_size}";
        job.spec.trainer.command = command.split(' ').map(str::to_owned).collect();
        let read = |snapshot: &RecipeSnapshot| Recipes::default().read(&job, snapshot);
        let refused = read(&snapshot).err().unwrap();
        insta::assert_snapshot!(refused.message, @"command:1: `fsdp.yaml` cannot be read: not in the recipe snapshot (put its text into `spec.recipe.files` under this path, or create the job with `evenkeel launch --nodes`, which does it)");
        let config = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n";
        snapshot.files.insert("fsdp.yaml".into(), config.into());
        let recipe = read(&snapshot).unwrap();
        assert_eq!(recipe.worlds.refusal(6, Reached::default()), None);
    }

    /// The refusal of a job with these fields in its spec and its recipe's.
    fn refusal_of(spec: serde_json::Value, recipe: serde_json::Value) -> String {
        let (job, mut snapshot) = job("a", "j", 96);
        let mut changed = serde_json::to_value(&job).unwrap();
        let fields = |value: &serde_json::Value| value.as_object().unwrap().clone();
        changed["spec"]
            .as_object_mut()
            .unwrap()
            .extend(fields(&spec));
        let job: TrainingJob = serde_json::from_value(changed).unwrap();
        let text = snapshot.text.clone();
        let mut text: serde_json::Value = serde_json::from_str(&text).unwrap();
        text["spec"]
            .as_object_mut()
            .unwrap()
            .extend(fields(&recipe));
        snapshot.text = text.to_string();
        match Recipes::default().read(&job, &snapshot) {
            Err(refusal) => refusal.message,
            Ok(recipe) => recipe
                .worlds
                .refusal(2, Reached::default())
                .unwrap()
                .to_string(),
        }
    }

    #[test]
    fn the_controller_refuses_what_a_launch_refuses() {
        let of_spec = |spec| refusal_of(spec, json!({}));
        let of_recipe = |recipe| refusal_of(json!({}), recipe);
        let limited = |limit: &str| of_spec(json!({"trainer": {"rankMemory": limit}}));
        let gemma = json!({"model": {"path": "google/gemma-2-9b", "config": {
            "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 32}}});
        insta::assert_snapshot!(of_recipe(json!({"objective": "grpo"})), @"trainer-objective: the built-in trainer does not train grpo (it trains language-modelling and sft, and dpo, kto, orpo, cpo and simpo of native recipes, TRL's, HALOs' and direct-preference-optimization's; `evenkeel plan` plans the others too)");
        insta::assert_snapshot!(limited("1KiB"), @"rank-memory: weights, gradients and optimiser states need 1.66 MiB a rank, and a rank may use 1.00 KiB (raise `--rank-memory`, or train a smaller model)");
        insta::assert_snapshot!(limited("1Gigabyte"), @"spec.trainer.rankMemory: unknown unit `gigabyte`: use KB, MB, GB, TB (thousands), KiB, MiB, GiB, TiB (1024s), or none for bytes");
        insta::assert_snapshot!(of_recipe(gemma), @"trainer-model: the built-in trainer does not train Gemma 2 and later ones (google/gemma-2-9b) (choose a Llama, Mistral, Qwen 2, Qwen 3, SmolLM or Gemma model, set `model.config.model_type=llama` to train a Llama of these sizes, or give your program after `--`)");
    }

    #[test]
    fn jobs_of_one_namespace_share_the_worlds_of_their_recipe() {
        let recipes = Recipes::default();
        let reached = Reached::default();
        let first = read_job(&recipes, "a", "j", 96);
        assert!(first.worlds.is_feasible(3, reached));
        let same = read_job(&recipes, "a", "k", 96);
        assert_eq!(same.known().is_feasible(3, reached), Some(true));
        for (namespace, batch) in [("a", 48), ("b", 96)] {
            let other = read_job(&recipes, namespace, "k", batch);
            assert_eq!(other.known().is_feasible(3, reached), None);
        }
    }
}
