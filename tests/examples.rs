//! The recipes under `examples/` are read without diagnostics and planned with only the expected
//! ones. The recipes of an ablation differ only in their schedules.

use std::path::{Path, PathBuf};

use evenkeel::api::{TrainerDevice, TrainingJob};
use evenkeel::hub::Hub;
use evenkeel::launch::survey;
use evenkeel::plan::memory::Shape;
use evenkeel::plan::{self, AskedRunner, DeviceKind, PlanRequest, Runner};
use evenkeel::recipe::spec::{BatchSchedule, Spec};
use evenkeel::recipe::{self, Recipe, Request, Severity};

fn examples(within: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples")
        .join(within)
}

fn read(path: &Path, overrides: &[&str]) -> Recipe {
    let recipe = recipe::read(&Request {
        path: path.to_owned(),
        overrides: overrides.iter().map(|&o| o.to_owned()).collect(),
        ..Request::default()
    })
    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(recipe.diagnostics, [], "{}", path.display());
    recipe
}

/// The recipe files directly in a folder of `examples/`, in order.
fn recipes(within: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(examples(within))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
        .collect();
    found.sort();
    assert!(!found.is_empty());
    found
}

/// The part of a recipe that an experiment keeps equal: all but its name, its schedule and its
/// first batch.
fn kept_equal(spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    spec.name = String::new();
    spec.schedule = BatchSchedule::Constant;
    spec.batch.global = None;
    spec
}

#[test]
fn the_ablations_compare_nothing_but_schedules() {
    for folder in ["ablation", "ablation-small"] {
        let all = recipes(folder);
        let first = read(&all[0], &[]);
        for path in &all[1..] {
            let other = read(path, &[]);
            assert_eq!(
                kept_equal(&other.spec),
                kept_equal(&first.spec),
                "{}",
                path.display()
            );
        }
    }
}

/// Folders of full-size examples, which need absent data and an absent tokenizer.
const REAL: [&str; 2] = ["", "ablation"];
/// An example that runs on any machine.
const SMALL: &str = "quickstart.yaml";

/// Every example with its recipe, and whether it runs on any machine.
fn all() -> Vec<(PathBuf, Recipe, bool)> {
    let folders = REAL.into_iter().chain(["ablation-small"]);
    let found: Vec<_> = folders
        .flat_map(|folder| recipes(folder).into_iter().map(move |path| (folder, path)))
        .map(|(folder, path)| {
            let recipe = read(&path, &[]);
            let small = !REAL.contains(&folder) || path.ends_with(SMALL);
            (path, recipe, small)
        })
        .collect();
    assert_eq!(found.len(), 10, "an example is not covered");
    found
}

#[test]
fn every_example_is_planned_with_only_expected_diagnostics() {
    let empty = tempfile::tempdir().unwrap();
    for (path, recipe, small) in all() {
        for asked in [AskedRunner::Any, AskedRunner::Launch] {
            let world = plan::default_world(&recipe.spec);
            let runner = Runner::of(&recipe.spec, asked, DeviceKind::Cuda, None);
            let request = PlanRequest::of(runner, world);
            let request = survey(&recipe, empty.path(), request, &Hub::none());
            let draft = plan::examine(&recipe, &request);
            let diagnostics = draft.findings.iter();
            let mut diagnostics: Vec<_> =
                diagnostics.map(|d| (d.rule.as_str(), d.severity)).collect();
            diagnostics.sort_unstable();
            let missing = if runner.is_built_in() {
                Severity::Error
            } else {
                Severity::Warning
            };
            let mut expected = vec![
                ("data-missing", missing),
                ("data-missing", missing),
                ("tokenizer-missing", missing),
            ];
            if small {
                expected.clear();
            }
            assert_eq!(diagnostics, expected, "{} {asked:?}", path.display());
        }
    }
}

#[test]
fn the_experiments_on_gpus_are_planned() {
    for (job, recipe, formulas) in [
        (
            "microllama-300m.yaml",
            "microllama-300m-ddp-norm.yaml",
            ["4 × 4 × 16 = 256"].as_slice(),
        ),
        (
            "microllama-300m.yaml",
            "ablation/norm-test.yaml",
            &["4 × 4 × 16 = 256"],
        ),
        (
            "tinyllama-1.1b.yaml",
            "tinyllama-1.1b-fsdp-norm.yaml",
            &["2 × 4 × 16 = 128", "4 × 4 × 8 = 128"],
        ),
    ] {
        let text = std::fs::read_to_string(examples("kubernetes").join(job)).unwrap();
        let job: TrainingJob = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(job.spec.trainer.device, TrainerDevice::Cuda);
        let overrides: Vec<_> = job.spec.overrides.iter().map(String::as_str).collect();
        let recipe = read(&examples(recipe), &overrides);
        let planned: Vec<_> = (job.spec.elasticity.min_nodes..=job.spec.nodes)
            .map(|nodes| {
                let request = PlanRequest::gpus(u64::from(nodes * job.spec.gpus_per_node));
                let plan = plan::plan(&recipe, &request).unwrap();
                assert_eq!(plan.facts.diagnostics, []);
                plan.formula_at(None)
            })
            .collect();
        assert_eq!(planned, formulas);
    }
}

#[test]
fn evaluations_and_checkpoints_fall_on_step_ends_at_every_batch() {
    for (path, recipe, _) in all() {
        let spec = &recipe.spec;
        let base = spec.batch.global.unwrap();
        let batches = match &spec.schedule {
            BatchSchedule::Constant => vec![base],
            BatchSchedule::NormTest(test) => vec![base, test.max_batch],
            BatchSchedule::Stages { stages } => stages.iter().map(|stage| stage.batch).collect(),
            // The batches of a recorded run have no common multiple within its budget.
            BatchSchedule::Replay { .. } => continue,
        };
        for every in [spec.evaluation.every_samples, spec.checkpoint.every_samples] {
            for &batch in &batches {
                let every = every.unwrap();
                assert!(
                    every.is_multiple_of(batch),
                    "{}: {every} % {batch}",
                    path.display()
                );
            }
        }
    }
}

#[test]
fn models_have_the_parameter_count_of_their_name() {
    for (path, recipe, small) in all() {
        let (shape, _) = Shape::of(&recipe.spec.model, None).unwrap();
        let counted = shape.parameters();
        let expected = match path.to_string_lossy().contains("tinyllama") {
            true => 1_100_048_384.0,
            false => 304_636_928.0,
        };
        if small {
            assert!(counted < 2e6, "{}: {counted}", path.display());
        } else {
            assert_eq!(counted, expected, "{}", path.display());
        }
    }
}
