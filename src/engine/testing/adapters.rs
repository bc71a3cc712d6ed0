//! What every engine does with adapters. The reference is the same engine with the adapters merged into the weights: of its
//! gradient G of such weights, scale · G · Aᵀ is that of B, and scale · Bᵀ · G that of A.

use std::collections::HashMap;
use std::ops::Range;

use super::*;
use crate::engine::adapters::is_layer;
use crate::engine::{Adapted, Adapters, Family, Layout, Role, UnitState, layout, nf4};

/// Creates an engine with random weights of one seed, which trains adapters where there are some.
pub type New<'a> = &'a dyn Fn(ModelConfig, Option<Adapters>) -> Box<dyn Engine>;

fn of(modules: &[&str]) -> Adapters {
    Adapters {
        rank: 3,
        alpha: 2.1,
        rank_stabilized: false,
        dropout: 0.0,
        modules: modules.iter().map(|name| (*name).to_owned()).collect(),
        saved: Vec::new(),
        is_quantised: false,
        is_nested: false,
        seed: 5,
    }
}

/// Fills both matrices of all adapters.
pub fn fill(engine: &mut dyn Engine) -> Vec<f32> {
    let mut state = engine.export(0, true).unwrap().unwrap();
    for (i, value) in state.parameters.iter_mut().enumerate() {
        *value = ((i as f32 * 0.37).sin() * 997.0).sin() * 0.3;
    }
    engine.import(0, &state).unwrap();
    state.parameters
}

/// Each adapter's layer, with its A `[rank, inputs]` and B `[outputs, rank]`.
fn matrices(layout: &Layout, values: &[f32]) -> HashMap<String, [Vec<f32>; 2]> {
    let mut found = HashMap::new();
    for pair in layout.units[0].parameters.chunks(2) {
        if pair[0].role != Role::AdapterA {
            break;
        }
        let name = pair[0].name.strip_prefix("base_model.model.").unwrap();
        let name = name.strip_suffix(".lora_A.weight").unwrap();
        let of = |at: usize| values[pair[at].range()].to_vec();
        found.insert(format!("{name}.weight"), [of(0), of(1)]);
    }
    found
}

/// Σ over the shared dimension, [rows, shared] · [shared, columns].
fn multiply(a: &[f32], b: &[f32], [rows, shared, columns]: [usize; 3]) -> Vec<f32> {
    let mut product = vec![0.0; rows * columns];
    for row in 0..rows {
        for k in 0..shared {
            for column in 0..columns {
                product[row * columns + column] += a[row * shared + k] * b[k * columns + column];
            }
        }
    }
    product
}

fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    let cells = (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column));
    cells.map(|at| values[at]).collect()
}

/// The models of the tests, each with some modules: all, and some of those that are computed together.
pub fn cases() -> Vec<(ModelConfig, Adapters)> {
    let gpt2 = ModelConfig {
        family: Family::Gpt2,
        parallel_residual: false,
        num_key_value_heads: 4,
        ..plain()
    };
    let neox = ModelConfig {
        family: Family::GptNeoX,
        num_key_value_heads: 4,
        position_embeddings: false,
        tie_word_embeddings: false,
        ..plain()
    };
    vec![
        (config(), of(&[])),
        (tied(), of(&["q_proj", "v_proj"])),
        (
            with_vectors(),
            of(&["k_proj", "self_attn.o_proj", "up_proj"]),
        ),
        (gpt2, of(&["c_attn", "mlp.c_proj"])),
        (neox, of(&["query_key_value", "dense_4h_to_h"])),
    ]
}

pub fn new_adapters_change_nothing_and_only_they_train(new: New) {
    for (config, adapters) in cases() {
        let batch = Batch::new(2, 20);
        let (mut plain, mut adapted) = (new(config.clone(), None), new(config, Some(adapters)));
        let (expected, _) = plain.evaluate(batch.micro_batch()).unwrap();
        assert_eq!(adapted.evaluate(batch.micro_batch()).unwrap().0, expected);
        let (loss, gradient) = gradient_of(adapted.as_mut(), batch.micro_batch());
        assert!((loss - expected).abs() < 1e-9 * loss);
        assert_eq!(adapted.layout().units.len(), 1);
        // B is 0, so A has no gradient yet.
        for (name, [a, b]) in matrices(adapted.layout(), &gradient[0]) {
            assert!(a.iter().all(|&g| g == 0.0), "{name}");
            assert!(b.iter().any(|&g| g != 0.0), "{name}");
        }
    }
}

pub fn adapters_have_the_gradients_of_merged_weights(new: New) {
    for (config, adapters) in cases() {
        let batch = Batch::new(3, 20);
        let mut adapted = new(config.clone(), Some(adapters.clone()));
        let values = fill(adapted.as_mut());
        let all = matrices(adapted.layout(), &values);
        let (loss, gradient) = gradient_of(adapted.as_mut(), batch.micro_batch());
        let gradients = matrices(adapted.layout(), &gradient[0]);

        let mut merged = new(config.clone(), None);
        let (rank, scale) = (adapters.rank, adapters.scale());
        let is_conv = config.family == Family::Gpt2;
        for (unit, of) in layout(&config).units.iter().enumerate() {
            let mut state = merged.export(unit, true).unwrap().unwrap();
            for parameter in &of.parameters {
                let Some([a, b]) = all.get(&parameter.name) else {
                    continue;
                };
                let (outputs, inputs) = (b.len() / rank, a.len() / rank);
                let mut product = multiply(b, a, [outputs, rank, inputs]);
                if is_conv {
                    product = transposed(&product, outputs);
                }
                let weights = &mut state.parameters[parameter.range()];
                for (weight, product) in weights.iter_mut().zip(product) {
                    *weight += scale * product;
                }
            }
            merged.import(unit, &state).unwrap();
        }
        let (expected, of_units) = gradient_of(merged.as_mut(), batch.micro_batch());
        assert!((loss - expected).abs() < 1e-5 * loss, "{loss} {expected}");
        let mut seen = 0;
        for (of, mut gradient) in layout(&config).units.iter().zip(of_units) {
            // Files have another order in some families.
            let mut state = UnitState {
                exp_avg: vec![0.0; gradient.len()],
                exp_avg_sq: vec![0.0; gradient.len()],
                parameters: std::mem::take(&mut gradient),
            };
            let values = &mut state.parameters;
            for parameter in &of.parameters {
                let Some([a, b]) = all.get(&parameter.name) else {
                    continue;
                };
                seen += 1;
                let (outputs, inputs) = (b.len() / rank, a.len() / rank);
                let g = &values[parameter.range()];
                let g = match is_conv {
                    true => transposed(g, inputs),
                    false => g.to_vec(),
                };
                let scaled = |values: Vec<f32>| vec![values.iter().map(|v| scale * v).collect()];
                let db = multiply(&g, &transposed(a, rank), [outputs, inputs, rank]);
                let da = multiply(&transposed(b, outputs), &g, [rank, outputs, inputs]);
                let [got_a, got_b] = &gradients[&parameter.name];
                assert_close(&scaled(da), std::slice::from_ref(got_a), 1e-4);
                assert_close(&scaled(db), std::slice::from_ref(got_b), 1e-4);
            }
        }
        assert_eq!(seen, all.len());
    }
}

pub fn adapters_of_several_micro_batches_have_the_gradient_of_one(new: New) {
    let keys = [7, 8, 9, 10];
    for dropout in [0.0, 0.3] {
        let adapters = Adapters {
            dropout,
            ..of(&["q_proj", "down_proj"])
        };
        let batch = Batch::new(4, 20);
        let mut engine = new(config(), Some(adapters));
        fill(engine.as_mut());
        let part = |from: usize, to: usize| MicroBatch {
            dropout: &keys[from..to],
            ..batch.part(from, to)
        };
        let (loss, whole) = gradient_of(engine.as_mut(), part(0, 4));
        let mut sum = 0.0;
        for row in 0..4 {
            let got = engine.accumulate(part(row, row + 1), EVERYTHING, row == 3);
            sum += got.unwrap().loss;
        }
        assert!((sum - loss).abs() < 1e-6 * loss);
        assert_close(&whole, &take_gradient(engine.as_mut()), 1e-5);
        let (plain, _) = gradient_of(engine.as_mut(), batch.micro_batch());
        assert_eq!(plain == loss, dropout == 0.0, "{plain} {loss}");
    }
}

/// Of the loss with dropout, which draws the same in every pass.
pub fn gradients_with_dropout_agree_with_finite_differences(new: New) {
    let adapters = Adapters {
        dropout: 0.4,
        ..of(&[])
    };
    let keys = [3, 4];
    let batch = Batch::new(2, 20);
    let micro_batch = MicroBatch {
        dropout: &keys,
        ..batch.micro_batch()
    };
    let mut engine = new(config(), Some(adapters));
    fill(engine.as_mut());
    let (_, gradient) = gradient_of(engine.as_mut(), micro_batch);
    let original = engine.export(0, true).unwrap().unwrap();
    for parameter in &engine.layout().clone().units[0].parameters {
        let gradient = &gradient[0][parameter.range()];
        let norm = squared_norm(&[gradient.to_vec()]).sqrt();
        let mut loss_at = |step: f64| {
            let mut moved = original.clone();
            let weights = &mut moved.parameters[parameter.range()];
            for (w, g) in weights.iter_mut().zip(gradient) {
                *w += (f64::from(*g) / norm * step) as f32;
            }
            engine.import(0, &moved).unwrap();
            engine.evaluate(micro_batch).unwrap().0
        };
        let measured = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2;
        let error = (measured - norm).abs();
        assert!(
            error < 3e-3 * norm.max(1.0),
            "{}: {measured}, not {norm}",
            parameter.name
        );
    }
}

/// A model in 4 bits computes what the same weights in f32 do, in less memory.
pub fn quantised_weights_are_those_of_their_codes(new: New) {
    for ((config, adapters), is_nested) in
        cases().into_iter().zip([false, true].into_iter().cycle())
    {
        let quantised = Adapters {
            is_quantised: true,
            is_nested,
            ..adapters.clone()
        };
        let batch = Batch::new(2, 20);
        let mut packed = new(config.clone(), Some(quantised));
        let mut whole = new(config.clone(), Some(adapters));
        fill(packed.as_mut());
        fill(whole.as_mut());
        let mut plain = new(config.clone(), None);
        for (unit, of) in layout(&config).units.iter().enumerate() {
            let state = plain.export(unit, true).unwrap().unwrap();
            packed.import_frozen(unit, &state.parameters).unwrap();
            let mut state = of.state_from_files(&state).into_owned();
            for parameter in &of.parameters {
                let values = &mut state.parameters[parameter.range()];
                if is_layer(parameter.role) {
                    let [bytes, blocks] = nf4::sizes(values.len());
                    let (mut codes, mut scales) = (vec![0; bytes], vec![0.0; blocks]);
                    nf4::quantise(values, &mut codes, &mut scales);
                    if is_nested {
                        let (mut codes, mut factors) =
                            (vec![0; blocks], vec![0.0; nf4::groups(blocks)]);
                        let offset = nf4::quantise_scales(&scales, &mut codes, &mut factors);
                        let numbers = nf4::numbers();
                        nf4::dequantise_scales(&mut scales, &codes, &factors, offset, &numbers);
                    }
                    nf4::dequantise(values, &codes, &scales);
                }
            }
            of.state_to_files(&mut state);
            whole.import_frozen(unit, &state.parameters).unwrap();
        }
        let micro_batch = batch.micro_batch();
        let (loss, gradient) = gradient_of(packed.as_mut(), micro_batch);
        let (unquantised, _) = plain.evaluate(micro_batch).unwrap();
        assert!((loss - unquantised).abs() > 1e-4 * loss);
        assert_eq!((loss, gradient), gradient_of(whole.as_mut(), micro_batch));
    }
}

pub fn weights_below_adapters_are_imported(new: New) {
    for (config, adapters) in cases() {
        let batch = Batch::new(2, 20);
        let mut plain = new(config.clone(), None);
        let mut adapted = new(config.clone(), Some(adapters));
        for (unit, of) in layout(&config).units.iter().enumerate() {
            let mut state = plain.export(unit, true).unwrap().unwrap();
            for (i, value) in state.parameters.iter_mut().enumerate() {
                *value += (i as f32 * 0.11).sin() * 0.02;
            }
            plain.import(unit, &state).unwrap();
            adapted.import_frozen(unit, &state.parameters).unwrap();
            assert_eq!(adapted.frozen().unwrap().units[unit], *of);
        }
        let expected = plain.evaluate(batch.micro_batch()).unwrap();
        assert_eq!(adapted.evaluate(batch.micro_batch()).unwrap(), expected);
        assert!(adapted.import_frozen(0, &[0.0]).is_err());
        assert!(plain.import_frozen(0, &[0.0]).is_err());
    }
}

/// The models of the tests with modules that are trained whole: the ends of a model, vectors, and linear layers.
pub fn with_whole_modules() -> Vec<(ModelConfig, Adapters)> {
    let saved: [&[&str]; 5] = [
        &["lm_head", "embed_tokens", "norm"],
        &["model.norm", "down_proj"],
        &["q_norm", "k_norm", "q_proj", "k_proj", "v_proj", "lm_head"],
        &["wpe", "ln_f", "ln_1", "c_attn"],
        &["embed_in", "embed_out", "query_key_value"],
    ];
    let modules: [&[&str]; 5] = [
        &[],
        &["q_proj", "v_proj"],
        &["self_attn.o_proj", "up_proj"],
        &["mlp.c_proj"],
        &["dense_4h_to_h"],
    ];
    let all = cases().into_iter().zip(modules).zip(saved);
    let with = all.map(|(((config, _), modules), saved)| {
        let adapters = Adapters {
            saved: saved.iter().map(|&name| name.to_owned()).collect(),
            ..of(modules)
        };
        (config, adapters)
    });
    with.collect()
}

/// Each parameter that is trained whole: its unit and range in the model, and its range among what is trained.
fn whole(config: &ModelConfig, adapters: &Adapters) -> Vec<(usize, Range<usize>, Range<usize>)> {
    let model = layout(config);
    let trained = Adapted::new(&model, adapters.clone()).trained;
    let all = trained.units[0].parameters.iter().filter_map(|parameter| {
        let name = parameter.name.strip_prefix("base_model.model.").unwrap();
        let mut units = model.units.iter().enumerate();
        units.find_map(|(index, unit)| {
            let of_model = unit.parameters.iter().find(|it| it.name == name)?;
            Some((index, of_model.range(), parameter.range()))
        })
    });
    all.collect()
}

/// Modules that are trained whole begin as the model's, have the gradients that they have in the model, and are read by the
/// next pass after an update and after an import.
pub fn whole_modules_are_trained_as_in_the_model(new: New) {
    for (config, adapters) in with_whole_modules() {
        let places = whole(&config, &adapters);
        assert!(places.len() > 2);
        let batch = Batch::new(3, 20);
        let micro_batch = batch.micro_batch();
        let (mut plain, mut adapted) = (new(config.clone(), None), new(config, Some(adapters)));
        // The values that the model is given later are those with which they begin.
        for unit in 0..plain.layout().units.len() {
            let mut state = plain.export(unit, true).unwrap().unwrap();
            for (i, value) in state.parameters.iter_mut().enumerate() {
                *value += (i as f32 * 0.11).sin() * 0.02;
            }
            plain.import(unit, &state).unwrap();
            adapted.import_frozen(unit, &state.parameters).unwrap();
        }
        let (expected, of_units) = gradient_of(plain.as_mut(), micro_batch);
        let (loss, gradient) = gradient_of(adapted.as_mut(), micro_batch);
        assert!((loss - expected).abs() < 1e-6 * loss, "{loss} {expected}");
        for (unit, of_model, place) in &places {
            let expected = of_units[*unit][of_model.clone()].to_vec();
            assert!(expected.iter().any(|&g| g != 0.0));
            assert_close(&[expected], &[gradient[0][place.clone()].to_vec()], 1e-5);
        }
        // In two micro-batches, the first without targets.
        let none = vec![IGNORE; batch.targets.len()];
        let empty = MicroBatch {
            targets: &none,
            ..micro_batch
        };
        adapted.accumulate(empty, EVERYTHING, false).unwrap();
        adapted.accumulate(micro_batch, EVERYTHING, true).unwrap();
        assert_close(&gradient, &take_gradient(adapted.as_mut()), 1e-5);

        adapted.accumulate(micro_batch, NOTHING, true).unwrap();
        adapted.reduce(NOTHING).unwrap();
        let step = AdamW {
            learning_rate: 0.01,
            ..REVEAL
        };
        adapted.update(step).unwrap();
        let after = adapted.evaluate(micro_batch).unwrap();
        assert!((after.0 - loss).abs() > 1e-4 * loss, "{after:?} {loss}");
        let mut state = adapted.export(0, true).unwrap().unwrap();
        adapted.import(0, &state).unwrap();
        assert_eq!(adapted.evaluate(micro_batch).unwrap(), after);
        // The model with these modules, and adapters that add nothing.
        let first = places.iter().map(|(.., place)| place.start).min().unwrap();
        state.parameters[..first].fill(0.0);
        adapted.import(0, &state).unwrap();
        for (unit, of_model, place) in places {
            let mut whole = plain.export(unit, true).unwrap().unwrap();
            whole.parameters[of_model].copy_from_slice(&state.parameters[place]);
            plain.import(unit, &whole).unwrap();
        }
        let (expected, _) = plain.evaluate(micro_batch).unwrap();
        let (got, _) = adapted.evaluate(micro_batch).unwrap();
        assert!((got - expected).abs() < 1e-6 * expected, "{got} {expected}");
    }
}
