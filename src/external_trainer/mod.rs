//! The external trainer: the user's own program, started in place of the built-in trainer.

pub mod check;
mod checkpoints;
pub mod choice;
mod command;
pub mod conversion;
pub mod failure_causes;
pub mod launcher;
pub mod progress;
pub mod resume;

pub use command::{Call, ExternalCall, ExternalTrainer, ExternalTrainerError, cannot_start};
pub use progress::{PostServer, Progress, ProgressWatch};
