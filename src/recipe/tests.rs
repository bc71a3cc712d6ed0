//! Reads whole recipes: upstream files with the numbers of their manifest, and local test files.

use std::collections::HashMap;
use std::path::Path;

use super::*;
use crate::recipe::schema::spec::{LastBatch, LearningRateShape, Objective, Precision, Strategy};

/// Reads a file with `--recipe-gpus`.
fn read_for(path: &Path, gpus: Option<&str>, overrides: &[&str]) -> Result<Recipe, ReadError> {
    let setting = |gpus: &str| Setting {
        flag: "--recipe-gpus",
        path: "batch.gpus",
        value: gpus.to_owned(),
    };
    read(&Request {
        path: path.to_owned(),
        overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
        settings: gpus.map(setting).into_iter().collect(),
        ..Request::default()
    })
}

/// Reads a script from a file `run.sh`.
pub(crate) fn script(text: &str) -> Result<Recipe, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    std::fs::write(&path, text).unwrap();
    read(&Request {
        path,
        ..Request::default()
    })
}

/// Reads a command as if typed after `--`.
pub(crate) fn read_command(line: &str) -> Result<Recipe, ReadError> {
    read(&Request {
        command: line.split(' ').map(str::to_owned).collect(),
        ..Request::default()
    })
}

/// The messages of a result, in file order.
pub(crate) fn messages(result: Result<Recipe, ReadError>) -> Vec<String> {
    let diagnostics = match result {
        Ok(recipe) => recipe.diagnostics,
        Err(error) => error.diagnostics,
    };
    diagnostics.into_iter().map(|d| d.message).collect()
}

#[test]
fn a_number_that_only_the_environment_knows_is_given_beside_the_script() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    let text =
        "torchrun --nproc_per_node $GPUS train.py --do_train --per_device_train_batch_size ${BS}\n";
    std::fs::write(&path, text).unwrap();
    let request = |overrides: &[&str]| Request {
        path: path.clone(),
        overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
        ..Request::default()
    };
    let refused = read(&request(&["GPUS=8"])).unwrap_err();
    let help = &refused.diagnostics[0].help;
    assert!(help.contains("/run.sh --gpus N GPUS=8 BS=VALUE`"), "{help}");
    let given = ["GPUS=8", "BS=4", "gradient_accumulation_steps=2"];
    let recipe = read(&request(&given)).unwrap();
    let batch = &recipe.spec.batch;
    let numbers = (batch.gpus, batch.per_device_batch_size, batch.accumulation);
    assert_eq!(numbers, (Some(8), Some(4), Some(2)));
}

#[test]
fn every_variable_that_a_script_lacks_is_in_the_next_command() {
    let lacks = "torchrun --nproc_per_node 8 train.py --do_train --per_device_train_batch_size ${BS} \
                 --gradient_accumulation_steps $GA --warmup_steps $WARM --eval_strategy $WHEN\n";
    let error = script(lacks).unwrap_err();
    let words: Vec<_> = error.errors().map(|found| found.next.clone()).collect();
    let given = |name: &str| Next::words([format!("{name}=VALUE")]);
    assert_eq!(words, ["BS", "GA", "WARM", "WHEN"].map(given));
    let error = script("python train.py --a $A --b $B --a $A\n").unwrap_err();
    let found = error.errors().next().unwrap();
    let both = ["A=VALUE", "B=VALUE"].map(str::to_owned);
    assert_eq!(found.next, Next::words(both.to_vec()));
}

#[test]
fn a_line_chooses_one_of_a_scripts_trainings() {
    let text = "python train.py --do_train --per_device_train_batch_size 8\n\
                for lr in 1e-5 2e-5; do\n  torchrun --nproc_per_node 4 train.py --do_train \\\n    \
                --per_device_train_batch_size 2 --learning_rate $lr\ndone\n";
    let of = |line: Option<&str>| {
        let request = Request {
            path: "run.sh".into(),
            overrides: line
                .iter()
                .map(|line| format!("evenkeel.line={line}"))
                .collect(),
            ..Request::default()
        };
        read_text(&request, text.to_owned())
    };
    let refused = of(None).unwrap_err();
    let next: Vec<_> = refused.errors().map(|found| found.next.clone()).collect();
    assert_eq!(next, [Next::words(["evenkeel.line=3"])]);
    for line in ["3", "4"] {
        let batch = of(Some(line)).unwrap().spec.batch;
        assert_eq!(
            (batch.gpus, batch.per_device_batch_size),
            (Some(4), Some(2)),
            "{line}"
        );
    }
    assert_eq!(
        of(Some("1")).unwrap().spec.batch.per_device_batch_size,
        Some(8)
    );
    for line in ["2", "x"] {
        let refused = messages(of(Some(line)));
        let expected = format!("no command at line `{line}` starts a training");
        assert!(refused.contains(&expected), "{refused:?}");
    }
}

#[test]
fn a_script_that_names_files_from_its_own_folder_is_planned_there() {
    let folder = tempfile::tempdir().unwrap();
    let project = folder.path().join("sft");
    std::fs::create_dir_all(project.join("scripts")).unwrap();
    std::fs::write(project.join("a.yaml"), "num_train_epochs: 1\n").unwrap();
    let path = project.join("scripts/run.sh");
    std::fs::write(
        &path,
        "torchrun --nproc_per_node 4 sft.py --config a.yaml\n",
    )
    .unwrap();
    let request = Request {
        path,
        ..Request::default()
    };
    let error = read(&request).unwrap_err();
    let next = format!(
        "cd {} && evenkeel plan scripts/run.sh --gpus N",
        project.display()
    );
    let found = error.errors().next().unwrap();
    assert_eq!(found.next, Next::command(next.clone()));
    assert!(found.help.contains(&next), "{}", found.help);
}

#[test]
fn a_variable_beside_a_script_replaces_what_it_assigns() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    let text = "GPUS=4\nTOTAL=64\nBS=2\n[ -n \"$X\" ] && BS=4\nACC=$((TOTAL / BS / $GPUS))\n\
                torchrun --nproc_per_node $GPUS train.py --do_train --per_device_train_batch_size $BS \
                --gradient_accumulation_steps $ACC\n";
    std::fs::write(&path, text).unwrap();
    let of = |overrides: &[&str]| {
        read(&Request {
            path: path.clone(),
            overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
            ..Request::default()
        })
    };
    let batch = of(&["GPUS=8", "BS=4"]).unwrap().spec.batch;
    let numbers = (batch.gpus, batch.per_device_batch_size, batch.accumulation);
    assert_eq!(numbers, (Some(8), Some(4), Some(2)));
    let unused = messages(of(&["BS=4", "NODES=8"]));
    assert_eq!(unused, ["the script has no variable `NODES`"]);
}

#[test]
fn a_file_that_no_reader_takes_needs_only_the_samples_of_a_step() {
    let request = |batch: Option<&str>| Request {
        path: "my config.yaml".into(),
        settings: batch
            .map(|value| Setting {
                flag: "--global-batch-size",
                path: "batch.global",
                value: value.to_owned(),
            })
            .into_iter()
            .collect(),
        ..Request::default()
    };
    let text = "layers: 12\nbatch: {size: 3}\n".to_owned();
    let refused = read_text(&request(None), text.clone()).unwrap_err();
    let help = &refused.diagnostics[0].help;
    let line = "`evenkeel plan 'my config.yaml' --gpus N --global-batch-size B`";
    assert!(help.contains(line), "{help}");
    let recipe = read_text(&request(Some("64")), text).unwrap();
    assert_eq!(recipe.spec.batch.global, Some(64));
    assert_eq!(recipe.diagnostics[0].severity, Severity::Note);
}

/// Reads a text as a file, with the options of the command line.
fn given(
    name: &str,
    text: &str,
    options: &[(&'static str, &'static str, &str)],
) -> Result<Recipe, ReadError> {
    let setting = |(flag, path, value): &(&'static str, &'static str, &str)| Setting {
        flag,
        path,
        value: (*value).to_owned(),
    };
    let request = Request {
        path: name.into(),
        settings: options.iter().map(setting).collect(),
        world: ["--gpus", "96"].map(str::to_owned).to_vec(),
        ..Request::default()
    };
    read_text(&request, text.to_owned())
}

const GLOBAL: (&str, &str) = ("--global-batch-size", "batch.global");

#[test]
fn a_given_batch_plans_a_command_whose_arguments_are_not_known() {
    for text in [
        "eval $A $B\n",
        "torchrun --nproc_per_node $N train.py $ARGS\n",
        "torchrun --nproc_per_node 4 train.py --do_train --per_device_train_batch_size $BS\n",
        "torchrun --nproc_per_node 4 dpo.py --batch_size 8 --n_epochs 3 --lr 1e-5 --kl_coef 1\n",
        "python examples/scripts/gkd.py --batch_size 4\n",
        "python -m open_instruct.grpo_fast --num_unique_prompts_rollout 8\n",
        "bash other.sh\n",
        "sky launch --num-nodes 4 -- torchrun --nproc_per_node 8 train.py --do_train\n",
    ] {
        let refused = given("run.sh", text, &[]);
        let recipe = given(
            "run.sh",
            text,
            &[
                (GLOBAL.0, GLOBAL.1, "64"),
                (
                    "--per-device-batch-size",
                    "batch.per_device_batch_size",
                    "2",
                ),
            ],
        );
        let recipe = recipe.unwrap_or_else(|error| panic!("{text}{:?}", error.diagnostics));
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.global, batch.per_device_batch_size),
            (Some(64), Some(2)),
            "{text}"
        );
        let Err(refused) = refused else { continue };
        let helps: Vec<&str> = refused
            .diagnostics
            .iter()
            .map(|found| &*found.help)
            .collect();
        let line = "`evenkeel plan run.sh --gpus 96 --global-batch-size B`";
        assert!(
            helps.iter().any(|help| help.contains(line)),
            "{text}{helps:?}"
        );
    }
}

#[test]
fn a_given_batch_leaves_other_errors_of_a_recipe() {
    let text = "per_device_train_batch_size: 4\nlearning_rate: fast\nnum_train_epochs: 1\n";
    assert!(given("sft.yaml", text, &[(GLOBAL.0, GLOBAL.1, "64")]).is_err());
}

#[test]
fn a_projects_refusal_proposes_its_batch_and_its_axes() {
    let neox = "pipe-parallel-size: 4\nmodel-parallel-size: 2\ntrain_micro_batch_size_per_gpu: 4\n";
    let help =
        |result: Result<Recipe, ReadError>| result.unwrap_err().diagnostics.swap_remove(0).help;
    insta::assert_snapshot!(help(given("neox.yml", neox, &[])), @"its samples of a step are `train_batch_size`, or `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × GPUs / (`pipe_parallel_size` × `model_parallel_size`); or give the samples of a step, and only the launcher is read: `evenkeel plan neox.yml --gpus 96 --global-batch-size B evenkeel.parallel.pipeline=4 evenkeel.parallel.tensor=2`");
    // The batch alone does not say how many ranks share it.
    let batch = [(GLOBAL.0, GLOBAL.1, "64")];
    insta::assert_snapshot!(help(given("neox.yml", neox, &batch)), @"add `evenkeel.parallel.pipeline=4`, and the batch follows; with 1 where every rank still takes other samples, as in ms-swift's GRPO");
    let deepspeed =
        r#"{"train_batch_size": 32, "num_layers": 4, "zero_optimization": {"stage": 1}}"#;
    assert_eq!(
        messages(given("ds.json", deepspeed, &[])),
        ["`num_layers` is GPT-NeoX's, which is not read"]
    );
}

#[test]
fn a_program_with_a_trainers_name_is_trls_only_with_its_arguments() {
    let foreign = "torchrun --nproc_per_node 4 dpo.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2 \
                   --model llama --data hh --batch 8 --kl_coef 1";
    let recipe = read_command(foreign).unwrap();
    assert_eq!(recipe.dialect, Dialect::Transformers);
    let batch = &recipe.spec.batch;
    let numbers = (batch.per_device_batch_size, batch.accumulation, batch.gpus);
    assert_eq!(numbers, (Some(4), Some(2), Some(4)));
    let trls = "torchrun --nproc_per_node 4 dpo.py --per_device_train_batch_size 4 --beta 0.1 --dataset_name d";
    assert_eq!(read_command(trls).unwrap().dialect, Dialect::HandbookTrl);
}

#[test]
fn a_variable_in_arithmetic_is_given_by_its_name() {
    let text = "GA=$((64/(2*N)))\ntorchrun --nproc_per_node 4 train.py --do_train --per_device_train_batch_size 2 \
                --gradient_accumulation_steps ${GA:?}\n";
    let read = |value: &str| {
        let request = Request {
            path: "run.sh".into(),
            overrides: vec![value.to_owned()],
            ..Request::default()
        };
        read_text(&request, text.to_owned())
            .unwrap()
            .spec
            .batch
            .accumulation
    };
    assert_eq!((read("N=8"), read("GA=3")), (Some(4), Some(3)));
}

#[test]
fn an_override_of_the_schedule_leaves_the_settings_of_the_files_one() {
    let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 8}\n  budget: {samples: 80}\n  \
                schedule: {kind: norm-test, eta: 0.5, interval: 4, max_batch: 64}\n";
    let of = |overrides: &[&str]| {
        let request = Request {
            path: "recipe.yaml".into(),
            overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
            ..Request::default()
        };
        read_text(&request, text.to_owned())
    };
    let constant = of(&["schedule.kind=constant"]).unwrap();
    assert_eq!(constant.spec.schedule, spec::BatchSchedule::Constant);
    let note = &constant.diagnostics[0];
    assert_eq!(note.severity, Severity::Note);
    assert!(
        note.message
            .contains("`eta`, `interval`, `max_batch` no longer count"),
        "{}",
        note.message
    );
    let stages = of(&[
        "schedule.kind=stages",
        "schedule.stages=[{share: 1, batch: 8}]",
    ])
    .unwrap();
    assert!(matches!(
        stages.spec.schedule,
        spec::BatchSchedule::Stages { .. }
    ));
    let same = of(&["schedule.kind=norm-test", "schedule.eta=0.4"]).unwrap();
    let test = same.spec.schedule.norm_test().unwrap();
    assert_eq!((test.eta, test.interval), (0.4, 4));
    // What is typed is never left out.
    let both = of(&["schedule.kind=constant", "schedule.eta=0.4"]).unwrap_err();
    assert!(
        both.diagnostics
            .iter()
            .any(|d| d.message.contains("`schedule.eta`"))
    );
}

/// The manifest's rows, by column name.
fn manifest(root: &Path) -> Vec<HashMap<String, String>> {
    let text = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
    let mut rows = corpus::csv(&text);
    let header = rows.next().unwrap();
    rows.map(|row| header.iter().cloned().zip(row).collect())
        .collect()
}

#[test]
fn every_handbook_recipe_reads_with_the_numbers_of_the_manifest() {
    let Some(root) = corpus::root() else { return };
    let mut read = 0;
    for row in manifest(&root) {
        if row["dialect"] != "handbook-trl-yaml" {
            continue;
        }
        let path = root.join(&row["local_path"]);
        let recipe = read_for(&path, Some(&row["stated_gpus"]), &[])
            .unwrap_or_else(|e| panic!("{}: {e}\n{:?}", row["path"], e.diagnostics));
        let batch = &recipe.spec.batch;
        let number = |column: &str| Some(row[column].parse::<u64>().unwrap());
        assert_eq!(
            batch.per_device_batch_size,
            number("per_device_train_batch_size")
        );
        assert_eq!(batch.accumulation, number("gradient_accumulation_steps"));
        assert_eq!(batch.gpus, number("stated_gpus"));
        let (w, m, a) = (
            batch.gpus.unwrap(),
            batch.per_device_batch_size.unwrap(),
            batch.accumulation.unwrap(),
        );
        let stated = format!("GBS={w}x{m}x{a}={};", w * m * a);
        let expected = &row["expected_rule_outcome"];
        assert!(expected.starts_with(&stated), "{stated} against {expected}");
        assert_eq!(recipe.dialect, Dialect::HandbookTrl);
        let folder = path
            .parent()
            .unwrap()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap();
        let objective = match folder {
            "sft" => Objective::Sft,
            "dpo" => Objective::Dpo,
            "orpo" => Objective::Orpo,
            other => panic!("a recipe in {other}"),
        };
        assert_eq!(recipe.spec.objective, objective);
        // The only diagnostic is about the run's name.
        let rules: Vec<&str> = recipe.diagnostics.iter().map(|d| d.rule.as_str()).collect();
        assert!(
            rules.iter().all(|rule| *rule == "run-name"),
            "{}: {rules:?}",
            row["path"]
        );
        assert!(!recipe.spec.data.train.is_empty(), "{}", row["path"]);
        read += 1;
    }
    assert_eq!(read, 14);
}

#[test]
fn every_accelerate_config_reads_with_the_world_of_the_manifest() {
    let Some(root) = corpus::root() else { return };
    let mut read = 0;
    for row in manifest(&root) {
        if row["dialect"] != "accelerate-yaml" {
            continue;
        }
        read += 1;
        let name = row["path"].as_str();
        let result = read_for(&root.join(&row["local_path"]), None, &[]);
        let rules = |diagnostics: &[Diagnostic]| -> Vec<String> {
            diagnostics.iter().map(|d| d.rule.clone()).collect()
        };
        let recipe = match name {
            "tests/test_configs/0_30_0_sagemaker.yaml" => {
                let rules = rules(&result.unwrap_err().diagnostics);
                assert_eq!(rules, ["unsupported-value", "duplicate-key"]);
                continue;
            }
            "tests/test_configs/invalid_keys.yaml" => {
                let rules = rules(&result.unwrap_err().diagnostics);
                assert_eq!(rules, ["unknown-key", "unknown-key"]);
                continue;
            }
            _ => result.unwrap_or_else(|e| panic!("{name}: {e}")),
        };
        assert_eq!(recipe.dialect, Dialect::Accelerate);
        // Without `num_processes` in the config, accelerate needs it in the command.
        let missing = recipe
            .diagnostics
            .iter()
            .find(|d| d.rule == "mandatory-missing");
        let absent = row["expected_rule_outcome"].starts_with("num_processes absent");
        assert_eq!(missing.is_some(), absent, "{name}");
        let stated = row["stated_gpus"].split(' ').next().unwrap();
        let gpus = match name {
            // `distributed_type: "NO"` starts one process.
            "examples/config_yaml_templates/single_accelerator.yaml" => Some(1),
            // `num_processes` is left to the command line.
            "examples/slurm/fsdp_config.yaml" => None,
            _ => Some(stated.parse().unwrap()),
        };
        assert_eq!(recipe.spec.batch.gpus, gpus, "{name}");
        let parallel = &recipe.spec.parallel;
        let strategy = match name {
            n if n.contains("fsdp") => Strategy::Fsdp,
            n if n.contains("zero3") || n.contains("alst") => Strategy::Fsdp,
            n if n.contains("deepspeed") => Strategy::Zero2,
            n if n.contains("tp_hsdp") => Strategy::Fsdp,
            _ => Strategy::Ddp,
        };
        assert_eq!(parallel.strategy, strategy, "{name}");
        if name.contains("tp_hsdp") {
            assert_eq!((parallel.tensor, parallel.context), (2, 1));
            assert_eq!(
                (parallel.data_shard, parallel.data_replicate),
                (Some(2), Some(2))
            );
            assert_eq!(
                recipe.key("parallel.tensor"),
                "parallelism_config.parallelism_config_tp_size"
            );
        }
    }
    assert_eq!(read, 17);
}

#[test]
fn every_deepspeed_config_reads_as_one() {
    let Some(root) = corpus::root() else { return };
    let mut read = 0;
    for row in manifest(&root) {
        if row["dialect"] != "deepspeed-json" {
            continue;
        }
        read += 1;
        let result = read_for(&root.join(&row["local_path"]), None, &[]);
        if row["expected_rule_outcome"].starts_with("no batch keys at all") {
            let found = result.unwrap_err().diagnostics;
            assert_eq!(found[0].rule, "deepspeed-batch-triple", "{}", row["path"]);
            continue;
        }
        let recipe = result.unwrap_or_else(|e| panic!("{}: {e}", row["path"]));
        assert_eq!(recipe.dialect, Dialect::Deepspeed, "{}", row["path"]);
        assert_eq!(recipe.diagnostics, [], "{}", row["path"]);
        let number = |column: &str| row[column].parse::<u64>().ok();
        let batch = &recipe.spec.batch;
        assert_eq!(batch.global, number("stated_gbs"), "{}", row["path"]);
        assert_eq!(
            batch.per_device_batch_size,
            number("per_device_train_batch_size"),
            "{}",
            row["path"]
        );
        let accumulation = number("gradient_accumulation_steps");
        assert!(
            accumulation.is_none() || batch.accumulation == accumulation,
            "{}",
            row["path"]
        );
    }
    assert_eq!(read, 6);
}

#[test]
fn zephyr_sft_has_upstreams_values() {
    let Some(root) = corpus::root() else { return };
    let path = root.join(
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml",
    );
    let recipe = read_for(
        &path,
        None,
        &[
            "max_seq_length=128",
            "dataset_mixture.datasets.0.id=chat.jsonl",
            "evenkeel.model.config.hidden_size=64",
            "evenkeel.schedule={kind: norm-test, eta: 0.3}",
        ],
    )
    .unwrap();
    let spec = &recipe.spec;
    assert_eq!(spec.name, "zephyr-7b-sft-full");
    assert_eq!(spec.output.as_deref(), Some("data/zephyr-7b-sft-full"));
    assert_eq!(
        spec.model.path.as_deref(),
        Some("mistralai/Mistral-7B-v0.1")
    );
    assert_eq!(spec.model.precision, Precision::Bf16);
    assert!(spec.model.activation_checkpointing);
    assert_eq!(spec.model.config["hidden_size"], 64);
    assert_eq!(spec.learning_rate.peak, 2e-5);
    assert_eq!(spec.learning_rate.shape, LearningRateShape::Cosine);
    assert_eq!(spec.learning_rate.warmup_ratio, Some(0.1));
    assert_eq!(spec.budget.epochs, Some(1.0));
    assert_eq!(spec.budget.steps, None, "max_steps is -1");
    assert!(spec.evaluation.every_epoch);
    assert_eq!(spec.evaluation.per_device_batch_size, Some(8));
    assert_eq!(spec.checkpoint.every_steps, Some(100));
    assert_eq!(spec.checkpoint.keep, Some(1));
    assert_eq!(spec.data.sequence_length, 128);
    assert_eq!(spec.data.held_out, Some(1000.0));
    assert_eq!(
        spec.data.train.len(),
        2,
        "upstream mixes the test split in as well"
    );
    assert_eq!(spec.data.train[0].path, "chat.jsonl");
    assert_eq!(spec.data.train[1].split.as_deref(), Some("test_sft"));
    assert_eq!(spec.batch.last_batch, LastBatch::Wrap);
    let template = spec.tokenizer.chat_template.as_deref().unwrap();
    assert!(
        template.starts_with("{% for message in messages %}\n"),
        "escapes are resolved"
    );
    assert!(matches!(spec.schedule, spec::BatchSchedule::NormTest(ref n) if n.eta == 0.3));
    let per_device_batch_size = &recipe.value_sources["batch.per_device_batch_size"];
    assert_eq!(per_device_batch_size.key, "per_device_train_batch_size");
    assert_eq!(
        (
            per_device_batch_size.span.line,
            per_device_batch_size.span.column
        ),
        (48, 30)
    );
    let place = recipe.span("model.config.hidden_size").unwrap();
    assert_eq!((place.line, place.column), (3, 35));
    assert_eq!(
        recipe.key("model.config.hidden_size"),
        "evenkeel.model.config.hidden_size"
    );
    assert_eq!(
        recipe.key("data.train.0.path"),
        "dataset_mixture.datasets.0.id"
    );
    assert_eq!(
        recipe.span("batch.gpus"),
        None,
        "the recipe sets no number of GPUs"
    );
}

#[test]
fn a_missing_file_is_reported_where_a_script_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    for named in [
        "accelerate launch \\\n  --config_file missing.yaml train.py",
        "python train.py \\\n  --config missing.yaml",
        "torchrun train.py --deepspeed_config \\\n  missing.json",
        "trl sft --accelerate_config zero2 \\\n  --config missing.yaml",
        "python run_clm.py \\\n  missing.json",
    ] {
        std::fs::write(
            &path,
            format!("cd code\n{named} --per_device_train_batch_size 4\n"),
        )
        .unwrap();
        let error = read_for(&path, None, &[]).unwrap_err();
        let found = error.diagnostics.iter();
        let missing = found
            .filter(|d| d.rule == "unreadable-file")
            .map(|d| d.locate(&error.sources).line);
        assert_eq!(missing.collect::<Vec<_>>(), [Some(3)], "{named}: {error}");
    }
}

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let error = read_for(Path::new("no/such/recipe.yaml"), None, &[]).unwrap_err();
    assert_eq!(error.diagnostics[0].rule, "unreadable-file");
    let text = error.to_string();
    assert!(
        text.contains("`no/such/recipe.yaml` cannot be read"),
        "{text}"
    );
}

#[test]
fn recipes_and_configs_may_repeat_values_by_anchors() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let trl = "model_name_or_path: a/b\nper_device_train_batch_size: &size 4\n\
               per_device_eval_batch_size: *size\ngradient_accumulation_steps: 2\n\
               gradient_checkpointing_kwargs: &flags {use_reentrant: false}\n\
               model_init_kwargs: {<<: *flags, use_cache: false}\neval_strategy: steps\neval_steps: 5\n";
    let recipe = read_for(&write("sft.yaml", trl), Some("8"), &[]).unwrap();
    let batch = &recipe.spec.batch;
    assert_eq!(
        (batch.per_device_batch_size, batch.accumulation),
        (Some(4), Some(2))
    );
    assert_eq!(recipe.spec.evaluation.per_device_batch_size, Some(4));
    let config = "distributed_type: DEEPSPEED\nnum_machines: &one 1\nmachine_rank: 0\nnum_processes: &gpus 8\n\
                  mixed_precision: bf16\ndeepspeed_config:\n  <<: {zero_stage: 3}\n  \
                  gradient_accumulation_steps: *one\n";
    let recipe = read_for(&write("accelerate.yaml", config), None, &[]).unwrap();
    assert_eq!(recipe.spec.batch.gpus, Some(8));
    assert_eq!(recipe.spec.batch.accumulation, Some(1));
    let wrong = trl.replace("&size 4", "&size many");
    let refused = read_for(&write("wrong.yaml", &wrong), Some("8"), &[]).unwrap_err();
    let places = refused.errors().filter_map(|found| found.span);
    let places: Vec<_> = places.map(|span| (span.line, span.column)).collect();
    // At the anchor and at its alias.
    assert_eq!(places, [(2, 36), (3, 29)]);
}

/// Reads the first of some files in their folder. `batch`: a given global batch.
fn in_folder(
    files: &[(&str, &str)],
    overrides: &[&str],
    batch: Option<u64>,
) -> Result<Recipe, ReadError> {
    let texts = files
        .iter()
        .map(|(name, text)| ((*name).into(), (*text).to_owned()));
    let setting = |batch: u64| Setting {
        flag: GLOBAL.0,
        path: GLOBAL.1,
        value: batch.to_string(),
    };
    read(&Request {
        origin: Origin::snapshot(texts).unwrap(),
        path: files[0].0.into(),
        overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
        settings: batch.map(setting).into_iter().collect(),
        ..Request::default()
    })
}

/// The messages of all errors, in file order.
fn errors(result: Result<Recipe, ReadError>) -> Vec<String> {
    let error = result.expect_err("it is read");
    error.errors().map(|found| found.message.clone()).collect()
}

#[test]
fn a_config_in_a_variable_is_asked_for_and_then_followed() {
    let launcher = "if [ -n \"$X\" ]; then C=a.yaml; else C=b.yaml; fi\n\
                    accelerate launch --config_file=$C train.py --do_train --per_device_train_batch_size 2\n";
    let config = "distributed_type: MULTI_GPU\nnum_processes: 4\n";
    let files = [("run.sh", launcher), ("c.yaml", config)];
    assert_eq!(
        errors(in_folder(&files, &[], None)),
        ["`config_file` is unresolved: only the shell or its environment knows `$C`"]
    );
    let text = launcher.replace("=$C", "=${D}/c.yaml");
    let folder = [(files[0].0, text.as_str()), ("d/c.yaml", config)];
    let refused = in_folder(&folder, &[], None).unwrap_err();
    let help = &refused.errors().next().unwrap().help;
    assert!(
        help.contains("`evenkeel plan run.sh --gpus N D=VALUE`"),
        "{help}"
    );
    assert_eq!(
        in_folder(&folder, &["D=d"], None).unwrap().spec.batch.gpus,
        Some(4)
    );
    let found = in_folder(&files, &["C=c.yaml"], None).unwrap();
    assert_eq!(found.spec.batch.gpus, Some(4));
    let own = [
        (
            "run.sh",
            "torchrun --nproc_per_node 8 train.py --train_config=$C --lr 1\n",
        ),
        ("c.yaml", "model: {tp_size: 4}\n"),
    ];
    let asked =
        "`$C` names a config that only the shell knows: it may divide the data-parallel ranks";
    assert_eq!(errors(in_folder(&own, &[], None)), [asked]);
    assert_eq!(errors(in_folder(&own, &[], Some(64))), [asked]);
    assert_eq!(
        errors(in_folder(&own, &["C=c.yaml"], Some(64))),
        ["`c.yaml.model.tp_size` is 4: it divides the data-parallel ranks and is not read"]
    );
    let stated = in_folder(&own, &["evenkeel.parallel.tensor=1"], Some(64)).unwrap();
    assert_eq!(stated.spec.batch.global, Some(64));
    // The path of a model or of data names no axes.
    let beside =
        "torchrun --nproc_per_node 8 train.py --data_config $C --model_config ${M}/m.json\n";
    assert!(in_folder(&[("run.sh", beside)], &[], Some(64)).is_ok());
}

#[test]
fn the_axes_of_a_command_in_a_wrapper_count() {
    for text in [
        "uv run python submit.py --gpus 8 -- source env.sh \\&\\& python train.py --lr 1 --sequence_parallel_size 2\n",
        // What prepares the data is not the training.
        "TP=2\nA=\"--tensor-model-parallel-size $TP\"\n[ $# -gt 0 ] && A=\"$A --x\"\npython prepare.py --dir d\n\
         C=\"deepspeed train.py $@ $A\"\neval $C\n",
        "find d -name '*.py' -print | xargs cp -t e\nC=\"torchrun train.py ${A}\"\nB=\"--tp_size ${T}\"\neval $C\n",
    ] {
        let refused = errors(given("run.sh", text, &[(GLOBAL.0, GLOBAL.1, "64")]));
        assert!(
            refused
                .iter()
                .any(|found| found.contains("divides the data-parallel ranks")),
            "{text}{refused:?}"
        );
    }
}

#[test]
fn the_value_of_an_option_in_a_wrapped_command_is_no_override_of_hydra() {
    let text = "python submit.py --gpus 8 -- python train.py --verifier math_dapo=math --lr 1 $@\n";
    let refused = errors(given("run.sh", text, &[]));
    assert!(
        refused.iter().all(|found| !found.contains("Hydra")),
        "{refused:?}"
    );
    let mixed = "python submit.py --gpus 8 -- python train.py --lr=1 loss=dpo\n";
    assert!(errors(given("run.sh", mixed, &[]))[0].contains("`loss=dpo` is a Hydra override"));
    assert!(given("run.sh", mixed, &[(GLOBAL.0, GLOBAL.1, "64")]).is_ok());
}

#[test]
fn a_batch_is_proposed_only_where_nothing_else_refuses_the_file() {
    let two = "eval $A\ntorchrun a.py --do_train --per_device_train_batch_size $B\n\
               torchrun b.py --do_train --per_device_train_batch_size 2\n";
    let refused = given("run.sh", two, &[]).unwrap_err();
    let helps = refused.diagnostics.iter().map(|found| found.help.as_str());
    assert!(
        helps
            .into_iter()
            .all(|help| !help.contains("--global-batch-size"))
    );
    let axes = "torchrun --nproc_per_node 8 train.py $A --sequence_parallel_size 2\n";
    let refused = given("run.sh", axes, &[]).unwrap_err();
    let mut helps = refused.diagnostics.iter().map(|found| found.help.as_str());
    let line = "--global-batch-size B evenkeel.parallel.sequence=2`";
    assert!(
        helps.any(|help| help.contains(line)),
        "{:?}",
        refused.diagnostics
    );
}

#[test]
fn a_script_that_cannot_be_parsed_needs_only_the_samples_of_a_step() {
    let text = "PATH_OF=<your path>_x\ntorchrun train.py --tensor-parallel-size 2\n";
    assert!(errors(given("run.sh", text, &[]))[0].contains("cannot be parsed here"));
    let batch = [(GLOBAL.0, GLOBAL.1, "64")];
    assert_eq!(
        errors(given("run.sh", text, &batch)),
        ["`tensor_parallel_size` is 2: it divides the data-parallel ranks and is not read"]
    );
    let without = text.replace(" --tensor-parallel-size 2", "");
    assert!(given("run.sh", &without, &batch).is_ok());
}

#[test]
fn a_key_that_is_given_twice_needs_only_the_samples_of_a_step() {
    let text = "per_device_train_batch_size: 4\nlearning_rate: 1.0e-5\nlearning_rate: 2.0e-5\n";
    assert_eq!(
        errors(given("sft.yaml", text, &[])),
        ["`learning_rate` is given twice, first on line 2"]
    );
    assert!(given("sft.yaml", text, &[(GLOBAL.0, GLOBAL.1, "64")]).is_ok());
    let deepspeed = "{\"train_batch_size\": 8, \"train_batch_size\": 4, \"zero_optimization\": {}}";
    assert!(given("ds.json", deepspeed, &[(GLOBAL.0, GLOBAL.1, "64")]).is_err());
}

#[test]
fn files_with_keys_of_a_format_are_not_all_of_it() {
    let state =
        r#"{"global_step": 10, "log_history": [], "train_batch_size": 16, "max_steps": 10}"#;
    assert_eq!(
        errors(given("trainer_state.json", state, &[])),
        ["this is the `trainer_state.json` of a run, and no recipe, which is not supported yet"]
    );
    let other = "batch_size: 8\ntotal_batch_size: 64\nlr: 4e-4\nmodel_name_or_path: a/b\ndistributed_type: ddp\n";
    let refused = errors(given("training.yaml", other, &[]));
    assert!(
        refused.iter().all(|found| !found.contains("accelerate")),
        "{refused:?}"
    );
    assert!(given("training.yaml", other, &[(GLOBAL.0, GLOBAL.1, "64")]).is_ok());
    // A typo in an accelerate config stays one.
    let typo = "distributed_type: MULTI_GPUS\nnum_processes: 8\n";
    assert_eq!(
        errors(given("a.yaml", typo, &[])),
        ["`distributed_type` is `MULTI_GPUS`"]
    );
}

#[test]
fn a_word_in_a_name_is_no_objective_against_the_keys() {
    let objective = |path: &str, text: &str| {
        let gpus = [("--recipe-gpus", "batch.gpus", "8")];
        let batch = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n";
        given(path, &format!("{batch}{text}"), &gpus)
            .unwrap()
            .spec
            .objective
    };
    for (path, text, expected) in [
        (
            "school_of_reward_hacks/run.yaml",
            "max_seq_length: 512\n",
            Objective::Sft,
        ),
        (
            "reward_qlora.yaml",
            "beta: 0.1\nloss_type: sigmoid\nmax_length: 1024\nmax_prompt_length: 512\n",
            Objective::Dpo,
        ),
        ("reward_full.yaml", "max_length: 512\n", Objective::Reward),
        // The whole name of a folder or a file counts.
        (
            "reward/full.yaml",
            "max_seq_length: 512\n",
            Objective::Reward,
        ),
        (
            "run.json",
            "base_model: a/b\nmax_seq_length: 512\n",
            Objective::Sft,
        ),
    ] {
        assert_eq!(objective(path, text), expected, "{path}");
    }
}

#[test]
fn a_programs_own_key_for_its_length_leaves_no_default() {
    let budget = |text: &str| {
        let text =
            format!("per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n{text}");
        let gpus = [("--recipe-gpus", "batch.gpus", "8")];
        given("sft.yaml", &text, &gpus).unwrap().spec.budget.epochs
    };
    assert_eq!(budget("learning_rate: 1.0e-5\n"), Some(3.0));
    assert_eq!(budget("epochs: 10\n"), None);
    assert_eq!(budget("epochs: 10\nnum_train_epochs: 2\n"), Some(2.0));
    let program = "class Args:\n    total_episodes: int = 92858\n    per_device_train_batch_size: int = 2\n    \
                   gradient_accumulation_steps: int = 4\n";
    let files = [
        ("run.sh", "torchrun --nproc_per_node 8 t.py --seed 1\n"),
        ("t.py", program),
    ];
    let spec = in_folder(&files, &[], None).unwrap().spec;
    assert_eq!(
        (spec.batch.per_device_batch_size, spec.budget.epochs),
        (Some(2), None)
    );
}

#[test]
fn an_axis_over_the_data_is_no_misspelled_key() {
    let text = "per_device_batch_size: 1\nlearning_rate: 1.0e-5\ngradient_accumulation_steps: 16\nep_size: 2\n";
    assert_eq!(
        errors(given("base.yaml", text, &[])),
        ["`ep_size` is 2: it may divide the data-parallel ranks and is not read"]
    );
    let batch = given("base.yaml", text, &[(GLOBAL.0, GLOBAL.1, "128")])
        .unwrap()
        .spec
        .batch;
    // Its micro-batch has another name.
    assert_eq!(
        (batch.per_device_batch_size, batch.accumulation),
        (None, Some(16))
    );
}

#[test]
fn the_micro_batch_of_a_plan_is_that_of_the_model_that_trains() {
    let micro = |name: &str, text: &str| {
        let batch = [(GLOBAL.0, GLOBAL.1, "64")];
        given(name, text, &batch)
            .unwrap()
            .spec
            .batch
            .per_device_batch_size
    };
    let command = "python3 -m verl.trainer.main_ppo data.train_files=a ";
    for (arguments, expected) in [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 critic.ppo_micro_batch_size_per_gpu=8",
            Some(4),
        ),
        ("data.micro_batch_size_per_gpu=4", Some(4)),
        // All ranks share it.
        ("data.micro_batch_size=32", None),
        (
            "actor_rollout_ref.rollout.micro_batch_size=256 reward_model.micro_batch_size=64",
            None,
        ),
    ] {
        assert_eq!(
            micro("run.sh", &format!("{command}{arguments}\n")),
            expected,
            "{arguments}"
        );
    }
    let generation = "rollout: {micro_batch_size: 256}\ndata: {batch_size: 2048}\n";
    assert_eq!(micro("generation.yaml", generation), None);
}

#[test]
fn an_accelerate_config_whose_deepspeed_file_leaves_the_accumulation_has_no_batch() {
    let config = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n";
    let file = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}}"#;
    let batch = |file: &str| {
        let recipe = in_folder(&[("a.yaml", config), ("ds.json", file)], &[], None).unwrap();
        recipe.spec.batch.per_device_batch_size
    };
    assert_eq!(batch(file), None);
    assert_eq!(batch(&file.replace("\"auto\"", "4")), Some(2));
}

#[test]
fn the_text_of_a_program_refuses_what_it_does_not_train_as_a_trainer() {
    let command = "torchrun --nproc_per_node 8 t.py --per_device_train_batch_size 1 --gradient_accumulation_steps 16\n";
    let of = |program: &str, overrides: &[&str], batch: Option<u64>| {
        in_folder(&[("run.sh", command), ("t.py", program)], overrides, batch)
    };
    let loader = "def get_train_dataloader(self):\n    return DataLoader(self.train_dataset)\n\n\
                  Trainer.get_train_dataloader = get_train_dataloader\ntrainer.train()\n";
    assert_eq!(
        errors(of(loader, &[], None)),
        [
            "the program's own data loader does not divide the samples: all ranks may train on the same"
        ]
    );
    let shared = of(loader, &["evenkeel.parallel.sequence=8"], None).unwrap();
    assert_eq!(
        (shared.spec.batch.gpus, shared.spec.parallel.sequence),
        (Some(8), 8)
    );
    let given = of(loader, &[], Some(64)).unwrap();
    let assumes = "nothing to do if the given global batch and axes are those of the training";
    assert!(given.diagnostics.iter().any(|found| found.help == assumes));
    let divided = loader.replace(
        "DataLoader(self.train_dataset)",
        "self.accelerator.prepare(DataLoader(d))",
    );
    assert!(of(&divided, &[], None).is_ok());
    let evaluates = "trainer = Trainer(args=args, train_dataset=d)\nprint(trainer.evaluate())\n";
    assert_eq!(
        errors(of(evaluates, &[], None)),
        ["the program of this command calls `evaluate` or `predict`, and nothing that trains"]
    );
}

#[test]
fn numbers_that_a_program_computes_are_no_defaults() {
    let command = "python t.py --total 32 --resume_from_checkpoint a --eval_strategy no\n";
    let program = "import argparse\nparser.add_argument(\"--total\", default=128)\n\
                   TrainingArguments(\n    per_device_train_batch_size=micro,\n    \
                   gradient_accumulation_steps=total // micro,\n)\ntrainer.train()\n";
    let files = [("run.sh", command), ("t.py", program)];
    let refused = in_folder(&files, &[], None).unwrap_err();
    let helps: Vec<&str> = refused.errors().map(|found| found.help.as_str()).collect();
    assert!(
        helps
            .iter()
            .all(|help| help.contains("which takes no such argument")),
        "{helps:?}"
    );
    let batch = in_folder(&files, &[], Some(1024)).unwrap().spec.batch;
    assert_eq!(
        (batch.per_device_batch_size, batch.accumulation),
        (None, None)
    );
    let parses = program.replace("import argparse", "parser = HfArgumentParser(Args)");
    let refused = in_folder(&[files[0], ("t.py", &parses)], &[], None).unwrap_err();
    let help = &refused.errors().next().unwrap().help;
    assert!(
        help.starts_with("add `--per_device_train_batch_size N`"),
        "{help}"
    );
}
