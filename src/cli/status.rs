use std::process::ExitCode;

/// Show runs, or one run.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`status` is still being built")
}
