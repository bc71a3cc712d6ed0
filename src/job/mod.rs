//! A job's generations and the state machine that moves it from one to the next.
//!
//! A generation is (number, world, ranks, plan). [`decide`] is pure: it sees what was observed and
//! says what to do; the local launcher and the operator carry it out. [`protocol`] is what ranks
//! and their agent say to each other.

pub mod agent_state;
pub mod api;
mod carried;
pub mod decide;
pub mod files;
pub mod generation;
mod own_checkpoint;
pub mod protocol;
pub mod seen;
pub mod steer;

pub use decide::{Action, End, Observed, Outcome, Ranks, decide};
pub use generation::{Generation, Member, Pin, Reason};
pub use own_checkpoint::OwnCheckpoint;
