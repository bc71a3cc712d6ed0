//! The last thing before a user's own program: this process becomes it. What every rank of ours has,
//! it has then, too: it holds its generation's lock until it ends, so that a later launcher sees it
//! live, and it hears when its agent dies.

use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::path::Path;
use std::process::Command;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::set_parent_process_death_signal;

use super::program::signal;
use crate::job::files;
use crate::recipe::spec::DrainSignal;
use crate::train::{TrainError, rank};

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
pub enum BecomeError {
    /// The generation's lock.
    #[error(transparent)]
    Lock(#[from] TrainError),
    /// Something of the system.
    #[error("cannot prepare for the program: {0}")]
    System(#[from] rustix::io::Errno),
    /// Nobody would see how it ends.
    #[error("its agent is gone")]
    Orphan,
    /// The program itself.
    #[error("cannot start `{program}`: {error}")]
    Program {
        /// Its name.
        program: String,
        /// Why.
        error: io::Error,
    },
}

impl BecomeError {
    /// The code that a shell ends with in its place.
    pub fn exit_code(&self) -> u8 {
        match self {
            BecomeError::Program { error, .. } if error.kind() == io::ErrorKind::NotFound => 127,
            _ => 126,
        }
    }
}

/// What a rank's process is to become.
#[derive(Debug, Clone, Copy)]
pub struct Become<'a> {
    /// The run's directory.
    pub run: &'a Path,
    /// The generation.
    pub generation: u64,
    /// What the program is sent when this process's parent, the agent, is gone.
    pub drain: DrainSignal,
    /// The agent's process number.
    pub agent: Option<u32>,
    /// The program and its arguments.
    pub command: &'a [String],
}

/// Becomes a rank's program; returns only if that is not possible.
pub fn become_program(to_be: &Become<'_>) -> BecomeError {
    let prepared = || -> Result<_, BecomeError> {
        let alive = rank::hold(&to_be.run.join(files::generation(to_be.generation)))?;
        // Kept open by the program, and by what it starts.
        fcntl_setfd(&alive, FdFlags::empty())?;
        set_parent_process_death_signal(Some(signal(to_be.drain)))?;
        // One that was gone before that is not told of any more.
        if to_be.agent.is_some_and(|agent| agent != parent_id()) {
            return Err(BecomeError::Orphan);
        }
        Ok(alive)
    };
    let _alive = match prepared() {
        Ok(alive) => alive,
        Err(error) => return error,
    };
    let mut words = to_be.command.iter();
    let program = words.next().cloned().unwrap_or_default();
    let error = Command::new(&program).args(words).exec();
    BecomeError::Program { program, error }
}
