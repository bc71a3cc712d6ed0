//! Prepares a run between its recipe and its first generation: the plan, the model's weights, the
//! data, the horizon. Every refusal happens here, before a process starts.

use std::path::{Path, PathBuf};

use super::begin::{base, begin};
use super::request::data_of;
use super::{LaunchError, Planned, Prepared, Request, RunDir, initial, resume, survey, worlds};
use crate::data::{self, Language, PrepareRequest, Progress};
use crate::launch::external;
use crate::plan::{self, PlanRequest, Reached};
use crate::recipe::Recipe;
use crate::recipe::schema::spec::Synthetic;
use crate::train::Setup;

/// Plans a recipe for its trainer on this machine.
pub fn plan(
    recipe: &Recipe,
    ranks: u64,
    reached: Reached,
    rank_memory: Option<u64>,
) -> Result<Planned, LaunchError> {
    let request = worlds::request(ranks, reached, rank_memory);
    let (request, model) = survey::survey_with_model(recipe, &base()?, request);
    let examined = plan::examine(recipe, &request);
    let diagnostics = examined.diagnostics.clone();
    Ok(Planned {
        plan: examined.finish()?,
        diagnostics,
        request,
        model,
    })
}

/// Prepares a new run in the directory, or resumes an existing one. The caller holds the run lock.
pub fn prepare(
    run: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    for path in [run.path(), &request.recipe_path, &base()?] {
        if path.to_str().is_none() {
            return Err(LaunchError::Usage {
                message: format!(
                    "the path {} is not UTF-8, as run records must be; rename it, \
                     or use another directory",
                    path.display()
                ),
            });
        }
    }
    if recipe.spec.trainer.is_external() {
        return external::prepare(run, recipe, planned, request);
    }
    if request.resume {
        return resume::resume(run, recipe, planned, request, progress);
    }
    let (spec, found) = (&recipe.spec, &planned.model);
    let key = recipe.keys();
    let model = found.shape.clone().ok_or_else(|| LaunchError::Model {
        message: format!(
            "the model's shape is unknown; set a directory with a config.json, {}=DIRECTORY, or \
             set the shape in {}",
            key("model.path"),
            key("model.config")
        ),
    })?;
    let initial = initial::weights(&spec.model, found.weights.clone(), &model, &key)?;
    let data = data::prepare(
        &PrepareRequest {
            stopped: &|| request.stopped(),
            ..data_of(
                recipe,
                &key,
                Some(&model),
                &base()?,
                &Setup::data(run.path()),
            )
        },
        progress,
    )?;
    let manifest = data.manifest;
    let samples = manifest.train.samples;
    let news = judge(recipe, planned, samples)?;
    let setup = begin(recipe, planned, request, Some(samples))?;
    if setup.budget_samples.is_none() {
        return Err(LaunchError::Usage {
            message: format!(
                "the recipe does not say how long to train: set {}, {} or {}",
                key("budget.samples"),
                key("budget.steps"),
                key("budget.epochs")
            ),
        });
    }
    let companions = initial.weights.as_deref().map(companions);
    let setup = Setup {
        model: Some(model),
        weights: initial.weights,
        companions: companions.unwrap_or_default(),
        data_fingerprint: Some(manifest.fingerprint),
        rank_memory: request.rank_memory,
        entropy: manifest.synthetic.as_ref().and_then(entropy),
        ..setup
    };
    run.write_setup(&setup)?;
    Ok(Prepared {
        setup,
        state: None,
        external: None,
        notes: [initial.note]
            .into_iter()
            .flatten()
            .chain(manifest.notes)
            .chain(news)
            .collect(),
    })
}

/// Evaluates the rules that need the data's length, which is known only after counting. Returns
/// their warnings, one per line.
fn judge(recipe: &Recipe, planned: &Planned, samples: u64) -> Result<Vec<String>, LaunchError> {
    let counted = PlanRequest {
        data_samples: Some(samples),
        ..planned.request.clone()
    };
    let examined = plan::examine(recipe, &counted);
    let diagnostics = examined.diagnostics.iter();
    let news = diagnostics
        .filter(|diagnostic| !planned.diagnostics.contains(diagnostic))
        .map(|d| format!("{}: {}; {}", d.rule, d.message, d.help))
        .collect();
    examined.finish()?;
    Ok(news)
}

/// The entropy of the synthetic language, the lower bound of the loss.
fn entropy(synthetic: &Synthetic) -> Option<f64> {
    Language::new(synthetic, "synthetic")
        .ok()
        .map(|language| language.entropy())
}

/// Tokenizer files next to the weights.
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
