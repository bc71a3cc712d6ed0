//! Initial weights from a directory in Hugging Face's layout: `model.safetensors`, or shards with
//! `model.safetensors.index.json`; f32, bf16 or f16. They are read unit by unit, so that the model is never
//! in memory twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorInfo;
use serde::Deserialize;

use super::checkpoint::{self, Checkpoint, CheckpointError};
use super::tensor_file::{TensorFile, TensorFileError, readable};
use crate::engine::{Engine, EngineError, Layout, Parameter, Unit, UnitState};

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";
/// Most problems that a message names; it counts the rest.
const NAMED: usize = 8;

/// Why weights cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The directory has no weights in a supported format.
    #[error(
        "{} has no weights: neither {WHOLE} nor {INDEX} is there; {}",
        directory.display(),
        other.as_ref().map_or_else(
            || "put them there, or start from random ones (model.init=random)".into(),
            |other| match other.ends_with(".safetensors") {
                true => format!("{other} is one shard, and its index is missing"),
                false => format!("convert {other} to safetensors"),
            },
        )
    )]
    Absent {
        directory: PathBuf,
        /// A file that looks like weights, in another format or without its index.
        other: Option<String>,
    },
    /// The index does not fit the files.
    #[error("{} cannot be used: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    #[error(transparent)]
    File(#[from] TensorFileError),
    /// The directory is an incomplete or damaged checkpoint of Evenkeel.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Tensors are missing, unexpected or of other shapes.
    #[error("the weights in {} are not this model's: {}", directory.display(), listed(problems))]
    Mismatch {
        directory: PathBuf,
        /// One sentence for each tensor that does not fit.
        problems: Vec<String>,
    },
    /// The engine did not accept a unit.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// The weights of a directory, found but not yet read.
#[derive(Debug)]
pub struct Weights {
    directory: PathBuf,
    files: Vec<TensorFile>,
    /// Index of the file of each tensor.
    places: BTreeMap<String, usize>,
}

impl Weights {
    /// Finds the weights. A checkpoint of Evenkeel is fully verified first.
    pub fn open(directory: &Path) -> Result<Self, WeightsError> {
        if checkpoint::is_ours(directory) {
            Checkpoint::open(directory, None)?;
        }
        let mut weights = Self {
            directory: directory.to_path_buf(),
            files: Vec::new(),
            places: BTreeMap::new(),
        };
        // The order in which transformers searches.
        let whole = directory.join(WHOLE);
        let index = directory.join(INDEX);
        if whole.exists() {
            weights.add(&whole)?;
        } else if index.exists() {
            weights.add_shards(&index)?;
        } else {
            return Err(WeightsError::Absent {
                other: other_weights(directory),
                directory: weights.directory,
            });
        }
        Ok(weights)
    }

    fn add(&mut self, path: &Path) -> Result<(), WeightsError> {
        let file = TensorFile::open(path)?;
        let number = self.files.len();
        self.places
            .extend(file.names().into_iter().map(|name| (name, number)));
        self.files.push(file);
        Ok(())
    }

    fn add_shards(&mut self, index: &Path) -> Result<(), WeightsError> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let unusable = |reason: String| WeightsError::Index {
            path: index.to_path_buf(),
            reason,
        };
        let bytes = std::fs::read(index).map_err(|error| unusable(error.to_string()))?;
        let Index { weight_map } =
            serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        for name in &names {
            if name.contains('/') {
                return Err(unusable(format!("`{name}` is not the name of a file")));
            }
            self.add(&self.directory.join(name))?;
        }
        let absent = |(tensor, _): &(&String, &String)| !self.places.contains_key(*tensor);
        if let Some((tensor, file)) = weight_map.iter().find(absent) {
            return Err(unusable(format!("`{tensor}` is not in {file}")));
        }
        Ok(())
    }

    /// Checks that these are the weights of a model with this layout. Names every tensor that is missing,
    /// unexpected, or of another shape or an unsupported type.
    pub fn check(&self, layout: &Layout) -> Result<(), WeightsError> {
        let parameters: BTreeMap<&str, &Parameter> = (layout.units.iter())
            .flat_map(|unit| &unit.parameters)
            .map(|parameter| (parameter.name.as_str(), parameter))
            .collect();
        let mut problems = Vec::new();
        for (name, parameter) in &parameters {
            let Some((_, info)) = self.find(name) else {
                problems.push(match *name {
                    HEAD => format!(
                        "`{HEAD}` is missing (a tied head needs \
                         `tie_word_embeddings: true` in config.json)"
                    ),
                    _ => format!("`{name}` is missing"),
                });
                continue;
            };
            if info.shape != parameter.shape {
                problems.push(format!(
                    "`{name}` is {:?} where the model has {:?}",
                    info.shape, parameter.shape
                ));
            } else if !readable(info.dtype) {
                problems.push(format!(
                    "`{name}` is {}, and f32, bf16 and f16 are read",
                    info.dtype
                ));
            }
        }
        for name in self.places.keys() {
            let known = parameters.contains_key(name.as_str());
            // Old files contain the frequencies of the position embedding, which are computed here.
            if known || name.ends_with(".rotary_emb.inv_freq") {
                continue;
            }
            if name == HEAD && problems.is_empty() {
                if !self.same(HEAD, EMBEDDING)? {
                    problems.push(format!(
                        "`{HEAD}` is not `{EMBEDDING}`, but config.json ties them \
                         (`tie_word_embeddings: true`)"
                    ));
                }
            } else {
                problems.push(format!("`{name}` does not belong to the model"));
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(WeightsError::Mismatch {
            directory: self.directory.clone(),
            problems,
        })
    }

    /// Reads one unit as f32, with moments of zero: the state before the first step.
    pub fn load_unit(&self, unit: &Unit) -> Result<UnitState, WeightsError> {
        let mut parameters = vec![0.0; unit.len];
        for parameter in &unit.parameters {
            self.read(&parameter.name, &mut parameters[parameter.range()])?;
        }
        Ok(UnitState {
            parameters,
            exp_avg: vec![0.0; unit.len],
            exp_avg_sq: vec![0.0; unit.len],
        })
    }

    /// Checks the weights against an engine's layout and loads them into the engine.
    pub fn restore(&self, engine: &mut dyn Engine) -> Result<(), WeightsError> {
        let layout = engine.layout().clone();
        self.check(&layout)?;
        for (index, unit) in layout.units.iter().enumerate() {
            engine.import(index, &self.load_unit(unit)?)?;
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = self.files.get(*self.places.get(name)?)?;
        Some((file, file.info(name)?))
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<(), WeightsError> {
        let (file, info) = self.find(name).ok_or_else(|| WeightsError::Mismatch {
            directory: self.directory.clone(),
            problems: vec![format!("`{name}` is missing")],
        })?;
        Ok(file.read(info, out)?)
    }

    /// Whether two tensors hold the same values.
    fn same(&self, one: &str, other: &str) -> Result<bool, WeightsError> {
        let values = |name: &str| -> Result<Vec<f32>, WeightsError> {
            let shape = self.find(name).map_or(&[][..], |(_, info)| &info.shape);
            let mut values = vec![0.0; shape.iter().product()];
            self.read(name, &mut values)?;
            Ok(values)
        };
        Ok(values(one)? == values(other)?)
    }
}

/// A file that looks like unsupported weights: PyTorch's, TensorFlow's, JAX's or llama.cpp's, an adapter, or
/// a shard without the index.
fn other_weights(directory: &Path) -> Option<String> {
    const STARTS: [&str; 6] = [
        "pytorch_model",
        "model-",
        "consolidated",
        "tf_model",
        "flax_model",
        "adapter_model",
    ];
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| {
            STARTS.iter().any(|start| name.starts_with(start)) || name.ends_with(".gguf")
        })
        .min_by_key(|name| (name.ends_with(".safetensors"), name.clone()))
}

fn listed(problems: &[String]) -> String {
    let mut text = problems[..problems.len().min(NAMED)].join("; ");
    if problems.len() > NAMED {
        text += &format!("; and {} more", problems.len() - NAMED);
    }
    text
}

#[cfg(test)]
mod tests;
