//! The last thing before a user's own program: this process becomes it. What every rank of ours has,
//! it has then, too: it holds its generation's lock until it ends, so that a later launcher sees it
//! live, and it hears when its agent dies.

use std::io;
use std::os::unix::process::CommandExt;
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

/// Becomes a rank's program; returns only if that is not possible. `drain`: what it is sent when
/// this process's parent, the agent, is gone.
pub fn become_program(
    run: &Path,
    generation: u64,
    drain: DrainSignal,
    command: &[String],
) -> BecomeError {
    let prepared = || -> Result<_, BecomeError> {
        let alive = rank::hold(&run.join(files::generation(generation)))?;
        // Kept open by the program, and by what it starts.
        fcntl_setfd(&alive, FdFlags::empty())?;
        set_parent_process_death_signal(Some(signal(drain)))?;
        Ok(alive)
    };
    let _alive = match prepared() {
        Ok(alive) => alive,
        Err(error) => return error,
    };
    let mut words = command.iter();
    let program = words.next().cloned().unwrap_or_default();
    let error = Command::new(&program).args(words).exec();
    BecomeError::Program { program, error }
}
