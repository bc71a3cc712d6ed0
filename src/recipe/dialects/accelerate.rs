//! Configs of `accelerate launch`: the number of processes and machines, and the sharding.
//!
//! Source: accelerate 16cb6eb, `commands/config/config_args.py` (keys, and the refusal of unknown
//! ones), `commands/launch.py`, `utils/dataclasses.py` (`FullyShardedDataParallelPlugin`, `MegatronLMPlugin`).

pub(crate) mod environment;
pub(crate) mod options;
pub(crate) mod parallelism;
pub(crate) mod shipped;
pub(crate) mod world;
pub(crate) mod zero;

use std::path::{Path, PathBuf};

use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::overrides::Setting;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::short;

pub(crate) use shipped::fixes_accumulation;
pub(crate) use world::too_few_devices;
pub(crate) use zero::{overrule, with_deepspeed};

/// Reads an accelerate config as a recipe: it has a world, but no batch.
pub struct Accelerate;

/// Fields of `ClusterConfig`, and an old one that accelerate converts.
const KEYS: Words = Words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes \
     machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend \
     same_network main_training_function enable_cpu_affinity fp8_config deepspeed_config \
     fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name \
     tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config \
     dynamo_backend",
);

impl Reader for Accelerate {
    fn dialect(&self) -> Dialect {
        Dialect::Accelerate
    }

    fn detect(&self, root: &Node, _path: &Path, _origin: &Origin) -> Option<Detected> {
        looks_like_one(root)
            .then(|| Confidence::Likely.because("it has the key `distributed_type`"))
    }

    fn read(&self, mut root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        asked.put_into(&mut root, str::to_owned, reading);
        let native = translate(&root, Some(asked.path), reading);
        if let Some(plugin) = &mut reading.deepspeed_plugin {
            plugin.leave_to_program();
        }
        let mut native = with_deepspeed(native, reading);
        let name = Node::string(run_name::of_file(asked.path), root.span);
        native.set("name", root.span, name);
        Translated {
            part: true,
            ..Translated::whole(root, native)
        }
    }
}

pub(crate) fn looks_like_one(root: &Node) -> bool {
    let has = |key: &str| root.get(key).is_some();
    // Other programs have a `distributed_type` with other values.
    const BESIDE: Words = Words(
        "compute_environment deepspeed_config fsdp_config machine_rank main_training_function mixed_precision \
         num_machines num_processes use_cpu",
    );
    let kind = root.get("distributed_type");
    kind.is_some_and(|kind| world::is_type(kind) || BESIDE.iter().any(has))
        || (has("compute_environment") && has("num_processes"))
}

/// The source of the config of `accelerate launch`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Config {
    /// The path of a config file, and the place that names it.
    File(PathBuf, Option<Span>),
    /// A path, or else the name of a config that TRL ships.
    FileOrShipped(Given<String>),
}

impl Config {
    /// The value of `accelerate_config` on TRL's command line.
    pub fn of_trl(name: String, span: Span) -> Config {
        Config::FileOrShipped(Given::new("accelerate_config", name, span))
    }
}

/// Reads a config and the options of `accelerate launch`, which override it.
pub(crate) fn load(
    config: Option<&Config>,
    options: Option<&Node>,
    reading: &mut Reading,
) -> Option<Node> {
    let (mut path, mut shipped) = (Path::new(""), false);
    let mut root = match config {
        Some(Config::File(file, named)) => {
            path = file;
            read_config(file, *named, reading)?
        }
        Some(Config::FileOrShipped(name)) if reading.origin.is_file(Path::new(&name.value)) => {
            path = Path::new(&name.value);
            read_config(path, Some(name.span), reading)?
        }
        Some(Config::FileOrShipped(name)) => {
            shipped = true;
            shipped::config(name, reading)?
        }
        None => Node::mapping(options?.span),
    };
    if config.is_some() {
        reading.accelerate.get_or_insert_default().config = Some(root.clone());
    }
    if let Some(options) = options {
        // A shipped config is not written for this job, so an option contradicts nothing.
        if shipped {
            root.overlay(options.clone());
        } else {
            lay_options(&mut root, options, reading);
        }
        // Without a config the number of processes determines the type.
        if config.is_none() {
            let one = root.get("num_processes").and_then(Node::text) == Some("1");
            let kind = Node::string(if one { "NO" } else { "MULTI_GPU" }, options.span);
            root.set("distributed_type", options.span, kind);
        }
    }
    let path = config.map(|_| path);
    Some(translate(&root, path, reading))
}

/// Merges the options of `accelerate launch` over a config. Warns about `--num_processes 4` over a config of 8: the
/// option counts, and a batch computed from the config is wrong.
pub(crate) fn lay_options(config: &mut Node, options: &Node, reading: &mut Reading) {
    let processes = |of: &Node| {
        let node = of.get("num_processes")?;
        Some((node.shown().to_owned(), node.span))
    };
    // -1 leaves the number to the command.
    if let (Some((stated, span)), Some((typed, _))) = (processes(config), processes(options))
        && stated != typed
        && stated != "-1"
    {
        reading.warning(
            "gpu-count-conflict",
            Some(span),
            format!("the config states {stated} processes, the command {typed}"),
            format!("{typed} counts, because the command overrides the config; make them agree"),
        );
    }
    // An option that only the shell knows overrides the config, too.
    if let Some(word) = world::unresolved(reading).cloned()
        && let Some((stated, _)) = processes(config)
    {
        reading.warning(
            "gpu-count-conflict",
            Some(word.span),
            format!(
                "`--num_processes {}` overrides the config's {stated} processes, and only the shell knows its value",
                short(&word.text)
            ),
            "give the variable beside the script, `evenkeel plan SCRIPT NAME=VALUE`, or `--recipe-gpus N`",
        );
        config.remove_path("num_processes");
    }
    config.overlay(options.clone());
}

/// Reads a named config, which must be an accelerate config.
fn read_config(path: &Path, named: Option<Span>, reading: &mut Reading) -> Option<Node> {
    let (file, root) = match named {
        Some(named) => reading.open_of_command(path, named)?,
        None => reading.open(path, None)?,
    };
    reading.files.accelerate = Some(file);
    if path.extension().is_some_and(|e| e == "json") {
        reading.refuse_more_than_json(file, "accelerate");
    }
    if root.get("distributed_type").is_none() && !looks_like_one(&root) {
        reading.error(
            "unknown-dialect",
            Some(root.span),
            "this is not an accelerate config: it has no `distributed_type`",
            "give the file that `accelerate config` wrote",
        );
        return None;
    }
    Some(root)
}

/// Warns about `--recipe-gpus 4` with a launcher of 8 processes: the flag counts.
pub(crate) fn overruled_by_flag(launched: &Node, settings: &[Setting], reading: &mut Reading) {
    let path = "batch.gpus";
    let asked = settings.iter().find(|setting| setting.path == path);
    let (Some(started), Some(Setting { flag, value, .. })) = (launched.get_path(path), asked)
    else {
        return;
    };
    let (Some(key), Some(text)) = (&started.key, started.text()) else {
        return;
    };
    if text != value {
        reading.warning(
            "gpu-count-conflict",
            Some(started.span),
            format!("`{key}` gives a world of {text}, but `{flag}` is {value}"),
            format!("{value} counts, also for the global batch: remove `{flag}` if the launcher is right"),
        );
    }
}

/// The only distributed types with processes that read `use_cpu`.
const READ_USE_CPU: [&str; 3] = ["", "NO", "MULTI_CPU"];

/// Translates the settings. `config` is the path of their config, which may be TRL's.
fn translate(root: &Node, config: Option<&Path>, reading: &mut Reading) -> Node {
    let mut tree = Tree::new(root.span);
    let environment = root.get("compute_environment");
    if let Some(node) = environment.filter(|node| node.text() != Some("LOCAL_MACHINE")) {
        let message = format!(
            "`compute_environment` is `{}`, whose machines evenkeel cannot plan",
            short(node.shown())
        );
        let help =
            "use a config with `compute_environment: LOCAL_MACHINE`, or give `--recipe-gpus`";
        reading.error("unsupported-value", Some(node.span), message, help);
        return tree.into_node();
    }
    for entry in root.entries().unwrap_or_default() {
        let known = KEYS.has(&entry.name) || entry.name == RESERVED;
        let switch = entry.name.starts_with("--") && world::is_typed(&entry.value);
        if !known && !switch {
            let message = match entry.name.as_str() {
                "fp16" => {
                    "`fp16` is a former key of accelerate: write `mixed_precision: fp16`".to_owned()
                }
                name => format!("accelerate has no key `{name}` and refuses the file"),
            };
            reading.unknown_key(entry, message, KEYS.iter());
        }
    }
    world::refuse_switches(root, reading);
    let kind = world::distributed_type(root, reading).unwrap_or_default();
    let kind = kind.as_str();
    let passes_sizes = parallelism::passes_sizes(root, kind);
    if let Some(launch) = &mut reading.accelerate {
        launch.kind = kind.to_owned();
        launch.passes_sizes = passes_sizes.is_ok();
    }
    world::world(root, kind, config.is_some(), &mut tree, reading);
    let cpu = root
        .get("use_cpu")
        .filter(|node| node.is_bool(true, Schema::PyYaml));
    if let Some(node) = cpu.filter(|_| !READ_USE_CPU.contains(&kind)) {
        reading.warning(
            "unsupported-value",
            Some(node.span),
            format!("`use_cpu` has no effect with `distributed_type: {kind}`: accelerate drops it"),
            "remove it",
        );
    }
    match kind {
        "FSDP" => fsdp(root.get("fsdp_config"), &mut tree, reading),
        "DEEPSPEED" if world::switch(root, world::CPU).is_none() => {
            let path = config.unwrap_or(Path::new(""));
            zero::read(root, path, reading);
        }
        "MEGATRON_LM" => {
            megatron(root.get("megatron_lm_config"), &mut tree, reading);
        }
        _ => {}
    }
    parallelism::sizes(root, kind, passes_sizes, &mut tree, reading);
    precision(root, &mut tree, reading);
    tree.into_node()
}

/// The sharding strategies of FSDP, their numbers, and the native ones.
const SHARDINGS: [(&str, &str, &str); 5] = [
    ("FULL_SHARD", "1", "fsdp"),
    ("SHARD_GRAD_OP", "2", "zero2"),
    ("NO_SHARD", "3", "ddp"),
    ("HYBRID_SHARD", "4", "fsdp"),
    ("HYBRID_SHARD_ZERO2", "5", "zero2"),
];

/// The sharding of FSDP. Keys may lack the prefix `fsdp_`. `reshard_after_forward` frees parameters after
/// the forward pass: a boolean in version 2; version 1 also accepts the strategy's name.
fn fsdp(config: Option<&Node>, tree: &mut Tree, reading: &mut Reading) {
    let find = |name: &str| {
        let mut keys = [format!("fsdp_{name}"), name.to_owned()].into_iter();
        let (key, node) = keys.find_map(|key| Some((key.clone(), config?.get(&key)?)))?;
        Some(Given::new(format!("fsdp_config.{key}"), node, node.span))
    };
    tree.default("parallel.strategy", "fsdp");
    let sharding = find("sharding_strategy");
    let reshards = sharding.is_none();
    if let Some(given) = sharding.or_else(|| find("reshard_after_forward")) {
        let text = given.value.shown().to_uppercase();
        let mut shardings = SHARDINGS.iter();
        let strategy = match text.as_str() {
            "TRUE" | "YES" | "ON" if reshards => Some("fsdp"),
            "FALSE" | "NO" | "OFF" if reshards => Some("zero2"),
            text => shardings
                .find(|(name, number, _)| [*name, *number].contains(&text))
                .map(|(.., strategy)| *strategy),
        };
        match strategy {
            Some(strategy) => tree.plain("parallel.strategy", &given.with(strategy)),
            None => {
                let known = SHARDINGS.iter().map(|(name, ..)| *name);
                reading.unknown_value(&given.key, &text, given.span, known);
            }
        }
    }
    if let Some(given) = find("offload_params") {
        let on = given.with(given.value.is_bool(true, Schema::PyYaml));
        tree.plain("parallel.offload_parameters", &on);
        tree.plain("parallel.offload_optimizer", &on);
    }
    let checkpointing = find("activation_checkpointing");
    let on = checkpointing.filter(|given| given.value.is_bool(true, Schema::PyYaml));
    tree.plain_if(
        "model.activation_checkpointing",
        on.map(|given| given.with(true)),
    );
}

/// The sizes of Megatron-LM's axes.
fn megatron(config: Option<&Node>, tree: &mut Tree, reading: &mut Reading) {
    let Some(config) = config else { return };
    for (key, path) in [
        ("megatron_lm_tp_degree", "parallel.tensor"),
        ("megatron_lm_pp_degree", "parallel.pipeline"),
        ("megatron_lm_context_parallel_size", "parallel.context"),
    ] {
        let named = format!("megatron_lm_config.{key}");
        if let Some(size) = config.get(key).and_then(|node| reading.int(named, node)) {
            tree.plain(path, &size);
        }
    }
}

/// The precision, which a recipe's own `bf16` or `fp16` overrides.
fn precision(root: &Node, tree: &mut Tree, reading: &mut Reading) {
    let key = "mixed_precision";
    let Some(node) = root.get(key).filter(|node| !node.is_null(Schema::PyYaml)) else {
        return;
    };
    let value = match node.shown().to_lowercase().as_str() {
        _ if node.is_bool(false, Schema::PyYaml) => "f32",
        "no" => "f32",
        "bf16" | "fp8" => "bf16",
        "fp16" => "f16",
        _ => {
            let words = ["no", "fp16", "bf16", "fp8"];
            reading.unknown_value(key, node.shown(), node.span, words);
            return;
        }
    };
    tree.plain("model.precision", &Given::new(key, value, node.span));
}

#[cfg(test)]
pub(crate) mod tests;
