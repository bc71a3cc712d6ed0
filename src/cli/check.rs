use std::process::ExitCode;

/// Check a recipe against every rule.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`check` is still being built")
}
