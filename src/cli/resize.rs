use std::process::ExitCode;

/// Move a run to another number of processes.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`resize` is still being built")
}
