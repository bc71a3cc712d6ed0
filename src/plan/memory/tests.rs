use super::*;
use crate::plan::PlanRequest;
use crate::recipe::schema::spec::{BatchSchedule, Model, NormTest};

const GIB: f64 = (1_u64 << 30) as f64;

fn recipe(path: &str, objective: Objective, strategy: Strategy, length: u64) -> Spec {
    let mut spec = Spec {
        objective,
        model: Model {
            path: Some(path.to_owned()),
            precision: Precision::Bf16,
            activation_checkpointing: true,
            ..Model::default()
        },
        ..Spec::default()
    };
    spec.parallel.strategy = strategy;
    spec.data.sequence_length = length;
    spec
}

fn memory(spec: &Spec) -> Memory<'_> {
    Memory::of(spec, Dialect::HandbookTrl, &PlanRequest::gpus(1)).unwrap()
}

fn device(spec: &Spec, bytes: u64) -> Memory<'_> {
    let request = PlanRequest {
        device_memory: Some(bytes),
        ..PlanRequest::gpus(1)
    };
    Memory::of(spec, Dialect::HandbookTrl, &request).unwrap()
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB
}

#[test]
fn upstream_recipes_fit_on_their_authors_devices() {
    // The handbook's READMEs at 925acdf: full recipes under ZeRO-3 on GPUs of 80 GB.
    use Objective::{Dpo, Orpo, Sft};
    for (path, objective, length, ranks, per_device_batch_size) in [
        ("mistralai/Mistral-7B-v0.1", Sft, 2048, 8, 16),
        ("alignment-handbook/zephyr-7b-sft-full", Dpo, 1024, 8, 8),
        ("google/gemma-7b", Sft, 2048, 8, 4),
        ("HuggingFaceH4/zephyr-7b-gemma-sft-v0.1", Dpo, 1024, 8, 2),
        ("bigcode/starcoder2-15b", Sft, 2048, 8, 8),
        ("HuggingFaceH4/starchat2-15b-sft-v0.1", Dpo, 1024, 8, 2),
        ("HuggingFaceTB/SmolLM2-1.7B", Sft, 8192, 8, 4),
    ] {
        let spec = recipe(path, objective, Strategy::Fsdp, length);
        let estimate = memory(&spec).estimate(ranks, per_device_batch_size);
        assert!(gib(estimate.total) < 80.0, "{path}: {estimate:#?}");
    }
    let mut spec = recipe(
        "mistral-community/Mixtral-8x22B-v0.1",
        Orpo,
        Strategy::Fsdp,
        2048,
    );
    spec.optimizer.name = Some("adamw_bnb_8bit".to_owned());
    let estimate = memory(&spec).estimate(32, 1);
    assert!(gib(estimate.total) < 80.0, "{estimate:#?}");
}

#[test]
fn the_strategy_shards_sixteen_bytes_per_parameter() {
    let of = |strategy, ranks| {
        let spec = recipe("mistralai/Mistral-7B-v0.1", Objective::Sft, strategy, 2048);
        let e = memory(&spec).estimate(ranks, 1);
        (gib(e.parameters), gib(e.gradients), gib(e.optimizer))
    };
    let close = |got: (f64, f64, f64), want: (f64, f64, f64)| {
        let near = |a: f64, b: f64| (a - b).abs() < 0.05;
        assert!(
            near(got.0, want.0) && near(got.1, want.1) && near(got.2, want.2),
            "{got:?}"
        );
    };
    // 7.2417 B parameters: 6.744 GiB a byte. A gathered unit is a block of 218 M parameters.
    close(of(Strategy::Ddp, 8), (26.98, 26.98, 53.96));
    close(of(Strategy::Zero1, 8), (13.49, 13.49, 80.93 / 8.0));
    close(of(Strategy::Zero2, 8), (13.49, 13.49 / 8.0, 80.93 / 8.0));
    close(
        of(Strategy::Fsdp, 8),
        (26.98 / 8.0 + 0.81, 26.98 / 8.0, 53.96 / 8.0),
    );
}

#[test]
fn unsharded_vectors_of_the_norm_test_count_on_every_device() {
    let of = |strategy, test: NormTest| {
        let mut spec = recipe("mistralai/Mistral-7B-v0.1", Objective::Sft, strategy, 2048);
        spec.schedule = BatchSchedule::NormTest(test);
        gib(memory(&spec).estimate(8, 1).gradients)
    };
    let coordinates = || NormTest {
        coordinate_interval: 100,
        ..NormTest::default()
    };
    let unsharded = || NormTest {
        unsharded_accumulation: true,
        ..NormTest::default()
    };
    for (strategy, shards) in [(Strategy::Ddp, 1.0), (Strategy::Fsdp, 8.0)] {
        let close = |test, want: f64| {
            let got = of(strategy, test);
            assert!((got - want).abs() < 0.05, "{strategy:?}: {got} {want}");
        };
        close(NormTest::default(), 26.98 / shards);
        close(coordinates(), 26.98 / shards + 26.98);
        // Under DDP the gradient is unsharded anyway.
        let own = if shards > 1.0 { 26.98 } else { 0.0 };
        close(unsharded(), 26.98 / shards + own);
    }
}

#[test]
fn adapters_on_small_devices_agree_with_upstreams_rule_of_thumb() {
    // QLoRA's point: 7B on one GPU of 24 GB, micro-batch 4 (the zephyr QLoRA recipe).
    let mut spec = recipe(
        "mistralai/Mistral-7B-v0.1",
        Objective::Sft,
        Strategy::Ddp,
        2048,
    );
    spec.model.adapters = true;
    spec.model.load_in_4bit = true;
    assert!(device(&spec, 24_000_000_000).fits(1, 4));
    spec.model.adapters = false;
    assert!(!device(&spec, 24_000_000_000).fits(1, 1));
    // Full training of 70B needs sharding even on 80 GB.
    let spec = recipe(
        "meta-llama/Llama-2-70b-hf",
        Objective::Sft,
        Strategy::Ddp,
        2048,
    );
    assert!(!device(&spec, 80_000_000_000).fits(8, 1));
    let mut sharded = spec.clone();
    sharded.parallel.strategy = Strategy::Fsdp;
    let device = device(&spec, 80_000_000_000);
    let ranks = [8, 16, 32].map(|ranks| device.with(&sharded).fits(ranks, 1));
    assert_eq!(ranks, [false, false, true]);
}

#[test]
fn memory_grows_with_the_micro_batch_and_shrinks_with_checkpointing() {
    let mut spec = recipe(
        "TinyLlama/TinyLlama-1.1B",
        Objective::Sft,
        Strategy::Ddp,
        2048,
    );
    let with = memory(&spec).estimate(1, 8).activations;
    assert!(memory(&spec).estimate(1, 16).activations == 2 * with);
    spec.model.activation_checkpointing = false;
    assert!(memory(&spec).estimate(1, 8).activations > 3 * with);
}

#[test]
fn optimisers_are_distinguished_by_upstreams_names() {
    let bytes: Vec<f64> = [
        "adamw_torch",
        "adamw_bnb_8bit",
        "paged_adamw_32bit",
        "adamw_torch_4bit",
        "adafactor",
        "lion_8bit",
        "sgd",
    ]
    .map(|name| optimizer_bytes(Some(name)))
    .to_vec();
    assert_eq!(bytes, [8.0, 2.0, 8.0, 1.0, 0.0, 1.0, 0.0]);
}

#[test]
fn the_estimate_states_its_assumptions() {
    let mut spec = recipe(
        "alignment-handbook/zephyr-7b-sft-qlora",
        Objective::Dpo,
        Strategy::Ddp,
        1024,
    );
    spec.model.adapters = true;
    spec.model.load_in_4bit = true;
    spec.optimizer.name = Some("paged_adamw_32bit".to_owned());
    let memory = device(&spec, 24_000_000_000);
    let estimate = memory.estimate(1, 4);
    insta::assert_snapshot!(estimate.assumed.join("\n"));
    let guessed = memory.guessing_length(true).estimate(1, 4).assumed;
    let (last, stated) = guessed.split_last().unwrap();
    assert_eq!(last, "no key that is read states the length of a sequence");
    assert_eq!(stated, estimate.assumed);
}

/// `get_nb_trainable_parameters` of PEFT 0.21.2 for these shapes.
#[test]
fn adapters_have_as_many_parameters_as_pefts() {
    let qkvo = ["q_proj", "k_proj", "v_proj", "o_proj"];
    let neox = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"];
    let whole = ["embed_tokens", "lm_head"];
    let (mistral, pythia) = ("mistralai/Mistral-7B-v0.1", "EleutherAI/pythia-2.8b");
    for (path, rank, modules, whole, count) in [
        (mistral, 16, &["all-linear"][..], &[][..], 41_943_040.0),
        (mistral, 8, &qkvo[..1], &[], 8.0 * 32.0 * 8192.0),
        (mistral, 16, &qkvo, &whole, 275_775_488.0),
        (pythia, 8, &neox[..1], &[], 2_621_440.0),
        (pythia, 8, &neox, &[], 10_485_760.0),
    ] {
        let mut spec = recipe(path, Objective::Sft, Strategy::Ddp, 2048);
        let texts = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        spec.model.adapters = true;
        spec.model.lora_rank = Some(rank);
        spec.model.lora_target_modules = texts(modules);
        spec.model.lora_modules_to_save = texts(whole);
        assert_eq!(memory(&spec).trained(), count, "{path}, {modules:?}");
    }
}

#[test]
fn what_is_offloaded_is_not_on_the_device() {
    let mut spec = recipe(
        "mistralai/Mistral-7B-v0.1",
        Objective::Sft,
        Strategy::Zero2,
        2048,
    );
    let of = |spec: &Spec| memory(spec).estimate(8, 1);
    let here = of(&spec);
    spec.parallel.offload_optimizer = true;
    let offloaded = of(&spec);
    assert_eq!(
        (offloaded.optimizer, offloaded.parameters),
        (0, here.parameters)
    );
    assert!(here.optimizer > 0);
    // Without sharding nothing is offloaded.
    spec.parallel.strategy = Strategy::Ddp;
    assert!(of(&spec).optimizer > 0);
    // Only two units are on the device.
    spec.parallel.strategy = Strategy::Fsdp;
    spec.parallel.offload_parameters = true;
    let offloaded = of(&spec);
    let states = offloaded.parameters + offloaded.gradients + offloaded.optimizer;
    assert!(gib(states) < 2.0, "{offloaded:#?}");
    let last = offloaded.assumed.iter().any(|line| {
        line == "parameters, gradients and optimiser states in the host's memory (offload)"
    });
    assert!(last, "{:?}", offloaded.assumed);
}

#[test]
fn half_precision_weights_and_a_fused_loss_are_an_external_trainers() {
    let mut spec = recipe(
        "mistralai/Mistral-7B-v0.1",
        Objective::Sft,
        Strategy::Ddp,
        2048,
    );
    let whole = memory(&spec).estimate(1, 1);
    (spec.model.half_weights, spec.model.fused_loss) = (true, true);
    let estimate = memory(&spec).estimate(1, 1);
    for (less, more) in [
        (estimate.parameters, whole.parameters),
        (estimate.gradients, whole.gradients),
        (estimate.optimizer, whole.optimizer),
    ] {
        assert_eq!(less * 2, more);
    }
    let logits = LOGITS as u64 * 2048 * 32_000;
    assert_eq!(whole.activations - estimate.activations, logits);
    // FSDP keeps a copy in f32, and the built-in trainer has neither.
    spec.parallel.strategy = Strategy::Fsdp;
    assert_eq!(memory(&spec).per_parameter().iter().sum::<f64>(), 16.0);
    spec.parallel.strategy = Strategy::Ddp;
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        let runner = Runner::of(&spec, crate::plan::AskedRunner::BuiltIn, device, None);
        let request = PlanRequest::of(runner, 1);
        let of = |spec: &Spec| {
            Memory::of(spec, Dialect::HandbookTrl, &request)
                .unwrap()
                .estimate(1, 1)
        };
        let mut plain = spec.clone();
        (plain.model.half_weights, plain.model.fused_loss) = (false, false);
        assert_eq!(of(&spec), of(&plain), "{device}");
    }
}

#[test]
fn grpo_has_a_reference_if_its_beta_is_not_0_and_orpo_none() {
    for (objective, beta, expected) in [
        (Objective::Grpo, true, true),
        (Objective::Grpo, false, false),
        (Objective::Rloo, true, true),
        (Objective::Orpo, true, false),
        (Objective::Dpo, false, true),
    ] {
        let mut spec = recipe("mistralai/Mistral-7B-v0.1", objective, Strategy::Ddp, 512);
        spec.generation.reference = beta;
        assert_eq!(
            memory(&spec).has_reference(),
            expected,
            "{objective} {beta}"
        );
    }
}
