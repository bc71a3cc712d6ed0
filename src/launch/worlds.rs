//! A run's plan in every world that it may be moved to, before and while it trains.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::{LaunchError, RunDir};
use crate::batch::{self, Plan, PlanRequest, Refused};
use crate::train::Setup;

/// What a run has come to, and every further plan has to respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reached {
    /// A larger micro-batch than this ran out of memory, samples.
    pub micro_limit: Option<u64>,
    /// The batch of the next step, samples; `None` before the first checkpoint.
    pub batch: Option<u64>,
}

/// The plan of a run at `world` ranks; the inner error is what the rules say.
pub fn of_run(run: &RunDir, world: u64) -> Result<Result<Plan, Refused>, LaunchError> {
    let setup = run.setup()?;
    let reached = run.state()?.map(|state| state.reached());
    Ok(plan(&setup, world, reached.unwrap_or_default()))
}

/// The plan of a setup at `world` ranks, at the batch that the run keeps.
pub fn plan(setup: &Setup, world: u64, reached: Reached) -> Result<Plan, Refused> {
    batch::plan(
        &setup.recipe(),
        &PlanRequest {
            global_batch_size: Some(setup.global_batch_size),
            micro_limit: reached.micro_limit,
            current_batch: reached.batch,
            ..PlanRequest::processes(world)
        },
    )
}

/// The next micro-batch of the out-of-memory descent: the largest below that of `failed` for which
/// the world has a plan that no rule refuses.
pub fn descend(setup: &Setup, failed: &Plan, reached: Reached) -> Option<u64> {
    let current = reached.batch.unwrap_or(failed.global_batch_size);
    batch::descend(failed, current).find(|&micro| {
        let reached = Reached {
            micro_limit: Some(micro),
            ..reached
        };
        plan(setup, failed.world_size, reached).is_ok()
    })
}

/// Which worlds are feasible. Each is planned once, and not again on every look around.
#[derive(Default)]
pub struct Feasible(RefCell<(Reached, BTreeMap<u64, bool>)>);

impl Feasible {
    /// Whether the run has a plan at `world` ranks.
    pub fn at(&self, setup: &Setup, world: u64, reached: Reached) -> bool {
        self.remember(world, reached, || plan(setup, world, reached).is_ok())
    }

    fn remember(&self, world: u64, reached: Reached, plan: impl FnOnce() -> bool) -> bool {
        let mut known = self.0.borrow_mut();
        if known.0 != reached {
            *known = (reached, BTreeMap::new());
        }
        *known.1.entry(world).or_insert_with(plan)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_world_is_planned_once_until_the_run_has_come_further() {
        let planned = Cell::new(0);
        let feasible = Feasible::default();
        let ask = |world: u64, reached| {
            feasible.remember(world, reached, || {
                planned.set(planned.get() + 1);
                world.is_multiple_of(2)
            })
        };
        let start = Reached::default();
        assert!(ask(4, start) && ask(4, start) && !ask(3, start) && !ask(3, start));
        assert_eq!(planned.get(), 2);
        let grown = Reached {
            batch: Some(24),
            ..start
        };
        assert!(ask(4, grown) && ask(4, grown));
        assert_eq!(planned.get(), 3);
        let starved = Reached {
            micro_limit: Some(2),
            ..grown
        };
        assert!(ask(4, starved));
        assert_eq!(planned.get(), 4);
    }
}
