use std::process::ExitCode;

/// Train a recipe on this machine.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`launch` is still being built")
}
