//! `evenkeel launch`: a recipe in, a trained model out, on this machine.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, bail};

use super::cluster::submit;
use super::output::say;
use super::recipe_args::{RecipeArgs, RecipeOptions};
use super::signals::Signals;
use super::{EXIT_DRAINED, EXIT_REFUSED, EXIT_USAGE, render, report};
use crate::batch::{MOST_GPUS, OomPolicy};
use crate::inventory::{Devices, Inventory};
use crate::job::End;
use crate::launch::{
    LaunchError, Launcher, Request, RunDir, own_trainer, place, port, prepare, reached,
};
use crate::recipe::{Diagnostic, ReadError, Recipe, emit};
use crate::telemetry::{Display, Event, Mode};
use crate::train::data::Phase;
use crate::words::count;

/// Train a recipe on this machine, or with --nodes on a cluster.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel launch examples/quickstart.yaml
  evenkeel launch recipe.yaml --procs 2 --recipe-gpus 8 max_seq_length=128
  evenkeel launch recipe.yaml --procs 3 --remainder uneven --out runs/uneven
  evenkeel launch recipe.yaml --resume             go on where the newest run of it stopped
  evenkeel launch recipe.yaml --nodes 8 --gpus-per-node 8 -n training    on a cluster
  evenkeel launch recipe.yaml --recipe-gpus 8 --procs 4 -- python train.py --config {recipe} {resume_args}
  evenkeel launch recipe.yaml --procs 2 -- python train.py {args} --output_dir {checkpoint_dir} {resume_args}
  evenkeel launch --gpus 6 -- torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 8

After `--` stands your own program, started once for every process with torchrun's environment. In it
{recipe}, {args}, {resume_args}, {checkpoint_dir}, {per_device_batch_size} and
{gradient_accumulation_steps} stand for what the plan comes to (docs/external-trainer.md).

Ctrl-C commits a checkpoint and ends with 143; a second one stops at once. So do SIGTERM and a closed
terminal. Before training it leaves a new run's directory as if it had never been.")]
pub struct Args {
    /// Recipe file, in any dialect that is read, the folder of a tree of configs (HALOs,
    /// direct-preference-optimization), or a script with the command that starts it. Without one, the
    /// command after `--` says all: it is started without its torchrun
    #[arg(required_unless_present = "command")]
    recipe: Option<PathBuf>,
    #[command(flatten)]
    options: RecipeOptions,
    /// Change a key of the recipe, in its own spelling (`max_seq_length=128`), or a native key as
    /// `evenkeel.trainer.drain_seconds=30`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Processes to train with. Default: as many as --gpus says, else one with all cores (the
    /// built-in trainer runs on CPUs), or for a program of your own one for every GPU found.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_GPUS))]
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
    /// What follows when memory runs out before the first checkpoint: exact keeps the global batch;
    /// transformers and transformers-before-1.9 (of accelerate) begin again with a smaller one, as
    /// upstream does. After a checkpoint it is always exact.
    #[arg(long, value_name = "POLICY", default_value = "exact", value_parser = OomPolicy::from_str)]
    oom_policy: OomPolicy,
    /// Your own program in the place of the built-in trainer, without torchrun or another launcher:
    /// every process runs it. With --resume it may be left out
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// What to print: bars on a terminal and plain lines elsewhere, or one JSON object per event.
    #[arg(long, value_enum, default_value_t = Log::Text)]
    log: Log,
    /// Print only warnings and the end.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    cluster: submit::Args,
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
    let from = RecipeArgs {
        recipe: args.recipe.clone().unwrap_or_default(),
        options: args.options.clone(),
        overrides: args.overrides.clone(),
    };
    let mut recipe = match read(&args, &from) {
        Ok(recipe) => recipe,
        Err(error) => {
            render::print(&error.diagnostics, &error.sources);
            return Ok(ExitCode::from(EXIT_USAGE));
        }
    };
    if args.recipe.is_none() {
        recipe.spec.trainer.command = emit::alone(&recipe, &args.command).context(NOT_ALONE)?;
    } else if !args.command.is_empty() {
        recipe.spec.trainer.command.clone_from(&args.command);
    }
    if let Some(nodes) = from.options.nodes {
        if args.procs.is_some() || args.out.is_some() || args.resume {
            bail!(
                "--nodes launches on a cluster, --procs, --out and --resume on this machine: give one or the other"
            );
        }
        let mode = mode(&args);
        let (cluster, memory) = (&args.cluster, args.rank_memory);
        return submit::run(cluster, &from, &recipe, nodes, memory, mode);
    }
    if args.cluster.given() {
        bail!("--nodes N launches on a cluster; without it the other options of one mean nothing");
    }
    let mut shown = Vec::new();
    let ended = launch(&args, &recipe, &mut shown);
    // A rule may speak late: some judge what the preparation of the data has counted.
    if let Err(error) = &ended
        && let Some(LaunchError::Refused(refused)) = error.downcast_ref()
    {
        let said = refused.diagnostics.iter();
        let news: Vec<Diagnostic> = said.filter(|d| !shown.contains(d)).cloned().collect();
        render::print(&news, &recipe.sources);
        return Ok(ExitCode::from(EXIT_REFUSED));
    }
    ended
}

/// What is left where a command without a recipe begins with another launcher.
const NOT_ALONE: &str = "only torchrun and Python can be left out of a command that stands for its \
recipe; other launchers do more than start processes: give a recipe, and after `--` the program itself, \
as `evenkeel launch recipe.yaml -- python train.py {args} {resume_args}`";

/// Reads the recipe, or the command where that says all.
fn read(args: &Args, from: &RecipeArgs) -> Result<Recipe, ReadError> {
    match args.recipe.is_some() {
        true => from.read(),
        false => from
            .options
            .read_job(&from.recipe, &from.overrides, &args.command),
    }
}

/// `shown` becomes what the rules were heard to say.
fn launch(args: &Args, recipe: &Recipe, shown: &mut Vec<Diagnostic>) -> anyhow::Result<ExitCode> {
    let inventory = Inventory::discover();
    let signals = Signals::listen()?;
    let mut recipe = recipe.clone();
    if args.resume
        && !recipe.spec.trainer.is_own()
        && let Some(trainer) = own_trainer(args.out.as_deref(), &recipe.spec)?
    {
        // The command that the run was launched with need not be typed again.
        recipe.spec.trainer.command = trainer.command;
    }
    let own = recipe.spec.trainer.is_own();
    if own && args.rank_memory.is_some() {
        bail!("--rank-memory limits the built-in trainer, not a program of your own: leave it out");
    }
    let found = own.then(|| match inventory.devices() {
        Devices::Gpus { .. } => inventory.devices().count(),
        Devices::CpuRanks { .. } => 0,
    });
    let processes = Processes::asked(args.procs, args.options.world(), found)?;
    let ranks = processes.count;
    recipe.spec.batch.settle(ranks);
    let recipe = &recipe;
    let request = Request {
        recipe_path: args.recipe.clone().unwrap_or_else(|| "command".into()),
        overrides: args.overrides.clone(),
        rank_memory: args.rank_memory,
        oom_policy: args.oom_policy,
        cores: inventory.cpu.cores,
        resume: args.resume,
        signals: signals.count(),
    };
    let run = place::choose(args.out.as_deref(), &recipe.spec, args.resume)?;
    let reached = reached(&run, recipe, &request)?;
    let planned = prepare::plan(recipe, ranks, reached, request.rank_memory)?;
    render::print(&planned.diagnostics, &recipe.sources);
    shown.clone_from(&planned.diagnostics);

    // Nothing is written for ranks that could not meet.
    port::free(ranks)?;
    let claim = place::claim(run, args.out.as_deref(), &recipe.spec, args.resume)?;
    let run = claim.run();
    let mut display = Display::new(mode(args));
    let prepared = match prepare::prepare(run, recipe, &planned, &request, &mut |progress| {
        display.event(&Event::Preparing {
            what: match progress.phase {
                Phase::Checksums => "checksums of the data".into(),
                Phase::Tokenising => "tokenising".into(),
            },
            done: progress.bytes,
            total: progress.total,
        });
    }) {
        Err(LaunchError::Stopped) => {
            drop(display);
            return Ok(stopped(args, run, &signals));
        }
        prepared => prepared?,
    };
    let setup = &prepared.setup;
    display.event(&Event::Planned {
        name: run.path().display().to_string(),
        proof: prepared.proof(&planned),
        world: ranks,
        global_batch: setup.global_batch_size,
        budget: setup.budget_samples.unwrap_or_default(),
        devices: match own {
            true => count(ranks, "process"),
            false => inventory.cpu_ranks(ranks).to_string(),
        },
        floor: setup.entropy,
    });
    for message in processes.note.iter().chain(&prepared.notes).cloned() {
        display.event(&Event::Warning { message });
    }
    signals.heed();
    let end = Launcher::new(&claim, prepared, ranks, &request, &mut display)?.run();
    // What goes wrong from here on is the run's failure, not the call's.
    let end = match end {
        Err(refused @ LaunchError::Refused(_)) => return Err(refused.into()),
        Err(error) => End::Failed {
            why: error.to_string(),
        },
        Ok(end) => end,
    };
    drop(display);
    finish(run, &end, own)
}

/// How many processes train.
#[derive(Debug, PartialEq, Eq)]
struct Processes {
    count: u64,
    /// What was made of the flags, where that is not plain.
    note: Option<String>,
}

impl Processes {
    /// `procs` and the world that the flags of `plan` ask for, in devices; `own`: the GPUs here, where
    /// a program of the user's own is started, which may use them.
    fn asked(
        procs: Option<u64>,
        world: Option<u64>,
        own: Option<u64>,
    ) -> anyhow::Result<Processes> {
        let (count, note) = match (procs, world) {
            (Some(procs), Some(world)) if procs != world => bail!(
                "--procs {procs} and a world of {} (--gpus, --nodes) differ, and every process stands \
                 for one device: give one of them",
                count(world, "device")
            ),
            (Some(procs), _) => (procs, None),
            (None, Some(world)) if world > MOST_GPUS => bail!(
                "{world} devices are more than the {MOST_GPUS} processes that one machine can run: ask for fewer, or use `evenkeel plan`, which starts nothing"
            ),
            (None, Some(world)) if own.is_some() => (world, None),
            (None, Some(world)) => {
                let note = format!(
                    "the built-in trainer uses no GPUs: {} on the CPU (--procs {world} says the \
                     same without this word)",
                    count(world, "process")
                );
                (world, Some(note))
            }
            (None, None) => (own.unwrap_or_default().clamp(1, MOST_GPUS), None),
        };
        Ok(Processes { count, note })
    }
}

/// Says how it ended, and what to do next. `own`: a program of the user's own trained.
fn finish(run: &RunDir, end: &End, own: bool) -> anyhow::Result<ExitCode> {
    let place = run.path().display();
    Ok(match end {
        End::Finished if own => {
            say(format_args!("finished: {place}\n"));
            ExitCode::SUCCESS
        }
        End::Finished => {
            let page = report::write(run, None)?;
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
        Log::Json if args.quiet => Mode::QuietJsonLines,
        Log::Json => Mode::JsonLines,
        Log::Text if args.quiet => Mode::Quiet,
        Log::Text => Mode::detect(),
    }
}

/// Says that a signal came before training. What was written for a new run goes with its claim.
fn stopped(args: &Args, run: &RunDir, signals: &Signals) -> ExitCode {
    if args.resume {
        say(format_args!(
            "stopped before training: nothing was started, and {} is as it was; the same command \
             goes on\n",
            run.path().display()
        ));
        return ExitCode::from(EXIT_DRAINED);
    }
    say("stopped before training: nothing was started; the same command begins again\n");
    ExitCode::from(signals.exit_code())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_counted_once_whatever_the_flag_is_called() {
        let asked = |procs, world| Processes::asked(procs, world, None).map_err(|e| e.to_string());
        let count = |procs, world| asked(procs, world).map(|processes| processes.count);
        assert_eq!(count(None, None), Ok(1));
        assert_eq!(count(Some(3), None), Ok(3));
        assert_eq!(count(Some(3), Some(3)), Ok(3));
        let said = count(Some(2), Some(8)).unwrap_err();
        assert!(
            said.contains("--procs 2 and a world of 8 devices"),
            "{said}"
        );
        let said = count(None, Some(100_000)).unwrap_err();
        assert!(said.contains("1024 processes"), "{said}");
    }

    #[test]
    fn gpus_that_stand_for_processes_are_said_aloud() {
        let note = Processes::asked(None, Some(4), None).unwrap().note.unwrap();
        assert!(note.contains("4 processes on the CPU"), "{note}");
        assert_eq!(Processes::asked(Some(4), Some(4), None).unwrap().note, None);
        // A program of one's own uses them, or all that there are.
        let own = |world, gpus| Processes::asked(None, world, Some(gpus)).unwrap();
        assert_eq!((own(Some(4), 0).count, own(Some(4), 0).note), (4, None));
        assert_eq!((own(None, 8).count, own(None, 0).count), (8, 1));
    }
}
