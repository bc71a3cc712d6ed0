//! PyTorch's gradients and losses, from `tests/reference/model_reference.py`.

use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use super::contract::New;
use super::*;

/// The cases of the script.
pub const CASES: [&str; 15] = [
    "untied_grouped",
    "tied",
    "wider",
    "llama3",
    "linear",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma",
    "windows",
    "gpt_neox",
    "gpt_neox_sequential",
    "gpt2",
    "starcoder2",
    "biased_llama",
];

/// The models of all cases.
pub fn configs() -> impl Iterator<Item = ModelConfig> {
    CASES.iter().map(|name| Reference::read(name).config())
}

/// One case of the script.
pub struct Reference {
    record: Value,
    tensors: Vec<u8>,
}

impl Reference {
    pub fn read(name: &str) -> Reference {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
        let record = std::fs::read_to_string(path.join(format!("{name}.json"))).unwrap();
        Reference {
            record: serde_json::from_str(&record).unwrap(),
            tensors: std::fs::read(path.join(format!("{name}.safetensors"))).unwrap(),
        }
    }

    pub fn number(&self, pointer: &str) -> f64 {
        self.record.pointer(pointer).unwrap().as_f64().unwrap()
    }

    /// The elements of a tensor, four bytes each.
    fn words(&self, name: &str) -> Vec<[u8; 4]> {
        let tensors = SafeTensors::deserialize(&self.tensors).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        tensor.data().as_chunks().0.to_vec()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name)
            .into_iter()
            .map(f32::from_le_bytes)
            .collect()
    }

    /// Tokens of a tensor, with PyTorch's ignored targets (−100) as [`IGNORE`].
    fn tokens(&self, name: &str) -> Vec<u32> {
        let token = |word| u32::try_from(i32::from_le_bytes(word)).unwrap_or(IGNORE);
        self.words(name).into_iter().map(token).collect()
    }

    pub fn batch(&self) -> Batch {
        Batch {
            tokens: self.tokens("tokens"),
            targets: self.tokens("targets"),
            rows: self.number("/batch") as usize,
            seq_len: self.number("/seq_len") as usize,
        }
    }

    /// PyTorch's relative L2 error of a gradient under autocast to bf16.
    pub fn autocast_error(&self, name: &str) -> f64 {
        self.record["autocast"]["relative_errors"][name]
            .as_f64()
            .unwrap()
    }

    pub fn config(&self) -> ModelConfig {
        ModelConfig::from_json(&self.record["config"]).unwrap()
    }

    /// Sets the script's weights.
    pub fn set_weights(&self, engine: &mut dyn Engine) {
        let norm = match self.config().norm {
            NormKind::RmsPlusOne => 0.0,
            NormKind::Rms | NormKind::Layer => 1.0,
        };
        for (index, unit) in engine.layout().units.clone().iter().enumerate() {
            let mut state = engine.export(index, true).unwrap().unwrap();
            for parameter in &unit.parameters {
                let hash = hash_name(&parameter.name);
                let weights = &mut state.parameters[parameter.range()];
                for (i, w) in (0..).zip(weights) {
                    let bits = mix(hash.wrapping_add(i)) >> 8;
                    let uniform = bits as f32 / (1 << 23) as f32 - 1.0;
                    let middle = match parameter.role.kind() {
                        Kind::Matrix | Kind::Bias => 0.0,
                        Kind::Norm => norm,
                    };
                    *w = 0.25 * uniform + middle;
                }
            }
            engine.import(index, &state).unwrap();
        }
    }
}

fn mix(mut x: u32) -> u32 {
    x ^= x >> 17;
    x = x.wrapping_mul(0xed5a_d4bb);
    x ^= x >> 11;
    x = x.wrapping_mul(0xac4c_1b51);
    x ^ (x >> 15)
}

fn hash_name(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

/// Asserts every gradient within 5e-6 of its tensor's largest element, the precision of f32 against PyTorch's
/// f64.
pub fn check_gradients(new: New, name: &str) {
    let reference = Reference::read(name);
    let mut engine = new(reference.config());
    reference.set_weights(engine.as_mut());
    let batch = reference.batch();
    let got = engine
        .accumulate(batch.micro_batch(), NOTHING, true)
        .unwrap();
    assert_eq!(got.targets as f64, reference.number("/targets"));
    let expected = reference.number("/summed_loss");
    assert!(
        (got.loss - expected).abs() < 1e-6 * expected,
        "{} {expected}",
        got.loss
    );

    let gradient = take_gradient(engine.as_mut());
    for (unit, gradient) in engine.layout().units.iter().zip(&gradient) {
        for parameter in &unit.parameters {
            let expected = reference.floats(&parameter.name);
            let got = &gradient[parameter.range()];
            assert_eq!(got.len(), expected.len());
            let largest = expected.iter().fold(0.0f32, |most, g| most.max(g.abs()));
            let error = got
                .iter()
                .zip(&expected)
                .fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(
                error < 5e-6 * largest,
                "{}: {error} of {largest}",
                parameter.name
            );
        }
    }
}

/// Asserts that the logits after several parts of the first row are transformers', within 1e-5 of the largest.
pub fn check_logits(new: New, name: &str) {
    let reference = Reference::read(name);
    let mut engine = new(reference.config());
    reference.set_weights(engine.as_mut());
    let batch = reference.batch();
    let expected = reference.floats("logits");
    let vocabulary = expected.len() / batch.seq_len;
    let largest = expected.iter().fold(0.0f32, |most, it| most.max(it.abs()));
    engine.begin_sequence(batch.seq_len).unwrap();
    let mut past = 0;
    for part in [1, 9, 1, 30, 29] {
        let got = engine.append(&batch.tokens[past..past + part]).unwrap();
        past += part;
        let expected = &expected[(past - 1) * vocabulary..past * vocabulary];
        assert_eq!(got.len(), vocabulary);
        for (token, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (got - expected).abs();
            assert!(
                error < 1e-5 * largest,
                "token {token} after {past}: {got}, {expected}"
            );
        }
    }
}

/// Trains the case's batch for `steps` of its ten steps.
pub fn check_training(new: New, name: &str, steps: u64) {
    let reference = Reference::read(name);
    let mut engine = new(reference.config());
    reference.set_weights(engine.as_mut());
    let batch = reference.batch();
    for step in 0..steps {
        let got = engine
            .accumulate(batch.micro_batch(), NOTHING, true)
            .unwrap();
        let mean = 1.0 / got.targets as f64;
        let loss = got.loss * mean;
        let expected = reference.number(&format!("/losses/{step}"));
        let first = reference.number("/losses/0");
        assert!(
            (loss - expected).abs() < 1e-5 * first,
            "step {step}: {loss} {expected}"
        );

        let norm = engine.reduce(NOTHING).unwrap().squared_norm.sqrt() * mean;
        let expected = reference.number(&format!("/gradient_norms/{step}"));
        assert!(
            (norm - expected).abs() < 1e-4 * expected,
            "step {step}: {norm} {expected}"
        );
        // As torch.nn.utils.clip_grad_norm_ computes it.
        let clip = reference.number("/optimizer/max_grad_norm") / (norm + 1e-6);
        engine
            .update(AdamW {
                learning_rate: reference.number("/optimizer/learning_rate"),
                beta1: reference.number("/optimizer/beta1"),
                beta2: reference.number("/optimizer/beta2"),
                epsilon: reference.number("/optimizer/epsilon"),
                weight_decay: reference.number("/optimizer/weight_decay"),
                vector_decay: 0.0,
                step: step + 1,
                gradient_scale: mean * clip.min(1.0),
            })
            .unwrap();
    }
}
