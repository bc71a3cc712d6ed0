//! An external trainer: its command, its resume arguments and its drain signal.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::util::suggest::{UnknownName, by_name};

/// An external trainer, in place of the built-in trainer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Trainer {
    /// Command line, started once per rank; empty: the built-in trainer.
    pub command: Vec<String>,
    /// Environment variables of every rank. Values may hold the placeholders of `command`. Default: those of the
    /// recipe's launcher.
    pub environment: BTreeMap<String, String>,
    /// Text of the DeepSpeed config that `{deepspeed_config}` names. Every generation gets a copy with the plan's
    /// numbers.
    pub deepspeed_config: Option<String>,
    /// Arguments that resume from `{checkpoint}`; empty: those of the recipe's dialect.
    pub resume: Vec<String>,
    /// Directory of its checkpoints, the same in every generation; default: a directory of the run.
    pub checkpoint_dir: Option<String>,
    /// Whether its checkpoints hold the optimiser's state.
    pub saves_optimizer: bool,
    /// Whether its own arguments choose FSDP 2 if they choose FSDP.
    pub chooses_fsdp_2: bool,
    /// Regular expression that finds its progress in the output of rank 0, by the named groups `step`,
    /// `total_steps`, `loss`, `learning_rate` and `tokens`. Only `step` is required.
    pub progress_pattern: Option<String>,
    /// Signal that asks it to save a checkpoint and exit.
    pub drain_signal: DrainSignal,
    /// Seconds from the drain signal until it is killed.
    pub drain_seconds: u64,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            command: Vec::new(),
            environment: BTreeMap::new(),
            deepspeed_config: None,
            resume: Vec::new(),
            checkpoint_dir: None,
            saves_optimizer: true,
            chooses_fsdp_2: true,
            progress_pattern: None,
            drain_signal: DrainSignal::Term,
            drain_seconds: 60,
        }
    }
}

impl Trainer {
    /// Whether an external trainer is configured.
    pub fn is_external(&self) -> bool {
        !self.command.is_empty()
    }

    /// Whether accelerate shards with FSDP in every rank.
    pub fn uses_fsdp(&self) -> bool {
        let uses = self.environment.get("ACCELERATE_USE_FSDP");
        uses.is_some_and(|uses| ["true", "1"].contains(&&*uses.to_lowercase()))
    }

    /// Adds environment variables. Those already present win.
    pub fn add_environment(&mut self, mut more: BTreeMap<String, String>) {
        more.append(&mut self.environment);
        self.environment = more;
    }
}

/// A signal that asks an external trainer to save a checkpoint and exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DrainSignal {
    /// Sent by schedulers such as Slurm and Kubernetes.
    #[default]
    #[serde(rename = "SIGTERM")]
    Term,
    /// Sent by Ctrl-C in a terminal.
    #[serde(rename = "SIGINT")]
    Int,
    /// Some programs save on it (Slurm's `--signal`).
    #[serde(rename = "SIGUSR1")]
    Usr1,
    /// Some programs save on it (Slurm's `--signal`).
    #[serde(rename = "SIGUSR2")]
    Usr2,
    /// Sent by a terminal when it closes.
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
}

impl fmt::Display for DrainSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for DrainSignal {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(name, DrainSignal::ALL)
    }
}
