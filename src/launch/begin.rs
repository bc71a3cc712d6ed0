//! Creates a run's first record, before its model and data are read.

use std::path::PathBuf;

use super::{LaunchError, Planned, Request};
use crate::plan;
use crate::recipe::schema::run_name;
use crate::recipe::{Recipe, Spec};
use crate::telemetry::now;
use crate::train::{BuiltIn, FORMAT, Run};

/// The base of a recipe's relative paths: the working directory.
pub fn base() -> Result<PathBuf, LaunchError> {
    std::env::current_dir().map_err(|error| {
        LaunchError::usage(format!(
            "the working directory, the base of the recipe's relative paths, is unusable: {error}; \
             change to an existing directory"
        ))
    })
}

/// A new run of a recipe as `spec`, of the built-in trainer with the number of its samples, or of an external one.
pub(super) fn begin(
    recipe: &Recipe,
    spec: &Spec,
    planned: &Planned,
    request: &Request,
    trained: Option<(BuiltIn, u64)>,
) -> Result<Run, LaunchError> {
    let global_batch_size = planned.plan.global_batch_size;
    let (built_in, data_samples) = trained.unzip();
    let horizon = plan::horizon(spec, global_batch_size, data_samples);
    let job = uid();
    let below = |prefix: &String| {
        let prefix = prefix.trim_end_matches('/');
        format!("{prefix}/{}-{job}", run_name::label(&spec.name))
    };
    Ok(Run {
        format: FORMAT,
        bucket: request.bucket.as_ref().map(below),
        job,
        name: spec.name.clone(),
        recipe_path: request.recipe_path.clone(),
        dialect: recipe.dialect,
        base: base()?,
        overrides: request.overrides.clone(),
        command_line: request.command_line.clone(),
        spec: spec.clone(),
        global_batch_size,
        model_config: planned.worlds.request().model_config.clone(),
        device_memory: request.device_memory,
        device: request.runner.device(),
        data_samples,
        horizon,
        built_in,
    })
}

/// A unique run id: a hash of time and process id.
fn uid() -> String {
    let seed = format!("{}-{}", now(), std::process::id());
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(seed.as_bytes()))
}
