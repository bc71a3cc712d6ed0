use std::process::ExitCode;

/// One rank of a run (started by the agent).
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`rank` is still being built")
}
