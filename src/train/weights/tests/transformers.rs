//! Directories that transformers wrote (`tests/reference/transformers_weights.py`), loaded into the engine:
//! the loss must equal that of transformers.

use serde_json::Value;

use super::*;
use crate::engine::cpu::{CpuEngine, CpuOptions};
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
        let mut engine = CpuEngine::new(config, CpuOptions::default(), None, Some(1)).unwrap();
        let weights = Weights::open(&directory).unwrap();
        weights.restore(&mut engine).unwrap();
        let expected = json(&directory.join("expected.json"));
        let (tokens, targets) = (cells(&expected["tokens"]), cells(&expected["targets"]));
        engine.reserve(3, 16).unwrap();
        let micro = MicroBatch {
            tokens: &tokens,
            targets: &targets,
            batch: 3,
            seq_len: 16,
        };
        let (loss, count) = engine.evaluate(micro).unwrap();
        let wanted = expected["loss"].as_f64().unwrap();
        assert_eq!(count, 48);
        assert!(
            (loss / wanted - 1.0).abs() < 1e-6,
            "{name}: {loss}, {wanted}"
        );
    }
}
