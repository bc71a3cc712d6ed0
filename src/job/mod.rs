//! A job's generations and the state machine that moves it from one to the next.
//!
//! A generation is (number, world, ranks, plan). [`decide`] is a pure function from the observed
//! state to an action; the local launcher and the operator carry the action out. [`protocol`]
//! defines the control messages between ranks and their agent.

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
