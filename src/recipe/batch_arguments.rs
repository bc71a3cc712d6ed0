//! The batch numbers of a plan as a recipe, a trainer's arguments and an environment state them.

use super::Recipe;
use super::dialects::handbook::accelerator::{NUM_STEPS, SPLIT_BATCHES};
use super::dialects::readers;
use super::schema::dialect::Dialect;
use super::syntax::source::FileId;

/// The numbers of a plan that a recipe may state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchNumbers {
    /// World size, in devices over all axes.
    pub world: u64,
    /// Machines of the world; `None` keeps the number in the recipe's launcher.
    pub nodes: Option<u64>,
    pub data_parallel: u64,
    /// Global batch, in samples.
    pub global: u64,
    /// Samples per device and forward pass.
    pub per_device_batch_size: u64,
    /// Forward passes per optimizer step.
    pub accumulation: u64,
    /// GRPO's steps per generation, where the recipe states them.
    pub steps_per_generation: Option<u64>,
}

/// All keys of the recipe's dialect for a native path that a plan may change: the current key, then
/// older keys that a command may use.
pub fn spellings(recipe: &Recipe, path: &str) -> Vec<&'static str> {
    let reader = readers::of(recipe.dialect);
    reader.map_or_else(Vec::new, |reader| reader.keys_of(path))
}

/// The key for such a path. An older key that the recipe uses takes precedence, because upstream
/// would ignore a newer one beside it.
pub(crate) fn key_in_use(recipe: &Recipe, path: &str) -> Option<&'static str> {
    let place = recipe.value_sources.get(path);
    let keys = spellings(recipe, path);
    let mut older = keys.iter().skip(1);
    let older = older.find(|key| place.is_some_and(|place| place.key == **key));
    older.or(keys.first()).copied()
}

/// The native paths that a trainer's arguments may state.
const ARGUMENTS: [&str; 4] = [
    "batch.global",
    "batch.per_device_batch_size",
    "batch.accumulation",
    "generation.steps_per_generation",
];

/// The trainer's argument keys for the numbers, each with its value.
pub fn argument_pairs(recipe: &Recipe, numbers: &BatchNumbers) -> Vec<(&'static str, u64)> {
    // DeepSpeed takes no batch numbers on the command line.
    if recipe.dialect == Dialect::Deepspeed {
        return Vec::new();
    }
    if let Some(both) = split_batches(recipe, numbers) {
        return both.map(|argument| (argument.key, argument.value)).to_vec();
    }
    let values = [
        size(recipe, numbers),
        Some(numbers.per_device_batch_size),
        Some(numbers.accumulation),
        numbers.steps_per_generation,
    ];
    let pairs = ARGUMENTS.into_iter().zip(values);
    pairs
        .filter_map(|(path, value)| Some((key_in_use(recipe, path)?, value?)))
        .collect()
}

/// The keys of the recipe's dialect that a trainer's arguments may state.
pub fn argument_keys(recipe: &Recipe) -> Vec<&'static str> {
    ARGUMENTS.map(|path| spellings(recipe, path)).concat()
}

/// The numbers as variables of Evenkeel and of accelerate. `axes`: the tensor-, context- and
/// sequence-parallel sizes.
pub fn variables(numbers: &BatchNumbers, axes: [u64; 3]) -> Vec<(&'static str, u64)> {
    let mut variables = vec![
        ("EVENKEEL_GLOBAL_BATCH_SIZE", numbers.global),
        (
            "EVENKEEL_PER_DEVICE_BATCH_SIZE",
            numbers.per_device_batch_size,
        ),
        ("EVENKEEL_GRADIENT_ACCUMULATION_STEPS", numbers.accumulation),
        ("EVENKEEL_DATA_PARALLEL_SIZE", numbers.data_parallel),
        ("EVENKEEL_WORLD_SIZE", numbers.world),
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            numbers.accumulation,
        ),
    ];
    let names = [
        "PARALLELISM_CONFIG_TP_SIZE",
        "PARALLELISM_CONFIG_CP_SIZE",
        "PARALLELISM_CONFIG_SP_SIZE",
    ];
    let axes = names.into_iter().zip(axes);
    variables.extend(axes.filter(|(_, size)| *size > 1));
    variables
}

/// The batch size as the recipe's tree counts it: samples per step, or per accumulation step.
/// `None` for a recipe that is no tree.
pub(crate) fn size(recipe: &Recipe, numbers: &BatchNumbers) -> Option<u64> {
    let tree = recipe.files.tree.as_ref()?;
    Some(if tree.per_pass {
        numbers.global / numbers.accumulation
    } else {
        numbers.global
    })
}

/// A number, as an argument of the trainer.
pub(crate) struct Argument {
    pub key: &'static str,
    pub value: u64,
    /// The recipe states the same value.
    pub unchanged: bool,
}

/// With accelerate's `split_batches` all processes share the batch of one loader. The key of the
/// per-device batch then holds the samples of all devices.
pub(crate) fn split_batches(recipe: &Recipe, numbers: &BatchNumbers) -> Option<[Argument; 2]> {
    if !splits_batches(recipe) {
        return None;
    }
    let batch = &recipe.spec.batch;
    let passes = batch.accumulation.unwrap_or(1).max(1);
    let size = numbers.per_device_batch_size * numbers.data_parallel;
    let accumulation = num_steps(recipe).map_or("gradient_accumulation_steps", |(key, _)| key);
    Some([
        Argument {
            key: "per_device_train_batch_size",
            value: size,
            unchanged: batch.global.map(|global| global / passes) == Some(size),
        },
        Argument {
            key: accumulation,
            value: numbers.accumulation,
            unchanged: passes == numbers.accumulation,
        },
    ])
}

/// Whether the key of the per-device batch holds the samples of all devices.
pub fn splits_batches(recipe: &Recipe) -> bool {
    let place = recipe.value_sources.get("batch.global");
    place.is_some_and(|place| place.key == SPLIT_BATCHES)
}

/// The accumulation, where `accelerator_config` holds it.
pub(crate) fn num_steps(recipe: &Recipe) -> Option<(&'static str, FileId)> {
    let place = recipe.value_sources.get("batch.accumulation")?;
    (place.key == NUM_STEPS).then_some((NUM_STEPS, place.span.file))
}
