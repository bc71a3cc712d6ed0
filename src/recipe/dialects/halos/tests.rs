use std::path::PathBuf;

use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::spec::{
    Division, EvaluationDivision, IntervalRounding, LearningRateShape, Objective, Precision,
};
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};
use crate::recipe::{ReadError, Recipe, corpus, read};

/// The tree at HEAD, if the corpus is present.
fn head() -> Option<PathBuf> {
    Some(corpus::root()?.join("ContextualAI__HALOs/4831988636/config"))
}

fn legacy() -> Option<PathBuf> {
    Some(corpus::root()?.join("ContextualAI__HALOs/61b9ee6787/config"))
}

fn read_at(path: PathBuf, version: Option<&str>, overrides: &[&str]) -> Result<Recipe, ReadError> {
    read(&Request {
        path,
        version: version.map(str::to_owned),
        overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
        ..Request::default()
    })
}

/// Overrides of every launch of the tree.
const USUAL: &[&str] = &[
    "exp_name=llama3-8B-dpo",
    "train_datasets=[ultrabin]",
    "test_datasets=[ultrabin]",
];

fn with_usual<'a>(overrides: &[&'a str]) -> Vec<&'a str> {
    [USUAL, overrides].concat()
}

#[test]
fn a_launch_of_the_tree_gives_upstreams_values() {
    let Some(config) = head() else { return };
    let overrides = with_usual(&[
        "loss=dpo",
        "model=llama",
        "++model.name_or_path=meta-llama/Meta-Llama-3-8B",
        "++model.batch_size=64",
        "++model.gradient_accumulation_steps=2",
        "++model.eval_batch_size=64",
    ]);
    let recipe =
        read_at(config, None, &overrides).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    let rules: Vec<&str> = recipe.diagnostics.iter().map(|d| d.rule.as_str()).collect();
    assert_eq!(rules, ["run-name"], "{:?}", recipe.diagnostics);
    assert_eq!(recipe.dialect, Dialect::Halos);
    assert!(
        recipe.detected.contains("defaults list")
            && recipe.detected.contains("version head: the comment"),
        "{}",
        recipe.detected
    );
    let spec = &recipe.spec;
    assert_eq!((spec.objective, spec.seed), (Objective::Dpo, 1));
    assert_eq!(
        (spec.batch.global, spec.batch.per_device_batch_size),
        (Some(64), None)
    );
    assert_eq!(spec.batch.accumulation, Some(2));
    assert_eq!(spec.batch.division, Division::Exact);
    assert_eq!(spec.evaluation.batch, Some(64));
    assert_eq!(spec.evaluation.division, EvaluationDivision::Passes);
    assert_eq!(spec.evaluation.rounding, IntervalRounding::Batch);
    assert_eq!(spec.evaluation.every_samples, Some(1024));
    assert_eq!(spec.evaluation.samples, Some(256));
    assert_eq!(
        spec.checkpoint,
        Default::default(),
        "intermediate_checkpoints is false"
    );
    assert_eq!(
        spec.model.path.as_deref(),
        Some("meta-llama/Meta-Llama-3-8B")
    );
    assert_eq!(spec.model.precision, Precision::Bf16);
    assert_eq!(spec.model.attention.as_deref(), Some("flash_attention_2"));
    assert!(spec.model.activation_checkpointing && !spec.model.adapters);
    assert_eq!(spec.data.sequence_length, 1250);
    assert_eq!(
        spec.data.train[0].path,
        "HuggingFaceH4/ultrafeedback_binarized"
    );
    assert_eq!(spec.data.train[0].split.as_deref(), Some("train_prefs"));
    assert_eq!(spec.data.evaluation[0].split.as_deref(), Some("test_prefs"));
    assert_eq!(spec.learning_rate.peak, 5e-6, "a float to OmegaConf");
    assert_eq!(spec.learning_rate.shape, LearningRateShape::Constant);
    assert_eq!(spec.learning_rate.warmup_ratio, Some(0.1));
    assert_eq!(
        (spec.optimizer.weight_decay, spec.optimizer.epsilon),
        (0.01, 1e-8)
    );
    assert_eq!(spec.optimizer.gradient_clip, Some(1.0));
    assert_eq!((spec.budget.epochs, spec.budget.samples), (Some(1.0), None));
    assert_eq!(spec.name, "llama3-8b-dpo");
    assert_eq!(spec.output.as_deref(), Some(".cache//llama3-8B-dpo"));
    let place = &recipe.value_sources["batch.accumulation"];
    assert_eq!(place.key, "model.gradient_accumulation_steps");
    assert_eq!((place.span.line, place.span.column), (8, 37));
}

#[test]
fn every_loss_of_the_tree_has_its_objective() {
    let Some(config) = head() else { return };
    for (loss, objective, shape) in [
        ("sft", Objective::Sft, LearningRateShape::Cosine),
        ("dpo", Objective::Dpo, LearningRateShape::Constant),
        ("simpo", Objective::Simpo, LearningRateShape::Constant),
        ("kto", Objective::Kto, LearningRateShape::Constant),
        ("ppo", Objective::Ppo, LearningRateShape::Constant),
        ("grpo", Objective::Grpo, LearningRateShape::Constant),
    ] {
        let choice = format!("loss={loss}");
        let overrides = with_usual(&["model=qwen", &choice]);
        let recipe = read_at(config.clone(), None, &overrides).unwrap();
        assert_eq!(recipe.spec.objective, objective);
        assert_eq!(recipe.spec.learning_rate.shape, shape, "{loss}");
        assert_eq!(recipe.value_sources["objective"].key, "loss.trainer");
    }
    // The data loader determines the objective of a custom loss.
    let own = ["loss=kto", "model=qwen", "loss.trainer=DummyKTOTrainer"];
    let recipe = read_at(config, None, &with_usual(&own)).unwrap();
    assert_eq!(recipe.spec.objective, Objective::Kto);
}

#[test]
fn the_meaning_of_a_batch_depends_on_the_version() {
    let Some(config) = head() else { return };
    let many = [
        "loss=dpo",
        "model=llama",
        "++model.batch_size=8",
        "++model.gradient_accumulation_steps=8",
    ];
    let of = |version| {
        let recipe = read_at(config.clone(), version, &with_usual(&many)).unwrap();
        (
            recipe.spec.batch.global,
            recipe.spec.batch.division,
            recipe.spec.evaluation.division,
        )
    };
    let head = (Some(8), Division::Exact, EvaluationDivision::Passes);
    let before = (Some(64), Division::Exact, EvaluationDivision::Ranks);
    let legacy = (Some(64), Division::Floored, EvaluationDivision::Floored);
    assert_eq!(of(None), head);
    assert_eq!(of(Some("head")), head);
    assert_eq!(of(Some("2025-04-30")), before);
    assert_eq!(of(Some("before-2025-05-01")), before);
    assert_eq!(of(Some("legacy")), legacy);
    let error = read_at(config, Some("hed"), &with_usual(&many)).unwrap_err();
    assert!(
        error.to_string().contains("did you mean `head`?"),
        "{error}"
    );
}

#[test]
fn the_legacy_tree_is_detected_by_its_keys() {
    let Some(config) = legacy() else { return };
    // The corpus has no loss of that revision, so the test adds one to a copy of its files.
    let copy = tempfile::tempdir().unwrap();
    for folder in ["model", "loss"] {
        std::fs::create_dir(copy.path().join(folder)).unwrap();
    }
    for file in [
        "config.yaml",
        "model/base_model.yaml",
        "model/llama65b.yaml",
    ] {
        std::fs::copy(config.join(file), copy.path().join(file)).unwrap();
    }
    let loss = "trainer: KTOTrainer\ndataloader: UnpairedPreferenceDataLoader\n";
    std::fs::write(copy.path().join("loss/kto.yaml"), loss).unwrap();
    let overrides = [
        "mode=train",
        "exp_name=x",
        "datasets=[hh]",
        "model=llama65b",
        "loss=kto",
    ];
    let recipe = read_at(copy.path().to_owned(), None, &overrides)
        .unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    assert!(
        recipe.detected.contains("version legacy"),
        "{}",
        recipe.detected
    );
    let spec = &recipe.spec;
    assert_eq!(
        (spec.batch.global, spec.batch.accumulation),
        (Some(64), Some(4))
    );
    assert_eq!(spec.batch.division, Division::Floored);
    assert_eq!(
        spec.evaluation.every_samples,
        Some(20_000),
        "an int to PyYAML"
    );
    assert_eq!(spec.evaluation.rounding, IntervalRounding::Pass);
    assert_eq!(spec.learning_rate.warmup_steps, Some(150));
    assert_eq!(spec.optimizer.name.as_deref(), Some("RMSprop"));
    assert_eq!(spec.model.attention.as_deref(), Some("flash_attention_2"));
    assert_eq!(spec.model.path.as_deref(), Some("huggyllama/llama-65b"));
    assert_eq!(
        spec.parallel.strategy,
        crate::recipe::schema::spec::Strategy::Fsdp
    );
}

fn messages(diagnostics: &[Diagnostic], rule: &str) -> Vec<String> {
    let of_rule = diagnostics.iter().filter(|d| d.rule == rule);
    of_rule.map(|d| d.message.clone()).collect()
}

#[test]
fn all_missing_values_of_the_root_are_reported() {
    let Some(config) = head() else { return };
    let error = read_at(config.join("config.yaml"), None, &[]).unwrap_err();
    assert_eq!(
        messages(&error.diagnostics, "mandatory-missing"),
        [
            "`exp_name` is mandatory and has no value",
            "`train_datasets` is mandatory and has no value",
            "`test_datasets` is mandatory and has no value",
            "an option of the config group `model` must be chosen",
            "an option of the config group `loss` must be chosen",
        ]
    );
    // With its groups chosen, the batch numbers exist despite the other missing values.
    let recipe = read_at(config, None, &["loss=dpo", "model=llama"]).unwrap();
    assert_eq!(messages(&recipe.diagnostics, "mandatory-missing").len(), 3);
    assert!(
        recipe
            .diagnostics
            .iter()
            .all(|d| d.severity == Severity::Error)
    );
    assert_eq!(recipe.spec.batch.global, Some(32));
}

#[test]
fn a_single_option_is_read_as_an_option() {
    let Some(config) = head() else { return };
    let recipe = read_at(config.join("model/base_model.yaml"), None, &[]).unwrap();
    assert!(recipe.part);
    assert!(
        recipe
            .detected
            .contains("the option `base_model` of the config group `model`")
    );
    assert_eq!(recipe.spec.batch.global, Some(32));
    let missing = messages(&recipe.diagnostics, "mandatory-missing");
    assert_eq!(missing.len(), 2, "{missing:?}");
    assert!(missing[1].contains("`model.name_or_path`"));
    assert!(
        recipe
            .diagnostics
            .iter()
            .all(|d| d.severity == Severity::Note)
    );
    let llama = read_at(
        config.join("model/llama.yaml"),
        None,
        &["model.batch_size=64"],
    )
    .unwrap();
    assert_eq!(llama.spec.batch.global, Some(64));
    assert_eq!(
        messages(&llama.diagnostics, "mandatory-missing").len(),
        1,
        "the name is null"
    );
    let legacy = legacy().unwrap().join("model/base_model.yaml");
    let legacy = read_at(legacy, None, &[]).unwrap();
    assert!(
        legacy.detected.contains("version legacy"),
        "{}",
        legacy.detected
    );
}

#[test]
fn keys_without_effect_are_noted_on_the_command_line() {
    let Some(config) = head() else { return };
    let typed = ["loss=dpo", "model=llama", "++eps=1e-5", "++save_every=5120"];
    let recipe = read_at(config, None, &with_usual(&typed)).unwrap();
    let notes = messages(&recipe.diagnostics, "unsupported-value");
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes[0].starts_with("`eps` has no effect upstream"));
}

#[test]
fn a_command_finds_the_tree_next_to_its_program() {
    let Some(config) = head() else { return };
    let revision = config.parent().unwrap();
    let launched = |words: &[&str]| {
        let program = revision.join("launch.py").display().to_string();
        let launcher = revision.join("accelerate_config/fsdp_4gpu.yaml");
        let launcher = launcher.display().to_string();
        let before = ["accelerate", "launch", "--config_file", &launcher, &program];
        let command = before.iter().chain(USUAL).chain(words);
        read(&Request {
            command: command.map(|word| (*word).to_owned()).collect(),
            ..Request::default()
        })
    };
    let words = ["loss=dpo", "model=llama", "++model.batch_size=64"];
    let from_command = launched(&words).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    let tree = read(&Request {
        path: config.clone(),
        accelerate: Some(revision.join("accelerate_config/fsdp_4gpu.yaml")),
        overrides: with_usual(&words).into_iter().map(str::to_owned).collect(),
        ..Request::default()
    });
    let tree = tree.unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    assert_eq!(from_command.spec, tree.spec);
    assert_eq!(from_command.spec.batch.gpus, Some(4));
    assert_eq!(from_command.dialect, Dialect::Halos);
    let named = launched(&["--config-name", "config.yaml", "loss=dpo", "model=llama"]);
    assert_eq!(named.unwrap().spec.objective, Objective::Dpo);
    let sweep = launched(&["-m", "loss=dpo,kto", "model=llama"]).unwrap_err();
    assert!(
        sweep
            .diagnostics
            .iter()
            .any(|d| d.message.contains("several jobs"))
    );
    let elsewhere = launched(&["-cp", "nowhere", "loss=dpo"]).unwrap_err();
    assert_eq!(elsewhere.diagnostics[0].rule, "config-missing");
    let mixed = launched(&["loss=dpo", "--learning_rate", "1"]).unwrap_err();
    assert!(mixed.diagnostics[0].message.contains("is a Hydra override"));
}

/// The path, config, split and conversion of each source.
#[test]
fn data_sets_that_upstream_names_are_those_of_the_hub() {
    let Some(config) = head() else { return };
    let names = "[hh_helpful,hh_harmless,oasst,shp]";
    let (train, test) = (
        format!("train_datasets={names}"),
        format!("test_datasets={names}"),
    );
    let overrides = ["exp_name=x", "loss=dpo", "model=llama", &train, &test];
    let recipe =
        read_at(config, None, &overrides).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    let data = &recipe.spec.data;
    let shown = data.train.iter().chain(&data.evaluation).map(|source| {
        let text = |given: &Option<String>| given.clone().unwrap_or_default();
        format!(
            "{} {} {} {:?}",
            source.path,
            text(&source.config),
            text(&source.split),
            source.conversion.unwrap()
        )
    });
    insta::assert_snapshot!(shown.collect::<Vec<_>>().join("\n"), @"
    Anthropic/hh-rlhf helpful-base train DialogueMessages
    Anthropic/hh-rlhf harmless-base train DialogueMessages
    OpenAssistant/oasst1  train RankedReplies
    stanfordnlp/SHP  train ScoredMessages
    Anthropic/hh-rlhf helpful-base test DialogueMessages
    Anthropic/hh-rlhf harmless-base test DialogueMessages
    OpenAssistant/oasst1  validation RankedReplies
    stanfordnlp/SHP  test AllScoredMessages
    ");
}

/// A legacy tree with this loss. Upstream: 61b9ee6 `config/config.yaml`, `config/loss`.
fn of_legacy(loss: &str, more: &[&str]) -> Recipe {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let text = format!(
        "exp_name: x\ndatasets: [hh]\ncache_dir: c\noptimizer: RMSprop\nwarmup_steps: 150\nuse_fsdp: true\n\
         lr: 1.0e-6\nn_epochs: 1\nhuman_prefix: \"\\n<|user|>\\n\"\nhuman_suffix: \"\"\n\
         assistant_prefix: \"\\n<|assistant|>\\n\"\nassistant_suffix: \"\"\n\
         model: {{name_or_path: m, batch_size: 32, gradient_accumulation_steps: 1, max_length: 2048, \
         max_prompt_length: 1024}}\nloss: {{{loss}}}\n"
    );
    std::fs::write(&path, text).unwrap();
    let request = Request {
        path,
        dialect: Some(Dialect::Halos),
        overrides: more.iter().map(|text| (*text).to_owned()).collect(),
        ..Request::default()
    };
    read(&request).unwrap_or_else(|error| panic!("{:?}", error.diagnostics))
}

#[test]
fn legacy_losses_over_preferences_have_the_marks_of_the_tree() {
    const PAIRED: &str = "dataloader: PairedPreferenceDataLoader";
    let mut shown = Vec::new();
    for (loss, more) in [
        (
            "name: dpo, beta: 0.1, trainer: DPOTrainer",
            &["human_prefix='<u>'"][..],
        ),
        (
            "name: orpo, OR_scale: 0.25, trainer: ORPOTrainer",
            &["datasets=[ultrabin]", "optimizer=AdamW"],
        ),
        (
            "name: cdpo, beta: 0.1, epsilon: 0.2, trainer: CDPOTrainer",
            &["datasets=[oasst,hh_helpful]"],
        ),
        (
            "name: dpo, beta: 0.1, trainer: DPOTrainer",
            &["datasets=[hh,ultrabin]"],
        ),
        (
            "name: kto, beta: 0.1, trainer: KTOTrainer",
            &["loss.dataloader=UnpairedPreferenceDataLoader"],
        ),
        ("name: kto-zero, beta: 0.1, trainer: KTOZeroTrainer", &[]),
        ("name: sft, trainer: SFTTrainer", &[]),
        (
            "name: sft, trainer: SFTTrainer",
            &["loss.dataloader=SFTDataLoader", "datasets=[ultrabin]"],
        ),
        (
            "name: dpo, beta: 0.1, trainer: DPOTrainer",
            &["datasets=[shp,ultrabin]"],
        ),
        (
            "name: csft, trainer: SFTTrainer",
            &["loss.dataloader=ConditionalSFTDataLoader"],
        ),
        ("name: slic, beta: 0.1, trainer: SLiCTrainer", &[]),
    ] {
        let recipe = of_legacy(&format!("{loss}, {PAIRED}"), more);
        let (spec, source) = (&recipe.spec, &recipe.spec.data.train[0]);
        let untrained = recipe.untrained.iter();
        let untrained = untrained.map(|it| format!("{}: {:?}", it.key, it.reason));
        shown.push(format!(
            "{loss} {}\n  {:?} {:?}\n  {:?} {:?}\n  {:?} {:?} decay {}\n  {:?}",
            more.join(" "),
            spec.preference,
            spec.likelihood.mean,
            spec.data.rows,
            spec.data.marks,
            source.path,
            source.conversion,
            spec.optimizer.weight_decay,
            untrained.collect::<Vec<_>>(),
        ));
    }
    insta::assert_snapshot!(shown.join("\n"));
}
