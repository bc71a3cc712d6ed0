//! `evenkeel report`: writes a run as one self-contained HTML page.

use std::path::PathBuf;
use std::process::ExitCode;

use super::output::{print_as_is, say};
use super::{EXIT_REFUSED, run_arg};
use crate::launch::proof::{self, LedgerProof};
use crate::launch::{RunDir, report_input};
use crate::telemetry::report;
use crate::util::durable;

/// Write a run's report as one HTML page that needs no network.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel report quickstart           writes runs/quickstart/report.html
  evenkeel report quickstart --ledger  with the proof of every sample")]
pub struct Args {
    /// The run: its directory, or its name under runs/.
    run: PathBuf,
    /// Prove the sample ledger first, as `status --ledger` does, and include the result.
    #[arg(long)]
    ledger: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let run_dir = run_arg::find(&args.run)?;
    let verdict = if args.ledger {
        Some(proof::prove(&run_dir, &mut |_| {})?)
    } else {
        None
    };
    let page = write(&run_dir, verdict.as_ref())?;
    print_as_is(format_args!("{}\n", page.display()))?;
    Ok(match verdict {
        Some(verdict) if !verdict.is_proved() => {
            say(format_args!("NOT PROVED: {verdict}\n"));
            ExitCode::from(EXIT_REFUSED)
        }
        _ => ExitCode::SUCCESS,
    })
}

/// Writes the page into the run directory and returns its path.
pub fn write(run_dir: &RunDir, verdict: Option<&LedgerProof>) -> anyhow::Result<PathBuf> {
    let page = run_dir.path().join("report.html");
    let html = report::render(&report_input::report_input(run_dir, verdict)?)?;
    durable::write_atomically(&page, html.as_bytes())?;
    Ok(page)
}
