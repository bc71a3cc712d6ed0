//! A model that continues texts: a directory in Hugging Face's layout, a run's newest checkpoint, or a model of the hub.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checkpoints::Checkpoints;
use super::model::read_config;
use super::{LaunchError, RunDir};
use crate::checkpoint::{self, ADAPTER_CONFIG};
use crate::data::{BYTE, Dataset, Prompter};
use crate::engine::cpu::{CpuEngine, CpuOptions};
use crate::engine::cuda::driver::{Device, Driver};
use crate::engine::cuda::{CudaEngine, CudaOptions};
use crate::engine::{Adapters, ConfigError, Engine, EngineError, ModelConfig, layout};
use crate::hub::{Download, Hub, Received, Repo, Small};
use crate::plan::DeviceKind;
use crate::telemetry::report::Continuation;
use crate::train::TrainError;
use crate::train::adapter::Chain;
use crate::train::generate::{Sampling, continued};
use crate::train::run::{BuiltIn, Run};
use crate::train::weights::Weights;
use crate::util::durable::read_json;
use crate::util::shards::are_complete;

/// The name of token ids as texts.
const IDS: &str = "ids";
/// Most parameters of a model that continues texts for a report: reading it takes a second at most.
const MOST_PARAMETERS: u64 = 100_000_000;
/// Texts that it continues, the tokens of their beginnings, and the most that follow.
const TEXTS: u64 = 2;
const BEGIN: usize = 24;
const NEW: usize = 40;

/// A model in memory.
pub struct Generator {
    engine: Box<dyn Engine>,
    config: ModelConfig,
    /// The tokens that end a text.
    ends: Vec<u32>,
}

/// Where a model's files are.
pub struct Place {
    pub directory: PathBuf,
    /// The tokenizer, unless it is the directory's own: `byte`, `ids`, or a path.
    pub tokenizer: Option<String>,
    /// The model below, where the directory has adapters.
    pub below: Option<Below>,
}

/// A model below adapters.
#[derive(Debug, Clone)]
pub struct Below {
    pub(super) config: ModelConfig,
    /// `None`: drawn by the seed.
    pub(super) weights: Option<PathBuf>,
    seed: u64,
    /// Adapters that are merged into the weights, in order.
    pub(super) merged: Vec<PathBuf>,
    adapters: Adapters,
}

impl Below {
    /// Below the adapters of a run.
    fn of_run(run: &Run) -> Option<Below> {
        let built_in = run.built_in.as_ref()?;
        Some(Below {
            adapters: built_in.adapters.clone()?,
            config: built_in.model.clone(),
            weights: built_in.weights.as_ref().map(|it| run.base.join(it)),
            seed: run.spec.seed,
            merged: built_in.merged_adapters.clone(),
        })
    }

    /// Below the adapters of a folder; `None` if it has a model.
    fn of_folder(directory: &Path) -> Result<Option<Below>, LaunchError> {
        let chain = Chain::of(directory, Path::new("")).map_err(LaunchError::usage)?;
        let Some(chain) = chain else {
            return Ok(None);
        };
        let name = chain.model().unwrap_or_default();
        let local = Some(PathBuf::from(name)).filter(|path| path.is_dir());
        let cached = || Hub::of_process().snapshot_with(&Repo::model(name, None), "config.json");
        let Some(weights) = local.or_else(cached) else {
            return Err(LaunchError::usage(format!(
                "{} has adapters of `{name}`, which is neither a directory here nor in the hub's cache; run this in \
                 the folder that has it, or correct base_model_name_or_path",
                directory.display()
            )));
        };
        let settings = chain.settings(0);
        let mut settings = settings.map_err(|message| LaunchError::Model { message })?;
        let Some(adapters) = settings.pop() else {
            return Ok(None);
        };
        let folders = chain.folders.into_iter().map(|(directory, _)| directory);
        let merged = folders.take(settings.len()).collect();
        Ok(Some(Below {
            config: shape(&weights)?,
            weights: Some(weights),
            seed: 0,
            merged,
            adapters,
        }))
    }
}

impl Place {
    /// A directory with its own tokenizer.
    pub fn of_directory(directory: PathBuf) -> Result<Place, LaunchError> {
        Ok(Place {
            below: Below::of_folder(&directory)?,
            directory,
            tokenizer: None,
        })
    }

    /// The newest checkpoint of a run. One in a bucket is copied to the run directory.
    pub fn of_run(run_dir: &RunDir) -> Result<Place, LaunchError> {
        let (run, shown) = (run_dir.run()?, run_dir.path().display());
        if run.built_in.is_none() {
            return Err(LaunchError::usage(format!(
                "an external trainer has written the checkpoints of {shown}; give the directory of one"
            )));
        }
        let checkpoints = Checkpoints::of(run_dir, &run)?;
        let Some(newest) = checkpoints.latest()? else {
            return Err(LaunchError::usage(format!(
                "{shown} has no checkpoint yet; `evenkeel status {shown}` shows its progress"
            )));
        };
        Ok(Place::of_checkpoint(checkpoints.here(&newest)?, &run))
    }

    /// A checkpoint of a run.
    fn of_checkpoint(directory: PathBuf, run: &Run) -> Place {
        let named = run.spec.tokenizer.path.as_deref();
        let tokenizer = match named {
            _ if directory.join("tokenizer.json").is_file() => None,
            Some(BYTE) => Some(BYTE.to_owned()),
            _ => Some(IDS.to_owned()),
        };
        Place {
            directory,
            tokenizer,
            below: Below::of_run(run),
        }
    }
}

/// The snapshot of a model of the hub, after the download of what the cache lacks.
pub fn snapshot(
    repo: &Repo,
    stopped: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(Received),
) -> Result<PathBuf, LaunchError> {
    let mut hub = Hub::of_process();
    let cached = |hub: &Hub| hub.snapshot_with(repo, "config.json");
    if let Some(snapshot) = cached(&hub).filter(|snapshot| are_complete(snapshot)) {
        return Ok(snapshot);
    }
    let settings = hub.settings.clone();
    let download = Download::begin(&settings, repo, stopped)?;
    download.small(Small::All, progress)?;
    hub.begin(repo, download.commit());
    let snapshot = cached(&hub).ok_or_else(|| {
        LaunchError::usage(format!("{repo} has no config.json; name another model"))
    })?;
    // A family that is not known is refused before its weights are requested.
    shape(&snapshot)?;
    download.weights(progress)?;
    download.finish()?;
    Ok(snapshot)
}

/// Whether a directory has a model, or adapters of one.
pub fn is_model(directory: &Path) -> bool {
    ["config.json", ADAPTER_CONFIG]
        .iter()
        .any(|file| directory.join(file).is_file())
}

pub(super) fn shape(directory: &Path) -> Result<ModelConfig, LaunchError> {
    let parsed = ModelConfig::parse(&read_config(directory)?.into_iter().collect());
    let checked = parsed.and_then(|config| config.validate().map(|()| config));
    checked.map_err(|error: ConfigError| LaunchError::Model {
        message: format!(
            "{} cannot be used: {error}",
            directory.join("config.json").display()
        ),
    })
}

impl Generator {
    /// Reads a model into memory, for the CPU or for the first GPU, and its tokenizer.
    pub fn open(place: &Place, device: DeviceKind) -> Result<(Generator, Prompter), LaunchError> {
        let directory = &place.directory;
        let config = match &place.below {
            Some(below) => below.config.clone(),
            None => shape(directory)?,
        };
        let prompter = match place.tokenizer.as_deref() {
            None if !directory.join("tokenizer.json").is_file() => {
                return Err(LaunchError::usage(format!(
                    "{} has no tokenizer.json; add `--tokenizer DIRECTORY` with one, `--tokenizer byte`, or \
                     `--tokenizer ids` for token ids",
                    directory.display()
                )));
            }
            None => Prompter::open(directory)?,
            Some(BYTE) => Prompter::byte()?,
            Some(IDS) => Prompter::ids(config.vocab_size as u64)?,
            Some(path) => Prompter::open(Path::new(path))?,
        };
        let mut ends = prompter.ends().to_vec();
        let below = place.below.as_ref();
        let model = below
            .and_then(|below| below.weights.as_ref())
            .unwrap_or(directory);
        for path in [
            directory.join("generation_config.json"),
            model.join("config.json"),
        ] {
            if path.is_file() {
                ends.extend(end_tokens(&read_json(&path)?));
            }
        }
        let mut engine = engine(config.clone(), device, below).map_err(TrainError::from)?;
        match below {
            None => Weights::open(directory)?.restore(engine.as_mut())?,
            Some(below) => {
                if let Some(weights) = &below.weights {
                    let weights = Weights::open(weights)?.with_adapters(&below.merged)?;
                    weights.restore_frozen(engine.as_mut())?;
                }
                Weights::open_adapter(directory)?.restore(engine.as_mut())?;
            }
        }
        let generator = Generator {
            engine,
            config,
            ends,
        };
        Ok((generator, prompter))
    }

    /// The most tokens of a prompt with its continuation.
    pub fn positions(&self) -> usize {
        self.config.max_position_embeddings
    }

    /// Continues a prompt, and passes on the tokens so far with each new one; the text ends there if the receiver returns
    /// false. Returns the new tokens.
    pub fn continued(
        &mut self,
        prompt: &[u32],
        sampling: Sampling,
        receive: &mut dyn FnMut(&[u32]) -> bool,
    ) -> Result<Vec<u32>, LaunchError> {
        if prompt.is_empty() {
            let message = "the prompt has no tokens; give `--prompt TEXT`";
            return Err(LaunchError::usage(message.to_owned()));
        }
        let positions = self.positions();
        let Some(left) = positions.checked_sub(prompt.len()).filter(|&left| left > 0) else {
            return Err(LaunchError::usage(format!(
                "the prompt has {} tokens and the model {positions} positions; shorten it",
                prompt.len()
            )));
        };
        let sampling = Sampling {
            max_tokens: sampling.max_tokens.min(left),
            ..sampling
        };
        let engine = self.engine.as_mut();
        let tokens = continued(engine, prompt, &self.ends, sampling, receive);
        Ok(tokens.map_err(TrainError::from)?)
    }
}

/// `eos_token_id` of a configuration: an id, or a list of them.
fn end_tokens(config: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match &config["eos_token_id"] {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        value => id(value).into_iter().collect(),
    }
}

fn engine(
    config: ModelConfig,
    device: DeviceKind,
    below: Option<&Below>,
) -> Result<Box<dyn Engine>, EngineError> {
    let seed = below
        .filter(|below| below.weights.is_none())
        .map(|below| below.seed);
    let adapters = below.map(|below| below.adapters.clone());
    Ok(match device {
        DeviceKind::Cpu => {
            let options = CpuOptions {
                forward_only: true,
                adapters,
                ..CpuOptions::default()
            };
            Box::new(CpuEngine::new(config, options, None, seed)?)
        }
        DeviceKind::Cuda => {
            let options = CudaOptions {
                forward_only: true,
                adapters,
                ..CudaOptions::default()
            };
            let device = Driver::load().and_then(|driver| Device::open(&driver, 0));
            Box::new(CudaEngine::new(config, options, &device?, None, seed)?)
        }
    })
}

/// The first texts of a run's data, held out if there are such, as its newest checkpoint continues them. None for a model
/// that is too large, and where there is no checkpoint or no data.
pub fn continuations(run_dir: &RunDir, run: &Run) -> Result<Vec<Continuation>, LaunchError> {
    let is_small = |it: &BuiltIn| layout(&it.model).len() <= MOST_PARAMETERS;
    let data = Run::data(run_dir.path());
    // A report copies no checkpoint from a bucket: there is none here.
    let newest = checkpoint::latest(run_dir.path())?;
    let Some(newest) = newest.filter(|_| run.built_in.as_ref().is_some_and(is_small)) else {
        return Ok(Vec::new());
    };
    if !data.is_dir() {
        return Ok(Vec::new());
    }
    let dataset = match Dataset::evaluation(&data)? {
        Some(dataset) => dataset,
        None => Dataset::train(&data)?,
    };
    let place = Place::of_checkpoint(newest.path, run);
    let (mut generator, prompter) = Generator::open(&place, DeviceKind::Cpu)?;
    let mut found = Vec::new();
    for index in 0..TEXTS.min(dataset.len()) {
        // Of a pair, the chosen completion.
        let (rows, _) = dataset.rows(index)?;
        let sample = &rows[0];
        let tokens = &sample.tokens;
        // The prompt of an answer, or the beginning of a text. A token more must have a position.
        let begin = match sample.loss_mask.iter().skip(1).position(|&target| target) {
            None | Some(0) => BEGIN.min(tokens.len() / 2),
            Some(answer) => (answer + 1).min(generator.positions() - 1),
        };
        let (prompt, rest) = tokens.split_at(begin.max(1));
        let sampling = Sampling {
            max_tokens: NEW,
            temperature: 0.0,
            seed: 0,
        };
        let new = generator.continued(prompt, sampling, &mut |_| true)?;
        found.push(Continuation {
            begin: prompter.added(&[], prompt),
            model: prompter.added(prompt, &new),
            data: prompter.added(prompt, &rest[..rest.len().min(NEW)]),
        });
    }
    Ok(found)
}
