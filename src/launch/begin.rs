//! Creates a run's first record, before its model and data are read.

use std::path::PathBuf;

use super::{LaunchError, Planned, Request};
use crate::plan::{self, DeviceKind};
use crate::recipe::Recipe;
use crate::telemetry::now;
use crate::train::{FORMAT, Setup};

/// The base of a recipe's relative paths: the working directory.
pub fn base() -> Result<PathBuf, LaunchError> {
    std::env::current_dir().map_err(|error| {
        LaunchError::usage(format!(
            "the working directory, the base of the recipe's relative paths, is unusable: {error}; \
             change to an existing directory"
        ))
    })
}

/// A new run, given its recipe, its plan and the number of its samples.
pub(super) fn begin(
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
    data_samples: Option<u64>,
) -> Result<Setup, LaunchError> {
    let spec = &recipe.spec;
    let global_batch_size = planned.plan.global_batch_size;
    let horizon = plan::horizon(spec, global_batch_size, data_samples);
    Ok(Setup {
        format: FORMAT,
        job: uid(),
        name: spec.name.clone(),
        recipe_path: request.recipe_path.clone(),
        dialect: recipe.dialect,
        base: base()?,
        overrides: request.overrides.clone(),
        spec: spec.clone(),
        global_batch_size,
        model: None,
        model_config: planned.request.model_config.clone(),
        weights: None,
        companions: Vec::new(),
        data_samples,
        data_fingerprint: None,
        budget_samples: horizon.budget_samples,
        horizon,
        rank_memory: None,
        device: DeviceKind::Cpu,
        device_memory: request.device_memory,
        entropy: None,
    })
}

/// A unique run id: a hash of time and process id.
fn uid() -> String {
    let seed = format!("{}-{}", now(), std::process::id());
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(seed.as_bytes()))
}
