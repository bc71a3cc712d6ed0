//! Commits of a generation after the next one has begun.

use super::*;
use crate::bucket::Bucket;
use crate::bucket::tests::in_memory;
use crate::checkpoint::commit::{Complete, complete};
use crate::lifecycle::generation::testing;
use crate::lifecycle::{Generation, files};
use crate::plan::{PlanRequest, plan};
use crate::recipe::{self, Request};

fn record(number: u64, job: &str) -> Generation {
    let recipe = "per_device_train_batch_size: 4\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
    let recipe = recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
    let plan = plan(&recipe, &PlanRequest::gpus(2)).unwrap();
    Generation {
        job: job.to_owned(),
        ..testing::record(number, Vec::new(), plan)
    }
}

fn begin(run: &Path, number: u64, job: &str) {
    record(number, job).write(run).unwrap();
}

#[test]
fn a_generation_commits_nothing_once_a_later_one_of_its_job_has_begun() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    begin(run.path(), 1, "uid");
    begin(run.path(), 3, "another");
    let first = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let late = target(run.path(), 1, 2);
    let part = write_part(&late, &layout, 0, 1).unwrap();
    begin(run.path(), 2, "uid");
    let error = commit_parts(&late, &layout, &[part]).unwrap_err();
    insta::assert_snapshot!(error, @"the checkpoint of generation 1 does not count and is not committed: generation 2 replaces it");
    assert!(!late.directory().exists() && !late.partial().exists());
    assert_eq!(list(run.path()).unwrap().committed, [first]);
    write(&target(run.path(), 2, 2), &layout, 1).unwrap();
}

/// The newest checkpoint of generation 1.
fn newest(run: &Path, bucket: Option<&Bucket>) -> Option<u64> {
    let newest = match bucket {
        Some(bucket) => bucket_copy::newest(bucket, 1),
        None => crate::checkpoint::newest(run, 1),
    };
    newest.unwrap().map(|newest| newest.step)
}

#[test]
fn a_checkpoint_is_committed_before_the_next_generation_searches_for_it_or_never() {
    for bucket in [None, Some(in_memory())] {
        let run = tempfile::tempdir().unwrap();
        let layout = default_layout();
        begin(run.path(), 1, "uid");
        let target = |step| Target {
            bucket: bucket.clone(),
            ..target(run.path(), 1, step)
        };
        let part = |step| write_part(&target(step), &layout, 0, 1).unwrap();
        let looked = |step| -> Complete {
            let nothing = Value::Null;
            let contents = contents(&layout, step, &nothing, &nothing);
            complete(&target(step), &[part(step)], contents).unwrap()
        };
        looked(1).publish(&target(1)).unwrap();
        // It finds no later generation, and is cut off before it commits.
        let late = looked(2);
        let begun_late = part(3);
        lineage::close_earlier(run.path(), bucket.as_ref(), &record(2, "uid")).unwrap();
        let found = newest(run.path(), bucket.as_ref());
        assert_eq!(found, Some(1));
        late.publish(&target(2)).unwrap_err();
        let error = commit_parts(&target(3), &layout, &[begun_late]).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"the checkpoint of generation 1 does not count and is not committed: generation 2 replaces it");
        }
        assert_eq!(newest(run.path(), bucket.as_ref()), found);
        if bucket.is_none() {
            let partial = target(2).partial();
            assert!(!partial.exists() && !files::withdrawn(&partial).exists());
        }
    }
}

#[test]
fn a_withdrawn_checkpoint_leaves_the_bucket_and_does_not_count_as_kept() {
    let bucket = in_memory();
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let target = |generation, step| Target {
        bucket: Some(bucket.clone()),
        ..target(run.path(), generation, step)
    };
    for step in [1, 2] {
        write(&target(1, step), &layout, 1).unwrap();
    }
    write_part(&target(1, 3), &layout, 0, 1).unwrap();
    lineage::close_earlier(run.path(), Some(&bucket), &record(2, "uid")).unwrap();
    assert!(bucket.has(&target(1, 3).key("manifest.json")).unwrap());
    write(&target(2, 3), &layout, 1).unwrap();
    bucket_copy::retain(&bucket, Some(2), "gen-2/step-0000003", None).unwrap();
    let checkpoints = |generation: &str| bucket.directories(generation).unwrap();
    assert_eq!(checkpoints("gen-1"), ["step-0000002"]);
    assert_eq!(checkpoints("gen-2"), ["step-0000003"]);
}
