//! Configs of `accelerate launch`: how many processes on how many machines, and what they shard.
//!
//! Source: accelerate 16cb6eb, `commands/config/config_args.py` (keys, and the refusal of unknown
//! ones), `commands/launch.py`, `utils/launch.py` (`num_processes // num_machines` on each machine),
//! `parallelism_config.py`.

use std::path::Path;

use super::handbook;
use super::node::Node;
use super::reader::{Confidence, Detected, Reader};
use super::reading::Reading;
use super::scalar::{Resolved, Schema};
use super::suggest::did_you_mean;
use super::tree::{Given, Tree};
use super::{Dialect, deepspeed, name};

/// Reads an accelerate config that is given as a recipe: it has a world, but no batch.
pub struct Accelerate;

/// Fields of `ClusterConfig`, and the two old ones that are converted.
const KEYS: &[&str] = &[
    "compute_environment",
    "distributed_type",
    "mixed_precision",
    "use_cpu",
    "debug",
    "num_processes",
    "machine_rank",
    "num_machines",
    "gpu_ids",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "same_network",
    "main_training_function",
    "enable_cpu_affinity",
    "fp8_config",
    "deepspeed_config",
    "fsdp_config",
    "parallelism_config",
    "megatron_lm_config",
    "mpirun_config",
    "downcast_bf16",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "command_file",
    "commands",
    "tpu_vm",
    "tpu_env",
    "dynamo_config",
    "fp16",
    "dynamo_backend",
];

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

impl Reader for Accelerate {
    fn dialect(&self) -> Dialect {
        Dialect::Accelerate
    }

    fn detect(&self, root: &Node, _path: &Path) -> Option<Detected> {
        looks_like_one(root).then(|| Detected {
            confidence: Confidence::Likely,
            reason: "it has the key `distributed_type`".to_owned(),
        })
    }

    fn translate(&self, root: &Node, path: &Path, reading: &mut Reading) -> Node {
        let mut native = translate(root, path, reading);
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = Node::string(name::label(&name), root.span);
        native.set("name", root.span, name);
        native
    }
}

fn looks_like_one(root: &Node) -> bool {
    root.get("distributed_type").is_some()
        || (root.get("compute_environment").is_some() && root.get("num_processes").is_some())
}

/// Reads the file behind `--accelerate`.
pub(super) fn load(path: &Path, reading: &mut Reading) -> Option<Node> {
    let root = reading.load(path)?;
    if !looks_like_one(&root) {
        reading.error(
            "unknown-dialect",
            Some(root.span),
            "this is not an accelerate config: it has no `distributed_type`",
            "give the file that `accelerate config` wrote",
        );
        return None;
    }
    Some(translate(&root, path, reading))
}

/// The batch of the recipe must be the one that DeepSpeed is told: the trainer compares them.
pub(super) fn conflicts(launched: &Node, recipe: &Node, reading: &mut Reading) {
    for (path, rule) in [
        ("batch.accumulation", "accumulation-conflict"),
        ("batch.micro", "deepspeed-batch-triple"),
    ] {
        let (Some(theirs), Some(own)) = (launched.get_path(path), recipe.get_path(path)) else {
            continue;
        };
        if theirs.text() != own.text() {
            let key = |node: &Node| node.key.clone().unwrap_or_else(|| path.to_owned());
            reading.error(
                rule,
                Some(theirs.span),
                format!(
                    "`{}` is {} here, but {} in the recipe (`{}`)",
                    key(theirs),
                    theirs.text().unwrap_or_default(),
                    own.text().unwrap_or_default(),
                    key(own),
                ),
                "write \"auto\" or leave it out here, so that the recipe decides",
            );
        }
    }
}

fn translate(root: &Node, path: &Path, reading: &mut Reading) -> Node {
    let mut tree = Tree::new(root.span);
    if sagemaker(root, reading) {
        return tree.into_node();
    }
    for entry in root.entries().unwrap_or_default() {
        if !KEYS.contains(&entry.name.as_str()) && entry.name != super::RESERVED {
            reading.error(
                "unknown-key",
                Some(entry.name_span),
                format!(
                    "accelerate has no key `{}` and refuses the file",
                    entry.name
                ),
                did_you_mean(&entry.name, KEYS.iter().copied()),
            );
        }
    }
    let kind = distributed_type(root, reading);
    world(root, kind.as_deref(), &mut tree, reading);
    match kind.as_deref() {
        Some("FSDP") => fsdp(root.get("fsdp_config"), &mut tree, reading),
        Some("DEEPSPEED") => zero(root.get("deepspeed_config"), path, &mut tree, reading),
        Some("MEGATRON_LM") => megatron(root.get("megatron_lm_config"), &mut tree, reading),
        _ => {}
    }
    if let Some(sizes) = root.get("parallelism_config") {
        handbook::axes(sizes, "parallelism_config", &mut tree, reading);
    }
    precision(root, &mut tree, reading);
    tree.into_node()
}

/// SageMaker starts its own machines: there is no world here to plan for.
fn sagemaker(root: &Node, reading: &mut Reading) -> bool {
    let Some(node) = root.get("compute_environment") else {
        return false;
    };
    let environment = node.text().unwrap_or_default();
    match environment {
        "LOCAL_MACHINE" => return false,
        "AMAZON_SAGEMAKER" => reading.error(
            "unsupported-value",
            Some(node.span),
            "SageMaker jobs start on machines of their own, which cannot be planned here",
            "use a config with `compute_environment: LOCAL_MACHINE`, or give `--recipe-gpus`",
        ),
        other => reading.error(
            "unknown-value",
            Some(node.span),
            format!("`compute_environment` is `{other}`"),
            did_you_mean(other, ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"]),
        ),
    }
    true
}

/// The distributed type; an unquoted `NO` is false to PyYAML, and accelerate then finds no type.
fn distributed_type(root: &Node, reading: &mut Reading) -> Option<String> {
    let Some(node) = root.get("distributed_type") else {
        reading.error(
            "mandatory-missing",
            Some(root.span),
            "the accelerate config has no `distributed_type`",
            format!("give one of {}", TYPES.join(", ")),
        );
        return None;
    };
    match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(false)) => {
            reading.warning(
                "scalar-type",
                Some(node.span),
                "`distributed_type` is the truth value false to PyYAML, taken as \"NO\"",
                "write `\"NO\"` in quotes: accelerate finds no type in it",
            );
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
    }
}

/// `num_processes` is the total over `num_machines`; without a distributed type one process runs.
fn world(root: &Node, kind: Option<&str>, tree: &mut Tree, reading: &mut Reading) {
    let processes = int(root, "num_processes", reading).filter(|given| given.value != -1);
    let machines = int(root, "num_machines", reading);
    if kind == Some("NO") {
        if let Some(given) = processes.filter(|given| given.value > 1) {
            reading.warning(
                "unsupported-value",
                Some(given.span),
                format!(
                    "`num_processes: {}` does nothing: `distributed_type: NO` starts one process",
                    given.value
                ),
                "use `distributed_type: MULTI_GPU`",
            );
        }
        if let Some(node) = root.get("distributed_type") {
            let key = "distributed_type".to_owned();
            tree.plain(
                "batch.gpus",
                &Given {
                    key,
                    value: 1,
                    span: node.span,
                },
            );
        }
        return;
    }
    if let Some(machines) = machines.as_ref().filter(|given| given.value < 1) {
        reading.error(
            "out-of-range",
            Some(machines.span),
            format!("`num_machines` is {}", machines.value),
            "give a whole number from 1",
        );
    }
    if let (Some(processes), Some(machines)) = (&processes, &machines)
        && machines.value > 0
        && processes.value % machines.value != 0
    {
        let each = processes.value / machines.value;
        reading.error(
            "parallelism-product",
            Some(processes.span),
            format!(
                "{} processes over {} machines: accelerate starts {each} on each, {} in all",
                processes.value,
                machines.value,
                each * machines.value
            ),
            "make `num_processes` a multiple of `num_machines`",
        );
    }
    tree.plain_if("batch.gpus", processes);
}

/// A whole number; accelerate itself does not convert.
fn int(root: &Node, key: &str, reading: &mut Reading) -> Option<Given<i128>> {
    let node = root.get(key)?;
    match node.resolve(Schema::PyYaml) {
        Some(Resolved::Int(value)) => Some(Given {
            key: key.to_owned(),
            value,
            span: node.span,
        }),
        Some(Resolved::Null) => None,
        _ => {
            let found = node.text().unwrap_or(node.kind());
            reading.error(
                "wrong-type",
                Some(node.span),
                format!("`{key}` takes a whole number, this is `{found}`"),
                "give a whole number without quotes",
            );
            None
        }
    }
}

/// What FSDP shards. Keys may lack the `fsdp_` before them; version 2 has no strategy, but says
/// whether parameters are freed after the forward pass.
fn fsdp(config: Option<&Node>, tree: &mut Tree, reading: &mut Reading) {
    let find = |name: &str| {
        let config = config?;
        let long = format!("fsdp_{name}");
        [long.as_str(), name].into_iter().find_map(|key| {
            let node = config.get(key)?;
            Some((format!("fsdp_config.{key}"), node))
        })
    };
    tree.default("parallel.strategy", "fsdp");
    if let Some((key, node)) = find("sharding_strategy") {
        let text = node.text().unwrap_or_default().to_uppercase();
        let strategy = match text.as_str() {
            "FULL_SHARD" | "1" | "HYBRID_SHARD" | "4" => "fsdp",
            "SHARD_GRAD_OP" | "2" | "HYBRID_SHARD_ZERO2" | "5" => "zero2",
            "NO_SHARD" | "3" => "ddp",
            _ => {
                let known = [
                    "FULL_SHARD",
                    "SHARD_GRAD_OP",
                    "NO_SHARD",
                    "HYBRID_SHARD",
                    "HYBRID_SHARD_ZERO2",
                ];
                reading.error(
                    "unknown-value",
                    Some(node.span),
                    format!("`{key}` is `{text}`"),
                    did_you_mean(&text, known),
                );
                return;
            }
        };
        tree.text(
            "parallel.strategy",
            &Given {
                key,
                value: strategy.to_owned(),
                span: node.span,
            },
        );
    } else if let Some((key, node)) = find("reshard_after_forward")
        && node.resolve(Schema::PyYaml) == Some(Resolved::Bool(false))
    {
        tree.text(
            "parallel.strategy",
            &Given {
                key,
                value: "zero2".to_owned(),
                span: node.span,
            },
        );
    }
    if let Some((key, node)) = find("activation_checkpointing")
        && node.resolve(Schema::PyYaml) == Some(Resolved::Bool(true))
    {
        tree.plain(
            "model.activation_checkpointing",
            &Given {
                key,
                value: true,
                span: node.span,
            },
        );
    }
}

/// The ZeRO stage (2 where nothing is said) and accumulation, from the config itself or the
/// DeepSpeed file that it names. A file without an accumulation means 1, and the trainer compares.
fn zero(config: Option<&Node>, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    tree.default("parallel.strategy", "zero2");
    let Some(config) = config else { return };
    if let Some(node) = config.get("deepspeed_config_file") {
        let name = node.text().unwrap_or_default();
        match reading.beside(path, name) {
            Some(file) => {
                if let Some(root) = reading.load(&file) {
                    tree.lay(deepspeed::translate(&root, "deepspeed_config_file"));
                    if root.get("gradient_accumulation_steps").is_none() {
                        let key = "deepspeed_config_file".to_owned();
                        tree.plain(
                            "batch.accumulation",
                            &Given {
                                key,
                                value: 1,
                                span: node.span,
                            },
                        );
                    }
                }
            }
            None => reading.warning(
                "deepspeed-unread",
                Some(node.span),
                format!("the DeepSpeed config `{name}` is not there: its ZeRO stage is not known"),
                "put it beside this file, or give `evenkeel.parallel.strategy`",
            ),
        }
        return;
    }
    if let Some(node) = config.get("zero_stage") {
        match node.resolve(Schema::PyYaml) {
            Some(Resolved::Int(stage)) if deepspeed::strategy(stage).is_some() => {
                let value = deepspeed::strategy(stage).unwrap_or_default().to_owned();
                let key = "deepspeed_config.zero_stage".to_owned();
                tree.text(
                    "parallel.strategy",
                    &Given {
                        key,
                        value,
                        span: node.span,
                    },
                );
            }
            _ => reading.error(
                "out-of-range",
                Some(node.span),
                format!("`zero_stage` is `{}`", node.text().unwrap_or(node.kind())),
                "give 0, 1, 2 or 3",
            ),
        }
    }
    let accumulation = config.get("gradient_accumulation_steps");
    if let Some(node) = accumulation
        && let Some(Resolved::Int(value)) = node.resolve(Schema::PyYaml)
    {
        let key = "deepspeed_config.gradient_accumulation_steps".to_owned();
        tree.plain(
            "batch.accumulation",
            &Given {
                key,
                value,
                span: node.span,
            },
        );
    }
}

/// Sizes of Megatron-LM's axes.
fn megatron(config: Option<&Node>, tree: &mut Tree, reading: &mut Reading) {
    let Some(config) = config else { return };
    for (key, path) in [
        ("megatron_lm_tp_degree", "parallel.tensor"),
        ("megatron_lm_pp_degree", "parallel.pipeline"),
        ("megatron_lm_context_parallel_size", "parallel.context"),
    ] {
        if let Some(mut given) = int(config, key, reading) {
            given.key = format!("megatron_lm_config.{key}");
            tree.plain(path, &given);
        }
    }
}

/// The precision, which a recipe's own `bf16` or `fp16` overrules.
fn precision(root: &Node, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = root.get("mixed_precision") else {
        return;
    };
    let text = node.text().unwrap_or_default();
    let value = match (text, node.resolve(Schema::PyYaml)) {
        (_, Some(Resolved::Null)) => return,
        ("no", _) | (_, Some(Resolved::Bool(false))) => "f32",
        ("bf16" | "fp8", _) => "bf16",
        ("fp16", _) => "f16",
        _ => {
            reading.error(
                "unknown-value",
                Some(node.span),
                format!("`mixed_precision` is `{text}`"),
                did_you_mean(text, ["no", "fp16", "bf16", "fp8"]),
            );
            return;
        }
    };
    let key = "mixed_precision".to_owned();
    tree.text(
        "model.precision",
        &Given {
            key,
            value: value.to_owned(),
            span: node.span,
        },
    );
}

#[cfg(test)]
mod tests;
