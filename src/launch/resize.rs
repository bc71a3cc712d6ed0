//! The plan that a run would have at another world, before anybody asks it to move.

use super::{LaunchError, RunDir};
use crate::batch::{self, Plan, PlanRequest, Refused};
use crate::train::Setup;

/// The plan of a run at `world` ranks; the inner error is what the rules say.
pub fn plan(run: &RunDir, world: u64) -> Result<Result<Plan, Refused>, LaunchError> {
    let setup = run.setup()?;
    let micro_limit = run.state()?.and_then(|state| state.micro_limit);
    Ok(plan_setup(&setup, world, micro_limit))
}

/// The plan of a setup at `world` ranks, at the batch that the run keeps.
pub fn plan_setup(setup: &Setup, world: u64, micro_limit: Option<u64>) -> Result<Plan, Refused> {
    batch::plan(
        &setup.recipe(),
        &PlanRequest {
            global_batch_size: Some(setup.global_batch_size),
            micro_limit,
            ..PlanRequest::processes(world)
        },
    )
}
