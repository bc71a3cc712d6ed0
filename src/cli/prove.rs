//! `evenkeel prove`: proves the ledger of a TrainingJob and writes the verdict where its controller reads it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

use super::EXIT_REFUSED;
use super::output::print_as_is;
use crate::bucket::Bucket;
use crate::launch::{RunDir, proof};
use crate::lifecycle::CheckpointRef;
use crate::lifecycle::verdict::Verdict;
use crate::train::{TrainState, checkpoint_ref, run_files};

/// Prove the ledger of a TrainingJob (started by its controller).
#[derive(clap::Args)]
pub struct Args {
    /// The run directory.
    #[arg(long)]
    run: PathBuf,
    /// Reference to the checkpoint, as JSON.
    #[arg(long)]
    checkpoint: String,
    /// Bucket that pods without a common volume share, with the run's prefix.
    #[arg(long, env = "EVENKEEL_BUCKET", value_name = "URL")]
    bucket: Option<String>,
    /// File for the verdict as JSON.
    #[arg(long, default_value = "/dev/termination-log")]
    report: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let report = |text: String| {
        std::fs::write(&args.report, text)
            .with_context(|| format!("writing {}", args.report.display()))
    };
    let verdict = match prove(&args) {
        Ok(verdict) => verdict,
        Err(error) => {
            report(super::with_causes(&error))?;
            return Err(error);
        }
    };
    report(serde_json::to_string(&verdict)?)?;
    print_as_is(format_args!("{}\n", verdict.verdict))?;
    Ok(if verdict.proved {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_REFUSED)
    })
}

fn prove(args: &Args) -> anyhow::Result<Verdict> {
    let checkpoint: CheckpointRef =
        serde_json::from_str(&args.checkpoint).context("reading --checkpoint")?;
    let state = match &args.bucket {
        Some(url) => run_files::bring_proof(&Bucket::open(url)?, &args.run, &checkpoint)?,
        // Weights are verified when they are loaded.
        None => TrainState::from_checkpoint(&checkpoint_ref::open_lazily(&args.run, &checkpoint)?)?,
    };
    let run_dir = RunDir::at(&args.run);
    let proof = proof::prove_history(&run_dir, &checkpoint.path, state, &mut |_| {})?;
    Ok(proof.verdict())
}
