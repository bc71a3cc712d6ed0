//! Commits of a generation after the next one has begun.

use super::*;
use crate::lifecycle::generation::testing;
use crate::plan::{PlanRequest, plan};
use crate::recipe::{self, Request};

fn begin(run: &Path, number: u64, job: &str) {
    let recipe = "per_device_train_batch_size: 4\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
    let recipe = recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
    let plan = plan(&recipe, &PlanRequest::gpus(2)).unwrap();
    let mut record = testing::record(number, Vec::new(), plan);
    job.clone_into(&mut record.job);
    record.write(run).unwrap();
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
    insta::assert_snapshot!(error, @"the checkpoint of generation 1 does not count and is not committed: generation 2 has begun");
    assert!(!late.directory().exists() && !late.partial().exists());
    assert_eq!(list(run.path()).unwrap().committed, [first]);
    write(&target(run.path(), 2, 2), &layout, 1).unwrap();
}
