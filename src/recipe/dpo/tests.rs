use std::path::PathBuf;

use crate::recipe::spec::{
    Division, EvaluationDivision, IntervalRounding, LastBatch, LearningRateShape, Objective,
    Precision, Strategy,
};
use crate::recipe::{Dialect, ReadError, Recipe, Request, Severity, corpus, read};

fn config() -> Option<PathBuf> {
    let root = corpus::root()?;
    Some(root.join("eric-mitchell__direct-preference-optimization/f8b8c0f49d/config"))
}

fn read_at(path: PathBuf, overrides: &[&str]) -> Result<Recipe, ReadError> {
    read(&Request {
        path,
        overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
        ..Request::default()
    })
}

#[test]
fn a_launch_of_the_tree_gives_upstreams_values() {
    let Some(config) = config() else { return };
    let overrides = [
        "model=pythia28",
        "datasets=[hh,shp]",
        "loss=dpo",
        "loss.beta=0.1",
        "exp_name=anthropic-dpo",
        "gradient_accumulation_steps=2",
        "batch_size=64",
        "eval_batch_size=32",
        "trainer=FSDPTrainer",
        "model.fsdp_policy_mp=bfloat16",
    ];
    let recipe = read_at(config, &overrides).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    assert_eq!(recipe.diagnostics, []);
    assert_eq!(recipe.dialect, Dialect::Dpo);
    let spec = &recipe.spec;
    assert_eq!(spec.objective, Objective::Dpo);
    assert_eq!(
        (spec.batch.global, spec.batch.accumulation),
        (Some(64), Some(2))
    );
    assert_eq!(spec.batch.division, Division::Floored);
    assert_eq!(spec.batch.last_batch, LastBatch::Drop);
    assert_eq!(spec.evaluation.batch, Some(32));
    assert_eq!(spec.evaluation.division, EvaluationDivision::Floored);
    assert_eq!(spec.evaluation.every_samples, Some(20_000));
    assert_eq!(spec.evaluation.rounding, IntervalRounding::Batch);
    assert_eq!(spec.checkpoint.every_samples, Some(20_000));
    assert_eq!(spec.parallel.strategy, Strategy::Fsdp);
    assert!(!spec.parallel.one_process);
    assert_eq!(spec.model.path.as_deref(), Some("EleutherAI/pythia-2.8b"));
    assert_eq!(spec.model.precision, Precision::Bf16);
    assert_eq!(spec.learning_rate.peak, 5e-7);
    assert_eq!(spec.learning_rate.shape, LearningRateShape::Constant);
    assert_eq!(spec.learning_rate.warmup_steps, Some(150));
    assert_eq!(spec.optimizer.name.as_deref(), Some("RMSprop"));
    assert_eq!(spec.optimizer.gradient_clip, Some(10.0));
    assert_eq!(spec.data.train[1].path, "stanfordnlp/SHP");
    assert_eq!(spec.data.evaluation[0].split.as_deref(), Some("test"));
    assert_eq!(spec.data.sequence_length, 512);
    // The resolver of `train.py`, without the time that upstream appends to the name.
    assert_eq!(spec.output.as_deref(), Some(".cache/anthropic-dpo"));
}

#[test]
fn other_trainers_drive_all_gpus_from_one_process() {
    let Some(config) = config() else { return };
    let of = |trainer: &str| {
        let trainer = format!("trainer={trainer}");
        let overrides = ["model=pythia28", "exp_name=x", "loss=sft", &trainer];
        read_at(config.clone(), &overrides).map(|recipe| recipe.spec.parallel.one_process)
    };
    assert!(of("BasicTrainer").unwrap() && of("TensorParallelTrainer").unwrap());
    assert!(!of("FSDPTrainer").unwrap());
    let error = of("FSDPTraner").unwrap_err();
    assert!(
        error.to_string().contains("did you mean `FSDPTrainer`?"),
        "{error}"
    );
}

#[test]
fn the_shipped_root_names_a_missing_option() {
    let Some(config) = config() else { return };
    let error = read_at(config.join("config.yaml"), &["exp_name=x"]).unwrap_err();
    let found = &error.diagnostics[0];
    assert_eq!(found.rule, "config-missing");
    assert_eq!(
        found.message,
        "the config group `model` has no option `blank_model_fp32`"
    );
    assert!(
        found.help.starts_with("did you mean `blank_model`?"),
        "{}",
        found.help
    );
    let place = found.locate(&error.sources);
    assert_eq!((place.line, place.column), (Some(96), Some(10)));
    assert!(place.file.unwrap().ends_with("config/config.yaml"));
}

#[test]
fn the_wrong_key_of_the_readme_is_refused_with_the_right_one() {
    let Some(config) = config() else { return };
    let overrides = [
        "exp_name=x",
        "model=blank_model",
        "model.name_or_path=gpt2-xl",
        "model.block=GPT2Block",
    ];
    let error = read_at(config, &overrides).unwrap_err();
    let found: Vec<_> = error
        .diagnostics
        .iter()
        .filter(|d| d.severity == Severity::Error)
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].rule, "unknown-override");
    assert_eq!(found[0].message, "there is no key `model.block` to change");
}

#[test]
fn a_loss_lacks_its_mandatory_values() {
    let Some(config) = config() else { return };
    let recipe = read_at(config.clone(), &["model=pythia69", "loss=dpo"]).unwrap();
    let messages: Vec<&str> = recipe
        .diagnostics
        .iter()
        .map(|d| d.message.as_str())
        .collect();
    assert_eq!(
        messages,
        [
            "`exp_name` is mandatory and has no value",
            "`loss.beta` is mandatory and has no value"
        ]
    );
    let sharded = [
        "model=blank_model",
        "model.name_or_path=x",
        "exp_name=x",
        "trainer=FSDPTrainer",
    ];
    let error = read_at(config, &sharded).unwrap_err();
    assert!(error.to_string().contains("`model.block_name`"), "{error}");
}

#[test]
fn a_custom_loss_of_the_tree_is_noted_and_an_unknown_loss_on_the_command_line_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let text = "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\n\
                eval_batch_size: 32\nloss: {name: tdpo}\n";
    std::fs::write(&path, text).unwrap();
    let read = |overrides: &[&str]| {
        crate::recipe::read(&crate::recipe::Request {
            path: path.clone(),
            dialect: Some(crate::recipe::Dialect::Dpo),
            overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
            ..Default::default()
        })
    };
    let recipe = read(&[]).unwrap();
    assert_eq!(recipe.spec.batch.global, Some(64));
    let findings = recipe.diagnostics.iter();
    let findings = findings.filter(|d| d.message.starts_with("`loss.name` is `tdpo`"));
    assert_eq!(findings.count(), 1);
    let error = read(&["loss.name=spo"]).unwrap_err();
    assert!(
        error.to_string().contains("`loss.name` is `spo`"),
        "{error}"
    );
}
