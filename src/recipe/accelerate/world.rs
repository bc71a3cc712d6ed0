//! The number of processes that `accelerate launch` starts.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`launch_command`: the choice of a launcher),
//! `utils/launch.py` (`prepare_simple_launcher_cmd_env`: one process, or the number given to mpirun;
//! `prepare_multi_gpu_env`: `num_processes // num_machines` on each machine;
//! `prepare_deepspeed_cmd_env`: on several machines DeepSpeed's launcher, whose filter may name the
//! devices), `commands/launch.py` (`tpu_launcher`: all cores), `utils/constants.py` (`DEEPSPEED_MULTINODE_LAUNCHERS`).

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

/// The distributed type: that of the command line, else the config's. An unquoted `NO` is false to PyYAML,
/// and accelerate then finds no type. It refuses a config without a type, whatever the command line has.
pub(super) fn distributed_type(root: &Node, reading: &mut Reading) -> Option<String> {
    let Some(node) = root.get("distributed_type") else {
        reading.error(
            "mandatory-missing",
            Some(root.span),
            "accelerate refuses a config without `distributed_type`",
            format!("give one of {}", TYPES.join(", ")),
        );
        return None;
    };
    let own = match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(false)) => {
            warn_about_unquoted_no(root, reading);
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

/// Warns about an unquoted `NO`, also in SageMaker's configs, which are not read otherwise.
pub(super) fn warn_about_unquoted_no(root: &Node, reading: &mut Reading) {
    let is_false = |node: &&Node| node.resolve(Schema::PyYaml) == Some(Resolved::Bool(false));
    if let Some(node) = root.get("distributed_type").filter(is_false) {
        reading.warning(
            "scalar-type",
            Some(node.span),
            "`distributed_type` is the boolean false to PyYAML, taken as \"NO\"",
            "quote it, `\"NO\"`: accelerate finds no type in false",
        );
    }
}

/// The default of `num_processes`, which leaves the number to the command line.
const UNSET: i128 = -1;

/// Warns about a config without processes if the command line has none either: accelerate exits.
/// Only for the type `"NO"` it assumes 1 (`commands/config/config_args.py`, `process_config`; an unquoted one
/// is another value). Without a config accelerate counts the devices.
pub(super) fn warn_about_unset_processes(root: &Node, reading: &mut Reading) {
    let stated = root.get("num_processes");
    let unset = |node: &Node| node.resolve(Schema::PyYaml) == Some(Resolved::Int(UNSET));
    let kind = root.get("distributed_type");
    let kind = kind.and_then(|node| node.resolve(Schema::PyYaml));
    let elsewhere = root.get("compute_environment").and_then(Node::text);
    if elsewhere.is_some_and(|environment| environment != "LOCAL_MACHINE") {
        return;
    }
    let one = stated.is_none() && kind == Some(Resolved::Str("NO".to_owned()));
    if one || !stated.is_none_or(unset) || kind.is_none() {
        return;
    }
    reading.warning(
        "mandatory-missing",
        Some(stated.map_or(root.span, |node| node.span)),
        "neither the config nor the command sets `num_processes`, and accelerate exits without it",
        "give it as `accelerate launch --num_processes N …`, or set it here",
    );
}

/// The processes of all machines, if known.
pub(super) fn world(root: &Node, kind: Option<&str>, tree: &mut Tree, reading: &mut Reading) {
    if kind == Some("XLA") {
        refuse_tpus(root, reading);
        return;
    }
    let processes = int(root, "num_processes", reading).filter(|given| given.value != UNSET);
    let machines = int(root, "num_machines", reading);
    let by_mpirun = non_empty(root, "mpirun_config.mpirun_hostfile").is_some();
    if let Some(alone) = one_process(root, kind).filter(|_| !by_mpirun) {
        if let Some(given) = processes.filter(|given| given.value > 1) {
            reading.warning(
                "unsupported-value",
                Some(given.span),
                format!(
                    "`num_processes: {}` has no effect: {} starts one process",
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

/// Refuses TPUs: their launcher starts a process for every core that it finds, whatever the number.
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
            "`{says}` starts a process for every TPU core that it finds, independent of `num_processes`: evenkeel cannot plan TPUs"
        ),
        "use `MULTI_GPU` for GPUs; for a recipe written for TPUs, remove the config and give `--recipe-gpus`",
    );
}

/// The setting that makes accelerate start one process.
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
            help: "remove `--cpu`",
        });
    }
    let help = match kind? {
        "NO" => "use `distributed_type: MULTI_GPU`",
        "MULTI_CPU" => {
            "set `mpirun_config`, or give the number of processes of your mpirun by `--recipe-gpus`"
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

/// A value that is present and not empty.
fn non_empty<'n>(root: &'n Node, path: &str) -> Option<&'n Node> {
    let node = root.get_path(path)?;
    (node.resolve(Schema::PyYaml) != Some(Resolved::Null)).then_some(node)
}

/// Refuses processes that the machines do not divide: accelerate starts `num_processes // num_machines` on each.
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

/// The number of devices in `gpu_ids`, if that is less than the number of processes of a machine: they
/// see only these devices, and each needs one.
pub(in crate::recipe) fn too_few_devices(ids: &str, each: u64) -> Option<usize> {
    let count = ids.split(',').count();
    (ids != "all" && (count as u64) < each).then_some(count)
}

fn named_devices(root: &Node, each: i128, reading: &mut Reading) {
    let Some(node) = non_empty(root, "gpu_ids") else {
        return;
    };
    let text = node.text().unwrap_or(node.kind());
    let each = u64::try_from(each).unwrap_or(0);
    if let Some(count) = too_few_devices(text, each) {
        reading.error(
            "parallelism-product",
            Some(node.span),
            format!(
                "{each} processes of a machine have only {count} devices in `gpu_ids` `{text}`"
            ),
            "name one device for each, or write `all`",
        );
    }
}

/// On several machines DeepSpeed's own launcher starts the processes that its filter names, independent of
/// `num_processes`. False: no filter counts.
fn filtered(root: &Node, tree: &mut Tree, reading: &mut Reading) -> bool {
    let key = |name: &str| format!("deepspeed_config.deepspeed_{name}");
    let launcher = non_empty(root, &key("multinode_launcher")).and_then(Node::text);
    if launcher == Some("standard") {
        return false;
    }
    let excluded = non_empty(root, &key("exclusion_filter"));
    let Some(node) = excluded.or_else(|| non_empty(root, &key("inclusion_filter"))) else {
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
            format!("the number of devices that `{text}` leaves is in the hostfile, which evenkeel does not read"),
            "name them (`host:0,1@other:0,1`), or give their number by `--recipe-gpus`",
        ),
    }
    true
}

#[cfg(test)]
mod tests;
