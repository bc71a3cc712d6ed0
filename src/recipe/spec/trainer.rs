//! The user's own program in the place of the built-in trainer: how it is started, asked to leave, and
//! told to go on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The user's own program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Trainer {
    /// Its command line, started once for every rank; empty: the built-in trainer.
    pub command: Vec<String>,
    /// Arguments that make it go on from `{checkpoint}`; empty: those of the recipe's dialect.
    pub resume: Vec<String>,
    /// Where it keeps its checkpoints, the same in every generation; `None`: a directory of the run.
    pub checkpoint_dir: Option<String>,
    /// The signal by which it is asked to save and leave.
    pub drain_signal: DrainSignal,
    /// How long it then has, seconds.
    pub drain_seconds: u64,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            command: Vec::new(),
            resume: Vec::new(),
            checkpoint_dir: None,
            drain_signal: DrainSignal::Term,
            drain_seconds: 60,
        }
    }
}

impl Trainer {
    /// Whether the user's own program trains.
    pub fn is_own(&self) -> bool {
        !self.command.is_empty()
    }
}

/// A signal that asks a program to save and leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DrainSignal {
    /// What schedulers send.
    #[default]
    #[serde(rename = "SIGTERM")]
    Term,
    /// What Ctrl-C sends.
    #[serde(rename = "SIGINT")]
    Int,
    /// What some programs take for "save now" (Slurm's `--signal`).
    #[serde(rename = "SIGUSR1")]
    Usr1,
    /// The same.
    #[serde(rename = "SIGUSR2")]
    Usr2,
    /// What a closed terminal sends.
    #[serde(rename = "SIGHUP")]
    Hup,
}

impl DrainSignal {
    const ALL: [DrainSignal; 5] = [
        DrainSignal::Term,
        DrainSignal::Int,
        DrainSignal::Usr1,
        DrainSignal::Usr2,
        DrainSignal::Hup,
    ];

    fn name(self) -> &'static str {
        match self {
            DrainSignal::Term => "SIGTERM",
            DrainSignal::Int => "SIGINT",
            DrainSignal::Usr1 => "SIGUSR1",
            DrainSignal::Usr2 => "SIGUSR2",
            DrainSignal::Hup => "SIGHUP",
        }
    }
}

impl fmt::Display for DrainSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DrainSignal {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = DrainSignal::ALL
            .into_iter()
            .find(|signal| signal.name() == name);
        found.ok_or_else(|| {
            format!(
                "known are {}",
                DrainSignal::ALL.map(DrainSignal::name).join(", ")
            )
        })
    }
}
