//! Writes a plan back: into its recipe, as arguments, as environment variables, or as an accelerate
//! or DeepSpeed config. Only numbers that depend on the world change. Reading the output in that
//! world yields the same plan.

mod accelerate;
mod accelerator;
mod command;
mod deepspeed;
mod edit;
mod error;
mod launcher;
mod shards;
mod tree;

use std::path::PathBuf;

use crate::recipe::Recipe;
use crate::recipe::dialects::readers;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::spec::Spec;
use crate::recipe::syntax::source::{FileId, Span};

pub use crate::recipe::batch_arguments::BatchNumbers;
use crate::recipe::batch_arguments::{argument_pairs, split_batches, variables};
use accelerator::refuse_num_steps;

pub use edit::EditError;
pub use error::EmitError;
pub use launcher::LaunchError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The recipe, in its own dialect.
    Recipe,
    /// Arguments of the trainer.
    Args,
    Env,
    /// An accelerate config.
    Accelerate,
    Deepspeed,
}

/// The output of [`emit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emitted {
    /// The whole text, with a final line feed where the original has one.
    pub text: String,
    /// The file of a tree that the text replaces; `None`: it replaces the whole recipe.
    pub replaces: Option<PathBuf>,
    /// Remarks for the user, such as other files that must change too.
    pub remarks: Vec<String>,
}

/// Writes a plan in one form.
pub fn emit(recipe: &Recipe, numbers: &BatchNumbers, form: Form) -> Result<Emitted, EmitError> {
    match form {
        Form::Recipe => in_recipe(recipe, numbers),
        Form::Args => arguments(recipe, numbers).map(|words| Emitted {
            remarks: another_world(recipe, numbers).into_iter().collect(),
            ..plain(words.join(" ") + "\n")
        }),
        Form::Env => Ok(plain(environment(&recipe.spec, numbers))),
        Form::Accelerate => accelerate::emit(recipe, numbers),
        Form::Deepspeed => deepspeed::emit(recipe, numbers).map(plain),
    }
}

fn plain(text: String) -> Emitted {
    Emitted {
        text,
        replaces: None,
        remarks: Vec::new(),
    }
}

/// A DeepSpeed config with the plan's numbers, from its text.
pub fn deepspeed_config(
    recipe: &Recipe,
    text: &str,
    numbers: &BatchNumbers,
) -> Result<String, EmitError> {
    deepspeed::changed(recipe, text, edit::Syntax::of_deepspeed(text), numbers)
}

/// A DeepSpeed config that loads a universal checkpoint, from its text.
pub fn with_universal_checkpoint(text: &str) -> Result<String, EmitError> {
    let syntax = edit::Syntax::of_deepspeed(text);
    Ok(syntax.set_in(text, "checkpoint", "load_universal", "true")?)
}

/// Shards and replicas of the plan's data-parallel ranks. `fsdp`: FSDP shards them.
pub fn shard_sizes(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    fsdp: bool,
) -> Result<[u64; 2], EmitError> {
    let sizes = shards::shards(&recipe.spec.parallel, numbers, fsdp);
    Ok(sizes.map_err(LaunchError::from)?)
}

fn text_of(recipe: &Recipe, file: FileId) -> &str {
    recipe
        .sources
        .get(file)
        .map_or("", |file| file.text.as_str())
}

/// A file's name, for messages.
fn name_of(recipe: &Recipe, file: FileId) -> String {
    let file = recipe.sources.get(file);
    file.map_or_else(String::new, |file| file.path.display().to_string())
}

/// The text at a span of a command, where it is one value.
fn standing(recipe: &Recipe, span: Span) -> Option<String> {
    let source = recipe.sources.get(span.file)?;
    crate::recipe::dialects::command::value_at(&source.path, &source.text, span)
}

/// A number that depends on the world: its native path, the recipe's value and the plan's.
struct Change {
    path: &'static str,
    from: Option<u64>,
    to: u64,
}

/// Every number that the plan changes.
fn changes(spec: &Spec, numbers: &BatchNumbers) -> Vec<Change> {
    let batch = &spec.batch;
    let mut all = vec![
        Change {
            path: "batch.per_device_batch_size",
            from: batch.per_device_batch_size,
            to: numbers.per_device_batch_size,
        },
        Change {
            path: "batch.accumulation",
            from: batch.accumulation,
            to: numbers.accumulation,
        },
        Change {
            path: "batch.gpus",
            from: batch.gpus,
            to: numbers.world,
        },
    ];
    if let Some(to) = numbers.steps_per_generation {
        all.push(Change {
            path: "generation.steps_per_generation",
            from: spec.generation.steps_per_generation,
            to,
        });
    }
    all.retain(|change| change.from != Some(change.to));
    all
}

/// Rewrites the recipe's own file, or its command.
fn in_recipe(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Emitted, EmitError> {
    match recipe.dialect {
        Dialect::Accelerate => return accelerate::emit(recipe, numbers),
        Dialect::Deepspeed => return deepspeed::emit(recipe, numbers).map(plain),
        dialect if dialect.is_hydra() => {
            let mut emitted = tree::emit(recipe, numbers)?;
            emitted.remarks.extend(remarks(recipe, numbers, false)?);
            return Ok(emitted);
        }
        _ => {}
    }
    let files = &recipe.files;
    let in_command = files
        .command
        .filter(|(file, _)| files.recipe.is_none_or(|recipe| recipe == *file));
    let mut emitted = match (in_command, files.recipe) {
        (Some((file, end)), _) => {
            refuse_num_steps(recipe, Some(numbers), None)?;
            let (text, remarks) = command::emit(recipe, numbers, file, end)?;
            Emitted {
                remarks,
                ..plain(text)
            }
        }
        (None, Some(file)) => {
            refuse_num_steps(recipe, Some(numbers), Some(file))?;
            launcher::refuse_fixed(recipe, numbers, file)?;
            plain(in_file(recipe, numbers, file)?)
        }
        (None, None) => return Err(no_form(recipe, "recipe")),
    };
    emitted
        .remarks
        .extend(remarks(recipe, numbers, in_command.is_some())?);
    Ok(emitted)
}

fn no_form(recipe: &Recipe, form: &'static str) -> EmitError {
    EmitError::NoForm {
        dialect: recipe.dialect,
        form,
    }
}

/// Rewrites a YAML or JSON recipe.
fn in_file(recipe: &Recipe, numbers: &BatchNumbers, file: FileId) -> Result<String, EmitError> {
    let native = recipe.dialect == Dialect::Native;
    let reader = readers::of(recipe.dialect).ok_or_else(|| no_form(recipe, "recipe"))?;
    if !native && reader.upstream_key("batch.accumulation").is_none() {
        return Err(no_form(recipe, "recipe"));
    }
    let mut text = text_of(recipe, file).to_owned();
    if let Some(both) = split_batches(recipe, numbers) {
        for argument in both.iter().filter(|argument| !argument.unchanged) {
            let value = argument.value.to_string();
            text = edit::set(&text, argument.key, &value, both[0].key)?;
        }
        return Ok(text);
    }
    for change in changes(&recipe.spec, numbers) {
        let place = recipe.value_sources.get(change.path);
        let key = match place.filter(|place| place.span.file == file) {
            Some(place) if native => format!("spec.{}", place.key),
            Some(place) => place.key.clone(),
            // Not stated in this file: a default of the dialect, or a number of another file.
            None => match reader.upstream_key(change.path) {
                Some(key) => key.to_owned(),
                None => continue,
            },
        };
        let beside = reader
            .upstream_key("batch.per_device_batch_size")
            .unwrap_or_default();
        text = edit::set(&text, &key, &change.to.to_string(), beside)?;
    }
    // A TRL recipe that states the processes for its launcher states the machines too.
    let machines = "num_machines";
    if let Some(nodes) = numbers.nodes
        && edit::number(&text, "num_processes").is_some()
        && edit::number(&text, machines).unwrap_or(1) != nodes
    {
        text = edit::set(&text, machines, &nodes.to_string(), "num_processes")?;
    }
    Ok(text)
}

/// A remark that the arguments are for another world than the job's launcher starts.
fn another_world(recipe: &Recipe, numbers: &BatchNumbers) -> Option<String> {
    let world = numbers.world;
    let from = recipe.spec.batch.gpus.filter(|from| *from != world)?;
    Some(format!(
        "these arguments are for {world} processes, and the job starts {from}: start {world}"
    ))
}

/// Remarks on other files and commands that must change with the recipe.
fn remarks(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    in_command: bool,
) -> Result<Vec<String>, EmitError> {
    let files = &recipe.files;
    let mut remarks = Vec::new();
    if let Some(file) = files.accelerate {
        let config = text_of(recipe, file);
        let new = accelerate::emit(recipe, numbers)?;
        let moves = recipe.spec.batch.gpus != Some(numbers.world)
            || recipe.spec.batch.accumulation != Some(numbers.accumulation)
            || numbers.nodes.is_some();
        // The command states the processes that the config leaves out.
        let left = launcher::leaves_processes(recipe);
        let typed = match left {
            true => edit::set(
                config,
                PROCESSES,
                &numbers.world.to_string(),
                "num_machines",
            )?,
            false => config.to_owned(),
        };
        if left && files.command.is_none() {
            remarks.push(format!(
                "`{}` states no number of processes: start the command with `--{PROCESSES} {}`",
                name_of(recipe, file),
                numbers.world
            ));
        }
        if moves && new.text != typed {
            remarks.push(format!(
                "`{}` has other numbers: `--emit accelerate` writes it for {} processes",
                name_of(recipe, file),
                numbers.world
            ));
            remarks.extend(new.remarks);
        }
    }
    if let Some(file) = files.deepspeed
        && deepspeed::states_numbers(text_of(recipe, file))
    {
        remarks.push(format!(
            "`{}` states batch numbers too: `--emit deepspeed` writes them, or set them to \"auto\" there",
            name_of(recipe, file)
        ));
    }
    if !in_command && let Some((file, _)) = files.command {
        let is_typed = |change: &Change| {
            let place = recipe.value_sources.get(change.path);
            place.is_some_and(|place| place.span.file == file)
        };
        let typed = changes(&recipe.spec, numbers).into_iter().filter(is_typed);
        let launcher = launcher::relaunch(recipe, numbers, file)?;
        let (world, typed): (Vec<_>, Vec<_>) = typed.partition(|c| c.path == "batch.gpus");
        if let Some(from) = world.first().and_then(|change| change.from) {
            remarks.push(format!(
                "the command starts {from} processes: start {} instead",
                numbers.world
            ));
        }
        let only_added = launcher.edits.len() == usize::from(!launcher.added.is_empty());
        if only_added && world.is_empty() && !launcher.added.is_empty() {
            remarks.push(format!(
                "add `{}` to the command",
                launcher.added.trim_start()
            ));
        }
        if !typed.is_empty() || (world.is_empty() && !only_added) {
            remarks.push(
                "the command overrides the recipe's numbers: remove them from it, or replace them by the output of `--emit args`"
                    .to_owned(),
            );
        }
    }
    Ok(remarks)
}

/// accelerate's key and option for the number of processes on all machines.
const PROCESSES: &str = "num_processes";

/// The numbers as arguments of the trainer, one per word.
pub fn arguments(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Vec<String>, EmitError> {
    let reader = readers::of(recipe.dialect).ok_or_else(|| no_form(recipe, "arguments"))?;
    if recipe.dialect == Dialect::Accelerate {
        return Ok(vec![
            "--num_processes".to_owned(),
            numbers.world.to_string(),
        ]);
    }
    refuse_num_steps(recipe, None, None)?;
    let pairs = argument_pairs(recipe, numbers).into_iter();
    let words = pairs.map(|(key, value)| reader.argument(key, &value.to_string()));
    let words: Vec<String> = words.flatten().collect();
    match words.is_empty() {
        true => Err(no_form(recipe, "arguments")),
        false => Ok(words),
    }
}

/// The numbers as variables, one a line.
fn environment(spec: &Spec, numbers: &BatchNumbers) -> String {
    let parallel = &spec.parallel;
    let lines = variables(
        numbers,
        [parallel.tensor, parallel.context, parallel.sequence],
    );
    let lines = lines
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"));
    lines.collect()
}

#[cfg(test)]
mod tests;
