//! Everything between a recipe and the first generation: the model's shape, its weights, the
//! prepared data, the horizon. What can be refused is refused here, before anything is started.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::survey::survey;
use super::worlds::Reached;
use super::{LaunchError, Phase, RunDir, RunState, initial, model};
use crate::batch::{self, Plan, PlanRequest, Trainer};
use crate::durable::FileError;
use crate::job::Pin;
use crate::recipe::spec::Synthetic;
use crate::recipe::{Diagnostic, Recipe, Spec};
use crate::telemetry::now;
use crate::train::data::{self, Language, PrepareRequest, Progress};
use crate::train::{Setup, checkpoint, pin, rank};
use crate::words::count;

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
    fn stopped(&self) -> bool {
        self.signals.load(Ordering::Relaxed) > 0
    }
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

/// What the run in a directory has reached, where it is to go on: another limit for the ranks'
/// memory lets larger micro-batches be tried again.
pub fn reached(run: &RunDir, request: &Request) -> Result<Reached, LaunchError> {
    let state = match request.resume {
        true => run.state()?,
        false => None,
    };
    let Some(state) = state else {
        return Ok(Reached::default());
    };
    let before = run.setup()?.rank_memory;
    let reached = state.reached();
    Ok(Reached {
        micro_limit: reached.micro_limit.filter(|_| {
            request
                .rank_memory
                .is_none_or(|bytes| Some(bytes) == before)
        }),
        ..reached
    })
}

/// Plans a recipe for the built-in trainer on this machine. With the plan come the warnings.
pub fn plan(
    recipe: &Recipe,
    ranks: u64,
    reached: Reached,
) -> Result<(Plan, Vec<Diagnostic>), LaunchError> {
    let request = PlanRequest {
        trainer: Trainer::BuiltIn,
        micro_limit: reached.micro_limit,
        current_batch: reached.batch,
        ..PlanRequest::processes(ranks)
    };
    let examined = batch::examine(recipe, &survey(recipe, &base()?, request));
    let diagnostics = examined.diagnostics.clone();
    let plan = examined
        .finish()
        .map_err(|refused| LaunchError::Refused(Box::new(refused)))?;
    Ok((plan, diagnostics))
}

/// Where relative paths of a recipe start.
pub fn base() -> Result<PathBuf, LaunchError> {
    let directory = std::env::current_dir();
    Ok(directory.map_err(|error| FileError::from_io("use", Path::new("."), 0, error))?)
}

/// How long ranks of a dead launcher are waited for: they commit a checkpoint and leave.
const OLD_RANKS: Duration = Duration::from_secs(60);

/// Prepares a new run in the directory, or an old one to go on. The caller holds its lock.
pub fn prepare(
    run: &RunDir,
    recipe: &Recipe,
    plan: &Plan,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    if request.resume {
        return resume(run, recipe, request, progress);
    }
    let (mut setup, note) = setup(recipe, plan, request)?;
    let stopped = || request.stopped();
    let prepared = data(&setup, &Setup::data(run.path()), false, &stopped, progress)?;
    let manifest = &prepared.manifest;
    let samples = manifest.train.samples;
    setup.horizon = batch::horizon(&setup.spec, plan.global_batch_size, Some(samples));
    setup.budget_samples = setup
        .horizon
        .budget_samples
        .ok_or_else(|| LaunchError::Usage {
            message:
                "the recipe does not say how long to train: set budget.samples, budget.steps or \
                  budget.epochs"
                    .into(),
        })?;
    let mut notes: Vec<String> = note.into_iter().chain(manifest.notes.clone()).collect();
    // Rules about the data's length could not speak before it was counted.
    let counted = PlanRequest {
        data_samples: Some(samples),
        ..PlanRequest::processes(plan.world_size)
    };
    let examined = batch::examine(recipe, &counted);
    let known: Vec<&str> = plan.diagnostics.iter().map(|d| d.rule.as_str()).collect();
    let news = examined.diagnostics.iter();
    notes.extend(
        news.filter(|d| !known.contains(&d.rule.as_str()))
            .map(|d| format!("{}: {}; {}", d.rule, d.message, d.help)),
    );
    examined
        .finish()
        .map_err(|refused| LaunchError::Refused(Box::new(refused)))?;
    setup.entropy = manifest.synthetic.as_ref().and_then(entropy);
    run.write_setup(&setup)?;
    Ok(Prepared {
        setup,
        state: None,
        notes,
    })
}

/// The run, and a word about its initial weights where one is due.
fn setup(
    recipe: &Recipe,
    plan: &Plan,
    request: &Request,
) -> Result<(Setup, Option<String>), LaunchError> {
    let key = |path: &str| recipe.key(path).into_owned();
    let found = model::find(&recipe.spec, Trainer::BuiltIn, &key);
    let refused = |message| LaunchError::Model { message };
    if let Some(flaw) = found.flaws.first() {
        return Err(refused(format!("{}; {}", flaw.message, flaw.help)));
    }
    let shape = found
        .shape
        .ok_or_else(|| refused("the model's shape is not known".to_owned()))?;
    let initial = initial::weights(&recipe.spec.model, found.weights, &shape)?;
    let weights = initial.weights;
    let companions = weights.as_deref().map(companions).unwrap_or_default();
    let setup = Setup {
        job: uid(),
        name: recipe.spec.name.clone(),
        recipe_path: request.recipe_path.clone(),
        dialect: recipe.dialect,
        base: base()?,
        overrides: request.overrides.clone(),
        spec: recipe.spec.clone(),
        global_batch_size: plan.global_batch_size,
        model: shape,
        weights,
        companions,
        horizon: batch::Horizon::default(),
        budget_samples: 0,
        rank_memory: request.rank_memory,
        cores: request.cores,
        entropy: None,
    };
    Ok((setup, initial.note))
}

/// Prepares the data of a run into `directory`, or finds it there unchanged.
pub fn data(
    setup: &Setup,
    directory: &Path,
    resume: bool,
    stopped: data::Stopped<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<data::Prepared, LaunchError> {
    let spec = &setup.spec;
    Ok(data::prepare(
        &PrepareRequest {
            data: &spec.data,
            tokenizer: &spec.tokenizer,
            objective: spec.objective,
            seed: spec.seed,
            model: spec.model.path.as_deref(),
            vocab_size: Some(setup.model.vocab_size as u64),
            base: &setup.base,
            directory,
            resume,
            key: &|path| path.to_string(),
            stopped,
        },
        progress,
    )?)
}

/// The entropy of the synthetic language, the loss that nothing can beat.
fn entropy(synthetic: &Synthetic) -> Option<f64> {
    Language::new(synthetic, "synthetic")
        .ok()
        .map(|language| language.entropy())
}

/// Goes on with a run: the same recipe, its data unchanged, none of its old ranks alive.
fn resume(
    run: &RunDir,
    recipe: &Recipe,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    let mut setup = run.setup()?;
    let usage = |message: String| LaunchError::Usage { message };
    if let Some(key) = difference(&setup.spec, &recipe.spec) {
        return Err(usage(format!(
            "{} was launched with another `{key}`: resume it with the recipe and the overrides it \
             began with (`{} {}`), or start a new run with another --out",
            run.path().display(),
            setup.recipe_path.display(),
            setup.overrides.join(" ")
        )));
    }
    let mut state = run.state()?;
    if let Some(RunState {
        phase: Phase::Finished,
        ..
    }) = state
    {
        return Err(usage(format!(
            "{} is finished: there is nothing to resume",
            run.path().display()
        )));
    }
    if state.is_none() && run.holds_checkpoints()? {
        return Err(usage(format!(
            "{} holds checkpoints but no state.json, which says which of them count: put back a \
             copy of it, or start a new run with another --out",
            run.path().display()
        )));
    }
    wait_for_old_ranks(run, request)?;
    // What ranks committed after their launcher was gone counts too: nobody else was told.
    if let Some(state) = &mut state {
        state.pin = newest(run, state)?;
        state.micro_limit = reached(run, request)?.micro_limit;
    }
    match (
        state.as_ref().and_then(|state| state.pin.as_ref()),
        &setup.weights,
    ) {
        (Some(pin), _) => verify(run, pin)?,
        (None, Some(weights)) => initial::check(weights, &setup.model)?,
        (None, None) => {}
    }
    setup.rank_memory = request.rank_memory.or(setup.rank_memory);
    setup.cores = request.cores;
    let stopped = || request.stopped();
    let prepared = data(&setup, &Setup::data(run.path()), true, &stopped, progress)?;
    // Nothing is refused any more: a resume that is leaves the run as it was.
    run.write_setup(&setup)?;
    Ok(Prepared {
        setup,
        state,
        notes: prepared.manifest.notes,
    })
}

/// The newest checkpoint of the run's last generation, else the one that was pinned. Checkpoints
/// of earlier generations are not of the lineage beyond where the last one began.
fn newest(run: &RunDir, state: &RunState) -> Result<Option<Pin>, LaunchError> {
    let Some(last) = state.generations.last() else {
        return Ok(state.pin.clone());
    };
    let found = checkpoint::list(run.path())?
        .committed
        .into_iter()
        .filter(|committed| committed.generation == last.number)
        .max_by_key(|committed| committed.samples);
    let pinned = state.pin.as_ref().map_or(0, |pin| pin.samples);
    match found.filter(|committed| committed.samples > pinned) {
        Some(committed) => Ok(Some(pin::of(&committed, run.path())?)),
        None => Ok(state.pin.clone()),
    }
}

/// Verifies the checkpoint to go on from. When it cannot be used, the others of the run are named:
/// their weights are not lost.
fn verify(run: &RunDir, pin: &Pin) -> Result<(), LaunchError> {
    let Err(error) = pin::open(run.path(), pin) else {
        return Ok(());
    };
    let pinned = run.path().join(&pin.path);
    let others = checkpoint::list(run.path())?.committed;
    let newest = others.into_iter().rev().find(|other| other.path != pinned);
    let way_out = match newest {
        Some(other) => format!(
            "put back a copy, or start a new run from the weights of {} ({}) with model.path",
            other.path.display(),
            count(other.samples, "sample")
        ),
        None => "put back a copy; this run has no other checkpoint, so that without one it has to \
                 start anew"
            .into(),
    };
    Err(LaunchError::Pinned { error, way_out })
}

fn wait_for_old_ranks(run: &RunDir, request: &Request) -> Result<(), LaunchError> {
    let Some(last) = run.next_generation().checked_sub(1).filter(|n| *n > 0) else {
        return Ok(());
    };
    let since = Instant::now();
    while rank::any_alive(&run.generation(last)) {
        if request.stopped() {
            return Err(LaunchError::Stopped);
        }
        if since.elapsed() > OLD_RANKS {
            return Err(LaunchError::Usage {
                message: format!(
                    "ranks of generation {last} still run after {} s: stop them (their command \
                     line has `rank --run {}`), then resume",
                    OLD_RANKS.as_secs(),
                    run.path().display()
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The first top-level key in which two specs differ.
fn difference(one: &Spec, other: &Spec) -> Option<String> {
    let object = |spec: &Spec| match serde_json::to_value(spec) {
        Ok(serde_json::Value::Object(map)) => map,
        _ => serde_json::Map::new(),
    };
    let (one, other) = (object(one), object(other));
    one.iter()
        .find(|(key, value)| other.get(*key) != Some(value))
        .map(|(key, _)| key.clone())
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
