//! `evenkeel prepare`: a run's directory, ready for its first generation (the agent starts it).

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use super::recipe_args::RecipeArgs;
use super::{EXIT_REFUSED, render};
use crate::batch::{OomPolicy, Reached};
use crate::inventory::Inventory;
use crate::launch::{Claim, LaunchError, Request, RunDir, prepare};

/// Prepare a run's directory without launching it (started by the agent).
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Ranks of the first generation.
    #[arg(long)]
    procs: u64,
    /// The run's directory.
    #[arg(long)]
    out: PathBuf,
    /// Bytes that a rank may use.
    #[arg(long, value_parser = super::bytes::parse)]
    rank_memory: Option<u64>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = match args.recipe.read_or_say() {
        Ok(recipe) => recipe,
        Err(code) => return Ok(code),
    };
    let planned = match prepare::plan(&recipe, args.procs, Reached::default(), args.rank_memory) {
        Ok(planned) => planned,
        Err(LaunchError::Refused(refused)) => {
            render::print(&refused.diagnostics, &recipe.sources);
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        Err(error) => return Err(error.into()),
    };
    let claim = Claim::take(RunDir::at(&args.out))?;
    let request = Request {
        recipe_path: args.recipe.recipe.clone(),
        overrides: args.recipe.overrides.clone(),
        rank_memory: args.rank_memory,
        oom_policy: OomPolicy::Exact,
        cores: Inventory::discover().cpu.cores,
        resume: false,
        // Its agent kills it, and what is left of the data goes with the next attempt.
        signals: Arc::default(),
    };
    prepare::prepare(claim.run(), &recipe, &planned, &request, &mut |_| {})?;
    Ok(ExitCode::SUCCESS)
}
