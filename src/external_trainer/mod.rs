//! The external trainer: the user's own program, started in place of the built-in trainer.

pub mod call;
mod checkpoints;
mod command;
pub mod conversion;
pub mod launcher;
pub mod oom_messages;
mod process;
pub mod program;
pub mod progress;
pub mod resume;
mod trainer_state;

pub use command::{Call, ExternalTrainer, ExternalTrainerError};
pub use process::{Become, become_program};
pub use program::{Program, Start};
pub use progress::ProgressWatch;
