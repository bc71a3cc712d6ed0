//! The program of a rank's process: the built-in trainer or the external trainer. Both get
//! torchrun's environment variables, so a script written for torchrun runs unchanged.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::{CommandExt, parent_id};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::external_trainer::ExternalCall;
use crate::external_trainer::conversion::{self, ConversionError};
use crate::lifecycle::stall::ProgressDeadline;
use crate::lifecycle::{Generation, files};
use crate::recipe::schema::placeholder::{self, LEFT_BRACE, OF_A_RANK, Value};
use crate::recipe::schema::spec::{DrainSignal, MASTER_PORT};
use crate::train::{TrainError, rank};
use crate::util::key::Key;

/// Environment variable with the secret of a generation's ranks. Only their user reads it, as a file of mode 0600.
pub const KEY_VARIABLE: &str = "EVENKEEL_GENERATION_KEY";

/// Variable of the ranks that a host starts for a launcher on another machine.
pub const HOST_VARIABLE: &str = "EVENKEEL_HOST";

/// What a host needs to start its ranks of a generation.
pub struct Start<'a> {
    /// Path of the `evenkeel` executable; every rank process starts as it.
    pub evenkeel: &'a Path,
    pub run_dir: &'a Path,
    pub generation: &'a Generation,
    /// The first rank on this host.
    pub first: u64,
    /// Number of ranks on this host.
    pub count: u64,
    /// CPU cores that these ranks share.
    pub cores: u64,
    /// `CUDA_VISIBLE_DEVICES` of each rank of the built-in trainer; empty if it computes on the CPU.
    pub gpus: &'a [String],
    /// The secret of the generation's ranks.
    pub key: &'a Key,
    pub progress_deadline: ProgressDeadline,
    /// URL of the bucket for checkpoints, if hosts share no run directory.
    pub bucket: Option<&'a str>,
    /// Whether the output of the built-in trainer's ranks is shown too.
    pub shows_built_in: bool,
}

/// The external trainer as each of its ranks starts it, also on other hosts: a [`crate::external_trainer::Call`] is stored
/// without its directories.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExternalProgram {
    /// Program and arguments, without a shell, with the placeholders of a rank.
    command: Vec<String>,
    /// Working directory; `None`: the agent's.
    directory: Option<PathBuf>,
    /// The step of a checkpoint that rank 0 converts before it starts the program.
    convert: Option<PathBuf>,
    /// `trainer.environment`, with the placeholders of a rank.
    environment: BTreeMap<String, String>,
    /// Evenkeel's variables besides the plan's numbers.
    variables: BTreeMap<String, OsString>,
    pub drain_signal: DrainSignal,
}

impl ExternalProgram {
    pub fn of(external: &ExternalCall) -> ExternalProgram {
        let call = &external.call;
        let paths = call.variables();
        ExternalProgram {
            command: call.command.clone(),
            directory: call.directory.clone(),
            convert: call.convert.clone(),
            environment: call.environment.clone(),
            variables: paths
                .map(|(name, path)| (name.to_owned(), path.into()))
                .collect(),
            drain_signal: external.recipe.spec.trainer.drain_signal,
        }
    }

    /// With more variables of Evenkeel.
    pub fn with(
        mut self,
        variables: impl IntoIterator<Item = (&'static str, OsString)>,
    ) -> ExternalProgram {
        let variables = variables.into_iter();
        self.variables
            .extend(variables.map(|(name, value)| (name.to_owned(), value)));
        self
    }
}

pub(crate) fn signal(drain: DrainSignal) -> Signal {
    match drain {
        DrainSignal::Term => Signal::TERM,
        DrainSignal::Int => Signal::INT,
        DrainSignal::Usr1 => Signal::USR1,
        DrainSignal::Usr2 => Signal::USR2,
        DrainSignal::Hup => Signal::HUP,
    }
}

/// The command of one rank. Its output goes to `log`, except for the reports that the built-in
/// trainer writes to standard output. `external`: the external trainer, if it runs.
pub(crate) fn command(
    start: &Start<'_>,
    external: Option<&ExternalProgram>,
    rank: u64,
    local: u64,
    log: File,
) -> io::Result<Command> {
    let mut command = Command::new(start.evenkeel);
    command
        .arg("rank")
        .arg("--run")
        .arg(start.run_dir)
        .args(["--generation", &start.generation.number.to_string()])
        .envs(torchrun(start, rank, local));
    if let Some(bucket) = start.bucket {
        command.args(["--bucket", bucket]);
    }
    match external {
        None => {
            command
                .env("RAYON_NUM_THREADS", threads(start).to_string())
                .env(KEY_VARIABLE, start.key.reveal())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            if let Some(seconds) = start.progress_deadline.seconds() {
                command.args(["--progress-deadline", &seconds.to_string()]);
            }
            let local = usize::try_from(local).unwrap_or(usize::MAX);
            if let Some(gpu) = start.gpus.get(local) {
                command
                    .env("CUDA_VISIBLE_DEVICES", gpu)
                    // Indices are NVML's.
                    .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
            }
        }
        Some(external) => {
            if let Some(directory) = &external.directory {
                command.current_dir(directory);
            }
            let variables = torchrun(start, rank, local);
            let of_rank =
                |words: &[String]| placeholder::fill(words, |name| of_rank(&variables, name));
            if let Some(step) = &external.convert {
                command.arg("--convert").arg(step);
            }
            command
                .args(["--drain-signal", &external.drain_signal.to_string()])
                .args(["--agent", &std::process::id().to_string(), "--"])
                .args(of_rank(&external.command))
                .envs(own_variables(start))
                .envs(&external.variables);
            for (name, value) in &external.environment {
                // The generation's, which is the named port where that is free.
                if name == MASTER_PORT {
                    continue;
                }
                let value = of_rank(std::slice::from_ref(value)).concat();
                command.env(name, joined(name, value));
            }
            command.stdin(Stdio::null()).stdout(log.try_clone()?);
        }
    }
    command
        .stderr(log)
        // A separate process group: Ctrl-C in the terminal reaches only the launcher, which drains
        // the ranks.
        .process_group(0);
    Ok(command)
}

/// The command of a process of the built-in trainer that stands by. `start` is that of the running generation, with the
/// GPU of the process as the only one.
pub(crate) fn spare(start: &Start<'_>, log: File) -> io::Result<Command> {
    let mut command = command(start, None, 0, 0, log)?;
    command.arg("--stand-by");
    Ok(command)
}

/// Compute threads of each rank.
pub(crate) fn threads(start: &Start<'_>) -> u64 {
    (start.cores / start.count).max(1)
}

/// The value of a placeholder that differs between ranks or hosts.
fn of_rank(variables: &[(&'static str, String)], name: &str) -> Option<Value> {
    if name == LEFT_BRACE {
        return Some(Value::Word("{".to_owned()));
    }
    let of = [
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    ];
    let at = OF_A_RANK.iter().position(|known| *known == name)?;
    let (_, value) = variables.iter().find(|(name, _)| *name == of[at])?;
    Some(Value::Word(value.clone()))
}

/// The value of a variable. `PYTHONPATH` follows the paths of this process's environment.
fn joined(name: &str, value: String) -> OsString {
    match std::env::var_os(name).filter(|paths| name == "PYTHONPATH" && !paths.is_empty()) {
        Some(mut paths) => {
            paths.push(":");
            paths.push(value);
            paths
        }
        None => value.into(),
    }
}

/// Environment of an external trainer besides torchrun's variables and [`ExternalProgram::variables`].
fn own_variables(start: &Start<'_>) -> Vec<(&'static str, OsString)> {
    let generation = start.generation;
    let numbers = generation.plan.variables();
    let numbers = numbers
        .into_iter()
        .chain([("EVENKEEL_GENERATION", generation.number)]);
    let mut variables: Vec<(&str, OsString)> = numbers
        .map(|(name, number)| (name, number.to_string().into()))
        .collect();
    // As torchrun does; otherwise every rank would compute on all cores, and a rank that lost its peer might
    // wait in NCCL. Python writes its stacks when it is aborted.
    for (name, value) in [
        ("OMP_NUM_THREADS", threads(start).to_string()),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".to_owned()),
        ("PYTHONFAULTHANDLER", "1".to_owned()),
    ] {
        if std::env::var_os(name).is_none() {
            variables.push((name, value.into()));
        }
    }
    variables
}

/// The environment of a torchrun worker (torch.distributed.elastic), including the `PET_*`
/// variables that its agents set.
fn torchrun(start: &Start<'_>, rank: u64, local: u64) -> Vec<(&'static str, String)> {
    let generation = start.generation;
    let node = generation
        .shares()
        .position(|(first, _)| first == start.first);
    let node = node.unwrap_or(0).to_string();
    let nodes = generation.members.len().to_string();
    let local_world = start.count.to_string();
    vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local.to_string()),
        ("WORLD_SIZE", generation.world().to_string()),
        ("LOCAL_WORLD_SIZE", local_world.clone()),
        ("GROUP_RANK", node.clone()),
        ("GROUP_WORLD_SIZE", nodes.clone()),
        ("ROLE_NAME", "default".to_owned()),
        ("ROLE_RANK", rank.to_string()),
        ("ROLE_WORLD_SIZE", generation.world().to_string()),
        ("MASTER_ADDR", generation.master.host.clone()),
        (MASTER_PORT, generation.master.port.to_string()),
        ("PET_NNODES", nodes),
        ("PET_NPROC_PER_NODE", local_world),
        ("PET_NODE_RANK", node),
        ("TORCHELASTIC_RUN_ID", generation.job.clone()),
        (
            "TORCHELASTIC_RESTART_COUNT",
            generation.number.saturating_sub(1).to_string(),
        ),
    ]
}

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

#[derive(Debug, Clone, Copy)]
pub struct Become<'a> {
    pub run_dir: &'a Path,
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

/// Replaces this process with the rank's program. Returns only on failure. The program inherits the generation's lock
/// and holds it until it exits, so a later launcher sees that it still runs. It also gets a signal
/// when its agent dies, as ranks of the built-in trainer do.
pub fn become_program(to_be: &Become<'_>) -> BecomeError {
    let prepared = || -> Result<_, BecomeError> {
        let alive = rank::hold(&to_be.run_dir.join(files::generation(to_be.generation)))?;
        // The program and its children inherit the descriptor.
        fcntl_setfd(&alive, FdFlags::empty())?;
        // Without its peers a rank on another host has nothing to save, and the next start may have begun.
        let alone = std::env::var_os(HOST_VARIABLE).is_some();
        let death = if alone {
            Signal::KILL
        } else {
            signal(to_be.drain)
        };
        set_parent_process_death_signal(Some(death))?;
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
