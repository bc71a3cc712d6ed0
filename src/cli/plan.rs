use std::process::ExitCode;

/// Show the batch plan of a recipe.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`plan` is still being built")
}
