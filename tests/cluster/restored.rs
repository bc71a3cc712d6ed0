//! etcd is put back to an older copy of its data under a running job.

use serde_json::{Value, json};

use super::support::{Job, kit, kubectl, recipe};

fn generation(status: &Value) -> u64 {
    let number = &status["jobGeneration"]["record"]["number"];
    number.as_u64().unwrap_or(0)
}

fn is_restored(status: &Value) -> bool {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    let restored = conditions.find(|condition| condition["type"] == "Restored");
    restored.is_some_and(|one| one["status"] == "True" && one["reason"] == "OlderStatus")
}

#[test]
fn a_job_continues_above_the_generations_that_a_restored_etcd_has_forgotten() {
    let job = Job::apply("restored", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    kit(&["backup"]);
    // These generations remain on the volume only.
    for _ in 0..2 {
        let before = generation(&job.status());
        let (pod, _) = job.pods().pop_first().unwrap();
        kubectl(&["delete", "pod", &pod, "--wait=false"]);
        job.wait("the next generation", |status| generation(status) > before);
        job.wait_training_on(3);
    }
    let forgotten = job.status();
    let committed = |status: &Value| status["checkpoint"]["samples"].as_u64().unwrap_or(0);
    assert!(generation(&forgotten) >= 3 && committed(&forgotten) > 0);
    kit(&["restore", "2"]);
    let status = job.wait("a generation above the forgotten ones", |status| {
        generation(status) > generation(&forgotten)
    });
    assert!(is_restored(&status), "{status:#}");
    let start = status["jobGeneration"]["record"]["start"]["samples"].as_u64();
    assert!(
        start.unwrap() >= committed(&forgotten),
        "no committed step is repeated"
    );
    job.wait_training_on(3);
    job.wait("progress from the checkpoint on", |status| {
        let progress = &status["progress"];
        progress["samples"].as_u64() >= start && progress["percent"] == percent(progress)
    });
    job.settle(96);
}

/// What `percent` must be by the numbers beside it.
fn percent(progress: &Value) -> String {
    let number = |name: &str| progress[name].as_u64().unwrap_or(0) as f64;
    format!(
        "{:.0} %",
        100.0 * number("samples") / number("budgetSamples").max(1.0)
    )
}

/// Its pods have exited, so no agent tells what they committed. The older status names a checkpoint that is still there.
#[test]
fn a_job_that_a_restored_etcd_believes_to_train_completes_from_its_last_checkpoint() {
    let mut recipe = recipe(30_000);
    recipe["spec"]["checkpoint"]["keep"] = json!(100);
    let job = Job::apply("restored-complete", &recipe, json!({}));
    let running = job.wait("a checkpoint", |status| status["checkpoint"].is_object());
    kit(&["backup"]);
    job.finish(96);
    kit(&["restore", "2"]);
    job.wait("the next generation", |status| {
        generation(status) > generation(&running)
    });
    let status = job.finish(96);
    assert_eq!(status["progress"]["percent"], "100 %", "{status:#}");
    job.one_lineage(&status);
}
