//! The sizes of axes that reach the program. `accelerate launch` passes them through the environment,
//! and only if its parallelism config is switched on. It ignores all others.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`_validate_launch_command`: the config's sizes
//! count if the command has no type), `utils/launch.py` (`prepare_extend_env_parallelism_config`: names
//! with their prefix), `parallelism_config.py` (`_validate_accelerator`; since 1.15.0 it refuses FSDP without an axis to
//! shard over, before that the job fails later).

use super::typed;
use crate::recipe::schema::axes::axes;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::{Entry, Node};
use crate::recipe::syntax::scalar::Schema;

const SECTION: &str = "parallelism_config";
const PREFIX: &str = "parallelism_config_";

/// Reads the sizes that count, and warns about the others.
pub(super) fn sizes(root: &Node, kind: Option<&str>, tree: &mut Tree, reading: &mut Reading) {
    let Some(section) = root.get(SECTION) else {
        return;
    };
    let (own, bare): (Vec<Entry>, Vec<Entry>) = section
        .entries()
        .unwrap_or_default()
        .iter()
        .cloned()
        .partition(|entry| entry.name.starts_with(PREFIX));
    if let Some(entry) = bare.iter().find(|entry| is_size(entry)) {
        unread(
            entry,
            "accelerate reads no key with that name".to_owned(),
            format!("write `{PREFIX}{}` to set this size", entry.name),
            reading,
        );
    }
    let mut read = Node::mapping(section.span);
    for entry in own {
        read.set(&entry.name, entry.name_span, entry.value);
    }
    if let Err((why, help)) = counts(root, kind, section) {
        let first = read
            .entries()
            .unwrap_or_default()
            .iter()
            .find(|e| is_size(e));
        if let Some(entry) = first {
            unread(entry, why, help, reading);
        }
        return;
    }
    let mut sizes = Tree::new(section.span);
    axes(&read, SECTION, &mut sizes, reading);
    check(root, kind, &read, sizes, tree, reading);
}

fn is_size(entry: &Entry) -> bool {
    entry.name.ends_with("_size") && entry.value.text() != Some("1")
}

fn unread(entry: &Entry, why: String, help: String, reading: &mut Reading) {
    let text = entry.value.text().unwrap_or(entry.value.kind());
    reading.warning(
        "unsupported-value",
        Some(entry.value.span),
        format!("`{}` {text} has no effect: {why}", entry.name),
        help,
    );
}

/// Whether accelerate passes the sizes on; else the reason and the way out.
fn counts(root: &Node, kind: Option<&str>, section: &Node) -> Result<(), (String, String)> {
    let no = |why: &str, help: &str| Err((why.to_owned(), help.to_owned()));
    if typed::switch(root, typed::CPU).is_some() {
        return no("`--cpu` starts one process", "remove `--cpu`");
    }
    if let Some(kind @ ("NO" | "MULTI_CPU" | "XLA")) = kind {
        return Err((
            format!("accelerate passes no sizes on for `distributed_type: {kind}`"),
            "use `FSDP` with `fsdp_version: 2`, or `MULTI_GPU`".to_owned(),
        ));
    }
    if typed::switch(root, typed::PARALLELISM).is_some() {
        return Ok(());
    }
    if let Some((_, switch)) = typed::kind(root) {
        let switch = switch.key.as_deref().unwrap_or_default();
        return Err((
            format!(
                "with `{switch}` accelerate needs `--use_parallelism_config`, which is missing"
            ),
            format!(
                "add `--use_parallelism_config` to `--use_fsdp --fsdp_version 2`, or remove `{switch}`"
            ),
        ));
    }
    let entries = section.entries().unwrap_or_default();
    match entries.iter().any(|entry| !typed::is_typed(&entry.value)) {
        true => Ok(()),
        false => no(
            "both `--use_parallelism_config` and a `parallelism_config` in a config file are missing",
            "add `--use_fsdp --fsdp_version 2 --use_parallelism_config`",
        ),
    }
}

/// Refuses the sizes that accelerate refuses. Unstated sizes are 1. The planner checks that the product is
/// the number of processes.
fn check(
    root: &Node,
    kind: Option<&str>,
    read: &Node,
    sizes: Tree,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let size = |axis: &str| {
        let node = read.get(&format!("{PREFIX}{axis}_size"))?;
        node.int(Schema::PyYaml)
    };
    let all = ["dp_replicate", "dp_shard", "tp", "cp", "sp"];
    let above_1 = |axis: &&str| size(axis).is_some_and(|size| size > 1);
    // Sizes of 1 are no parallelism, in any world.
    let Some(first) = all.iter().find(|axis| above_1(axis)) else {
        return;
    };
    tree.lay(sizes.into_node());
    for path in ["parallel.data_replicate", "parallel.data_shard"] {
        if tree.get(path).is_none() {
            tree.default(path, 1);
        }
    }
    let span = read
        .get(&format!("{PREFIX}{first}_size"))
        .map(|node| node.span);
    if kind == Some("MEGATRON_LM") {
        reading.error(
            "parallelism-product",
            span,
            "accelerate refuses `parallelism_config` with Megatron-LM",
            "use `megatron_lm_tp_degree` and the like",
        );
    }
    if kind != Some("FSDP") {
        return;
    }
    let version = ["fsdp_version", "version"].iter().find_map(|key| {
        let node = root.get_path(&format!("fsdp_config.{key}"))?;
        node.text().map(str::to_owned)
    });
    let version = version.unwrap_or_else(|| "1".to_owned());
    if version != "2" {
        reading.error(
            "parallelism-product",
            span,
            format!("accelerate refuses `parallelism_config` with version {version} of FSDP"),
            "use `fsdp_version: 2` (`--fsdp_version 2`)",
        );
    } else if !above_1(&"dp_shard") && !above_1(&"cp") {
        reading.error(
            "parallelism-product",
            span,
            "FSDP has no axis to shard over: neither `dp_shard_size` nor `cp_size` is above 1",
            format!(
                "set `{PREFIX}dp_shard_size`, so that the product of all sizes is `num_processes`"
            ),
        );
    }
}
