//! Plans the worlds of a job for its runner, by the rules of `evenkeel launch`.
//!
//! Jobs of a namespace with the same recipe share its worlds: which are feasible is needed in every
//! reconciliation. A tenant's recipe is never shared with another tenant.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use kube::ResourceExt;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::build;
use super::conditions::Refusal;
use super::recipe_source::{plan_refused, read};
use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::api::status::{KeptRecipe, Slot, TrainingJobStatus};
use crate::api::{RemainderPolicy, TrainingJob};
use crate::external_trainer;
use crate::inventory::kubernetes::{MOST_CONSTRAINTS, ResourceRequest};
use crate::launch;
use crate::plan::{self, AskedRunner, DeviceKind, Plan, PlanRequest, Reached, Runner, Worlds};
use crate::recipe::{Diagnostic, Recipe};
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
struct Shared {
    key: RecipeKey,
    worlds: Worlds,
    weight: usize,
}

/// The recipes that were used last. A job whose recipe is no longer among them reads it again.
pub struct Recipes {
    kept: Mutex<Kept>,
    reading: Semaphore,
}

/// The recipes with the number of their last use.
#[derive(Default)]
struct Kept {
    recipes: HashMap<RecipeKey, (Arc<Shared>, u64)>,
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

    fn get(&self, key: &RecipeKey) -> Option<Arc<Shared>> {
        let mut kept = lock(&self.kept);
        kept.uses += 1;
        let now = kept.uses;
        let (recipe, used) = kept.recipes.get_mut(key)?;
        *used = now;
        Some(recipe.clone())
    }

    fn put(&self, key: RecipeKey, worlds: Worlds) -> Arc<Shared> {
        let weight = weight(worlds.recipe());
        let shared = Arc::new(Shared {
            key: key.clone(),
            worlds,
            weight,
        });
        let mut kept = lock(&self.kept);
        kept.uses += 1;
        let now = kept.uses;
        kept.recipes.insert(key, (shared.clone(), now));
        let bytes = |kept: &Kept| kept.recipes.values().map(|(kept, _)| kept.weight).sum();
        let mut bytes: usize = bytes(&kept);
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
        shared
    }
}

/// Estimate of the bytes that a recipe takes without its texts.
fn weight(recipe: &Recipe) -> usize {
    let settings = serde_json::to_vec(&recipe.spec).map_or(0, |text| text.len());
    16 * 1024 + 2 * settings + PLACE * recipe.value_sources.len()
}

/// Plans the worlds of one job.
#[derive(Default)]
pub struct Planner {
    /// The recipe; `None`: it was not read, or waits for its turn.
    recipe: Option<Arc<Shared>>,
    /// The recipe between two reconciliations, unless others have taken its place.
    resting: Weak<Shared>,
    /// Whether a plan for one of the job's worlds was found with this recipe.
    pub found_plan: bool,
    /// What the status says, while the recipe cannot be planned or waits for its turn.
    held: Option<Held>,
    /// `metadata.generation` whose spec gives valid pods, and what these ask for.
    buildable: Option<(i64, ResourceRequest)>,
}

/// The worlds that a status names.
struct Held {
    /// The plan of the running generation.
    plan: Plan,
    /// Further worlds that are feasible.
    feasible: Vec<u64>,
}

impl Held {
    fn plan(&self, ranks: u64, reached: Reached) -> Option<Plan> {
        let size = self.plan.per_device_batch_size;
        let limit = reached.per_device_batch_size_limit;
        let fits = self.plan.facts.world_size == ranks && limit.is_none_or(|limit| size <= limit);
        fits.then(|| self.plan.clone())
    }

    fn is_feasible(&self, ranks: u64, reached: Reached) -> bool {
        let other = self.plan.facts.world_size != ranks && self.feasible.contains(&ranks);
        other || self.plan(ranks, reached).is_some()
    }
}

/// Why a world has no plan while only the status is known.
const ONLY_CURRENT: &str = "the job as edited cannot be planned, only its current world is known";

impl Planner {
    /// A planner that knows only the plan of the running generation, and further worlds that the status names as
    /// feasible: the edited job cannot be planned, or the recipe waits for its turn.
    pub fn with_known_worlds(plan: Plan, feasible: Vec<u64>) -> Planner {
        Planner {
            held: Some(Held { plan, feasible }),
            ..Planner::default()
        }
    }

    /// The planner between two reconciliations: it keeps no recipe alive.
    pub fn at_rest(self) -> Planner {
        let recipe = self.recipe.as_ref();
        Planner {
            resting: recipe.map_or(self.resting, Arc::downgrade),
            recipe: None,
            ..self
        }
    }

    /// The planner in a reconciliation.
    pub fn awake(self, recipes: &Recipes) -> Planner {
        let resting = self.resting.upgrade();
        Planner {
            recipe: resting.and_then(|recipe| recipes.get(&recipe.key)),
            ..self
        }
    }

    /// Refuses a job whose objects cannot be built; checked once for every edit.
    pub fn refuse_unbuildable(
        &mut self,
        job: &TrainingJob,
        image: Option<&str>,
        priority_classes: Option<&[String]>,
    ) -> Result<(), Refusal> {
        let generation = job.metadata.generation.unwrap_or_default();
        if self.buildable.as_ref().map(|(known, _)| *known) != Some(generation) {
            self.buildable = Some((generation, buildable(job, image, priority_classes)?));
        }
        Ok(())
    }

    /// Resource request of the job's pods.
    pub fn reserved_request(&self) -> Option<&ResourceRequest> {
        self.buildable.as_ref().map(|(_, request)| request)
    }

    /// Whether it plans a recipe. Otherwise it knows only what the status says.
    pub fn has_recipe(&self) -> bool {
        self.recipe.is_some()
    }

    /// Whether the planner has this recipe of the job.
    pub fn has_read(&self, job: &TrainingJob, recipe: &RecipeId) -> bool {
        let read = self.recipe.as_ref();
        read.is_some_and(|read| read.key == RecipeKey::of(job, recipe))
    }

    /// Reads the job's recipe, unless another job of its namespace has the same.
    pub fn read(
        &mut self,
        job: &TrainingJob,
        snapshot: &RecipeSnapshot,
        recipes: &Recipes,
    ) -> Result<(), Refusal> {
        let key = RecipeKey::of(job, &snapshot.into());
        (self.recipe, self.held, self.found_plan) = (recipes.get(&key), None, false);
        if self.recipe.is_some() {
            return Ok(());
        }
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
        let worlds = Worlds::new(recipe, request, None);
        self.recipe = Some(recipes.put(key, worlds));
        Ok(())
    }

    /// Refuses what each pod would refuse of an external trainer's command.
    pub fn check_command(
        &self,
        job: &TrainingJob,
        snapshot: &RecipeSnapshot,
        plan: &Plan,
    ) -> Result<(), Refusal> {
        let worlds = self.worlds();
        if !worlds.is_some_and(|worlds| worlds.request().runner.is_external()) {
            return Ok(());
        }
        // The shared recipe has no texts, in which the command's files are written.
        let recipe = read(job, snapshot)?;
        external_trainer::check::command(&recipe, plan, &snapshot.overrides)
            .map_err(|error| plan_refused(error.to_string()))?;
        Ok(())
    }

    /// The worlds of the recipe, unless only the status is known.
    fn worlds(&self) -> Option<&Worlds> {
        self.recipe.as_ref().map(|shared| &shared.worlds)
    }

    /// Plan for `ranks` ranks with the progress `reached`. The error has one line for each error.
    pub fn plan(&self, ranks: u64, reached: Reached) -> Result<Plan, String> {
        match self.worlds() {
            Some(worlds) => {
                assert_in_turn();
                worlds.plan(ranks, reached).map_err(|refused| {
                    let lines: Vec<String> = refused.errors().map(Diagnostic::one_line).collect();
                    lines.join("\n")
                })
            }
            None => {
                let held = self.held.as_ref();
                let plan = held.and_then(|held| held.plan(ranks, reached));
                plan.ok_or_else(|| ONLY_CURRENT.to_owned())
            }
        }
    }

    /// Whether the recipe's batch depends on a world that the recipe does not state.
    pub fn needs_a_first_world(&self) -> bool {
        self.worlds()
            .is_some_and(|worlds| worlds.recipe().spec.batch.needs_a_world())
    }

    /// Upper limit of the samples that a run with this base batch consumes; `None` if it is unknown.
    pub fn most_samples(&self, global_batch_size: u64) -> Option<u64> {
        plan::most_samples(&self.worlds()?.recipe().spec, global_batch_size)
    }

    /// Whether a plan without errors exists.
    pub fn is_feasible(&self, ranks: u64, reached: Reached) -> bool {
        self.known(ranks, reached)
            .unwrap_or_else(|| self.refusal(ranks, reached).is_none())
    }

    /// First error of the plan; `None` if it is feasible.
    pub fn refusal(&self, ranks: u64, reached: Reached) -> Option<String> {
        if let Some(known) = self.known_refusal(ranks, reached) {
            return known;
        }
        assert_in_turn();
        let refusal = self.worlds()?.refusal(ranks, reached)?;
        Some(refusal.to_string())
    }

    /// As [`Planner::is_feasible`], `None` if only a plan can tell.
    pub fn known(&self, ranks: u64, reached: Reached) -> Option<bool> {
        match self.worlds() {
            Some(worlds) => worlds.known(ranks, reached),
            None => Some(self.known_refusal(ranks, reached)?.is_none()),
        }
    }

    /// As [`Planner::refusal`], `None` if only a plan can tell.
    pub fn known_refusal(&self, ranks: u64, reached: Reached) -> Option<Option<String>> {
        if let Some(worlds) = self.worlds() {
            let refusal = worlds.known_refusal(ranks, reached)?;
            return Some(refusal.map(|refusal| refusal.to_string()));
        }
        let held = self.held.as_ref();
        let is_feasible = held.is_some_and(|held| held.is_feasible(ranks, reached));
        Some((!is_feasible).then(|| ONLY_CURRENT.to_owned()))
    }

    /// The next micro-batch after that of `failed` ran out of memory.
    pub fn smaller(&self, failed: &Plan, reached: Reached) -> Option<u64> {
        self.worlds()?.smaller(failed, reached)
    }
}

/// Fails a test that plans outside a turn.
fn assert_in_turn() {
    #[cfg(test)]
    super::turns::assert_at_work();
}

/// Progress of a job that restricts its next plans.
pub fn reached(status: &TrainingJobStatus) -> Reached {
    Reached {
        global_batch_size: status.plan.as_ref().map(|plan| plan.global_batch_size),
        per_device_batch_size_limit: status.per_device_batch_size_limit,
        batch: status.checkpoint.as_ref().map(|c| c.batch),
    }
}

/// Resource request of the job's pods; refuses a job whose objects cannot be built.
pub fn buildable(
    job: &TrainingJob,
    image: Option<&str>,
    priority_classes: Option<&[String]>,
) -> Result<ResourceRequest, Refusal> {
    let request = build::resource_request(job);
    let constraints = request.constraints();
    if constraints > MOST_CONSTRAINTS {
        return Err(plan_refused(format!(
            "spec.podTemplate has {constraints} tolerations, node labels and values of the node affinity; \
             {MOST_CONSTRAINTS} at most: label the nodes with one value that selects them"
        )));
    }
    let pod = build::pod(job, Slot::default(), image).map_err(|error| {
        plan_refused(format!(
            "spec.podTemplate does not give a valid pod: {error}; compare it with `kubectl explain pod.spec`"
        ))
    })?;
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.priority_class_name.as_deref())
        .filter(|class| !class.is_empty());
    if let (Some(class), Some(allowed)) = (class, priority_classes)
        && !allowed.iter().any(|name| name == class)
    {
        return Err(plan_refused(format!(
            "spec.podTemplate has the priority class {class}, whose pods preempt those of others: remove it, or let the \
             cluster's administrator add it to the chart's admissionPolicy.priorityClasses"
        )));
    }
    Ok(request.of_pod(&pod))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::operator::turns::Turns;

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

    fn read_job(recipes: &Recipes, namespace: &str, name: &str, batch: u64) -> Planner {
        let (job, snapshot) = job(namespace, name, batch);
        let mut planner = Planner::default();
        planner.read(&job, &snapshot, recipes).unwrap();
        assert!(planner.has_read(&job, &(&snapshot).into()));
        planner
    }

    #[test]
    fn the_recipes_that_were_used_last_are_kept() {
        let recipes = Recipes::default();
        // Each takes a third of the allowed bytes.
        let heavy = |batch: u64| {
            let mut planner = read_job(&recipes, "a", &format!("j{batch}"), batch);
            let shared = planner.recipe.take().unwrap();
            let mut recipe = shared.worlds.recipe().clone();
            let place = recipe.value_sources.values().next().unwrap().clone();
            for key in 0..MOST_BYTES / PLACE / 3 {
                recipe.value_sources.insert(key.to_string(), place.clone());
            }
            let worlds = Worlds::new(recipe, PlanRequest::gpus(1), None);
            planner.recipe = Some(recipes.put(shared.key.clone(), worlds));
            planner.at_rest()
        };
        let is_kept = |planner: Planner| planner.awake(&recipes).has_recipe();
        let [first, second] = [heavy(8), heavy(16)];
        let first = first.awake(&recipes).at_rest();
        let third = heavy(24);
        assert!(is_kept(third) && !is_kept(second) && is_kept(first));
    }

    fn in_turn<T>(work: impl FnOnce() -> T) -> T {
        let turns = Turns::default();
        let turn = turns.begin("a").ok().unwrap();
        turn.run(work).unwrap()
    }

    fn evaluated(planner: &Planner) -> usize {
        planner.worlds().unwrap().evaluated()
    }

    #[test]
    fn only_worlds_that_divide_the_batch_are_planned() {
        let recipes = Recipes::default();
        let planner = read_job(&recipes, "a", "j", 1 << 32);
        let reached = Reached::default();
        let all_known = || (1..=1024).all(|ranks| planner.known(ranks, reached).is_some());
        assert!(!all_known());
        let is_feasible = |ranks: &u64| planner.is_feasible(*ranks, reached);
        let feasible: Vec<u64> = in_turn(|| (1..=1024).filter(is_feasible).collect());
        assert_eq!(feasible, (0..=10).map(|n| 1 << n).collect::<Vec<u64>>());
        assert_eq!(evaluated(&planner), 11);
        assert!(all_known());
        let refusal = in_turn(|| planner.refusal(3, reached)).unwrap();
        assert!(refusal.starts_with("batch-divisible"), "{refusal}");
    }

    #[test]
    fn the_config_of_a_launcher_in_a_jobs_command_must_be_among_its_files() {
        let (mut job, mut snapshot) = job("a", "j", 96);
        let command = "accelerate launch --config_file fsdp.yaml train.py {per_device_batch_size}";
        job.spec.trainer.command = command.split(' ').map(str::to_owned).collect();
        let read = |snapshot: &RecipeSnapshot| {
            let mut planner = Planner::default();
            planner.read(&job, snapshot, &Recipes::default())?;
            Ok::<_, Refusal>(planner)
        };
        let refused = read(&snapshot).err().unwrap();
        insta::assert_snapshot!(refused.message, @"command:1: `fsdp.yaml` cannot be read: not in the recipe snapshot (put its text into `spec.recipe.files` under this path, or create the job with `evenkeel launch --nodes`, which does it)");
        let config = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n";
        snapshot.files.insert("fsdp.yaml".into(), config.into());
        let planner = read(&snapshot).unwrap();
        assert_eq!(in_turn(|| planner.refusal(6, Reached::default())), None);
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
        let mut planner = Planner::default();
        let read = planner.read(&job, &snapshot, &Recipes::default());
        let refused = read.err().map(|refusal| refusal.message);
        refused.unwrap_or_else(|| in_turn(|| planner.refusal(2, Reached::default())).unwrap())
    }

    #[test]
    fn the_controller_refuses_what_a_launch_refuses() {
        let of_spec = |spec| refusal_of(spec, json!({}));
        let of_recipe = |recipe| refusal_of(json!({}), recipe);
        let limited = |limit: &str| of_spec(json!({"trainer": {"rankMemory": limit}}));
        let gemma = json!({"model": {"path": "google/gemma-2-9b", "config": {
            "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 32}}});
        insta::assert_snapshot!(of_recipe(json!({"objective": "grpo"})), @"trainer-objective: the built-in trainer does not train grpo (it trains language-modelling and sft, and dpo, kto, orpo and simpo of native recipes, TRL's, HALOs' and direct-preference-optimization's; `evenkeel plan` plans the others too)");
        insta::assert_snapshot!(limited("1KiB"), @"rank-memory: weights, gradients and optimiser states need 1.66 MiB a rank, and a rank may use 1.00 KiB (raise `--rank-memory`, or train a smaller model)");
        insta::assert_snapshot!(limited("1Gigabyte"), @"spec.trainer.rankMemory: unknown unit `gigabyte`: use KB, MB, GB, TB (thousands), KiB, MiB, GiB, TiB (1024s), or none for bytes");
        insta::assert_snapshot!(of_recipe(gemma), @"trainer-model: the built-in trainer does not train Gemma 2 and later ones (google/gemma-2-9b) (choose a Llama, Mistral, Qwen 2, Qwen 3, SmolLM or Gemma model, set `model.config.model_type=llama` to train a Llama of these sizes, or give your program after `--`)");
    }

    #[test]
    fn jobs_of_one_namespace_share_the_worlds_of_their_recipe() {
        let recipes = Recipes::default();
        let reached = Reached::default();
        let first = read_job(&recipes, "a", "j", 96);
        assert!(in_turn(|| first.is_feasible(3, reached)));
        let same = read_job(&recipes, "a", "k", 96);
        assert_eq!(same.known(3, reached), Some(true));
        for (namespace, batch) in [("a", 48), ("b", 96)] {
            let other = read_job(&recipes, namespace, "k", batch);
            assert_eq!(other.known(3, reached), None);
        }
    }
}
