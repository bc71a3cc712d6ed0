//! `evenkeel launch RECIPE --nodes N`: a recipe in, a TrainingJob on the cluster, followed until it
//! ends.

use std::process::ExitCode;

use anyhow::Context;

use super::{ClusterArgs, carry};
use crate::batch::{self, PlanRequest};
use crate::cli::output::{Format, say};
use crate::cli::recipe_args::RecipeArgs;
use crate::cli::{EXIT_REFUSED, render};
use crate::client::{self, End, Wanted, change};
use crate::job::api::RemainderPolicy;
use crate::launch::check_own;
use crate::recipe::Recipe;
use crate::telemetry::{Display, Mode};

/// Exit code after Ctrl-C while a job is followed; the job goes on.
const EXIT_INTERRUPTED: u8 = 130;

/// What `launch` asks of a cluster.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "On a cluster (with --nodes)")]
#[group(skip)]
pub struct Args {
    /// The TrainingJob's name [default: made from the recipe's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The container image
    #[arg(long, value_name = "IMAGE", env = "EVENKEEL_IMAGE", default_value = concat!("evenkeel/evenkeel:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// The PersistentVolumeClaim for checkpoints; many nodes write to it
    #[arg(long, value_name = "CLAIM", default_value = "checkpoints")]
    claim: String,
    /// What a GPU is called in the nodes' allocatable resources
    #[arg(long, value_name = "NAME", default_value = NVIDIA)]
    resource: String,
    /// Never fewer nodes than this
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    min_nodes: Option<u32>,
    /// Print the TrainingJob and create nothing
    #[arg(long)]
    dry_run: bool,
    /// Create the TrainingJob and do not follow it
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// What NVIDIA's device plugin calls a GPU.
pub const NVIDIA: &str = "nvidia.com/gpu";

impl Args {
    /// Whether something was asked that only a cluster can do.
    pub fn given(&self) -> bool {
        self.dry_run || self.detach || self.name.is_some() || self.cluster.meant()
    }
}

/// Launches on `nodes` nodes.
pub fn run(
    args: &Args,
    from: &RecipeArgs,
    recipe: &Recipe,
    nodes: u64,
    rank_memory: Option<u64>,
    mode: Mode,
) -> anyhow::Result<ExitCode> {
    let nodes = u32::try_from(nodes).ok().filter(|nodes| *nodes <= 1024);
    let nodes = nodes.context("a TrainingJob has at most 1024 nodes")?;
    let given = from.options.gpus_per_node;
    let per_node = match given.map(u32::try_from).transpose()? {
        Some(per_node) => per_node,
        None => {
            let found = args
                .cluster
                .run(async |cluster| Ok(client::free(cluster, &args.resource, None).await?))
                .context(
                    "how many GPUs a node has cannot be found out (--gpus-per-node says it)",
                )?;
            found.per_node
        }
    };
    // The controller judges again; a recipe that it would refuse need not leave this machine.
    let world = u64::from(nodes) * u64::from(per_node);
    let examined = batch::examine(recipe, &PlanRequest::gpus(world));
    render::print(&examined.diagnostics, &recipe.sources);
    let Ok(plan) = examined.finish() else {
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    let notes = match recipe.spec.trainer.is_own() {
        true => check_own(recipe, &plan, &from.overrides)?,
        false => Vec::new(),
    };
    for note in notes {
        say(format_args!("warning: {note}\n"));
    }
    let job = client::training_job(wanted(args, from, recipe, nodes, per_node, rank_memory)?);
    if args.dry_run {
        Format::Yaml.print(&job)?;
        return Ok(ExitCode::SUCCESS);
    }
    say(format_args!(
        "{nodes} × {per_node} {}: {}\n",
        args.resource, plan.proof
    ));
    let name = job.metadata.name.clone().unwrap_or_default();
    let again = args.cluster.again();
    args.cluster
        .run(async |cluster| Ok(change::create(cluster, &job).await?))?;
    if args.detach {
        say(format_args!(
            "created {name}; `evenkeel logs -f {name}{again}` follows it\n"
        ));
        return Ok(ExitCode::SUCCESS);
    }
    watch(&Watching {
        job: &name,
        cluster: &args.cluster,
        mode,
    })
}

fn wanted(
    args: &Args,
    from: &RecipeArgs,
    recipe: &Recipe,
    nodes: u32,
    gpus_per_node: u32,
    rank_memory: Option<u64>,
) -> anyhow::Result<Wanted> {
    let name = match &args.name {
        Some(name) => name.clone(),
        None => client::name_of(&recipe.spec.name).with_context(|| {
            format!(
                "{:?} gives no name for a TrainingJob: --name says one",
                recipe.spec.name
            )
        })?,
    };
    let mut overrides = from.overrides.clone();
    let native = |(key, value): (&str, Option<u64>)| Some(format!("evenkeel.{key}={}", value?));
    let flags = [
        ("batch.gpus", from.options.recipe_gpus),
        ("batch.global", from.options.global_batch_size),
    ];
    overrides.extend(flags.into_iter().filter_map(native));
    let remainder = match from.options.remainder.as_deref() {
        Some("uneven") => RemainderPolicy::Uneven,
        _ => RemainderPolicy::Exact,
    };
    Ok(Wanted {
        name,
        nodes,
        gpus_per_node,
        resource: args.resource.clone(),
        image: args.image.clone(),
        claim: args.claim.clone(),
        recipe: carry::source(from, recipe, &overrides, remainder)?,
        overrides,
        remainder,
        min_nodes: args.min_nodes,
        rank_memory,
        command: recipe.spec.trainer.command.clone(),
    })
}

/// A job to watch.
pub struct Watching<'a> {
    /// Its name.
    pub job: &'a str,
    /// Where it is.
    pub cluster: &'a ClusterArgs,
    /// How to show it.
    pub mode: Mode,
}

/// Follows a job until it ends, or until Ctrl-C, which leaves it running.
pub fn watch(watching: &Watching<'_>) -> anyhow::Result<ExitCode> {
    let mut display = Display::new(watching.mode);
    let name = watching.job;
    let again = watching.cluster.again();
    let end = watching.cluster.run(async |cluster| {
        let mut each = |event: &_| display.event(event);
        tokio::select! {
            end = client::follow(cluster, name, &mut each) => Ok(Some(end?)),
            _ = tokio::signal::ctrl_c() => Ok(None),
        }
    })?;
    drop(display);
    Ok(match end {
        Some(End::Complete) => ExitCode::SUCCESS,
        Some(End::Failed { why, last_words }) => {
            say(format_args!("error: {why}\n"));
            if !last_words.is_empty() {
                say(format_args!("{last_words}\n"));
            }
            ExitCode::from(EXIT_REFUSED)
        }
        Some(End::Deleted) => {
            say(format_args!("error: {name} was deleted\n"));
            ExitCode::from(EXIT_REFUSED)
        }
        None => {
            say(format_args!(
                "{name} goes on; `evenkeel logs -f {name}{again}` follows it again, `evenkeel \
                 cancel {name}{again}` ends it\n"
            ));
            ExitCode::from(EXIT_INTERRUPTED)
        }
    })
}
