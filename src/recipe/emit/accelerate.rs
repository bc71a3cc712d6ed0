//! A plan as an accelerate config: the one that the job is launched with, changed where the world
//! shows, or a new one.

use super::{EmitError, Numbers, edit, text_of};
use crate::recipe::spec::{Parallel, Precision, Strategy};
use crate::recipe::{Dialect, Recipe};

pub(super) fn emit(recipe: &Recipe, numbers: &Numbers) -> Result<String, EmitError> {
    let own = match recipe.dialect {
        Dialect::Accelerate => recipe.files.recipe,
        _ => recipe.files.accelerate,
    };
    match own {
        Some(file) => changed(recipe, numbers, text_of(recipe, file)),
        None => Ok(made(recipe, numbers)),
    }
}

/// The config that is there.
fn changed(recipe: &Recipe, numbers: &Numbers, text: &str) -> Result<String, EmitError> {
    let number = |path: &str| edit::number(text, path);
    let mut sets: Vec<(&str, String)> = Vec::new();
    let world = numbers.world;
    let none = recipe
        .places
        .get("batch.gpus")
        .is_some_and(|place| place.key == "distributed_type");
    if none && world > 1 {
        sets.push(("distributed_type", "MULTI_GPU".to_owned()));
    }
    if number("num_processes") != Some(world) && !(none && world == 1) {
        sets.push(("num_processes", world.to_string()));
    }
    if number("num_machines")
        .is_some_and(|machines| machines > 0 && !world.is_multiple_of(machines))
    {
        sets.push(("num_machines", "1".to_owned()));
    }
    let accumulation = "deepspeed_config.gradient_accumulation_steps";
    if number(accumulation).is_some_and(|stated| stated != numbers.accumulation) {
        sets.push((accumulation, numbers.accumulation.to_string()));
    }
    let shards = shards(&recipe.spec.parallel, numbers.data_parallel);
    for (path, size) in ["data_shard", "data_replicate"].into_iter().zip(shards) {
        let Some(place) = recipe.places.get(&format!("parallel.{path}")) else {
            continue;
        };
        if number(&place.key).is_some_and(|stated| stated != size) {
            sets.push((place.key.as_str(), size.to_string()));
        }
    }
    let mut text = text.to_owned();
    for (path, value) in sets {
        text = edit::set(&text, path, &value, "num_machines")?;
    }
    Ok(text)
}

/// Shards and replicas that multiply to the data-parallel size: the replicas of the recipe where
/// they divide it, else its shards, else everything in one group. Beside tensor or context
/// parallelism replicas must be sharded.
fn shards(parallel: &Parallel, data_parallel: u64) -> [u64; 2] {
    let fits =
        |size: Option<u64>| size.filter(|size| *size > 0 && data_parallel.is_multiple_of(*size));
    let split = parallel.tensor > 1 || parallel.context > 1;
    let replicas = fits(parallel.data_replicate).filter(|&size| !split || size < data_parallel);
    match (replicas, fits(parallel.data_shard)) {
        (Some(replicas), _) => [data_parallel / replicas, replicas],
        (None, Some(shards)) if shards > 1 || !split => [shards, data_parallel / shards],
        _ => [data_parallel, 1],
    }
}

/// A config for a job that is launched without one.
fn made(recipe: &Recipe, numbers: &Numbers) -> String {
    let spec = &recipe.spec;
    let parallel = &spec.parallel;
    let sharded = match parallel.strategy {
        Strategy::Ddp => None,
        Strategy::Zero1 => Some("DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n".to_owned()),
        Strategy::Zero2 => Some("DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n".to_owned()),
        Strategy::Fsdp => Some(
            "FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
             fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
                .to_owned(),
        ),
    };
    let kind = sharded.unwrap_or_else(|| match numbers.world {
        1 => "\"NO\"\n".to_owned(),
        _ => "MULTI_GPU\n".to_owned(),
    });
    let precision = match spec.model.precision {
        Precision::F32 => "\"no\"",
        Precision::Bf16 => "bf16",
        Precision::F16 => "fp16",
    };
    let mut text = format!(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}mixed_precision: {precision}\n\
         machine_rank: 0\nmain_training_function: main\nnum_machines: 1\nnum_processes: {}\n\
         rdzv_backend: static\nsame_network: true\nuse_cpu: false\n",
        numbers.world
    );
    let axes = [
        ("tp_size", parallel.tensor),
        ("cp_size", parallel.context),
        ("sp_size", parallel.sequence),
    ];
    if axes.iter().any(|(_, size)| *size > 1) {
        let [shard, replicate] = shards(parallel, numbers.data_parallel);
        text += "parallelism_config:\n";
        let all = axes
            .into_iter()
            .chain([("dp_shard_size", shard), ("dp_replicate_size", replicate)]);
        for (axis, size) in all {
            text += &format!("  parallelism_config_{axis}: {size}\n");
        }
    }
    text
}
