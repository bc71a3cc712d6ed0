//! `evenkeel plan`: the batch arithmetic of a recipe in a world, before anything is started.

mod estimate;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::bail;
use serde::Serialize;

use super::cluster::ClusterArgs;
use super::cluster::submit::NVIDIA;
use super::output::{self, Format};
use super::recipe_args::RecipeOptions;
use super::{EXIT_REFUSED, EXIT_USAGE, bytes, render};
use crate::batch::{self, Draft, Examined, Horizon, OomPolicy, OomStep, PlanRequest, Trainer};
use crate::client;
use crate::inventory::{Devices, Inventory};
use crate::launch::{self, survey};
use crate::recipe::emit::{self, Form, Numbers};
use crate::recipe::{Located, ReadError, Recipe};

/// Show the batch plan of a recipe
#[derive(clap::Args)]
#[command(after_help = "Examples:
  evenkeel plan recipe.yaml --recipe-gpus 8 --gpus 4     half the GPUs, the same global batch
  evenkeel plan recipe.yaml --nodes 2 --gpus-per-node 8 --device-memory 80GB
  evenkeel plan recipe.yaml --gpus 8 --device-memory 24GiB    does it fit into 24 × 1024³ bytes?
  evenkeel plan recipe.yaml --gpus 3 --remainder uneven  a count that does not divide the batch
  evenkeel plan recipe.yaml --gpus 8 -o json max_seq_length=1024
  evenkeel plan HALOs/config loss=dpo model=llama ++model.batch_size=32 --gpus 8
  evenkeel plan recipe.yaml --gpus 8 --oom-policy transformers
  evenkeel plan recipe.yaml --from-cluster               the GPUs that are free there now
  evenkeel plan --gpus 6 -- torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8
  evenkeel plan recipe.yaml --recipe-gpus 8 --gpus 4 --emit recipe > recipe-4.yaml
  evenkeel plan recipe.yaml --recipe-gpus 8 --gpus 4 --estimate --device-memory 24GB
  evenkeel plan --estimate --model 7B --gpus 1 --device-memory 24GB
  evenkeel plan --estimate --model 7B --gpus 8 --device-memory 80GB model.adapters=false parallel.strategy=fsdp
  evenkeel plan ds_config.json --gpus 8                  a DeepSpeed config by itself

Without --gpus or --nodes it plans for the hardware found.
Exit codes: 0 fine, 1 a rule says no, 2 the call or a file cannot be used.")]
pub struct Args {
    /// Recipe file, in any dialect that is read, or a script with the command that starts it
    #[arg(required_unless_present_any = ["command", "model"])]
    recipe: Option<PathBuf>,

    #[command(flatten)]
    options: RecipeOptions,

    /// Change a key of the recipe, in its own spelling: `max_seq_length=128`,
    /// `dataset_mixture.datasets.0.id=chat.jsonl`, or a native key as
    /// `evenkeel.model.config.hidden_size=64`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,

    /// The command that you start it with today: launcher, script and arguments. What it says stands
    /// over the recipe, and it may name the recipe and its configs itself
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,

    /// Memory of every device, in bytes or with a unit: KB, MB, GB, TB count in thousands (80GB),
    /// KiB, MiB, GiB, TiB in 1024s (24GiB) [default: that of the hardware found, when no number of
    /// GPUs is given; else it is not known, and the plan does not say whether the model fits]
    #[arg(long, value_name = "SIZE", value_parser = bytes::parse)]
    device_memory: Option<u64>,

    /// Show what follows when memory runs out: exact, transformers, transformers-before-1.9 (of
    /// accelerate). Evenkeel itself always goes down exactly; upstream's policies shrink the global
    /// batch
    #[arg(long, value_name = "POLICY", value_parser = OomPolicy::from_str)]
    oom_policy: Option<OomPolicy>,

    /// Propose the largest per-device batch that fits the devices' memory, whatever the recipe says
    #[arg(long)]
    estimate: bool,

    /// Estimate for a model without a recipe: a hub id, or a size such as 7B. Native keys change what is
    /// assumed: `model.precision=f32`, `parallel.strategy=fsdp`
    #[arg(
        long,
        value_name = "MODEL",
        requires = "estimate",
        conflicts_with_all = ["command", "global_batch_size"]
    )]
    model: Option<String>,

    /// Plan for what the cluster has free now, or, with --nodes, for so many of its nodes
    #[arg(long, conflicts_with = "gpus")]
    from_cluster: bool,

    /// What a GPU is called in the nodes' allocatable resources (with --from-cluster)
    #[arg(long, value_name = "NAME", default_value = NVIDIA)]
    resource: String,

    #[command(flatten)]
    cluster: ClusterArgs,

    /// Print the plan as something to run instead: the recipe in its own dialect with only its batch
    /// numbers changed, arguments of its trainer, environment variables, or a launcher's config
    #[arg(long, value_enum, value_name = "FORM", conflicts_with = "output")]
    emit: Option<Emit>,

    /// How to print
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
}

/// What `--emit` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Emit {
    /// The recipe, script or command, in its own dialect
    Recipe,
    /// Arguments of its trainer
    Args,
    /// Environment variables
    Env,
    /// The accelerate config that it is launched with, or a new one
    Accelerate,
    /// The DeepSpeed config that it names
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

/// The form of `-o json`: the keys of a plan, null where a refused one has none, and more.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    draft: &'a Draft,
    /// Why the file was taken for that dialect.
    detected: &'a str,
    /// What the plan is for, in words.
    hardware: &'a str,
    /// Lengths in samples.
    horizon: Option<&'a Horizon>,
    /// What follows when memory runs out, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    oom: Option<&'a [OomStep]>,
}

/// The form of `-o json` for a recipe that cannot be read.
#[derive(Serialize)]
struct Unreadable {
    diagnostics: Vec<Located>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let path = args.recipe.clone().unwrap_or_default();
    let read = match &args.model {
        Some(model) => estimate::recipe(model, args.recipe.as_deref(), &args.overrides)?,
        None => args.options.read_job(&path, &args.overrides, &args.command),
    };
    let recipe = match read {
        Ok(recipe) => recipe,
        Err(error) => return unreadable(&error, args.output),
    };
    let (mut request, hardware) = match args.from_cluster {
        true => on_cluster(&args)?,
        false => world(&args)?,
    };
    request.nodes = args.options.nodes.or(request.nodes);
    request.oom_policy = args.oom_policy.unwrap_or_default();
    request.device_memory = args.device_memory.or(request.device_memory);
    let base = launch::base()?;
    let request = survey(&recipe, &base, request);
    if args.estimate && request.device_memory.is_none() {
        bail!("--estimate has to know the devices' memory: give --device-memory 24GB");
    }
    // Whoever has a command, or wants something to run, has a trainer.
    let own = args.emit.is_some() || !args.command.is_empty();
    let request = PlanRequest {
        estimate: args.estimate,
        trainer: if own { Trainer::Own } else { request.trainer },
        ..request
    };
    if args.model.is_some() {
        return estimate::print(&recipe, &request, args.output);
    }
    if args.estimate {
        estimate::refuse_unknown(&recipe, &request)?;
    }
    let examined = batch::examine(&recipe, &request);
    if let Some(form) = args.emit {
        return emitted(&recipe, examined, form.into(), request.nodes);
    }
    let oom = args.oom_policy.and_then(|policy| {
        let plan = examined.clone().finish().ok()?;
        Some(policy.ladder(&plan))
    });
    match args.output {
        Format::Text => {
            let hardware = text::Hardware {
                words: &hardware,
                devices: request.devices,
            };
            output::print(text::plan(&recipe, &examined, oom.as_deref(), &hardware))?;
        }
        format => format.print(&Document {
            draft: &examined.draft,
            detected: &recipe.detected,
            hardware: &hardware,
            horizon: examined.draft.horizon.as_ref(),
            oom: oom.as_deref(),
        })?,
    }
    Ok(match examined.finish() {
        Ok(_) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(EXIT_REFUSED),
    })
}

/// Prints what is to be run. What the rules say goes to standard error, so that the result can be
/// sent into a file.
fn emitted(
    recipe: &Recipe,
    examined: Examined,
    form: Form,
    nodes: Option<u64>,
) -> anyhow::Result<ExitCode> {
    render::print(&examined.diagnostics, &recipe.sources);
    let Ok(plan) = examined.finish() else {
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    let numbers = Numbers {
        nodes,
        ..plan.numbers(recipe)
    };
    let emitted = emit::emit(recipe, &numbers, form)?;
    output::print(&emitted.text)?;
    for remark in &emitted.remarks {
        output::say(format_args!("note: {remark}\n"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The world asked for, or the hardware found; and what to call it.
fn world(args: &Args) -> anyhow::Result<(PlanRequest, String)> {
    let options = &args.options;
    if options.nodes.is_some() != options.gpus_per_node.is_some() {
        bail!(
            "--nodes and --gpus-per-node go together (--from-cluster finds the one that is missing)"
        );
    }
    if let Some(gpus) = options.world() {
        let request = PlanRequest::gpus(gpus);
        let words = request.devices.count(gpus);
        return Ok((request, words));
    }
    let devices = Inventory::discover().devices();
    let plain = match &devices {
        Devices::Gpus { .. } => PlanRequest::gpus(devices.count()),
        Devices::CpuRanks { .. } => PlanRequest::processes(devices.count()),
    };
    let request = PlanRequest {
        device_memory: devices.memory(),
        ..plain
    };
    Ok((
        request,
        format!("{devices}, found here (--gpus N plans for others)"),
    ))
}

/// What a cluster has free, or the nodes asked for with as many GPUs as its nodes have.
fn on_cluster(args: &Args) -> anyhow::Result<(PlanRequest, String)> {
    let options = &args.options;
    let per_node = options.gpus_per_node.map(u32::try_from).transpose()?;
    let free = args
        .cluster
        .run(async |cluster| Ok(client::free(cluster, &args.resource, per_node).await?))?;
    let nodes = options.nodes.unwrap_or(free.free.into());
    if nodes == 0 {
        bail!(
            "none of the {} nodes that take pods has {} {} free: --nodes N plans for N of them all \
             the same",
            free.all,
            free.per_node,
            free.resource
        );
    }
    let words = format!(
        "{nodes} nodes × {} {}; {} of {} are free on the cluster",
        free.per_node, free.resource, free.free, free.all
    );
    let request = PlanRequest {
        nodes: Some(nodes),
        ..PlanRequest::gpus(nodes * u64::from(free.per_node))
    };
    Ok((request, words))
}

fn unreadable(error: &ReadError, format: Format) -> anyhow::Result<ExitCode> {
    match format {
        Format::Text => {
            render::print(&error.diagnostics, &error.sources);
        }
        format => {
            let located = error.diagnostics.iter().map(|d| d.locate(&error.sources));
            let diagnostics = located.collect();
            format.print(&Unreadable { diagnostics })?;
        }
    }
    Ok(ExitCode::from(EXIT_USAGE))
}
