use crate::batch::{PlanRequest, examine};
use crate::recipe::spec::Strategy;
use crate::recipe::{ReadError, Recipe, Request, Severity, read};

const EIGHT: &str = "distributed_type: DEEPSPEED\nnum_processes: 8\n";
const TRAINER: &str = "train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";
const LAUNCH: &str = "accelerate launch --config_file @/a.yaml";

/// A command with `a.yaml`, an accelerate config, and DeepSpeed configs of all stages; `@` is
/// their directory.
fn job(config: &str, command: &str) -> Result<Recipe, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let auto = r#""train_batch_size": "auto", "gradient_accumulation_steps": "auto""#;
    for (name, text) in [
        ("a.yaml", config.to_owned()),
        ("one.json", stage("1", auto)),
        ("auto.json", stage("\"auto\"", auto)),
        (
            "three.json",
            stage("3", r#""gradient_accumulation_steps": 8"#),
        ),
        (
            "micro.json",
            stage(
                "2",
                r#""gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 8"#,
            ),
        ),
        (
            "whole.json",
            stage(
                "2",
                r#""gradient_accumulation_steps": 2, "train_batch_size": 32"#,
            ),
        ),
        (
            "more.json",
            stage(
                "2",
                &format!(
                    r#"{auto}, "gradient_clipping": 0.5, "bf16": {{"enabled": true}}, "optimizer": {{"params": {{"lr": 1e-3}}}}"#
                ),
            ),
        ),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let line = command.replace('@', &folder.path().display().to_string());
    read(&Request {
        command: line.split_whitespace().map(str::to_owned).collect(),
        ..Request::default()
    })
}

fn stage(stage: &str, more: &str) -> String {
    format!(r#"{{"zero_optimization": {{"stage": {stage}}}, {more}}}"#)
}

/// An inline `deepspeed_config`.
fn with(deepspeed: &str) -> String {
    format!("{EIGHT}deepspeed_config: {{{deepspeed}}}\n")
}

/// Rule and message of every finding.
fn findings(result: &Result<Recipe, ReadError>) -> Vec<String> {
    let diagnostics = match result {
        Ok(recipe) => &recipe.diagnostics,
        Err(error) => &error.diagnostics,
    };
    let findings = diagnostics.iter();
    findings
        .map(|d| format!("{}[{}] {}", d.severity, d.rule, d.message))
        .collect()
}

#[test]
fn a_trainers_config_is_refused_with_a_launcher_config_for_the_same_keys() {
    let trainer = format!("{TRAINER} --deepspeed @/one.json");
    let refused = |names: &str| {
        vec![format!(
            "error[deepspeed-conflict] accelerate refuses {names} together with the trainer's own DeepSpeed config"
        )]
    };
    for (config, names) in [
        (with("zero_stage: 1"), "`zero_stage`"),
        (
            with("zero_stage: 1, gradient_accumulation_steps: 2") + "mixed_precision: bf16\n",
            "`zero_stage`, `gradient_accumulation_steps`, `mixed_precision`",
        ),
        (
            format!("{EIGHT}mixed_precision: 'no'\n"),
            "`mixed_precision`",
        ),
    ] {
        let job = job(&config, &format!("{LAUNCH} {trainer}"));
        assert_eq!(findings(&job), refused(names), "{config}");
    }
    let line = "trl sft --model_name_or_path m --dataset_name d --per_device_train_batch_size 4 \
                --accelerate_config zero3 --deepspeed @/one.json";
    assert_eq!(
        findings(&job("", line)),
        refused("`zero_stage`, `mixed_precision`")
    );
    // A command-line value does not remove the config's key; a command-line precision does.
    let typed = format!("{LAUNCH} --zero_stage 1 {trainer}");
    assert_eq!(
        findings(&job(&with("zero_stage: 1"), &typed)),
        refused("`zero_stage`")
    );
    let typed = format!("{LAUNCH} --mixed_precision bf16 {trainer}");
    let config = format!("{EIGHT}mixed_precision: bf16\n");
    assert!(findings(&job(&config, &typed)).is_empty());
}

#[test]
fn a_trainers_config_overrides_the_launchers() {
    let trainer = format!("{TRAINER} --deepspeed @/one.json");
    for (config, launch) in [
        (EIGHT.to_owned(), LAUNCH.to_owned()),
        (with("deepspeed_config_file: three.json"), LAUNCH.to_owned()),
        (EIGHT.replace("DEEPSPEED", "MULTI_GPU"), LAUNCH.to_owned()),
        (
            String::new(),
            "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 3 --gradient_accumulation_steps 4"
                .to_owned(),
        ),
    ] {
        let job = job(&config, &format!("{launch} {trainer}"));
        assert!(findings(&job).is_empty(), "{config}{launch}: {:?}", findings(&job));
        let spec = job.unwrap().spec;
        assert_eq!(spec.parallel.strategy, Strategy::Zero1, "{config}{launch}");
        let batch = spec.batch;
        assert_eq!((batch.gpus, batch.accumulation), (Some(8), Some(2)));
    }
}

#[test]
fn command_line_values_only_replace_auto_in_a_file() {
    let typed = |file: &str, typed: &str| {
        let config = with(&format!("deepspeed_config_file: {file}.json"));
        job(&config, &format!("{LAUNCH} {typed} {TRAINER}"))
    };
    let stage = typed("one", "--zero_stage 3");
    assert_eq!(
        findings(&stage),
        [
            "warning[unsupported-value] `--zero_stage 3` has no effect: `zero_optimization.stage` is 1 in the DeepSpeed file, which counts"
        ]
    );
    assert_eq!(stage.unwrap().spec.parallel.strategy, Strategy::Zero1);
    for (file, option, strategy) in [
        ("one", "--zero_stage 1", Strategy::Zero1),
        ("auto", "--zero_stage 3", Strategy::Fsdp),
        ("auto", "", Strategy::Zero2),
        ("auto", "--gradient_accumulation_steps 2", Strategy::Zero2),
    ] {
        let job = typed(file, option);
        assert!(
            findings(&job).is_empty(),
            "{file} {option}: {:?}",
            findings(&job)
        );
        assert_eq!(
            job.unwrap().spec.parallel.strategy,
            strategy,
            "{file} {option}"
        );
    }
    let accumulation = typed("auto", "--gradient_accumulation_steps 4").unwrap_err();
    assert_eq!(accumulation.diagnostics[0].rule, "accumulation-conflict");
}

#[test]
fn the_launchers_file_is_compared_like_the_trainers() {
    let launched = |file: &str, trainer: &str| {
        let config = with(&format!("deepspeed_config_file: {file}.json"));
        let result = job(&config, &format!("{LAUNCH} {trainer}"));
        let error = result.err();
        let errors = error.iter().flat_map(|error| &error.diagnostics);
        let errors = errors.filter(|d| d.severity == Severity::Error);
        errors.map(|d| d.rule.clone()).collect::<Vec<_>>()
    };
    assert_eq!(launched("one", TRAINER), [""; 0]);
    assert_eq!(launched("three", TRAINER), ["accumulation-conflict"]);
    assert_eq!(launched("micro", TRAINER), ["deepspeed-batch-triple"]);
    let default = "train.py --gradient_accumulation_steps 2 --output_dir o";
    assert_eq!(launched("micro", default), [""; 0], "8 is the default");
    assert_eq!(launched("more", TRAINER), ["deepspeed-conflict"; 3]);
    let same = format!("{TRAINER} --max_grad_norm 0.5 --bf16 --learning_rate 1e-3");
    assert_eq!(launched("more", &same), [""; 0]);
    // A custom training loop compares nothing.
    let own = TRAINER.replace("train.py", "run_no_trainer.py");
    assert_eq!(launched("more", &own), [""; 0]);
    assert_eq!(launched("more", "train.py --batch_size 4"), [""; 0]);
}

#[test]
fn a_train_batch_in_the_launchers_file_counts_all_processes() {
    let config = with("deepspeed_config_file: whole.json");
    let planned = |processes: &str| {
        let config = config.replace("num_processes: 8", processes);
        let recipe = job(&config, &format!("{LAUNCH} {TRAINER}")).unwrap();
        let world = recipe.spec.batch.gpus.unwrap();
        let examined = examine(&recipe, &PlanRequest::gpus(world));
        let errors = examined.diagnostics.into_iter();
        let errors = errors.filter(|d| d.severity == Severity::Error);
        errors.map(|d| d.rule).collect::<Vec<_>>()
    };
    assert_eq!(planned("num_processes: 8"), ["global-batch-conflict"]);
    assert_eq!(planned("num_processes: 4"), [""; 0]);
}
