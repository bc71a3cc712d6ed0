//! Upstream's command lines and DeepSpeed configs, with the outcomes of the golden tables.

use std::path::Path;

use crate::export::{Form, emit};
use crate::plan::{Draft, Plan, PlanRequest, examine, plan};
use crate::recipe::{Recipe, Request, Setting, corpus, read, read_text};

fn manifest_files(root: &Path, dialect: &str) -> Vec<(String, std::path::PathBuf)> {
    let text = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
    let rows = corpus::csv(&text).skip(1);
    rows.filter(|row| row[5] == dialect)
        .map(|row| (row[2].clone(), root.join(&row[3])))
        .collect()
}

/// A job under `--recipe-gpus`, with a command line.
fn job(path: &Path, gpus: Option<&str>, command: &str) -> Recipe {
    let gpus = gpus.map(|value| Setting {
        flag: "--recipe-gpus",
        path: "batch.gpus",
        value: value.to_owned(),
    });
    let words = command.replace('"', "");
    read(&Request {
        path: path.to_owned(),
        command: words.split_whitespace().map(str::to_owned).collect(),
        settings: gpus.into_iter().collect(),
        ..Request::default()
    })
    .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn at(recipe: &Recipe, gpus: u64) -> Result<Plan, Box<Draft>> {
    plan(recipe, &PlanRequest::gpus(gpus))
}

/// Whether one of the reasons contains this text.
fn says(refused: &Draft, words: &str) -> bool {
    let mut reasons = refused.findings.iter();
    reasons.any(|diagnostic| diagnostic.message.contains(words))
}

#[test]
fn transformers_command_lines_give_the_golden_batches() {
    let Some(root) = corpus::root() else { return };
    let table = std::fs::read_to_string(root.join("golden/cli_recipes.csv")).unwrap();
    let mut planned = 0;
    for row in corpus::csv(&table).skip(1).filter(|row| row[3] == "hf-cli") {
        let (gpus, argv, expected) = (&row[4], &row[5], &row[6]);
        // A command that states its processes needs no `--recipe-gpus`.
        let states_processes = argv.contains("nproc_per_node");
        let recipe = job(Path::new(""), (!states_processes).then_some(gpus), argv);
        let plan = at(&recipe, gpus.parse().unwrap()).unwrap();
        assert_eq!(
            format!("GBS={}", plan.global_batch_size),
            *expected,
            "{argv}"
        );
        planned += 1;
    }
    assert_eq!(planned, 2);
}

#[test]
fn deepspeed_configs_split_only_where_upstream_does() {
    let Some(root) = corpus::root() else { return };
    let files = manifest_files(&root, "deepspeed-json");
    let path = |part: &str| {
        let found = files.iter().find(|(path, _)| path.contains(part));
        &found
            .unwrap_or_else(|| panic!("{part} is not in the manifest"))
            .1
    };
    let hybrid = job(path("hybrid_engine"), None, "");
    for gpus in [1, 2, 4, 8, 16] {
        let plan = at(&hybrid, gpus).unwrap();
        let accumulation = 32 / 2 / gpus;
        assert_eq!(
            (plan.per_device_batch_size, plan.gradient_accumulation_steps),
            (2, accumulation)
        );
        assert_eq!(plan.facts.diagnostics, [], "{gpus}");
    }
    let refused = at(&hybrid, 3).unwrap_err();
    assert!(says(&refused, "32 ≠ 2 × 5 × 3 = 30"), "{refused}");
    let performance = job(path("perf_bs32"), None, "");
    let refused = at(&performance, 6).unwrap_err();
    assert!(says(&refused, "32 ≠ 5 × 1 × 6 = 30"), "{refused}");
    assert_eq!(at(&performance, 8).unwrap().formula, "8 × 4 × 1 = 32");
    let functional = path("func_bs8_zero2_gas3");
    let unknown = at(&job(functional, None, ""), 4).unwrap_err();
    assert_eq!(unknown.findings[0].rule, "global-batch-unknown");
    for gpus in ["1", "4", "6"] {
        let world: u64 = gpus.parse().unwrap();
        let plan = at(&job(functional, Some(gpus), ""), world).unwrap();
        assert_eq!(
            plan.global_batch_size,
            24 * world,
            "train_batch_size is derived"
        );
    }
    for part in ["zero_stage2_config", "sp-alst.ds-config"] {
        let auto = job(path(part), None, "");
        let found = examine(&auto, &PlanRequest::gpus(4)).findings;
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].rule, "global-batch-unknown");
        assert!(found[0].message.contains("\"auto\""), "{found:?}");
    }
}

#[test]
fn a_template_and_a_trainer_with_different_accumulations_are_refused() {
    let Some(root) = corpus::root() else { return };
    let files = manifest_files(&root, "deepspeed-json");
    let (_, template) = files
        .iter()
        .find(|(path, _)| path.contains("zero_stage2_config"))
        .unwrap();
    let command = |accumulation: u64| {
        let line = format!(
            "deepspeed --num_gpus 8 run_clm.py --fp16 --deepspeed {} --gradient_accumulation_steps {accumulation}",
            template.display()
        );
        read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        })
    };
    let plan = at(&command(1).unwrap(), 4).unwrap();
    assert_eq!(plan.formula, "4 × 8 × 2 = 64");
    let refused = command(2).unwrap_err();
    assert_eq!(refused.diagnostics[0].rule, "accumulation-conflict");
}

/// Worlds to plan for.
const WORLDS: &[u64] = &[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128];

/// The lines that only one of `before` and `after` has.
fn changed_lines<'t>(before: &'t str, after: &'t str) -> Vec<&'t str> {
    let lines = |a: &'t str, b: &'t str| {
        let b: Vec<&str> = b.lines().collect();
        a.lines().filter(move |line| !b.contains(line))
    };
    lines(before, after).chain(lines(after, before)).collect()
}

#[test]
fn emitted_upstream_recipes_give_the_same_plan_in_every_world() {
    let Some(root) = corpus::root() else { return };
    let text = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
    let mut written = 0;
    for row in corpus::csv(&text).skip(1) {
        let trainer = ["handbook-trl-yaml", "deepspeed-json"].contains(&row[5].as_str());
        if !trainer || row[11].contains("\"auto\"") || row[11].starts_with("no batch keys") {
            continue;
        }
        let path = root.join(&row[3]);
        let gpus = Some(row[6].as_str()).filter(|gpus| !gpus.is_empty());
        let recipe = job(&path, gpus.or(Some("8")), "");
        let before = std::fs::read_to_string(&path).unwrap();
        for &world in WORLDS {
            let Ok(plan) = at(&recipe, world) else {
                continue;
            };
            let what = format!("{} at {world}", row[2]);
            let text = emit(&recipe, &plan.numbers(&recipe), Form::Recipe)
                .unwrap()
                .text;
            for line in changed_lines(&before, &text) {
                let batch = ["batch_size", "gradient_accumulation_steps"];
                assert!(
                    batch.iter().any(|word| line.contains(word)),
                    "{what}: {line}"
                );
            }
            let request = Request {
                path: path.clone(),
                settings: vec![Setting {
                    flag: "--recipe-gpus",
                    path: "batch.gpus",
                    value: world.to_string(),
                }],
                ..Request::default()
            };
            let again = read_text(&request, text.clone()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let same = at(&again, world).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(same.formula, plan.formula, "{what}");
            assert_eq!(same.facts.adjusted, [], "{what}");
            let twice = emit(&again, &same.numbers(&again), Form::Recipe)
                .unwrap()
                .text;
            assert_eq!(twice, text, "{what}");
            written += 1;
        }
    }
    assert!(written > 100, "{written}");
}

#[test]
fn an_emitted_launcher_config_is_read_back_with_the_recipe() {
    let Some(root) = corpus::root() else { return };
    let recipe = root.join(
        "huggingface__alignment-handbook/925acdfe4b/recipes/zephyr-7b-beta/sft/config_full.yaml",
    );
    let folder = tempfile::tempdir().unwrap();
    let launched = |accelerate: &Path| {
        read(&Request {
            path: recipe.clone(),
            accelerate: Some(accelerate.to_owned()),
            ..Request::default()
        })
        .unwrap_or_else(|error| panic!("{}: {error}", accelerate.display()))
    };
    let mut written = 0;
    for (name, path) in manifest_files(&root, "accelerate-yaml") {
        let skipped = [
            "sagemaker",
            "invalid_keys",
            "sp-alst",
            "fsdp_config.yaml",
            "single_acc",
        ];
        if skipped.iter().any(|word| name.contains(word)) {
            continue;
        }
        let before = launched(&path);
        for world in [2, 4, 8, 16] {
            let Ok(plan) = at(&before, world) else {
                continue;
            };
            let emitted = emit(&before, &plan.numbers(&before), Form::Accelerate);
            // Tensor parallelism takes both devices, and FSDP would have nothing to shard.
            if name.contains("tp_hsdp") && world == 2 {
                assert!(emitted.is_err(), "{emitted:?}");
                continue;
            }
            let text = emitted.unwrap().text;
            let copy = folder.path().join("accelerate.yaml");
            std::fs::write(&copy, &text).unwrap();
            let after = launched(&copy);
            let what = format!("{name} at {world}");
            assert_eq!(after.spec.batch.gpus, Some(world), "{what}");
            let rules = examine(&after, &PlanRequest::gpus(world)).findings;
            assert!(
                rules.iter().all(|d| d.rule != "parallelism-product"),
                "{what}: {rules:?}"
            );
            written += 1;
        }
    }
    assert!(written > 30, "{written}");
}

/// Emitted arguments and an emitted launcher config give the same plan, for every recipe and world.
#[test]
fn emitted_arguments_and_launcher_configs_give_the_same_plan() {
    let Some(root) = corpus::root() else { return };
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("accelerate.yaml");
    let mut written = 0;
    for (name, path) in manifest_files(&root, "handbook-trl-yaml") {
        let recipe = job(&path, Some("8"), "");
        for &world in WORLDS {
            let Ok(plan) = at(&recipe, world) else {
                continue;
            };
            let what = format!("{name} at {world}");
            let numbers = plan.numbers(&recipe);
            let arguments = emit(&recipe, &numbers, Form::Args).unwrap().text;
            let typed = format!("python train.py {}", arguments.trim());
            let again = job(&path, Some(&world.to_string()), &typed);
            assert_eq!(at(&again, world).unwrap().formula, plan.formula, "{what}");
            // The recipe itself with changed numbers, under the launcher's world.
            let text = emit(&recipe, &numbers, Form::Recipe).unwrap().text;
            let launcher = emit(&recipe, &numbers, Form::Accelerate).unwrap().text;
            std::fs::write(&copy, &launcher).unwrap();
            let request = Request {
                path: path.clone(),
                accelerate: Some(copy.clone()),
                ..Request::default()
            };
            let launched = read_text(&request, text).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(launched.spec.batch.gpus, Some(world), "{what}");
            assert_eq!(
                at(&launched, world).unwrap().formula,
                plan.formula,
                "{what}"
            );
            written += 1;
        }
    }
    assert!(written > 100, "{written}");
}

/// A tree of the corpus under overrides.
fn tree(config: &Path, version: Option<&str>, gpus: u64, overrides: &[&str]) -> Recipe {
    let setting = Setting {
        flag: "--recipe-gpus",
        path: "batch.gpus",
        value: gpus.to_string(),
    };
    read(&Request {
        path: config.to_owned(),
        version: version.map(str::to_owned),
        overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
        settings: vec![setting],
        ..Request::default()
    })
    .unwrap_or_else(|error| panic!("{}: {error}", config.display()))
}

/// Overrides of every launch of HALOs' tree.
const HALOS: [&str; 4] = [
    "model=llama",
    "exp_name=run",
    "train_datasets=[ultrabin]",
    "test_datasets=[ultrabin]",
];

#[test]
fn a_config_tree_is_emitted_as_overrides() {
    let Some(root) = corpus::root() else { return };
    let config = root.join("ContextualAI__HALOs/4831988636/config");
    let typed = [
        "loss=kto",
        "++model.batch_size=64",
        "++model.gradient_accumulation_steps=2",
        "++model.eval_batch_size=64",
    ];
    let arguments = |version: Option<&str>, overrides: &[&str], gpus: u64, flag: Option<u64>| {
        let overrides = [&HALOS, overrides].concat();
        let mut recipe = tree(&config, version, gpus, &overrides);
        recipe.spec.batch.global = flag.or(recipe.spec.batch.global);
        let plan = at(&recipe, 2).unwrap_or_else(|refused| panic!("{refused}"));
        emit(&recipe, &plan.numbers(&recipe), Form::Args)
            .unwrap()
            .text
    };
    assert_eq!(
        arguments(None, &typed, 4, None),
        "++model.batch_size=64 ++model.gradient_accumulation_steps=4\n"
    );
    // The batch of one accumulation step changes with the world, even for a recipe with a single
    // step, whose two numbers are equal.
    let earlier = Some("before-2025-05-01");
    assert_eq!(
        arguments(earlier, &["loss=dpo"], 4, None),
        "++model.batch_size=16 ++model.gradient_accumulation_steps=2\n"
    );
    assert_eq!(
        arguments(earlier, &["loss=dpo"], 4, Some(64)),
        "++model.batch_size=32 ++model.gradient_accumulation_steps=2\n"
    );
}

/// A copy of a tree, with writable files.
fn copy_of(config: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for group in ["", "model", "loss"] {
        std::fs::create_dir_all(folder.path().join(group)).unwrap();
        let files = std::fs::read_dir(config.join(group)).into_iter().flatten();
        for file in files.flatten() {
            if file.file_type().unwrap().is_file() {
                let to = folder.path().join(group).join(file.file_name());
                std::fs::copy(file.path(), to).unwrap();
            }
        }
    }
    folder
}

#[test]
fn emitted_trees_give_the_same_plan_in_every_world() {
    let Some(root) = corpus::root() else { return };
    let halos = |more: &[&'static str]| [&HALOS, more].concat();
    let dpo = vec![
        "model=pythia28",
        "exp_name=run",
        "loss=sft",
        "trainer=FSDPTrainer",
    ];
    let legacy = vec![
        "model=llama65b",
        "exp_name=run",
        "datasets=[shp]",
        "mode=train",
        "loss=sft",
    ];
    let trees = [
        (
            "ContextualAI__HALOs/4831988636/config",
            None,
            halos(&["loss=dpo"]),
        ),
        (
            "ContextualAI__HALOs/4831988636/config",
            Some("before-2025-05-01"),
            halos(&["loss=dpo"]),
        ),
        (
            "eric-mitchell__direct-preference-optimization/f8b8c0f49d/config",
            None,
            dpo,
        ),
        ("ContextualAI__HALOs/61b9ee6787/config", None, legacy),
    ];
    let mut written = 0;
    for (config, version, overrides) in trees {
        let config = root.join(config);
        let copy = copy_of(&config);
        let loss = copy.path().join("loss/sft.yaml");
        if !loss.is_file() {
            // The corpus contains the legacy tree without its losses.
            let text = "trainer: SFTTrainer\ndataloader: SFTDataLoader\n";
            std::fs::write(loss, text).unwrap();
        }
        let recipe = tree(copy.path(), version, 4, &overrides);
        for &world in WORLDS {
            let Ok(plan) = at(&recipe, world) else {
                continue;
            };
            let what = format!("{} {version:?} at {world}", config.display());
            let emitted = emit(&recipe, &plan.numbers(&recipe), Form::Recipe);
            let emitted = emitted.unwrap_or_else(|error| panic!("{what}: {error}"));
            let file = emitted.replaces.unwrap();
            let before = std::fs::read_to_string(&file).unwrap();
            for line in changed_lines(&before, &emitted.text) {
                let batch = ["batch_size:", "gradient_accumulation_steps:"];
                let of_batch = batch.iter().any(|key| line.starts_with(key));
                assert!(of_batch, "{what}: {line}");
            }
            std::fs::write(&file, &emitted.text).unwrap();
            let again = tree(copy.path(), version, world, &overrides);
            let same = at(&again, world).unwrap_or_else(|refused| panic!("{what}: {refused}"));
            assert_eq!(same.formula, plan.formula, "{what}");
            assert_eq!(same.facts.adjusted, [], "{what}");
            let twice = emit(&again, &same.numbers(&again), Form::Recipe).unwrap();
            assert_eq!(twice.text, emitted.text, "{what}");
            std::fs::write(&file, before).unwrap();
            written += 1;
        }
    }
    assert!(written > 10, "{written}");
}
