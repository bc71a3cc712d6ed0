//! `evenkeel resize`: requests another number of ranks for a run and waits until it has moved, or another number of
//! nodes for a job.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;

use super::EXIT_REFUSED;
use super::cluster::scale;
use super::first_set;
use super::output::{Unprinted, line, say};
use super::run_arg::{Found, Target, refuse_for_job};
use crate::launch::run_dir::GenerationRow;
use crate::launch::{LaunchError, Phase, RunDir, RunState, Wanted, refuse_ended, worlds};
use crate::plan::{DeviceKind, MOST_GPUS};
use crate::recipe::Sources;

/// Poll interval of the run's state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Move a run to another number of processes, or a TrainingJob to another number of nodes, at the same global
/// batch.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel resize quickstart 4            to 4 processes; wait until it trains
  evenkeel resize runs/quickstart 1       a directory also selects a run
  evenkeel resize quickstart 3 --no-wait  request it and return immediately
  evenkeel resize first 4 -n training     a TrainingJob to at most 4 nodes")]
pub struct Args {
    /// New number of processes of a run, or of nodes of a TrainingJob
    #[arg(index = 2, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=MOST_GPUS))]
    processes: u64,
    /// Return as soon as the request is written.
    #[arg(long)]
    no_wait: bool,
    /// Stop waiting after this many seconds; the request stays [default: 120].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    #[command(flatten)]
    target: Target,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let run_dir = match args.target.find(true)? {
        Found::Run(run_dir) => run_dir,
        Found::Job(job) => {
            let of_runs = [
                ("--no-wait", args.no_wait),
                ("--timeout", args.timeout.is_some()),
            ];
            refuse_for_job(first_set(&of_runs))?;
            let nodes = u32::try_from(args.processes)?;
            scale::run(&job, &args.target.cluster, nodes)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let formula = match worlds::formula_of_run(&run_dir, args.processes) {
        Err(LaunchError::Refused(refused)) => {
            super::render::print(&refused.findings, &Sources::default());
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        formula => formula?,
    };
    if let Some(state) = run_dir.state()? {
        refuse_ended(&run_dir, &run_dir.run()?, &state)?;
    }
    if !run_dir.in_use()? {
        bail!(
            "no launcher runs in {place}; `evenkeel resume {place} --procs {n}` continues with {processes}",
            place = run_dir.path().display(),
            n = args.processes,
            processes = DeviceKind::Cpu.count(args.processes),
        );
    }
    let before = run_dir.state()?.map_or(0, |s| s.generations.len());
    let desired = run_dir.request(Wanted::Ranks(args.processes))?;
    let devices = DeviceKind::Cpu.count(args.processes);
    line(format_args!("requested {devices}: {formula}"))?;
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    wait(
        &run_dir,
        args.processes,
        desired.request,
        before,
        args.timeout.unwrap_or(120),
    )
}

fn wait(
    run_dir: &RunDir,
    processes: u64,
    request: u64,
    before: usize,
    timeout: u64,
) -> anyhow::Result<ExitCode> {
    let deadline = Instant::now() + Duration::from_secs(timeout);
    while Instant::now() < deadline {
        let launcher_works = run_dir.in_use()?;
        if let Some(state) = run_dir.state()? {
            match end(&state, request, launcher_works) {
                Some(Some(message)) => {
                    say(format_args!(
                        "error: the run failed: {message}; `evenkeel resume {}` continues where it stopped\n",
                        run_dir.path().display()
                    ));
                    return Ok(ExitCode::from(EXIT_REFUSED));
                }
                Some(None) => {
                    line("the run has ended meanwhile")?;
                    return Ok(ExitCode::SUCCESS);
                }
                None => {}
            }
            let answered = state.request >= request && state.phase == Phase::Running;
            if let Some(row) = state.generations.last().filter(|_| answered)
                && row.world == processes
                && (state.generations.len() == before || row.trains())
            {
                print_generation(row, state.generations.len() == before)?;
                return Ok(ExitCode::SUCCESS);
            }
        }
        if let Some(newer) = run_dir.desired()?.filter(|newer| newer.request > request) {
            say(format_args!(
                "error: request {request} for {} was replaced by request {} for {}; `evenkeel status \
                 {}` shows its progress\n",
                DeviceKind::Cpu.count(processes),
                newer.request,
                newer.wanted,
                run_dir.path().display()
            ));
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        if !launcher_works {
            bail!(
                "the launcher has ended; `evenkeel resume {} --procs {processes}` continues with {}",
                run_dir.path().display(),
                DeviceKind::Cpu.count(processes)
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    bail!("not done after {timeout} s; the request stays, and `evenkeel status` shows its progress")
}

/// Whether the run has ended since the request, and the reason of a failure. While a launcher
/// prepares a resume, the stored state still describes the previous launch.
fn end(state: &RunState, request: u64, launcher_works: bool) -> Option<Option<&str>> {
    let answered = state.request >= request;
    match &state.phase {
        Phase::Failed { message } if answered || !launcher_works => Some(Some(message)),
        Phase::Finished if answered || !launcher_works => Some(None),
        Phase::Drained | Phase::Cancelled if answered => Some(None),
        _ => None,
    }
}

fn print_generation(row: &GenerationRow, unchanged: bool) -> Result<(), Unprinted> {
    let how = match row.first_step_seconds {
        _ if unchanged => ", as before, without a rescale".to_owned(),
        Some(seconds) => format!(", first step after {seconds:.1} s"),
        None => String::new(),
    };
    line(format_args!(
        "generation {} trains: {}{how}",
        row.number, row.formula
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_earlier_launch_does_not_end_a_preparing_one() {
        let state = |phase, request| RunState {
            phase,
            request,
            ..RunState::default()
        };
        let failed = || Phase::Failed {
            message: "no memory".to_owned(),
        };
        for phase in [Phase::Drained, failed(), Phase::Finished] {
            assert_eq!(end(&state(phase, 1), 2, true), None);
        }
        assert_eq!(end(&state(Phase::Drained, 2), 2, true), Some(None));
        let requested = state(failed(), 2);
        assert_eq!(end(&requested, 2, true), Some(Some("no memory")));
        // No launcher is left to answer.
        let left = state(failed(), 1);
        assert_eq!(end(&left, 2, false), Some(Some("no memory")));
        assert_eq!(end(&state(Phase::Running, 2), 2, true), None);
    }
}
