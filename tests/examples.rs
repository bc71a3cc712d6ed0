//! The recipes under `examples/` are read without a word, and the ablation's differ from each
//! other only where they say so.

use std::path::{Path, PathBuf};

use evenkeel::recipe::spec::{BatchSchedule, Spec};
use evenkeel::recipe::{self, Recipe, Request};

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

/// What an experiment keeps equal: everything but its name, its schedule and its first batch.
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
