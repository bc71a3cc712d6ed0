//! Weights written with the safetensors crate, and checkpoints of Evenkeel.

mod transformers;

use std::collections::HashMap;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use super::*;
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
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        tie_word_embeddings: false,
        initializer_range: 0.02,
        sliding_window: None,
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
        let state = weights.load_unit(unit).unwrap();
        for parameter in &unit.parameters {
            let read = &state.parameters[parameter.range()];
            assert!(
                read == tensors[&parameter.name].values,
                "{}",
                parameter.name
            );
        }
        assert_eq!(state.exp_avg, vec![0.0; unit.len]);
        assert_eq!(state.exp_avg_sq, vec![0.0; unit.len]);
    }
}

/// The error about a directory, without its name.
fn refusal(directory: &Path, config: &ModelConfig) -> String {
    let checked = Weights::open(directory).and_then(|weights| weights.check(&layout(config)));
    let message = checked.unwrap_err().to_string();
    message.replace(&directory.display().to_string(), "[directory]")
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
    use crate::train::checkpoint::{Contents, Target, Writer, commit};

    let layout = layout(&config());
    let written = tensors(&config(), Dtype::F32);
    let run = tempfile::tempdir().unwrap();
    let target = Target {
        run_directory: run.path().to_path_buf(),
        generation: 1,
        step: 1,
    };
    let from = whole(&written);
    let weights = Weights::open(from.path()).unwrap();
    let writer = Writer::begin(&target, &layout, 0, 1);
    for (index, unit) in layout.units.iter().enumerate() {
        writer.write_unit(index, weights.load_unit(unit).unwrap());
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
    let embedding = two_heads[EMBEDDING].clone();
    let other_head = refusal(whole(&two_heads).path(), &tied());
    // A written head that equals the embedding is not unexpected.
    two_heads.insert(HEAD.to_string(), embedding);
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
