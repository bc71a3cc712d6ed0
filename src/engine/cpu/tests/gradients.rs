//! Gradients and their norms: against finite differences, and for any split of a batch.

use super::*;

/// Compares the derivative of the loss along several directions of every tensor with the gradient.
fn check_finite_differences(config: ModelConfig) {
    // Longer than a block of queries, so that the test covers several blocks.
    let batch = Batch::new(2, 70);
    let mut engine = engine(config);
    let (_, gradient) = gradient_of(&mut engine, batch.micro_batch());
    let layout = engine.layout().clone();
    for (unit, gradient) in gradient.iter().enumerate() {
        let original = engine.export(unit, true).unwrap().unwrap();
        for parameter in &layout.units[unit].parameters {
            let gradient = &gradient[parameter.range()];
            let norm = squared_norm(&[gradient.to_vec()]).sqrt();
            assert!(norm > 0.1, "{} has no gradient", parameter.name);
            // The gradient's own direction, and two independent ones.
            for direction in 0..3 {
                let sign = |i: usize| ((i + 1).wrapping_mul(40_503 * direction) >> 5) % 2;
                let mut along: Vec<f64> = match direction {
                    0 => gradient.iter().map(|&g| f64::from(g)).collect(),
                    _ => (0..gradient.len())
                        .map(|i| sign(i) as f64 * 2.0 - 1.0)
                        .collect(),
                };
                let length = along.iter().map(|a| a * a).sum::<f64>().sqrt();
                along.iter_mut().for_each(|a| *a /= length);
                let expected: f64 = along
                    .iter()
                    .zip(gradient)
                    .map(|(a, &g)| a * f64::from(g))
                    .sum();

                let step = 1e-2;
                let mut loss_at = |step: f64| {
                    let mut moved = original.clone();
                    let weights = &mut moved.parameters[parameter.range()];
                    for (w, a) in weights.iter_mut().zip(&along) {
                        *w += (a * step) as f32;
                    }
                    engine.import(unit, &moved).unwrap();
                    engine.evaluate(batch.micro_batch()).unwrap().0
                };
                let measured = (loss_at(step) - loss_at(-step)) / (2.0 * step);
                // The f32 forward pass rounds by about 1e-5 of the loss; the cube of the step size is
                // smaller.
                let error = (measured - expected).abs();
                assert!(
                    error < 2e-3 * norm.max(1.0),
                    "{} along {direction}: measured {measured}, gradient says {expected}, norm {norm}",
                    parameter.name
                );
            }
        }
        engine.import(unit, &original).unwrap();
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    check_finite_differences(config());
}

#[test]
fn gradients_of_tied_embeddings_agree_with_finite_differences() {
    check_finite_differences(tied());
}

#[test]
fn accumulation_equals_one_large_micro_batch() {
    for config in [config(), tied()] {
        let batch = Batch::new(4, 20);
        let mut engine = engine(config);
        let (loss, whole) = gradient_of(&mut engine, batch.micro_batch());
        for measure in [NOTHING, EVERYTHING] {
            let mut sum = 0.0;
            for row in 0..4 {
                let micro_batch = batch.part(row, row + 1);
                sum += engine
                    .accumulate(micro_batch, measure, row == 3)
                    .unwrap()
                    .loss;
            }
            assert!((sum - loss).abs() < 1e-6 * loss);
            assert_close(&whole, &take_gradient(&mut engine), 1e-5);
        }
    }
}

#[test]
fn chunks_of_the_head_give_the_whole_batchs_loss_and_gradient() {
    // The vocabulary is so large that the whole batch's logits take two chunks and one row's take one.
    for config in [config(), tied()] {
        let config = ModelConfig {
            vocab_size: 20_000,
            ..config
        };
        let batch = Batch::new(3, 70);
        let mut engine = engine(config);
        let (loss, whole) = gradient_of(&mut engine, batch.micro_batch());
        let head_rows = engine.workspace.as_ref().unwrap().shared.head_rows;
        assert!((71..140).contains(&head_rows), "{head_rows}");
        let evaluated = engine.evaluate(batch.micro_batch()).unwrap();
        assert_eq!(evaluated, (loss, 70 + 35 + 70));
        let mut sum = 0.0;
        for row in 0..3 {
            let micro_batch = batch.part(row, row + 1);
            sum += engine
                .accumulate(micro_batch, NOTHING, row == 2)
                .unwrap()
                .loss;
        }
        assert!((sum - loss).abs() < 1e-6 * loss);
        assert_close(&whole, &take_gradient(&mut engine), 1e-5);
    }
}

#[test]
fn norms_match_the_gradients() {
    for config in [config(), tied()] {
        let batch = Batch::new(3, 20);
        let mut engine = engine(config);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5 * b, "{a} {b}");
        let (_, whole) = gradient_of(&mut engine, batch.micro_batch());
        for row in 0..3 {
            let (_, own) = gradient_of(&mut engine, batch.part(row, row + 1));
            // With and without a gradient accumulated before it.
            for before in 0..2 {
                for _ in 0..before {
                    engine
                        .accumulate(batch.micro_batch(), EVERYTHING, false)
                        .unwrap();
                }
                let micro_batch = batch.part(row, row + 1);
                let got = engine.accumulate(micro_batch, EVERYTHING, true).unwrap();
                close(got.squared_norm.unwrap(), squared_norm(&own));
                engine.discard();
            }
        }
        for row in 0..3 {
            let micro_batch = batch.part(row, row + 1);
            engine.accumulate(micro_batch, NOTHING, row == 2).unwrap();
        }
        let reduced = engine.reduce(EVERYTHING).unwrap();
        close(reduced.squared_norm, squared_norm(&whole));
        assert_eq!(reduced.local_squared_norm, Some(reduced.squared_norm));
    }
}
