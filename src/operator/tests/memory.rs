//! The controller's memory of many jobs with large recipes. `tests/controller_memory.rs` measures its cache of the jobs.

use std::sync::Arc;

use kube::ResourceExt;
use tokio::runtime::Runtime;

use crate::operator::reconcile::reconcile;
use crate::operator::stores::slim_job;
use crate::operator::testing::{ApiServer, job};
use crate::util::allocations;

/// The bounds are those of a thousand.
const JOBS: usize = 40;
const MIB: usize = 1 << 20;
/// What the API server of the test keeps of a job.
const KINDS: [&str; 8] = [
    "trainingjobs",
    "pods",
    "services",
    "serviceaccounts",
    "secrets",
    "networkpolicies",
    "roles",
    "rolebindings",
];

#[test]
fn a_thousand_jobs_with_recipes_of_half_a_megabyte_fit_into_64_mib() {
    let runtime = Runtime::new().unwrap();
    let _context = runtime.enter();
    let server = Arc::new(ApiServer::default());
    let context = server.context();
    let reconcile_job = |index: usize| {
        let mut job = job(&format!("x{index}"), &format!("u{index}"));
        let inline = job.spec.recipe.inline.as_mut().unwrap();
        let comment = format!("# a comment of job {index:08}\n");
        inline.push('\n');
        inline.push_str(&comment.repeat(MIB / 2 / comment.len()));
        let name = job.name_any();
        server.put("trainingjobs", serde_json::to_value(&job).unwrap());
        for _ in 0..3 {
            let stored = server.get("trainingjobs", &name).unwrap();
            let mut job = serde_json::from_value(stored).unwrap();
            slim_job(&mut job);
            let reconciled = reconcile(Arc::new(job), context.clone());
            runtime.block_on(reconciled).unwrap();
        }
        assert_eq!(server.names("pods").len(), 2);
        for kind in KINDS {
            for name in server.names(kind) {
                server.remove(kind, &name);
            }
        }
    };
    // What the first one needs once.
    reconcile_job(0);
    let before = allocations::held();
    let ((), most) = allocations::most(|| (1..=JOBS).for_each(reconcile_job));
    let held = usize::try_from(allocations::held() - before).unwrap_or(0);
    println!("{JOBS} jobs: hold {held} bytes, at most {most}");
    let kept = held / JOBS * 1000;
    assert!(kept < 64 * MIB, "a thousand jobs hold {kept} bytes");
    assert!(most - held < 64 * MIB, "{most} {held}");
}
