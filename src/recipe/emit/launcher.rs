//! Rewrites the options of a command's launcher for the world of a plan: processes, nodes, and the
//! options that the launcher would otherwise refuse.
//!
//! Sources: torch 2.9 `distributed/run.py`; accelerate 16cb6eb `commands/launch.py`, `utils/launch.py`;
//! DeepSpeed edaa722 `launcher/runner.py`; TRL f2cd577 `cli/main.py`.

use std::path::Path;

use super::shards::{self, shards};
use super::{Numbers, edit, standing, text_of};
use crate::recipe::Recipe;
use crate::recipe::accelerate::{fixes_accumulation, too_few_devices};
use crate::recipe::command::{self, Call, Launcher};
use crate::recipe::deepspeed::hosts;
use crate::recipe::source::{FileId, Span};

/// A world that the command's launcher cannot start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The launcher starts the same number of processes on every node.
    #[error("{world} processes cannot be divided evenly over the command's {nodes} nodes ({help})")]
    Nodes {
        /// World size, in devices.
        world: u64,
        nodes: u64,
        /// The option to change.
        help: &'static str,
    },
    /// The words after the launcher's options are not known to be a program.
    #[error("the command names no program to start (add its path to the command)")]
    NoProgram,
    /// A variable holds the number to change and other words.
    #[error("`{text}` holds more than the number to change (write its words out in the command)")]
    Hidden {
        /// The variable, as the command spells it.
        text: String,
    },
    /// The launcher takes a list of devices, which a number cannot replace.
    #[error("`{text}` lists devices one by one (use `--num_gpus` instead)")]
    Devices {
        /// The list, as the command spells it.
        text: String,
    },
    /// `--cpu` starts one process.
    #[error("`--cpu` starts one process, and the plan has {world} (remove `--cpu`)")]
    OneProcess {
        /// World size, in devices.
        world: u64,
    },
    /// A launcher for the processes of one machine.
    #[error(
        "the command's launcher starts processes of one machine, and the plan has {nodes} nodes (start the program with torchrun)"
    )]
    OneMachine { nodes: u64 },
    /// With `--standalone` every node trains by itself.
    #[error(
        "with `--standalone` each of {nodes} nodes trains by itself (replace it by `--rdzv_backend c10d --rdzv_endpoint HOST:PORT`)"
    )]
    Standalone { nodes: u64 },
    /// The option overrides the config's type, and accelerate refuses it for one process.
    #[error(
        "accelerate refuses `--multi_gpu` for one process (remove it, and set the config's `distributed_type`)"
    )]
    MultiGpu,
    /// The launcher's config fixes the accumulation.
    #[error(
        "TRL's config `{name}` fixes accumulation at 1, and the plan has {accumulation} (launch with the config that `--emit accelerate` writes)"
    )]
    Accumulation {
        /// The name of TRL's config.
        name: String,
        /// Forward passes per optimizer step.
        accumulation: u64,
    },
    /// The model takes all devices, so none is left to shard over.
    #[error(transparent)]
    Shards(#[from] shards::ShardError),
}

/// Byte ranges of a text and their new text.
pub(super) type Edits = Vec<(usize, usize, String)>;

/// The changes of a command's launcher, and remarks for the user.
#[derive(Default)]
pub(super) struct Relaunched {
    pub edits: Edits,
    pub remarks: Vec<String>,
    /// New options, each with a leading space.
    pub added: String,
}

impl Relaunched {
    /// Sets an option: replaces its value, or appends the option.
    fn set(&mut self, option: &str, place: Option<(&str, Span)>, value: u64) {
        match place {
            Some((text, _)) if text.parse() == Ok(value) => {}
            Some((_, span)) => self.edits.push((span.start, span.end, value.to_string())),
            None => self.added += &format!(" --{option} {value}"),
        }
    }
}

/// The launcher of the command in a file.
fn call(recipe: &Recipe, file: FileId) -> Option<Call> {
    let path = recipe.sources.get(file).map(|source| source.path.as_path());
    Call::of(path.unwrap_or(Path::new("")), text_of(recipe, file), file)
}

/// Whether the command in a file starts through a launcher of several processes.
pub(super) fn starts_processes(recipe: &Recipe, file: FileId) -> bool {
    call(recipe, file).is_some_and(|call| call.launcher != Launcher::Python)
}

/// Refuses another accumulation where the recipe itself names one of TRL's configs that fixes it.
/// Only TRL's command line reads that key.
pub(super) fn refuse_fixed(
    recipe: &Recipe,
    numbers: &Numbers,
    file: FileId,
) -> Result<(), LaunchError> {
    let name = edit::text(text_of(recipe, file), "accelerate_config");
    let fixes = |name: &String| numbers.accumulation != 1 && fixes_accumulation(name);
    let Some(name) = name.filter(fixes) else {
        return Ok(());
    };
    let read = recipe.files.command.is_none_or(|(command, _)| {
        let call = call(recipe, command);
        call.is_some_and(|call| call.launcher == Launcher::Trl)
    });
    // A file of that name takes precedence.
    if !read || recipe.files.accelerate.is_some() {
        return Ok(());
    }
    let accumulation = numbers.accumulation;
    Err(LaunchError::Accumulation { name, accumulation })
}

/// The options of the command's launcher, rewritten for the numbers of a plan.
pub(super) fn relaunch(
    recipe: &Recipe,
    numbers: &Numbers,
    file: FileId,
) -> Result<Relaunched, LaunchError> {
    let text = text_of(recipe, file);
    let mut new = Relaunched::default();
    let Some(call) = call(recipe, file) else {
        return Ok(new);
    };
    if call.launcher != Launcher::Python && !call.has_program {
        return Err(LaunchError::NoProgram);
    }
    match call.launcher {
        Launcher::Python => {}
        Launcher::Torchrun => torchrun(&call, numbers, &mut new)?,
        Launcher::Deepspeed => deepspeed(&call, numbers, &mut new)?,
        Launcher::Spawn => spawn(&call, numbers, &mut new)?,
        Launcher::Accelerate | Launcher::Trl => {
            accelerate(recipe, &call, numbers, file, &mut new)?;
        }
    }
    for (start, end, with) in &mut new.edits {
        // A variable may hold more than the value.
        if let Some((value, place)) = call.value_from(*start)
            && standing(recipe, place).as_deref() != Some(value)
        {
            let text = text.get(*start..*end).unwrap_or_default().to_owned();
            return Err(LaunchError::Hidden { text });
        }
        *with = edit::in_quotes_of(text.get(*start..*end).unwrap_or_default(), with);
        // A removed option takes the space after it along.
        let blank = with.is_empty() && text[*end..].starts_with(' ');
        *end += usize::from(blank);
    }
    if !new.added.is_empty() {
        new.edits.push((call.room, call.room, new.added.clone()));
    }
    Ok(new)
}

/// The number of an option, also as a range of one (`2:2`); an error for anything else (`gpu`,
/// `1:4`, `$N`).
fn stated(place: Option<(&str, Span)>) -> Result<Option<u64>, ()> {
    match place {
        None => Ok(None),
        Some((text, _)) => command::nodes(text).map(Some).ok_or(()),
    }
}

/// The requested nodes, or else the command's; `None` where only the shell knows them.
fn nodes(numbers: &Numbers, on: Option<(&str, Span)>) -> Option<u64> {
    let stated = || stated(on).ok().map(|nodes| nodes.unwrap_or(1));
    numbers.nodes.or_else(stated)
}

/// Processes per node.
fn each(numbers: &Numbers, nodes: u64, help: &'static str) -> Result<u64, LaunchError> {
    let world = numbers.world;
    match world.is_multiple_of(nodes.max(1)) {
        true => Ok(world / nodes.max(1)),
        false => Err(LaunchError::Nodes { world, nodes, help }),
    }
}

fn torchrun(call: &Call, numbers: &Numbers, new: &mut Relaunched) -> Result<(), LaunchError> {
    let (on, per_node) = (call.value(&["nnodes"]), call.value(&["nproc_per_node"]));
    let Some(nodes) = nodes(numbers, on) else {
        return Ok(());
    };
    // The launcher starts one process per device of the node.
    if numbers.nodes.is_none() && stated(per_node).is_err() {
        return Ok(());
    }
    let each = each(numbers, nodes, "change `--nnodes` first")?;
    if nodes > 1 && call.at(&["standalone"]).is_some() {
        return Err(LaunchError::Standalone { nodes });
    }
    if on.is_some() || nodes > 1 {
        new.set("nnodes", on, nodes);
    }
    if per_node.is_some() || each > 1 {
        new.set("nproc_per_node", per_node, each);
    }
    let meets = call.at(&["rdzv_endpoint"]).is_some()
        || (call.at(&["master_addr"]).is_some() && call.at(&["node_rank"]).is_some());
    // A command with the same number of nodes already has a rendezvous.
    if nodes > 1 && stated(on) != Ok(Some(nodes)) && !meets {
        new.remarks.push(format!(
            "{nodes} nodes need a rendezvous: start the command on each with `--rdzv_backend c10d --rdzv_endpoint HOST:PORT` (HOST is one of them)"
        ));
    }
    Ok(())
}

fn deepspeed(call: &Call, numbers: &Numbers, new: &mut Relaunched) -> Result<(), LaunchError> {
    let (on, per_node) = (call.value(&["num_nodes"]), call.value(&["num_gpus"]));
    if let Some((text, _)) = call.value(&["include", "i", "exclude", "e"]) {
        let machines = text.split('@').count() as u64;
        let same = hosts::named(text) == Some(numbers.world)
            && numbers.nodes.is_none_or(|nodes| nodes == machines);
        let text = text.to_owned();
        return match same {
            true => Ok(()),
            false => Err(LaunchError::Devices { text }),
        };
    }
    let Some(nodes) = nodes(numbers, on) else {
        return Ok(());
    };
    // DeepSpeed takes all devices of the hostfile, or of this machine.
    if numbers.nodes.is_none() && !matches!(stated(per_node), Ok(Some(_))) {
        return Ok(());
    }
    let each = each(numbers, nodes, "change `--num_nodes` first")?;
    if on.is_some() || nodes > 1 {
        new.set("num_nodes", on, nodes);
    }
    new.set("num_gpus", per_node, each);
    if nodes > 1 && stated(on) != Ok(Some(nodes)) && call.at(&["hostfile", "H"]).is_none() {
        new.remarks.push(format!(
            "DeepSpeed reads {nodes} nodes from a hostfile: add `--hostfile FILE`, unless it is /job/hostfile"
        ));
    }
    Ok(())
}

/// A script of the examples that starts the processes of one machine.
fn spawn(call: &Call, numbers: &Numbers, new: &mut Relaunched) -> Result<(), LaunchError> {
    if let Some(nodes) = numbers.nodes.filter(|nodes| *nodes > 1) {
        return Err(LaunchError::OneMachine { nodes });
    }
    for count in ["world_size", "num_cores"] {
        let place = call.value(&[count]);
        // A number that only the shell knows (`$N`) stays.
        if let Ok(Some(_)) = stated(place) {
            new.set(count, place, numbers.world);
        }
    }
    Ok(())
}

/// Whether the job's accelerate config leaves the number of processes to the command line. Where
/// another key decides it (one process, a DeepSpeed filter), that key is the number's place.
pub(super) fn leaves_processes(recipe: &Recipe) -> bool {
    let Some(file) = recipe.files.accelerate else {
        return false;
    };
    let settled = recipe.places.get("batch.gpus");
    edit::number(text_of(recipe, file), "num_processes").is_none()
        && settled.is_none_or(|place| place.span.file != file)
}

fn accelerate(
    recipe: &Recipe,
    call: &Call,
    numbers: &Numbers,
    file: FileId,
    new: &mut Relaunched,
) -> Result<(), LaunchError> {
    let world = numbers.world;
    if call.at(&["cpu"]).is_some() {
        return match world {
            1 => Ok(()),
            world => Err(LaunchError::OneProcess { world }),
        };
    }
    let config = recipe
        .files
        .accelerate
        .map(|config| text_of(recipe, config));
    let in_config = |key: &str| edit::number(config?, key);
    let (on, all) = (
        call.value(&["num_machines"]),
        call.value(&["num_processes"]),
    );
    // A number of machines that only the shell knows (`$N`) stays, unless the plan asks for
    // another.
    let typed = stated(on);
    if typed.is_err() && numbers.nodes.is_none() {
        return Ok(());
    }
    let typed = typed.unwrap_or(None);
    let stated_machines = typed.or(in_config("num_machines"));
    let machines = numbers.nodes.or(stated_machines).unwrap_or(1);
    // `--emit accelerate` writes the processes of a config file. The command line overrides a
    // config that TRL ships, and a missing one. A recipe may state the processes as well.
    let place = recipe.places.get("batch.gpus").map(|place| place.span.file);
    let elsewhere =
        place.is_some_and(|stated| stated != file && recipe.files.recipe == Some(stated));
    let left = leaves_processes(recipe);
    let states_world = all.is_some() || left || (config.is_none() && !elsewhere);
    let known = left || recipe.spec.batch.gpus.is_some() || numbers.nodes.is_some();
    if states_world && known {
        let each = each(numbers, machines, "change `--num_machines` first")?;
        let same = recipe.spec.batch.gpus == Some(world) && numbers.nodes <= Some(1);
        if all.is_some() || left || !same {
            new.set("num_processes", all, world);
        }
        if on.is_some() || machines != stated_machines.unwrap_or(1) {
            new.set("num_machines", on, machines);
        }
        devices(call, each, new);
        one_process(call, config, world, new)?;
    }
    let meets = |key: &str| {
        let stated = config.and_then(|text| edit::text(text, key));
        stated.is_some() || call.at(&[key]).is_some()
    };
    if machines > 1 && stated_machines != Some(machines) && !meets("main_process_ip") {
        new.remarks.push(format!(
            "{machines} machines need a rendezvous: start the command on each with its own `--machine_rank` and `--main_process_ip HOST --main_process_port PORT` (HOST is the first)"
        ));
    }
    accumulation(call, numbers, new)?;
    sizes(recipe, call, numbers, file, new)
}

/// Replaces a `--gpu_ids` with too few devices for the processes of a machine.
fn devices(call: &Call, each: u64, new: &mut Relaunched) {
    let Some((text, span)) = call.value(&["gpu_ids"]) else {
        return;
    };
    if too_few_devices(text, each).is_some() {
        new.remarks.push(format!(
            "`--gpu_ids {text}` names too few devices for {each} processes; it is now `all` (name {each} devices to restrict it)"
        ));
        new.edits.push((span.start, span.end, "all".to_owned()));
    }
}

/// Removes `--multi_gpu` for one process: accelerate refuses it. Without a config the option has no
/// other effect.
fn one_process(
    call: &Call,
    config: Option<&str>,
    world: u64,
    new: &mut Relaunched,
) -> Result<(), LaunchError> {
    let Some(span) = call.at(&["multi_gpu"]).filter(|_| world == 1) else {
        return Ok(());
    };
    if config.is_some() || call.at(&["accelerate_config"]).is_some() {
        return Err(LaunchError::MultiGpu);
    }
    new.edits.push((span.start, span.end, String::new()));
    Ok(())
}

/// The accumulation for DeepSpeed must equal the trainer's.
fn accumulation(call: &Call, numbers: &Numbers, new: &mut Relaunched) -> Result<(), LaunchError> {
    let key = "gradient_accumulation_steps";
    if call.launcher == Launcher::Accelerate
        && let place @ Some((text, _)) = call.value(&[key])
        && text != "auto"
    {
        new.set(key, place, numbers.accumulation);
    }
    if let Some((name, _)) = call.value(&["accelerate_config"])
        && numbers.accumulation != 1
        && fixes_accumulation(name)
    {
        let (name, accumulation) = (name.to_owned(), numbers.accumulation);
        return Err(LaunchError::Accumulation { name, accumulation });
    }
    Ok(())
}

/// Sets shards and replicas where the command states axis sizes that accelerate reads.
fn sizes(
    recipe: &Recipe,
    call: &Call,
    numbers: &Numbers,
    file: FileId,
    new: &mut Relaunched,
) -> Result<(), LaunchError> {
    let parallel = &recipe.spec.parallel;
    let typed = |path: &str| {
        let place = recipe.places.get(&format!("parallel.{path}"));
        place.filter(|place| place.span.file == file && place.key.starts_with("parallelism_config"))
    };
    let axes = [
        "tensor",
        "context",
        "sequence",
        "data_shard",
        "data_replicate",
    ];
    // DeepSpeed makes the groups of its sequence parallelism itself.
    if parallel.sequence > 1 || !axes.iter().any(|path| typed(path).is_some()) {
        return Ok(());
    }
    let both = shards(parallel, numbers, call.at(&["use_fsdp"]).is_some())?;
    for (axis, size) in ["shard", "replicate"].into_iter().zip(both) {
        let option = format!("parallelism_config_dp_{axis}_size");
        let place = call.value(&[&option]);
        if place.is_some() || size > 1 {
            new.set(&option, place, size);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
