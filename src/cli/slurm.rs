//! `evenkeel launch RECIPE --on slurm --nodes N` outside of an allocation: submits the jobs that train.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;

use super::cluster::submit;
use super::output::{line, say};
use super::place::Reachable;
use super::recipe_args::{RecipeArgs, RecipeOptions};
use super::{EXIT_REFUSED, first_set, render};
use crate::external_trainer::{self, ExternalTrainer};
use crate::launch::hosts::slurm::jobs::{self, Jobs};
use crate::launch::hosts::slurm::submission::{self, Submission};
use crate::launch::hosts::{Reach, slurm};
use crate::launch::run_path::RUNS;
use crate::launch::{self, RunDir, RunOptions, run_path};
use crate::plan::{self, AskedRunner, DeviceKind, PlanRequest, Runner};
use crate::recipe::Recipe;
use crate::recipe::syntax::shell;
use crate::util::format::count;

/// Options of Slurm's jobs and steps.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "On Slurm (with --on slurm)")]
#[group(skip)]
pub struct Args {
    /// Partition of the jobs
    #[arg(long, value_name = "NAME")]
    partition: Option<String>,
    /// Account that pays
    #[arg(long, value_name = "NAME")]
    account: Option<String>,
    /// Quality of service
    #[arg(long, value_name = "NAME")]
    qos: Option<String>,
    /// Reservation
    #[arg(long, value_name = "NAME")]
    reservation: Option<String>,
    /// Time limit of a job, for example 12:00:00; the run goes on in the next job
    #[arg(long, value_name = "TIME")]
    time: Option<String>,
    /// Features that nodes must have
    #[arg(long, value_name = "FEATURES")]
    constraint: Option<String>,
    /// Another option of sbatch, for example --sbatch=--exclude=n7; repeatable
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    sbatch: Vec<String>,
    /// Container image in which the nodes train (pyxis)
    #[arg(long, value_name = "IMAGE")]
    container_image: Option<String>,
    /// Directories of the container [default: those of the program, of the run and of the launch]
    #[arg(long, value_name = "SOURCE:TARGET,…", requires = "container_image")]
    container_mounts: Option<String>,
}

/// Options with which the user divides a node; without one, a job has all of it.
const PARTS: [&str; 6] = [
    "--exclusive",
    "--oversubscribe",
    "--cpus-per-",
    "--mem",
    "-c",
    "-s",
];

impl Args {
    /// The options of `sbatch` alone, as `sbatch` names them.
    fn submitted(&self) -> [(&'static str, Option<&String>); 6] {
        [
            ("--partition", self.partition.as_ref()),
            ("--account", self.account.as_ref()),
            ("--qos", self.qos.as_ref()),
            ("--reservation", self.reservation.as_ref()),
            ("--time", self.time.as_ref()),
            ("--constraint", self.constraint.as_ref()),
        ]
    }

    /// The first set option, as the user types it.
    pub fn flag(&self) -> Option<&'static str> {
        let submitted = self
            .submitted()
            .map(|(flag, value)| (flag, value.is_some()));
        let others = [
            ("--sbatch", !self.sbatch.is_empty()),
            ("--container-image", self.container_image.is_some()),
        ];
        first_set(&[&submitted[..], &others].concat())
    }

    /// Options of `sbatch` for every job.
    fn options(&self, gpus: Option<u64>) -> Vec<String> {
        let submitted = self.submitted();
        let named = submitted
            .iter()
            .filter_map(|(flag, value)| Some(format!("{flag}={}", (*value)?)));
        let gpus = gpus.map(|gpus| format!("--gpus-per-node={gpus}"));
        let is_part = |option: &String| PARTS.iter().any(|part| option.starts_with(part));
        let all: &[&str] = match self.sbatch.iter().any(is_part) {
            true => &[],
            false => &["--exclusive", "--mem=0"],
        };
        let all = all.iter().map(|&option| option.to_owned());
        let one = std::iter::once("--ntasks-per-node=1".to_owned());
        let own = one.chain(gpus).chain(all).chain(named);
        own.chain(self.sbatch.iter().cloned()).collect()
    }

    /// Options of `srun` for the step on a node. `directories`: what the ranks need.
    fn step(&self, directories: &[PathBuf]) -> Vec<String> {
        let Some(image) = &self.container_image else {
            return Vec::new();
        };
        let mounts = self.container_mounts.clone().unwrap_or_else(|| {
            let mut paths: Vec<String> = directories
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            paths.sort();
            paths.dedup();
            let mounts = paths.iter().map(|path| format!("{path}:{path}"));
            mounts.collect::<Vec<_>>().join(",")
        });
        vec![
            format!("--container-image={image}"),
            format!("--container-mounts={mounts}"),
        ]
    }

    /// The nodes of the allocation that this process is in, and further ones if Evenkeel has submitted its job. `out`: the run's
    /// directory, if it is typed.
    pub fn nodes(&self, options: &RecipeOptions, out: Option<&Path>) -> anyhow::Result<Reachable> {
        let (program, here) = (std::env::current_exe()?, launch::base()?);
        let directories = [program.parent(), Some(&here), out.and_then(Path::parent)];
        let directories = directories.into_iter().flatten().map(std::path::absolute);
        let step = self.step(&directories.collect::<Result<Vec<_>, _>>()?);
        let gpus = options.gpus_per_node;
        let nodes = slurm::nodes(&step, gpus)?;
        let has = nodes.len() as u64;
        let jobs = Jobs::of_process(&step, gpus).map(Arc::new);
        let asked = options.nodes.filter(|_| jobs.is_none());
        if let Some(asked) = asked.filter(|asked| *asked > has) {
            bail!(
                "the allocation has {}, and --nodes is {asked}; ask for fewer, or start this outside of it",
                count(has, "node")
            );
        }
        let most = asked.and_then(|asked| usize::try_from(asked).ok());
        let nodes = nodes.into_iter().take(most.unwrap_or(usize::MAX));
        let further = jobs.iter().flat_map(|jobs| {
            let numbers = jobs.further_nodes();
            numbers.map(|number| Reach::Further(Arc::clone(jobs), number))
        });
        let hosts = nodes.map(Reach::Slurm).chain(further).collect();
        Ok(Reachable { hosts, jobs })
    }
}

/// Ends the run's other jobs.
pub fn end(jobs: &Jobs) {
    if let Err(error) = jobs.end_others() {
        let name = &jobs.submission.name;
        say(format_args!(
            "warning: {error}; `squeue --me` shows what is left of {name}\n"
        ));
    }
}

/// Ends the jobs that would continue a run without a launcher.
pub fn end_queued(run_dir: &RunDir) -> anyhow::Result<()> {
    let words = run_dir.run()?.command_line;
    if words
        .iter()
        .any(|word| word == "slurm" || word == "--on=slurm")
    {
        let place = std::path::absolute(run_dir.path())?;
        jobs::end_all(&submission::name(&place))?;
    }
    Ok(())
}

/// Ends the jobs of a run that has not begun, by its directory or its name; false if there are none.
pub fn cancel_queued(run: &str) -> anyhow::Result<bool> {
    for place in [PathBuf::from(run), Path::new(RUNS).join(run)] {
        let name = submission::name(&std::path::absolute(place)?);
        // Without Slurm there are none.
        if jobs::end_all(&name).unwrap_or(false) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A launch that is submitted.
pub struct Launch<'a> {
    pub args: &'a Args,
    pub cluster: &'a submit::Args,
    pub from: &'a RecipeArgs,
    pub recipe: &'a Recipe,
    pub run: RunOptions<'a>,
    /// The words after the program's name.
    pub typed: &'a [String],
    /// Memory limit of a rank, bytes.
    pub rank_memory: Option<u64>,
    pub on_cpu: bool,
    pub quiet: bool,
}

/// Submits a run that can use `nodes` nodes.
pub fn submit(launch: &Launch<'_>, nodes: u64) -> anyhow::Result<ExitCode> {
    let &Launch {
        args, from, recipe, ..
    } = launch;
    let gpus = from.options.gpus_per_node.filter(|_| !launch.on_cpu);
    let per_node = gpus.unwrap_or(1);
    let device = match gpus {
        Some(_) => DeviceKind::Cuda,
        None => DeviceKind::Cpu,
    };
    let world = nodes.saturating_mul(per_node);
    let run_dir = run_path::choose(&launch.run, &recipe.spec.of_world(world))?;
    let place = std::path::absolute(run_dir.path())?;
    let runner = Runner::of(
        &recipe.spec,
        AskedRunner::Launch,
        device,
        launch.rank_memory,
    );
    let of_world = |world| PlanRequest {
        gpus_per_node: Some(per_node),
        flaws: launch::stated_flaws(recipe, runner),
        ..PlanRequest::of(runner, world)
    };
    let draft = plan::examine(recipe, &of_world(world));
    render::print_for(launch.quiet, &draft.findings, &recipe.sources);
    let Ok(plan) = draft.finish() else {
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    if recipe.spec.trainer.is_external() {
        external_trainer::check::overrides(recipe, &from.overrides)?;
        let trainer = ExternalTrainer {
            recipe,
            run_dir: &place,
            base: Some(&launch::base()?),
            most_on_a_host: per_node,
        };
        let call = trainer.call(0, &plan, None)?;
        for note in external_trainer::check::notes(recipe, call) {
            say(format_args!("warning: {note}\n"));
        }
    }
    // The run begins as soon as Slurm has nodes for its smallest world.
    let stated = recipe.spec.elasticity.min.unwrap_or(1).div_ceil(per_node);
    let stated = stated.max(launch.cluster.least_nodes().unwrap_or(1));
    if stated > nodes {
        bail!("the run needs {stated} nodes at least, and --nodes is {nodes}; ask for more");
    }
    let feasible = |nodes: &u64| {
        let draft = plan::examine(recipe, &of_world(nodes * per_node));
        !draft.has_errors()
    };
    let least = (stated..nodes).find(feasible).unwrap_or(nodes);
    let name = submission::name(&place);
    let mut options = vec![format!("--output={name}-%j.out")];
    options.extend(args.options(gpus));
    let program = std::env::current_exe()?;
    let submission = Submission {
        least,
        nodes,
        options,
        setup: launch.cluster.setup().map(str::to_owned),
        command: command(&program.display().to_string(), launch, &place),
        name,
    };
    if launch.cluster.dry_run {
        line(submission.first().trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(job) = jobs::running(&submission.name)? {
        bail!(
            "job {job} of Slurm trains {} already; `evenkeel cancel` or `scancel {job}` ends it",
            place.display()
        );
    }
    let job = jobs::submit(&submission)?;
    if !launch.quiet {
        let further = match nodes - least {
            0 => String::new(),
            further => format!(
                ", and submits {} of one node each",
                count(further, "more job")
            ),
        };
        say(format_args!(
            "{}: {}\njob {job} of Slurm begins on {}{further}\n",
            device.count(world),
            plan.formula,
            count(least, "node"),
        ));
        say("next:\n");
        for next in [
            format!("tail -F {}-{job}.out", submission.name),
            format!(
                "evenkeel status {}",
                shell::join(&[place.display().to_string()])
            ),
        ] {
            say(format_args!("  {next}\n"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The words of the first job's launch: those typed, with the run's directory.
fn command(program: &str, launch: &Launch<'_>, place: &Path) -> Vec<String> {
    let mut words = vec![program.to_owned()];
    words.extend_from_slice(launch.typed);
    let own = words.iter().take_while(|word| *word != "--");
    let states = |word: &String| word == "--out" || word.starts_with("--out=");
    if !own.clone().any(states) {
        let at = own.take_while(|word| *word != "launch").count() + 1;
        let out = ["--out".to_owned(), place.display().to_string()];
        words.splice(at..at, out);
    }
    words
}
