//! Batch arithmetic: plans, feasible counts, rescaling, the out-of-memory descent, and the rules.
//!
//! Pure functions of recipes and numbers: no files, no network, no clocks. [`plan`] is the entry point:
//! [`Draft`] derives the numbers of a recipe, [`rules`] check them, and a draft without errors becomes a
//! [`Plan`].

mod arithmetic;
mod batch_plan;
mod draft;
pub mod elastic;
mod horizon;
pub mod memory;
mod oom_policy;
mod planner;
mod request;
pub mod rules;
mod runner;
mod split;
mod start;
mod worlds;

pub use batch_plan::{Adjustment, Facts, MAX_BATCH, MemoryEstimate, Plan};
pub use draft::{Draft, MOST_GPUS, global_batch};
pub use horizon::{Horizon, held_out, horizon, most_samples, most_samples_of};
pub use oom_policy::{OomPolicy, OomStep, descend};
#[cfg(test)]
pub use planner::examined;
pub use planner::{default_world, examine, plan, refused_by_built_in};
pub use request::{Flaw, PlanRequest, Reached};
pub use runner::{AskedRunner, DeviceKind, DeviceMemory, Runner};
pub use start::{Start, start, starter};
pub use worlds::{KnownWorlds, NoPlan, Worlds};
