use std::process::ExitCode;

/// Write a run's report as one HTML page.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`report` is still being built")
}
