//! Writes a plan as an accelerate config: the job's own config with the world changed, or a new
//! one.

use super::{BatchNumbers, EmitError, Emitted, edit, refuse, text_of};
use crate::recipe::Recipe;
use crate::recipe::dialects::accelerate::too_few_devices;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::spec::{Parallel, Precision, Strategy};

pub(super) fn emit(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Emitted, EmitError> {
    let file = match recipe.dialect {
        Dialect::Accelerate => recipe.files.recipe,
        _ => recipe.files.accelerate,
    };
    let mut emitted = match file {
        Some(file) => changed(recipe, numbers, text_of(recipe, file))?,
        None => Emitted::plain(made(recipe, numbers)?),
    };
    let number = |text: &str| edit::number(text, "num_machines").unwrap_or(1);
    let machines = number(&emitted.text);
    let before = file.map_or(1, |file| number(text_of(recipe, file)));
    let meets = edit::text(&emitted.text, "main_process_ip").is_some();
    if machines > 1 && machines != before && !meets {
        emitted.remarks.push(format!(
            "{machines} machines need a rendezvous: give each its own `machine_rank`, and all of them the `main_process_ip` and `main_process_port` of the first"
        ));
    }
    Ok(emitted)
}

/// The job's config with the plan's numbers.
fn changed(recipe: &Recipe, numbers: &BatchNumbers, text: &str) -> Result<Emitted, EmitError> {
    let number = |path: &str| edit::number(text, path);
    let mut sets: Vec<(&str, String)> = Vec::new();
    let mut remarks = Vec::new();
    let world = numbers.world;
    let kind = edit::text(text, "distributed_type").unwrap_or_default();
    let place = recipe.value_sources.get("batch.gpus");
    let key = place.map_or("", |place| place.key.as_str());
    if key == "--cpu" {
        refuse_cpu(world)?;
    }
    let none = key == "distributed_type";
    if none && world > 1 {
        // accelerate starts one process for this type without `mpirun_config`.
        if kind == "MULTI_CPU" {
            return refuse(format!(
                "`distributed_type: MULTI_CPU` starts one process, and the plan has {world} (add `mpirun_config`: with it accelerate starts `num_processes`)"
            ));
        }
        sets.push(("distributed_type", "MULTI_GPU".to_owned()));
    }
    if let Some(place) = place.filter(|_| key.ends_with("clusion_filter")) {
        if recipe.spec.batch.gpus != Some(world) {
            let text = text_of(recipe, place.span.file);
            let filter = text.get(place.span.start..place.span.end);
            return refuse(lists_devices(filter.unwrap_or_default()));
        }
    } else if number("num_processes") != Some(world) && !(none && world == 1) {
        sets.push(("num_processes", world.to_string()));
    }
    let stated = number("num_machines").unwrap_or(1).max(1);
    let machines = match numbers.nodes {
        Some(nodes) => nodes,
        None if world.is_multiple_of(stated) => stated,
        None => 1,
    };
    if machines != stated {
        sets.push(("num_machines", machines.to_string()));
    }
    let each = world / machines.max(1);
    if let Some(ids) = edit::text(text, "gpu_ids")
        && too_few_devices(&ids, each).is_some()
    {
        sets.push(("gpu_ids", "all".to_owned()));
        remarks.push(format!(
            "`gpu_ids: {ids}` names too few devices for {each} processes on a machine; it is now `all` (name {each} devices to restrict it)"
        ));
    }
    let accumulation = "deepspeed_config.gradient_accumulation_steps";
    if number(accumulation).is_some_and(|stated| stated != numbers.accumulation) {
        sets.push((accumulation, numbers.accumulation.to_string()));
    }
    let parallel = &recipe.spec.parallel;
    // accelerate applies both sizes or neither; sizes that it does not apply stay. DeepSpeed makes
    // the groups of its sequence parallelism itself.
    let counted = parallel.data_shard.is_some() && parallel.data_replicate.is_some();
    if counted && has_sizes(text) && parallel.sequence == 1 {
        let paths = [
            "parallelism_config.parallelism_config_dp_shard_size",
            "parallelism_config.parallelism_config_dp_replicate_size",
        ];
        let both = shards(parallel, numbers, kind == "FSDP")?;
        for (path, size) in paths.into_iter().zip(both) {
            if number(path).unwrap_or(1) != size {
                sets.push((path, size.to_string()));
            }
        }
    }
    let mut text = text.to_owned();
    for (path, value) in sets {
        text = edit::set(&text, path, &value, "num_machines")?;
    }
    Ok(Emitted {
        remarks,
        ..Emitted::plain(text)
    })
}

/// Whether a config has axis sizes under the names that accelerate reads.
fn has_sizes(text: &str) -> bool {
    let axes = ["tp", "cp", "sp", "dp_shard", "dp_replicate"];
    axes.iter().any(|axis| {
        let path = format!("parallelism_config.parallelism_config_{axis}_size");
        edit::number(text, &path).is_some()
    })
}

/// A new config for a job that is launched without one.
fn made(recipe: &Recipe, numbers: &BatchNumbers) -> Result<String, EmitError> {
    let spec = &recipe.spec;
    let parallel = &spec.parallel;
    if parallel.pipeline > 1 {
        return refuse(format!(
            "a new accelerate config has no key for {} pipeline stages (launch with a `MEGATRON_LM` config and name it with `--accelerate`)",
            parallel.pipeline
        ));
    }
    let machines = numbers.nodes.unwrap_or(1);
    let kind = match parallel.strategy {
        Strategy::Ddp if numbers.world == 1 => "\"NO\"\n",
        Strategy::Ddp => "MULTI_GPU\n",
        Strategy::Zero1 => "DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n",
        Strategy::Zero2 => "DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n",
        Strategy::Fsdp => {
            "FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
             fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        }
    };
    let precision = match spec.model.precision {
        Precision::F32 => "\"no\"",
        Precision::Bf16 => "bf16",
        Precision::F16 => "fp16",
    };
    let mut text = format!(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}mixed_precision: {precision}\n\
         machine_rank: 0\nmain_training_function: main\nnum_machines: {machines}\nnum_processes: {}\n\
         rdzv_backend: static\nsame_network: true\nuse_cpu: false\n",
        numbers.world
    );
    let axes = [
        ("tp_size", parallel.tensor),
        ("cp_size", parallel.context),
        ("sp_size", parallel.sequence),
    ];
    if axes.iter().any(|(_, size)| *size > 1) {
        let fsdp = parallel.strategy == Strategy::Fsdp;
        let [shard, replicate] = shards(parallel, numbers, fsdp)?;
        text += "parallelism_config:\n";
        let all = axes
            .into_iter()
            .chain([("dp_shard_size", shard), ("dp_replicate_size", replicate)]);
        for (axis, size) in all {
            text += &format!("  parallelism_config_{axis}: {size}\n");
        }
    }
    Ok(text)
}

/// Shards and replicas whose product is the data-parallel size. Keeps the recipe's replicas where
/// they divide it, else its shards, else makes one group. Tensor and context parallelism need
/// sharded replicas; FSDP without context parallelism does too.
///
/// Source: accelerate 16cb6eb, `parallelism_config.py` (`__post_init__`, `_validate_accelerator`),
/// and 1.15.0 for FSDP, which needs an axis to shard over.
pub(super) fn shards(
    parallel: &Parallel,
    numbers: &BatchNumbers,
    fsdp: bool,
) -> Result<[u64; 2], EmitError> {
    let ranks = numbers.data_parallel;
    if fsdp && ranks == 1 && parallel.context == 1 && numbers.world > 1 {
        return refuse(format!(
            "all {} processes hold one copy of the model (tensor-parallel size {}), and accelerate refuses FSDP with nothing to shard over (plan for at least {} GPUs, or reduce `tp_size`)",
            numbers.world,
            parallel.tensor,
            numbers.world * 2
        ));
    }
    let fits = |size: Option<u64>| size.filter(|size| *size > 0 && ranks.is_multiple_of(*size));
    let split = parallel.tensor > 1 || parallel.context > 1 || fsdp;
    let replicas = fits(parallel.data_replicate).filter(|&size| !split || size < ranks);
    Ok(match (replicas, fits(parallel.data_shard)) {
        (Some(replicas), _) => [ranks / replicas, replicas],
        (None, Some(shards)) if shards > 1 || !split => [shards, ranks / shards],
        _ => [ranks, 1],
    })
}

/// The refusal to replace a list of devices by a number.
pub(super) fn lists_devices(text: &str) -> String {
    format!("`{text}` lists devices one by one (use `--num_gpus` instead)")
}

/// `--cpu` starts one process.
pub(super) fn refuse_cpu(world: u64) -> Result<(), EmitError> {
    if world == 1 {
        return Ok(());
    }
    refuse(format!(
        "`--cpu` starts one process, and the plan has {world} (remove `--cpu`)"
    ))
}
