//! `evenkeel logs`: the progress of a run or job, or the output of one of its ranks.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;

use super::cluster::logs;
use super::output::Unprinted;
use super::run_arg::{Found, Target};
use crate::launch::RunDir;
use crate::launch::run_dir::GenerationRow;
use crate::lifecycle::files;
use crate::telemetry::{Display, Event, Metric, Mode, metrics};
use crate::util::input;

/// Poll interval of a run's files.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Show the progress of a run or TrainingJob, or the output of a rank.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel logs quickstart         the steps of a run on this machine
  evenkeel logs -f first           follow a TrainingJob with progress bars
  evenkeel logs first --rank 3     output of rank 3")]
pub struct Args {
    /// Show the output of this rank of the newest generation
    #[arg(long, value_name = "R")]
    rank: Option<u64>,
    /// Follow until the end; Ctrl-C leaves the run or job running
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    target: Target,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match (args.target.find(false)?, args.rank) {
        (Found::Job(job), rank) => {
            let follow = args.follow;
            logs::run(&job, &args.target.cluster, &logs::Shown { rank, follow })
        }
        (Found::Run(run_dir), Some(rank)) => output(&run_dir, rank, args.follow),
        (Found::Run(run_dir), None) => progress(&run_dir, args.follow),
    }
}

/// Prints a rank's output in the newest generation.
fn output(run_dir: &RunDir, rank: u64, follow: bool) -> anyhow::Result<ExitCode> {
    let state = run_dir.state()?.unwrap_or_default();
    let generation = run_dir.last_generation(&state)?;
    let path = run_dir.path().join(files::rank_log(generation, rank));
    let Ok(mut file) = input::open(&path) else {
        bail!(
            "{}: rank {rank} has no output in generation {generation}",
            path.display()
        );
    };
    loop {
        // Asked before reading, so that the last lines are read after the end.
        let runs = follow && run_dir.in_use()?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let mut out = std::io::stdout().lock();
        out.write_all(&text)
            .and_then(|()| out.flush())
            .map_err(Unprinted)?;
        if !runs {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Prints the steps and evaluations of all generations.
fn progress(run_dir: &RunDir, follow: bool) -> anyhow::Result<ExitCode> {
    let run = run_dir.run()?;
    let mut display = Display::new(if follow { Mode::detect() } else { Mode::Plain });
    let mut shown = Vec::new();
    let mut planned = false;
    loop {
        let runs = follow && run_dir.in_use()?;
        let state = run_dir.state()?.unwrap_or_default();
        for (index, row) in state.generations.iter().enumerate() {
            if !std::mem::replace(&mut planned, true) {
                display.event(&Event::Planned {
                    name: run_dir.path().display().to_string(),
                    formula: row.formula.clone(),
                    world: row.world,
                    global_batch: run.global_batch_size,
                    budget: run.horizon.budget_samples.unwrap_or_default(),
                    devices: run.runner().device().count(row.world),
                    floor: run.built_in.as_ref().and_then(|it| it.entropy),
                });
            }
            if shown.len() == index {
                shown.push(0);
                display.event(&started(row));
            }
            let path = run_dir.metrics(row.number);
            if !path.exists() {
                continue;
            }
            let recorded = metrics::read(&path)?.metrics;
            for metric in recorded.iter().skip(shown[index]) {
                display.event(&match metric {
                    Metric::Step(step) => Event::Step(step.clone()),
                    Metric::Evaluation(evaluation) => Event::Evaluation(evaluation.clone()),
                });
            }
            shown[index] = recorded.len().max(shown[index]);
        }
        if !runs {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn started(row: &GenerationRow) -> Event {
    Event::GenerationStarted {
        generation: row.number,
        world: row.world,
        formula: row.formula.clone(),
        reason: row.reason.to_string(),
        start_samples: row.start_samples.unwrap_or_default(),
    }
}
