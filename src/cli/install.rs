//! `evenkeel install`: copies this executable into a directory that another container mounts.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

/// Copy this executable into a directory (pods of external trainers start with it).
#[derive(clap::Args)]
pub struct Args {
    /// Target directory
    directory: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let target = args.directory.join("evenkeel");
    std::fs::copy(std::env::current_exe()?, &target)
        .with_context(|| format!("cannot write {}", target.display()))?;
    Ok(ExitCode::SUCCESS)
}
