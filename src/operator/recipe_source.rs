//! The recipe of a TrainingJob. The caches have no text of it: it is read from the API server when it is planned.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::{Client, ResourceExt};
use xxhash_rust::xxh3::xxh3_128;

use super::conditions::Refusal;
use crate::api::condition::ConditionReason;
use crate::api::guarded::GuardedJob;
use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::api::{ConfigMapKey, TrainingJob};
use crate::external_trainer::launcher;
use crate::recipe::Recipe;

/// Most bytes that a status keeps of a recipe, as JSON: the caches of all jobs have them.
const MOST_KEPT: usize = 64 * 1024;

/// The recipe of a job with all texts.
pub struct Source {
    /// The job as the API server has it.
    pub job: TrainingJob,
    pub snapshot: RecipeSnapshot,
}

/// The job's recipe: that of its first plan, or a new one from its source. `None`: the API server has no such job, or
/// does not answer; it is reconciled again.
pub async fn source(client: &Client, job: &TrainingJob) -> Result<Option<Source>, Refusal> {
    let namespace = job.namespace().unwrap_or_default();
    let jobs: Api<GuardedJob> = Api::namespaced(client.clone(), &namespace);
    let full = jobs.get_opt(&job.name_any()).await.ok().flatten();
    let full = full.and_then(|full| full.decoded.ok());
    // The caches are about to have a newer one.
    let is_same = |full: &TrainingJob| {
        full.metadata.uid == job.metadata.uid && full.metadata.generation == job.metadata.generation
    };
    let Some(full) = full.filter(is_same) else {
        return Ok(None);
    };
    let snapshot = snapshot(client, &full, job).await?;
    Ok(Some(Source {
        job: full,
        snapshot,
    }))
}

/// `full` has the texts, `job` the newest status.
async fn snapshot(
    client: &Client,
    full: &TrainingJob,
    job: &TrainingJob,
) -> Result<RecipeSnapshot, Refusal> {
    if let Some(kept) = job
        .status
        .as_ref()
        .and_then(|status| status.recipe.as_ref())
    {
        let kept = RecipeSnapshot::of_job(&full.spec, kept);
        let hash = hash(&kept);
        return Ok(RecipeSnapshot { hash, ..kept });
    }
    let source = &full.spec.recipe;
    let namespace = job.namespace().unwrap_or_default();
    let (text, files) = match &source.config_map {
        Some(from) if source.inline.is_none() => held(client, &namespace, from).await?,
        _ => (source.inline.clone(), Vec::new()),
    };
    if text.is_none() && files.is_empty() && source.files.is_empty() {
        let message = "spec.recipe has no recipe: set inline, configMap or files";
        return Err(missing(message.into()));
    }
    let mut snapshot = RecipeSnapshot::of(source, text, &full.spec.overrides);
    snapshot.files.extend(files);
    snapshot.add_environment(&full.spec.trainer.env);
    let kept = serde_json::to_vec(&snapshot.kept(source)).unwrap_or_default();
    if kept.len() > MOST_KEPT {
        return Err(plan_refused(format!(
            "the recipe's ConfigMap and the variables that it may refer to have {} KiB, of which the status keeps at \
             most {} KiB: put the texts into spec.recipe (`inline` or `files`), or remove what is not read",
            kept.len().div_ceil(1024),
            MOST_KEPT / 1024
        )));
    }
    snapshot.hash = hash(&snapshot);
    Ok(snapshot)
}

/// The hash of everything that a recipe is read from.
fn hash(snapshot: &RecipeSnapshot) -> String {
    let texts = RecipeSnapshot {
        gpus: None,
        hash: String::new(),
        ..snapshot.clone()
    };
    let everything = serde_json::to_vec(&texts).unwrap_or_default();
    format!("{:032x}", xxh3_128(&everything))
}

/// The recipe's text from a ConfigMap, or the files to which its keys are mapped.
async fn held(
    client: &Client,
    namespace: &str,
    from: &ConfigMapKey,
) -> Result<(Option<String>, Vec<(String, String)>), Refusal> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let name = &from.name;
    let map = maps.get_opt(name).await;
    let map = map.map_err(|error| missing(format!("cannot read ConfigMap {name}: {error}")))?;
    let map = map.ok_or_else(|| {
        missing(format!(
            "ConfigMap {name} does not exist in namespace {namespace}; create it, the job waits for it"
        ))
    })?;
    let data = map.data.unwrap_or_default();
    let take = |key: &str, field: &str| {
        data.get(key).cloned().ok_or_else(|| {
            missing(format!(
                "ConfigMap {name} has no key {key}; add it, or name another key in \
                 spec.recipe.configMap.{field}"
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
    }
}

/// Refusal because no plan is valid for the job.
pub fn plan_refused(message: String) -> Refusal {
    Refusal {
        reason: ConditionReason::PlanRefused,
        message,
    }
}

/// Reads a recipe snapshot; the error contains all diagnostics.
pub fn read(job: &TrainingJob, snapshot: &RecipeSnapshot) -> Result<Recipe, Refusal> {
    let refused = |message: String| Refusal {
        reason: ConditionReason::RecipeRefused,
        message,
    };
    let command = &job.spec.trainer.command;
    let request = snapshot.request(job.spec.elasticity.remainder.into(), command);
    let request = request.map_err(|invalid| refused(invalid.to_string()))?;
    launcher::read(&request).map_err(|error| {
        let all = error.diagnostics.iter();
        let errors = all.filter(|d| d.is_error());
        let lines: Vec<String> = errors
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
