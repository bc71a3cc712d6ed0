//! `evenkeel schema`: JSON schemas for editors.

use std::process::ExitCode;

use super::output::Format;
use crate::{api, recipe};

/// Print the JSON schema of a recipe or TrainingJob, for editors.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel schema recipe > recipe.schema.json
  evenkeel schema trainingjob > trainingjob.schema.json

An editor with a YAML language server checks a file and completes its keys if the
file's first line names the schema, by a path beside it or a URL:
  # yaml-language-server: $schema=recipe.schema.json")]
pub struct Args {
    /// What the schema is of
    #[arg(value_enum)]
    of: Of,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Of {
    /// A recipe in Evenkeel's own form
    Recipe,
    /// A TrainingJob, with its status
    #[value(name = "trainingjob", alias = "tj")]
    TrainingJob,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let schema = match args.of {
        Of::Recipe => recipe::native_schema(),
        Of::TrainingJob => api::json_schema()?,
    };
    Format::Json.print(&schema)?;
    Ok(ExitCode::SUCCESS)
}
