//! `evenkeel crd`: the CustomResourceDefinition of TrainingJobs.

use std::process::ExitCode;

use super::output::Format;
use crate::job::api;

/// Print the CustomResourceDefinition of TrainingJobs, for `kubectl apply --server-side -f -`.
#[derive(clap::Args)]
pub struct Args {}

pub fn run(_: Args) -> anyhow::Result<ExitCode> {
    Format::Yaml.print(&api::crd())?;
    Ok(ExitCode::SUCCESS)
}
