//! Everything between a recipe and the first generation: the plan, the model's weights, the
//! prepared data, the horizon. What can be refused is refused here, before anything is started.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::model::Found;
use super::{LaunchError, RunDir, RunState, initial, resume, survey, worlds};
use crate::batch::{self, Plan, PlanRequest, Reached};
use crate::durable::FileError;
use crate::engine::ModelConfig;
use crate::recipe::spec::Synthetic;
use crate::recipe::{Diagnostic, Recipe, Spec};
use crate::telemetry::now;
use crate::train::Setup;
use crate::train::data::{self, Language, PrepareRequest, Progress};

/// What the command line adds to the recipe.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The recipe's file.
    pub recipe_path: PathBuf,
    /// The overrides.
    pub overrides: Vec<String>,
    /// Bytes that a rank may use.
    pub rank_memory: Option<u64>,
    /// Cores to share out.
    pub cores: u64,
    /// Go on with what the directory holds.
    pub resume: bool,
    /// Signals so far: one stops the preparation.
    pub signals: Arc<AtomicUsize>,
}

impl Request {
    /// Whether a signal came.
    pub(super) fn stopped(&self) -> bool {
        self.signals.load(Ordering::Relaxed) > 0
    }
}

/// A recipe that may be launched: what every further step takes for granted.
pub struct Planned {
    /// The plan of the first generation.
    pub plan: Plan,
    /// The warnings that come with it.
    pub diagnostics: Vec<Diagnostic>,
    /// What was planned.
    request: PlanRequest,
    /// The model that it names.
    model: Found,
}

/// A run that is ready for its launcher.
pub struct Prepared {
    /// The run.
    pub setup: Setup,
    /// Where an earlier launcher left it.
    pub state: Option<RunState>,
    /// What people should know about it, a line each.
    pub notes: Vec<String>,
}

impl Prepared {
    /// The arithmetic of the batch that it begins or goes on with.
    pub fn proof(&self, planned: &Planned) -> String {
        let Some(state) = &self.state else {
            return planned.plan.proof.clone();
        };
        // Its old ranks may have committed more since it was planned.
        let reached = state.reached(&self.setup);
        let plan = worlds::plan(&self.setup, planned.plan.world_size, reached);
        plan.as_ref()
            .unwrap_or(&planned.plan)
            .proof_at(reached.batch)
    }
}

/// Plans a recipe for the built-in trainer on this machine.
pub fn plan(recipe: &Recipe, ranks: u64, reached: Reached) -> Result<Planned, LaunchError> {
    let request = worlds::request(ranks, reached);
    let (request, model) = survey::look(recipe, &base()?, request);
    let examined = batch::examine(recipe, &request);
    let diagnostics = examined.diagnostics.clone();
    Ok(Planned {
        plan: examined.finish()?,
        diagnostics,
        request,
        model,
    })
}

/// Where relative paths of a recipe start.
pub fn base() -> Result<PathBuf, LaunchError> {
    let directory = std::env::current_dir();
    Ok(directory.map_err(|error| FileError::from_io("use", Path::new("."), 0, error))?)
}

/// Prepares a new run in the directory, or an old one to go on. The caller holds its lock.
pub fn prepare(
    run: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    if request.resume {
        return resume::resume(run, recipe, request, progress);
    }
    let (spec, found) = (&recipe.spec, &planned.model);
    let model = found.shape.clone().ok_or_else(|| LaunchError::Model {
        message: "the model's shape is not known".to_owned(),
    })?;
    let initial = initial::weights(&spec.model, found.weights.clone(), &model)?;
    let base = base()?;
    let data = data::prepare(
        &PrepareRequest {
            stopped: &|| request.stopped(),
            ..data_of(spec, &model, &base, &Setup::data(run.path()))
        },
        progress,
    )?;
    let manifest = data.manifest;
    let samples = manifest.train.samples;
    let news = judge(recipe, planned, samples)?;
    let global_batch_size = planned.plan.global_batch_size;
    let horizon = batch::horizon(spec, global_batch_size, Some(samples));
    let budget_samples = horizon.budget_samples.ok_or_else(|| LaunchError::Usage {
        message: "the recipe does not say how long to train: set budget.samples, budget.steps or \
                  budget.epochs"
            .into(),
    })?;
    let companions = initial.weights.as_deref().map(companions);
    let setup = Setup {
        job: uid(),
        name: spec.name.clone(),
        recipe_path: request.recipe_path.clone(),
        dialect: recipe.dialect,
        base,
        overrides: request.overrides.clone(),
        spec: spec.clone(),
        global_batch_size,
        model,
        model_config: planned.request.model_config.clone(),
        weights: initial.weights,
        companions: companions.unwrap_or_default(),
        data_samples: Some(samples),
        horizon,
        budget_samples,
        rank_memory: request.rank_memory,
        entropy: manifest.synthetic.as_ref().and_then(entropy),
    };
    run.write_setup(&setup)?;
    Ok(Prepared {
        setup,
        state: None,
        notes: [initial.note]
            .into_iter()
            .flatten()
            .chain(manifest.notes)
            .chain(news)
            .collect(),
    })
}

/// The rules about the data's length, which could not speak before it was counted: what they say, a
/// line each.
fn judge(recipe: &Recipe, planned: &Planned, samples: u64) -> Result<Vec<String>, LaunchError> {
    let counted = PlanRequest {
        data_samples: Some(samples),
        ..planned.request.clone()
    };
    let examined = batch::examine(recipe, &counted);
    let said = examined.diagnostics.iter();
    let news = said
        .filter(|diagnostic| !planned.diagnostics.contains(diagnostic))
        .map(|d| format!("{}: {}; {}", d.rule, d.message, d.help))
        .collect();
    examined.finish()?;
    Ok(news)
}

/// The data of a run, to be prepared into `directory`.
pub fn data_of<'a>(
    spec: &'a Spec,
    model: &ModelConfig,
    base: &'a Path,
    directory: &'a Path,
) -> PrepareRequest<'a> {
    PrepareRequest {
        data: &spec.data,
        tokenizer: &spec.tokenizer,
        objective: spec.objective,
        seed: spec.seed,
        model: spec.model.path.as_deref(),
        vocab_size: Some(model.vocab_size as u64),
        base,
        directory,
        resume: false,
        key: &|path| path.to_string(),
        stopped: &|| false,
    }
}

/// The entropy of the synthetic language, the loss that nothing can beat.
fn entropy(synthetic: &Synthetic) -> Option<f64> {
    Language::new(synthetic, "synthetic")
        .ok()
        .map(|language| language.entropy())
}

/// Tokenizer files beside the weights.
fn companions(directory: &Path) -> Vec<PathBuf> {
    const NAMES: [&str; 5] = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "generation_config.json",
    ];
    NAMES
        .map(|name| directory.join(name))
        .into_iter()
        .filter(|path| path.is_file())
        .collect()
}

/// A name that no other run has: time and process, hashed.
fn uid() -> String {
    let seed = format!("{}-{}", now(), std::process::id());
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(seed.as_bytes()))
}
