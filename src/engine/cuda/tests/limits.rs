//! Sizes beyond the limits inside of the engine, and graphs of other shapes.

use super::*;

/// More tokens than blocks sum up the gradient of vectors, in rows of more than 256, and one token at 500 places.
fn long() -> Batch {
    let mut batch = Batch::new(3, 301);
    batch.tokens[40..540].fill(7);
    batch
}

/// A model that has positions for [`long`].
fn of_long(config: ModelConfig) -> ModelConfig {
    ModelConfig {
        max_position_embeddings: 512,
        ..config
    }
}

/// A model of one layer, of which the first unit is larger than the pinned memory of copies, and whose widths are no multiple
/// of 32.
fn of_a_large_unit() -> ModelConfig {
    ModelConfig {
        hidden_size: 260,
        intermediate_size: 84,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 66,
        vocab_size: 4099,
        // Larger logits round more in bf16.
        initializer_range: 0.05,
        ..tied()
    }
}

/// Asserts that the gradient in bf16 is near that in f32.
fn compare_precisions(device: &Arc<Device>, config: &ModelConfig, batch: &Batch) {
    let [(loss, bf16), (expected_loss, f32)] = [bf16_options(), f32_options()].map(|options| {
        gradient_of(
            &mut engine(device, config.clone(), options),
            batch.micro_batch(),
        )
    });
    assert!((loss - expected_loss).abs() < 1e-3 * expected_loss);
    assert_gradients(&layout(config), &bf16, &f32, 3e-2);
}

#[test]
fn many_long_rows_of_one_token_have_the_cpu_engines_gradients() {
    let Some(device) = device() else { return };
    for config in [with_vectors(), plain()] {
        compare_gradients(&device, of_long(config), &long(), 1e-5);
    }
    compare_precisions(&device, &of_long(config()), &long());
}

#[test]
fn head_sizes_above_64_that_are_no_multiple_of_4_have_the_cpu_engines_gradients() {
    let Some(device) = device() else { return };
    for head_dim in [66, 102] {
        let config = ModelConfig {
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim,
            ..config()
        };
        compare_gradients(&device, config.clone(), &Batch::new(2, 70), 1e-5);
        compare_precisions(&device, &config, &Batch::new(2, 70));
    }
}

#[test]
fn a_unit_larger_than_the_memory_of_copies_is_copied_whole() {
    let Some(device) = device() else { return };
    let batch = Batch::of_vocabulary(4099, 2, 40);
    let (mut on_gpu, mut on_cpu) = (
        engine(&device, of_a_large_unit(), f32_options()),
        cpu(of_a_large_unit()),
    );
    assert!(on_cpu.layout().units[0].len * size_of::<f32>() > 4 << 20);
    // From the seed, after a gradient, and after a copy of the state.
    for _ in 0..2 {
        compare(&mut on_gpu, &mut on_cpu, batch.micro_batch(), 1e-5);
        for unit in 0..on_cpu.layout().units.len() {
            let state = on_gpu.export(unit, true).unwrap();
            assert_eq!(state, on_cpu.export(unit, true).unwrap());
            let mut state = state.unwrap();
            for (i, weight) in state.parameters.iter_mut().enumerate() {
                *weight += 1e-3 * (i % 7) as f32;
            }
            on_gpu.import(unit, &state).unwrap();
            on_cpu.import(unit, &state).unwrap();
        }
    }
    compare_precisions(&device, &of_a_large_unit(), &batch);
}

/// As a run without a norm test has it.
#[test]
fn without_a_measurement_the_gradients_of_micro_batches_add_up_in_place() {
    let Some(device) = device() else { return };
    let batch = Batch::new(5, 20);
    for (config, options) in [
        (config(), f32_options()),
        (tied(), f32_options()),
        (with_vectors(), f32_options()),
        (plain(), f32_options()),
        (hoppers(64), bf16_options()),
    ] {
        let tolerance: f64 = match options.precision {
            Precision::F32 => 1e-5,
            Precision::Bf16 => 3e-2,
        };
        let mut measured = engine(&device, config.clone(), options.clone());
        let unmeasured = CudaOptions {
            measure: NOTHING,
            ..options
        };
        let mut in_place = engine(&device, config.clone(), unmeasured);
        assert!(in_place.memory().0 < measured.memory().0);
        let mut cpu = CpuEngine::new(config, CpuOptions::default(), None, Some(5)).unwrap();
        let (loss, expected) = gradient_of(&mut cpu, batch.micro_batch());
        // The first step must leave no trace.
        for _ in 0..2 {
            for engine in [&mut measured, &mut in_place] {
                let parts = [(0, 2, false), (2, 4, false), (4, 5, true)];
                let losses = parts.map(|(from, to, last)| {
                    let micro_batch = batch.part(from, to);
                    engine.accumulate(micro_batch, NOTHING, last).unwrap().loss
                });
                let error = (losses.iter().sum::<f64>() - loss).abs();
                assert!(error <= tolerance.min(1e-3) * loss);
                let gradient = take_gradient(engine);
                assert_gradients(cpu.layout(), &gradient, &expected, tolerance);
            }
        }
    }
}

/// A graph is captured at the second pass of a shape and runs from then on.
#[test]
fn graphs_of_one_shape_run_for_no_other() {
    let Some(device) = device() else { return };
    let batch = Batch::new(6, 20);
    // Four shapes of 120 tokens, then other numbers of the same rows.
    let shapes = [
        (6, 20),
        (4, 30),
        (3, 40),
        (2, 60),
        (5, 20),
        (2, 20),
        (2, 30),
    ];
    let shaped = |(rows, seq_len)| MicroBatch {
        tokens: &batch.tokens[..rows * seq_len],
        targets: &batch.targets[..rows * seq_len],
        batch: rows,
        seq_len,
        ..MicroBatch::default()
    };
    // Two packings of as many documents.
    let packings: [&[u32]; 2] = [&[0, 20, 40, 43], &[0, 7, 40, 79]];
    let packed = packings.map(|starts| MicroBatch {
        starts,
        ..shaped((2, 40))
    });
    let micro_batches = shapes.map(shaped).into_iter().chain(packed);
    let micro_batches: Vec<MicroBatch<'_>> = micro_batches.collect();
    for (config, options) in [(plain(), f32_options()), (tied(), bf16_options())] {
        let without = CudaOptions {
            no_graphs: true,
            ..options.clone()
        };
        let one_by_one = |&micro_batch: &MicroBatch<'_>| {
            let mut engine = engine(&device, config.clone(), without.clone());
            gradient_of(&mut engine, micro_batch)
        };
        let expected: Vec<_> = micro_batches.iter().map(one_by_one).collect();
        let mut engine = engine(&device, config, options);
        // Graphs are lost when the memory for micro-batches grows.
        engine.reserve(6, 60).unwrap();
        for pass in 1..=3 {
            for (micro_batch, expected) in micro_batches.iter().zip(&expected) {
                let found = gradient_of(&mut engine, *micro_batch);
                let shape = (micro_batch.batch, micro_batch.seq_len);
                assert!(found == *expected, "pass {pass} of {shape:?}");
            }
        }
    }
}
