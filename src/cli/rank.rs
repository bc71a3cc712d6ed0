//! `evenkeel rank`: one rank, started by the agent with torchrun's environment.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context;
use signal_hook::consts::SIGTERM;

use crate::host::{Become, HOST_VARIABLE, KEY_VARIABLE, become_program};
use crate::lifecycle::stall::ProgressDeadline;
use crate::recipe::schema::spec::DrainSignal;
use crate::train::rank::{self, RankOptions};

/// One rank of a run (started by the agent).
#[derive(clap::Args)]
pub struct Args {
    /// The run directory.
    #[arg(long)]
    run: PathBuf,
    /// Number of the generation.
    #[arg(long)]
    generation: u64,
    /// Signal for the external trainer when its agent dies.
    #[arg(long, default_value_t)]
    drain_signal: DrainSignal,
    /// Process id of the agent. The agent may die before this process watches it.
    #[arg(long)]
    agent: Option<u32>,
    /// Step of a ZeRO checkpoint to convert before the external trainer starts.
    #[arg(long)]
    convert: Option<PathBuf>,
    /// Seconds without progress after which the rank counts as stalled; 0: never. Default: measured.
    #[arg(long, value_name = "SECONDS")]
    progress_deadline: Option<u32>,
    /// Stand by until the agent gives the process a place in a later generation.
    #[arg(long)]
    stand_by: bool,
    /// Bucket for checkpoints, if hosts share no run directory.
    #[arg(long, value_name = "URL")]
    bucket: Option<String>,
    /// External trainer that replaces this process instead of the built-in trainer.
    #[arg(last = true)]
    command: Vec<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !args.command.is_empty() {
        let error = become_program(&Become {
            run_dir: &args.run,
            generation: args.generation,
            drain: args.drain_signal,
            agent: args.agent,
            convert: args.convert.as_deref(),
            own_disk: args.bucket.is_some(),
            command: &args.command,
        });
        super::output::say(format_args!("error: {error}\n"));
        return Ok(ExitCode::from(error.exit_code()));
    }
    if std::env::var_os(HOST_VARIABLE).is_some() {
        // Slurm sends it to every process of a step. The host tells the launcher, which lets the ranks commit.
        signal_hook::flag::register(SIGTERM, Arc::default())?;
    }
    let rank = variable("RANK")?;
    Ok(ExitCode::from(rank::run(&RankOptions {
        run_dir: args.run,
        generation: args.generation,
        stands_by: args.stand_by,
        rank,
        threads: variable("RAYON_NUM_THREADS")?,
        key: variable(KEY_VARIABLE)?,
        progress_deadline: ProgressDeadline::of(args.progress_deadline),
        first_of_host: variable("LOCAL_RANK").unwrap_or(rank) == 0,
        bucket: args.bucket,
    })))
}

/// A value from the environment, set by the agent, mostly as torchrun would.
fn variable<T: FromStr>(name: &str) -> anyhow::Result<T> {
    let value = std::env::var(name).with_context(|| format!("{name} is not set"))?;
    // The value may be a secret.
    let read = value.parse().ok();
    read.with_context(|| format!("{name} has no valid value"))
}
