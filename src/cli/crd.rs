//! `evenkeel crd`: the CustomResourceDefinition of TrainingJobs.

use std::process::ExitCode;

use super::output::{self, Format};
use crate::api;

/// Print the CustomResourceDefinition of TrainingJobs, for `kubectl apply --server-side -f -`.
#[derive(clap::Args)]
pub struct Args {
    /// Print a Markdown reference of every field with its type, default and meaning
    #[arg(long)]
    fields: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.fields {
        output::print_as_is(api::fields::page()?)?
    } else {
        Format::Yaml.print(&api::crd())?
    }
    Ok(ExitCode::SUCCESS)
}
