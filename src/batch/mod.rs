//! Batch arithmetic: plans, feasible counts, rescaling, the out-of-memory descent, and the rules.
//!
//! Pure functions of recipes and numbers: no files, no network, no clocks.

pub mod plan;

pub use plan::{Adjustment, MemoryEstimate, Plan};
