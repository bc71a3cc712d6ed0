//! `evenkeel logs`: the progress of a run or job, or the output of one of its ranks.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;

use super::cluster::logs::{self, Asked};
use super::output::{Unprinted, line};
use super::run_arg::{Found, Target};
use super::status;
use crate::launch::RunDir;
use crate::launch::run_dir::GenerationRow;
use crate::lifecycle::files;
use crate::telemetry::{Display, Event, Metric, Mode};
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
    ///
    /// Without it: the steps of the built-in trainer, or what rank 0 of your program prints.
    #[arg(long, value_name = "R")]
    rank: Option<u64>,
    /// Show the steps also of a program that reports them
    #[arg(long, conflicts_with = "rank")]
    steps: bool,
    /// Follow until the end; Ctrl-C leaves the run or job running
    #[arg(short, long)]
    follow: bool,
    #[command(flatten)]
    target: Target,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let asked = match args.rank {
        Some(rank) => Asked::Rank(rank),
        None if args.steps => Asked::Steps,
        None => Asked::WhatTheTrainerHas,
    };
    let follow = args.follow;
    match args.target.find(false)? {
        Found::Job(job) => logs::run(&job, &args.target.cluster, asked, follow),
        Found::Run(run_dir) => match asked.rank_of(run_dir.run()?.built_in.is_none()) {
            Some(rank) => output(&run_dir, rank, follow),
            None => progress(&run_dir, follow),
        },
    }
}

/// Prints a rank's output in the newest generation; `follow`: and in later ones.
fn output(run_dir: &RunDir, rank: u64, follow: bool) -> anyhow::Result<ExitCode> {
    let mut opened: Option<(u64, File)> = None;
    loop {
        // Asked before reading, so that the last lines are read after the end.
        let runs = follow && run_dir.in_use()?;
        let generation = run_dir.last_generation(&run_dir.state()?.unwrap_or_default())?;
        if let Some((_, file)) = &mut opened {
            copy(file)?;
        }
        if opened
            .as_ref()
            .is_none_or(|(number, _)| *number < generation)
        {
            let path = run_dir.path().join(files::rank_log(generation, rank));
            match input::open(&path) {
                Ok(file) => {
                    let (_, file) = opened.insert((generation, file));
                    copy(file)?;
                }
                // A smaller world does not have the rank.
                Err(_) if runs || opened.is_some() => {}
                Err(_) => bail!(
                    "{}: rank {rank} has no output in generation {generation}",
                    path.display()
                ),
            }
        }
        if !runs {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Prints the rest of a file.
fn copy(file: &mut File) -> anyhow::Result<()> {
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let mut out = std::io::stdout().lock();
    let printed = out.write_all(&text).and_then(|()| out.flush());
    Ok(printed.map_err(Unprinted)?)
}

/// Prints the steps and evaluations of all generations.
fn progress(run_dir: &RunDir, follow: bool) -> anyhow::Result<ExitCode> {
    let run = run_dir.run()?;
    let mut display = Display::new(if follow { Mode::detect() } else { Mode::Plain });
    let mut generations: Vec<MetricsTail> = Vec::new();
    loop {
        let runs = follow && run_dir.in_use()?;
        let state = run_dir.state()?.unwrap_or_default();
        for row in state.generations.iter().skip(generations.len()) {
            if let Some(last) = generations.last_mut() {
                last.show(&mut display)?;
            } else {
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
            display.event(&started(row));
            generations.push(MetricsTail::of(run_dir.metrics(row.number)));
        }
        if let Some(newest) = generations.last_mut() {
            newest.show(&mut display)?;
        }
        if !runs {
            drop(display);
            if follow {
                line(format_args!(
                    "{}: {}",
                    run_dir.path().display(),
                    status::activity(run_dir)?
                ))?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A generation's metrics file, which grows.
struct MetricsTail {
    path: PathBuf,
    /// `None`: it does not exist yet.
    file: Option<File>,
    /// The beginning of a line that is not written to its end.
    rest: String,
}

impl MetricsTail {
    fn of(path: PathBuf) -> MetricsTail {
        MetricsTail {
            path,
            file: None,
            rest: String::new(),
        }
    }

    /// Shows what was added since the last call. A damaged line is skipped, as in a report.
    fn show(&mut self, display: &mut Display) -> anyhow::Result<()> {
        if self.file.is_none() {
            self.file = input::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        file.read_to_string(&mut self.rest)?;
        let whole = self.rest.rfind('\n').map_or(0, |end| end + 1);
        let lines: String = self.rest.drain(..whole).collect();
        for metric in lines
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
        {
            display.event(&match metric {
                Metric::Step(step) => Event::Step(step),
                Metric::Evaluation(evaluation) => Event::Evaluation(evaluation),
            });
        }
        Ok(())
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
