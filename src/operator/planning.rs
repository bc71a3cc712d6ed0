//! Plans of a TrainingJob. The recipe is read once and its snapshot kept in the status; every world is
//! planned by the same rules as on the command line.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::{Client, ResourceExt};
use xxhash_rust::xxh3::xxh3_128;

use super::build;
use crate::api::condition::ConditionReason;
use crate::api::status::{RecipeSnapshot, Slot, TrainingJobStatus};
use crate::api::{ConfigMapKey, TrainingJob};
use crate::external_trainer;
use crate::plan::{self, Plan, PlanRequest, Reached, Refused};
use crate::recipe::{self, Recipe, Severity, trainer_command};

/// Reason and message of the condition of a job that cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason of the condition `Planned`.
    pub reason: ConditionReason,
    /// The problem and how to solve it.
    pub message: String,
    /// A missing object is the problem: the job waits for it.
    pub waits: bool,
}

/// The recipe snapshot in the status, or a new one from the recipe's source.
pub async fn snapshot(client: &Client, job: &TrainingJob) -> Result<RecipeSnapshot, Refusal> {
    if let Some(kept) = job.status.as_ref().and_then(|status| status.recipe.clone()) {
        return Ok(kept);
    }
    let source = &job.spec.recipe;
    let (text, files) = match (&source.inline, &source.config_map) {
        (Some(text), _) => (Some(text.clone()), Vec::new()),
        (None, Some(from)) => {
            let namespace = job.namespace().unwrap_or_default();
            held(client, &namespace, from).await?
        }
        (None, None) => (None, Vec::new()),
    };
    if text.is_none() && files.is_empty() && source.files.is_empty() {
        return Err(missing(
            "spec.recipe has no recipe: set inline, configMap or files".into(),
        ));
    }
    let mut snapshot = RecipeSnapshot::of(source, text, &job.spec.overrides);
    snapshot.files.extend(files);
    let everything = serde_json::to_vec(&snapshot).unwrap_or_default();
    snapshot.hash = format!("{:032x}", xxh3_128(&everything));
    Ok(snapshot)
}

/// The recipe's text from a ConfigMap, or the files to which its keys are mapped.
async fn held(
    client: &Client,
    namespace: &str,
    from: &ConfigMapKey,
) -> Result<(Option<String>, Vec<(String, String)>), Refusal> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps
        .get_opt(&from.name)
        .await
        .map_err(|error| missing(format!("cannot read ConfigMap {}: {error}", from.name)))?;
    let map = map.ok_or_else(|| {
        missing(format!(
            "ConfigMap {} does not exist in namespace {namespace}; create it, the job waits for it",
            from.name
        ))
    })?;
    let data = map.data.unwrap_or_default();
    let take = |key: &str, field: &str| {
        data.get(key).cloned().ok_or_else(|| {
            missing(format!(
                "ConfigMap {} has no key {key}; add it, or name another key in \
                 spec.recipe.configMap.{field}",
                from.name
            ))
        })
    };
    if from.items.is_empty() {
        return Ok((Some(take(&from.key, "key")?), Vec::new()));
    }
    let items = from.items.iter();
    let files = items.map(|item| Ok((item.path.clone(), take(&item.key, "items")?)));
    Ok((None, files.collect::<Result<_, _>>()?))
}

/// Refusal because the recipe's source does not exist yet.
fn missing(message: String) -> Refusal {
    Refusal {
        reason: ConditionReason::RecipeMissing,
        message,
        waits: true,
    }
}

/// Refusal because no plan is valid for the job.
pub fn plan_refused(message: String) -> Refusal {
    Refusal {
        reason: ConditionReason::PlanRefused,
        message,
        waits: false,
    }
}

/// Reads a recipe snapshot; the error contains all diagnostics.
pub fn read(job: &TrainingJob, snapshot: &RecipeSnapshot) -> Result<Recipe, Refusal> {
    let refused = |message: String| Refusal {
        reason: ConditionReason::RecipeRefused,
        message,
        waits: false,
    };
    let request = snapshot.request(job.spec.elasticity.remainder);
    let request = request.map_err(refused)?;
    recipe::read(&request).map_err(|error| {
        let all = error
            .diagnostics
            .iter()
            .filter(|d| d.severity == Severity::Error);
        let lines: Vec<String> = all
            .map(|d| {
                let located = d.locate(&error.sources);
                let place = match (located.file, located.line) {
                    (Some(file), Some(line)) => format!("{file}:{line}: "),
                    _ => String::new(),
                };
                format!("{place}{} ({})", located.message, located.help)
            })
            .collect();
        refused(lines.join("\n"))
    })
}

/// Plans the worlds of one job. It caches which worlds are feasible, since every reconciliation needs
/// that. It does not cache plans: they are large and needed once a generation.
#[derive(Default)]
pub struct Planner {
    recipe: Option<(String, Recipe)>,
    /// First error of each world planned so far; `None` for feasible worlds.
    refused: HashMap<(u64, Reached), Option<String>>,
    /// The plan of the running generation, while the edited recipe cannot be planned.
    held: Option<Plan>,
    /// `metadata.generation` whose spec gives valid pods.
    buildable_generation: Option<i64>,
}

impl Planner {
    /// A planner that knows only the plan of the running generation, because the edited job cannot be
    /// planned.
    pub fn with_plan(plan: Plan) -> Planner {
        Planner {
            held: Some(plan),
            ..Planner::default()
        }
    }

    /// Refuses a job whose objects cannot be built; checked once for every edit.
    pub fn refuse_unbuildable(
        &mut self,
        job: &TrainingJob,
        image: Option<&str>,
    ) -> Result<(), Refusal> {
        let generation = job.metadata.generation;
        if generation.is_none() || self.buildable_generation != generation {
            refuse_unbuildable(job, image)?;
            self.buildable_generation = generation;
        }
        Ok(())
    }

    /// Reads the job's recipe; true if it changed. A change clears the cached worlds.
    pub fn read(&mut self, job: &TrainingJob, snapshot: &RecipeSnapshot) -> Result<bool, Refusal> {
        let (spec, hash) = (&job.spec, &snapshot.hash);
        let key = format!(
            "{hash}-{:?}-{:?}",
            spec.elasticity.remainder, spec.trainer.command
        );
        if self.recipe.as_ref().is_some_and(|(known, _)| *known == key) {
            return Ok(false);
        }
        self.refused.clear();
        (self.recipe, self.held) = (None, None);
        let mut recipe = read(job, snapshot)?;
        let command = std::mem::replace(
            &mut recipe.spec.trainer.command,
            spec.trainer.command.clone(),
        );
        if spec.trainer.command.is_empty() && !command.is_empty() {
            return Err(plan_refused(
                "the recipe starts an external trainer: set spec.trainer.command to its command \
                 and spec.image to an image with its dependencies"
                    .into(),
            ));
        }
        self.recipe = Some((key, recipe));
        Ok(true)
    }

    /// Refuses overrides that an external trainer would ignore, and checkpoints that it would lose.
    pub fn refuse_losses(&self, overrides: &[String]) -> Result<(), Refusal> {
        let Some((_, recipe)) = &self.recipe else {
            return Ok(());
        };
        if !recipe.spec.trainer.is_external() {
            return Ok(());
        }
        let lost = trainer_command::lost_override(recipe, overrides)
            .or_else(|| external_trainer::resume::lost_checkpoints(recipe));
        lost.map_or(Ok(()), |lost| Err(plan_refused(lost)))
    }

    /// Plan for `ranks` ranks with the progress `reached`; the error contains the rules' diagnostics.
    pub fn plan(&self, ranks: u64, reached: Reached) -> Result<Plan, String> {
        if let Some(plan) = &self.held {
            let fits = plan.outline.world_size == ranks
                && reached
                    .per_device_batch_size_limit
                    .is_none_or(|limit| plan.per_device_batch_size <= limit);
            let message = || {
                "the job as edited cannot be planned, only its current world is known".to_string()
            };
            return fits.then(|| plan.clone()).ok_or_else(message);
        }
        let recipe = self.recipe.as_ref().map(|(_, recipe)| recipe);
        let recipe = recipe.ok_or_else(|| "the recipe was not read".to_string())?;
        let request = PlanRequest::gpus(ranks).after(reached);
        plan::plan(recipe, &request).map_err(|refused| error_text(&refused))
    }

    /// Whether a plan without errors exists.
    pub fn is_feasible(&mut self, ranks: u64, reached: Reached) -> bool {
        self.refusal(ranks, reached).is_none()
    }

    /// First error of the plan; `None` if it is feasible.
    pub fn refusal(&mut self, ranks: u64, reached: Reached) -> Option<String> {
        let world = (ranks, reached);
        if !self.refused.contains_key(&world) {
            let errors = self.plan(ranks, reached).err();
            let first = errors.map(|text| text.lines().next().unwrap_or_default().to_owned());
            self.refused.insert(world, first);
        }
        self.refused.get(&world).cloned().flatten()
    }
}

/// Refuses a job whose objects cannot be built.
fn refuse_unbuildable(job: &TrainingJob, image: Option<&str>) -> Result<(), Refusal> {
    let name = job.name_any();
    let mut letters = name.chars();
    let label = letters
        .next()
        .is_some_and(|first| first.is_ascii_lowercase())
        && letters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        && !name.ends_with('-');
    if !label {
        return Err(plan_refused(format!(
            "`{name}` is not a valid Service name, which the job's pods need; create the job with a name of \
             lower-case letters, digits and dashes that starts with a letter"
        )));
    }
    let made = build::pod(job, Slot::default(), image);
    made.map(|_| ()).map_err(|error| {
        plan_refused(format!(
            "spec.podTemplate does not give a valid pod: {error}; compare it with `kubectl explain pod.spec`"
        ))
    })
}

/// Progress of a job that restricts its next plans.
pub fn reached(status: &TrainingJobStatus) -> Reached {
    Reached {
        global_batch_size: status.plan.as_ref().map(|plan| plan.global_batch_size),
        per_device_batch_size_limit: status.per_device_batch_size_limit,
        batch: status
            .checkpoint
            .as_ref()
            .map(|checkpoint_ref| checkpoint_ref.batch),
    }
}

/// The errors of a refused plan, one line each.
fn error_text(refused: &Refused) -> String {
    let errors = refused
        .diagnostics
        .iter()
        .filter(|d| d.severity == Severity::Error);
    let lines: Vec<String> = errors
        .map(|d| format!("{}: {} ({})", d.rule, d.message, d.help))
        .collect();
    lines.join("\n")
}
