//! The norm test: estimators of the gradient's variance, and the controller that chooses the global batch.
//! Pure functions and one small serialisable state; no tensors, no communication.
//!
//! Every rank adds the squared norms of its groups to a [`GroupSums`]. Their sum over the ranks and the
//! squared norm of the whole batch's gradient make a [`Sums`]. The [`Controller`] turns that into the
//! [`Decision`] for the next step. Fixed schedules (constant, stages, replay) use the same calls.
//! `docs/norm-test.md` is the user's page.

mod controller;
mod coordinate;
mod decision;
mod estimator;
mod settings;
mod tester;

pub use controller::Controller;
pub use coordinate::{CoordinateTest, Coordinates};
pub use decision::{Decision, Limit, Reason};
pub use estimator::{Estimate, GroupSums, Printed, Sums, Undefined};
pub use settings::{Conditions, ScheduleError};

#[cfg(test)]
mod testing;
