//! `evenkeel launch`: a recipe in, a trained model out, on this machine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context;

use super::output::say;
use super::recipe_args::RecipeArgs;
use super::{EXIT_DRAINED, EXIT_REFUSED, EXIT_USAGE, render, report, run_arg};
use crate::inventory::Inventory;
use crate::job::End;
use crate::launch::{LaunchError, Launcher, Request, RunDir, prepare};
use crate::telemetry::{Display, Event, Mode};
use crate::train::data::Phase;

/// Train a recipe on this machine.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel launch examples/quickstart.yaml
  evenkeel launch recipe.yaml --procs 2 --recipe-gpus 8 max_seq_length=128
  evenkeel launch recipe.yaml --procs 3 --remainder uneven --out runs/uneven
  evenkeel launch recipe.yaml --resume             go on where the newest run of it stopped

Ctrl-C commits a checkpoint and ends with 143; a second one stops at once.")]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Processes to train with. Default: one, with all cores (the built-in trainer runs on CPUs).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    procs: Option<u64>,
    /// The run's directory. Default: runs/NAME, numbered when it is taken.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with the run in --out, or with the newest run of this recipe.
    #[arg(long)]
    resume: bool,
    /// Bytes that a rank may use for the model and its training state, for example 2GiB; above it
    /// the micro-batch goes down.
    #[arg(long, value_name = "BYTES", value_parser = super::bytes::parse)]
    rank_memory: Option<u64>,
    /// What to print: bars on a terminal and plain lines elsewhere, or one JSON object per event.
    #[arg(long, value_enum, default_value_t = Log::Text)]
    log: Log,
    /// Print only warnings and the end.
    #[arg(short, long)]
    quiet: bool,
}

/// What a launch prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Log {
    /// For people.
    Text,
    /// One JSON object per event.
    Json,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = match args.recipe.read() {
        Ok(recipe) => recipe,
        Err(error) => {
            render::print(&error.diagnostics, &error.sources);
            return Ok(ExitCode::from(EXIT_USAGE));
        }
    };
    let inventory = Inventory::discover();
    let ranks = args
        .procs
        .or_else(|| args.recipe.options.world())
        .unwrap_or_else(|| inventory.cpu_ranks(1).count());
    let plan = match prepare::plan(&recipe, ranks) {
        Ok((plan, diagnostics)) => {
            render::print(&diagnostics, &recipe.sources);
            plan
        }
        Err(LaunchError::Refused(refused)) => {
            render::print(&refused.diagnostics, &recipe.sources);
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        Err(error) => return Err(error.into()),
    };

    let run = directory(&args, &recipe.spec)?;
    std::fs::create_dir_all(run.path())
        .with_context(|| format!("cannot make the run's directory {}", run.path().display()))?;
    let _lock = run.lock()?;
    let mut display = Display::new(mode(&args));
    let request = Request {
        recipe_path: args.recipe.recipe.clone(),
        overrides: args.recipe.overrides.clone(),
        rank_memory: args.rank_memory,
        cores: inventory.cpu.cores,
        resume: args.resume,
    };
    let prepared = prepare::prepare(&run, &recipe, &plan, &request, &mut |progress| {
        display.event(&Event::Preparing {
            what: match progress.phase {
                Phase::Checksums => "checksums of the data".into(),
                Phase::Tokenising => "tokenising".into(),
            },
            done: progress.bytes,
            total: progress.total,
        });
    })?;
    let setup = prepared.setup;
    display.event(&Event::Planned {
        name: run.path().display().to_string(),
        proof: plan.proof.clone(),
        world: ranks,
        global_batch: plan.global_batch_size,
        budget: setup.budget_samples,
        devices: inventory.cpu_ranks(ranks).to_string(),
        floor: setup.entropy,
    });
    for message in prepared.notes {
        display.event(&Event::Warning { message });
    }
    let signals = listen_for_signals()?;
    let end = Launcher::new(
        run.clone(),
        setup,
        ranks,
        prepared.state,
        signals,
        &mut display,
    )?
    .run()?;
    drop(display);
    finish(&run, &end)
}

/// Says how it ended, and what to do next.
fn finish(run: &RunDir, end: &End) -> anyhow::Result<ExitCode> {
    let place = run.path().display();
    Ok(match end {
        End::Finished => {
            let page = report::write(run)?;
            say(format_args!(
                "finished: {place}; report: {}\n",
                page.display()
            ));
            ExitCode::SUCCESS
        }
        End::Drained => {
            say(format_args!(
                "stopped; the same command with --resume --out {place} goes on\n"
            ));
            ExitCode::from(EXIT_DRAINED)
        }
        End::Failed { why } => {
            say(format_args!(
                "error: {why}\n  the ranks' last words are in {place}/gen-*/logs/\n"
            ));
            ExitCode::from(EXIT_REFUSED)
        }
    })
}

fn mode(args: &Args) -> Mode {
    match args.log {
        Log::Json => Mode::JsonLines,
        Log::Text if args.quiet => Mode::Quiet,
        Log::Text => Mode::detect(),
    }
}

/// The run's directory: `--out`, else the recipe's own, else `runs/NAME`; the newest one of that
/// name to resume, a fresh one to start.
fn directory(args: &Args, spec: &crate::recipe::Spec) -> anyhow::Result<RunDir> {
    if let Some(out) = &args.out {
        let run = RunDir::at(out);
        if args.resume && !run.holds_a_run() {
            anyhow::bail!("{}: no run here to resume", out.display());
        }
        if !args.resume && run.holds_a_run() {
            anyhow::bail!(
                "{} holds a run already: --resume goes on with it, another --out starts a new one",
                out.display()
            );
        }
        return Ok(run);
    }
    let base = match &spec.output {
        Some(output) => PathBuf::from(output),
        None => Path::new(run_arg::RUNS).join(&spec.name),
    };
    let numbered = |n: u32| match n {
        1 => RunDir::at(&base),
        n => RunDir::at(format!("{}-{n}", base.display())),
    };
    let taken = (1..).take_while(|n| numbered(*n).holds_a_run()).count() as u32;
    match (args.resume, taken) {
        (true, 0) => anyhow::bail!("{}: no run here to resume", base.display()),
        (true, newest) => Ok(numbered(newest)),
        (false, taken) => Ok(numbered(taken + 1)),
    }
}

/// Counts SIGINT and SIGTERM.
fn listen_for_signals() -> anyhow::Result<Arc<AtomicUsize>> {
    let count = Arc::new(AtomicUsize::new(0));
    let mut signals = signal_hook::iterator::Signals::new([
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
    ])?;
    let seen = Arc::clone(&count);
    std::thread::spawn(move || {
        for _ in signals.forever() {
            seen.fetch_add(1, Ordering::Relaxed);
        }
    });
    Ok(count)
}
