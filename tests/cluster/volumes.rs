//! Checkpoint volumes that are full, read-only or missing: each gets a distinct message.

use serde_json::json;

use super::support::{Job, recipe, wide_recipe};

#[test]
fn a_full_volume_fails_the_job_and_keeps_its_checkpoint() {
    let job = Job::with_volume("full");
    job.limit_volume("3m");
    let job = job.start(&wide_recipe(120_000), json!({}));
    let status = job.wait_failure();
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("no space left"), "{message}");
    let checkpoint_ref = status["checkpoint"]["path"].as_str();
    if let Some(checkpoint_ref) = checkpoint_ref {
        assert!(job.run().join(checkpoint_ref).is_dir());
    }
}

#[test]
fn a_read_only_volume_is_reported_and_the_job_starts_once_it_is_writable() {
    let job = Job::with_volume("readonly");
    job.limit_volume("64m");
    job.remount_volume("ro");
    let job = job.start(&recipe(2_000_000), json!({}));
    let status = job.wait("a message about the volume", |status| {
        let message = status["message"].as_str().unwrap_or_default();
        message.contains("the checkpoint volume is read-only")
    });
    assert_eq!(status["restarts"], 0, "{status:#}");
    job.remount_volume("rw");
    job.wait_training_on(3);
    job.settle(96);
}

#[test]
fn a_missing_claim_is_reported_and_waited_for() {
    let job = Job::without_claim("claim").start(&recipe(4800), json!({}));
    job.wait("a message about the claim", |status| {
        let message = status["message"].as_str().unwrap_or_default();
        status["phase"] == "Placing" && message.contains("\"claim\" not found")
    });
    job.claim();
    job.finish(96);
}
