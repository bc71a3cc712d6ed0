//! `evenkeel man`: man pages of all commands.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::completions::public;

/// Write the man pages of all commands into a directory.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel man ~/.local/share/man/man1     then: man evenkeel-launch")]
pub struct Args {
    /// Directory; it is created if it does not exist
    directory: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let directory = &args.directory;
    let written = std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(public(), directory));
    written.with_context(|| format!("cannot write {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}
