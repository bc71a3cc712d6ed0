use std::process::ExitCode;

/// Show the GPUs and CPUs found.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("`gpus` is still being built")
}
