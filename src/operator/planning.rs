//! From a TrainingJob to plans: the recipe is read once and kept in the status, and every world is
//! planned by the same rules as on the command line.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::{Client, ResourceExt};
use xxhash_rust::xxh3::xxh3_128;

use super::build;
use crate::batch::{self, Plan, PlanRequest, Reached, Refused};
use crate::job::api::status::{RecipeSnapshot, Seat, TrainingJobStatus};
use crate::job::api::{ConfigMapKey, TrainingJob};
use crate::recipe::{self, Recipe, Severity, own_command};

/// Why a job cannot be planned: a condition's reason and message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// One CamelCase word.
    pub reason: &'static str,
    /// In words, with the way out.
    pub message: String,
    /// Waiting may help: what it needs is not there yet.
    pub waits: bool,
}

/// The recipe that the job was first planned with, or what its source holds now.
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
            "spec.recipe has neither inline text, nor a configMap, nor files".into(),
        ));
    }
    let mut snapshot = RecipeSnapshot::of(source, text, &job.spec.overrides);
    snapshot.files.extend(files);
    let everything = serde_json::to_vec(&snapshot).unwrap_or_default();
    snapshot.hash = format!("{:032x}", xxh3_128(&everything));
    Ok(snapshot)
}

/// The recipe's text in a ConfigMap, or the files that its keys become.
async fn held(
    client: &Client,
    namespace: &str,
    from: &ConfigMapKey,
) -> Result<(Option<String>, Vec<(String, String)>), Refusal> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps
        .get_opt(&from.name)
        .await
        .map_err(|error| missing(format!("ConfigMap {} cannot be read: {error}", from.name)))?;
    let map = map.ok_or_else(|| {
        missing(format!(
            "there is no ConfigMap {} in namespace {namespace}: create it, the job waits",
            from.name
        ))
    })?;
    let data = map.data.unwrap_or_default();
    let take = |key: &str, field: &str| {
        data.get(key).cloned().ok_or_else(|| {
            missing(format!(
                "ConfigMap {} has no key {key}: add it, or name another in \
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

/// What the recipe is read from is not there yet.
fn missing(message: String) -> Refusal {
    Refusal {
        reason: "RecipeMissing",
        message,
        waits: true,
    }
}

/// The job as it is cannot be planned.
pub fn plan_refused(message: String) -> Refusal {
    Refusal {
        reason: "PlanRefused",
        message,
        waits: false,
    }
}

/// Reads a snapshot; an error says everything that is wrong with it.
pub fn read(job: &TrainingJob, snapshot: &RecipeSnapshot) -> Result<Recipe, Refusal> {
    let refused = |message: String| Refusal {
        reason: "RecipeRefused",
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

/// Plans worlds of one job. Whether a world splits the batch is asked at every look and kept; a plan
/// is needed once a generation, and large.
#[derive(Default)]
pub struct Planner {
    recipe: Option<(String, Recipe)>,
    /// Worlds that were asked for, and the first thing that is said against each.
    refused: HashMap<(u64, Reached), Option<String>>,
    /// The one plan that there is while the recipe cannot be read.
    held: Option<Plan>,
    /// The generation of the spec of which pods can be made.
    makeable: Option<i64>,
}

impl Planner {
    /// A planner that knows one world, that of the plan which a job runs by: what was edited since
    /// cannot be planned, and is not taken up.
    pub fn holding(plan: Plan) -> Planner {
        Planner {
            held: Some(plan),
            ..Planner::default()
        }
    }

    /// Refuses a job of which no objects can be made; looked at once for every edit.
    pub fn refuse_unmakeable(
        &mut self,
        job: &TrainingJob,
        image: Option<&str>,
    ) -> Result<(), Refusal> {
        let generation = job.metadata.generation;
        if generation.is_none() || self.makeable != generation {
            refuse_unmakeable(job, image)?;
            self.makeable = generation;
        }
        Ok(())
    }

    /// Takes the job's recipe; what was planned for another one is forgotten. True where it is another
    /// one than before.
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
                "the recipe names a program of its own: put its command into spec.trainer.command, \
                 and into spec.image what it needs"
                    .into(),
            ));
        }
        self.recipe = Some((key, recipe));
        Ok(true)
    }

    /// Refuses what a program of the user's own would not hear of, or would lose.
    pub fn refuse_losses(&self, overrides: &[String]) -> Result<(), Refusal> {
        let Some((_, recipe)) = &self.recipe else {
            return Ok(());
        };
        if !recipe.spec.trainer.is_own() {
            return Ok(());
        }
        let lost = own_command::lost_override(recipe, overrides)
            .or_else(|| recipe::resume::lost_checkpoints(recipe));
        lost.map_or(Ok(()), |lost| Err(plan_refused(lost)))
    }

    /// The plan for so many ranks of a job that has come so far; an error says what the rules say.
    pub fn plan(&self, ranks: u64, reached: Reached) -> Result<Plan, String> {
        if let Some(plan) = &self.held {
            let fits = plan.outline.world_size == ranks
                && reached
                    .micro_limit
                    .is_none_or(|limit| plan.per_device_batch_size <= limit);
            let why = || "only the world that the job runs in is known".to_string();
            return fits.then(|| plan.clone()).ok_or_else(why);
        }
        let recipe = self.recipe.as_ref().map(|(_, recipe)| recipe);
        let recipe = recipe.ok_or_else(|| "the recipe was not read".to_string())?;
        let request = PlanRequest::gpus(ranks).after(reached);
        batch::plan(recipe, &request).map_err(|refused| words(&refused))
    }

    /// Whether there is such a plan.
    pub fn is_feasible(&mut self, ranks: u64, reached: Reached) -> bool {
        self.refusal(ranks, reached).is_none()
    }

    /// The first thing that is said against such a plan.
    pub fn refusal(&mut self, ranks: u64, reached: Reached) -> Option<String> {
        let world = (ranks, reached);
        if !self.refused.contains_key(&world) {
            let all = self.plan(ranks, reached).err();
            let first = all.map(|words| words.lines().next().unwrap_or_default().to_owned());
            self.refused.insert(world, first);
        }
        self.refused.get(&world).cloned().flatten()
    }
}

/// Refuses a job of which no objects can be made.
fn refuse_unmakeable(job: &TrainingJob, image: Option<&str>) -> Result<(), Refusal> {
    let name = job.name_any();
    let mut letters = name.chars();
    let label = letters
        .next()
        .is_some_and(|first| first.is_ascii_lowercase())
        && letters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        && !name.ends_with('-');
    if !label {
        return Err(plan_refused(format!(
            "`{name}` names no Service, which the job's pods need: make the job again under a name of \
             lower-case letters, digits and dashes that begins with a letter"
        )));
    }
    let made = build::pod(job, Seat::default(), image);
    made.map(|_| ()).map_err(|error| {
        plan_refused(format!(
            "spec.podTemplate makes no pod: {error}; compare it with `kubectl explain pod.spec`"
        ))
    })
}

/// How far a job has come.
pub fn reached(status: &TrainingJobStatus) -> Reached {
    Reached {
        global_batch_size: status.plan.as_ref().map(|plan| plan.global_batch_size),
        micro_limit: status.micro_limit,
        batch: status.checkpoint.as_ref().map(|pin| pin.batch),
    }
}

/// What the rules say against a plan, in one text.
fn words(refused: &Refused) -> String {
    let errors = refused
        .diagnostics
        .iter()
        .filter(|d| d.severity == Severity::Error);
    let lines: Vec<String> = errors
        .map(|d| format!("{}: {} ({})", d.rule, d.message, d.help))
        .collect();
    lines.join("\n")
}
