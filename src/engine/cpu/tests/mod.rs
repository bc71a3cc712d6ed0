//! The engine as a whole, through its public interface.

mod coordinates;
mod fixed_point;
mod gradients;
mod limits;
mod worlds;

use super::*;
use crate::engine::IGNORE;
use crate::engine::testing::contract::contract_tests;
use crate::engine::testing::{self, *};

fn engine_with(config: ModelConfig, options: CpuOptions) -> CpuEngine {
    CpuEngine::new(config, options, None, Some(5)).unwrap()
}

fn engine(config: ModelConfig) -> CpuEngine {
    let options = CpuOptions {
        measure: EVERYTHING,
        ..CpuOptions::default()
    };
    engine_with(config, options)
}

contract_tests!(Some(|config| -> Box<dyn Engine> {
    Box::new(engine(config))
}));

#[test]
fn activation_checkpointing_changes_no_bit_and_takes_less_memory() {
    let batch = Batch::of_vocabulary(24, 3, 40);
    for config in std::iter::once(config()).chain(reference::configs()) {
        let mut plain = engine(config.clone());
        let options = CpuOptions {
            activation_checkpointing: true,
            ..CpuOptions::default()
        };
        let mut checkpointing = engine_with(config.clone(), options);
        let expected = gradient_of(&mut plain, batch.micro_batch());
        let got = gradient_of(&mut checkpointing, batch.micro_batch());
        assert_eq!(got, expected, "{config:?}");
        assert!(checkpointing.memory().0 < plain.memory().0, "{config:?}");
    }
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
fn seeds_decide_the_weights() {
    let weights = |seed| {
        let mut engine = CpuEngine::new(config(), CpuOptions::default(), None, Some(seed)).unwrap();
        engine.export(1, true).unwrap()
    };
    assert_eq!(weights(1), weights(1));
    assert_ne!(weights(1), weights(2));
}

#[test]
fn an_engine_without_training_predicts_the_same_with_less_memory() {
    let options = CpuOptions {
        forward_only: true,
        ..CpuOptions::default()
    };
    let long = ModelConfig {
        max_position_embeddings: 700,
        ..config()
    };
    let mut engines = [
        engine_with(long.clone(), options),
        engine_with(long, CpuOptions::default()),
    ];
    // More tokens than are computed together.
    let batch = Batch::new(1, 600);
    let [only_forward, trains] = engines.each_mut().map(|engine| {
        engine.begin_sequence(600).unwrap();
        (engine.append(&batch.tokens).unwrap(), engine.memory().1)
    });
    assert_eq!(only_forward.0, trains.0);
    assert!(only_forward.1 < trains.1);
    let [engine, _] = &mut engines;
    assert!(
        engine
            .accumulate(batch.micro_batch(), NOTHING, true)
            .is_err()
    );
    assert!(engine.export(0, true).is_err());
}

/// An engine that may train adapters.
fn adapted(config: ModelConfig, adapters: Option<Adapters>) -> Box<dyn Engine> {
    let options = CpuOptions {
        measure: EVERYTHING,
        adapters,
        ..CpuOptions::default()
    };
    Box::new(engine_with(config, options))
}

#[test]
fn new_adapters_change_nothing_and_only_they_train() {
    testing::adapters::new_adapters_change_nothing_and_only_they_train(&adapted);
}

#[test]
fn adapters_have_the_gradients_of_merged_weights() {
    testing::adapters::adapters_have_the_gradients_of_merged_weights(&adapted);
}

#[test]
fn adapters_of_several_micro_batches_have_the_gradient_of_one() {
    testing::adapters::adapters_of_several_micro_batches_have_the_gradient_of_one(&adapted);
}

#[test]
fn gradients_with_dropout_agree_with_finite_differences() {
    testing::adapters::gradients_with_dropout_agree_with_finite_differences(&adapted);
}

#[test]
fn whole_modules_are_trained_as_in_the_model() {
    testing::adapters::whole_modules_are_trained_as_in_the_model(&adapted);
}

#[test]
fn weights_below_adapters_are_imported() {
    testing::adapters::weights_below_adapters_are_imported(&adapted);
}

#[test]
fn quantised_weights_are_those_of_their_codes() {
    testing::adapters::quantised_weights_are_those_of_their_codes(&adapted);
}

#[test]
fn a_model_in_4_bits_takes_less_memory() {
    let memory = |is_quantised| {
        let adapters = Adapters {
            rank: 1,
            alpha: 1.0,
            rank_stabilized: false,
            dropout: 0.0,
            modules: Vec::new(),
            saved: Vec::new(),
            is_quantised,
            is_nested: false,
            seed: 5,
        };
        let wide = ModelConfig {
            hidden_size: 240,
            intermediate_size: 500,
            num_hidden_layers: 4,
            ..config()
        };
        adapted(wide, Some(adapters)).memory().0
    };
    assert!(
        memory(true) < memory(false) / 2,
        "{} {}",
        memory(true),
        memory(false)
    );
}
