//! Launchers before an external trainer's command: the program without them, and what they give to its ranks.

use std::collections::BTreeMap;

use super::batch_arguments::argument_keys;
use super::dialects::accelerate::environment;
use super::dialects::command::alone;
use super::schema::dialect::Dialect;
use super::{ReadError, Recipe};

pub use super::dialects::command::alone::{LauncherError, Split, split};

/// The environment variables that `accelerate launch` gives to every rank, with the numbers that its options and
/// its config state. Empty: it does not start the program. Fails for a setting that accelerate would drop.
pub fn stated_environment(recipe: &Recipe) -> Result<BTreeMap<String, String>, ReadError> {
    let mut diagnostics = Vec::new();
    let launch = recipe.launch.as_ref();
    let found = launch.map(|launch| environment::environment(launch, &mut diagnostics));
    if !diagnostics.is_empty() {
        return Err(ReadError {
            sources: recipe.sources.clone(),
            diagnostics,
        });
    }
    Ok(found.unwrap_or_default())
}

/// As [`stated_environment`], with placeholders for the numbers that depend on the world.
pub fn environment(recipe: &Recipe) -> Result<BTreeMap<String, String>, ReadError> {
    stated_environment(recipe).map(environment::with_placeholders)
}

/// A program's words with `{args}` and `{resume_args}` in place of the batch numbers. DeepSpeed's own configs
/// state the numbers in a file, and their programs have no common arguments.
pub fn without_numbers(recipe: &Recipe, program: Vec<String>) -> Vec<String> {
    let by_arguments = recipe.dialect != Dialect::Deepspeed;
    alone::without_numbers(program, &argument_keys(recipe), by_arguments)
}
