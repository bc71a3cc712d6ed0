//! Writes what a run has trained as a folder of files that other programs load: a model, an adapter, or a model with its
//! adapters added to the weights.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::LaunchError;
use super::generator::{Place, shape};
use super::prepare::TOKENIZER;
use crate::checkpoint::tensor_file::header;
use crate::checkpoint::{ADAPTER_CONFIG, ADAPTER_MODEL};
use crate::engine::{ModelConfig, Unit, layout};
use crate::lifecycle::files;
use crate::train::weights::Weights;
use crate::util::durable::{self, FileError};
use crate::util::input;
use crate::util::shards::{INDEX, WHOLE};

/// Most bytes of a file of weights, unless a single unit has more. That of transformers' `save_pretrained` before 5.
const SHARD: u64 = 5_000_000_000;

#[derive(Debug, Clone, Copy)]
pub struct Export<'a> {
    /// The folder, which does not exist yet.
    pub out: &'a Path,
    /// Adds adapters to the weights of the model below them.
    pub merges: bool,
    /// The type of the weights; `None`: that of the model below the adapters, or f32.
    pub dtype: Option<Dtype>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Exported {
    /// Parameters of the model or of the adapter.
    pub parameters: u64,
    pub bytes: u64,
    /// Files of weights.
    pub files: usize,
    pub dtype: Dtype,
    pub is_adapter: bool,
}

/// Writes the model or the adapter of a place. An error leaves nothing behind. `progress` gets the bytes written and of all.
pub fn export(
    place: &Place,
    export: Export<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Exported, LaunchError> {
    let out = export.out;
    if out.exists() {
        return Err(LaunchError::usage(format!(
            "{} is there already; name another directory with --out",
            out.display()
        )));
    }
    let partial = files::partial(out);
    durable::remove(&partial)?;
    durable::create_directory(&partial)?;
    let written = write(place, export, &partial, progress).and_then(|exported| {
        durable::sync_directory(&partial)?;
        std::fs::rename(&partial, out)
            .map_err(|error| FileError::from_io("rename", &partial, 0, error))?;
        Ok(exported)
    });
    if written.is_err() {
        // The first error is the one to report.
        let _ = durable::remove(&partial);
    }
    written
}

fn write(
    place: &Place,
    export: Export<'_>,
    folder: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Exported, LaunchError> {
    let directory = &place.directory;
    let generation = "generation_config.json";
    let exported = match &place.below {
        None if export.merges => {
            return Err(LaunchError::usage(format!(
                "{} has no adapters to merge; leave out --merge",
                directory.display()
            )));
        }
        None => {
            let weights = Weights::open(directory)?;
            let dtype = export.dtype.unwrap_or(Dtype::F32);
            write_model(&weights, &shape(directory)?, dtype, folder, progress)?
        }
        Some(_) if !export.merges => {
            if export.dtype.is_some() {
                return Err(LaunchError::usage(
                    "adapters stay f32; add --merge for a whole model of another type".into(),
                ));
            }
            let weights = Weights::open_adapter(directory)?;
            let bytes = copy(directory, folder, ADAPTER_MODEL)?;
            copy(directory, folder, ADAPTER_CONFIG)?;
            progress(bytes, bytes);
            Exported {
                parameters: weights.parameters(),
                bytes,
                files: 1,
                dtype: Dtype::F32,
                is_adapter: true,
            }
        }
        Some(below) => {
            let Some(of_model) = &below.weights else {
                return Err(LaunchError::usage(format!(
                    "the model below the adapters of {} was drawn at random, and no folder has it; leave out --merge",
                    directory.display()
                )));
            };
            let mut adapters = below.merged.clone();
            adapters.push(directory.clone());
            let weights = Weights::open(of_model)?.with_adapters(&adapters)?;
            let dtype = export.dtype.unwrap_or_else(|| weights.dtype());
            let exported = write_model(&weights, &below.config, dtype, folder, progress)?;
            if !directory.join(generation).exists() && of_model.join(generation).is_file() {
                copy(of_model, folder, generation)?;
            }
            exported
        }
    };
    for name in TOKENIZER.into_iter().chain([generation]) {
        if directory.join(name).is_file() {
            copy(directory, folder, name)?;
        }
    }
    Ok(exported)
}

/// Copies a file durably, and returns its bytes.
fn copy(from: &Path, to: &Path, name: &str) -> Result<u64, FileError> {
    let (from, to) = (from.join(name), to.join(name));
    let copied = || {
        let mut file = File::create(&to)?;
        let bytes = std::io::copy(&mut input::open(&from)?, &mut file)?;
        file.sync_all()?;
        Ok(bytes)
    };
    copied().map_err(|error| FileError::from_io("write", &to, 0, error))
}

/// Writes weights in files of at most [`SHARD`] bytes, with their index if there are several, and `config.json`.
fn write_model(
    weights: &Weights,
    config: &ModelConfig,
    dtype: Dtype,
    folder: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Exported, LaunchError> {
    let layout = layout(config);
    weights.check(&layout)?;
    let width = dtype.bitsize() as u64 / 8;
    let size = |unit: &Unit| unit.len as u64 * width;
    let total = layout.units.iter().map(size).sum();
    let shards = shards(&layout.units, size);
    let mut weight_map = BTreeMap::new();
    let mut done = 0;
    for (number, units) in (1..).zip(&shards) {
        let name = match shards.len() {
            1 => WHOLE.to_owned(),
            count => format!("model-{number:05}-of-{count:05}.safetensors"),
        };
        let path = folder.join(&name);
        let failed = |error| FileError::from_io("write", &path, total, error);
        let parameters = || units.iter().flat_map(|unit| &unit.parameters);
        let tensors = parameters().map(|it| (it.name.clone(), &it.shape[..]));
        let (header, _) = header(tensors, dtype).map_err(|error| LaunchError::Model {
            message: format!("{}: {error}", path.display()),
        })?;
        let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
        file.write_all(&header).map_err(failed)?;
        for unit in units {
            let values = weights.load_unit(unit)?;
            file.write_all(&encoded(&values, dtype)).map_err(failed)?;
            done += size(unit);
            progress(done, total);
        }
        let file = file
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)?;
        weight_map.extend(parameters().map(|it| (it.name.clone(), name.clone())));
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        durable::write_json(&folder.join(INDEX), &index)?;
    }
    let mut config = config.to_json();
    config["torch_dtype"] = Value::from(name_of(dtype));
    durable::write_json(&folder.join("config.json"), &config)?;
    Ok(Exported {
        parameters: layout.len(),
        bytes: total,
        files: shards.len(),
        dtype,
        is_adapter: false,
    })
}

/// The units of each file, in order.
fn shards(units: &[Unit], size: impl Fn(&Unit) -> u64) -> Vec<Vec<&Unit>> {
    let mut shards: Vec<Vec<&Unit>> = Vec::new();
    let mut room = 0;
    for unit in units {
        let bytes = size(unit);
        match shards.last_mut() {
            Some(shard) if bytes <= room => {
                shard.push(unit);
                room -= bytes;
            }
            _ => {
                shards.push(vec![unit]);
                room = SHARD.saturating_sub(bytes);
            }
        }
    }
    shards
}

/// Values as bytes of a type, rounded to the nearest.
fn encoded(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => {
            let mut rounded = vec![bf16::ZERO; values.len()];
            rounded.convert_from_f32_slice(values);
            bytemuck::cast_slice(&rounded).to_vec()
        }
        Dtype::F16 => {
            let mut rounded = vec![f16::ZERO; values.len()];
            rounded.convert_from_f32_slice(values);
            bytemuck::cast_slice(&rounded).to_vec()
        }
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}

/// A type's name in `config.json`.
pub fn name_of(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BF16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_weights_are_as_large_as_allowed() {
        let unit = |len| Unit {
            name: String::new(),
            parameters: Vec::new(),
            len,
        };
        let units: Vec<Unit> = [3, 4, 2, 9, 1].map(unit).into();
        let shards = shards(&units, |unit| unit.len as u64 * 1_000_000_000);
        let lengths: Vec<Vec<usize>> = shards
            .iter()
            .map(|units| units.iter().map(|unit| unit.len).collect())
            .collect();
        assert_eq!(lengths, [vec![3], vec![4], vec![2], vec![9], vec![1]]);
        let small = super::shards(&units, |unit| unit.len as u64 * 500_000_000);
        assert_eq!(small.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2]);
    }

    #[test]
    fn values_are_rounded_to_the_nearest() {
        let values = [1.0, 1.005, -0.1];
        assert_eq!(
            encoded(&values, Dtype::F32),
            bytemuck::cast_slice::<f32, u8>(&values)
        );
        let of = |bytes: Vec<u8>| -> Vec<u16> {
            let pairs = bytes.as_chunks().0;
            pairs.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
        };
        assert_eq!(of(encoded(&values, Dtype::BF16)), [0x3f80, 0x3f81, 0xbdcd]);
        assert_eq!(of(encoded(&values, Dtype::F16)), [0x3c00, 0x3c05, 0xae66]);
    }
}
