//! Replaces this rank process with the external trainer. The trainer inherits the generation's lock
//! and holds it until it exits, so a later launcher sees that it still runs. It also gets a signal
//! when its agent dies, as ranks of the built-in trainer do.

use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::path::Path;
use std::process::Command;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::set_parent_process_death_signal;

use super::conversion::{self, ConversionError};
use super::program::signal;
use crate::lifecycle::files;
use crate::recipe::schema::spec::DrainSignal;
use crate::train::{TrainError, rank};

/// Reasons why the external trainer did not start.
#[derive(Debug, thiserror::Error)]
pub enum BecomeError {
    /// The generation's lock could not be taken.
    #[error(transparent)]
    Lock(#[from] TrainError),
    /// A system call failed.
    #[error("cannot prepare for the program: {0}")]
    System(#[from] rustix::io::Errno),
    /// Without an agent, no process records how the trainer ends.
    #[error("the agent died before the program started")]
    Orphan,
    /// The checkpoint could not be converted for this world.
    #[error(transparent)]
    Conversion(#[from] ConversionError),
    /// `exec` failed.
    #[error("cannot start `{program}`: {error}")]
    Program { program: String, error: io::Error },
}

impl BecomeError {
    /// The exit code that a shell returns for the same error.
    pub fn exit_code(&self) -> u8 {
        match self {
            BecomeError::Program { error, .. } if error.kind() == io::ErrorKind::NotFound => 127,
            _ => 126,
        }
    }
}

/// Arguments of [`become_program`].
#[derive(Debug, Clone, Copy)]
pub struct Become<'a> {
    pub run: &'a Path,
    pub generation: u64,
    /// The signal that the program receives when its parent, the agent, dies.
    pub drain: DrainSignal,
    /// Process id of the agent.
    pub agent: Option<u32>,
    /// The step of a checkpoint to convert first, by rank 0.
    pub convert: Option<&'a Path>,
    /// Whether this host shares no run directory with the others.
    pub own_disk: bool,
    pub command: &'a [String],
}

/// Replaces this process with the rank's program. Returns only on failure.
pub fn become_program(to_be: &Become<'_>) -> BecomeError {
    let prepared = || -> Result<_, BecomeError> {
        let alive = rank::hold(&to_be.run.join(files::generation(to_be.generation)))?;
        // The program and its children inherit the descriptor.
        fcntl_setfd(&alive, FdFlags::empty())?;
        set_parent_process_death_signal(Some(signal(to_be.drain)))?;
        // No signal arrives if the agent died before the call above.
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
    if let Some(step) = to_be.convert {
        // Otherwise the other ranks' rendezvous would time out during a long conversion.
        // Hosts without a common disk convert their copies.
        let of = if to_be.own_disk { "LOCAL_RANK" } else { "RANK" };
        let first = std::env::var_os(of).is_none_or(|rank| rank == "0");
        if !first {
            conversion::wait(step);
        } else if let Err(error) = conversion::convert(step, &program) {
            return error.into();
        }
    }
    let error = Command::new(&program).args(words).exec();
    BecomeError::Program { program, error }
}
