use std::process::ExitCode;

/// Explain a rule.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`explain` is still being built")
}
