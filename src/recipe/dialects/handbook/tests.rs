use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::spec::{
    BatchSchedule, DataFormat, LastBatch, LearningRateShape, Objective, Precision, Spec, Strategy,
};
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};
use crate::recipe::tests::{messages, read_command};
use crate::recipe::{ReadError, Recipe, read, read_text};

/// Reads a text as the file `folder/config.yaml`, with overrides.
fn read_in(folder: &str, text: &str, overrides: &[&str]) -> Result<Recipe, ReadError> {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join(folder);
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("config.yaml");
    std::fs::write(&path, text).unwrap();
    read(&Request {
        path,
        overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
        ..Request::default()
    })
}

/// The spec of an SFT recipe with these lines, which must have no diagnostics.
fn sft(lines: &str) -> Spec {
    let text = format!("model_name_or_path: m\nnum_train_epochs: 1\n{lines}");
    let recipe = read_in("sft", &text, &[]).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    assert_eq!(recipe.diagnostics, []);
    recipe.spec
}

/// Every diagnostic of an SFT recipe with these lines.
fn problems(folder: &str, lines: &str, overrides: &[&str]) -> String {
    let text = format!("model_name_or_path: m\nnum_train_epochs: 1\n{lines}");
    let diagnostics = match read_in(folder, &text, overrides) {
        Ok(recipe) => recipe.diagnostics,
        Err(error) => error.diagnostics,
    };
    let line = |d: &Diagnostic| d.span.map_or(0, |s| s.line);
    let lines: Vec<String> = diagnostics
        .iter()
        .map(|d| {
            let place = format!("{}: {}[{}]", line(d), d.severity, d.rule);
            format!("{place} {} ({})", d.message, d.help)
        })
        .collect();
    lines.join("\n")
}

#[test]
fn defaults_are_those_of_trl() {
    let spec = sft("");
    assert_eq!(
        (spec.batch.per_device_batch_size, spec.batch.accumulation),
        (Some(8), Some(1))
    );
    assert_eq!((spec.batch.global, spec.batch.gpus), (None, None));
    assert_eq!(spec.learning_rate.peak, 2e-5);
    assert_eq!(spec.learning_rate.shape, LearningRateShape::Linear);
    assert_eq!(spec.model.precision, Precision::Bf16);
    assert!(spec.model.activation_checkpointing);
    assert_eq!(spec.data.sequence_length, 1024);
    assert_eq!(spec.checkpoint.every_steps, Some(500));
    assert_eq!(spec.evaluation, Default::default());
    assert_eq!(spec.optimizer.gradient_clip, Some(1.0));
    assert_eq!(
        (spec.optimizer.beta2, spec.optimizer.weight_decay),
        (0.999, 0.0)
    );
    assert_eq!(spec.seed, 42);
    let dpo = read_in("dpo", "model_name_or_path: m\nbeta: 0.1\n", &[]).unwrap();
    assert_eq!(dpo.spec.learning_rate.peak, 1e-6);
    assert_eq!(dpo.spec.budget.epochs, Some(3.0));
    let written: Vec<&String> = dpo.value_sources.keys().collect();
    assert_eq!(written, ["model.path", "preference.beta"]);
}

/// An SFT recipe with these lines, as these versions read it.
fn sft_of(version: &str, lines: &str, overrides: &[&str]) -> Result<Recipe, ReadError> {
    crate::recipe::read_text(
        &Request {
            path: "sft/config.yaml".into(),
            version: Some(version.to_owned()),
            overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
            ..Request::default()
        },
        format!("model_name_or_path: m\nnum_train_epochs: 1\n{lines}"),
    )
}

#[test]
fn defaults_are_those_of_the_version() {
    let of = |version: &str| {
        let spec = sft_of(version, "eval_strategy: steps\n", &[]).unwrap().spec;
        (
            spec.learning_rate.peak,
            spec.model.precision,
            spec.model.activation_checkpointing,
            spec.evaluation.every_steps,
            spec.data.completions_only,
        )
    };
    let f32 = Precision::F32;
    assert_eq!(of("trl-0.11"), (5e-5, f32, false, Some(500), Some(false)));
    assert_eq!(of("trl-0.18"), (2e-5, f32, false, Some(500), Some(true)));
    assert_eq!(
        of("trl-0.21"),
        (2e-5, Precision::Bf16, false, Some(10), Some(true))
    );
    assert_eq!(
        of("trl-1.16"),
        (2e-5, Precision::Bf16, true, Some(10), Some(true))
    );
    let length = |version: &str| {
        let request = Request {
            path: "dpo/config.yaml".into(),
            version: Some(version.to_owned()),
            ..Request::default()
        };
        let recipe = crate::recipe::read_text(&request, "model_name_or_path: m\n".to_owned());
        recipe.unwrap().spec.data.sequence_length
    };
    assert_eq!([length("trl-0.13"), length("trl-0.14")], [512, 1024]);
}

#[test]
fn a_key_is_read_as_its_version_reads_it() {
    let lines = "max_seq_length: 2048\nwarmup_ratio: 0.1\n";
    let recipe = read_in("sft", &format!("model_name_or_path: m\n{lines}"), &[]).unwrap();
    assert_eq!(
        recipe.version.as_deref(),
        Some("TRL 0.19, transformers 4.54")
    );
    assert_eq!(recipe.spec.data.sequence_length, 2048);
    let later = sft_of("trl-1.16", lines, &[]).unwrap();
    assert_eq!(later.spec.data.sequence_length, 1024);
    let message =
        "`max_seq_length` has no effect in TRL 1.16, transformers 5.14: TRL 0.20 removed it";
    assert_eq!(messages(Ok(later)), [message]);
    // A typed one is meant to have an effect, and a batch that upstream ignores is another batch.
    let typed = messages(sft_of("trl-1.16", "", &["max_seq_length=2048"]));
    assert!(
        typed[0].starts_with("`max_seq_length` has no effect"),
        "{typed:?}"
    );
    let batch = sft_of(
        "trl-1.16,transformers-5.0",
        "per_gpu_train_batch_size: 2\n",
        &[],
    );
    let batch = messages(Err(batch.unwrap_err()));
    assert!(
        batch[0].ends_with("transformers 5.0 removed it"),
        "{batch:?}"
    );
}

#[test]
fn an_override_that_a_key_of_the_file_hides_is_refused() {
    for (lines, hidden, shown) in [
        (
            "max_seq_length: 2048\n",
            "max_length=64",
            "max_seq_length=64",
        ),
        (
            "per_gpu_train_batch_size: 2\n",
            "per_device_train_batch_size=4",
            "per_gpu_train_batch_size=4",
        ),
        (
            "warmup_ratio: 0.1\n",
            "warmup_steps=100",
            "warmup_ratio=0.2",
        ),
        (
            "warmup_steps: 100\nno_cuda: false\n",
            "warmup_ratio=0.1",
            "warmup_steps=5",
        ),
        (
            "evaluation_strategy: epoch\n",
            "eval_strategy=no",
            "evaluation_strategy=no",
        ),
    ] {
        let text = format!("model_name_or_path: m\nnum_train_epochs: 1\n{lines}");
        let refused = messages(read_in("sft", &text, &[hidden]));
        let key = shown.split('=').next().unwrap();
        let expected = format!("the recipe sets `{key}`, which wins over it");
        assert!(refused.concat().contains(&expected), "{refused:?}");
        assert!(read_in("sft", &text, &[shown]).is_ok(), "{shown}");
    }
    // No steps of warm-up hide no ratio.
    assert!(
        read_in(
            "sft",
            "model_name_or_path: m\nwarmup_steps: 0\nno_cuda: false\n",
            &["warmup_ratio=0.1"]
        )
        .is_ok()
    );
}

#[test]
fn intervals_below_one_are_shares_of_the_run() {
    let spec = sft("save_steps: 0.5\neval_strategy: steps\neval_steps: 0.25\n");
    assert_eq!(spec.checkpoint.every_share, Some(0.5));
    assert_eq!(spec.checkpoint.every_steps, None);
    assert_eq!(spec.evaluation.every_share, Some(0.25));
    assert_eq!(spec.evaluation.per_device_batch_size, Some(8));
    let spec = sft("save_strategy: epoch\neval_strategy: steps\nlogging_steps: 7\n");
    assert!(spec.checkpoint.every_epoch);
    assert_eq!(
        spec.evaluation.every_steps,
        Some(7),
        "evaluation follows the log"
    );
    assert_eq!(
        sft("eval_strategy: steps\n").evaluation.every_steps,
        Some(10)
    );
    assert_eq!(
        sft("save_strategy: \"no\"\n").checkpoint,
        Default::default()
    );
    assert!(problems("sft", "save_steps: 1.5\n", &[]).contains("out-of-range"));
}

#[test]
fn warm_up_is_steps_or_a_share_by_version() {
    let rate = |lines: &str| sft(lines).learning_rate;
    // transformers 5 replaces the steps by a ratio, and 4 the ratio by steps.
    let both = "warmup_steps: 100\nwarmup_ratio: 0.1\n";
    assert_eq!(rate(both).warmup_ratio, Some(0.1));
    let older = rate(&format!("{both}no_cuda: false\n"));
    assert_eq!((older.warmup_steps, older.warmup_ratio), (Some(100), None));
    assert_eq!(rate("warmup_steps: 0.03\n").warmup_ratio, Some(0.03));
    assert_eq!(rate("warmup_ratio: 0.1\n").warmup_ratio, Some(0.1));
    let none = rate("warmup_steps: 0\nwarmup_ratio: 0.0\n");
    assert_eq!((none.warmup_steps, none.warmup_ratio), (None, None));
}

#[test]
fn schedules_keep_their_floors() {
    let rate = |lines: &str| {
        let rate = sft(&format!("learning_rate: 2.0e-4\n{lines}")).learning_rate;
        (rate.shape, rate.floor)
    };
    let min = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: ";
    assert_eq!(
        rate(&format!("{min}{{min_lr_rate: 0.1}}\n")),
        (LearningRateShape::Cosine, 0.1)
    );
    assert_eq!(
        rate(&format!("{min}{{min_lr: 2.0e-5}}\n")),
        (LearningRateShape::Cosine, 0.1)
    );
    assert_eq!(
        rate("lr_scheduler_type: inverse_sqrt\n"),
        (LearningRateShape::InverseSqrt, 0.0)
    );
    assert_eq!(
        rate("lr_scheduler_type: constant_with_warmup\n"),
        (LearningRateShape::Constant, 0.0)
    );
}

#[test]
fn the_objective_is_found_by_folder_or_by_keys() {
    let objective = |folder: &str, lines: &str| {
        let text = format!("model_name_or_path: m\nlearning_rate: 1.0e-6\n{lines}");
        read_in(folder, &text, &[])
            .unwrap_or_else(|e| panic!("{e}"))
            .spec
            .objective
    };
    assert_eq!(objective("zephyr/orpo", "beta: 0.1\n"), Objective::Orpo);
    assert_eq!(objective("x", "beta: 0.1\n"), Objective::Dpo);
    assert_eq!(
        objective("x", "beta: 0.1\nhub_model_id: zephyr-orpo\n"),
        Objective::Orpo
    );
    assert_eq!(objective("x", "num_generations: 4\n"), Objective::Grpo);
    assert_eq!(objective("x", "desirable_weight: 1.0\n"), Objective::Kto);
    assert_eq!(objective("x", "num_ppo_epochs: 4\n"), Objective::Ppo);
    assert_eq!(
        objective("x", "center_rewards_coefficient: 0.1\n"),
        Objective::Reward
    );
    assert_eq!(
        objective("x", "loss_type: simpo\nsimpo_gamma: 0.5\n"),
        Objective::Simpo
    );
    assert_eq!(objective("x", "packing: true\n"), Objective::Sft);
    assert_eq!(objective("gpt2-nl/cpt", ""), Objective::LanguageModelling);
    let pairs = "dataset_mixture: {datasets: [{id: d, columns: [chosen, rejected]}]}\n";
    assert_eq!(objective("x", pairs), Objective::Dpo);
    assert_eq!(
        objective("sft", "evenkeel: {objective: dpo}\nbeta: 0.1\n"),
        Objective::Dpo
    );
    assert!(problems("x", "", &[]).contains("objective-assumed"));
}

#[test]
fn generation_settings_reach_the_rules() {
    let text = "model_name_or_path: m\nnum_generations: 16\nsteps_per_generation: 4\n\
                max_completion_length: 1000\nmax_prompt_length: 24\nlearning_rate: 1.0e-6\n";
    let spec = read_in("grpo", text, &[]).unwrap().spec;
    assert_eq!(spec.generation.num_generations, Some(16));
    assert_eq!(spec.generation.steps_per_generation, Some(4));
    assert_eq!(spec.data.sequence_length, 1024);
    let text = "model_name_or_path: m\nlearning_rate: 1.0e-6\n";
    let spec = read_in("grpo", text, &[]).unwrap().spec;
    assert_eq!(spec.generation.num_generations, Some(8), "TRL's default");
}

/// transformers 5.24.0 `trainer_callback.py` and `trainer_utils.py`.
#[test]
fn intervals_and_limits_of_zero_mean_never_and_all() {
    let spec = sft("save_steps: 0\nsave_total_limit: -1\neval_strategy: steps\neval_steps: 0\n");
    let checkpoint = &spec.checkpoint;
    assert_eq!((checkpoint.every_steps, checkpoint.keep), (None, None));
    assert_eq!(
        spec.evaluation.every_steps,
        Some(10),
        "evaluation follows the log"
    );
    assert_eq!(sft("save_steps: -1\n").checkpoint.every_steps, None);
    assert_eq!(sft("save_total_limit: 2\n").checkpoint.keep, Some(2));
}

#[test]
fn the_loss_is_on_the_tokens_that_trl_trains() {
    let of = |lines: &str| {
        let data = sft(lines).data;
        (data.answers_only, data.completions_only)
    };
    assert_eq!(of(""), (Some(false), Some(true)));
    assert_eq!(of("assistant_only_loss: true\n"), (Some(true), Some(true)));
    assert_eq!(
        of("completion_only_loss: false\n"),
        (Some(false), Some(false))
    );
}

#[test]
fn a_smoothing_that_depends_on_the_version_is_a_warning() {
    let warned = |lines: &str| problems("dpo", lines, &[]).contains("TRL 0.29 and newer ignore it");
    assert!(warned("label_smoothing: 0.1\n"));
    assert!(warned("label_smoothing: 0.1\nloss_type: [sigmoid, sft]\n"));
    assert!(!warned("label_smoothing: 0.1\nloss_type: robust\n"));
    assert!(!warned("label_smoothing: 0.0\n"));
}

#[test]
fn every_form_of_data_is_read() {
    let counted = sft("dataset_mixer: {org/a: 5000, org/b: 1.0}\n").data.train;
    let weights: Vec<_> = counted.iter().map(|source| source.weight).collect();
    assert_eq!(weights, [Some(5000.0), Some(1.0)]);

    let spec = sft("dataset_mixer:\n  org/a: 0.5\n  org/b: 1\n\
         dataset_splits: [train_sft, test_sft]\ndataset_configs: [x, y]\n");
    let train: Vec<_> = spec
        .data
        .train
        .iter()
        .map(|s| (s.path.as_str(), s.weight, s.config.as_deref()))
        .collect();
    assert_eq!(
        train,
        [
            ("org/a", Some(0.5), Some("x")),
            ("org/b", Some(1.0), Some("y"))
        ]
    );
    assert_eq!(spec.data.evaluation.len(), 2);
    assert_eq!(spec.data.evaluation[0].split.as_deref(), Some("test_sft"));

    let spec = sft("dataset_name: org/c\ndataset_config: all\neval_strategy: epoch\n");
    assert_eq!(spec.data.train[0].split.as_deref(), Some("train"));
    assert_eq!(spec.data.evaluation[0].split.as_deref(), Some("test"));

    let spec = sft(
        "datasets:\n- path: json\n  data_files: [a.jsonl, b.jsonl]\n\
         - {path: org/d, name: main, columns: [prompt, completion]}\ntest_split_size: 0.1\n",
    );
    assert_eq!(spec.data.train[1].path, "b.jsonl");
    assert_eq!(spec.data.train[1].format, Some(DataFormat::Jsonl));
    assert_eq!(spec.data.train[2].config.as_deref(), Some("main"));
    assert_eq!(spec.data.train[2].columns, ["prompt", "completion"]);
    assert_eq!(spec.data.held_out, Some(0.1));
}

#[test]
fn sharding_and_axes_in_the_recipe_count() {
    let parallel = |lines: &str| sft(lines).parallel;
    assert_eq!(
        parallel("fsdp: full_shard auto_wrap\n").strategy,
        Strategy::Fsdp
    );
    assert_eq!(
        parallel("fsdp: [shard_grad_op]\n").strategy,
        Strategy::Zero2
    );
    assert_eq!(parallel("fsdp: true\n").strategy, Strategy::Fsdp);
    assert_eq!(
        parallel("deepspeed: {zero_optimization: {stage: 1}, train_batch_size: auto}\n").strategy,
        Strategy::Zero1
    );
    let sizes = parallel("parallelism_config: {tp_size: 2, cp_size: 4}\n");
    assert_eq!((sizes.tensor, sizes.context), (2, 4));
    let conflict = "gradient_accumulation_steps: 2\ndeepspeed: {gradient_accumulation_steps: 4, zero_optimization: {}}\n";
    assert!(problems("sft", conflict, &[]).contains("error[accumulation-conflict]"));
    assert!(problems("sft", "deepspeed: zero3.json\n", &[]).contains("deepspeed-unread"));
}

#[test]
fn special_batch_settings_are_read() {
    let spec = sft("accelerator_config: {split_batches: true}\ngradient_accumulation_steps: 2\n");
    assert_eq!(
        (spec.batch.global, spec.batch.per_device_batch_size),
        (Some(16), None)
    );
    let spec = sft("dataloader_drop_last: true\nauto_find_batch_size: true\n");
    assert_eq!(spec.batch.last_batch, LastBatch::Drop);
    assert!(spec.batch.auto_find);
    let resumed = problems("sft", "resume_from_checkpoint: out/checkpoint-100\n", &[]);
    assert!(resumed.contains("resume-restores-batch"), "{resumed}");
    assert_eq!(problems("sft", "resume_from_checkpoint: false\n", &[]), "");
}

/// `lora_rank` is a key of scripts beside TRL's. TRL reads `lora_r` only if `use_peft` is true.
#[test]
fn adapters_are_those_of_the_program() {
    for (text, adapters) in [
        ("lora_rank: 8\n", true),
        ("lora_r: 8\n", false),
        ("lora_r: 8\nuse_peft: true\n", true),
        ("lora_r: 8\nuse_peft: false\n", false),
    ] {
        let text = format!("per_device_train_batch_size: 4\n{text}");
        let recipe = read_in("sft", &text, &[]).unwrap();
        assert_eq!(recipe.spec.model.adapters, adapters, "{text}");
        let mut warnings = recipe.diagnostics.iter();
        let warns = warnings.any(|found| found.rule == "adapter-unused");
        assert_eq!(warns, text.ends_with("lora_r: 8\n"), "{text}");
    }
}

#[test]
fn scalars_of_another_type_are_reported_with_upstreams_meaning() {
    insta::assert_snapshot!(problems(
        "sft",
        "learning_rate: 1e-5\nper_device_train_batch_size: \"16\"\nbf16: \"yes\"\n\
         save_strategy: no\neval_strategy: off\ngradient_checkpointing: 1\n\
         gradient_accumulation_steps: 2.0\nmax_steps: true\nweight_decay: heavy\n\
         dataset_mixture: [x]\nlora_target_modules: {a: 1}\nmax_length: 1e3\nseed: ~\n",
        &[],
    ));
    assert_eq!(
        problems("sft", "", &["learning_rate=1e-5"]),
        "",
        "upstream's command line converts, so there is nothing to report"
    );
}

#[test]
fn unknown_keys_are_refused_as_upstream_refuses_them() {
    insta::assert_snapshot!(problems(
        "sft",
        "per_device_train_batchsize: 4\nnum_generations: 4\nzebra: 1\n\
         dataset_mixture: {datasets: [{id: d, splitt: x}], sed: 1}\n\
         evenkeel: {batch: {per_device_batch_sise: 4}, sedd: 1}\n",
        &[
            "max_seq_len=128",
            "dataset_mixture.datasets.0.idd=x",
            "evenkeel.model.konfig.hidden_size=64",
        ],
    ));
}

#[test]
fn values_without_a_counterpart_are_reported() {
    insta::assert_snapshot!(problems(
        "sft",
        "lr_scheduler_type: reduce_lr_on_plateau\nfsdp: fullshard\nfp16: true\nbf16: true\n\
         eval_strategy: step\nper_device_train_batch_size: 0\nwarmup_ratio: 1.5\n",
        &[],
    ));
}

#[test]
fn the_reserved_key_overrides_the_recipe_with_native_keys() {
    let recipe = read_in(
        "sft",
        "model_name_or_path: m\nlearning_rate: 1.0e-4\n\
         evenkeel:\n  batch: {global: 64}\n  schedule: {kind: norm-test, max_batch: 256}\n\
         \x20 data: {train: [{path: synthetic}]}\n",
        &["evenkeel.batch.global=32"],
    )
    .unwrap();
    assert_eq!(recipe.spec.batch.global, Some(32));
    assert_eq!(recipe.spec.data.train[0].path, "synthetic");
    assert!(matches!(&recipe.spec.schedule, BatchSchedule::NormTest(n) if n.max_batch == 256));
    assert_eq!(
        recipe.key("schedule.max_batch"),
        "evenkeel.schedule.max_batch"
    );
}

#[test]
fn a_run_is_named_by_a_label_for_every_upstream_name() {
    let named = |lines: &str| {
        let text = format!("model_name_or_path: m\n{lines}");
        let recipe = read_in("sft", &text, &[]).unwrap_or_else(|e| panic!("{e}"));
        let diagnostics = recipe.diagnostics.iter();
        let found: Vec<String> = diagnostics
            .map(|d| {
                format!(
                    "{}:{} {}[{}] {}",
                    d.span.map_or(0, |s| s.line),
                    d.span.map_or(0, |s| s.column),
                    d.severity,
                    d.rule,
                    d.message
                )
            })
            .collect();
        (recipe.spec.name, found)
    };
    let quiet = |name: &str| (name.to_owned(), Vec::new());
    assert_eq!(named(""), quiet("config"));
    assert_eq!(
        named("output_dir: data/zephyr-7b-sft\n"),
        quiet("zephyr-7b-sft")
    );
    assert_eq!(named("output_dir: ../..\n"), quiet("config"));
    assert_eq!(named("output_dir: a\nrun_name: b\n"), quiet("b"));
    assert_eq!(
        named("output_dir: data/SmolLM2-1.7B_sft\n"),
        (
            "smollm2-1-7b-sft".to_owned(),
            vec![
                "2:13 note[run-name] the run is called `smollm2-1-7b-sft`: `SmolLM2-1.7B_sft` is \
                 no DNS label"
                    .to_owned()
            ]
        )
    );
    assert_eq!(named("run_name: ../../x\n").0, "x");
    let refused = problems("sft", "output_dir: \"\"\nevenkeel: {name: ../x}\n", &[]);
    let expected = [
        "3: error[run-name] `output_dir` is empty (name a directory, or remove it for `runs/NAME`)",
        "4: error[run-name] `evenkeel.name` is `../x`: it contains '.' (use a DNS label, at most 63 \
         lower-case letters, digits and `-`, such as `x`)",
    ];
    assert_eq!(refused, expected.join("\n"));
}

#[test]
fn abbreviated_options_are_read_as_by_argparse() {
    let job = |line: &str| {
        read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        })
    };
    let line = "trl sft --model_name_or_path m --dataset_name d --num_processes 2";
    let recipe = job(&format!(
        "{line} --per-device-train-b 4 --gradient_acc=2 --learning_r 1e-4"
    ));
    let recipe = recipe.unwrap_or_else(|error| panic!("{error}"));
    let batch = &recipe.spec.batch;
    assert_eq!(
        (batch.per_device_batch_size, batch.accumulation),
        (Some(4), Some(2))
    );
    assert_eq!(recipe.spec.learning_rate.peak, 1e-4);
    assert_eq!(recipe.diagnostics.len(), 3);
    assert!(
        recipe
            .diagnostics
            .iter()
            .all(|d| d.severity == Severity::Note)
    );
    // The last occurrence of a field counts, whether abbreviated or not.
    for (order, per_device_batch_size) in [
        ("--per_device_train_b 4 --per_device_train_batch_size 2", 2),
        ("--per_device_train_batch_size 2 --per_device_train_b 4", 4),
    ] {
        let recipe = job(&format!("{line} {order}")).unwrap();
        assert_eq!(
            recipe.spec.batch.per_device_batch_size,
            Some(per_device_batch_size),
            "{order}"
        );
    }
    for option in ["--output out", "--per_device 4", "--max_ 3"] {
        let error = job(&format!("{line} {option}")).unwrap_err();
        let problem = &error.diagnostics[0];
        assert_eq!(problem.rule, "unknown-key");
        assert!(
            problem.message.contains("more than one option"),
            "{}",
            problem.message
        );
    }
}

/// `--test_split` begins the handbook's `test_split_size`.
#[test]
fn a_text_is_no_abbreviated_number_but_an_option_of_the_script() {
    let line = "python kto.py --model_name_or_path m --dataset_name d --per_device_train_batch_size 4 \
                --desirable_weight 1.0 --test_split";
    let job = |value: &str| {
        read(&Request {
            command: format!("{line} {value}")
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
            ..Request::default()
        })
    };
    for (value, is_short) in [("test", false), ("0.1", true), ("$SHARE", true)] {
        let found = match job(value) {
            Ok(recipe) => recipe.diagnostics,
            Err(error) => error.diagnostics,
        };
        let said = found
            .iter()
            .any(|d| d.message.contains("is read as `--test_split_size`"));
        assert_eq!(said, is_short, "{found:?}");
    }
    assert!(job("test").is_ok());
}

/// open-r1 and SimPO have scripts with their own dataclasses.
#[test]
fn an_unknown_key_in_a_file_is_a_warning_and_on_the_command_line_an_error() {
    let found = |lines: &str, overrides: &[&str]| problems("grpo", lines, overrides);
    let unknown = found("solution_column: problem\n", &[]);
    let expected = "3: warning[unknown-key] there is no key `solution_column` in GRPO recipes: \
                    read as a key of the script itself (remove it if it is not one: TRL's own command \
                    line refuses it)";
    assert_eq!(unknown, expected);
    assert!(found("", &["solution_column=x"]).starts_with("1: error[unknown-key]"));
    assert!(found("num_generation: 4\n", &[]).contains("error[unknown-key]"));
    let line = |script: &str| {
        let line = format!("accelerate launch --num_processes 4 {script} --prompt_column x");
        read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        })
    };
    assert!(line("src/open_r1/grpo.py").is_ok());
    let error = line("trl/scripts/grpo.py").unwrap_err();
    assert!(
        error.to_string().contains("TRL's own scripts refuse"),
        "{error}"
    );
}

/// Keys of files of open-r1, SimPO and TRL's history, which other versions and scripts read.
#[test]
fn a_key_of_another_version_or_script_is_no_error() {
    for (folder, lines) in [
        ("sft", "use_liger: true\n"),
        (
            "grpo",
            "repetition_max_penalty: -0.1\nmax_completion_len: 512\nvllm_device: auto\n",
        ),
        ("simpo", "gamma: 1.6\nbeta: 2.0\n"),
        ("simpo", "gamma_beta_ratio: 0.5\nsft_weight: 0.1\n"),
        ("dpo", "use_num_logits_to_keep: true\n"),
    ] {
        assert_eq!(problems(folder, lines, &[]), "", "{lines}");
    }
    insta::assert_snapshot!(problems("sft", "seq_length: 512\ntemperature: 0.7\n", &[]), @"
    3: warning[unknown-key] there is no key `seq_length` in SFT recipes: read as a key of the script itself (remove it if it is not one: TRL's own command line refuses it; a similar key is `max_length`)
    4: warning[unknown-key] `temperature` is a key of GRPO, RLOO, PPO recipes, and this recipe is for SFT (remove it if the script does not define it, or set `evenkeel.objective` if this recipe is not for SFT)
    ");
}

/// `config_demo1.yaml` of open-r1's history.
#[test]
fn epochs_beside_steps_may_be_negative() {
    let budget = sft("max_steps: 500\n").budget;
    let text = "model_name_or_path: m\nnum_train_epochs: -1\nmax_steps: 500\n";
    assert_eq!(
        read_in("sft", text, &[]).unwrap().spec.budget.steps,
        budget.steps
    );
    assert!(read_in("sft", "num_train_epochs: -1\nmodel_name_or_path: m\n", &[]).is_err());
}

#[test]
fn a_typed_key_gets_no_advice_that_changes_the_training() {
    let first = |script: &str, option: &str| {
        let line =
            format!("python {script} --per_device_train_batch_size 4 --packing true {option}");
        let recipe = read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        });
        let found = recipe.map_or_else(|error| error.diagnostics, |recipe| recipe.diagnostics);
        format!("{}: {}", found[0].severity, found[0].help)
    };
    for option in ["--seq_length 512", "--max_lenght 512"] {
        assert_eq!(
            first("my/sft.py", option),
            "warning: remove it if it is not one: TRL's own command line refuses it; a similar key is `max_length`"
        );
    }
    assert_eq!(
        first("trl/scripts/sft.py", "--max_lenght 512"),
        "error: did you mean `max_length`?"
    );
}

#[test]
fn trls_command_line_refuses_an_unknown_key_of_the_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sft.yaml");
    std::fs::write(&path, "per_device_train_batch_size: 4\nseq_length: 512\n").unwrap();
    let found = |start: &str| {
        let line = format!("{start} --config {}", path.display());
        let recipe = read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        });
        recipe.map_err(|error| error.to_string())
    };
    let error = found("trl sft").unwrap_err();
    assert!(
        error.contains("passes it to `accelerate launch`"),
        "{error}"
    );
    assert!(found("accelerate launch --num_processes 2 trl/scripts/sft.py").is_ok());
}

#[test]
fn rloo_before_0_22_is_refused() {
    let found = problems("rloo", "rloo_k: 4\ntotal_episodes: 10000\n", &[]);
    assert!(
        found.starts_with("3: error[unsupported-value] `rloo_k` belongs to TRL's RLOO before 0.22"),
        "{found}"
    );
    assert_eq!(found.lines().count(), 1, "{found}");
}

#[test]
fn a_launcher_key_in_a_recipe_has_an_effect_only_with_trl() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sft.yaml");
    let text = "per_device_train_batch_size: 4\nnum_processes: 2\naccelerate_config: zero2\n";
    std::fs::write(&path, text).unwrap();
    let here = path.display();
    let line = format!("accelerate launch --num_processes 4 trl/scripts/sft.py --config {here}");
    let recipe = read(&Request {
        command: line.split(' ').map(str::to_owned).collect(),
        ..Request::default()
    });
    let recipe = recipe.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(recipe.spec.batch.gpus, Some(4));
    let found: Vec<&str> = recipe.diagnostics.iter().map(|d| d.rule.as_str()).collect();
    assert_eq!(found, ["unknown-key", "unknown-key"]);
}

#[test]
fn an_unsupported_trainer_is_refused_by_its_name() {
    for script in [
        "nash_md.py",
        "trl/experimental/gold/gold.py",
        "xpo.py",
        "dpo_online.py",
    ] {
        let line = format!("accelerate launch --num_processes 4 {script} --beta 0.1");
        let error = read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        });
        let error = error.unwrap_err();
        assert!(error.to_string().contains("TRL's trainer"), "{error}");
    }
    let found = problems("xpo", "reward_model_path: r\nresponse_length: 5\n", &[]);
    assert!(found.contains("TRL's trainer XPO"), "{found}");
    assert!(!problems("xpo/sft", "", &[]).contains("TRL's trainer"));
    let found = problems("xpo", "", &["evenkeel.objective=sft"]);
    assert!(!found.contains("TRL's trainer"), "{found}");
}

#[test]
fn an_empty_number_that_the_trainer_needs_is_refused() {
    for lines in [
        "gradient_accumulation_steps:\n",
        "gradient_accumulation_steps: ~\n",
        "per_device_train_batch_size: null\n",
    ] {
        let found = problems("sft", lines, &[]);
        assert!(found.starts_with("3: error[wrong-type]"), "{found}");
    }
    assert_eq!(problems("sft", "run_name:\nwarmup_ratio: ~\n", &[]), "");
}

#[test]
fn an_axis_is_refused_until_the_user_states_it() {
    let read = |text: &str, overrides: &[&str]| {
        let request = Request {
            path: "ds.json".into(),
            overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
            ..Request::default()
        };
        read_text(&request, text.to_owned())
    };
    let recipe = "per_device_train_batch_size: 1\nparallel:\n  tp: 2\n  pp: 4\n";
    let unread = |overrides: &[&str]| -> Vec<String> {
        let found = read(recipe, overrides).err().into_iter();
        let found = found.flat_map(|error| error.diagnostics);
        found
            .filter(|found| found.message.contains("data-parallel ranks"))
            .map(|found| format!("{}: {}", found.message, found.help))
            .collect()
    };
    insta::assert_snapshot!(unread(&[]).join("\n"));
    // A strategy says nothing of an axis.
    assert_eq!(unread(&["evenkeel.parallel.strategy=fsdp"]).len(), 2);
    assert_eq!(unread(&["evenkeel.parallel.tensor=2"]).len(), 1);
    let both = ["evenkeel.parallel.tensor=2", "evenkeel.parallel.pipeline=4"];
    assert!(unread(&both).is_empty());
    // DeepSpeed reads these two.
    let deepspeed = r#"{"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}"#;
    assert!(read(deepspeed, &[]).is_ok());
}

/// Reduced from `examples/train/sequence_parallel/` of ms-swift and from LLaMA-Factory.
#[test]
fn an_unread_size_of_an_axis_is_refused() {
    let line = "torchrun --nproc_per_node 8 t.py --per_device_train_batch_size 1";
    for option in [
        "--sequence_parallel_size 4",
        "--context-parallel-size=2",
        "--pipeline_model_parallel_size 2",
        "--hyper_parallel_cp_size 2",
        "--sp_size 2",
        "--tp 2",
        "--pp 2",
        "--mp_size 2",
        "--ring_attn_size 2",
        "--context_parallel 2",
        "--sp-ulysses-degree 2",
        "--num_model_shards 2",
    ] {
        let problems = messages(read_command(&format!("{line} {option}")));
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].ends_with("it divides the data-parallel ranks and is not read"));
    }
    for option in [
        "--sequence_parallel_size 1",
        "--vllm_tensor_parallel_size 4",
        "--sp spm.model",
        "--ep 4",
        "--num_shards 4",
    ] {
        let batch = read_command(&format!("{line} {option}"))
            .unwrap()
            .spec
            .batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.gpus),
            (Some(1), Some(8)),
            "{option}"
        );
    }
}

fn command_as(line: &str, dialect: Option<Dialect>) -> Result<Recipe, ReadError> {
    read(&Request {
        command: line.split(' ').map(str::to_owned).collect(),
        dialect,
        ..Request::default()
    })
}

/// Commands from `examples/scripts/ppo.py` and `docs/source/ppo_trainer.mdx` of 0.9.6, and from
/// scripts derived from them.
#[test]
fn a_recipe_for_the_older_trainer_is_refused() {
    for arguments in [
        "examples/scripts/ppo.py --log_with=wandb",
        "examples/scripts/ppo.py",
        "ppo.py --mini_batch_size 4 --batch_size 128 --log_with wandb",
        "my/ppo.py --batch_size 128 --gradient_accumulation_steps 4",
        "ppo.py --ppo_epochs 4 --num_train_epochs 1",
        "ppo_multi_adapter.py --use_peft",
    ] {
        let line = format!("accelerate launch --num_processes 4 {arguments}");
        let error = command_as(&line, None).expect_err(arguments);
        let [problem] = error.diagnostics.as_slice() else {
            panic!("{arguments}: {:?}", error.diagnostics);
        };
        assert_eq!(problem.rule, "unsupported-value", "{arguments}");
        assert!(problem.message.contains("PPO before 0.12"), "{arguments}");
        // The way out that the message names: state the global batch.
        let recipe = command_as(&line, Some(Dialect::Transformers)).unwrap();
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.gpus),
            (None, Some(4)),
            "{arguments}"
        );
    }
}

#[test]
fn a_recipe_for_the_newer_trainer_states_its_batch_per_device() {
    for (arguments, per_device_batch_size) in [
        ("examples/scripts/ppo/ppo.py --num_ppo_epochs 1", 8),
        ("ppo.py --per_device_train_batch_size 4 --log_with x", 4),
    ] {
        let line = format!("accelerate launch --num_processes 4 {arguments}");
        let batch = command_as(&line, None).unwrap().spec.batch;
        assert_eq!(
            batch.per_device_batch_size,
            Some(per_device_batch_size),
            "{arguments}"
        );
    }
}

#[test]
fn a_part_of_a_step_is_a_share_only_since_transformers_5() {
    let ratio = sft_of("transformers-5.0", "warmup_steps: 0.1\n", &[]).unwrap();
    assert_eq!(ratio.spec.learning_rate.warmup_ratio, Some(0.1));
    let refused = messages(sft_of("transformers-4.50", "warmup_steps: 0.1\n", &[]));
    assert_eq!(
        refused,
        ["`warmup_steps` is 0.1; before transformers 5 it takes a whole number"]
    );
}

#[test]
fn adapters_have_their_rank_and_modules() {
    let model = |lines: &str| sft(lines).model;
    let adapters = model(
        "use_peft: true\nlora_r: 8\nlora_target_modules: [q_proj, v_proj]\nlora_modules_to_save: [lm_head]\n",
    );
    assert!(adapters.adapters);
    assert_eq!(adapters.lora_rank, Some(8));
    assert_eq!(adapters.lora_target_modules, ["q_proj", "v_proj"]);
    assert_eq!(adapters.lora_modules_to_save, ["lm_head"]);
    let default = model("use_peft: true\nlora_target_modules: all-linear\n");
    assert_eq!(default.lora_rank, Some(16));
    assert_eq!(default.lora_target_modules, ["all-linear"]);
    let command = "train.py --per_device_train_batch_size 2 --lora_rank 4 --lora_target q_proj,k_proj \
                   --quantization_bit 4";
    let model = read_command(command).unwrap().spec.model;
    assert!(model.adapters && model.load_in_4bit);
    assert_eq!(model.lora_rank, Some(4));
    assert_eq!(model.lora_target_modules, ["q_proj", "k_proj"]);
}

#[test]
fn offloading_is_read_wherever_it_is_set() {
    let parallel = |lines: &str| {
        let parallel = sft(lines).parallel;
        (parallel.offload_parameters, parallel.offload_optimizer)
    };
    assert_eq!(
        parallel("fsdp: full_shard auto_wrap offload\n"),
        (true, true)
    );
    assert_eq!(parallel("fsdp: full_shard auto_wrap\n"), (false, false));
    let zero =
        |offloads: &str| format!("deepspeed: {{zero_optimization: {{stage: 3, {offloads}}}}}\n");
    assert_eq!(
        parallel(&zero("offload_optimizer: {device: cpu}")),
        (false, true)
    );
    assert_eq!(
        parallel(&zero("offload_param: {device: nvme}")),
        (true, false)
    );
    assert_eq!(
        parallel(&zero("offload_optimizer: {device: none}")),
        (false, false)
    );
}
