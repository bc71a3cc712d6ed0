//! `evenkeel prepare`: a run's directory, ready for its first generation (the agent starts it).

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow};

use super::{EXIT_REFUSED, EXIT_USAGE, render};
use crate::batch::{OomPolicy, Reached};
use crate::durable;
use crate::inventory::Inventory;
use crate::job::api::RemainderPolicy;
use crate::job::api::status::RecipeSnapshot;
use crate::launch::{Claim, LaunchError, Request, RunDir, prepare};
use crate::recipe;

/// Prepare a run's directory without launching it (started by the agent).
#[derive(clap::Args)]
pub struct Args {
    /// The recipe that the TrainingJob carries, and what becomes of a batch that does not split.
    recipe: PathBuf,
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
    let (carried, remainder): (RecipeSnapshot, RemainderPolicy) = durable::read_json(&args.recipe)
        .with_context(|| format!("reading {}", args.recipe.display()))?;
    let request = carried.request(remainder).map_err(|error| anyhow!(error))?;
    let recipe = match recipe::read(&request) {
        Ok(recipe) => recipe,
        Err(error) => {
            render::print(&error.diagnostics, &error.sources);
            return Ok(ExitCode::from(EXIT_USAGE));
        }
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
        recipe_path: carried.path(),
        overrides: carried.overrides,
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
