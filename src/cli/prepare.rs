//! `evenkeel prepare`: a run's directory, ready for its first generation (the agent starts it).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow};

use super::{EXIT_REFUSED, EXIT_USAGE, render};
use crate::batch::{OomPolicy, Reached};
use crate::durable::{self, FileError};
use crate::inventory::Inventory;
use crate::job::api::RemainderPolicy;
use crate::job::api::status::RecipeSnapshot;
use crate::job::protocol::exit;
use crate::launch::{Claim, LaunchError, Request, RunDir, prepare};
use crate::recipe;
use crate::train::data::DataError;

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
    let out = args.out.clone();
    let prepared = prepare_run(args);
    match prepared {
        Err(error) if may_pass(&error, &out) => {
            super::failed(&error);
            Ok(ExitCode::from(exit::TRY_AGAIN))
        }
        prepared => prepared,
    }
}

/// Whether the same may work later: it is no word about the recipe, but about the run's volume, or
/// about a disk that does not do what it should.
fn may_pass(error: &anyhow::Error, out: &Path) -> bool {
    let file = match error.downcast_ref() {
        Some(LaunchError::File(file) | LaunchError::Data(DataError::File(file))) => Some(file),
        _ => error.downcast_ref::<FileError>(),
    };
    match file {
        // Held by the preparation before, which is about to end.
        Some(FileError::NoSpace { .. } | FileError::HeldBy { .. }) => true,
        Some(FileError::Io { path, source, .. }) => {
            path.starts_with(out) || !speaks_of_the_name(source.kind())
        }
        Some(FileError::TooLarge { .. } | FileError::Json { .. }) | None => false,
    }
}

/// Whether another file should have been named, or the file be another one.
fn speaks_of_the_name(kind: ErrorKind) -> bool {
    use ErrorKind::*;
    matches!(
        kind,
        NotFound
            | PermissionDenied
            | IsADirectory
            | NotADirectory
            | InvalidFilename
            | InvalidInput
            | InvalidData
            | UnexpectedEof
    )
}

fn prepare_run(args: Args) -> anyhow::Result<ExitCode> {
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

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn only_the_disk_and_the_volume_may_do_better_later() {
        let out = Path::new("/checkpoints/run");
        let data = |error| anyhow!(LaunchError::Data(DataError::File(error)));
        let file = |path: &str, kind| {
            let source = io::Error::from(kind);
            FileError::from_io("write", Path::new(path), 0, source)
        };
        let (inside, outside) = ("/checkpoints/run/data", "/data/train.jsonl");
        let passes = |error: anyhow::Error| may_pass(&error, out);
        assert!(passes(data(file(inside, ErrorKind::StorageFull))));
        assert!(passes(data(file(inside, ErrorKind::PermissionDenied))));
        assert!(passes(data(file(outside, ErrorKind::TimedOut))));
        assert!(!passes(data(file(outside, ErrorKind::NotFound))));
        assert!(!passes(data(file(outside, ErrorKind::FileTooLarge))));
        let held = FileError::HeldBy {
            directory: out.into(),
            pid: None,
        };
        assert!(passes(LaunchError::File(held).into()));
        let read = Err::<(), _>(file(outside, ErrorKind::TimedOut)).context("reading");
        assert!(passes(read.unwrap_err()));
        let message = "the recipe does not say how long to train".to_owned();
        assert!(!passes(LaunchError::Usage { message }.into()));
    }
}
