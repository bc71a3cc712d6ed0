//! What every rank of every generation of a run needs to know (`run.json`): written by the
//! launcher before anything starts. A resume may change how much memory a rank may use, or write
//! down what an older version did not, and nothing else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::TrainError;
use super::data::{Dataset, Part};
use crate::batch::Horizon;
use crate::engine::ModelConfig;
use crate::job::files;
use crate::recipe::{Dialect, Places, Recipe, Sources, Spec};
use crate::samples::{Order, OrderError};

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// Uid; ranks refuse strangers by it.
    pub job: String,
    /// The run's name.
    pub name: String,
    /// The recipe's file, as the user named it.
    pub recipe_path: PathBuf,
    /// The recipe's dialect.
    pub dialect: Dialect,
    /// Where relative paths of the recipe start.
    pub base: PathBuf,
    /// The overrides of the command line.
    pub overrides: Vec<String>,
    /// What the recipe says.
    pub spec: Spec,
    /// The global batch that the run keeps, samples; the norm test starts from it.
    pub global_batch_size: u64,
    /// The model's shape; `None` where the user's own program trains, which has a model of its own.
    #[serde(default)]
    pub model: Option<ModelConfig>,
    /// The keys of the `config.json` at the model's path, for the planner.
    pub model_config: Option<BTreeMap<String, Value>>,
    /// Where initial weights come from; `None`: seeded random.
    pub weights: Option<PathBuf>,
    /// Files of the tokenizer that every checkpoint carries along.
    pub companions: Vec<PathBuf>,
    /// Training samples of the prepared data.
    pub data_samples: Option<u64>,
    /// The fingerprint of the prepared data. Runs of older versions have none.
    #[serde(default)]
    pub data_fingerprint: Option<String>,
    /// Everything counted in samples.
    pub horizon: Horizon,
    /// Training ends after the first step that reaches it; `None` where the user's own program trains
    /// and the recipe does not say.
    #[serde(default)]
    pub budget_samples: Option<u64>,
    /// Bytes that a rank may use; `None`: no limit.
    pub rank_memory: Option<u64>,
    /// The loss that nothing can beat, nats per token, when the data is synthetic.
    pub entropy: Option<f64>,
}

impl Setup {
    /// The model's shape, for those who look after the built-in trainer's runs.
    pub fn model(&self) -> Result<&ModelConfig, TrainError> {
        self.model.as_ref().ok_or(TrainError::OwnProgram)
    }

    /// The budget, samples, likewise.
    pub fn budget(&self) -> Result<u64, TrainError> {
        self.budget_samples.ok_or(TrainError::OwnProgram)
    }

    /// The recipe again, for the planner; where its values stood is not kept.
    pub fn recipe(&self) -> Recipe {
        Recipe {
            dialect: self.dialect,
            detected: "read when the run was launched".into(),
            part: false,
            spec: self.spec.clone(),
            places: Places::new(),
            sources: Sources::default(),
            files: Default::default(),
            diagnostics: Vec::new(),
        }
    }

    /// The one global order of `samples` training samples.
    pub fn order(&self, samples: u64) -> Result<Order, OrderError> {
        let order = Order::new(self.spec.seed, samples, self.spec.data.shuffle)?;
        match self.horizon.epoch_samples {
            Some(length) => order.with_epoch_length(length),
            None => Ok(order),
        }
    }

    /// The prepared training data under a run's directory.
    pub fn training_data(&self, run: &Path) -> Result<Dataset, TrainError> {
        let directory = Setup::data(run);
        Dataset::open(&directory, Part::Train)?.ok_or(TrainError::NoData { directory })
    }

    /// The prepared data under a run's directory.
    pub fn data(run: &Path) -> PathBuf {
        run.join(files::DATA)
    }
}
