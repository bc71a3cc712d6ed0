//! `evenkeel report`: a run as one self-contained HTML page.

use std::path::PathBuf;
use std::process::ExitCode;

use super::{output, run_arg};
use crate::launch::{RunDir, view};
use crate::telemetry::report;
use crate::train::files;

/// Write a run's report as one HTML page that needs no network.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel report quickstart            writes runs/quickstart/report.html")]
pub struct Args {
    /// The run: its directory, or its name under runs/.
    run: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let page = write(&run_arg::find(&args.run)?)?;
    output::line(page.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the page into the run's directory and returns its path.
pub fn write(run: &RunDir) -> anyhow::Result<PathBuf> {
    let page = run.path().join("report.html");
    let html = report::render(&view::report_input(run, None)?);
    files::write_atomically(&page, html.as_bytes())?;
    Ok(page)
}
