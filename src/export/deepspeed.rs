//! Writes a plan into a DeepSpeed config: the numbers of the triple that the config states, and
//! those that DeepSpeed would derive differently.

use super::edit::Syntax;
use super::{BatchNumbers, EmitError, text_of};
use crate::recipe::Recipe;
use crate::recipe::dialects::deepspeed::TRIPLE;
use crate::recipe::schema::dialect::Dialect;

pub(super) fn emit(recipe: &Recipe, numbers: &BatchNumbers) -> Result<String, EmitError> {
    let alone = recipe.dialect == Dialect::Deepspeed;
    let file = match alone {
        true => recipe.files.recipe,
        false => recipe.files.deepspeed,
    };
    let file = file.ok_or(EmitError::NoDeepspeed)?;
    let syntax = match recipe.files.hjson.contains(&file) {
        true => Syntax::Hjson,
        false => Syntax::Yaml,
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
    let derived = derive(stated, numbers);
    let all = alone
        && (elastic || derived != Some([numbers.per_device_batch_size, numbers.accumulation]));
    let mut beside = "zero_optimization";
    for ((key, _), (value, old)) in TRIPLE.into_iter().zip(values.into_iter().zip(stated)) {
        // Without a train batch size the product of the other two is the global batch.
        let missing = all && (elastic || key != "train_batch_size");
        if old.is_some_and(|old| old != value) || (old.is_none() && missing) {
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
    let world = numbers.data_parallel;
    let [global, per_device_batch_size, accumulation] = stated.map(|value| value.is_some());
    Some(match (global, per_device_batch_size, accumulation) {
        (_, true, true) => [numbers.per_device_batch_size, numbers.accumulation],
        (true, true, false) => [
            numbers.per_device_batch_size,
            numbers.global / numbers.per_device_batch_size / world,
        ],
        (true, false, true) => [
            numbers.global / world / numbers.accumulation,
            numbers.accumulation,
        ],
        (true, false, false) => [numbers.global / world, 1],
        (false, true, false) => [numbers.per_device_batch_size, 1],
        (false, false, _) => return None,
    })
}
