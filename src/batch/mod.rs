//! Batch arithmetic: plans, feasible counts, rescaling, the out-of-memory descent, and the rules.
//!
//! Pure functions of recipes and numbers: no files, no network, no clocks.

mod arithmetic;
pub mod memory;
pub mod plan;
pub mod split;

pub use plan::{Adjustment, MemoryEstimate, Plan};
