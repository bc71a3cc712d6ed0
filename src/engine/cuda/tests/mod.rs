//! The engine on the emulated GPU. The CPU engine and PyTorch are the references.

mod adapters;
mod kernel_table;
mod limits;
mod roofline;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::Value;

use super::driver::{Device, Driver};
use super::kernels::attention::Variant;
use super::libraries;
use super::nvrtc::Nvrtc;
use super::options::Precision;
use super::{CudaEngine, CudaOptions};
use crate::engine::cpu::{CpuEngine, CpuOptions};
use crate::engine::testing::contract;
use crate::engine::testing::reference::{CASES, Reference};
use crate::engine::testing::*;
use crate::engine::{
    Activation, AdamW, Engine, EngineError, Family, Layout, Measure, MicroBatch, ModelConfig,
    Noise, NormKind, TokenLoss, layout,
};

const OF_MICRO_BATCHES: Measure = Measure {
    micro_batches: true,
    worker: false,
    coordinates: true,
};

/// The emulated GPU; `None`, after printing the reason, without NVRTC.
pub fn device() -> Option<Arc<Device>> {
    static DEVICE: OnceLock<Option<Arc<Device>>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        if let Err(problem) = Nvrtc::load(None) {
            assert!(std::env::var_os("CI").is_none(), "{problem}");
            eprintln!("skipped: nothing ran on the emulated GPU, {problem}");
            return None;
        }
        let installed = tempfile::tempdir().unwrap().keep();
        emulated_gpu::install(&installed).unwrap();
        libraries::EMULATED.set(installed).unwrap();
        let driver = Driver::load().unwrap();
        Some(Device::open(&driver, 0).unwrap())
    });
    device.clone()
}

/// Asserts that a section of `docs/gpu.md` has this text. With `UPDATE` set, writes it.
pub fn assert_in_docs(section: &str, text: &str) {
    static FILE: Mutex<()> = Mutex::new(());
    let _one_at_a_time = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/gpu.md");
    let found = std::fs::read_to_string(&path).unwrap();
    let [begin, end] = ["begin", "end"].map(|edge| format!("<!-- {section}: {edge} -->\n"));
    let (before, rest) = found.split_once(&begin).unwrap();
    let (_, after) = rest.split_once(&end).unwrap();
    let expected = format!("{before}{begin}\n{text}\n{end}{after}");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &expected).unwrap();
        return;
    }
    assert_eq!(found, expected, "docs/gpu.md: run the tests with UPDATE=1");
}

/// Compiled kernels are shared by all tests of this build.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-kernels")
}

fn f32_options() -> CudaOptions {
    CudaOptions {
        precision: Precision::F32,
        measure: OF_MICRO_BATCHES,
        packed: true,
        kernel_cache: Some(cache()),
        ..CudaOptions::default()
    }
}

pub fn bf16_options() -> CudaOptions {
    CudaOptions {
        precision: Precision::Bf16,
        ..f32_options()
    }
}

fn engine(device: &Arc<Device>, config: ModelConfig, options: CudaOptions) -> CudaEngine {
    CudaEngine::new(config, options, device, None, Some(5)).unwrap()
}

fn cpu(config: ModelConfig) -> CpuEngine {
    cpu_with(config, TokenLoss::CrossEntropy)
}

fn cpu_with(config: ModelConfig, token_loss: TokenLoss) -> CpuEngine {
    let options = CpuOptions {
        measure: OF_MICRO_BATCHES,
        token_loss,
        ..CpuOptions::default()
    };
    CpuEngine::new(config, options, None, Some(5)).unwrap()
}

/// Norm below which an error counts as if it were this large: of a single token, queries and keys have no gradient.
const LEAST_NORM: f64 = 1e-3;

/// ‖got − expected‖ / ‖expected‖.
fn relative(got: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = got.iter().zip(expected);
    let error = norm(&mut pairs.map(|(&a, &b)| f64::from(a) - f64::from(b)));
    error / norm(&mut expected.iter().map(|&x| f64::from(x))).max(LEAST_NORM)
}

/// Asserts every gradient tensor within `tolerance` of the expected one, relative to its L2 norm.
fn assert_gradients(layout: &Layout, gradient: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f64) {
    for (unit, (got, expected)) in layout.units.iter().zip(gradient.iter().zip(expected)) {
        for parameter in &unit.parameters {
            let range = parameter.range();
            let error = relative(&got[range.clone()], &expected[range]);
            assert!(error <= tolerance, "{}: {error}", parameter.name);
        }
    }
}

/// Asserts every gradient tensor within `tolerance` of the CPU engine's, relative to its L2 norm.
fn compare_gradients(device: &Arc<Device>, config: ModelConfig, batch: &Batch, tolerance: f64) {
    let (mut cuda, mut cpu) = (engine(device, config.clone(), f32_options()), cpu(config));
    compare(&mut cuda, &mut cpu, batch.micro_batch(), tolerance);
}

/// As [`compare_gradients`]; returns the loss.
fn compare(
    cuda: &mut CudaEngine,
    cpu: &mut CpuEngine,
    micro_batch: MicroBatch<'_>,
    tolerance: f64,
) -> f64 {
    let (loss, gradient) = gradient_of(cuda, micro_batch);
    let (expected_loss, expected) = gradient_of(cpu, micro_batch);
    assert!((loss - expected_loss).abs() <= tolerance * expected_loss);
    assert_gradients(cpu.layout(), &gradient, &expected, tolerance);
    loss
}

contract::contract_tests!(device().map(|device| {
    move |config| -> Box<dyn Engine> { Box::new(engine(&device, config, f32_options())) }
}));

#[test]
fn every_f32_gradient_is_the_cpu_engines() {
    let Some(device) = device() else { return };
    for (heads, kv_heads, head_dim, tied, seq_len) in [
        (4, 4, 32, false, 33),
        (4, 2, 6, true, 70),
        (3, 1, 100, false, 17),
        (2, 1, 128, true, 65),
        (2, 1, 256, false, 40),
        (1, 1, 2, false, 1),
    ] {
        let config = ModelConfig {
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            tie_word_embeddings: tied,
            ..config()
        };
        compare_gradients(&device, config, &Batch::new(3, seq_len), 1e-5);
    }
    compare_gradients(&device, gemma(), &Batch::new(3, 40), 1e-5);
    for parallel_residual in [false, true] {
        let config = of_layer_norms(parallel_residual);
        compare_gradients(&device, config, &Batch::new(3, 40), 1e-5);
    }
}

#[test]
fn smoothed_and_dft_losses_and_their_gradients_are_the_cpu_engines() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 40);
    let (plain, _) = gradient_of(&mut cpu(config()), batch.micro_batch());
    for token_loss in [TokenLoss::Smoothed(0.1), TokenLoss::Dft] {
        let options = CudaOptions {
            token_loss,
            ..f32_options()
        };
        let mut cuda = engine(&device, config(), options);
        let mut cpu = cpu_with(config(), token_loss);
        let (loss, targets) = cpu.evaluate(batch.micro_batch()).unwrap();
        assert_ne!(loss, plain);
        let (found, same) = cuda.evaluate(batch.micro_batch()).unwrap();
        assert!((found - loss).abs() < 1e-5 * loss && same == targets);
        compare(&mut cuda, &mut cpu, batch.micro_batch(), 1e-5);
    }
}

#[test]
fn noise_on_embeddings_is_the_cpu_engines_and_only_where_it_is_given() {
    let Some(device) = device() else { return };
    let options = CudaOptions {
        noisy: true,
        ..f32_options()
    };
    let (mut cuda, mut cpu) = (engine(&device, config(), options), cpu(config()));
    let batch = Batch::new(3, 40);
    let noise = [1, u64::MAX, 1 << 40].map(|key| Noise {
        key,
        magnitude: 0.5,
    });
    let noisy = MicroBatch {
        noise: &noise,
        ..batch.micro_batch()
    };
    let mut both = |micro_batch| compare(&mut cuda, &mut cpu, micro_batch, 1e-5);
    let plain = both(batch.micro_batch());
    assert!((both(noisy) - plain).abs() > 1e-3 * plain);
    assert_eq!(both(batch.micro_batch()), plain);
}

/// Mean losses of `steps` steps of AdamW on one batch.
fn losses(engine: &mut dyn Engine, batch: &Batch, steps: u64) -> Vec<f64> {
    let step = |step| {
        let got = engine
            .accumulate(batch.micro_batch(), NOTHING, true)
            .unwrap();
        engine.reduce(NOTHING).unwrap();
        let mean = 1.0 / got.targets as f64;
        let update = AdamW {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            vector_decay: 0.0,
            step,
            gradient_scale: mean,
        };
        engine.update(update).unwrap();
        got.loss * mean
    };
    (1..=steps).map(step).collect()
}

#[test]
fn fifty_steps_in_f32_have_the_cpu_engines_losses() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 40);
    let got = losses(&mut engine(&device, config(), f32_options()), &batch, 50);
    let expected = losses(&mut cpu(config()), &batch, 50);
    assert!(expected[49] < 0.7 * expected[0], "{expected:?}");
    for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let error = (got - expected).abs() / expected;
        assert!(error < 1e-3, "step {step}: {got}, not {expected}");
    }
}

#[test]
fn bf16_is_as_near_to_f32_as_pytorchs_autocast() {
    let Some(device) = device() else { return };
    for name in CASES {
        let reference = Reference::read(name);
        let mut cuda = engine(&device, reference.config(), bf16_options());
        reference.set_weights(&mut cuda);
        let (loss, gradient) = gradient_of(&mut cuda, reference.batch().micro_batch());
        let expected = reference.number("/summed_loss");
        let autocast = reference.number("/autocast/summed_loss");
        // A loss may agree by chance, so that its limit is no smaller than the gradients' least error.
        let allowed = (1.5 * (autocast - expected).abs()).max(1e-3 * expected);
        assert!(
            (loss - expected).abs() <= allowed,
            "{name}: {loss}, not {expected}"
        );
        for (unit, gradient) in cuda.layout().units.iter().zip(&gradient) {
            for parameter in &unit.parameters {
                let expected = reference.floats(&parameter.name);
                let error = relative(&gradient[parameter.range()], &expected);
                let autocast = reference.autocast_error(&parameter.name);
                assert!(
                    error <= 1.5 * autocast,
                    "{name}: {} has the error {error}, PyTorch's {autocast}",
                    parameter.name
                );
            }
        }
    }
}

/// A model with what only Gemma has.
fn gemma() -> ModelConfig {
    ModelConfig {
        family: Family::Gemma,
        activation: Activation::GeluTanh,
        norm: NormKind::RmsPlusOne,
        scaled_embedding: true,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 256,
        max_position_embeddings: 256,
        ..tied()
    }
}

/// A model with what only GPT-2, GPT-NeoX and StarCoder2 have, and whose attention in bf16 is Hopper's.
fn of_layer_norms(parallel_residual: bool) -> ModelConfig {
    ModelConfig {
        parallel_residual,
        partial_rotary_factor: 0.25,
        intermediate_size: 2048,
        num_attention_heads: 3,
        num_key_value_heads: 1,
        head_dim: 64,
        max_position_embeddings: 256,
        ..plain()
    }
}

/// A model whose attention in bf16 is Hopper's.
fn hoppers(head_dim: usize) -> ModelConfig {
    ModelConfig {
        intermediate_size: 1024,
        num_attention_heads: 3,
        num_key_value_heads: 1,
        head_dim,
        max_position_embeddings: 256,
        ..config()
    }
}

#[test]
fn every_variant_of_attention_gives_the_gradients_of_f32() {
    let Some(device) = device() else { return };
    let batch = Batch::new(2, 140);
    // Of one token, of parts of tiles, and of more than a tile.
    let packed = &[0, 3, 140, 141][..];
    for (config, expected, starts) in [
        (hoppers(64), Variant::Wgmma, packed),
        (hoppers(128), Variant::Wgmma, &[]),
        (of_layer_norms(false), Variant::Wgmma, &[]),
        (of_layer_norms(true), Variant::Wgmma, packed),
        (gemma(), Variant::F32, &[]),
    ] {
        let variant = Variant::of(&config, Precision::Bf16, device.capability);
        assert_eq!(variant, expected);
        let [(loss, bf16), (expected_loss, f32)] = [bf16_options(), f32_options()].map(|options| {
            let micro_batch = MicroBatch {
                starts,
                ..batch.micro_batch()
            };
            gradient_of(&mut engine(&device, config.clone(), options), micro_batch)
        });
        assert!((loss - expected_loss).abs() < 1e-3 * expected_loss);
        assert_gradients(&layout(&config), &bf16, &f32, 3e-2);
    }
}

#[test]
fn hoppers_attention_is_chosen_where_it_runs_and_fits() {
    let wide = hoppers(64);
    let narrow = ModelConfig {
        intermediate_size: 300,
        ..hoppers(64)
    };
    for (config, capability, expected) in [
        (&wide, (9, 0), Variant::Wgmma),
        (&hoppers(128), (9, 0), Variant::Wgmma),
        (&hoppers(96), (9, 0), Variant::Mma),
        (&wide, (8, 0), Variant::Mma),
        (&wide, (10, 0), Variant::Mma),
        (&narrow, (9, 0), Variant::Mma),
    ] {
        let chosen = Variant::of(config, Precision::Bf16, capability);
        assert_eq!(chosen, expected, "{config:?} on {capability:?}");
    }
    assert_eq!(Variant::of(&wide, Precision::F32, (9, 0)), Variant::F32);
}

#[test]
fn options_that_save_time_or_memory_change_no_bit() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 40);
    for (config, options) in [
        (tied(), f32_options()),
        (tied(), bf16_options()),
        (hoppers(64), bf16_options()),
        (with_vectors(), f32_options()),
        (plain(), f32_options()),
        (of_layer_norms(true), bf16_options()),
    ] {
        let gradient = |options: CudaOptions| {
            let mut engine = engine(&device, config.clone(), options);
            let gradient = gradient_of(&mut engine, batch.micro_batch());
            (gradient, engine.memory().0)
        };
        let (expected, memory) = gradient(options.clone());
        let (checkpointed, less) = gradient(CudaOptions {
            activation_checkpointing: true,
            ..options.clone()
        });
        assert_eq!(checkpointed, expected);
        assert!(less < memory);
        let no_graphs = CudaOptions {
            no_graphs: true,
            ..options
        };
        assert_eq!(gradient(no_graphs).0, expected);
    }
}

#[test]
fn chunks_of_the_head_give_the_whole_batchs_loss_and_gradient() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 20);
    for config in [config(), tied(), with_vectors(), plain()] {
        let mut whole = engine(&device, config.clone(), f32_options());
        let (loss, expected) = gradient_of(&mut whole, batch.micro_batch());
        let options = CudaOptions {
            logits_rows: Some(7),
            ..f32_options()
        };
        let mut chunked = engine(&device, config, options);
        let (got, gradient) = gradient_of(&mut chunked, batch.micro_batch());
        assert!((got - loss).abs() < 1e-6 * loss);
        assert_close(&expected, &gradient, 1e-5);
        let (evaluated, _) = chunked.evaluate(batch.micro_batch()).unwrap();
        assert_eq!(evaluated, got);
    }
}

#[test]
fn coordinates_are_the_cpu_engines() {
    let Some(device) = device() else { return };
    let batch = Batch::new(4, 20);
    let of_step = Measure {
        micro_batches: false,
        worker: true,
        coordinates: true,
    };
    for measure in [OF_MICRO_BATCHES, of_step] {
        let sums = |engine: &mut dyn Engine| {
            let mut sums = Vec::new();
            // The first step must leave no trace.
            for _ in 0..2 {
                sums.clear();
                for row in 0..4 {
                    let micro_batch = batch.part(row, row + 1);
                    engine.accumulate(micro_batch, measure, row == 3).unwrap();
                }
                engine.reduce(measure).unwrap();
                let mut show = |weighted: &[f32], summed: &[f32]| {
                    sums.push(weighted.to_vec());
                    sums.push(summed.to_vec());
                };
                engine.coordinates(&mut show).unwrap();
                engine.discard();
            }
            sums
        };
        let got = sums(&mut engine(&device, tied(), f32_options()));
        let expected = sums(&mut cpu(tied()));
        for (got, expected) in got.iter().zip(&expected) {
            assert!(relative(got, expected) < 1e-5);
        }
    }
}

#[test]
fn a_state_moves_between_the_engines() {
    let Some(device) = device() else { return };
    let batch = Batch::new(3, 20);
    let mut cuda = engine(&device, config(), bf16_options());
    losses(&mut cuda, &batch, 3);
    let mut cpu = cpu(config());
    let mut again = engine(&device, config(), bf16_options());
    for unit in 0..cuda.layout().units.len() {
        let state = cuda.export(unit, true).unwrap().unwrap();
        cpu.import(unit, &state).unwrap();
        let state = cpu.export(unit, true).unwrap().unwrap();
        again.import(unit, &state).unwrap();
    }
    assert_eq!(losses(&mut again, &batch, 3), losses(&mut cuda, &batch, 3));
}

#[test]
fn the_memory_limit_is_known_before_the_first_step() {
    let Some(device) = device() else { return };
    let batch = Batch::new(4, 40);
    let mut free = engine(&device, config(), bf16_options());
    let model = free.memory().0;
    free.reserve(4, 40).unwrap();
    let needed = free.memory().0;
    let limited = |limit| {
        let options = CudaOptions {
            memory_limit: Some(limit),
            ..bf16_options()
        };
        CudaEngine::new(config(), options, &device, None, Some(5))
    };
    let refused = |error| matches!(error, Err(EngineError::OutOfMemory { .. }));
    assert!(refused(limited(model - 1).map(drop)));

    // The reserved memory is exactly enough for the whole step.
    let mut exact = limited(needed).unwrap();
    exact.reserve(4, 40).unwrap();
    exact
        .accumulate(batch.micro_batch(), EVERYTHING, true)
        .unwrap();
    exact.reduce(EVERYTHING).unwrap();
    exact.update(REVEAL).unwrap();
    exact.evaluate(batch.micro_batch()).unwrap();
    assert_eq!(exact.memory(), (needed, needed));

    // One byte less is refused and leaves nothing allocated; a smaller micro-batch still works.
    let mut short = limited(needed - 1).unwrap();
    assert!(refused(short.reserve(4, 40)));
    assert_eq!(short.memory().0, model);
    short.reserve(2, 40).unwrap();
    short
        .accumulate(batch.part(0, 2), EVERYTHING, true)
        .unwrap();
}

/// The child process launches kernels one by one.
const NO_GRAPHS: &str = "EVENKEEL_TEST_NO_GRAPHS";

/// Runs an ignored test of this engine in a separate process, with settings of the emulated GPU. Returns the
/// outcome that it printed, and the lines of the GPU's report.
pub fn child(test: &str, settings: &[(&str, String)]) -> (String, Vec<Value>) {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture"])
        .arg(format!("engine::cuda::tests::{test}"))
        .env("EMULATED_GPU_REPORT", &report)
        .envs(settings.iter().map(|(name, value)| (name, value)))
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let problems = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{problems}");
    let outcome = printed
        .lines()
        .find_map(|line| line.strip_prefix("outcome: "));
    let report = std::fs::read_to_string(&report).unwrap();
    let lines = report
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    (outcome.unwrap().to_owned(), lines.collect())
}

/// Runs [`a_child_process_trains`]. Returns its outcome and the kinds of the findings.
fn child_trains(settings: &[(&str, String)]) -> (String, Vec<String>) {
    let (outcome, lines) = child("a_child_process_trains", settings);
    let kinds = lines
        .iter()
        .map(|line| line["kind"].as_str().unwrap().to_owned());
    (outcome, kinds.filter(|kind| kind != "summary").collect())
}

/// Two steps of two micro-batches. After an out-of-memory error it continues with half of the micro-batch, as
/// the ranks descend.
fn train(device: &Arc<Device>) -> Result<(), EngineError> {
    let batch = Batch::new(4, 20);
    let options = CudaOptions {
        no_graphs: std::env::var_os(NO_GRAPHS).is_some(),
        ..bf16_options()
    };
    let mut engine = CudaEngine::new(tied(), options, device, None, Some(5))?;
    let mut rows = 2;
    let mut descended = None;
    for _ in 0..2 {
        let mut row = 0;
        while row < 4 {
            let micro_batch = batch.part(row, row + rows);
            match engine.accumulate(micro_batch, EVERYTHING, row + rows == 4) {
                Ok(_) => row += rows,
                Err(EngineError::OutOfMemory { .. }) if rows == 2 && row == 0 => {
                    rows = 1;
                    engine.reserve(rows, 20)?;
                    descended = Some(());
                }
                Err(error) => return Err(error),
            }
        }
        engine.reduce(EVERYTHING)?;
        engine.update(REVEAL)?;
    }
    match descended {
        Some(()) => println!("outcome: descended"),
        None => println!("outcome: trained"),
    }
    Ok(())
}

#[test]
#[ignore = "the process of other tests"]
fn a_child_process_trains() {
    // Its own context, so that the emulated GPU reports what is not freed with it.
    let outcome = device().map(|device| train(&device));
    match outcome {
        Some(Err(EngineError::OutOfMemory { .. })) => println!("outcome: out of memory"),
        Some(Err(error)) => println!("outcome: {error}"),
        _ => {}
    }
}

#[test]
fn any_failed_allocation_is_out_of_memory_and_leaks_nothing() {
    if device().is_none() {
        return;
    }
    let mut outcomes = Vec::new();
    for n in 1.. {
        let setting = ("EMULATED_GPU_FAIL_ALLOC", n.to_string());
        let (outcome, findings) = child_trains(&[setting]);
        if outcome == "trained" {
            assert_eq!(findings, [""; 0]);
            break;
        }
        assert_eq!(findings, ["out_of_memory"], "allocation {n}");
        outcomes.push(outcome);
    }
    // The state, pinned memory, then the workspace and its pinned memory, from which the engine descends.
    assert!(
        outcomes.contains(&"out of memory".to_owned()),
        "{outcomes:?}"
    );
    assert!(outcomes.contains(&"descended".to_owned()), "{outcomes:?}");
    let known = |outcome: &String| ["out of memory", "descended"].contains(&outcome.as_str());
    assert!(outcomes.iter().all(known), "{outcomes:?}");
}

#[test]
fn any_missing_wait_between_the_streams_is_found() {
    if device().is_none() {
        return;
    }
    for no_graphs in [true, false] {
        let (mut waits, mut found) = (0, Vec::new());
        for n in 1.. {
            let mut settings = vec![("EMULATED_GPU_DROP_WAIT", n.to_string())];
            settings.extend(no_graphs.then(|| (NO_GRAPHS, "1".to_owned())));
            let (outcome, findings) = child_trains(&settings);
            // A race may be found only after the last wait of the program.
            if outcome == "trained" && findings.is_empty() {
                break;
            }
            // By the order of operations, data are missing or change in a race; or a capture has a loose end.
            let kinds = ["race", "fault", "misuse"];
            let is_found = findings.iter().any(|kind| kinds.contains(&kind.as_str()))
                || outcome.contains("CUDA_ERROR_STREAM_CAPTURE_");
            assert!(is_found, "wait {n}: {outcome} {findings:?}");
            waits += 1;
            found.extend(findings);
        }
        eprintln!("missing waits, without graphs {no_graphs}: {found:?}");
        assert!(waits >= 5, "{waits}");
        assert!(found.contains(&"race".to_owned()), "{found:?}");
    }
}
