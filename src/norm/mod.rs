//! The norm test: estimators of the gradient's variance. Pure functions and small serialisable
//! values; no tensors, no communication.

pub mod coordinate;
pub mod estimator;

pub use coordinate::Coordinates;
pub use estimator::{Estimate, GroupSums, Printed, Sums, Undefined};

#[cfg(test)]
mod synthetic;
