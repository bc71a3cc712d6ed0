//! Configs of `accelerate launch`: the number of processes and machines, and the sharding.
//!
//! Source: accelerate 16cb6eb, `commands/config/config_args.py` (keys, and the refusal of unknown
//! ones), `commands/launch.py`.

pub(crate) mod environment;
pub(crate) mod options;
pub(crate) mod parallelism;
pub(crate) mod plugin;
pub(crate) mod shipped;
pub(crate) mod strategy;
pub(crate) mod typed;
pub(crate) mod world;
pub(crate) mod zero;

use std::path::{Path, PathBuf};

use crate::recipe::schema::deepspeed::ConfigKey;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::overrides::Setting;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;

pub(crate) use shipped::fixes_accumulation;
pub(crate) use typed::is_switch;
pub(crate) use world::too_few_devices;
pub(crate) use zero::{leave_to_trainer, overrule};

/// Reads an accelerate config as a recipe: it has a world, but no batch.
pub struct Accelerate;

/// Fields of `ClusterConfig`, and the two old ones that accelerate converts.
const KEYS: Words = Words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes \
     machine_rank num_machines gpu_ids main_process_ip main_process_port rdzv_backend \
     same_network main_training_function enable_cpu_affinity fp8_config deepspeed_config \
     fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name \
     tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config \
     fp16 dynamo_backend",
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
        world::warn_about_unset_processes(&root, reading);
        let config_keys = zero::config_keys(&root);
        let mut native = translate(&root, asked.path, config_keys, reading);
        let name = Node::string(run_name::of_file(asked.path), root.span);
        native.set("name", root.span, name);
        Translated {
            part: true,
            ..Translated::whole(root, native)
        }
    }
}

pub(crate) fn looks_like_one(root: &Node) -> bool {
    root.get("distributed_type").is_some()
        || (root.get("compute_environment").is_some() && root.get("num_processes").is_some())
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
        let launch = reading.launch.get_or_insert_default();
        launch.config = Some(root.clone());
        launch.json = path
            .extension()
            .is_some_and(|extension| extension == "json");
    }
    let config_keys = zero::config_keys(&root);
    if let Some(options) = options {
        // A shipped config is not written for this job, so an option contradicts nothing.
        match shipped {
            true => root.overlay(options.clone()),
            false => lay_options(&mut root, options, reading),
        }
        // Without a config the number of processes determines the type.
        if config.is_none() {
            let processes = root.get("num_processes").and_then(Node::text);
            let kind = if processes == Some("1") {
                "NO"
            } else {
                "MULTI_GPU"
            };
            let kind = Node::string(kind, options.span);
            root.set("distributed_type", options.span, kind);
        }
    }
    if config.is_some() {
        world::warn_about_unset_processes(&root, reading);
    }
    Some(translate(&root, path, config_keys, reading))
}

/// Merges the options of `accelerate launch` over a config.
pub(crate) fn lay_options(config: &mut Node, options: &Node, reading: &mut Reading) {
    overruled(config, options, reading);
    config.overlay(options.clone());
}

/// Reads a named config, which must be an accelerate config.
fn read_config(path: &Path, named: Option<Span>, reading: &mut Reading) -> Option<Node> {
    let (file, root) = reading.open(path, named)?;
    reading.files.accelerate = Some(file);
    if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        reading.refuse_more_than_json(file, "accelerate");
    }
    if !looks_like_one(&root) {
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

/// Warns about `accelerate launch --num_processes 4` with a config of 8: the option counts, and a
/// batch computed from the config is wrong.
fn overruled(config: &Node, options: &Node, reading: &mut Reading) {
    let key = "num_processes";
    let (Some(stated), Some(typed)) = (config.get(key), options.get(key)) else {
        return;
    };
    // -1 leaves the number to the command.
    if stated.text() != typed.text() && stated.text() != Some("-1") {
        let (stated_text, typed_text) = (
            stated.text().unwrap_or_default(),
            typed.text().unwrap_or_default(),
        );
        reading.warning(
            "gpu-count-conflict",
            Some(stated.span),
            format!("the config states {stated_text} processes, the command {typed_text}"),
            format!(
                "{typed_text} counts, because the command overrides the config; make them agree"
            ),
        );
    }
}

/// Warns about `--recipe-gpus 4` with a launcher of 8 processes: the flag counts.
pub(crate) fn overruled_by_flag(launched: &Node, settings: &[Setting], reading: &mut Reading) {
    let path = "batch.gpus";
    let (Some(started), Some(asked)) = (
        launched.get_path(path),
        settings.iter().find(|setting| setting.path == path),
    ) else {
        return;
    };
    let (Some(key), Some(text)) = (&started.key, started.text()) else {
        return;
    };
    if text != asked.value {
        let Setting { flag, value, .. } = asked;
        reading.warning(
            "gpu-count-conflict",
            Some(started.span),
            format!("`{key}` gives a world of {text}, but `{flag}` is {value}"),
            format!("{value} counts, also for the global batch: remove `{flag}` if the launcher is right"),
        );
    }
}

/// Refuses a batch of the recipe that differs from DeepSpeed's: the trainer compares them.
pub(crate) fn conflicts(launched: &Node, recipe: &Node, reading: &mut Reading) {
    for (path, rule) in [
        ("batch.accumulation", "accumulation-conflict"),
        ("batch.per_device_batch_size", "deepspeed-batch-triple"),
    ] {
        let (Some(launched_value), Some(recipe_value)) =
            (launched.get_path(path), recipe.get_path(path))
        else {
            continue;
        };
        if launched_value.text() != recipe_value.text() {
            let key = |node: &Node| node.key.clone().unwrap_or_else(|| path.to_owned());
            reading.error(
                rule,
                Some(launched_value.span),
                format!(
                    "`{}` is {} here, but {} in the recipe (`{}`)",
                    key(launched_value),
                    launched_value.text().unwrap_or_default(),
                    recipe_value.text().unwrap_or_default(),
                    key(recipe_value),
                ),
                "write \"auto\" or remove it here, so that the recipe decides",
            );
        }
    }
}

/// Translates the config. `config_keys` has the DeepSpeed keys of the config's file.
fn translate(root: &Node, path: &Path, config_keys: Vec<ConfigKey>, reading: &mut Reading) -> Node {
    let mut tree = Tree::new(root.span);
    if sagemaker(root, reading) {
        world::warn_about_unquoted_no(root, reading);
        return tree.into_node();
    }
    for entry in root.entries().unwrap_or_default() {
        let known = KEYS.has(&entry.name) || entry.name == crate::recipe::schema::dialect::RESERVED;
        if !known && !typed::is_entry(entry) {
            let message = format!(
                "accelerate has no key `{}` and refuses the file",
                entry.name
            );
            reading.unknown_key(entry, message, KEYS.iter());
        }
    }
    typed::refuse(root, reading);
    let kind = world::distributed_type(root, reading);
    world::world(root, kind.as_deref(), &mut tree, reading);
    match kind.as_deref() {
        Some("FSDP") => strategy::fsdp(root.get("fsdp_config"), &mut tree, reading),
        Some("DEEPSPEED") if typed::switch(root, typed::CPU).is_none() => {
            zero::read(root, path, config_keys, &mut tree, reading);
        }
        Some("MEGATRON_LM") => {
            strategy::megatron(root.get("megatron_lm_config"), &mut tree, reading);
        }
        _ => {}
    }
    parallelism::sizes(root, kind.as_deref(), &mut tree, reading);
    precision(root, &mut tree, reading);
    tree.into_node()
}

/// Refuses SageMaker jobs: it starts its own machines, so there is no world to plan for.
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
            "SageMaker starts jobs on its own machines, which evenkeel cannot plan",
            "use a config with `compute_environment: LOCAL_MACHINE`, or give `--recipe-gpus`",
        ),
        other => {
            let words = ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"];
            reading.unknown_value("compute_environment", other, node.span, words);
        }
    }
    true
}

/// The precision, which a recipe's own `bf16` or `fp16` overrides.
fn precision(root: &Node, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = root.get("mixed_precision") else {
        return;
    };
    let text = node.text().unwrap_or_default();
    let lower = text.to_lowercase();
    let value = match (lower.as_str(), node.resolve(Schema::PyYaml)) {
        (_, Some(Resolved::Null)) => return,
        ("no", _) | (_, Some(Resolved::Bool(false))) => "f32",
        ("bf16" | "fp8", _) => "bf16",
        ("fp16", _) => "f16",
        _ => {
            let words = ["no", "fp16", "bf16", "fp8"];
            reading.unknown_value("mixed_precision", text, node.span, words);
            return;
        }
    };
    let key = "mixed_precision";
    tree.text(
        "model.precision",
        &Given::new(key, value.to_owned(), node.span),
    );
}

#[cfg(test)]
pub(crate) mod tests;
