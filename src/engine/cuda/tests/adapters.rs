//! Adapters: the CPU engine is the reference.

use super::*;
use crate::engine::Adapters;
use crate::engine::testing::adapters::{self, cases, fill, with_whole_modules};

/// Calls a test of every engine with the CUDA engine.
fn of_every_engine(test: fn(adapters::New<'_>)) {
    let Some(device) = device() else { return };
    test(&|config, adapters| {
        let options = CudaOptions {
            adapters,
            ..f32_options()
        };
        Box::new(engine(&device, config, options))
    });
}

#[test]
fn new_adapters_change_nothing_and_only_they_train() {
    of_every_engine(adapters::new_adapters_change_nothing_and_only_they_train);
}

#[test]
fn adapters_have_the_gradients_of_merged_weights() {
    of_every_engine(adapters::adapters_have_the_gradients_of_merged_weights);
}

#[test]
fn adapters_of_several_micro_batches_have_the_gradient_of_one() {
    of_every_engine(adapters::adapters_of_several_micro_batches_have_the_gradient_of_one);
}

#[test]
fn gradients_with_dropout_agree_with_finite_differences() {
    of_every_engine(adapters::gradients_with_dropout_agree_with_finite_differences);
}

#[test]
fn whole_modules_are_trained_as_in_the_model() {
    of_every_engine(adapters::whole_modules_are_trained_as_in_the_model);
}

#[test]
fn weights_below_adapters_are_imported() {
    of_every_engine(adapters::weights_below_adapters_are_imported);
}

#[test]
fn quantised_weights_are_those_of_their_codes() {
    of_every_engine(adapters::quantised_weights_are_those_of_their_codes);
}

/// Models with and without dropout of adapters, over whole weights and over those in 4 bits.
fn variants(models: Vec<(ModelConfig, Adapters)>) -> Vec<(ModelConfig, Adapters)> {
    let variants = models.into_iter().flat_map(|(config, adapters)| {
        let is_nested = config.tie_word_embeddings;
        [(0.0, false), (0.3, false), (0.3, true)].map(|(dropout, is_quantised)| {
            let adapters = Adapters {
                dropout,
                is_quantised,
                is_nested: is_quantised && is_nested,
                ..adapters.clone()
            };
            (config.clone(), adapters)
        })
    });
    variants.collect()
}

/// The engines with the same weights, and with filled adapters.
fn both(
    device: &Arc<Device>,
    config: &ModelConfig,
    options: CudaOptions,
) -> (CudaEngine, CpuEngine) {
    let on_the_cpu = CpuOptions {
        measure: OF_MICRO_BATCHES,
        adapters: options.adapters.clone(),
        ..CpuOptions::default()
    };
    let mut cuda = engine(device, config.clone(), options);
    let mut cpu = CpuEngine::new(config.clone(), on_the_cpu, None, Some(5)).unwrap();
    fill(&mut cuda);
    fill(&mut cpu);
    (cuda, cpu)
}

#[test]
fn every_f32_gradient_of_adapters_is_the_cpu_engines() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 40);
    let micro_batch = MicroBatch {
        dropout: &[7, u64::MAX - 3, 1 << 40],
        ..batch.micro_batch()
    };
    let whole = with_whole_modules().into_iter();
    for (config, adapters) in variants(cases()).into_iter().chain(whole) {
        let drops = adapters.dropout > 0.0;
        let options = CudaOptions {
            adapters: Some(adapters),
            ..f32_options()
        };
        let (mut cuda, mut cpu) = both(&device, &config, options);
        let dropped = compare(&mut cuda, &mut cpu, micro_batch, 1e-5);
        // A graph of the one is none of the other.
        let plain = compare(&mut cuda, &mut cpu, batch.micro_batch(), 1e-5);
        assert_eq!(dropped != plain, drops);
        assert_eq!(gradient_of(&mut cuda, micro_batch).0, dropped);
    }
}

/// The models and the bound of [`every_variant_of_attention_gives_the_gradients_of_f32`]; dropout rounds inputs once more.
#[test]
fn every_bf16_gradient_of_adapters_is_near_to_f32() {
    let Some(device) = device() else { return };
    let batch = Batch::new(2, 140);
    let micro_batch = MicroBatch {
        dropout: &[7, u64::MAX - 3],
        ..batch.micro_batch()
    };
    let every_layer = cases().swap_remove(0).1;
    let models = [hoppers(64), of_layer_norms(true), gemma()];
    let models = models.map(|config| (config, every_layer.clone()));
    let whole = [(hoppers(64), with_whole_modules().swap_remove(0).1)];
    for (config, adapters) in variants(models.to_vec()).into_iter().chain(whole) {
        let tolerance = if adapters.dropout > 0.0 { 4e-2 } else { 3e-2 };
        let options = CudaOptions {
            adapters: Some(adapters),
            ..bf16_options()
        };
        let (mut cuda, mut cpu) = both(&device, &config, options);
        compare(&mut cuda, &mut cpu, micro_batch, tolerance);
    }
}

#[test]
fn steps_of_adapters_have_the_cpu_engines_losses() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 20);
    let whole = with_whole_modules().into_iter();
    for (config, adapters) in (variants(cases()).into_iter().step_by(2)).chain(whole) {
        let options = CudaOptions {
            adapters: Some(adapters),
            ..f32_options()
        };
        let (mut cuda, mut cpu) = both(&device, &config, options);
        let (got, expected) = (losses(&mut cuda, &batch, 5), losses(&mut cpu, &batch, 5));
        assert!(expected[4] < expected[0], "{expected:?}");
        for (got, expected) in got.iter().zip(&expected) {
            assert!(
                (got - expected).abs() < 1e-5 * expected,
                "{got}, not {expected}"
            );
        }
    }
}

#[test]
fn options_that_save_time_or_memory_change_no_bit_of_adapters() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 20);
    let micro_batch = MicroBatch {
        dropout: &[1, 2, 3],
        ..batch.micro_batch()
    };
    let (config, adapters) = variants(cases()).swap_remove(2);
    assert!(adapters.is_quantised && adapters.dropout > 0.0);
    let gradients = |options: CudaOptions| {
        let (mut cuda, _) = both(&device, &config, options);
        [(); 3].map(|()| gradient_of(&mut cuda, micro_batch))
    };
    let options = CudaOptions {
        adapters: Some(adapters),
        ..bf16_options()
    };
    let expected = gradients(options.clone());
    let no_graphs = CudaOptions {
        no_graphs: true,
        ..options.clone()
    };
    assert_eq!(gradients(no_graphs), expected);
    let checkpointed = CudaOptions {
        activation_checkpointing: true,
        ..options
    };
    assert_eq!(gradients(checkpointed), expected);
}

/// Without training, a model in bf16 has no master weights, and a prediction reads adapters.
#[test]
fn a_model_that_only_computes_takes_less_memory_and_gives_the_same() {
    let Some(device) = device() else { return };
    let batch = Batch::new(2, 20);
    for (config, adapters) in variants(cases()) {
        for adapters in [None, Some(adapters)] {
            for options in [f32_options(), bf16_options()] {
                let of = |forward_only| {
                    let options = CudaOptions {
                        adapters: adapters.clone(),
                        forward_only,
                        ..options.clone()
                    };
                    let mut engine = engine(&device, config.clone(), options);
                    let losses = engine.losses(batch.micro_batch()).unwrap();
                    engine.begin_sequence(12).unwrap();
                    let logits = engine.append(&batch.tokens[..9]).unwrap();
                    ((losses, logits), engine.memory().0)
                };
                let ((expected, more), (got, less)) = (of(false), of(true));
                assert_eq!(got, expected);
                assert!(less < more);
            }
        }
    }
}
