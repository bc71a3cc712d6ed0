//! Writes a plan into a DeepSpeed config: the numbers of the triple that the config states, and
//! those that DeepSpeed would derive differently.

use super::edit::Syntax;
use super::{BatchNumbers, EmitError, refuse, text_of};
use crate::recipe::Recipe;
use crate::recipe::dialects::deepspeed::TRIPLE;
use crate::recipe::schema::dialect::Dialect;

pub(super) fn emit(recipe: &Recipe, numbers: &BatchNumbers) -> Result<String, EmitError> {
    let alone = recipe.dialect == Dialect::Deepspeed;
    let file = if alone {
        recipe.files.recipe
    } else {
        recipe.files.deepspeed
    };
    let Some(file) = file else {
        return refuse(
            "the job names no DeepSpeed config (`--emit args` writes the trainer's arguments)",
        );
    };
    let syntax = if recipe.files.commented.contains(&file) {
        Syntax::Commented
    } else {
        Syntax::Yaml
    };
    changed(recipe, text_of(recipe, file), syntax, numbers)
}

/// The text of a config with the plan's numbers.
pub(super) fn changed(
    recipe: &Recipe,
    text: &str,
    syntax: Syntax,
    numbers: &BatchNumbers,
) -> Result<String, EmitError> {
    let alone = recipe.dialect == Dialect::Deepspeed;
    let mut text = text.to_owned();
    let values = [
        numbers.global,
        numbers.per_device_batch_size,
        numbers.accumulation,
    ];
    let stated = stated(&text, syntax);
    let elastic = recipe.spec.batch.elastic.is_some();
    if elastic {
        text = syntax.set(&text, "elasticity.enabled", "false", "")?;
    }
    let all = alone && (elastic || derive(stated, numbers) != Some([values[1], values[2]]));
    let mut beside = "zero_optimization";
    for ((key, _), (value, old)) in TRIPLE.into_iter().zip(values.into_iter().zip(stated)) {
        // Without a train batch size the product of the other two is the global batch.
        let missing = all && (elastic || key != "train_batch_size");
        let changes = old.map_or(missing, |old| old != value);
        if changes {
            text = syntax.set(&text, key, &value.to_string(), beside)?;
        }
        beside = key;
    }
    Ok(text)
}

/// Whether a config states a number of the triple.
pub(super) fn states_numbers(text: &str) -> bool {
    stated(text, Syntax::Yaml).iter().any(Option::is_some)
}

/// The triple as the text states it.
fn stated(text: &str, syntax: Syntax) -> [Option<u64>; 3] {
    TRIPLE.map(|(key, _)| syntax.number(text, key))
}

/// The micro-batch and accumulation that DeepSpeed would derive if the stated numbers were the
/// plan's.
fn derive(stated: [Option<u64>; 3], numbers: &BatchNumbers) -> Option<[u64; 2]> {
    let (world, global) = (numbers.data_parallel, numbers.global);
    let (per_device_batch_size, accumulation) =
        (numbers.per_device_batch_size, numbers.accumulation);
    Some(match stated.map(|value| value.is_some()) {
        [_, true, true] => [per_device_batch_size, accumulation],
        [true, true, false] => [
            per_device_batch_size,
            global / per_device_batch_size / world,
        ],
        [true, false, true] => [global / world / accumulation, accumulation],
        [true, false, false] => [global / world, 1],
        [false, true, false] => [per_device_batch_size, 1],
        [false, false, _] => return None,
    })
}
