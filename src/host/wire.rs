//! What a launcher and `evenkeel host` on another machine say to each other: one JSON object a line, over the standard
//! input and output of the command that reaches the machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::program::ExternalProgram;
use super::ranks::Event;
use crate::inventory::Inventory;
use crate::lifecycle::Generation;
use crate::lifecycle::generation::Address;
use crate::lifecycle::protocol::Order;
use crate::lifecycle::stall::ProgressDeadline;

/// Period of the heartbeats in both directions.
pub const BEAT: Duration = Duration::from_secs(1);
/// Silence of the launcher after which a host stops its ranks and ends.
pub const FENCE: Duration = Duration::from_secs(10);
/// Silence of a host after which it counts as lost: its ranks have been stopped by then.
pub const LOST: Duration = Duration::from_secs(12);
/// Longest time in which a host connects to another one.
pub const CONNECT: Duration = Duration::from_secs(5);

/// A message to a host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum ToHost {
    /// The first message: the launcher's directory, and its environment as far as ranks need it. The host starts itself
    /// again with them.
    Enter {
        directory: PathBuf,
        environment: BTreeMap<String, String>,
    },
    /// Asks whether a file has this text; answered by [`FromHost::Read`].
    Read {
        file: PathBuf,
        text: String,
    },
    /// Asks whether this program can be started in this directory; answered by [`FromHost::Found`].
    Find {
        directory: PathBuf,
        program: String,
    },
    /// Asks for a free port, on which the host listens until it starts ranks: this one if it is free, else any. Answered by
    /// [`FromHost::Port`].
    Port {
        named: Option<u16>,
    },
    /// Asks whether these addresses are reached; answered by [`FromHost::Connected`].
    Connect {
        addresses: Vec<Address>,
    },
    /// Asks whether a bucket can be used, which has this text under this key; answered by [`FromHost::Checked`].
    Check {
        url: String,
        key: String,
        text: String,
    },
    /// Starts ranks of a generation. Those of an earlier one are killed, except for those that the generation carries. With a
    /// bucket the host first brings what new processes read to its disk, says so by [`FromHost::Brought`], and waits for
    /// [`ToHost::Begin`].
    Start(Box<StartRanks>),
    /// Starts a process that stands by, with this number, as `start` says of a rank. Hosts that share no directory have none.
    StandBy {
        number: u64,
        start: Box<StartRanks>,
    },
    /// Kills a process that stands by.
    Dismiss {
        number: u64,
    },
    /// All hosts have what the ranks of this generation read.
    Begin {
        generation: u64,
    },
    /// This checkpoint is committed in the bucket: copies of older ones are not needed.
    Committed {
        path: String,
    },
    /// The run has ended and does not continue: the host removes it from its own disk. Answered by [`FromHost::Cleared`].
    Clear {
        run_dir: PathBuf,
    },
    Order {
        rank: u64,
        order: Order,
    },
    /// Kills a rank; `None`: all of them.
    Kill {
        rank: Option<u64>,
    },
    /// Lets the ranks of an external trainer write their stacks and end.
    Abort,
    Alive,
}

/// The ranks of a generation on one host.
#[derive(Debug, Serialize, Deserialize)]
pub struct StartRanks {
    /// With a bucket it is below the host's cache ([`super::own_disk::directory`]).
    pub run_dir: PathBuf,
    /// URL of the bucket with the run's files, if the hosts share no run directory.
    pub bucket: Option<String>,
    pub generation: Generation,
    pub first: u64,
    pub count: u64,
    /// `CUDA_VISIBLE_DEVICES` of each rank; empty if they compute on the CPU.
    pub gpus: Vec<String>,
    /// The secret of the generation's ranks ([`crate::util::key::Key::reveal`]).
    pub key: String,
    pub progress_deadline: ProgressDeadline,
    /// The external trainer; `None`: the built-in trainer.
    pub external: Option<ExternalProgram>,
    /// Numbers of the processes that stand by and become its further ranks.
    pub spares: Vec<u64>,
}

/// A message from a host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum FromHost {
    /// The answer to [`ToHost::Enter`].
    Here(Box<Facts>),
    /// Whether the file has the text.
    Read {
        same: bool,
    },
    /// Why the program cannot be started; `None`: it can.
    Found {
        problem: Option<String>,
    },
    /// 0: no port is free.
    Port {
        port: u16,
    },
    /// For each address, why it is not reached.
    Connected {
        problems: Vec<Option<String>>,
    },
    /// Why the bucket cannot be used; `None`: it can.
    Checked {
        problem: Option<String>,
    },
    /// The host has what its ranks of this generation read.
    Brought {
        generation: u64,
    },
    Cleared,
    Rank(Event),
    /// The kernel's out-of-memory killer has struck since the ranks were started.
    OomKilled,
    /// The host is about to end.
    Leaving,
    Alive,
}

/// What a host is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Facts {
    /// The same for two names of one machine: its boot and its network.
    pub machine: String,
    pub inventory: Inventory,
    /// Why the built-in trainer cannot use one of its GPUs.
    pub problem: Option<String>,
    /// Why it cannot use several.
    pub problem_of_several: Option<String>,
}
