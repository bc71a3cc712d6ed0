//! A run (`run.json`), which every rank of every generation reads; the launcher writes it before
//! anything starts. A resume may change only the memory limit of a rank and its kind of device, or add values
//! that an older version did not record.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TrainError;
use super::preferences::Loss;
use crate::data::Manifest;
use crate::engine::{Adapters, ModelConfig};
use crate::lifecycle::files;
use crate::plan::{self, AskedRunner, DeviceKind, DeviceMemory, Horizon, Plan, Runner};
use crate::recipe::schema::spec::{Determinism, Strategy};
use crate::recipe::{Dialect, Recipe, Sources, Spec, ValueSources};
use crate::samples::{Order, OrderError};
use crate::util::durable::{parse_json, read};

/// Version of the files of a run directory: `run.json`, `state.json` and the generation records. A change
/// that older files do not satisfy increases it.
pub const FORMAT: u64 = 2;

/// What is fixed of a run: its identity, what trains, and its horizon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`FORMAT`] of the version that created the run.
    pub format: u64,
    /// Unique id; ranks refuse connections with another one.
    pub job: String,
    pub name: String,
    /// Path of the recipe, as the user named it.
    pub recipe_path: PathBuf,
    pub dialect: Dialect,
    /// The directory that relative paths of the recipe refer to.
    pub base: PathBuf,
    /// URL of the bucket with its checkpoints, if its hosts share no directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket: Option<String>,
    /// The overrides of the command line.
    pub overrides: Vec<String>,
    /// The whole command after `evenkeel`, as typed in `base`; empty for a run of an older version or of a pod.
    #[serde(default)]
    pub command_line: Vec<String>,
    /// The parsed content of the recipe.
    pub spec: Spec,
    /// The run's global batch, in samples; the norm test starts from it.
    pub global_batch_size: u64,
    /// The keys of the `config.json` at the model's path, for the planner.
    pub model_config: Option<BTreeMap<String, Value>>,
    /// Memory of the machine's devices; `None` if it is unknown, or if a controller plans the worlds.
    #[serde(default)]
    pub device_memory: Option<DeviceMemory>,
    /// The devices of the ranks.
    #[serde(default)]
    pub device: DeviceKind,
    /// Training samples of the prepared data; `None` if an external trainer runs.
    pub data_samples: Option<u64>,
    /// Training horizon, warm-up and intervals in samples.
    pub horizon: Horizon,
    /// What the built-in trainer trains; `None`: an external trainer runs, which has its own model and data.
    #[serde(flatten)]
    pub built_in: Option<BuiltIn>,
}

/// What the built-in trainer trains, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BuiltIn {
    pub model: ModelConfig,
    /// Source of the initial weights; `None`: seeded random.
    pub weights: Option<PathBuf>,
    /// What is trained in place of the model's weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Adapters>,
    /// Folders with adapters that are merged into the model, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merged_adapters: Vec<PathBuf>,
    /// A folder with the adapters that are trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_adapter: Option<PathBuf>,
    /// Identifies the files of frozen weights: below adapters, and of a reference model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_digest: Option<String>,
    /// The name of the model below adapters, for other programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_model: Option<String>,
    /// Files of the tokenizer, copied into every checkpoint.
    pub companions: Vec<PathBuf>,
    /// The fingerprint of the prepared data. Runs of older versions have none.
    #[serde(default)]
    pub data_fingerprint: Option<String>,
    /// Bytes that a rank may use; `None`: no limit.
    pub rank_memory: Option<u64>,
    /// The lowest possible loss of synthetic data, nats per token.
    pub entropy: Option<f64>,
}

/// The one field that every version of `run.json` is read for first.
#[derive(Deserialize)]
struct Header {
    format: Option<u64>,
}

impl BuiltIn {
    /// The folders of the weights with which the run begins: of the model, and of adapters.
    pub fn weight_folders(&self) -> Vec<&Path> {
        let adapters = self.merged_adapters.iter().chain(&self.start_adapter);
        let all = self.weights.iter().chain(adapters);
        all.map(PathBuf::as_path).collect()
    }
}

impl BuiltIn {
    /// Reads the weights and the tokenizer from their copies in the run directory, which a host has that shares no disk with
    /// the launcher.
    fn take_copies(&mut self, run: &Path) {
        let folders = (self.weights.iter_mut())
            .chain(&mut self.merged_adapters)
            .chain(&mut self.start_adapter);
        for folder in folders {
            let copy = run.join(files::input_folder(folder));
            if copy.is_dir() {
                *folder = copy;
            }
        }
        for file in &mut self.companions {
            let copy = run.join(files::input(file));
            if copy.is_file() {
                *file = copy;
            }
        }
    }
}

/// ZeRO-1 and ZeRO-2 shard less than FSDP. The built-in trainer runs them as FSDP, which computes the same
/// numbers in less memory.
pub fn sharded(strategy: Strategy) -> bool {
    strategy != Strategy::Ddp
}

impl Run {
    /// Reads `run.json` of a run directory. A run of another format is refused before any other field is
    /// read.
    pub fn read(run: &Path) -> Result<Run, TrainError> {
        let path = run.join(files::RUN);
        let bytes = read(&path)?;
        let Header { format } = parse_json(&path, &bytes)?;
        // Files without it have format 1.
        let found = format.unwrap_or(1);
        if found != FORMAT {
            let run = run.to_path_buf();
            return Err(TrainError::Format { run, found });
        }
        let mut read: Run = parse_json(&path, &bytes)?;
        if let Some(built_in) = &mut read.built_in {
            built_in.take_copies(run);
        }
        let run = read;
        if run.built_in.is_none() && !run.spec.trainer.is_external() {
            // The error names the field that is missing or invalid.
            parse_json::<BuiltIn>(&path, &bytes)?;
        }
        Ok(run)
    }

    /// Whether a process without a state can become a rank of a world of this plan that trains. What a reference model says
    /// of the data is agreed on when a run starts or resumes.
    pub fn takes_processes(&self, plan: &Plan) -> bool {
        let is_whole = !sharded(plan.facts.strategy);
        self.built_in.is_some() && is_whole && Loss::of(&self.spec).is_none()
    }

    /// Processes that stand by on a machine to take the place of lost ranks of such a world.
    pub fn spares(&self, plan: &Plan) -> usize {
        match self.takes_processes(plan) {
            true => usize::try_from(self.spec.elasticity.spares).unwrap_or(0),
            false => 0,
        }
    }

    /// What the built-in trainer trains; an error if an external trainer runs.
    pub fn built_in(&self) -> Result<&BuiltIn, TrainError> {
        self.built_in.as_ref().ok_or(TrainError::OwnProgram)
    }

    /// Training ends after the first step that reaches it, samples; an error if the recipe has no budget, as only that of
    /// an external trainer may.
    pub fn budget(&self) -> Result<u64, TrainError> {
        self.horizon.budget_samples.ok_or(TrainError::OwnProgram)
    }

    /// Upper limit of the samples that training consumes.
    pub fn most_samples(&self) -> Result<u64, TrainError> {
        let budget = self.budget()?;
        Ok(plan::most_samples_of(
            &self.spec,
            self.global_batch_size,
            budget,
        ))
    }

    /// How many of the samples that are held out an evaluation takes.
    pub fn evaluated_samples(&self, held_out: u64) -> u64 {
        let wanted = self.spec.evaluation.samples.unwrap_or(held_out);
        wanted.min(held_out)
    }

    /// Whether the bits of the training must not depend on the world.
    pub fn is_deterministic_in_every_world(&self) -> bool {
        self.spec.determinism == Determinism::World
    }

    /// What runs every generation.
    pub fn runner(&self) -> Runner {
        let rank_memory = self.built_in.as_ref().and_then(|it| it.rank_memory);
        Runner::of(&self.spec, AskedRunner::Launch, self.device, rank_memory)
    }

    /// The recipe for the planner, without the places of its values.
    pub fn recipe(&self) -> Recipe {
        Recipe {
            dialect: self.dialect,
            version: None,
            detected: "read when the run was launched".into(),
            part: false,
            spec: self.spec.clone(),
            value_sources: ValueSources::new(),
            sources: Sources::default(),
            files: Default::default(),
            untrained: Vec::new(),
            accelerate: None,
            launch: None,
            variables: Default::default(),
            launcher_replaced: false,
            lacks_batch_arguments: false,
            diagnostics: Vec::new(),
        }
    }

    /// The global order of `samples` training samples.
    pub fn order(&self, samples: u64) -> Result<Order, OrderError> {
        let order = Order::new(self.spec.seed, samples, self.spec.data.shuffle)?;
        match self.horizon.epoch_samples {
            Some(length) => order.with_epoch_length(length),
            None => Ok(order),
        }
    }

    /// Whether prepared data are those of this run. Runs of older versions have no fingerprint to compare.
    pub fn prepared(&self, data: &Path) -> Result<bool, TrainError> {
        let fingerprint = self.built_in()?.data_fingerprint.as_ref();
        let Some(expected) = fingerprint else {
            return Ok(true);
        };
        Ok(Manifest::read(data)?.fingerprint == *expected)
    }

    /// The prepared data under a run's directory.
    pub fn data(run: &Path) -> PathBuf {
        run.join(files::DATA)
    }
}
