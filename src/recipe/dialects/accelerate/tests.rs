use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::spec::{Precision, Spec, Strategy};
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::{ReadError, Recipe, read};

/// Reads a recipe with an accelerate config, both given as text.
fn launch(recipe: &str, accelerate: &str) -> Result<Recipe, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let sft = folder.path().join("sft");
    std::fs::create_dir(&sft).unwrap();
    let (path, config) = (
        sft.join("config.yaml"),
        folder.path().join("accelerate.yaml"),
    );
    std::fs::write(&path, recipe).unwrap();
    std::fs::write(&config, accelerate).unwrap();
    std::fs::write(folder.path().join("zero1.json"), ZERO1).unwrap();
    read(&Request {
        path,
        accelerate: Some(config),
        ..Request::default()
    })
}

const ZERO1: &str = r#"{"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}"#;

const RECIPE: &str = "model_name_or_path: m\nper_device_train_batch_size: 4\n\
                      gradient_accumulation_steps: 2\ndataset_name: d\n";

fn spec(accelerate: &str) -> Spec {
    let recipe = launch(RECIPE, accelerate).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(recipe.dialect, Dialect::HandbookTrl);
    recipe.spec
}

/// Rule and message of every problem.
fn problems(accelerate: &str) -> String {
    let diagnostics = match launch(RECIPE, accelerate) {
        Ok(recipe) => recipe.diagnostics,
        Err(error) => error.diagnostics,
    };
    let lines: Vec<String> = diagnostics
        .iter()
        .map(|d| {
            let line = d.span.map_or(0, |s| s.line);
            format!(
                "{line}: {}[{}] {} ({})",
                d.severity, d.rule, d.message, d.help
            )
        })
        .collect();
    lines.join("\n")
}

#[test]
fn version_1_of_fsdp_names_its_strategy_in_either_place() {
    for (key, strategy) in [
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", Strategy::Zero2),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", Strategy::Zero2),
        ("fsdp_reshard_after_forward: FULL_SHARD", Strategy::Fsdp),
        ("fsdp_reshard_after_forward: false", Strategy::Zero2),
        ("fsdp_reshard_after_forward: true", Strategy::Fsdp),
    ] {
        let config = format!("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{{key}}}\n");
        assert_eq!(spec(&config).parallel.strategy, strategy, "{key}");
    }
}

#[test]
fn the_config_gives_the_world_and_the_recipe_the_batch() {
    let found = spec(
        "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmixed_precision: fp16\n\
         fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n",
    );
    assert_eq!(found.batch.gpus, Some(16));
    assert_eq!(
        (found.batch.per_device_batch_size, found.batch.accumulation),
        (Some(4), Some(2))
    );
    assert_eq!(found.parallel.strategy, Strategy::Zero2);
    assert_eq!(
        found.model.precision,
        Precision::Bf16,
        "TRL's default wins over the config"
    );
}

#[test]
fn sharding_is_recognised_by_all_its_names() {
    let fsdp = |config: &str| {
        spec(&format!(
            "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{{config}}}\n"
        ))
        .parallel
        .strategy
    };
    assert_eq!(fsdp("fsdp_sharding_strategy: 1"), Strategy::Fsdp);
    assert_eq!(fsdp("sharding_strategy: no_shard"), Strategy::Ddp);
    assert_eq!(fsdp("fsdp_sharding_strategy: HYBRID_SHARD"), Strategy::Fsdp);
    assert_eq!(fsdp("fsdp_version: 2"), Strategy::Fsdp);
    assert_eq!(
        fsdp("fsdp_version: 2, fsdp_reshard_after_forward: false"),
        Strategy::Zero2
    );
    let zero = |config: &str| {
        spec(&format!(
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {{{config}}}\n"
        ))
        .parallel
        .strategy
    };
    assert_eq!(zero("zero_stage: 3"), Strategy::Fsdp);
    assert_eq!(zero("zero_stage: 1"), Strategy::Zero1);
    assert_eq!(zero("zero_stage: 0"), Strategy::Ddp);
    assert_eq!(zero(""), Strategy::Zero2, "accelerate's own default");
}

#[test]
fn a_config_without_processes_takes_them_from_the_command_line() {
    assert_eq!(spec("distributed_type: MULTI_GPU\n").batch.gpus, None);
    assert_eq!(
        spec("distributed_type: MULTI_GPU\nnum_processes: -1\n")
            .batch
            .gpus,
        None
    );
    assert_eq!(spec("distributed_type: 'NO'\n").batch.gpus, Some(1));
}

/// accelerate assumes 1 process for the type `"NO"` alone, and exits for every other config.
#[test]
fn a_missing_number_of_processes_is_a_warning() {
    let warns = |config: &str| problems(config).contains("warning[mandatory-missing]");
    assert!(warns("distributed_type: MULTI_GPU\n"));
    assert!(warns("distributed_type: FSDP\nnum_processes: -1\n"));
    assert!(warns("distributed_type: NO\n"), "false is not \"NO\"");
    assert!(warns("distributed_type: 'NO'\nnum_processes: -1\n"));
    assert!(!warns("distributed_type: 'NO'\n"));
    assert!(!warns("distributed_type: MULTI_GPU\nnum_processes: 2\n"));
}

#[test]
fn traps_and_mistakes_are_reported() {
    let cases = [
        "distributed_type: NO\nnum_processes: 8\n",
        "distributed_type: MULTI_GPUS\n",
        "distributed_type: MULTI_GPU\nnum_proceses: 8\n",
        "distributed_type: MULTI_GPU\nnum_processes: \"8\"\n",
        "distributed_type: MULTI_GPU\nnum_processes: 7\nnum_machines: 2\n",
        "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 0\n",
        "distributed_type: MULTI_GPU\nmixed_precision: bf61\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 5}\n",
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL}\n",
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n",
        "zero_optimization: {stage: 2}\n",
        "distributed_type: FSDP\nnum_processes: 4\nparallelism_config: {parallelism_config_tp_size: two}\n",
    ];
    let found: Vec<String> = cases
        .iter()
        .map(|c| format!("{c}{}\n", problems(c)))
        .collect();
    insta::assert_snapshot!(found.join("\n"));
}

#[test]
fn a_second_accumulation_must_agree() {
    let conflict = problems(
        "distributed_type: DEEPSPEED\nnum_processes: 8\n\
         deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4}\n",
    );
    insta::assert_snapshot!(conflict);
    let agreed = spec(
        "distributed_type: DEEPSPEED\nnum_processes: 8\n\
         deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2}\n",
    );
    assert_eq!(agreed.batch.accumulation, Some(2));
    // A DeepSpeed file without accumulation means 1.
    let silent = problems(
        "distributed_type: DEEPSPEED\nnum_processes: 8\n\
         deepspeed_config: {deepspeed_config_file: zero1.json}\n",
    );
    assert!(silent.contains("accumulation-conflict"), "{silent}");
}

#[test]
fn an_unread_deepspeed_file_is_a_warning() {
    let recipe = launch(
        RECIPE,
        "distributed_type: DEEPSPEED\nnum_processes: 8\n\
         deepspeed_config: {deepspeed_config_file: elsewhere.json}\n",
    )
    .unwrap();
    assert_eq!(recipe.diagnostics[0].rule, "deepspeed-unread");
    assert_eq!(recipe.diagnostics[0].severity, Severity::Warning);
}

#[test]
fn a_cpu_that_processes_on_gpus_do_not_read_is_a_warning() {
    let of = |kind: &str| {
        problems(&format!(
            "distributed_type: {kind}\nnum_processes: 2\nuse_cpu: true\n"
        ))
    };
    for kind in ["FSDP", "MULTI_GPU"] {
        let message = format!(
            "3: warning[unsupported-value] `use_cpu` has no effect with `distributed_type: {kind}`"
        );
        assert!(of(kind).contains(&message), "{}", of(kind));
    }
    assert!(!of("MULTI_CPU").contains("use_cpu"), "{}", of("MULTI_CPU"));
}

#[test]
fn offloading_is_read_of_fsdp_and_of_deepspeed() {
    let offloads = |config: &str| {
        let parallel = spec(config).parallel;
        (parallel.offload_parameters, parallel.offload_optimizer)
    };
    let fsdp =
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_offload_params: true}\n";
    assert_eq!(offloads(fsdp), (true, true));
    let zero = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: \
                {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none}\n";
    assert_eq!(offloads(zero), (false, true));
}
