//! `evenkeel rank`: one rank, started by the agent with torchrun's environment.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use crate::train::rank::{self, RankOptions};

/// One rank of a run (started by the agent).
#[derive(clap::Args)]
pub struct Args {
    /// The run's directory.
    #[arg(long)]
    run: PathBuf,
    /// The generation's number.
    #[arg(long)]
    generation: u64,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    Ok(ExitCode::from(rank::run(&RankOptions {
        run: args.run,
        generation: args.generation,
        rank: variable("RANK")?,
        threads: variable("RAYON_NUM_THREADS")?,
    })))
}

/// A number from the environment that the agent, like torchrun, gives its ranks.
fn variable(name: &str) -> anyhow::Result<usize> {
    let value = std::env::var(name).with_context(|| format!("{name} is not set"))?;
    value
        .parse()
        .with_context(|| format!("{name}={value} is not a number"))
}
