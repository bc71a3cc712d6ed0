//! `evenkeel status`: lists the runs, or shows one run and proves its sample ledger.

use std::fmt;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::json;

use super::EXIT_REFUSED;
use super::cluster::{self, ClusterArgs};
use super::output::{Format, line, print, width};
use super::run_arg::{self, Found, Target};
use super::slurm;
use super::table::Table;
use crate::launch::hosts::slurm::jobs::Queued;
use crate::launch::hosts::slurm::submission;
use crate::launch::run_dir::GenerationRow;
use crate::launch::{LaunchError, Phase, RunDir, RunState, history, proof};
use crate::telemetry::{Pace, StepRecord, human};
use crate::util::format::count;

/// List the runs here, or show one run.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel status                      the runs under runs/
  evenkeel status quickstart           one run: plan, progress, generations
  evenkeel status quickstart --watch   again every two seconds until it ends
  evenkeel status quickstart --ledger  prove that every sample counted once
  evenkeel status first -n training --ledger
                                       the same of a job, in a pod of it
  evenkeel status first -n training    a TrainingJob on a cluster")]
pub struct Args {
    /// A run on this machine, by its directory or name, or the name of a TrainingJob.
    run: Option<PathBuf>,
    /// Take the run on this machine if a TrainingJob has the same name
    #[arg(long, requires = "run", conflicts_with_all = ["namespace", "context", "kubeconfig"])]
    local: bool,
    /// Recompute the digests of all consumed samples from the data and compare them with those
    /// recorded in the forward passes. Also prints the checksum of the newest checkpoint's weights.
    #[arg(long, requires = "run")]
    ledger: bool,
    /// Show it again every two seconds until it ends.
    #[arg(short, long, requires = "run", conflicts_with = "ledger")]
    watch: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Time between two views of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// What a command that shows a run or job found.
pub struct View {
    pub code: ExitCode,
    /// The run or job has ended.
    pub ended: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some(name) = args.run else {
        if args.cluster.is_selected() {
            return cluster::list::list(&args.cluster, false, args.output);
        }
        return list(args.output);
    };
    let target = Target::named(name.clone(), args.local, &args.cluster);
    if args.ledger {
        return match &target.find(false)? {
            Found::Run(run_dir) => prove(run_dir, args.output),
            Found::Job(job) => cluster::ledger::run(job, &args.cluster, args.output),
        };
    }
    loop {
        let found = target.find(false);
        let job = found.as_ref().err().and_then(|_| slurm::queued(&name));
        if args.watch && args.output == Format::Text && std::io::stdout().is_terminal() {
            // The cursor to the first line, and an empty screen.
            print("\x1b[H\x1b[2J")?;
        }
        let view = match (job, found) {
            (Some(job), _) => show_queued(&name, &job, args.output)?,
            (None, Ok(Found::Run(run_dir))) => show(&run_dir, args.output)?,
            (None, Ok(Found::Job(job))) => cluster::show::run(&job, &args.cluster, args.output)?,
            (None, Err(error)) => return Err(error),
        };
        if !args.watch || view.ended {
            return Ok(view.code);
        }
        std::thread::sleep(WATCH_INTERVAL);
    }
}

/// Current activity of a run. A launcher that died leaves an outdated phase in the state.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Activity {
    /// `queued`, `preparing`, `waiting`, or one of [`Phase`].
    phase: &'static str,
    /// Reason of a failure, or what it waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    /// True if no launcher runs and the run has not ended.
    interrupted: bool,
    #[serde(skip)]
    ended: bool,
}

impl Activity {
    /// Reads the activity of a run, and its state.
    fn read(run_dir: &RunDir) -> Result<(Activity, Option<RunState>), LaunchError> {
        Activity::with_state(run_dir, || run_dir.state())
    }

    fn with_state(
        run_dir: &RunDir,
        state: impl FnOnce() -> Result<Option<RunState>, LaunchError>,
    ) -> Result<(Activity, Option<RunState>), LaunchError> {
        // Check the lock before the state: a launcher that ends in between has written its final
        // state. Check it again for a launcher that starts in between.
        let in_use = run_dir.in_use()?;
        let state = state()?;
        let activity = Activity::of(state.as_ref(), in_use || run_dir.in_use()?);
        Ok((activity, state))
    }

    fn of(state: Option<&RunState>, in_use: bool) -> Activity {
        let mut message = None;
        let waits = state.and_then(|state| state.waits.as_ref());
        let (phase, ended) = match state.map(|state| &state.phase) {
            None => ("preparing", false),
            Some(Phase::Starting | Phase::Running)
                if let Some(waits) = waits.filter(|_| in_use) =>
            {
                message = Some(waits.clone());
                ("waiting", false)
            }
            // A launcher resumes it and has not started a rank yet.
            Some(Phase::Drained | Phase::Failed { .. }) if in_use => ("preparing", false),
            Some(Phase::Starting) => ("starting", false),
            Some(Phase::Running) => ("running", false),
            Some(Phase::Draining) => ("draining", false),
            Some(Phase::Drained) => ("drained", true),
            Some(Phase::Cancelled) => ("cancelled", true),
            Some(Phase::Finished) => ("finished", true),
            Some(Phase::Failed { message: reason }) => {
                message = Some(reason.clone());
                ("failed", true)
            }
        };
        Activity {
            phase,
            message,
            interrupted: !ended && !in_use,
            ended,
        }
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.phase, &self.message) {
            _ if self.interrupted => f.write_str("interrupted, resumable"),
            ("drained", _) => f.write_str("drained, resumable"),
            (phase, Some(message)) => write!(f, "{phase}: {message}"),
            (phase, None) => f.write_str(phase),
        }
    }
}

/// A run in the list.
#[derive(Serialize)]
struct Row {
    recipe: PathBuf,
    #[serde(flatten)]
    activity: Activity,
    generations: usize,
    plan: Option<String>,
    /// `None` for an external trainer, which does not report samples.
    committed_samples: Option<u64>,
    budget_samples: Option<u64>,
}

impl Row {
    fn of(run_dir: &RunDir) -> Result<Row, LaunchError> {
        let run = run_dir.run()?;
        let (activity, state) = Activity::read(run_dir)?;
        let state = state.unwrap_or_default();
        Ok(Row {
            recipe: run.recipe_path,
            activity,
            generations: state.generations.len(),
            plan: history::current_formula(run_dir, &state),
            committed_samples: if run.spec.trainer.is_external() {
                None
            } else {
                Some(state.committed_samples())
            },
            budget_samples: run.horizon.budget_samples,
        })
    }
}

/// A run in the list, or its error; one damaged run does not hide the others.
#[derive(Serialize)]
pub(super) struct Listed {
    run: PathBuf,
    #[serde(flatten, serialize_with = "row_or_error")]
    row: Result<Row, LaunchError>,
}

/// Serializes the row, or `error` instead.
fn row_or_error<S: Serializer>(
    row: &Result<Row, LaunchError>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match row {
        Ok(row) => row.serialize(serializer),
        Err(error) => json!({"error": error.to_string()}).serialize(serializer),
    }
}

impl Listed {
    fn of(run_dir: &RunDir) -> Listed {
        Listed {
            run: run_dir.path().to_path_buf(),
            row: Row::of(run_dir),
        }
    }

    fn cells(&self) -> [String; 5] {
        let run_dir = self.run.display().to_string();
        match &self.row {
            Ok(row) => [
                run_dir,
                row.plan.clone().unwrap_or_default(),
                match (row.committed_samples, row.budget_samples) {
                    (Some(committed), Some(budget)) => format!("{committed} of {budget}"),
                    _ => "–".to_owned(),
                },
                row.generations.to_string(),
                row.activity.to_string(),
            ],
            Err(error) => [
                run_dir,
                String::new(),
                String::new(),
                String::new(),
                format!("error: {error}"),
            ],
        }
    }
}

/// What a run does now, one line.
pub(super) fn activity(run_dir: &RunDir) -> Result<impl fmt::Display, LaunchError> {
    Ok(Activity::read(run_dir)?.0)
}

/// The runs on this machine, as `-o json` shows them.
pub(super) fn rows() -> Vec<Listed> {
    run_arg::all().iter().map(Listed::of).collect()
}

/// The jobs in Slurm's queue of runs that were submitted from here and have not begun.
pub(super) fn queued() -> Vec<Queued> {
    let begun: Vec<String> = (run_arg::all().iter())
        .filter_map(|run| Some(submission::name(&std::path::absolute(run.path()).ok()?)))
        .collect();
    let mut queued = slurm::queued_here();
    queued.retain(|job| !begun.contains(&job.name));
    queued
}

/// Lists the runs on this machine, and those that wait for Slurm.
pub fn list(output: Format) -> anyhow::Result<ExitCode> {
    let rows = rows();
    if let Format::Text = output {
        let queued = queued();
        for job in &queued {
            line(format_args!("{}: {job} in Slurm's queue", job.name))?;
        }
        if rows.is_empty() && queued.is_empty() {
            line(format_args!("no runs under {}/", run_arg::RUNS))?;
        }
        if rows.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        let mut table = Table::new(["run", "plan", "committed samples", "generations", "phase"]);
        for row in &rows {
            table.row(row.cells());
        }
        print(table.render(width()))?;
    } else {
        output.print(&rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Schema of `-o json` for one run.
#[derive(Serialize)]
struct Shown<'a> {
    run: &'a Path,
    #[serde(flatten)]
    activity: Activity,
    /// Further keys once a generation was started.
    #[serde(flatten)]
    rest: serde_json::Value,
}

/// Shows a run that has not begun.
fn show_queued(run: &Path, job: &Queued, output: Format) -> anyhow::Result<View> {
    let activity = Activity {
        phase: "queued",
        message: Some(job.to_string()),
        interrupted: false,
        ended: false,
    };
    if output == Format::Text {
        line(format_args!(
            "{}: {activity} in Slurm's queue",
            run.display()
        ))?;
    } else {
        output.print(&Shown {
            run,
            activity,
            rest: json!({"slurm": job}),
        })?;
    }
    Ok(View {
        code: ExitCode::SUCCESS,
        ended: false,
    })
}

fn show(run_dir: &RunDir, output: Format) -> anyhow::Result<View> {
    let run = run_dir.run()?;
    let (activity, state) = Activity::read(run_dir)?;
    let view = View {
        code: ExitCode::SUCCESS,
        ended: activity.interrupted || activity.ended,
    };
    let Some(state) = state else {
        if output == Format::Text {
            line(format_args!("{}: {activity}", run_dir.path().display()))?;
        } else {
            output.print(&Shown {
                run: run_dir.path(),
                activity,
                rest: json!({}),
            })?;
        }
        return Ok(view);
    };
    let steps = history::last_steps(run_dir, &state);
    let batch = history::current_batch(run_dir, &state).unwrap_or(run.global_batch_size);
    let plan = history::current_formula(run_dir, &state);
    let external = super::status_external::ExternalStatus::of(run_dir, &state);
    if output != Format::Text {
        let rest = json!({
            "recipe": run.recipe_path,
            "plan": plan,
            "batch": batch,
            "global_batch_size": run.global_batch_size,
            "budget_samples": run.horizon.budget_samples,
            "per_device_batch_size_limit": state.per_device_batch_size_limit,
            "committed": state.checkpoint_ref,
            "bucket": run.bucket,
            "last_step": steps.first(),
            "generations": state.generations,
            "hosts": state.hosts,
            "external_trainer": external,
        });
        output.print(&Shown {
            run: run_dir.path(),
            activity,
            rest,
        })?;
        return Ok(view);
    }
    line(format_args!("{}: {activity}", run_dir.path().display()))?;
    line(format_args!("  recipe      {}", run.recipe_path.display()))?;
    let grown = if batch == run.global_batch_size {
        String::new()
    } else {
        format!(", grown from {}", run.global_batch_size)
    };
    line(format_args!(
        "  batch       {}{grown}",
        count(batch, "sample")
    ))?;
    if let Some(plan) = plan {
        line(format_args!("  plan        {plan}"))?;
    }
    if let Some(limit) = state.per_device_batch_size_limit {
        line(format_args!(
            "  memory      micro-batches above {limit} ran out of memory; a resume with another \
             --rank-memory retries them"
        ))?;
    }
    for (number, host) in state.hosts.iter().enumerate().filter(|_| !view.ended) {
        let label = if number == 0 { "hosts" } else { "" };
        line(format_args!("  {label:<10}  {host}"))?;
    }
    if let Some(progress) = progress(&steps, run.horizon.budget_samples) {
        line(format_args!("  progress    {progress}"))?;
    }
    if let Some(external) = &external {
        external.print()?;
    }
    match &state.checkpoint_ref {
        _ if external.is_some() => {}
        Some(checkpoint_ref) => line(format_args!(
            "  checkpoint  {} ({})",
            checkpoint_ref.path,
            count(checkpoint_ref.samples, "sample")
        ))?,
        None => line(format_args!("  checkpoint  none yet"))?,
    }
    if let Some(bucket) = &run.bucket {
        line(format_args!("  bucket      {bucket}"))?;
    }
    print(format_args!(
        "\n{}",
        generations(&state.generations, width())
    ))?;
    Ok(view)
}

/// The progress of a run with these newest steps of a generation, the newest first: `64 of 480 samples, step 4, loss
/// 2.9000, batch 16, 13.2k tokens/s, 14s left`.
fn progress(steps: &[StepRecord], budget: Option<u64>) -> Option<String> {
    let newest = steps.first()?;
    let mut pace = Pace::default();
    steps.iter().rev().for_each(|step| pace.step(step));
    let total = newest
        .external
        .map_or(budget, |reported| reported.total_samples);
    let of = total.map_or(String::new(), |total| format!(" of {total}"));
    let mut parts = vec![
        format!("{}{of} samples", newest.samples),
        format!("step {}", newest.step),
    ];
    if newest.external.is_none() || newest.loss.is_finite() {
        parts.push(format!("loss {:.4}", newest.loss));
    }
    parts.extend(newest.preferences.iter().flat_map(|it| it.measures()));
    parts.push(format!("batch {}", newest.batch));
    let tokens = pace.tokens_per_second().filter(|rate| *rate > 0.0);
    parts.extend(tokens.map(|rate| format!("{} tokens/s", human::count(rate))));
    let unfinished = total.filter(|total| *total > newest.samples);
    if let Some(left) = unfinished.and_then(|total| pace.seconds_left(total)) {
        parts.push(format!("{} left", human::whole_duration(left)));
    }
    Some(parts.join(", "))
}

/// The table of a run's generations. An external trainer has a checkpoint instead of a sample count.
fn generations(rows: &[GenerationRow], width: Option<usize>) -> String {
    let external = rows.last().is_some_and(|row| row.call.is_some());
    let from = if external {
        "from checkpoint"
    } else {
        "from sample"
    };
    let mut table = Table::new(["generation", "plan", from, "first step", "reason"]);
    for row in rows {
        let checkpoint = row.call.as_ref().and_then(|call| call.checkpoint.as_ref());
        let checkpoint = checkpoint.and_then(|path| path.file_name());
        let start = checkpoint
            .map(|name| name.display().to_string())
            .or(row.start_samples.map(|samples| samples.to_string()));
        let seconds = row.first_step_seconds;
        table.row([
            row.number.to_string(),
            row.formula.clone(),
            start.unwrap_or("–".into()),
            seconds.map_or("–".into(), |s| format!("{s:.1} s")),
            row.reason.to_string(),
        ]);
    }
    table.render(width)
}

fn prove(run_dir: &RunDir, output: Format) -> anyhow::Result<ExitCode> {
    let verdict = proof::prove(run_dir, &mut |_| {})?.verdict();
    let proved = verdict.proved;
    if output == Format::Text {
        let mark = if proved { "proved" } else { "NOT PROVED" };
        line(format_args!("{mark}: {}", verdict.verdict))?;
        line(format_args!("  checkpoint {}", verdict.checkpoint))?;
        if proved {
            line(format_args!("  digest     {}", verdict.digest))?;
        }
        if let Some(weights) = &verdict.weights {
            line(format_args!("  weights    {weights}"))?;
        }
    } else {
        output.print(&verdict)?;
    }
    Ok(if proved {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_REFUSED)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::durable::Lock;

    #[test]
    fn a_damaged_run_is_listed_with_its_error() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("run.json"), "{").unwrap();
        let listed = Listed::of(&RunDir::at(directory.path()));
        assert!(listed.cells()[4].contains("run.json"));
        let data = serde_json::to_value(&listed).unwrap();
        assert_eq!(data["run"], json!(directory.path()));
        assert!(data["error"].as_str().unwrap().contains("run.json"));
    }

    #[test]
    fn a_phase_is_data_and_marks_an_interrupted_run() {
        let activity = |phase| {
            let state = RunState {
                phase,
                ..RunState::default()
            };
            let activity = Activity::of(Some(&state), false);
            (
                serde_json::to_value(&activity).unwrap(),
                activity.to_string(),
            )
        };
        let message = "no memory".to_owned();
        assert_eq!(
            activity(Phase::Failed { message }),
            (
                json!({"phase": "failed", "message": "no memory", "interrupted": false}),
                "failed: no memory".to_owned()
            )
        );
        let resumed = RunState {
            phase: Phase::Drained,
            ..RunState::default()
        };
        assert_eq!(Activity::of(Some(&resumed), true).to_string(), "preparing");
        let (data, text) = activity(Phase::Running);
        assert_eq!(data, json!({"phase": "running", "interrupted": true}));
        assert_eq!(text, "interrupted, resumable");
    }

    #[test]
    fn a_launcher_that_ends_during_the_read_is_not_interrupted() {
        let directory = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(directory.path());
        let lock = Lock::acquire(run_dir.path()).unwrap();
        let state = RunState {
            phase: Phase::Running,
            ..RunState::default()
        };
        let (activity, read) = Activity::with_state(&run_dir, || {
            drop(lock);
            Ok(Some(state.clone()))
        })
        .unwrap();
        assert_eq!(read, Some(state));
        assert!(!activity.interrupted);
    }
}
