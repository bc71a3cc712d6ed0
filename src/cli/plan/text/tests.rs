use super::*;
use crate::batch::{PlanRequest, examine};
use crate::recipe::corpus;
use crate::recipe::{Request, Setting, read};

/// The text of an upstream recipe's plan without styles; `None` if the corpus is missing.
fn upstream(path: &str, gpus: u64, settings: &[(&'static str, &str)]) -> Option<String> {
    let root = corpus::root()?.join("huggingface__alignment-handbook/925acdfe4b/recipes");
    let flag = |path: &'static str| match path {
        "batch.gpus" => "--recipe-gpus",
        "batch.remainder" => "--remainder",
        path => path,
    };
    let mut recipe = read(&Request {
        path: root.join(path),
        settings: settings
            .iter()
            .map(|(path, value)| Setting {
                flag: flag(path),
                path,
                value: (*value).to_owned(),
            })
            .collect(),
        ..Request::default()
    })
    .unwrap();
    recipe.sources = rename(&recipe, &root.display().to_string());
    let request = PlanRequest {
        device_memory: Some(80_000_000_000),
        ..PlanRequest::gpus(gpus)
    };
    let examined = examine(&recipe, &request);
    let words = request.devices.count(gpus);
    let hardware = Hardware {
        words: &words,
        devices: request.devices,
    };
    let text = plan(&recipe, &examined, None, &hardware);
    Some(anstream::adapter::strip_str(&text).to_string())
}

/// The sources with paths independent of this machine.
fn rename(recipe: &Recipe, root: &str) -> crate::recipe::Sources {
    let mut sources = crate::recipe::Sources::default();
    for file in recipe.sources.iter() {
        let path = file.path.display().to_string();
        sources.add(path.replace(root, "recipes"), file.text.clone());
    }
    sources
}

#[test]
fn half_the_gpus_keep_the_global_batch() {
    let recipe = "zephyr-7b-beta/sft/config_full.yaml";
    let settings = [("batch.gpus", "8"), ("parallel.strategy", "fsdp")];
    if let Some(text) = upstream(recipe, 4, &settings) {
        insta::assert_snapshot!(text);
    }
}

#[test]
fn a_refused_count_shows_what_is_known_and_what_to_do() {
    let recipe = "zephyr-7b-beta/dpo/config_full.yaml";
    if let Some(text) = upstream(recipe, 6, &[("batch.gpus", "8")]) {
        insta::assert_snapshot!(text);
    }
}

#[test]
fn uneven_dealing_shows_every_ranks_share() {
    let recipe = "zephyr-7b-beta/sft/config_full.yaml";
    let settings = [("batch.gpus", "8"), ("batch.remainder", "uneven")];
    if let Some(text) = upstream(recipe, 3, &settings) {
        insta::assert_snapshot!(text);
    }
}

#[test]
fn without_a_global_batch_the_plan_asks_for_it() {
    if let Some(text) = upstream("zephyr-7b-beta/sft/config_full.yaml", 4, &[]) {
        insta::assert_snapshot!(text);
    }
}

#[test]
fn processes_are_not_called_gpus() {
    let recipe = read(&Request {
        path: "examples/quickstart.yaml".into(),
        ..Request::default()
    })
    .unwrap();
    let request = PlanRequest::processes(3);
    let hardware = Hardware {
        words: "3 CPU ranks",
        devices: request.devices,
    };
    let text = plan(&recipe, &examine(&recipe, &request), None, &hardware);
    assert!(
        text.contains("process counts that split 16 exactly"),
        "{text}"
    );
    assert!(text.contains("use 1, 2, 4 or 8 processes"), "{text}");
    assert!(!text.contains("GPU"), "{text}");
}

#[test]
fn the_norm_test_shows_its_bounds() {
    let path = "examples/microllama-300m-ddp-norm.yaml";
    let recipe = read(&Request {
        path: path.into(),
        ..Request::default()
    })
    .unwrap();
    let examined = examine(&recipe, &PlanRequest::gpus(4));
    let hardware = Hardware {
        words: "4 GPUs",
        devices: Devices::Gpus,
    };
    let text = plan(&recipe, &examined, None, &hardware);
    insta::assert_snapshot!(anstream::adapter::strip_str(&text).to_string());
}

#[test]
fn a_single_step_is_singular() {
    let recipe = "apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {name: run}
spec:
  batch: {global: 12, micro: 2}
  budget: {samples: 12}
  checkpoint: {every_samples: 12}
";
    let recipe = crate::recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
    let request = PlanRequest::gpus(1);
    let hardware = Hardware {
        words: "1 GPU",
        devices: request.devices,
    };
    let text = plan(&recipe, &examine(&recipe, &request), None, &hardware);
    let text = anstream::adapter::strip_str(&text).to_string();
    assert!(
        text.contains("  budget      12 samples, 1 step\n"),
        "{text}"
    );
    assert!(text.contains("every 12 samples, 1 step\n"), "{text}");
}
