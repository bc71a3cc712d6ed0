//! `evenkeel status`: the runs here, or one run and the proof of its ledger.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use super::output::{Format, line, print};
use super::table::Table;
use super::{EXIT_REFUSED, run_arg};
use crate::launch::{Phase, RunDir, RunState, proof};
use crate::telemetry::{Metric, metrics};

/// Show the runs here, or one run.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel status                      the runs under runs/
  evenkeel status quickstart           one run: plan, progress, generations
  evenkeel status quickstart --ledger  prove that every sample was consumed exactly once")]
pub struct Args {
    /// The run: its directory, or its name under runs/.
    run: Option<PathBuf>,
    /// Recompute the digests of all consumed samples from the data and compare them with what
    /// entered the forward passes.
    #[arg(long, requires = "run")]
    ledger: bool,
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.run {
        None => list(args.output),
        Some(run) => {
            let run = run_arg::find(&run)?;
            if args.ledger {
                prove(&run, args.output)
            } else {
                show(&run, args.output)
            }
        }
    }
}

/// The phase for people: a launcher that died leaves a phase behind that is no longer true.
fn phase(run: &RunDir, state: &RunState) -> String {
    match &state.phase {
        Phase::Finished => "finished".into(),
        Phase::Drained => "drained, resumable".into(),
        Phase::Failed { why } => format!("failed: {why}"),
        _ if !run.in_use() => "interrupted, resumable".into(),
        Phase::Starting => "starting".into(),
        Phase::Running => "running".into(),
        Phase::Draining => "draining".into(),
    }
}

fn list(output: Format) -> anyhow::Result<ExitCode> {
    let mut rows = Vec::new();
    for run in run_arg::all() {
        let setup = run.setup()?;
        let state = run.state()?;
        let samples = state
            .as_ref()
            .and_then(|s| s.pin.as_ref())
            .map_or(0, |pin| pin.samples);
        rows.push(json!({
            "run": run.path(),
            "recipe": setup.recipe_path,
            "phase": state.as_ref().map_or("preparing".into(), |s| phase(&run, s)),
            "generations": state.as_ref().map_or(0, |s| s.generations.len()),
            "plan": state.as_ref().and_then(|s| s.generations.last()).map(|g| g.proof.clone()),
            "committed_samples": samples,
            "budget_samples": setup.budget_samples,
        }));
    }
    if let Format::Text = output {
        if rows.is_empty() {
            line(format_args!("no runs under {}/", run_arg::RUNS))?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut table = Table::new(["run", "plan", "committed samples", "generations", "phase"]);
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
        for row in &rows {
            table.row([
                text(&row["run"]),
                text(&row["plan"]),
                format!("{} of {}", row["committed_samples"], row["budget_samples"]),
                row["generations"].to_string(),
                text(&row["phase"]),
            ]);
        }
        print(format_args!("{}", table.render()))?;
    } else {
        output.print(&rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn show(run: &RunDir, output: Format) -> anyhow::Result<ExitCode> {
    let setup = run.setup()?;
    let Some(state) = run.state()? else {
        if output == Format::Text {
            line(format_args!("{}: being prepared", run.path().display()))?;
        } else {
            output.print(&json!({"run": run.path(), "phase": "preparing"}))?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    let latest = state
        .generations
        .iter()
        .rev()
        .find_map(|g| last_step(run, g.number));
    if output != Format::Text {
        output.print(&json!({
            "run": run.path(),
            "recipe": setup.recipe_path,
            "phase": phase(run, &state),
            "global_batch_size": setup.global_batch_size,
            "budget_samples": setup.budget_samples,
            "micro_batch_limit": state.micro_limit,
            "committed": state.pin,
            "last_step": latest,
            "generations": state.generations,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    line(format_args!(
        "{}: {}",
        run.path().display(),
        phase(run, &state)
    ))?;
    line(format_args!(
        "  recipe      {}",
        setup.recipe_path.display()
    ))?;
    line(format_args!(
        "  batch       {} samples",
        setup.global_batch_size
    ))?;
    if let Some(limit) = state.micro_limit {
        line(format_args!(
            "  memory      micro-batches above {limit} ran out of it; a resume with --rank-memory \
             tries them again"
        ))?;
    }
    if let Some(step) = &latest {
        line(format_args!(
            "  progress    {} of {} samples, step {}, loss {:.4}, batch {}",
            step.samples, setup.budget_samples, step.step, step.loss, step.batch
        ))?;
    }
    match &state.pin {
        Some(pin) => line(format_args!(
            "  checkpoint  {} ({} samples)",
            pin.path, pin.samples
        ))?,
        None => line(format_args!("  checkpoint  none yet"))?,
    }
    let mut table = Table::new(["generation", "plan", "from sample", "first step", "why"]);
    for row in &state.generations {
        let seconds = row.first_step_seconds;
        table.row([
            row.number.to_string(),
            row.proof.clone(),
            row.start_samples.to_string(),
            seconds.map_or("–".into(), |s| format!("{s:.1} s")),
            row.reason.to_string(),
        ]);
    }
    print(format_args!("\n{}", table.render()))?;
    Ok(ExitCode::SUCCESS)
}

fn last_step(run: &RunDir, generation: u64) -> Option<crate::telemetry::StepRecord> {
    let read = metrics::read(&run.metrics(generation)).ok()?;
    read.metrics.into_iter().rev().find_map(|m| match m {
        Metric::Step(step) => Some(step),
        Metric::Evaluation(_) => None,
    })
}

fn prove(run: &RunDir, output: Format) -> anyhow::Result<ExitCode> {
    let verdict = proof::prove(run, &mut |_| {})?;
    let proved = verdict.is_proved();
    if output == Format::Text {
        let mark = if proved { "proved" } else { "NOT PROVED" };
        line(format_args!("{mark}: {verdict}"))?;
        line(format_args!("  checkpoint {}", verdict.checkpoint))?;
    } else {
        output.print(&json!({
            "proved": proved,
            "checkpoint": verdict.checkpoint,
            "verdict": verdict.to_string(),
            "samples": verdict.samples(),
        }))?;
    }
    Ok(if proved {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_REFUSED)
    })
}
