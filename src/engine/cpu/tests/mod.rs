//! The engine as a whole, through its public interface.

mod coordinates;
mod gradients;
mod limits;
mod reference;
mod worlds;

use super::*;

/// A tiny model with grouped queries.
fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        vocab_size: 30,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        tie_word_embeddings: false,
        initializer_range: 0.2,
        sliding_window: None,
    }
}

fn tied() -> ModelConfig {
    ModelConfig {
        tie_word_embeddings: true,
        ..config()
    }
}

fn engine_with(config: ModelConfig, options: CpuOptions) -> CpuEngine {
    CpuEngine::new(config, options, None, Some(5)).unwrap()
}

fn engine(config: ModelConfig) -> CpuEngine {
    engine_with(config, CpuOptions::default())
}

/// Tokens and targets; odd rows have padding from the middle on.
struct Batch {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    rows: usize,
    seq_len: usize,
}

impl Batch {
    fn new(rows: usize, seq_len: usize) -> Batch {
        let value = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u32 % 30;
        let padded = |i: usize| (i / seq_len) % 2 == 1 && i % seq_len >= seq_len / 2;
        let cells = || 0..rows * seq_len;
        Batch {
            tokens: cells().map(value).collect(),
            targets: cells()
                .map(|i| if padded(i) { IGNORE } else { value(i + 1) })
                .collect(),
            rows,
            seq_len,
        }
    }

    fn micro_batch(&self) -> MicroBatch<'_> {
        self.part(0, self.rows)
    }

    fn part(&self, from: usize, to: usize) -> MicroBatch<'_> {
        let range = from * self.seq_len..to * self.seq_len;
        MicroBatch {
            tokens: &self.tokens[range.clone()],
            targets: &self.targets[range],
            batch: to - from,
            seq_len: self.seq_len,
        }
    }
}

const EVERYTHING: Measure = Measure {
    micro_batches: true,
    worker: true,
    coordinates: false,
};
const NOTHING: Measure = Measure {
    micro_batches: false,
    worker: false,
    coordinates: false,
};

/// An optimiser step that keeps the weights and copies the gradient into the first moments.
const REVEAL: AdamW = AdamW {
    learning_rate: 0.0,
    beta1: 0.0,
    beta2: 0.0,
    epsilon: 1.0,
    weight_decay: 0.0,
    step: 1,
    gradient_scale: 1.0,
};

/// The step's gradient, by unit. Ends the step and resets the moments to zero.
fn take_gradient(engine: &mut CpuEngine) -> Vec<Vec<f32>> {
    engine.reduce(NOTHING).unwrap();
    engine.update(REVEAL).unwrap();
    (0..engine.layout().units.len())
        .map(|unit| {
            let mut state = engine.export(unit, true).unwrap().unwrap();
            let gradient = std::mem::replace(&mut state.exp_avg, vec![0.0; state.parameters.len()]);
            state.exp_avg_sq.fill(0.0);
            engine.import(unit, &state).unwrap();
            gradient
        })
        .collect()
}

fn gradient_of(engine: &mut CpuEngine, micro_batch: MicroBatch<'_>) -> (f64, Vec<Vec<f32>>) {
    let got = engine.accumulate(micro_batch, NOTHING, true).unwrap();
    (got.loss, take_gradient(engine))
}

fn squared_norm(gradient: &[Vec<f32>]) -> f64 {
    let elements = gradient.iter().flatten();
    elements.map(|&g| f64::from(g) * f64::from(g)).sum()
}

/// Asserts that every unit is within `tolerance` of the other, relative to the unit's largest element.
fn assert_close(one: &[Vec<f32>], two: &[Vec<f32>], tolerance: f32) {
    for (unit, (one, two)) in one.iter().zip(two).enumerate() {
        assert_eq!(one.len(), two.len());
        let largest = one.iter().fold(0.0f32, |most, g| most.max(g.abs()));
        for (i, (a, b)) in one.iter().zip(two).enumerate() {
            let error = (a - b).abs();
            assert!(error <= tolerance * largest, "unit {unit}, {i}: {a} {b}");
        }
    }
}

#[test]
fn evaluation_gives_the_loss_of_training() {
    for config in [config(), tied()] {
        let mut engine = engine(config);
        let batch = Batch::new(3, 20);
        let trained = engine
            .accumulate(batch.micro_batch(), NOTHING, true)
            .unwrap();
        engine.discard();
        let (loss, targets) = engine.evaluate(batch.micro_batch()).unwrap();
        assert_eq!((loss, targets), (trained.loss, trained.targets));
        assert_eq!(targets, 20 + 10 + 20);
        assert_eq!(trained.squared_norm, None);
    }
}

#[test]
fn evaluation_in_the_middle_of_a_step_changes_nothing() {
    let batch = Batch::new(2, 20);
    let mut engine = engine(config());
    let (_, expected) = gradient_of(&mut engine, batch.micro_batch());
    engine.accumulate(batch.part(0, 1), NOTHING, false).unwrap();
    engine.evaluate(batch.micro_batch()).unwrap();
    engine.accumulate(batch.part(1, 2), NOTHING, true).unwrap();
    assert_close(&expected, &take_gradient(&mut engine), 1e-5);
}

#[test]
fn a_discarded_gradient_leaves_no_trace() {
    let batch = Batch::new(2, 20);
    let mut engine = engine(config());
    let (_, expected) = gradient_of(&mut engine, batch.micro_batch());
    engine.accumulate(batch.part(0, 1), NOTHING, false).unwrap();
    engine.discard();
    assert_eq!(gradient_of(&mut engine, batch.micro_batch()).1, expected);
    engine.accumulate(batch.part(0, 1), NOTHING, true).unwrap();
    engine.reduce(NOTHING).unwrap();
    engine.discard();
    assert_eq!(gradient_of(&mut engine, batch.micro_batch()).1, expected);
}

#[test]
fn a_step_without_micro_batches_has_no_gradient() {
    let batch = Batch::new(2, 20);
    let mut engine = engine(config());
    gradient_of(&mut engine, batch.micro_batch());
    engine.join(true).unwrap();
    assert_eq!(engine.reduce(EVERYTHING).unwrap().squared_norm, 0.0);
    assert_eq!(squared_norm(&take_gradient(&mut engine)), 0.0);
}

#[test]
fn activation_checkpointing_changes_no_bit_and_takes_less_memory() {
    let batch = Batch::new(3, 40);
    let mut plain = engine(config());
    let mut checkpointing = engine_with(
        config(),
        CpuOptions {
            activation_checkpointing: true,
            ..CpuOptions::default()
        },
    );
    let expected = gradient_of(&mut plain, batch.micro_batch());
    assert_eq!(
        gradient_of(&mut checkpointing, batch.micro_batch()),
        expected
    );
    assert!(checkpointing.memory().0 < plain.memory().0);
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let batch = Batch::new(3, 100);
    let gradient = |threads| {
        let options = CpuOptions {
            threads: Some(threads),
            ..CpuOptions::default()
        };
        gradient_of(&mut engine_with(config(), options), batch.micro_batch())
    };
    let one = gradient(1);
    for threads in [2, 3] {
        assert_eq!(gradient(threads), one);
    }
}

#[test]
fn a_micro_batch_without_targets_gives_zero_and_no_nan() {
    for config in [config(), tied()] {
        let mut batch = Batch::new(2, 20);
        batch.targets.fill(IGNORE);
        let mut engine = engine(config);
        assert_eq!(engine.evaluate(batch.micro_batch()).unwrap(), (0.0, 0));
        let got = engine
            .accumulate(batch.micro_batch(), EVERYTHING, true)
            .unwrap();
        assert_eq!((got.loss, got.targets), (0.0, 0));
        assert_eq!(got.squared_norm, Some(0.0));
        assert_eq!(squared_norm(&take_gradient(&mut engine)), 0.0);
    }
}

#[test]
fn padding_does_not_reach_the_tokens_before_it() {
    let mut batch = Batch::new(2, 20);
    let mut engine = engine(config());
    let expected = gradient_of(&mut engine, batch.micro_batch());
    for i in 30..40 {
        batch.tokens[i] = 29 - batch.tokens[i];
    }
    let (loss, gradient) = gradient_of(&mut engine, batch.micro_batch());
    assert_eq!(loss, expected.0);
    assert_eq!(gradient, expected.1);
}

#[test]
fn nan_in_the_weights_reaches_loss_and_norm() {
    for (unit, element) in [(0, 5), (1, 100), (3, 3)] {
        let mut engine = engine(config());
        let mut state = engine.export(unit, true).unwrap().unwrap();
        state.parameters[element] = f32::NAN;
        engine.import(unit, &state).unwrap();
        let mut batch = Batch::new(1, 20);
        batch.tokens[3] = 0;
        let got = engine
            .accumulate(batch.micro_batch(), EVERYTHING, true)
            .unwrap();
        assert!(got.loss.is_nan());
        assert!(got.squared_norm.unwrap().is_nan());
        assert!(engine.reduce(NOTHING).unwrap().squared_norm.is_nan());
        assert!(engine.evaluate(batch.micro_batch()).unwrap().0.is_nan());
    }
}

#[test]
fn seeds_decide_the_weights() {
    let weights = |seed| {
        let mut engine = CpuEngine::new(config(), CpuOptions::default(), None, Some(seed)).unwrap();
        engine.export(1, true).unwrap()
    };
    assert_eq!(weights(1), weights(1));
    assert_ne!(weights(1), weights(2));
}
