//! The sizes of axes that reach the program. `accelerate launch` passes them through the environment,
//! and only if its parallelism config is switched on. It ignores all others.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`_validate_launch_command`: the config's sizes
//! count if the command has no type), `utils/launch.py` (`prepare_extend_env_parallelism_config`: names
//! with their prefix), `parallelism_config.py` (`_validate_accelerator`; since 1.15.0 it refuses FSDP without an axis to
//! shard over, before that the job fails later).

use super::world::{self, CPU, PARALLELISM};
use crate::recipe::schema::axes::axes;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::{Entry, Node, Value};
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::Span;

const SECTION: &str = "parallelism_config";
const PREFIX: &str = "parallelism_config_";

/// The reason for which accelerate passes no sizes on, and the way out.
pub(super) type Unused = (String, String);

/// Whether accelerate passes the sizes on.
pub(super) fn passes_sizes(root: &Node, kind: &str) -> Result<(), Unused> {
    let no = |why: &str, help: &str| Err((why.to_owned(), help.to_owned()));
    if world::switch(root, CPU).is_some() {
        return no("`--cpu` starts one process", "remove `--cpu`");
    }
    if ["NO", "MULTI_CPU"].contains(&kind) {
        let why = format!("accelerate passes no sizes on for `distributed_type: {kind}`");
        return no(&why, "use `FSDP` with `fsdp_version: 2`, or `MULTI_GPU`");
    }
    if world::switch(root, PARALLELISM).is_some() {
        return Ok(());
    }
    if let Some((_, switch)) = world::typed_kind(root) {
        let switch = switch.key.as_deref().unwrap_or_default();
        return no(
            &format!(
                "with `{switch}` accelerate needs `--use_parallelism_config`, which is missing"
            ),
            &format!(
                "add `--use_parallelism_config` to `--use_fsdp --fsdp_version 2`, or remove `{switch}`"
            ),
        );
    }
    let mut entries = root
        .get(SECTION)
        .and_then(Node::entries)
        .unwrap_or_default()
        .iter();
    if entries.any(|entry| !world::is_typed(&entry.value)) {
        return Ok(());
    }
    no(
        "both `--use_parallelism_config` and a `parallelism_config` in a config file are missing",
        "add `--use_fsdp --fsdp_version 2 --use_parallelism_config`",
    )
}

/// Reads the sizes if they count. Warns about those that do not.
pub(super) fn sizes(
    root: &Node,
    kind: &str,
    counts: Result<(), Unused>,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let Some(section) = root.get(SECTION) else {
        return;
    };
    let entries = section.entries().unwrap_or_default();
    let size = |own: bool| {
        entries.iter().find(|entry| {
            let name = entry.name.as_str();
            let size = name.ends_with("_size") && entry.value.text() != Some("1");
            size && name.starts_with(PREFIX) == own
        })
    };
    if let Some(entry) = size(false) {
        let help = format!("write `{PREFIX}{}` to set this size", entry.name);
        let why = "accelerate reads no key with that name".to_owned();
        unused(entry, (why, help), reading);
    }
    if let Err(why) = counts {
        if let Some(entry) = size(true) {
            unused(entry, why, reading);
        }
        return;
    }
    let mut own = section.clone();
    if let Value::Mapping(entries) = &mut own.value {
        entries.retain(|entry| entry.name.starts_with(PREFIX));
    }
    let mut sizes = Tree::new(section.span);
    axes(&own, SECTION, &mut sizes, reading);
    let above_1 = |path: &str| {
        let node = sizes.get(&format!("parallel.{path}"))?;
        (node.int(Schema::PyYaml)? > 1).then_some(node.span)
    };
    let all = [
        "data_replicate",
        "data_shard",
        "tensor",
        "context",
        "sequence",
    ];
    // Sizes of 1 are no parallelism, in any world.
    let Some(first) = all.into_iter().find_map(above_1) else {
        return;
    };
    let shards = above_1("data_shard").or(above_1("context")).is_some();
    refuse(root, kind, first, shards, reading);
    tree.lay(sizes.into_node());
    for path in ["parallel.data_replicate", "parallel.data_shard"] {
        if tree.get(path).is_none() {
            tree.default(path, 1);
        }
    }
}

fn unused(entry: &Entry, (why, help): Unused, reading: &mut Reading) {
    let (name, text) = (&entry.name, entry.value.shown());
    let message = format!("`{name}` {text} has no effect: {why}");
    reading.warning("unsupported-value", Some(entry.value.span), message, help);
}

/// Refuses the sizes that accelerate refuses. Unstated sizes are 1. The planner checks that the product is
/// the number of processes. `shards`: an axis of FSDP is above 1.
fn refuse(root: &Node, kind: &str, span: Span, shards: bool, reading: &mut Reading) {
    let versions = ["fsdp_config.fsdp_version", "fsdp_config.version"];
    let version = versions.iter().find_map(|path| root.get_path(path)?.text());
    let (message, help) = match (kind, version.unwrap_or("1")) {
        ("MEGATRON_LM", _) => (
            "accelerate refuses `parallelism_config` with Megatron-LM".to_owned(),
            "use `megatron_lm_tp_degree` and the like",
        ),
        ("FSDP", "2") if shards => return,
        ("FSDP", "2") => (
            "FSDP has no axis to shard over: neither `dp_shard_size` nor `cp_size` is above 1"
                .to_owned(),
            "set `parallelism_config_dp_shard_size`, so that the product of all sizes is `num_processes`",
        ),
        ("FSDP", version) => (
            format!("accelerate refuses `parallelism_config` with version {version} of FSDP"),
            "use `fsdp_version: 2` (`--fsdp_version 2`)",
        ),
        _ => return,
    };
    reading.error("parallelism-product", Some(span), message, help);
}
