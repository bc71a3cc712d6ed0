//! `evenkeel resize`: requests another number of ranks for a run and waits until it has moved, or another number of
//! nodes for a job.

use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;

use super::EXIT_REFUSED;
use super::cluster::scale;
use super::output::{Unprinted, line, say};
use super::run_arg::{Found, Target, refuse_for_job};
use super::{first_set, launch, parse_launch};
use crate::launch::hosts::{self, Listed};
use crate::launch::run_dir::GenerationRow;
use crate::launch::{LaunchError, Phase, RunDir, RunState, Wanted, refuse_ended, worlds};
use crate::plan::{DeviceKind, MOST_GPUS};
use crate::recipe::Sources;

/// Poll interval of the run's state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Move a run to another number of processes or to other hosts, or a TrainingJob to another number of nodes, at the
/// same global batch.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel resize quickstart 4            to 4 processes; wait until it trains
  evenkeel resize runs/quickstart 1       a directory also selects a run
  evenkeel resize quickstart 3 --no-wait  request it and return immediately
  evenkeel resize zephyr --hosts +h9,-h3  by SSH: h9 joins, and h3 leaves
  evenkeel resize first 4 -n training     a TrainingJob to at most 4 nodes")]
pub struct Args {
    /// New number of processes of a run, or of nodes of a TrainingJob. Default with --hosts: as many as they have room for
    #[arg(index = 2, value_name = "COUNT", required_unless_present = "hosts", value_parser = clap::value_parser!(u64).range(1..=MOST_GPUS))]
    processes: Option<u64>,
    /// Hosts that join (+) or leave (-) a run by SSH, with commas between them, or all of its hosts as after `--on ssh:`
    #[arg(long, value_name = "HOSTS", allow_hyphen_values = true)]
    hosts: Option<String>,
    /// Return as soon as the request is written.
    #[arg(long)]
    no_wait: bool,
    /// Stop waiting after this many seconds; the request stays [default: 120].
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    #[command(flatten)]
    target: Target,
}

/// What is requested of a run.
struct Asked {
    processes: Option<u64>,
    /// Names of its hosts, if they change.
    hosts: Option<Vec<String>>,
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let processes = self.processes.map(|count| DeviceKind::Cpu.count(count));
        let hosts = self.hosts.as_ref().map(|hosts| hosts.join(", "));
        match (processes, hosts) {
            (Some(processes), Some(hosts)) => write!(f, "{processes} on {hosts}"),
            (processes, hosts) => f.write_str(&processes.or(hosts).unwrap_or_default()),
        }
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let run_dir = match args.target.find(true)? {
        Found::Run(run_dir) => run_dir,
        Found::Job(job) => {
            let of_runs = [
                ("--no-wait", args.no_wait),
                ("--timeout", args.timeout.is_some()),
                ("--hosts", args.hosts.is_some()),
            ];
            refuse_for_job(first_set(&of_runs))?;
            let nodes = u32::try_from(args.processes.unwrap_or_default())?;
            scale::run(&job, &args.target.cluster, nodes)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let formula = args
        .processes
        .map(|count| worlds::formula_of_run(&run_dir, count));
    let formula = match formula.transpose() {
        Err(LaunchError::Refused(refused)) => {
            super::render::print(&refused.findings, &Sources::default());
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        formula => formula?,
    };
    if let Some(state) = run_dir.state()? {
        refuse_ended(&run_dir, &run_dir.run()?, &state)?;
    }
    let hosts = args
        .hosts
        .as_deref()
        .map(|change| changed(&run_dir, change));
    let hosts = hosts.transpose()?;
    let place = run_dir.path().display();
    let launcher_works = run_dir.in_use()?;
    if let Some(processes) = args.processes.filter(|_| !launcher_works) {
        bail!(
            "no launcher runs in {place}; `evenkeel resume {place} --procs {processes}` continues with {}",
            DeviceKind::Cpu.count(processes),
        );
    }
    let before = run_dir.state()?.map_or(0, |s| s.generations.len());
    let wanted = args.processes.map_or(Wanted::All, Wanted::Ranks);
    let listed = hosts.as_deref().map(hosts::written);
    let request = run_dir.request(wanted, listed)?.request;
    let names = hosts.map(|hosts| hosts.iter().map(Listed::to_string).collect());
    let asked = Asked {
        processes: args.processes,
        hosts: names,
    };
    if !launcher_works {
        line(format_args!(
            "no launcher runs; `evenkeel resume {place}` continues on {asked}"
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    let formula = formula.map_or(String::new(), |formula| format!(": {formula}"));
    line(format_args!("requested {asked}{formula}"))?;
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    let timeout = args.timeout.unwrap_or(120);
    wait(&run_dir, &asked, request, before, timeout)
}

/// The hosts of a run after a change.
fn changed(run_dir: &RunDir, change: &str) -> anyhow::Result<Vec<Listed>> {
    let run = run_dir.run()?;
    let kept = run_dir.desired()?.and_then(|desired| desired.hosts);
    // A pod or an older version has recorded no words.
    let launched = parse_launch(&run.command_line).ok();
    let launched = launched.as_ref().and_then(launch::Args::listed_hosts);
    let Some(launched) = launched else {
        bail!(
            "`--hosts` changes the hosts of a run by SSH, and {} was launched without `--on ssh:`; remove it",
            run_dir.path().display()
        );
    };
    let listed = match kept {
        Some(kept) => kept,
        // A file's name is relative to the directory of the launch.
        None if run.base.join(launched).is_file() => run.base.join(launched).display().to_string(),
        None => launched.to_owned(),
    };
    Ok(hosts::changed(&hosts::read(&listed)?, change)?)
}

fn wait(
    run_dir: &RunDir,
    asked: &Asked,
    request: u64,
    before: usize,
    timeout: u64,
) -> anyhow::Result<ExitCode> {
    let place = run_dir.path().display();
    let deadline = Instant::now() + Duration::from_secs(timeout);
    while Instant::now() < deadline {
        let launcher_works = run_dir.in_use()?;
        if let Some(state) = run_dir.state()? {
            match end(&state, request, launcher_works) {
                Some(Some(message)) => {
                    say(format_args!(
                        "error: the run failed: {message}; `evenkeel resume {place}` continues where it stopped\n"
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
                && asked.is_met(&state, row.world)
                && (state.generations.len() == before || row.trains())
            {
                print_generation(row, state.generations.len() == before)?;
                return asked.report_absent(&state);
            }
        }
        if let Some(newer) = run_dir.desired()?.filter(|newer| newer.request > request) {
            say(format_args!(
                "error: request {request} for {asked} was replaced by request {} for {}; `evenkeel status \
                 {place}` shows its progress\n",
                newer.request, newer.wanted,
            ));
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        if !launcher_works {
            let procs = asked
                .processes
                .map_or(String::new(), |count| format!(" --procs {count}"));
            bail!(
                "the launcher has ended; `evenkeel resume {place}{procs}` continues with {asked}"
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    bail!("not done after {timeout} s; the request stays, and `evenkeel status` shows its progress")
}

impl Asked {
    /// Whether a run of this world is what was requested, or as near to it as the hosts allow.
    fn is_met(&self, state: &RunState, world: u64) -> bool {
        let known = self.hosts.as_ref().is_none_or(|asked| {
            let rows = state.hosts.iter().filter(|row| row.is_settled());
            let known: Vec<&String> = rows.map(|row| &row.name).collect();
            asked.iter().all(|name| known.contains(&name)) && known.len() == asked.len()
        });
        known && (self.hosts.is_some() || self.processes == Some(world))
    }

    /// Names the hosts that are not there.
    fn report_absent(&self, state: &RunState) -> anyhow::Result<ExitCode> {
        let rows = state.hosts.iter().filter(|_| self.hosts.is_some());
        let problems: Vec<&String> = rows.filter_map(|row| row.problem.as_ref()).collect();
        for problem in &problems {
            say(format_args!("error: {problem}\n"));
        }
        Ok(match problems.is_empty() {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(EXIT_REFUSED),
        })
    }
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
