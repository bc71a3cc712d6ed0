//! How many processes `accelerate launch` starts.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`launch_command`, which launcher it is),
//! `utils/launch.py` (`prepare_simple_launcher_cmd_env`: one process, or as many as mpirun is told;
//! `prepare_multi_gpu_env`: `num_processes // num_machines` on each machine;
//! `prepare_deepspeed_cmd_env`: on several machines DeepSpeed's launcher, which a filter may tell
//! which devices), `commands/launch.py` (`tpu_launcher`: all cores), `utils/constants.py` (`DEEPSPEED_MULTINODE_LAUNCHERS`).

use super::typed;
use super::values::int;
use crate::recipe::deepspeed::hosts;
use crate::recipe::node::Node;
use crate::recipe::reading::Reading;
use crate::recipe::scalar::{Resolved, Schema};
use crate::recipe::suggest::did_you_mean;
use crate::recipe::tree::{Given, Tree};

/// Values of `distributed_type`.
const TYPES: &[&str] = &[
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
];

/// The distributed type: what was typed, else the config's. An unquoted `NO` is false to PyYAML, and
/// accelerate then finds no type. A config without a type is refused whatever was typed.
pub(super) fn distributed_type(root: &Node, reading: &mut Reading) -> Option<String> {
    let Some(node) = root.get("distributed_type") else {
        reading.error(
            "mandatory-missing",
            Some(root.span),
            "the accelerate config has no `distributed_type`, and accelerate refuses it",
            format!("give one of {}", TYPES.join(", ")),
        );
        return None;
    };
    let own = match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(false)) => {
            doubt_truth_value(root, reading);
            Some("NO".to_owned())
        }
        Some(Resolved::Str(text)) if TYPES.contains(&text.as_str()) => Some(text),
        _ => {
            let text = node.text().unwrap_or(node.kind());
            reading.error(
                "unknown-value",
                Some(node.span),
                format!("`distributed_type` is `{text}`"),
                did_you_mean(text, TYPES.iter().copied()),
            );
            None
        }
    };
    match typed::kind(root) {
        Some((kind, _)) => Some(kind.to_owned()),
        None => own,
    }
}

/// What is said of an unquoted `NO`, also of SageMaker's configs, which are not read otherwise.
pub(super) fn doubt_truth_value(root: &Node, reading: &mut Reading) {
    let is_false = |node: &&Node| node.resolve(Schema::PyYaml) == Some(Resolved::Bool(false));
    if let Some(node) = root.get("distributed_type").filter(is_false) {
        reading.warning(
            "scalar-type",
            Some(node.span),
            "`distributed_type` is the truth value false to PyYAML, taken as \"NO\"",
            "write `\"NO\"` in quotes: accelerate finds no type in it",
        );
    }
}

/// The value of `num_processes` that says none, which is also its default.
const UNSAID: i128 = -1;

/// A config that leaves its processes to the command line, which does not say them: accelerate stops.
/// For the type `"NO"` alone it takes 1 (`commands/config/config_args.py`, `process_config`; unquoted it
/// is another value). Without a config accelerate counts the devices.
pub(super) fn doubt_unsaid(root: &Node, reading: &mut Reading) {
    let stated = root.get("num_processes");
    let unsaid = |node: &Node| node.resolve(Schema::PyYaml) == Some(Resolved::Int(UNSAID));
    let kind = root.get("distributed_type");
    let kind = kind.and_then(|node| node.resolve(Schema::PyYaml));
    let elsewhere = root.get("compute_environment").and_then(Node::text);
    if elsewhere.is_some_and(|environment| environment != "LOCAL_MACHINE") {
        return;
    }
    let one = stated.is_none() && kind == Some(Resolved::Str("NO".to_owned()));
    if one || !stated.is_none_or(unsaid) || kind.is_none() {
        return;
    }
    reading.warning(
        "mandatory-missing",
        Some(stated.map_or(root.span, |node| node.span)),
        "the config leaves `num_processes` to the command, and accelerate starts nothing without it",
        "type it, `accelerate launch --num_processes N …`, or write it here",
    );
}

/// The processes of all machines, where they can be known.
pub(super) fn world(root: &Node, kind: Option<&str>, tree: &mut Tree, reading: &mut Reading) {
    if kind == Some("XLA") {
        refuse_tpus(root, reading);
        return;
    }
    let processes = int(root, "num_processes", reading).filter(|given| given.value != UNSAID);
    let machines = int(root, "num_machines", reading);
    let by_mpirun = said(root, "mpirun_config.mpirun_hostfile").is_some();
    if let Some(alone) = one_process(root, kind).filter(|_| !by_mpirun) {
        if let Some(given) = processes.filter(|given| given.value > 1) {
            reading.warning(
                "unsupported-value",
                Some(given.span),
                format!(
                    "`num_processes: {}` does nothing: {} starts one process",
                    given.value, alone.says
                ),
                alone.help,
            );
        }
        tree.plain("batch.gpus", &Given::new(alone.key, 1, alone.node.span));
        return;
    }
    if let Some(machines) = machines.as_ref().filter(|given| given.value < 1) {
        reading.error(
            "out-of-range",
            Some(machines.span),
            format!("`num_machines` is {}", machines.value),
            "give a whole number from 1",
        );
        return;
    }
    let on = machines.as_ref().map_or(1, |machines| machines.value);
    if kind == Some("DEEPSPEED") && on > 1 && filtered(root, tree, reading) {
        return;
    }
    if let (Some(processes), false) = (&processes, by_mpirun) {
        divided(processes, on, reading);
        named_devices(root, processes.value / on, reading);
    }
    tree.plain_if("batch.gpus", processes);
}

/// The TPU launcher starts a process for every core that is there, and asks no number of anybody.
fn refuse_tpus(root: &Node, reading: &mut Reading) {
    let typed = typed::kind(root).map(|(_, node)| ("--tpu", node));
    let stated = root.get("distributed_type");
    let stated = stated.map(|node| ("distributed_type: XLA", node));
    let Some((says, node)) = typed.or(stated) else {
        return;
    };
    reading.error(
        "unsupported-value",
        Some(node.span),
        format!(
            "`{says}` starts a process for every TPU core that it finds, whatever `num_processes` says: TPUs cannot be planned here"
        ),
        "use `MULTI_GPU` for GPUs; what a recipe had on TPUs is given without the config, by `--recipe-gpus`",
    );
}

/// What makes accelerate start one process.
struct Alone<'n> {
    key: &'static str,
    node: &'n Node,
    says: String,
    help: &'static str,
}

fn one_process<'n>(root: &'n Node, kind: Option<&str>) -> Option<Alone<'n>> {
    if let Some(node) = typed::switch(root, typed::CPU) {
        return Some(Alone {
            key: "--cpu",
            node,
            says: "`--cpu`".to_owned(),
            help: "leave `--cpu` out",
        });
    }
    let help = match kind? {
        "NO" => "use `distributed_type: MULTI_GPU`",
        "MULTI_CPU" => {
            "give `mpirun_config`, or say by `--recipe-gpus` how many processes your own mpirun starts"
        }
        _ => return None,
    };
    Some(Alone {
        key: "distributed_type",
        node: root.get("distributed_type")?,
        says: format!("`distributed_type: {}`", kind?),
        help,
    })
}

/// A value that is there, and more than an empty place.
fn said<'n>(root: &'n Node, path: &str) -> Option<&'n Node> {
    let node = root.get_path(path)?;
    (node.resolve(Schema::PyYaml) != Some(Resolved::Null)).then_some(node)
}

/// `num_processes // num_machines` on each machine.
fn divided(processes: &Given<i128>, machines: i128, reading: &mut Reading) {
    if processes.value % machines == 0 {
        return;
    }
    let each = processes.value / machines;
    reading.error(
        "parallelism-product",
        Some(processes.span),
        format!(
            "{} processes over {machines} machines: accelerate starts {each} on each, {} in all",
            processes.value,
            each * machines
        ),
        "make `num_processes` a multiple of `num_machines`",
    );
}

/// How many devices `gpu_ids` names, where these are too few for so many processes of a machine: they
/// are what the processes see, and each needs one of its own.
pub(in crate::recipe) fn too_few_devices(ids: &str, each: u64) -> Option<usize> {
    let count = ids.split(',').count();
    (ids != "all" && (count as u64) < each).then_some(count)
}

fn named_devices(root: &Node, each: i128, reading: &mut Reading) {
    let Some(node) = said(root, "gpu_ids") else {
        return;
    };
    let text = node.text().unwrap_or(node.kind());
    let each = u64::try_from(each).unwrap_or(0);
    if let Some(count) = too_few_devices(text, each) {
        reading.error(
            "parallelism-product",
            Some(node.span),
            format!("{each} processes of a machine have {count} devices in `gpu_ids` `{text}`"),
            "name one for each, or write `all`",
        );
    }
}

/// On several machines DeepSpeed's own launcher starts what its filter names, whatever
/// `num_processes` says. False: there is no filter that counts.
fn filtered(root: &Node, tree: &mut Tree, reading: &mut Reading) -> bool {
    let key = |name: &str| format!("deepspeed_config.deepspeed_{name}");
    let launcher = said(root, &key("multinode_launcher")).and_then(Node::text);
    if launcher == Some("standard") {
        return false;
    }
    let excluded = said(root, &key("exclusion_filter"));
    let Some(node) = excluded.or_else(|| said(root, &key("inclusion_filter"))) else {
        return false;
    };
    let text = node.text().unwrap_or(node.kind());
    match hosts::named(text).filter(|_| excluded.is_none()) {
        Some(devices) => {
            let given = Given::new(key("inclusion_filter"), devices, node.span);
            tree.plain("batch.gpus", &given);
        }
        None => reading.warning(
            "unsupported-value",
            Some(node.span),
            format!("how many devices `{text}` leaves stands in the hostfile, which is not read"),
            "name them (`host:0,1@other:0,1`), or say how many by `--recipe-gpus`",
        ),
    }
    true
}

#[cfg(test)]
mod tests;
