//! `evenkeel install`: this program, copied into a directory that another container mounts.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

/// Copy this program into a directory (pods of foreign trainers start with it).
#[derive(clap::Args)]
pub struct Args {
    /// The directory
    directory: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let target = args.directory.join("evenkeel");
    std::fs::copy(std::env::current_exe()?, &target)
        .with_context(|| format!("cannot write {}", target.display()))?;
    Ok(ExitCode::SUCCESS)
}
