//! `evenkeel plan`: the batch arithmetic of a recipe in a given world, without starting a process.

mod estimate;
pub(super) mod text;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::bail;
use serde::Serialize;

use super::cluster::ClusterArgs;
use super::next_command::{self, Counts, Typed};
use super::output::{self, Format};
use super::processes::{Asked, DeviceChoice};
use super::recipe_args::{RecipeOptions, TrainerChoice, take_override};
use super::{EXIT_REFUSED, first_set, needs, render, typed, unread};
use crate::api::NVIDIA_GPU;
use crate::client;
use crate::export::{self, BatchNumbers, Form};
use crate::inventory::Inventory;
use crate::launch::{self, survey, with_inputs};
use crate::plan::{
    self, AskedRunner, DeviceKind, Draft, Horizon, OomPolicy, OomStep, PlanRequest, Runner,
};
use crate::recipe::{Diagnostic, Dialect, Located, ReadError, Recipe};
use crate::util::size;

/// Show the batch plan of a recipe
#[derive(clap::Args)]
#[command(after_help = "Examples:
  half the GPUs, the same global batch
    evenkeel plan recipe.yaml --recipe-gpus 8 --gpus 4
    evenkeel plan recipe.yaml --recipe-gpus 8 --gpus 4 --emit recipe > r4.yaml
  two nodes, and whether it fits
    evenkeel plan recipe.yaml --nodes 2 --gpus-per-node 8 --device-memory 80GB
    evenkeel plan recipe.yaml --gpus 8 --device-memory 24GiB
  a count that does not divide the batch
    evenkeel plan recipe.yaml --gpus 3 --remainder uneven
  a command, a config tree, a DeepSpeed config by itself
    evenkeel plan --gpus 6 -- torchrun --nproc_per_node 4 train.py \\
      --per_device_train_batch_size 8
    evenkeel plan HALOs/config loss=dpo model=llama exp_name=x --gpus 8
    evenkeel plan ds_config.json --gpus 8
  the GPUs that are free in a cluster now
    evenkeel plan recipe.yaml --from-cluster
  what upstream does after out-of-memory
    evenkeel plan recipe.yaml --gpus 8 --oom-policy transformers
  a micro-batch that fits
    evenkeel plan recipe.yaml --recipe-gpus 8 --estimate --device-memory 24GB
    evenkeel plan --estimate --model 7B --gpus 1 --device-memory 24GB
  as data, with another key
    evenkeel plan recipe.yaml --gpus 8 -o json max_seq_length=1024

Without --gpus or --nodes the plan is for the detected hardware.
Exit codes: 0 success, 1 a rule refuses the recipe or the plan, 2 invalid
arguments or a file that cannot be read.")]
pub struct Args {
    /// Recipe file in any supported dialect, or a script with the command that starts it
    #[arg(required_unless_present_any = ["command", "model"])]
    recipe: Option<PathBuf>,

    #[command(flatten)]
    options: RecipeOptions,

    /// Change a key of the recipe in its dialect: `max_seq_length=128`,
    /// `dataset_mixture.datasets.0.id=chat.jsonl`, or a native key as
    /// `evenkeel.model.config.hidden_size=64`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,

    /// Your current start command: launcher, script and arguments. Its values override the recipe,
    /// and it may contain the paths of the recipe and its configs
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,

    /// Memory of every device, in bytes or with a unit: KB, MB, GB, TB are powers of 1000 (80GB),
    /// KiB, MiB, GiB, TiB powers of 1024 (24GiB) [default: that of the detected hardware if no GPU
    /// count is given; else unknown, and the plan does not check whether the model fits]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    device_memory: Option<u64>,

    /// Show the reaction to out-of-memory: exact, transformers, transformers-before-1.9 (of
    /// accelerate). Evenkeel's default is exact; upstream's policies shrink the global batch
    #[arg(long, value_name = "POLICY", value_parser = OomPolicy::from_str)]
    oom_policy: Option<OomPolicy>,

    /// What runs the plan; its own rules apply too [default: external for a command, or for --emit of another
    /// framework's recipe; else any: the rules that hold for every trainer]
    #[arg(long, value_enum, value_name = "TRAINER")]
    trainer: Option<TrainerChoice>,

    /// Propose the largest per-device batch that fits the devices' memory, ignoring the recipe's
    /// value
    #[arg(long)]
    estimate: bool,

    /// Estimate for a model without a recipe: a hub id, or a size such as 7B. Native keys change
    /// the assumptions: `model.precision=f32`, `parallel.strategy=fsdp`
    #[arg(
        long,
        value_name = "MODEL",
        requires = "estimate",
        conflicts_with_all = ["command", "global_batch_size"]
    )]
    model: Option<String>,

    /// Plan for the free GPUs of the cluster, or, with --nodes, for that many of its nodes
    #[arg(long, conflicts_with = "gpus")]
    from_cluster: bool,

    /// Resource name of a GPU in the nodes' allocatable resources, with --from-cluster [default:
    /// nvidia.com/gpu]
    #[arg(long, value_name = "NAME")]
    resource: Option<String>,

    #[command(flatten)]
    cluster: ClusterArgs,

    /// Print the plan in a form to run: the recipe in its dialect with only its batch numbers
    /// changed, trainer arguments, environment variables, or a launcher's config
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "output")]
    emit: Option<Emit>,

    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Emit {
    /// The recipe, script or command in its dialect
    Recipe,
    /// Arguments of its trainer
    Args,
    /// Environment variables
    Env,
    /// The accelerate config of the recipe, or a new one
    Accelerate,
    /// The DeepSpeed config of the recipe
    Deepspeed,
}

impl From<Emit> for Form {
    fn from(emit: Emit) -> Form {
        match emit {
            Emit::Recipe => Form::Recipe,
            Emit::Args => Form::Args,
            Emit::Env => Form::Env,
            Emit::Accelerate => Form::Accelerate,
            Emit::Deepspeed => Form::Deepspeed,
        }
    }
}

/// Schema of `-o json`: the keys of a plan (null if refused), and more.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    draft: &'a Draft,
    /// Version of the dialect that the recipe is read as.
    #[serde(skip_serializing_if = "Option::is_none")]
    dialect_version: Option<&'a str>,
    /// Reason for the detected dialect and version.
    detected: &'a str,
    /// Description of the planned hardware.
    hardware: &'a str,
    /// What runs the plan.
    runner: Runner,
    /// What the built-in trainer refuses in a plan for any runner.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_by_built_in: Option<String>,
    /// Samples between evaluations, or null.
    eval_every: Option<u64>,
    /// Lengths in samples.
    horizon: Option<&'a Horizon>,
    /// The out-of-memory descent, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    oom: Option<&'a [OomStep]>,
}

/// Schema of `-o json` for an unreadable recipe.
#[derive(Serialize)]
struct Unreadable {
    diagnostics: Vec<Located>,
}

pub fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    take_override(&mut args.recipe, &mut args.overrides, &args.command);
    let path = args.recipe.clone().unwrap_or_default();
    let read = match &args.model {
        Some(model) => estimate::recipe(model, args.recipe.as_deref(), &args.overrides)?,
        None => args.options.read_job(&path, &args.overrides, &args.command),
    };
    // A command or a plan that is emitted in another framework's form implies an external trainer.
    let is_native = read
        .as_ref()
        .is_ok_and(|recipe| recipe.dialect == Dialect::Native);
    let external = args.emit.is_some() && !is_native || !args.command.is_empty();
    // An estimate for a model is for the many programs with PEFT.
    let external = external || args.model.is_some();
    let asked = match args.trainer {
        None if external => AskedRunner::External,
        choice => TrainerChoice::asked(choice),
    };
    let hub = args.options.hub();
    let recipe = match read {
        Ok(recipe) => recipe,
        Err(error) => {
            let error = with_inputs(error, asked, &launch::base()?, &hub);
            return unreadable(&error, &args);
        }
    };
    let hardware = if args.from_cluster {
        on_cluster(&args)?
    } else {
        let external = asked == AskedRunner::External || recipe.spec.trainer.is_external();
        world(&args, external)?
    };
    let runner = Runner::of(&recipe.spec, asked, hardware.device, None);
    let request = PlanRequest {
        gpus_per_node: args.options.gpus_per_node.or(hardware.gpus_per_node),
        oom_policy: args.oom_policy.unwrap_or_default(),
        device_memory: args.device_memory.or(hardware.memory),
        estimate: args.estimate,
        ..PlanRequest::of(runner, hardware.gpus)
    };
    if args.estimate && request.device_memory.is_none() {
        bail!("--estimate needs the devices' memory; set it, as in --device-memory 24GB");
    }
    let request = survey(&recipe, &launch::base()?, request, &hub);
    if args.model.is_some() {
        return estimate::print(&recipe, &request, args.output);
    }
    if args.estimate {
        estimate::refuse_unknown(&recipe, &request)?;
    }
    let mut draft = plan::examine(&recipe, &request);
    if let Some(form) = args.emit {
        let of_restarts = |rule: &str| OF_RESTARTS.contains(&rule);
        draft.findings.retain(|found| !of_restarts(&found.rule));
        return emitted(&recipe, draft, form.into(), request.nodes());
    }
    let horizon = draft.horizon.as_ref();
    let oom = args.oom_policy.and_then(|policy| {
        let plan = draft.plan()?;
        Some(policy.ladder(&plan))
    });
    match args.output {
        Format::Text => {
            let words = &hardware.words;
            output::print(text::plan(&recipe, &request, &draft, oom.as_deref(), words))?;
            if draft.plan().is_none() {
                let errors = draft.findings.iter().filter(|found| found.is_error());
                let counts = Counts {
                    asked: draft.facts.world_size,
                    exact: &draft.facts.feasible_gpu_counts,
                };
                say_next(errors, &counts, &args.overrides);
            }
        }
        format => format.print(&Document {
            draft: &draft,
            dialect_version: recipe.version.as_deref(),
            detected: &recipe.detected,
            hardware: &hardware.words,
            runner: request.runner,
            refused_by_built_in: plan::refused_by_built_in(&recipe, &request, &draft.findings),
            eval_every: horizon.and_then(|horizon| horizon.eval_every),
            horizon,
            oom: oom.as_deref(),
        })?,
    }
    Ok(match draft.plan() {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::from(EXIT_REFUSED),
    })
}

/// Rules about restarts by Evenkeel. A plan that is written back is started without it.
const OF_RESTARTS: [&str; 2] = ["checkpoint-portable", "optimizer-state-lost"];

/// Prints the emitted form. Diagnostics go to standard error, so that the output can be redirected
/// into a file.
fn emitted(
    recipe: &Recipe,
    draft: Draft,
    form: Form,
    nodes: Option<u64>,
) -> anyhow::Result<ExitCode> {
    render::print(&draft.findings, &recipe.sources);
    let Ok(plan) = draft.finish() else {
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    let numbers = BatchNumbers {
        nodes,
        ..plan.numbers(recipe)
    };
    let emitted = export::emit(recipe, &numbers, form)?;
    output::print_as_is(&emitted.text)?;
    for remark in &emitted.remarks {
        output::say(format_args!("note: {remark}\n"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The devices of a plan.
struct Hardware {
    gpus: u64,
    device: DeviceKind,
    gpus_per_node: Option<u64>,
    /// Bytes of every device, if known.
    memory: Option<u64>,
    /// Description for people.
    words: String,
}

/// The requested world or the detected hardware.
fn world(args: &Args, external: bool) -> anyhow::Result<Hardware> {
    let options = &args.options;
    let resource = [("--resource", args.resource.is_some())];
    needs(
        first_set(&resource).or(args.cluster.flag()),
        "--from-cluster",
    )?;
    match (options.nodes, options.gpus_per_node) {
        (Some(_), None) => bail!("`--nodes` needs `--gpus-per-node` or `--from-cluster`"),
        (None, Some(_)) => bail!("`--gpus-per-node` needs `--nodes` or `--from-cluster`"),
        _ => {}
    }
    if let Some(gpus) = options.world() {
        return Ok(Hardware {
            gpus,
            device: DeviceKind::Cuda,
            gpus_per_node: None,
            memory: None,
            words: DeviceKind::Cuda.count(gpus),
        });
    }
    let inventory = Inventory::discover();
    let asked = Asked {
        procs: None,
        world: None,
        device: DeviceChoice::Auto,
    };
    let processes = asked.here(external, &inventory)?;
    if let Some(note) = &processes.note {
        output::say(format_args!("note: {note}\n"));
    }
    let devices = processes.devices(external, &inventory);
    let memory = processes.memory(external, &inventory);
    Ok(Hardware {
        gpus: processes.count,
        device: processes.device,
        gpus_per_node: None,
        memory: memory.map(|memory| memory.of_rank(processes.count)),
        words: format!("{devices}, detected here (set --gpus N to plan for others)"),
    })
}

/// The free GPUs of a cluster, or the requested nodes with the GPU count of its nodes.
fn on_cluster(args: &Args) -> anyhow::Result<Hardware> {
    let options = &args.options;
    let per_node = options.gpus_per_node.map(u32::try_from).transpose()?;
    let resource = args.resource.as_deref().unwrap_or(NVIDIA_GPU);
    let free = args
        .cluster
        .run(async |cluster| Ok(client::free(cluster, resource, per_node).await?))?;
    let nodes = options.nodes.unwrap_or(free.free.into());
    if nodes == 0 {
        bail!(
            "none of the {} schedulable nodes has {} {} free; set --nodes N to plan for N of \
             them anyway",
            free.all,
            free.per_node,
            free.resource
        );
    }
    Ok(Hardware {
        gpus: nodes * u64::from(free.per_node),
        device: DeviceKind::Cuda,
        gpus_per_node: Some(free.per_node.into()),
        memory: None,
        words: format!(
            "{nodes} nodes × {} {}; {} of {} are free on the cluster",
            free.per_node, free.resource, free.free, free.all
        ),
    })
}

/// Prints the command after a refused plan.
fn say_next<'d>(
    errors: impl Iterator<Item = &'d Diagnostic>,
    counts: &Counts<'_>,
    overrides: &[String],
) {
    let words: Vec<String> = std::iter::once("evenkeel".to_owned())
        .chain(typed())
        .collect();
    let typed = Typed {
        words: &words,
        overrides,
    };
    let next = next_command::after_refused_plan(errors, counts, &typed);
    output::say_next(next.as_slice());
}

fn unreadable(error: &ReadError, args: &Args) -> anyhow::Result<ExitCode> {
    match args.output {
        Format::Text => {
            render::print(&error.diagnostics, &error.sources);
            let unknown = Counts {
                asked: 0,
                exact: &[],
            };
            say_next(error.errors(), &unknown, &args.overrides);
        }
        format => {
            let located = error.diagnostics.iter().map(|d| d.locate(&error.sources));
            let diagnostics = located.collect();
            format.print(&Unreadable { diagnostics })?;
        }
    }
    Ok(ExitCode::from(unread(error)))
}
