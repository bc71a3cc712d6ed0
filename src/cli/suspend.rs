//! `evenkeel suspend`, `resume` and `cancel`: stop a run or job, until it is resumed or permanently.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::cluster::{cancel, suspend};
use super::output::{line, say};
use super::recipe_args::STANDARD_INPUT;
use super::run_arg::{Found, Target, refuse_for_job};
use super::{EXIT_REFUSED, first_set, launch, slurm};
use crate::launch::{Phase, RunDir, RunLock, Stop, Wanted};
use crate::plan::MOST_GPUS;

/// Poll interval of the run's state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The run or job to stop.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel suspend quickstart         commit a checkpoint and stop, as Ctrl-C
  evenkeel resume quickstart          continue it
  evenkeel cancel quickstart          stop it permanently; files stay
  evenkeel suspend first -n training  a TrainingJob: its GPUs are free")]
pub struct SuspendArgs {
    /// Stop waiting for a run after this many seconds; the request stays [default: 300]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    #[command(flatten)]
    target: Target,
}

/// The run or job to continue.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel resume quickstart            with recipe and options of its launch
  evenkeel resume quickstart --procs 4  on 4 processes, the same global batch
  evenkeel resume zephyr --nodes 4      on Slurm: jobs of 4 nodes
  evenkeel resume first -n training     a TrainingJob")]
pub struct ResumeArgs {
    /// Number of training processes of a run. Default: as launched
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_GPUS))]
    procs: Option<u64>,
    /// Number of nodes of a run on Slurm. Default: as launched
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    nodes: Option<u64>,
    #[command(flatten)]
    target: Target,
}

pub fn suspend(args: SuspendArgs) -> anyhow::Result<ExitCode> {
    stop(args, Stop::Suspend)
}

pub fn cancel(args: SuspendArgs) -> anyhow::Result<ExitCode> {
    stop(args, Stop::Cancel)
}

fn stop(args: SuspendArgs, stop: Stop) -> anyhow::Result<ExitCode> {
    let found = args.target.find(true);
    let has_begun = matches!(found, Ok(Found::Run(_)));
    if stop == Stop::Cancel && !has_begun && slurm::cancel_queued(Path::new(&args.target.name()))? {
        line(format_args!(
            "{} is cancelled; it had not begun",
            args.target.name()
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    let run_dir = match found? {
        Found::Run(run_dir) => run_dir,
        Found::Job(job) => {
            refuse_for_job(args.timeout.map(|_| "--timeout"))?;
            match stop {
                Stop::Suspend => suspend::suspend(&job, &args.target.cluster)?,
                Stop::Cancel => cancel::run(&job, &args.target.cluster)?,
            }
            return Ok(ExitCode::SUCCESS);
        }
    };
    let request = if run_dir.in_use()? {
        let request = run_dir.request(Wanted::Stop(stop), None)?.request;
        wait(&run_dir, request, args.timeout.unwrap_or(300))?;
        Some(request)
    } else {
        None
    };
    slurm::end_queued(&run_dir)?;
    if stop == Stop::Cancel {
        settle(&run_dir)?;
    }
    report(&run_dir, stop, request)
}

/// Waits until the launcher has ended, or a newer request has replaced this one.
fn wait(run_dir: &RunDir, request: u64, timeout: u64) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(timeout);
    while run_dir.in_use()? {
        if run_dir
            .desired()?
            .is_some_and(|newer| newer.request > request)
        {
            bail!(
                "the request was replaced by a newer one; `evenkeel status {}` shows its progress",
                run_dir.path().display()
            );
        }
        if Instant::now() > deadline {
            bail!(
                "it has not stopped after {timeout} s; the request stays, and `evenkeel status {}` shows its progress",
                run_dir.path().display()
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Marks a run without a launcher as cancelled, unless it is finished.
fn settle(run_dir: &RunDir) -> anyhow::Result<()> {
    let run_lock = RunLock::take(run_dir.clone())?;
    let mut state = run_lock.run_dir().state()?.unwrap_or_default();
    if state.phase != Phase::Finished {
        state.phase = Phase::Cancelled;
        run_lock.run_dir().write_state(&state)?;
    }
    Ok(())
}

/// Prints how the run has ended. `request`: the number of the request, if a launcher had to stop.
fn report(run_dir: &RunDir, stop: Stop, request: Option<u64>) -> anyhow::Result<ExitCode> {
    let place = run_dir.path().display();
    let state = run_dir.state()?.unwrap_or_default();
    let samples = state.committed_samples();
    match (&state.phase, stop) {
        (Phase::Finished, _) => line(format_args!("{place} is finished"))?,
        (Phase::Failed { message }, Stop::Suspend) => {
            say(format_args!(
                "error: the run failed: {message}; `evenkeel resume {place}` continues where it stopped\n"
            ));
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        (Phase::Cancelled, _) => line(format_args!(
            "{place} is cancelled after {samples} samples; its files stay"
        ))?,
        (Phase::Drained, _) if request.is_some() => line(format_args!(
            "{place} is suspended after {samples} samples; `evenkeel resume {place}` continues it"
        ))?,
        _ if request.is_none() => line(format_args!(
            "{place} does not run; `evenkeel resume {place}` continues it after {samples} samples"
        ))?,
        _ => {
            say(format_args!(
                "error: the launcher ended before a checkpoint of this stop; `evenkeel resume {place}` continues it \
                 after {samples} samples\n"
            ));
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub fn resume(args: ResumeArgs) -> anyhow::Result<ExitCode> {
    let run_dir = match args.target.find(true)? {
        Found::Run(run_dir) => run_dir,
        Found::Job(job) => {
            let of_runs = [
                ("--procs", args.procs.is_some()),
                ("--nodes", args.nodes.is_some()),
            ];
            refuse_for_job(first_set(&of_runs))?;
            suspend::resume(&job, &args.target.cluster)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let run = run_dir.run()?;
    let out = std::path::absolute(run_dir.path())?;
    if ["-", STANDARD_INPUT]
        .map(Path::new)
        .contains(&run.recipe_path.as_path())
    {
        bail!(
            "{} was launched from standard input; `evenkeel launch - --resume --out {}` reads the recipe from there again",
            run_dir.path().display(),
            out.display()
        );
    }
    if run.command_line.is_empty() {
        bail!(
            "{} was launched by an older version, which did not record its command; `evenkeel launch {} … --resume \
             --out {}` continues it",
            run_dir.path().display(),
            run.recipe_path.display(),
            out.display()
        );
    }
    std::env::set_current_dir(&run.base).with_context(|| {
        format!(
            "cannot change to {}, where it was launched",
            run.base.display()
        )
    })?;
    let hosts = run_dir.desired()?.and_then(|desired| desired.hosts);
    let changes = launch::Changes {
        procs: args.procs,
        nodes: args.nodes,
        hosts,
    };
    launch::again(&run.command_line, &out, changes)
}
