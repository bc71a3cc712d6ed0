//! Writes a plan back: into its recipe, as arguments, as environment variables, or as an accelerate
//! or DeepSpeed config. Only numbers that depend on the world change. Reading the output in that
//! world yields the same plan.

mod accelerate;
mod command;
mod deepspeed;
mod edit;
mod launcher;
mod tree;

use std::path::PathBuf;

use crate::recipe::Recipe;
use crate::recipe::dialects::readers;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::spec::Spec;
use crate::recipe::syntax::source::{FileId, Span};

pub use crate::recipe::batch_arguments::BatchNumbers;
use crate::recipe::batch_arguments::{argument_pairs, num_steps, split_batches, variables};

/// Why a plan cannot be written in the requested form, and the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EmitError(String);

fn refuse<T>(message: impl Into<String>) -> Result<T, EmitError> {
    Err(EmitError(message.into()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The recipe, in its own dialect.
    Recipe,
    /// Arguments of the trainer.
    Args,
    Env,
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
            ..Emitted::plain(words.join(" ") + "\n")
        }),
        Form::Env => Ok(Emitted::plain(environment(&recipe.spec, numbers))),
        Form::Accelerate => accelerate::emit(recipe, numbers),
        Form::Deepspeed => deepspeed::emit(recipe, numbers).map(Emitted::plain),
    }
}

impl Emitted {
    fn plain(text: String) -> Emitted {
        Emitted {
            text,
            replaces: None,
            remarks: Vec::new(),
        }
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
    syntax.set_in(text, "checkpoint", "load_universal", "true")
}

/// Shards and replicas of the plan's data-parallel ranks. `fsdp`: FSDP shards them.
pub fn shard_sizes(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    fsdp: bool,
) -> Result<[u64; 2], EmitError> {
    accelerate::shards(&recipe.spec.parallel, numbers, fsdp)
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
    recipe.launch.as_ref()?.value_at(span)
}

/// A number that depends on the world: its native path, the recipe's value and the plan's.
struct Change {
    path: &'static str,
    from: Option<u64>,
    to: u64,
}

/// Every number that the plan changes.
fn changes(spec: &Spec, numbers: &BatchNumbers) -> Vec<Change> {
    let (batch, generation) = (&spec.batch, &spec.generation);
    let change = |path, from, to| Change { path, from, to };
    let mut all = vec![
        change(
            "batch.per_device_batch_size",
            batch.per_device_batch_size,
            numbers.per_device_batch_size,
        ),
        change(
            "batch.accumulation",
            batch.accumulation,
            numbers.accumulation,
        ),
        change("batch.gpus", batch.gpus, numbers.world),
    ];
    if let Some(to) = numbers.steps_per_generation {
        let from = generation.steps_per_generation;
        all.push(change("generation.steps_per_generation", from, to));
    }
    all.retain(|change| change.from != Some(change.to));
    all
}

/// Rewrites the recipe's own file, or its command.
fn in_recipe(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Emitted, EmitError> {
    match recipe.dialect {
        Dialect::Accelerate => return accelerate::emit(recipe, numbers),
        Dialect::Deepspeed => return deepspeed::emit(recipe, numbers).map(Emitted::plain),
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
            refuse_replaced(recipe, file)?;
            command::emit(recipe, numbers, file, end)?
        }
        (None, Some(file)) => {
            refuse_num_steps(recipe, Some(numbers), Some(file))?;
            launcher::refuse_fixed(recipe, numbers, file)?;
            Emitted::plain(in_file(recipe, numbers, file)?)
        }
        (None, None) => return Err(no_form(recipe, "recipe")),
    };
    let remarks = remarks(recipe, numbers, in_command.is_some())?;
    emitted.remarks.extend(remarks);
    Ok(emitted)
}

/// Refuses a script that assigns a variable whose value was given beside it: the written script would assign it again.
fn refuse_replaced(recipe: &Recipe, file: FileId) -> Result<(), EmitError> {
    let text = recipe
        .sources
        .get(file)
        .map_or("", |source| source.text.as_str());
    let assigned = |name: &&String| {
        let assignment = format!("{name}=");
        let mut words = text.split(|c: char| c.is_whitespace() || c == ';');
        words.any(|word| word.starts_with(&assignment))
    };
    match recipe.variables.keys().find(assigned) {
        Some(name) => refuse(format!(
            "the script assigns `{name}` itself, whose value was given beside it (change the assignment in the script)"
        )),
        None => Ok(()),
    }
}

/// Refuses to write the accumulation twice: upstream refuses the argument beside `accelerator_config`.
/// `numbers`: an argument with the same value is not written. `file`: the file in which the number itself
/// can change.
fn refuse_num_steps(
    recipe: &Recipe,
    numbers: Option<&BatchNumbers>,
    file: Option<FileId>,
) -> Result<(), EmitError> {
    let same = numbers.is_some_and(|n| recipe.spec.batch.accumulation == Some(n.accumulation));
    match num_steps(recipe) {
        Some((key, at)) if !same && Some(at) != file => refuse(format!(
            "the accumulation is `{key}` in `{}`, and the trainer refuses a second one (replace that key by `gradient_accumulation_steps`)",
            name_of(recipe, at)
        )),
        _ => Ok(()),
    }
}

/// The refusal of a form for which the dialect has no keys.
fn no_form(recipe: &Recipe, form: &str) -> EmitError {
    EmitError(format!(
        "a plan cannot be written back as {} {form} (`--emit args` and `--emit env` write its numbers)",
        recipe.dialect
    ))
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
    let beside = reader.upstream_key("batch.per_device_batch_size");
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
        let value = change.to.to_string();
        text = edit::set(&text, &key, &value, beside.unwrap_or_default())?;
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
    let world = numbers.world;
    let mut remarks = Vec::new();
    if let Some(file) = files.accelerate {
        let name = name_of(recipe, file);
        let new = accelerate::emit(recipe, numbers)?;
        let moves = recipe.spec.batch.gpus != Some(world)
            || recipe.spec.batch.accumulation != Some(numbers.accumulation)
            || numbers.nodes.is_some();
        // The command states the processes that the config leaves out.
        let left = launcher::leaves_processes(recipe);
        let mut typed = text_of(recipe, file).to_owned();
        if left {
            typed = edit::set(&typed, PROCESSES, &world.to_string(), "num_machines")?;
        }
        if left && files.command.is_none() {
            remarks.push(format!(
                "`{name}` states no number of processes: start the command with `--{PROCESSES} {world}`"
            ));
        }
        if moves && new.text != typed {
            remarks.push(format!(
                "`{name}` has other numbers: `--emit accelerate` writes it for {world} processes"
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
        let mut typed = changes(&recipe.spec, numbers);
        typed.retain(|change| {
            let place = recipe.value_sources.get(change.path);
            place.is_some_and(|place| place.span.file == file)
        });
        let (gpus, typed): (Vec<_>, Vec<_>) = typed.iter().partition(|c| c.path == "batch.gpus");
        if let Some(from) = gpus.first().and_then(|change| change.from) {
            remarks.push(format!(
                "the command starts {from} processes: start {world} instead"
            ));
        }
        let launcher = launcher::relaunch(recipe, numbers, file)?;
        let added = launcher.added.trim_start();
        let only_added = launcher.edits.len() == usize::from(!added.is_empty());
        if only_added && gpus.is_empty() && !added.is_empty() {
            remarks.push(format!("add `{added}` to the command"));
        }
        if !typed.is_empty() || (gpus.is_empty() && !only_added) {
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
        return Ok(vec![format!("--{PROCESSES}"), numbers.world.to_string()]);
    }
    refuse_num_steps(recipe, None, None)?;
    let pairs = argument_pairs(recipe, numbers).into_iter();
    let words = pairs.map(|(key, value)| reader.argument(key, &value.to_string()));
    let words: Vec<String> = words.flatten().collect();
    if words.is_empty() {
        return Err(no_form(recipe, "arguments"));
    }
    Ok(words)
}

/// The numbers as variables, one a line.
fn environment(spec: &Spec, numbers: &BatchNumbers) -> String {
    let parallel = &spec.parallel;
    let axes = [parallel.tensor, parallel.context, parallel.sequence];
    let lines = variables(numbers, axes).into_iter();
    lines
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect()
}

#[cfg(test)]
mod tests;
