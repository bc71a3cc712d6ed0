//! Writes a plan as an accelerate config: the job's own config with the world changed, or a new
//! one.

use super::shards::shards;
use super::{BatchNumbers, EmitError, Emitted, LaunchError, edit, plain, text_of};
use crate::recipe::Recipe;
use crate::recipe::dialects::accelerate::too_few_devices;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::spec::{Precision, Strategy};
use crate::recipe::syntax::source::Span;

pub(super) fn emit(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Emitted, EmitError> {
    let file = match recipe.dialect {
        Dialect::Accelerate => recipe.files.recipe,
        _ => recipe.files.accelerate,
    };
    let (text, mut remarks) = match file {
        Some(file) => changed(recipe, numbers, text_of(recipe, file))?,
        None => (made(recipe, numbers)?, Vec::new()),
    };
    let number = |text: &str| edit::number(text, "num_machines").unwrap_or(1);
    let machines = number(&text);
    let before = file.map_or(1, |file| number(text_of(recipe, file)));
    if machines > 1 && machines != before && edit::text(&text, "main_process_ip").is_none() {
        remarks.push(format!(
            "{machines} machines need a rendezvous: give each its own `machine_rank`, and all of them the `main_process_ip` and `main_process_port` of the first"
        ));
    }
    Ok(Emitted {
        remarks,
        ..plain(text)
    })
}

/// The job's config with the plan's numbers, and remarks for the user.
fn changed(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    text: &str,
) -> Result<(String, Vec<String>), EmitError> {
    let number = |path: &str| edit::number(text, path);
    let mut sets: Vec<(&str, String)> = Vec::new();
    let mut remarks = Vec::new();
    let world = numbers.world;
    let kind = edit::text(text, "distributed_type").unwrap_or_default();
    let place = recipe.value_sources.get("batch.gpus");
    let decides = |key: &str| place.is_some_and(|place| place.key == key);
    if world > 1 && decides("--cpu") {
        return Err(LaunchError::OneProcess { world }.into());
    }
    let none = decides("distributed_type");
    if none && world > 1 {
        if kind == "MULTI_CPU" {
            return Err(EmitError::Unstarted { world });
        }
        sets.push(("distributed_type", "MULTI_GPU".to_owned()));
    }
    if place.is_some_and(|place| place.key.ends_with("clusion_filter")) {
        let text = place.map(|place| recipe_text(recipe, place.span));
        if recipe.spec.batch.gpus != Some(world) {
            let text = text.unwrap_or_default();
            return Err(LaunchError::Devices { text }.into());
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
        let both = shards(parallel, numbers, kind == "FSDP").map_err(LaunchError::from)?;
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
    Ok((text, remarks))
}

/// Whether a config has axis sizes under the names that accelerate reads.
fn has_sizes(text: &str) -> bool {
    let axes = ["tp", "cp", "sp", "dp_shard", "dp_replicate"];
    axes.iter().any(|axis| {
        let path = format!("parallelism_config.parallelism_config_{axis}_size");
        edit::number(text, &path).is_some()
    })
}

fn recipe_text(recipe: &Recipe, span: Span) -> String {
    let text = text_of(recipe, span.file);
    text.get(span.start..span.end)
        .unwrap_or_default()
        .to_owned()
}

/// A new config for a job that is launched without one.
fn made(recipe: &Recipe, numbers: &BatchNumbers) -> Result<String, EmitError> {
    let spec = &recipe.spec;
    let parallel = &spec.parallel;
    if parallel.pipeline > 1 {
        return Err(EmitError::Pipeline {
            stages: parallel.pipeline,
        });
    }
    let machines = numbers.nodes.unwrap_or(1);
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
        let [shard, replicate] = shards(parallel, numbers, fsdp).map_err(LaunchError::from)?;
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
