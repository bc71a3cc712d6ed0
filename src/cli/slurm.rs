//! `evenkeel launch RECIPE --on slurm --nodes N` outside of an allocation: submits the jobs that train.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::bail;

use super::cluster::submit;
use super::output::{line, say};
use super::place::Reachable;
use super::processes::device_of;
use super::recipe_args::{RecipeArgs, RecipeOptions};
use super::{EXIT_REFUSED, first_set, parse_launch, render};
use crate::external_trainer::{self, ExternalTrainer};
use crate::launch::hosts::slurm::Step;
use crate::launch::hosts::slurm::jobs::{self, Jobs, Queued};
use crate::launch::hosts::slurm::submission::{self, Submission};
use crate::launch::hosts::{Reach, slurm};
use crate::launch::run_path::RUNS;
use crate::launch::{self, RunDir, RunOptions, run_path};
use crate::plan::{self, AskedRunner, PlanRequest, Runner};
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
    /// Account that is charged
    #[arg(long, value_name = "NAME")]
    account: Option<String>,
    /// Quality of service (QOS) of the jobs
    #[arg(long, value_name = "NAME")]
    qos: Option<String>,
    /// Reservation that the jobs use
    #[arg(long, value_name = "NAME")]
    reservation: Option<String>,
    /// Time limit of a job, for example 12:00:00; the next job continues the run
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

/// Options of `sbatch` that give a job a part of a node; without one, it has all of it.
const NODE_SHARING: [&str; 6] = [
    "--exclusive",
    "--oversubscribe",
    "--cpus-per-",
    "--mem",
    "-c",
    "-s",
];

/// Options of `sbatch` that a user cannot give.
const OWN: [&str; 25] = [
    "-J",
    "--job-name",
    "-a",
    "--array",
    "-N",
    "--nodes",
    "-n",
    "--ntasks",
    "--ntasks-per-node",
    "-G",
    "--gpus",
    "--gpus-per-node",
    "--signal",
    "--open-mode",
    "--requeue",
    "--no-requeue",
    "-k",
    "--no-kill",
    "-d",
    "--dependency",
    "-W",
    "--wait",
    "--wrap",
    "--test-only",
    "--parsable",
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
        let image = self.container_image.is_some();
        let image = Some("--container-image").filter(|_| image);
        self.flag_of_submission().or(image)
    }

    /// The first set option that only a submission has.
    fn flag_of_submission(&self) -> Option<&'static str> {
        let mut set = self.submitted().into_iter();
        let set = set.find_map(|(flag, value)| value.map(|_| flag));
        set.or(Some("--sbatch").filter(|_| !self.sbatch.is_empty()))
    }

    /// Refuses options that only a submission has, inside an allocation.
    pub fn refuse_inside(&self, cluster: &submit::Args) -> anyhow::Result<()> {
        let shared = [
            ("--setup", cluster.setup().is_some()),
            ("--min-nodes", cluster.min_nodes().is_some()),
        ];
        match self.flag_of_submission().or(first_set(&shared)) {
            Some(flag) => bail!(
                "`{flag}` applies to jobs that are submitted, and this is inside an allocation of Slurm; remove it"
            ),
            None => Ok(()),
        }
    }

    /// Refuses options of `sbatch` that Evenkeel sets itself, or that would end a job before it begins.
    fn refuse_own(&self) -> anyhow::Result<()> {
        for option in &self.sbatch {
            let name = option.split('=').next().unwrap_or_default();
            let is_short = name.starts_with('-') && !name.starts_with("--");
            let name = if is_short {
                name.get(..2).unwrap_or(name)
            } else {
                name
            };
            if !name.starts_with('-') {
                bail!("`--sbatch={option}` is no option; write it as `--sbatch=--exclude=n7`");
            }
            if OWN.contains(&name) {
                bail!(
                    "`{name}` of `--sbatch` is set by Evenkeel, or does not fit its jobs; remove it"
                );
            }
        }
        Ok(())
    }

    /// Options of `sbatch` for every job.
    fn options(&self, gpus: Option<u64>) -> Vec<String> {
        let submitted = self.submitted();
        let named = submitted
            .iter()
            .filter_map(|(flag, value)| Some(format!("{flag}={}", (*value)?)));
        let gpus = gpus.map(|gpus| format!("--gpus-per-node={gpus}"));
        let is_part = |option: &String| NODE_SHARING.iter().any(|part| option.starts_with(part));
        let all = ["--exclusive", "--mem=0"].map(str::to_owned);
        let all = all.into_iter().filter(|_| !self.sbatch.iter().any(is_part));
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
        let out = out.map(std::path::absolute).transpose()?;
        let out = out.as_deref().and_then(Path::parent);
        let directories = [program.parent(), Some(&*here), out].into_iter().flatten();
        let step = Step {
            options: self.step(&directories.map(Path::to_owned).collect::<Vec<_>>()),
            gpus: options.gpus_per_node,
        };
        let nodes = slurm::nodes(&step)?;
        let has = nodes.len() as u64;
        let submission = Submission::of_process()?;
        let jobs = submission.map(|submission| Arc::new(Jobs::of(submission, step)));
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
            numbers.map(|number| Reach::SlurmJob(Arc::clone(jobs), number))
        });
        let hosts = nodes.map(Reach::Slurm).chain(further).collect();
        Ok(Reachable { hosts, jobs })
    }
}

/// The jobs of a run while its launcher works. They end with it, unless another launcher continues the run.
pub struct Ending(pub Option<Arc<Jobs>>);

impl Ending {
    /// Watches for a signal: a job that is cancelled may be killed before its ranks have saved.
    pub fn watch(&self, signals: Arc<AtomicUsize>) {
        let Some(jobs) = self.0.clone() else { return };
        thread::spawn(move || {
            while signals.load(Ordering::Acquire) == 0 {
                thread::sleep(Duration::from_millis(200));
            }
            if jobs.is_cancelled() {
                end(&jobs);
            }
        });
    }

    /// Leaves the jobs to the next launcher, unless this one's job is cancelled.
    pub fn leave_to_next(&mut self) {
        self.0.take_if(|jobs| !jobs.is_cancelled());
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(jobs) = &self.0 {
            end(jobs);
        }
    }
}

/// Ends the run's other jobs.
fn end(jobs: &Jobs) {
    if let Err(error) = jobs.end_others() {
        let name = &jobs.submission.name;
        say(format_args!(
            "warning: {error}; `squeue --me` shows what is left of {name}\n"
        ));
    }
}

/// Ends the jobs that would continue a run without a launcher.
pub fn end_queued(run_dir: &RunDir) -> anyhow::Result<()> {
    // A pod or an older version has recorded no words.
    let launched = parse_launch(&run_dir.run()?.command_line);
    if launched.is_ok_and(|launched| launched.is_on_slurm()) {
        let place = std::path::absolute(run_dir.path())?;
        jobs::end_all(&[submission::name(&place)])?;
    }
    Ok(())
}

/// Ends the jobs of a run that has not begun, by its directory or its name; false if there are none.
pub fn cancel_queued(run: &Path) -> anyhow::Result<bool> {
    // Without Slurm there are none.
    Ok(jobs::end_all(&names(run)?).unwrap_or(false))
}

/// The job of a run that has not begun, by its directory or its name.
pub fn queued(run: &Path) -> Option<Queued> {
    jobs::queued(&names(run).ok()?).ok()?
}

/// The jobs in the queue of runs that were submitted from the working directory; none without Slurm.
pub fn queued_here() -> Vec<Queued> {
    let here = std::env::current_dir().ok();
    here.and_then(|here| jobs::queued_from(&here).ok())
        .unwrap_or_default()
}

/// The names that the first job of a run with this directory or name may have.
fn names(run: &Path) -> anyhow::Result<[String; 2]> {
    let name =
        |place: &Path| Ok::<_, std::io::Error>(submission::name(&std::path::absolute(place)?));
    Ok([name(run)?, name(&Path::new(RUNS).join(run))?])
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
    /// Number of ranks; `None`: as many as the nodes have devices for.
    pub procs: Option<u64>,
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
    args.refuse_own()?;
    let gpus = from.options.gpus_per_node;
    if launch.on_cpu && gpus.is_some() {
        bail!("`--device cpu` and `--gpus-per-node` contradict each other; remove one of them");
    }
    let per_node = gpus.unwrap_or(1);
    let device = device_of(gpus.is_some());
    let most = nodes.saturating_mul(per_node);
    let world = launch.procs.unwrap_or(most);
    // Nodes on which all ranks train.
    let used = world.div_ceil(per_node);
    if used > nodes {
        bail!(
            "{} need {}, and --nodes is {nodes}; add `--nodes {used}`, or use `--procs` for fewer",
            count(world, "process"),
            count(used, "node")
        );
    }
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
    let minimum = recipe.spec.elasticity.min.unwrap_or(1).div_ceil(per_node);
    let minimum = minimum.max(launch.cluster.min_nodes().unwrap_or(1));
    if minimum > nodes {
        bail!(
            "--nodes is {nodes}, and the run needs at least {minimum} (--min-nodes, elasticity.min); raise --nodes, or lower the \
             minimum"
        );
    }
    if minimum > used {
        bail!(
            "{} need {}, and the run needs at least {minimum} (--min-nodes, elasticity.min); raise --procs, or lower the \
             minimum",
            count(world, "process"),
            count(used, "node")
        );
    }
    let feasible = |nodes: &u64| {
        let draft = plan::examine(recipe, &of_world(nodes * per_node));
        !draft.has_errors()
    };
    let least = (minimum..used).find(feasible).unwrap_or(used);
    let name = submission::name(&place);
    let mut options = vec![format!("--output={name}-%j.out")];
    options.extend(args.options(gpus));
    let program = std::env::current_exe()?;
    let submission = Submission {
        least,
        nodes,
        options,
        setup: launch.cluster.setup().map(str::to_owned),
        command: command(&program.display().to_string(), launch.typed, &place),
        name,
    };
    if !launch.quiet {
        say(format_args!("{}: {}\n", device.count(world), plan.formula));
    }
    if launch.cluster.dry_run {
        line(submission.first().trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(job) = jobs::queued(std::slice::from_ref(&submission.name))? {
        let place = shell::join(&[place.display().to_string()]);
        bail!(
            "job {} of this run is in Slurm's queue already; `evenkeel cancel {place}` removes it",
            job.id
        );
    }
    let job = jobs::submit(&submission)?;
    if !launch.quiet {
        let further = match used - least {
            0 => String::new(),
            further => format!(
                ", and submits {} of one node each",
                count(further, "more job")
            ),
        };
        say(format_args!(
            "job {job} of Slurm begins on {}{further}\n",
            count(least, "node"),
        ));
        say("next:\n");
        let is_output =
            |option: &String| option.starts_with("--output") || option.starts_with("-o");
        if !args.sbatch.iter().any(is_output) {
            say(format_args!("  tail -F {}-{job}.out\n", submission.name));
        }
        let place = shell::join(&[place.display().to_string()]);
        say(format_args!("  evenkeel status {place}\n"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The words of the first job's launch: those typed, with the run's directory.
fn command(program: &str, typed: &[String], place: &Path) -> Vec<String> {
    let end = typed.iter().position(|word| word == "--");
    let (own, trainer) = typed.split_at(end.unwrap_or(typed.len()));
    let mut words = vec![program.to_owned()];
    words.extend(own.iter().filter(|word| *word != "--dry-run").cloned());
    let states = |word: &String| word == "--out" || word.starts_with("--out=");
    if !own.iter().any(states) {
        let at = words.iter().take_while(|word| *word != "launch").count() + 1;
        let out = ["--out".to_owned(), place.display().to_string()];
        words.splice(at..at, out);
    }
    words.extend_from_slice(trainer);
    words
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        args: Args,
    }

    fn args(typed: &str) -> Args {
        let words = std::iter::once("x").chain(typed.split_whitespace());
        Typed::parse_from(words).args
    }

    #[test]
    fn a_job_has_all_of_a_node_unless_an_option_divides_it() {
        let options = |typed: &str, gpus| args(typed).options(gpus).join(" ");
        assert_eq!(
            options("--qos high --sbatch=--exclude=n7", Some(8)),
            "--ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 --qos=high --exclude=n7"
        );
        assert_eq!(
            options("--sbatch=--cpus-per-task=16", None),
            "--ntasks-per-node=1 --cpus-per-task=16"
        );
    }

    #[test]
    fn options_that_evenkeel_sets_are_refused() {
        let refused = |typed: &str| args(typed).refuse_own().map_err(|error| error.to_string());
        assert_eq!(refused("--sbatch=--exclude=n7 --sbatch=-C=x"), Ok(()));
        for typed in ["-Jmine", "--job-name=mine", "--array=1-2", "-d=singleton"] {
            let error = refused(&format!("--sbatch={typed}")).unwrap_err();
            assert!(
                error.contains(" is set by Evenkeel, or does not fit its jobs; remove it"),
                "{error}"
            );
        }
        insta::assert_snapshot!(refused("--sbatch=exclusive").unwrap_err(), @"`--sbatch=exclusive` is no option; write it as `--sbatch=--exclude=n7`");
    }

    #[test]
    fn a_container_has_the_directories_that_ranks_need() {
        let directories = ["/shared/bin", "/shared/run", "/shared/bin"].map(PathBuf::from);
        let step = |typed: &str| args(typed).step(&directories).join(" ");
        assert_eq!(step(""), "");
        assert_eq!(
            step("--container-image image"),
            "--container-image=image --container-mounts=/shared/bin:/shared/bin,/shared/run:/shared/run"
        );
        assert_eq!(
            step("--container-image image --container-mounts /a:/b"),
            "--container-image=image --container-mounts=/a:/b"
        );
    }

    #[test]
    fn the_submitted_launch_names_the_runs_directory_and_starts_what_was_typed() {
        let typed = |words: &str| {
            let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            command("/bin/evenkeel", &words, Path::new("/shared/run")).join(" ")
        };
        assert_eq!(
            typed(
                "launch r.yaml --on slurm --nodes 2 --dry-run -- python train.py --out x --dry-run"
            ),
            "/bin/evenkeel launch --out /shared/run r.yaml --on slurm --nodes 2 -- python train.py --out x --dry-run"
        );
        assert_eq!(
            typed("launch r.yaml --out=run --on slurm"),
            "/bin/evenkeel launch r.yaml --out=run --on slurm"
        );
    }
}
