//! Checkpoint volumes that are full, read-only or not there: told apart, and said.

use serde_json::json;

use super::support::{Job, recipe};

#[test]
fn full_volume_ends_the_job_with_words_and_keeps_what_is_committed() {
    let job = Job::with_volume("full");
    job.limit_volume("3m");
    let job = job.start(&recipe(120_000), json!({}));
    let status = job.wait_failure();
    let why = status["why"].as_str().unwrap();
    assert!(why.contains("no space left"), "{why}");
    let pin = status["checkpoint"]["path"].as_str();
    if let Some(pin) = pin {
        assert!(job.run().join(pin).is_dir());
    }
}

#[test]
fn read_only_volume_is_named_and_the_job_starts_once_it_is_mended() {
    let job = Job::with_volume("readonly");
    job.limit_volume("64m");
    job.remount_volume("ro");
    let job = job.start(&recipe(400_000), json!({}));
    let status = job.wait("a word about the volume", |status| {
        let why = status["why"].as_str().unwrap_or_default();
        why.contains("the checkpoint volume is read-only")
    });
    assert_eq!(status["restarts"], 0, "{status:#}");
    job.remount_volume("rw");
    job.wait_training_on(3);
    job.settle(96);
}

#[test]
fn claim_that_is_not_there_is_named_and_waited_for() {
    let job = Job::without_claim("claim").start(&recipe(4800), json!({}));
    job.wait("words about the claim", |status| {
        let why = status["why"].as_str().unwrap_or_default();
        status["state"] == "Placing" && why.contains("\"claim\" not found")
    });
    job.claim();
    job.finish(96);
}
