//! `evenkeel launch`: trains a recipe on this machine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

use super::cluster::submit;
use super::output::{self, say, say_next};
use super::place::{self, Place, Reachable};
use super::plan::text;
use super::processes::{Asked, DeviceChoice, Processes};
use super::recipe_args::{RecipeArgs, RecipeOptions, take_override};
use super::signals::Signals;
use super::slurm as slurm_jobs;
use super::{
    EXIT_DRAINED, EXIT_REFUSED, EXIT_USAGE, first_set, is_kubectl_plugin, needs, next_command,
    parse_launch, refuse_unread, render, report, typed,
};
use crate::api::TrainerDevice;
use crate::bucket::Bucket;
use crate::data::Phase;
use crate::external_trainer;
use crate::hub::Hub;
use crate::inventory::Inventory;
use crate::launch::Phase as RunPhase;
use crate::launch::hosts::slurm::submission::Submission;
use crate::launch::hosts::{self, Hosts, Reach, slurm};
use crate::launch::{
    LaunchError, Launcher, Request, RunDir, RunLock, RunOptions, base, continued, download, index,
    port, prepare, requirements, run_path, with_command_of_run, with_inputs, with_snapshots,
};
use crate::lifecycle::End;
use crate::lifecycle::stall::{OnStall, ProgressDeadline};
use crate::plan::{AskedRunner, MOST_GPUS, OomPolicy, Runner};
use crate::recipe::{self, Diagnostic, Origin, ReadError, Recipe, Spec, trainer_command};
use crate::telemetry::{Display, Event, Mode};
use crate::train::run_files::publish;
use crate::util::durable::FileError;

/// Longest wait for the launcher of a node that Slurm has given up.
const LONGEST_LOCK: Duration = Duration::from_secs(600);

/// Train a recipe on this machine, or with --nodes on a cluster.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  the built-in trainer
    evenkeel launch examples/quickstart.yaml
    evenkeel launch recipe.yaml --procs 2 --recipe-gpus 8 max_seq_length=128
    evenkeel launch recipe.yaml --procs 3 --remainder uneven --name uneven
  your own trainer
    evenkeel launch recipe.yaml --recipe-gpus 8 --procs 4 -- \\
      python train.py --config {recipe} {resume_args}
    evenkeel launch recipe.yaml --procs 2 -- python train.py \\
      --config {recipe} --output_dir {checkpoint_dir} {resume_args}
    evenkeel launch --gpus 6 -- torchrun --nproc_per_node 8 train.py \\
      --per_device_train_batch_size 8
    evenkeel launch --gpus 4 -- accelerate launch --config_file fsdp.yaml \\
      sft.py --config recipe.yaml
  other machines, which share the run's directory or a bucket
    evenkeel launch recipe.yaml --on ssh:h1,h2 --out /shared/run
    evenkeel launch recipe.yaml --on ssh:h1,h2 --bucket s3://bucket/prefix
    evenkeel launch recipe.yaml --on slurm --nodes 8 --gpus-per-node 8 \\
      --time 12:00:00 --out /shared/run
  a cluster
    evenkeel launch recipe.yaml --nodes 8 --gpus-per-node 8 -n training
  the newest run of the recipe again
    evenkeel launch recipe.yaml --resume

The command after `--` is an external trainer, started once per process with
torchrun's environment. A launcher before it (torchrun, accelerate launch,
deepspeed, trl) is replaced; its settings reach every process. The plan fills in
its placeholders {recipe}, {args}, {resume_args}, {checkpoint_dir},
{per_device_batch_size} and {gradient_accumulation_steps}
(docs/external-trainer.md).

Ctrl-C commits a checkpoint and exits with 143; a second one stops immediately.
SIGTERM and a closed terminal do the same. Before training, a stop removes the
directory of a new run.

Exit codes: 0 finished, 1 a rule refuses the recipe or the run failed, 2 invalid
arguments or a file that cannot be used, 143 drained by a signal.")]
pub struct Args {
    /// Recipe file in any supported dialect, the folder of a config tree (HALOs,
    /// direct-preference-optimization), or a script with the command that starts it. Without a
    /// recipe, the command after `--` defines the job and runs without its launcher
    #[arg(required_unless_present = "command")]
    recipe: Option<PathBuf>,
    #[command(flatten)]
    options: RecipeOptions,
    /// Change a key of the recipe in its dialect (`max_seq_length=128`), or a native key as
    /// `evenkeel.trainer.drain_seconds=30`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Number of training processes. Default: the value of --gpus, else one per usable GPU, else 1 with
    /// all cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST_GPUS))]
    procs: Option<u64>,
    /// Where the built-in trainer computes: on GPUs (cuda), on the CPU (cpu), or on GPUs if each
    /// process can have one (auto). With --nodes, auto is the GPUs of an NVIDIA resource. Training on
    /// several GPUs has not run on hardware yet (docs/gpu.md).
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// Where the ranks run: `here`, `ssh:h1,user@h2:2222` or `ssh:FILE` for hosts that ssh reaches
    /// (one a line, `h1 gpus=8`), `slurm` for the nodes of the allocation that this is in, or with
    /// --nodes of jobs that are submitted, `k8s` for a cluster. Default: here; with --nodes the
    /// allocation, else k8s.
    #[arg(long, value_name = "PLACE", value_parser = Place::from_str)]
    on: Option<Place>,
    /// Name of the run, whose directory is runs/NAME unless --out sets another. Without --out,
    /// a taken name is refused. With --nodes, the name of the TrainingJob. Default: the recipe's name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Run directory. Default: runs/NAME of --name, else the recipe's output, else runs/NAME of the
    /// recipe's name, numbered if it exists.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume the run in --out, the run of that --name, or the newest run of this recipe.
    #[arg(long)]
    resume: bool,
    /// Memory limit of a rank for the model and its training state, in bytes or as 2GiB. The
    /// micro-batch shrinks to stay below it.
    #[arg(long, value_name = "BYTES", value_parser = crate::util::size::parse)]
    rank_memory: Option<u64>,
    /// Reaction to out-of-memory before the first checkpoint: exact keeps the global batch;
    /// transformers and transformers-before-1.9 (of accelerate) restart with a smaller one, as
    /// upstream does. After a checkpoint it is always exact.
    #[arg(long, value_name = "POLICY", default_value = "exact", value_parser = OomPolicy::from_str)]
    oom_policy: OomPolicy,
    /// Seconds without progress after which a rank counts as stalled; 0: never. Default: 20 times the
    /// longest interval so far and at least 10 minutes; 30 for an external trainer that reports steps.
    #[arg(long, value_name = "SECONDS")]
    progress_deadline: Option<u32>,
    /// Reaction to a stalled rank: report only warns; restart continues from the newest checkpoint
    /// without it; exclude-node, on a cluster, also gives its node no pods of the job any more,
    /// unless it waited for other ranks.
    #[arg(
        long,
        value_name = "REACTION",
        value_enum,
        hide_possible_values = true,
        default_value = "restart"
    )]
    on_stall: OnStall,
    /// External trainer that replaces the built-in trainer. Every process runs it. Evenkeel replaces
    /// its launcher. With --resume it may be omitted
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// Output format: progress bars on a terminal and plain lines elsewhere, or one JSON object per
    /// event.
    #[arg(long, value_enum, default_value_t = Log::Text)]
    log: Log,
    /// Print only warnings and the result.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    slurm: slurm_jobs::Args,
    #[command(flatten)]
    cluster: submit::Args,
}

impl Args {
    /// The run that is meant.
    fn run(&self) -> RunOptions<'_> {
        RunOptions {
            out: self.out.as_deref(),
            name: self.name.as_deref(),
            resume: self.resume,
        }
    }

    /// Whether nodes of Slurm run the ranks.
    pub fn is_on_slurm(&self) -> bool {
        self.on == Some(Place::Slurm)
    }

    /// The hosts that ranks run on by SSH, as the user names them.
    pub fn listed_hosts(&self) -> Option<&str> {
        match &self.on {
            Some(Place::Ssh(listed)) => Some(listed),
            _ => None,
        }
    }

    /// Where the ranks run.
    fn place(&self) -> Place {
        match (&self.on, self.options.nodes) {
            (Some(place), _) => place.clone(),
            (None, Some(_)) if slurm::is_inside() && !is_kubectl_plugin() => Place::Slurm,
            (None, Some(_)) => Place::Kubernetes,
            (None, None) => Place::Here,
        }
    }

    /// Refuses options that do not apply to this place.
    fn refuse_elsewhere(&self, place: &Place) -> anyhow::Result<()> {
        let nodes = self.options.nodes.is_some();
        let per_node = self.options.gpus_per_node.map(|_| "--gpus-per-node");
        match place {
            Place::Kubernetes => {
                needs(Some("--on k8s").filter(|_| !nodes), "--nodes")?;
                needs(self.slurm.flag(), "--on slurm")?;
            }
            Place::Slurm => {
                if let Some(flag) = self.cluster.flag_of_kubernetes() {
                    bail!("`{flag}` applies to Kubernetes; remove it");
                }
                if slurm::is_inside() && Submission::of_process()?.is_none() {
                    self.slurm.refuse_inside(&self.cluster)?;
                }
            }
            Place::Here | Place::Ssh(_) if nodes => bail!(
                "`--nodes` launches on a cluster, and `--on {place}` does not; remove one of them"
            ),
            Place::Ssh(_) => {
                let flag = self.cluster.flag_without_bucket().or(self.slurm.flag());
                if let Some(flag) = flag.or(per_node) {
                    bail!("`{flag}` does not apply to `--on ssh`; remove it");
                }
            }
            Place::Here => {
                if self.cluster.bucket().is_some() {
                    bail!(
                        "`--bucket` is for hosts or pods, and this run is on one machine; add `--on ssh:HOSTS`, `--on slurm` or \
                         `--nodes N`, or remove it"
                    );
                }
                needs(self.cluster.flag(), "--nodes")?;
                needs(self.slurm.flag(), "--on slurm")?;
            }
        }
        needs(per_node.filter(|_| !nodes), "--nodes")
    }
}

/// Output format of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Log {
    /// Progress bars or plain lines.
    Text,
    /// One JSON object per event.
    Json,
}

/// Launches with the arguments of this process.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    // A path that is not UTF-8 is refused before a run is recorded.
    run_typed(args, typed())
}

/// What a resume changes of a launch.
pub struct Changes {
    /// Number of processes.
    pub procs: Option<u64>,
    /// Number of nodes that Slurm gives.
    pub nodes: Option<u64>,
    /// Hosts, as after `--on ssh:`.
    pub hosts: Option<String>,
}

/// Resumes the run in `out` with the words of its launch.
pub fn again(typed: &[String], out: &Path, changes: Changes) -> anyhow::Result<ExitCode> {
    let Changes {
        procs,
        nodes,
        hosts,
    } = changes;
    let mut args = parse_launch(typed)?;
    if let (Some(Place::Ssh(listed)), Some(hosts)) = (&mut args.on, hosts) {
        *listed = hosts;
    }
    args.resume = true;
    args.out = Some(out.to_path_buf());
    args.name = None;
    if procs.is_some() {
        args.procs = procs;
        args.options.gpus = None;
    }
    let mut words = typed.to_vec();
    if args.place() == Place::Slurm {
        args.options.nodes = nodes.or(args.options.nodes);
        // The jobs launch with these words.
        for (option, value) in [("--procs", procs), ("--nodes", nodes)] {
            let typed = next_command::Typed {
                words: &words,
                overrides: &[],
            };
            if let Some(value) = value {
                words = typed.replaced(&[option], &[option.to_owned(), value.to_string()]);
            }
        }
    } else if nodes.is_some() {
        bail!(
            "`--nodes` changes the nodes of a run on Slurm, and this one is elsewhere; use `--procs` for its processes"
        );
    }
    run_typed(args, words)
}

/// `typed`: the words after the program's name.
fn run_typed(mut args: Args, typed: Vec<String>) -> anyhow::Result<ExitCode> {
    take_override(&mut args.recipe, &mut args.overrides, &args.command);
    let place = args.place();
    args.refuse_elsewhere(&place)?;
    if place != Place::Kubernetes && is_kubectl_plugin() {
        bail!("`kubectl evenkeel launch` needs `--nodes`; `evenkeel launch` trains elsewhere");
    }
    if let Some(task) = slurm::later_task().filter(|_| place != Place::Kubernetes) {
        bail!(
            "this is task {task} of `srun`, and only one process launches; remove `srun`, and add `--on slurm` to train on all \
             nodes"
        );
    }
    let mut from = RecipeArgs {
        recipe: args.recipe.clone().unwrap_or_default(),
        options: args.options.clone(),
        overrides: args.overrides.clone(),
    };
    let mut recipe = match read(&args, &from) {
        Ok(recipe) => recipe,
        // A cluster's pods have other files, and a program may download what is absent here.
        Err(error) if place == Place::Kubernetes || !args.command.is_empty() => {
            return Ok(refuse_unread(&error, args.quiet));
        }
        Err(error) => {
            let hub = from.options.hub();
            let error = with_inputs(error, AskedRunner::Launch, &base()?, &hub);
            return Ok(refuse_unread(&error, args.quiet));
        }
    };
    // Slurm starts a preempted job again with the same words, and a job's successor has them too.
    let is_submitted = Submission::of_process()?.is_some();
    if place == Place::Slurm && (slurm::is_requeued() || is_submitted) {
        let again = RunOptions {
            resume: true,
            ..args.run()
        };
        let run = run_path::choose(&again, &recipe.spec);
        args.resume |= run.is_ok_and(|run| run.contains_run());
    }
    // A resume may omit the command of the run.
    if args.resume
        && !recipe.spec.trainer.is_external()
        && let Some(of_run) = with_command_of_run(&args.run(), &recipe)?
    {
        recipe = match external_trainer::launcher::completed(of_run, &Origin::Disk) {
            Ok(completed) => completed,
            Err(error) => return Ok(refuse_unread(&error, args.quiet)),
        };
    }
    if recipe.launcher_replaced {
        // A TrainingJob's recipe is read without the launcher.
        from.options.recipe_gpus = from.options.recipe_gpus.or(recipe.spec.batch.gpus);
    }
    if place != Place::Kubernetes {
        refuse_for_trainer(&args, &recipe)?;
    }
    if let (Place::Slurm, false, Some(nodes)) = (&place, slurm::is_inside(), from.options.nodes) {
        if args.log != Log::Text {
            bail!(
                "`--log` applies to a launch that trains at once, and this one is submitted; remove it"
            );
        }
        return slurm_jobs::submit(
            &slurm_jobs::Launch {
                args: &args.slurm,
                cluster: &args.cluster,
                from: &from,
                recipe: &recipe,
                run: args.run(),
                typed: &typed,
                procs: args.procs,
                rank_memory: args.rank_memory,
                on_cpu: args.device == DeviceChoice::Cpu,
                quiet: args.quiet,
            },
            nodes,
        );
    }
    if let Some(nodes) = from.options.nodes.filter(|_| place == Place::Kubernetes) {
        let here = [
            ("--procs", args.procs.is_some()),
            ("--out", args.out.is_some()),
            ("--resume", args.resume),
            ("--oom-policy", args.oom_policy != OomPolicy::default()),
        ];
        if let Some(flag) = first_set(&here) {
            bail!(
                "`{flag}` applies to this machine, and `--nodes` launches on a cluster; remove one of them"
            );
        }
        let launch = submit::Launch {
            args: &args.cluster,
            from: &from,
            recipe: &recipe,
            command: &args.command,
            name: args.name.as_deref(),
            rank_memory: args.rank_memory,
            progress_deadline_seconds: args.progress_deadline,
            on_stall: args.on_stall,
            device: match args.device {
                DeviceChoice::Auto => TrainerDevice::Auto,
                DeviceChoice::Cuda => TrainerDevice::Cuda,
                DeviceChoice::Cpu => TrainerDevice::Cpu,
            },
        };
        return submit::run(&launch, nodes, mode(&args));
    }
    let mut shown = Vec::new();
    let ended = launch(&args, &typed, &recipe, &mut shown);
    let words: Vec<String> = std::iter::once("evenkeel".to_owned())
        .chain(typed)
        .collect();
    let typed = next_command::Typed {
        words: &words,
        overrides: &args.overrides,
    };
    if let Err(error) = &ended
        && let Some(LaunchError::Hub(failed)) = error.downcast_ref()
    {
        say(format_args!("error: {failed}\n"));
        say_next(&next_command::after_download(&recipe, failed, &typed));
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    // Some rules need data counts and report only after the preparation.
    if let Err(error) = &ended
        && let Some(LaunchError::Refused(refused)) = error.downcast_ref()
    {
        let diagnostics = refused.findings.iter();
        let news: Vec<Diagnostic> = diagnostics
            .filter(|d| !shown.contains(d))
            .cloned()
            .collect();
        render::print_for(args.quiet, &news, &recipe.sources);
        say(render::closing(&refused.findings));
        let facts = &refused.facts;
        let counts = next_command::Counts {
            asked: facts.world_size,
            exact: &facts.feasible_gpu_counts,
        };
        let next = next_command::after_refusal(&recipe, &refused.findings, &counts, &typed);
        say_next(&next);
        return Ok(ExitCode::from(EXIT_REFUSED));
    }
    ended
}

/// Reads the recipe with the command and the settings of the external trainer. Without a recipe the command is the job.
fn read(args: &Args, from: &RecipeArgs) -> Result<Recipe, ReadError> {
    let (job, trainer): (&[String], &[String]) = match args.recipe {
        Some(_) => (&[], &args.command),
        None => (&args.command, &[]),
    };
    external_trainer::launcher::read(&recipe::Request {
        starts_command: args.recipe.is_none(),
        trainer_command: trainer.to_vec(),
        ..from.options.request(&from.recipe, &from.overrides, job)
    })
}

/// Refuses options that the trainer of the recipe does not have, and a script that is absent.
fn refuse_for_trainer(args: &Args, recipe: &Recipe) -> anyhow::Result<()> {
    let external = recipe.spec.trainer.is_external();
    let built_in_only = [
        ("--rank-memory", args.rank_memory.is_some()),
        ("--device", args.device != DeviceChoice::Auto),
    ];
    if let Some(flag) = first_set(&built_in_only).filter(|_| external) {
        bail!("{flag} applies only to the built-in trainer; remove it");
    }
    if external && args.cluster.bucket().is_some() {
        bail!(
            "on hosts `--bucket` keeps only what the built-in trainer writes; put the run of your program into a directory that \
             all hosts have with `--out`, or launch it on a cluster with `--nodes N`"
        );
    }
    let script = trainer_command::script(&recipe.spec.trainer.command);
    if let Some(script) = script.filter(|script| !args.resume && !Path::new(script).exists()) {
        bail!(
            "{script}: no such file; correct the path, or run evenkeel in the folder that it starts from"
        );
    }
    Ok(())
}

/// The training processes and their devices.
fn processes(
    args: &Args,
    external: bool,
    inventory: &Inventory,
    hosts: Option<&Hosts>,
) -> anyhow::Result<Processes> {
    let asked = Asked {
        procs: args.procs,
        // Slurm gives whole nodes.
        world: args.options.gpus,
        device: args.device,
    };
    match hosts {
        Some(hosts) => asked.on_hosts(hosts, external),
        None => asked.here(external, inventory),
    }
}

/// The hosts of the place; none if it is this machine.
fn reach(args: &Args) -> anyhow::Result<Reachable> {
    match args.place() {
        Place::Here | Place::Kubernetes => Ok(Reachable::default()),
        Place::Ssh(listed) => Reachable::of_list(&listed),
        Place::Slurm => {
            let out = args.out.as_deref();
            args.slurm.nodes(&args.options, out)
        }
    }
}

/// Reaches the other machines that run the ranks, if there are any.
fn connect(hosts: Vec<Reach>, resumes: bool, signals: &Signals) -> anyhow::Result<Option<Hosts>> {
    if hosts.is_empty() {
        return Ok(None);
    }
    let program = std::env::current_exe()?;
    let (notes, noted) = channel();
    let connecting = thread::spawn(move || Hosts::connect(&hosts, &program, resumes, &notes));
    // The channel closes when all have answered.
    loop {
        match noted.recv_timeout(Duration::from_millis(50)) {
            Ok(note) => say(format_args!("note: {note}\n")),
            Err(RecvTimeoutError::Timeout) if signals.is_raised() => {
                return Err(LaunchError::Stopped.into());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    match connecting.join() {
        Ok(hosts) => Ok(Some(hosts?)),
        Err(_) => bail!("the hosts could not be called"),
    }
}

/// Stores the printed diagnostics in `shown`. `typed`: the words after the program's name.
fn launch(
    args: &Args,
    typed: &[String],
    recipe: &Recipe,
    shown: &mut Vec<Diagnostic>,
) -> anyhow::Result<ExitCode> {
    let inventory = Inventory::discover();
    let signals = Signals::listen()?;
    let asked = args.run();
    let external = recipe.spec.trainer.is_external();
    let Reachable { hosts, jobs } = reach(args)?;
    let mut ending = slurm_jobs::Ending(jobs.clone());
    ending.watch(signals.count());
    if let Some(Err(error)) = jobs.as_ref().map(|jobs| jobs.prepare_successor()) {
        say(format_args!(
            "warning: the run stops with this job, because the next one cannot be submitted: {error}; `evenkeel resume` \
             continues it\n"
        ));
    }
    let hosts = match connect(hosts, args.resume, &signals) {
        Err(error) if matches!(error.downcast_ref(), Some(LaunchError::Stopped)) => {
            ending.leave_to_next();
            return Ok(stopped(None, &signals));
        }
        hosts => hosts?,
    };
    let processes = processes(args, external, &inventory, hosts.as_ref())?;
    let mut hosts = hosts.map(|hosts| hosts.on(processes.device));
    let ranks = processes.count;
    let spec = recipe.spec.of_world(ranks);
    let run_dir = run_path::choose(&asked, &spec)?;
    let spec = Spec {
        name: run_path::name(&run_dir, &asked, &spec)?,
        ..spec
    };
    let recipe = &Recipe {
        spec: if args.resume {
            with_snapshots(spec, &run_dir.run()?.spec)
        } else {
            spec
        },
        ..recipe.clone()
    };
    let bucket = bucket(args, &run_dir, hosts.is_some())?;
    let runner = Runner::of(
        &recipe.spec,
        AskedRunner::Launch,
        processes.device,
        args.rank_memory,
    );
    let device_memory = match &hosts {
        Some(hosts) => place::memory(hosts, &processes),
        None => processes.memory(external, &inventory),
    };
    let request = Request {
        recipe_path: args.recipe.clone().unwrap_or_else(|| "command".into()),
        overrides: args.overrides.clone(),
        command_line: typed.to_vec(),
        runner,
        device_memory,
        oom_policy: args.oom_policy,
        progress_deadline: ProgressDeadline::of(args.progress_deadline),
        on_stall: args.on_stall,
        cores: inventory.cpu.cores,
        gpus: processes.gpus.iter().map(|gpu| gpu.id.clone()).collect(),
        gpus_together: processes.together,
        most_on_a_host: hosts.as_ref().map_or(u64::MAX, Hosts::most_on_a_host),
        bucket: args.cluster.bucket().map(str::to_owned),
        resume: args.resume,
        signals: signals.count(),
    };
    let (reached, runner) = continued(&run_dir, recipe, &request)?;
    let mut hub = Hub::of_process();
    let memory = (device_memory, args.oom_policy);
    let planned = prepare::plan(recipe, ranks, reached, runner, memory, &hub)?;
    let devices = match &hosts {
        Some(hosts) => hosts.to_string(),
        None => processes.devices(external, &inventory),
    };
    if args.cluster.dry_run {
        let request = planned.worlds.request();
        output::print(text::plan(recipe, request, &planned.draft, None, &devices))?;
        for repo in planned.downloads() {
            say(format_args!("the launch downloads {repo}\n"));
        }
        say(format_args!(
            "nothing was started; without `--dry-run` the run is in {}\n",
            run_dir.path().display()
        ));
        return Ok(ExitCode::SUCCESS);
    }
    render::print_for(args.quiet, &planned.draft.findings, &recipe.sources);
    shown.clone_from(&planned.draft.findings);

    // Check the network before any file is written.
    match &hosts {
        Some(hosts) => hosts.check_links()?,
        None => drop(port::free(ranks)?),
    }
    // A launcher on a node that is cut off may hold it still, when Slurm has started the run again elsewhere.
    let longest = jobs.as_ref().map_or(Duration::ZERO, |_| LONGEST_LOCK);
    let run_lock = acquire(run_dir, &asked, &recipe.spec, longest, &signals)?;
    let run_dir = run_lock.run_dir();
    if let Some(hosts) = &mut hosts {
        if let Some(bucket) = &bucket {
            hosts.reach_bucket(bucket)?;
        }
        if bucket.is_none() || hosts.share_small_files() {
            hosts.share(run_dir.path())?;
        }
        if external {
            let trainer = requirements(run_dir, recipe, args.resume)?;
            hosts.can_run(trainer, &recipe.key("trainer.checkpoint_dir"))?;
        }
    }
    if args.resume
        && let Some(listed) = args.listed_hosts()
        && run_dir.run()?.command_line != typed
    {
        run_dir.keep_hosts(hosts::absolute(listed)?)?;
    }
    let mut display = Display::new(mode(args));
    let downloaded = download(
        planned,
        recipe,
        &request,
        &mut hub,
        &mut |repo, received| {
            display.event(&Event::Preparing {
                what: format!("downloading {repo}"),
                done: received.bytes,
                total: received.total,
            });
        },
    );
    let planned = match downloaded {
        Err(LaunchError::Stopped) => {
            drop(display);
            ending.leave_to_next();
            let resumed = args.resume.then_some(run_dir);
            return Ok(stopped(resumed, &signals));
        }
        planned => planned?,
    };
    let found = planned.draft.findings.iter();
    let found: Vec<_> = found.filter(|it| !shown.contains(it)).cloned().collect();
    for Diagnostic {
        rule,
        message,
        help,
        ..
    } in &found
    {
        display.event(&Event::Warning {
            message: format!("{rule}: {message}; {help}"),
        });
    }
    shown.extend(found);
    let prepared = match prepare::prepare(run_dir, recipe, &planned, &request, &mut |progress| {
        display.event(&Event::Preparing {
            what: match progress.phase {
                Phase::Checksums => "checksums of the data".into(),
                Phase::Downloading => "downloading the data".into(),
                Phase::Tokenising => "tokenising".into(),
            },
            done: progress.bytes,
            total: progress.total,
        });
    }) {
        Err(LaunchError::Stopped) => {
            drop(display);
            ending.leave_to_next();
            let resumed = args.resume.then_some(run_dir);
            return Ok(stopped(resumed, &signals));
        }
        prepared => prepared?,
    };
    if !args.resume {
        index::add(run_dir);
    }
    if let Some(url) = &prepared.run.bucket {
        let published = publish(&Bucket::open(url)?, run_dir.path(), &mut |done, total| {
            display.event(&Event::Preparing {
                what: format!("copying the data to {url}"),
                done,
                total,
            });
            !signals.is_raised()
        });
        if !published.map_err(LaunchError::from)? {
            drop(display);
            ending.leave_to_next();
            return Ok(stopped(Some(run_dir), &signals));
        }
    }
    let run = &prepared.run;
    display.event(&Event::Planned {
        name: run_dir.path().display().to_string(),
        formula: prepared.formula(&planned),
        world: ranks,
        global_batch: run.global_batch_size,
        budget: run.horizon.budget_samples.unwrap_or_default(),
        devices,
        floor: run.built_in.as_ref().and_then(|it| it.entropy),
    });
    for message in prepared.facts.iter().cloned() {
        display.event(&Event::Note { message });
    }
    for message in processes.note.iter().chain(&prepared.notes).cloned() {
        display.event(&Event::Warning { message });
    }
    signals.hand_over();
    // Until Slurm gives more nodes, fewer train.
    let desired = args.procs.filter(|_| jobs.is_some()).unwrap_or(ranks);
    let launcher = Launcher::new(&run_lock, prepared, desired, &request, &mut display)?;
    let stated = args.procs.or(args.options.gpus).is_some();
    let launcher = match hosts {
        Some(hosts) => launcher.on(hosts, !stated),
        None => launcher,
    };
    let end = launcher.run();
    if matches!(end, Ok(End::Drained)) && signals.is_raised() {
        ending.leave_to_next();
    }
    drop(ending);
    // From here on, an error is a failure of the run, not of the arguments.
    let end = match end {
        Err(refused @ LaunchError::Refused(_)) => return Err(refused.into()),
        Err(error) => End::Failed {
            message: error.to_string(),
        },
        Ok(end) => end,
    };
    drop(display);
    finish(run_dir, &end, external)
}

/// The bucket in which the run's hosts can keep it: the typed one for a new run, and for a resume that of the run. `elsewhere`:
/// other hosts run the ranks.
fn bucket(args: &Args, run_dir: &RunDir, elsewhere: bool) -> anyhow::Result<Option<Bucket>> {
    let typed = args.cluster.bucket();
    if !args.resume {
        return Ok(typed.map(Bucket::open).transpose()?);
    }
    let place = run_dir.path().display();
    match (run_dir.run()?.bucket, typed) {
        (None, None) => Ok(None),
        (None, Some(_)) => bail!(
            "the checkpoints of {place} are in this directory, and a resume does not move them; remove `--bucket`"
        ),
        (Some(url), Some(typed))
            if !url.starts_with(&format!("{}/", typed.trim_end_matches('/'))) =>
        {
            bail!("the checkpoints of {place} are in {url}; remove `--bucket {typed}`")
        }
        (Some(url), _) if !elsewhere => bail!(
            "the checkpoints of {place} are in {url}, and this machine is none of its hosts; add `--on ssh:HOSTS` or `--on slurm`"
        ),
        (Some(url), _) => Ok(Some(Bucket::open(&url)?)),
    }
}

/// Locks the run's directory. `longest`: how long to wait for another launcher that holds it.
fn acquire(
    run_dir: RunDir,
    asked: &RunOptions<'_>,
    spec: &Spec,
    longest: Duration,
    signals: &Signals,
) -> anyhow::Result<RunLock> {
    let begun = Instant::now();
    let mut waits = false;
    loop {
        match run_path::acquire(run_dir.clone(), asked, spec) {
            Err(LaunchError::File(held @ FileError::HeldBy { .. }))
                if begun.elapsed() < longest && !signals.is_raised() =>
            {
                if !std::mem::replace(&mut waits, true) {
                    say(format_args!(
                        "note: {held}; waiting up to {} s for that\n",
                        longest.as_secs()
                    ));
                }
                thread::sleep(Duration::from_secs(1));
            }
            locked => return Ok(locked?),
        }
    }
}

/// Prints the result and the next step. `external`: an external trainer ran.
fn finish(run_dir: &RunDir, end: &End, external: bool) -> anyhow::Result<ExitCode> {
    let place = run_dir.path().display();
    Ok(match end {
        End::Finished if external => {
            say(format_args!("finished: {place}\n"));
            ExitCode::SUCCESS
        }
        End::Finished => {
            let page = report::write(run_dir, None)?;
            say(format_args!(
                "finished: {place}; report: {}\n",
                page.display()
            ));
            ExitCode::SUCCESS
        }
        End::Drained
            if run_dir
                .state()?
                .is_some_and(|state| state.phase == RunPhase::Cancelled) =>
        {
            say(format_args!("cancelled: {place} keeps its files\n"));
            ExitCode::from(EXIT_REFUSED)
        }
        End::Drained => {
            say(format_args!(
                "stopped; `evenkeel resume {place}` continues the run\n"
            ));
            ExitCode::from(EXIT_DRAINED)
        }
        End::Failed { message } => {
            say(format_args!(
                "error: {message}\n  the ranks' logs are in {place}/gen-*/logs/\n"
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

/// Reports a signal before training. Dropping the run lock removes the files of a new run.
fn stopped(resumed: Option<&RunDir>, signals: &Signals) -> ExitCode {
    if let Some(run_dir) = resumed {
        say(format_args!(
            "stopped before training: no process was started, and {} is unchanged; the same command \
             continues\n",
            run_dir.path().display()
        ));
        return ExitCode::from(EXIT_DRAINED);
    }
    say("stopped before training: no process was started; the same command starts again\n");
    ExitCode::from(signals.exit_code())
}
