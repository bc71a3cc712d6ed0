//! etcd is put back to an older copy of its data under a running job.

use serde_json::{Value, json};

use super::support::{Job, kit, kubectl, recipe};

fn generation(status: &Value) -> u64 {
    let number = &status["jobGeneration"]["record"]["number"];
    number.as_u64().unwrap_or(0)
}

#[test]
fn a_job_goes_on_above_the_generations_that_a_restored_etcd_has_forgotten() {
    let job = Job::apply("restored", &recipe(400_000), json!({}));
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
    let mut conditions = status["conditions"].as_array().unwrap().iter();
    let restored = conditions.find(|condition| condition["type"] == "Restored");
    let restored = restored.unwrap_or_else(|| panic!("{status:#}"));
    assert_eq!(
        (&restored["status"], &restored["reason"]),
        (&json!("True"), &json!("OlderStatus"))
    );
    let start = status["jobGeneration"]["record"]["start"]["samples"].as_u64();
    assert!(
        start.unwrap() >= committed(&forgotten),
        "no committed step is repeated"
    );
    job.wait_training_on(3);
    job.settle(96);
}
