//! A job's generations and the state machine that moves it from one to the next.
//!
//! A generation is (number, world, ranks, plan). [`decide`] is a pure function from the observed
//! state to an action; the local launcher and the operator carry the action out. [`protocol`]
//! defines the control messages between ranks and their agent.

pub mod agent_state;
pub mod authentication;
pub mod event_log;
pub mod files;
pub mod generation;
pub mod in_place;
pub mod placement;
pub mod protocol;
pub mod rank_status;
pub mod stall;
pub mod transition;
pub mod verdict;

pub use generation::{CheckpointRef, ExternalCheckpoint, Generation, Member, Reason};
pub use transition::{End, Outcome, RankAction, Ranks, TransitionInput, decide};
