//! The options of a command's launcher for the world of a plan: so many processes on so many nodes, and
//! what else the launcher would then refuse.
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

/// A world that a launcher cannot be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The launcher starts the same number of processes on every node.
    #[error("{world} processes do not come out even on the command's {nodes} nodes ({help})")]
    Nodes {
        /// Devices.
        world: u64,
        /// Nodes.
        nodes: u64,
        /// What to change.
        help: &'static str,
    },
    /// What comes behind the launcher's options is not known to be a program's.
    #[error("the command names no program to start (write it out in the command)")]
    NoProgram,
    /// What the plan changes is among other things that a variable stands for.
    #[error("`{text}` stands for more than what changes (write that out in the command)")]
    Hidden {
        /// What stands there.
        text: String,
    },
    /// The processes are named in a way that cannot be counted up.
    #[error("`{text}` names the command's devices one by one (use `--num_gpus` there)")]
    Devices {
        /// What stands there.
        text: String,
    },
    /// The command starts one process on purpose.
    #[error("`--cpu` starts one process, and the plan has {world} (leave it out of the command)")]
    OneProcess {
        /// Devices.
        world: u64,
    },
    /// A script that starts processes where it is.
    #[error(
        "the command's launcher starts processes of one machine, and the plan has {nodes} nodes (start the program with torchrun)"
    )]
    OneMachine {
        /// Nodes.
        nodes: u64,
    },
    /// Every node would train by itself.
    #[error(
        "with `--standalone` each of {nodes} nodes would train by itself (leave it out, and say where they meet: `--rdzv_backend c10d --rdzv_endpoint HOST:PORT`)"
    )]
    Standalone {
        /// Nodes.
        nodes: u64,
    },
    /// The switch chooses the type over the config's, and is refused for one process.
    #[error(
        "accelerate takes `--multi_gpu` for no single process (leave it out, and let the config say the type)"
    )]
    MultiGpu,
    /// The launcher's config fixes what the plan changes.
    #[error(
        "TRL's config `{name}` fixes accumulation at 1, and the plan has {accumulation} (launch with a config of your own: `--emit accelerate` writes it)"
    )]
    Accumulation {
        /// The config.
        name: String,
        /// Forward passes per step.
        accumulation: u64,
    },
    /// All devices hold other parts of the model.
    #[error(transparent)]
    Shards(#[from] shards::ShardError),
}

/// Stretches of a text and what comes in their place.
pub(super) type Edits = Vec<(usize, usize, String)>;

/// What changes in a command's launcher, and what its user has to do besides.
#[derive(Default)]
pub(super) struct Relaunched {
    pub edits: Edits,
    pub remarks: Vec<String>,
    /// Options that are not there yet, a space before each.
    pub added: String,
}

impl Relaunched {
    /// An option with another value: in its place, or beside the others.
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

/// Whether the command in a file starts several processes, or says so to a launcher.
pub(super) fn starts_processes(recipe: &Recipe, file: FileId) -> bool {
    call(recipe, file).is_some_and(|call| call.launcher != Launcher::Python)
}

/// Refuses another accumulation in a recipe that says itself which of TRL's configs it is launched with,
/// where that one fixes it. Nobody but TRL's command line reads that.
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
    // A file of that name comes first.
    if !read || recipe.files.accelerate.is_some() {
        return Ok(());
    }
    let accumulation = numbers.accumulation;
    Err(LaunchError::Accumulation { name, accumulation })
}

/// The launcher's options of the command in a file, for the numbers of a plan.
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
        // What goes takes the space behind it along.
        let blank = with.is_empty() && text[*end..].starts_with(' ');
        *end += usize::from(blank);
    }
    if !new.added.is_empty() {
        new.edits.push((call.room, call.room, new.added.clone()));
    }
    Ok(new)
}

/// A number that an option says, also as a range of one (`2:2`); an error where it is something else
/// (`gpu`, `1:4`, `$N`).
fn stated(place: Option<(&str, Span)>) -> Result<Option<u64>, ()> {
    match place {
        None => Ok(None),
        Some((text, _)) => command::nodes(text).map(Some).ok_or(()),
    }
}

/// Nodes that were asked for, or else those of the command; `None` where only the shell knows them.
fn nodes(numbers: &Numbers, on: Option<(&str, Span)>) -> Option<u64> {
    let stated = || stated(on).ok().map(|nodes| nodes.unwrap_or(1));
    numbers.nodes.or_else(stated)
}

/// Processes of each of the nodes.
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
    // One process for every device that is there, however many these are.
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
    // A command for as many nodes as before has its own ways to let them meet.
    if nodes > 1 && stated(on) != Ok(Some(nodes)) && !meets {
        new.remarks.push(format!(
            "{nodes} nodes have to meet: start it on each, with `--rdzv_backend c10d --rdzv_endpoint HOST:PORT` (HOST one of them)"
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
    // All devices of the hostfile, or of this machine.
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
            "DeepSpeed finds {nodes} nodes in a hostfile: `--hostfile FILE`, where it is not /job/hostfile"
        ));
    }
    Ok(())
}

/// A script beside the examples, which counts the processes of one machine.
fn spawn(call: &Call, numbers: &Numbers, new: &mut Relaunched) -> Result<(), LaunchError> {
    if let Some(nodes) = numbers.nodes.filter(|nodes| *nodes > 1) {
        return Err(LaunchError::OneMachine { nodes });
    }
    for count in ["world_size", "num_cores"] {
        let place = call.value(&[count]);
        // Of a number that the shell knows (`$N`) nothing is known here.
        if let Ok(Some(_)) = stated(place) {
            new.set(count, place, numbers.world);
        }
    }
    Ok(())
}

/// Whether the job's accelerate config says no processes, and leaves them to the command line. What else in
/// it settles them (one process, a filter of DeepSpeed's) stands as the number's place.
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
    let config = recipe.files.accelerate.map(|own| text_of(recipe, own));
    let in_config = |key: &str| edit::number(config?, key);
    let (on, all) = (
        call.value(&["num_machines"]),
        call.value(&["num_processes"]),
    );
    // A number of machines that the shell knows (`$N`) stays, where nobody asked for another.
    let typed = stated(on);
    if typed.is_err() && numbers.nodes.is_none() {
        return Ok(());
    }
    let typed = typed.unwrap_or(None);
    let stated_machines = typed.or(in_config("num_machines"));
    let machines = numbers.nodes.or(stated_machines).unwrap_or(1);
    // A config in a file says its processes itself, and `--emit accelerate` writes it; one that TRL
    // ships, and none at all, are changed by what is typed. A recipe may say it as well.
    let place = recipe.places.get("batch.gpus").map(|place| place.span.file);
    let elsewhere = place.is_some_and(|own| own != file && recipe.files.recipe == Some(own));
    let left = leaves_processes(recipe);
    let speaks = all.is_some() || left || (config.is_none() && !elsewhere);
    let known = left || recipe.spec.batch.gpus.is_some() || numbers.nodes.is_some();
    if speaks && known {
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
        let own = config.and_then(|text| edit::text(text, key));
        own.is_some() || call.at(&[key]).is_some()
    };
    if machines > 1 && stated_machines != Some(machines) && !meets("main_process_ip") {
        new.remarks.push(format!(
            "{machines} machines have to meet: start it on each, with its own `--machine_rank`, and with `--main_process_ip HOST --main_process_port PORT` (HOST of the first)"
        ));
    }
    accumulation(call, numbers, new)?;
    sizes(recipe, call, numbers, file, new)
}

/// `--gpu_ids` with too few devices for the processes of a machine.
fn devices(call: &Call, each: u64, new: &mut Relaunched) {
    let Some((text, span)) = call.value(&["gpu_ids"]) else {
        return;
    };
    if too_few_devices(text, each).is_some() {
        new.remarks.push(format!(
            "`--gpu_ids {text}` named too few devices for {each} processes: it is `all` now, name the ones that you mean"
        ));
        new.edits.push((span.start, span.end, "all".to_owned()));
    }
}

/// `--multi_gpu`, which accelerate takes from two processes on. Without a config nothing hangs on it.
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

/// The accumulation that DeepSpeed is told must be the trainer's.
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

/// Shards and replicas, where the command types sizes of axes that accelerate reads.
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
