//! Initial weights from a directory in Hugging Face's layout: `model.safetensors`, or shards with
//! `model.safetensors.index.json`; f32, bf16 or f16. They are read unit by unit, so that the model is never
//! in memory twice. The ranks find values that are not finite, since they read every value; a launch reads headers only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorInfo};

use super::adapter::AdapterConfig;
use crate::checkpoint::tensor_file::{TensorFile, TensorFileError, readable};
use crate::checkpoint::{self, ADAPTER_MODEL, Checkpoint, CheckpointError, Checksum, FileEntry};
use crate::engine::{
    Adapters, Engine, EngineError, Layout, Order, Parameter, Unit, UnitState, is_layer,
};
use crate::util::durable::FileError;
use crate::util::format::shortened;
use crate::util::input;
use crate::util::shards::{INDEX, Index, WHOLE};

/// Heads of all families.
const HEADS: [&str; 2] = ["lm_head.weight", "embed_out.weight"];
/// Ends of tensors of old files that are computed here: frequencies of the rotation, and masks of attention.
const COMPUTED: [&str; 5] = [
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
];
/// How the names of PyTorch's weights begin.
const PYTORCH: &str = "pytorch_model";
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
            |other| way_out(directory, other),
        )
    )]
    Absent {
        directory: PathBuf,
        /// A file that looks like weights, in another format or without its index.
        other: Option<String>,
    },
    /// The index does not fit the files.
    #[error("{} cannot be used: {reason}; download or copy the directory again", path.display())]
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
    /// Adapters that are added to the weights, in order.
    merged: Vec<Merged>,
}

impl Weights {
    /// Finds the weights. A checkpoint of Evenkeel is fully verified first.
    pub fn open(directory: &Path) -> Result<Self, WeightsError> {
        let mut weights = Self::verified(directory)?;
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

    /// Finds the adapters of a folder. A checkpoint of Evenkeel is fully verified first.
    pub fn open_adapter(directory: &Path) -> Result<Self, WeightsError> {
        let mut weights = Self::verified(directory)?;
        weights.add(&directory.join(ADAPTER_MODEL))?;
        Ok(weights)
    }

    /// Those of a directory, of which no file is known yet.
    fn verified(directory: &Path) -> Result<Self, WeightsError> {
        if checkpoint::is_evenkeel_checkpoint(directory) {
            Checkpoint::open(directory, None)?;
        }
        Ok(Self {
            directory: directory.to_path_buf(),
            files: Vec::new(),
            places: BTreeMap::new(),
            merged: Vec::new(),
        })
    }

    /// The weights with the adapters of these folders added to them.
    pub fn with_adapters(self, folders: &[PathBuf]) -> Result<Self, WeightsError> {
        let merged = folders.iter().map(|folder| Merged::open(folder));
        Ok(Self {
            merged: merged.collect::<Result<_, _>>()?,
            ..self
        })
    }

    /// The type of the first tensor.
    pub fn dtype(&self) -> Dtype {
        let first = self.places.keys().next().and_then(|name| self.find(name));
        first.map_or(Dtype::F32, |(_, _, info)| info.dtype)
    }

    /// Number of values of all tensors.
    pub fn parameters(&self) -> u64 {
        let tensors = self.places.keys().filter_map(|name| self.find(name));
        tensors
            .map(|(_, _, info)| info.shape.iter().product::<usize>() as u64)
            .sum()
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
        let unusable = |reason: String| WeightsError::Index {
            path: index.to_path_buf(),
            reason,
        };
        let listed = Index::read(index).map_err(|error| unusable(error.to_string()))?;
        for name in listed.files() {
            let shard = self.directory.join(name);
            if !shard.exists() {
                let name = shortened(name);
                return Err(unusable(format!("its shard {name} is missing")));
            }
            self.add(&shard)?;
        }
        let absent = |(tensor, _): &(&String, &String)| !self.places.contains_key(*tensor);
        if let Some((tensor, file)) = listed.weight_map.iter().find(absent) {
            let tensor = shortened(tensor);
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
            let Some((_, _, info)) = self.find(name) else {
                problems.push(match HEADS.contains(name) {
                    true => format!(
                        "`{name}` is missing (a tied head needs \
                         `tie_word_embeddings: true` in config.json)"
                    ),
                    false => format!("`{name}` is missing"),
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
        let known: BTreeSet<&str> = (parameters.keys())
            .flat_map(|name| [*name, of_base_model(name)])
            .collect();
        let embedding = layout
            .units
            .first()
            .and_then(|unit| unit.parameters.first());
        for name in self.places.keys() {
            let is_computed = COMPUTED.iter().any(|end| name.ends_with(end));
            if known.contains(name.as_str()) || is_computed {
                continue;
            }
            let embedding = embedding.map(|embedding| embedding.name.as_str());
            let tied = embedding.filter(|_| HEADS.contains(&name.as_str()) && problems.is_empty());
            if let Some(embedding) = tied {
                if !self.same(name, embedding)? {
                    problems.push(format!(
                        "`{name}` is not `{embedding}`, but config.json ties them \
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

    /// Reads the parameters of one unit as f32, in the order of its layout.
    pub fn load_unit(&self, unit: &Unit) -> Result<Vec<f32>, WeightsError> {
        let mut parameters = vec![0.0; unit.len];
        self.fill(unit, &mut parameters)?;
        Ok(parameters)
    }

    fn fill(&self, unit: &Unit, parameters: &mut [f32]) -> Result<(), WeightsError> {
        for parameter in &unit.parameters {
            self.read(&parameter.name, &mut parameters[parameter.range()])?;
        }
        for merged in &self.merged {
            merged.add_to(unit, parameters)?;
        }
        Ok(())
    }

    /// Checks the weights against an engine's layout and loads them into the engine, with moments of zero.
    pub fn restore(&self, engine: &mut dyn Engine) -> Result<(), WeightsError> {
        let layout = engine.layout().clone();
        self.check(&layout)?;
        // One buffer for all units: the kernel clears new memory, which takes longer than the conversion. It never clears
        // that of the moments, which are only read.
        let mut state = UnitState::default();
        for (index, unit) in layout.units.iter().enumerate() {
            state.parameters.resize(unit.len, 0.0);
            self.fill(unit, &mut state.parameters)?;
            state.exp_avg = vec![0.0; unit.len];
            state.exp_avg_sq = vec![0.0; unit.len];
            engine.import(index, &state)?;
        }
        Ok(())
    }

    /// Checks the weights against those below an engine's adapters and loads them into the engine.
    pub fn restore_frozen(&self, engine: &mut dyn Engine) -> Result<(), WeightsError> {
        let layout = engine.frozen().cloned().unwrap_or_default();
        self.check(&layout)?;
        let mut parameters = Vec::new();
        for (index, unit) in layout.units.iter().enumerate() {
            parameters.resize(unit.len, 0.0);
            self.fill(unit, &mut parameters)?;
            engine.import_frozen(index, &parameters)?;
        }
        Ok(())
    }

    /// The file of a tensor, and its name and shape there.
    fn find<'n>(&self, name: &'n str) -> Option<(&TensorFile, &'n str, &TensorInfo)> {
        let names = [name, of_base_model(name)];
        let name = names
            .into_iter()
            .find(|name| self.places.contains_key(*name))?;
        let file = self.files.get(self.places[name])?;
        Some((file, name, file.info(name)?))
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<(), WeightsError> {
        let (file, name, _) = self.find(name).ok_or_else(|| WeightsError::Mismatch {
            directory: self.directory.clone(),
            problems: vec![format!("`{name}` is missing")],
        })?;
        Ok(file.read(name, out)?)
    }

    /// Whether two tensors hold the same values.
    fn same(&self, one: &str, other: &str) -> Result<bool, WeightsError> {
        let values = |name: &str| -> Result<Vec<f32>, WeightsError> {
            let shape = self.find(name).map_or(&[][..], |(_, _, info)| &info.shape);
            let mut values = vec![0.0; shape.iter().product()];
            self.read(name, &mut values)?;
            Ok(values)
        };
        Ok(values(one)? == values(other)?)
    }
}

/// The files of weights of a directory, by name.
fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = std::fs::read_dir(directory)
        .map_err(|error| FileError::from_io("read", directory, 0, error))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors");
    let mut files: Vec<PathBuf> = paths.filter(is_weights).collect();
    files.sort();
    Ok(files)
}

/// Identifies the weights in these directories by the sizes and the content of their files.
pub fn digest(directories: &[&Path]) -> Result<String, FileError> {
    let mut paths = Vec::new();
    for directory in directories {
        paths.extend(weight_files(directory)?);
    }
    let entry = |path: &PathBuf| {
        let file = input::open(path).and_then(FileEntry::of_stream);
        file.map_err(|error| FileError::from_io("read", path, 0, error))
    };
    let entries: Result<Vec<FileEntry>, FileError> = paths.par_iter().map(entry).collect();
    let texts = entries?.into_iter();
    let texts = texts.map(|entry| format!("{} {}\n", entry.bytes, entry.xxh3_128));
    Ok(Checksum::of(texts.collect::<String>().as_bytes()).to_string())
}

/// The adapter of a folder, which is added to the weights.
#[derive(Debug)]
struct Merged {
    weights: Weights,
    settings: Adapters,
}

impl Merged {
    fn open(directory: &Path) -> Result<Merged, WeightsError> {
        let weights = Weights::open_adapter(directory)?;
        let unusable = |problem: String| WeightsError::Mismatch {
            directory: directory.to_path_buf(),
            problems: vec![problem],
        };
        let config = AdapterConfig::read(directory).map_err(|error| unusable(error.to_string()))?;
        let settings = config.unwrap_or_default().settings(0).map_err(unusable)?;
        Ok(Merged { weights, settings })
    }

    /// W += scale · B · A, in the order of files. Modules that were trained whole take the place of W.
    fn add_to(&self, unit: &Unit, parameters: &mut [f32]) -> Result<(), WeightsError> {
        for parameter in &unit.parameters {
            let module = parameter.module();
            if self.settings.saves(module) {
                let name = format!("base_model.model.{}", parameter.name);
                self.weights
                    .read(&name, &mut parameters[parameter.range()])?;
                continue;
            }
            if !is_layer(parameter.role) {
                continue;
            }
            let [a, b] = ["lora_A", "lora_B"]
                .map(|matrix| format!("base_model.model.{module}.{matrix}.weight"));
            let Some((_, _, info)) = self.weights.find(&a) else {
                continue;
            };
            let [rank, inputs] = info.shape[..] else {
                continue;
            };
            let outputs = parameter.len() / inputs.max(1);
            let mut of_a = vec![0.0; rank * inputs];
            let mut of_b = vec![0.0; outputs * rank];
            self.weights.read(&a, &mut of_a)?;
            self.weights.read(&b, &mut of_b)?;
            let scale = self.settings.scale();
            let is_transposed = parameter.order == Order::Transposed;
            let weights = &mut parameters[parameter.range()];
            let width = if is_transposed { outputs } else { inputs };
            weights
                .par_chunks_mut(width)
                .enumerate()
                .for_each(|(row, weights)| {
                    for (column, weight) in weights.iter_mut().enumerate() {
                        let (output, input) = match is_transposed {
                            true => (column, row),
                            false => (row, column),
                        };
                        let terms =
                            (0..rank).map(|k| of_b[output * rank + k] * of_a[k * inputs + input]);
                        *weight += scale * terms.sum::<f32>();
                    }
                });
        }
        Ok(())
    }
}

/// A parameter's name in files of the model without its head, as the published GPT-2s are: `wte.weight` for
/// `transformer.wte.weight`.
fn of_base_model(name: &str) -> &str {
    name.split_once('.').map_or(name, |(_, rest)| rest)
}

/// A file that looks like unsupported weights: PyTorch's, TensorFlow's, JAX's or llama.cpp's, an adapter, or
/// a shard without the index.
fn other_weights(directory: &Path) -> Option<String> {
    const STARTS: [&str; 6] = [
        PYTORCH,
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

/// What makes a file that looks like weights usable. The command adds safetensors beside `pytorch_model.bin`, and leaves
/// `config.json` as it is, which may be a link to a file of the hub's cache.
fn way_out(directory: &Path, other: &str) -> String {
    if other.ends_with(".safetensors") {
        return format!(
            "{other} is one shard, and its index is missing; download or copy the directory again"
        );
    }
    if !other.starts_with(PYTORCH) {
        return format!("convert {other} to safetensors");
    }
    let path = directory.display().to_string().replace('\'', "'\\''");
    format!(
        "convert {other}:\n  python -c 'import sys; from transformers import AutoModelForCausalLM as M; \
         M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1] + \"/converted\")' '{path}' && \
         mv '{path}'/converted/*.safetensors* '{path}'"
    )
}

fn listed(problems: &[String]) -> String {
    let mut text = problems[..problems.len().min(NAMED)].join("; ");
    if problems.len() > NAMED {
        text += &format!("; and {} more", problems.len() - NAMED);
    }
    text
}

#[cfg(test)]
mod tests {
    //! Weights written with the safetensors crate, and checkpoints of Evenkeel.

    use std::collections::HashMap;
    use std::os::unix::fs::FileExt;

    use half::{bf16, f16};
    use safetensors::tensor::{Dtype, TensorView};
    use tempfile::TempDir;

    use super::*;
    use crate::engine::cpu::{CpuEngine, CpuOptions};
    use crate::engine::{ModelConfig, layout};

    fn config() -> ModelConfig {
        ModelConfig {
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 4,
            vocab_size: 20,
            max_position_embeddings: 32,
            norm_eps: 1e-5,
            rope_theta: 10000.0,
            ..ModelConfig::default()
        }
    }

    fn tied() -> ModelConfig {
        ModelConfig {
            tie_word_embeddings: true,
            ..config()
        }
    }

    /// A tensor to write.
    #[derive(Clone)]
    struct Tensor {
        dtype: Dtype,
        shape: Vec<usize>,
        values: Vec<f32>,
    }

    type Tensors = BTreeMap<String, Tensor>;

    /// Every tensor of a model, with values that all three types represent exactly.
    fn tensors(config: &ModelConfig, dtype: Dtype) -> Tensors {
        let mut tensors = Tensors::new();
        for parameter in layout(config)
            .units
            .iter()
            .flat_map(|unit| &unit.parameters)
        {
            let start = parameter.offset + tensors.len();
            let value = |i: usize| ((i * 37 + start) % 128) as f32 / 64.0 - 1.0;
            let tensor = Tensor {
                dtype,
                shape: parameter.shape.clone(),
                values: (0..parameter.len()).map(value).collect(),
            };
            tensors.insert(parameter.name.clone(), tensor);
        }
        tensors
    }

    fn bytes(tensor: &Tensor) -> Vec<u8> {
        let values = tensor.values.iter();
        match tensor.dtype {
            Dtype::BF16 => values
                .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
                .collect(),
            Dtype::F16 => values
                .flat_map(|v| f16::from_f32(*v).to_le_bytes())
                .collect(),
            Dtype::F64 => values.flat_map(|v| f64::from(*v).to_le_bytes()).collect(),
            _ => values.flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    fn save(path: &Path, tensors: &Tensors) {
        let data: Vec<(&String, &Tensor, Vec<u8>)> = (tensors.iter())
            .map(|(name, tensor)| (name, tensor, bytes(tensor)))
            .collect();
        let views: HashMap<&String, TensorView> = (data.iter())
            .map(|(name, tensor, bytes)| {
                let view = TensorView::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
                (*name, view)
            })
            .collect();
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    /// A directory with one file of tensors.
    fn whole(tensors: &Tensors) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        save(&directory.path().join(WHOLE), tensors);
        directory
    }

    /// A directory with two shards that cut through the units.
    fn sharded(tensors: &Tensors) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        let mut map = BTreeMap::new();
        for half in [0, 1] {
            let file = format!("model-{:05}-of-00002.safetensors", half + 1);
            let part: Tensors = (tensors.iter().enumerate())
                .filter(|(i, _)| i % 2 == half)
                .map(|(_, (name, tensor))| (name.clone(), tensor.clone()))
                .collect();
            save(&directory.path().join(&file), &part);
            map.extend(part.into_keys().map(|name| (name, file.clone())));
        }
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        std::fs::write(directory.path().join(INDEX), index.to_string()).unwrap();
        directory
    }

    fn assert_loads(directory: &Path, config: &ModelConfig, tensors: &Tensors) {
        let layout = layout(config);
        let weights = Weights::open(directory).unwrap();
        weights.check(&layout).unwrap();
        for unit in &layout.units {
            let parameters = weights.load_unit(unit).unwrap();
            for parameter in &unit.parameters {
                let read = &parameters[parameter.range()];
                assert!(
                    read == tensors[&parameter.name].values,
                    "{}",
                    parameter.name
                );
            }
        }
    }

    /// The error about a directory, without its name.
    fn refusal(directory: &Path, config: &ModelConfig) -> String {
        let checked = Weights::open(directory).and_then(|weights| weights.check(&layout(config)));
        let message = checked.unwrap_err().to_string();
        message.replace(&directory.display().to_string(), "[directory]")
    }

    #[test]
    fn a_digest_is_of_every_byte_of_large_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join(WHOLE)).unwrap();
        file.set_len((1 << 30) + 1).unwrap();
        let before = digest(&[folder.path()]).unwrap();
        file.write_all_at(&[1], 1 << 20).unwrap();
        assert_ne!(digest(&[folder.path()]).unwrap(), before);
    }

    #[test]
    fn all_float_types_are_read_as_f32_from_one_file_or_shards() {
        for config in [config(), tied()] {
            for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
                let tensors = tensors(&config, dtype);
                assert_loads(whole(&tensors).path(), &config, &tensors);
                assert_loads(sharded(&tensors).path(), &config, &tensors);
            }
        }
    }

    /// As the published GPT-2s are.
    #[test]
    fn files_of_a_model_without_its_head_are_read_with_their_masks() {
        let config = serde_json::json!({
            "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 20, "n_positions": 4,
            "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
        });
        let config = ModelConfig::from_json(&config).unwrap();
        let named = tensors(&config, Dtype::F32);
        let mut bare: Tensors = (named.iter())
            .map(|(name, tensor)| (of_base_model(name).to_owned(), tensor.clone()))
            .collect();
        let mask = Tensor {
            dtype: Dtype::F32,
            shape: vec![1, 1, 4, 4],
            values: vec![1.0; 16],
        };
        bare.insert("h.0.attn.bias".to_owned(), mask);
        assert!(bare.contains_key("wte.weight") && !named.contains_key("wte.weight"));
        assert_loads(whole(&named).path(), &config, &named);
        assert_loads(whole(&bare).path(), &config, &named);
        bare.remove("h.1.ln_2.bias");
        let refused = refusal(whole(&bare).path(), &config);
        assert!(
            refused.ends_with("`transformer.h.1.ln_2.bias` is missing"),
            "{refused}"
        );
    }

    #[test]
    fn conversion_continues_past_one_piece() {
        let rows = (1 << 20) / 8 + 3;
        let config = ModelConfig {
            vocab_size: rows,
            ..tied()
        };
        let tensors = tensors(&config, Dtype::BF16);
        assert_loads(whole(&tensors).path(), &config, &tensors);
    }

    #[test]
    fn a_checkpoint_is_read_and_a_damaged_one_refused() {
        use crate::checkpoint::{Contents, Target, Writer, commit};

        let layout = layout(&config());
        let written = tensors(&config(), Dtype::F32);
        let run = tempfile::tempdir().unwrap();
        let target = Target {
            run_directory: run.path().to_path_buf(),
            bucket: None,
            generation: 1,
            step: 1,
        };
        let from = whole(&written);
        let weights = Weights::open(from.path()).unwrap();
        let writer = Writer::begin(&target, &layout, 0, 1);
        for (index, unit) in layout.units.iter().enumerate() {
            let state = UnitState {
                parameters: weights.load_unit(unit).unwrap(),
                exp_avg: vec![0.0; unit.len],
                exp_avg_sq: vec![0.0; unit.len],
            };
            writer.write_unit(index, state);
        }
        let parts = [writer.finish().unwrap()];
        let partial = refusal(&target.partial(), &config());
        assert!(
            partial.ends_with("its writing was never finished"),
            "{partial}"
        );
        let contents = Contents {
            layout: &layout,
            samples: 0,
            state: &serde_json::Value::Null,
            config: &config().to_json(),
            companions: &[],
            chat_template: None,
        };
        let committed = commit(&target, &parts, contents).unwrap();
        assert_loads(&committed.path, &config(), &written);

        let file = committed.path.join("model-00002-of-00004.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let message = refusal(&committed.path, &config());
        assert!(
            message.contains("is damaged: model-00002-of-00004.safetensors"),
            "{message}"
        );
    }

    #[test]
    fn values_that_are_not_finite_are_counted_by_tensor() {
        let name = "model.layers.1.mlp.up_proj.weight";
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let mut tensors = tensors(&config(), dtype);
            let values = &mut tensors.get_mut(name).unwrap().values;
            (values[3], values[7], values[90]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
            let directory = whole(&tensors);
            let mut engine = CpuEngine::new(config(), CpuOptions::default(), None, None).unwrap();
            let weights = Weights::open(directory.path()).unwrap();
            let message = weights.restore(&mut engine).unwrap_err().to_string();
            let message = message.replace(&directory.path().display().to_string(), "[directory]");
            insta::allow_duplicates! {
                insta::assert_snapshot!(message, @"[directory]/model.safetensors: 3 of the 96 values of `model.layers.1.mlp.up_proj.weight` are NaN or infinite; download or copy it again, or name other weights");
            }
        }
    }

    /// A file with this header, and as many bytes of data as it needs to look right.
    fn hostile(header: &str, data: usize) -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.resize(bytes.len() + data, 0);
        std::fs::write(directory.path().join(WHOLE), bytes).unwrap();
        directory
    }

    #[test]
    fn hostile_headers_are_refused_in_a_short_line() {
        let tensor = |name: &str, shape: &str, start: u64, end: u64| {
            format!(
                r#""{name}": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [{start}, {end}]}}"#
            )
        };
        // Eight tensors whose sizes add up to nearly 2^64 bytes, so that the length of the file overflows.
        let huge = 1 << 61;
        let sizes = (0..8).map(|n: u64| {
            let elements = if n == 7 { huge / 4 - 1 } else { huge / 4 };
            tensor(
                &format!("t{n}"),
                &elements.to_string(),
                n * huge,
                n * huge + 4 * elements,
            )
        });
        let sizes: Vec<String> = sizes.collect();
        let one = |tensor: String| format!("{{{tensor}}}");
        let long = "x".repeat(100_000);
        let refusals = [
            (one(tensor("a", "2", 0, 1 << 40)), 8),
            (one(tensor("a", "2", 8, 16)), 16),
            (
                format!(
                    "{{{}, {}}}",
                    tensor("a", "2", 0, 8),
                    tensor("b", "2", 4, 12)
                ),
                12,
            ),
            (one(tensor("a", "4294967296, 4294967296", 0, 8)), 8),
            (one(tensor("a", "2", 8, 0)), 8),
            (format!("{{{}}}", sizes.join(", ")), 8),
            (one(tensor(&long, "2", 0, 8)), 8),
            (one(tensor("a", &["1"; 50_000].join(", "), 0, 4)), 4),
            (one(tensor("\\u001b[2J", "2", 0, 8)), 8),
            (one(tensor(&long, "2", 8, 16)), 16),
        ]
        .map(|(header, data)| refusal(hostile(&header, data).path(), &config()));
        assert!(refusals.iter().all(|refusal| refusal.len() < 600));
        insta::assert_snapshot!(refusals.join("\n"));
    }

    #[test]
    fn mismatched_tensors_are_named() {
        let mut odd = tensors(&config(), Dtype::F32);
        odd.remove("lm_head.weight");
        odd.remove("model.layers.1.mlp.up_proj.weight");
        odd.get_mut("model.norm.weight").unwrap().dtype = Dtype::F64;
        let transposed = odd.get_mut("model.layers.0.mlp.down_proj.weight").unwrap();
        transposed.shape.reverse();
        let extra = odd["model.layers.0.input_layernorm.weight"].clone();
        odd.insert("model.layers.0.self_attn.q_proj.bias".into(), extra.clone());
        odd.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), extra);

        let mut two_heads = tensors(&config(), Dtype::BF16);
        let embedding = two_heads["model.embed_tokens.weight"].clone();
        let other_head = refusal(whole(&two_heads).path(), &tied());
        // A written head that equals the embedding is not unexpected.
        two_heads.insert("lm_head.weight".to_owned(), embedding);
        let weights = whole(&two_heads);
        Weights::open(weights.path())
            .unwrap()
            .check(&layout(&tied()))
            .unwrap();

        let deeper = ModelConfig {
            num_hidden_layers: 4,
            ..config()
        };
        insta::assert_snapshot!(
            [
                refusal(whole(&odd).path(), &config()),
                other_head,
                refusal(whole(&two_heads).path(), &deeper),
            ]
            .join("\n")
        );
    }

    #[test]
    fn directories_without_complete_weights_are_refused() {
        let good = tensors(&config(), Dtype::F32);
        let broken = |change: &dyn Fn(&Path)| {
            let directory = sharded(&good);
            change(directory.path());
            refusal(directory.path(), &config())
        };
        let shard = "model-00002-of-00002.safetensors";
        let refusals = [
            broken(&|path| {
                std::fs::remove_file(path.join(INDEX)).unwrap();
            }),
            broken(&|path| {
                std::fs::remove_file(path.join(INDEX)).unwrap();
                std::fs::write(path.join("pytorch_model.bin"), "").unwrap();
            }),
            broken(&|path| std::fs::write(path.join(INDEX), "{}").unwrap()),
            broken(&|path| {
                let index = r#"{"weight_map": {"x": "../model.safetensors"}}"#;
                std::fs::write(path.join(INDEX), index).unwrap();
            }),
            broken(&|path| {
                let index = r#"{"weight_map": {"x": "model-00001-of-00002.safetensors"}}"#;
                std::fs::write(path.join(INDEX), index).unwrap();
            }),
            broken(&|path| std::fs::remove_file(path.join(shard)).unwrap()),
            broken(&|path| std::fs::write(path.join(shard), "short").unwrap()),
            broken(&|path| std::fs::write(path.join(shard), "not tensors at all").unwrap()),
            broken(&|path| {
                let file = std::fs::File::options().write(true).open(path.join(shard));
                file.unwrap().set_len(2000).unwrap();
            }),
            broken(&|path| {
                let mut bytes = std::fs::read(path.join(shard)).unwrap();
                bytes[8] = b'}';
                std::fs::write(path.join(shard), bytes).unwrap();
            }),
        ];
        insta::assert_snapshot!(refusals.join("\n"));
    }

    mod transformers {
        //! Directories that transformers wrote (`tests/reference/transformers_weights.py`), loaded into the engine:
        //! the loss must equal that of transformers.

        use serde_json::Value;

        use super::*;
        use crate::engine::{Engine, MicroBatch};

        fn json(path: &Path) -> Value {
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
        }

        fn cells(rows: &Value) -> Vec<u32> {
            let rows: Vec<Vec<u32>> = serde_json::from_value(rows.clone()).unwrap();
            rows.concat()
        }

        #[test]
        fn the_engine_computes_transformers_loss_from_its_directories() {
            for name in ["sharded_bf16", "single_f16_tied"] {
                let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
                    .join("tests/reference")
                    .join(format!("transformers_{name}"));
                let config = ModelConfig::from_json(&json(&directory.join("config.json"))).unwrap();
                let mut engine =
                    CpuEngine::new(config, CpuOptions::default(), None, Some(1)).unwrap();
                let weights = Weights::open(&directory).unwrap();
                weights.restore(&mut engine).unwrap();
                let expected = json(&directory.join("expected.json"));
                let (tokens, targets) = (cells(&expected["tokens"]), cells(&expected["targets"]));
                engine.reserve(3, 16).unwrap();
                let micro_batch = MicroBatch {
                    tokens: &tokens,
                    targets: &targets,
                    batch: 3,
                    seq_len: 16,
                    ..MicroBatch::default()
                };
                let (loss, count) = engine.evaluate(micro_batch).unwrap();
                let wanted = expected["loss"].as_f64().unwrap();
                assert_eq!(count, 48);
                assert!(
                    (loss / wanted - 1.0).abs() < 1e-6,
                    "{name}: {loss}, {wanted}"
                );
            }
        }
    }
}
