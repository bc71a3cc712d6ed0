//! Recipes of the alignment-handbook and of TRL: flat YAML whose keys are fields of upstream's
//! dataclasses, launched with `accelerate launch … --config recipe.yaml`.
//!
//! The batch is per device. The number of devices is in the accelerate config, or not stated.

pub(crate) mod abbreviation;
pub(crate) mod accelerator;
pub(crate) mod axes;
mod data;
pub(crate) mod deepspeed;
pub(crate) mod keys;
pub(crate) mod objective;
mod older_ppo;
mod schedule;
pub(crate) mod settings;
pub(crate) mod values;

use std::path::Path;

use crate::recipe::schema::deepspeed::is_config;
use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{
    Confidence, Detected, ReadOptions, Reader, Resume, Translated, others,
};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::{nearest, within};

use values::Values;

/// Reads YAML recipes of the alignment-handbook and of TRL.
pub struct Handbook;

/// TRL's default of `logging_steps` (f2cd577, `trainer/base_config.py`).
const LOGGING_STEPS: u64 = 10;

/// Top-level keys that hardly any other dialect has.
const DISTINCTIVE: Words = Words(
    "per_device_train_batch_size gradient_accumulation_steps model_name_or_path dataset_mixture \
     dataset_mixer dataset_name num_train_epochs lr_scheduler_type",
);

/// Keys that set the batch of a device.
const BATCH: [&str; 3] = [
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "gradient_accumulation_steps",
];

impl Reader for Handbook {
    fn dialect(&self) -> Dialect {
        Dialect::HandbookTrl
    }

    fn detect(&self, root: &Node, _path: &Path, _origin: &Origin) -> Option<Detected> {
        // Hydra and DeepSpeed configs share some keys; their distinctive keys decide first.
        if others(root).is_some() || is_config(root) {
            return None;
        }
        let distinctive = DISTINCTIVE.iter().filter(|key| root.get(key).is_some());
        let distinctive: Vec<&str> = distinctive.collect();
        let (first, more) = (distinctive.first()?, distinctive.len() - 1);
        let reason = format!("it has the key `{first}`");
        Some(match more {
            0 => Confidence::Possible.because(reason),
            more => Confidence::Likely.because(format!("{reason} and {more} similar keys")),
        })
    }

    fn read(&self, mut root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        asked.put_into(&mut root, str::to_owned, reading);
        let mut native = translate(&mut root, asked.path, reading);
        if reading.only_by_name && !BATCH.iter().any(|key| root.get(key).is_some()) {
            // The program may set another batch itself, as TRL's `examples/scripts/rloo.py` does.
            native.remove_path("batch.per_device_batch_size");
            native.remove_path("batch.accumulation");
        }
        Translated::whole(root, native)
    }

    fn batch_keys(&self) -> &'static [(&'static str, &'static str)] {
        settings::BATCH_KEYS
    }

    fn resume(&self) -> Option<Resume> {
        Some(Resume::TRANSFORMERS)
    }

    fn argument(&self, key: &str, value: &str) -> Vec<String> {
        vec![format!("--{key}"), value.to_owned()]
    }
}

fn translate(root: &mut Node, path: &Path, reading: &mut Reading) -> Node {
    let Some(objective) = objective::detect(root, path, reading) else {
        return Node::mapping(root.span);
    };
    abbreviation::expand(root, &keys::known(objective), reading);
    let root = &*root;
    let older = match objective {
        Objective::Ppo => older_ppo::refuse(root, path, reading),
        Objective::Rloo => refuse_older_rloo(root, reading),
        _ => false,
    };
    if !older {
        refuse_unknown(root, objective, reading);
    }
    let kind_of = |key: &str| keys::kind(key, objective);
    let values = Values::check(root, "", kind_of, reading);
    let mut tree = Tree::new(root.span);
    tree.default("objective", native_name(objective));
    settings::name(&values, path, &mut tree, reading);
    settings::objective_defaults(objective, &mut tree);
    let evaluates = training_arguments(root, &values, path, LOGGING_STEPS, &mut tree, reading);
    settings::lengths(&values, objective, &mut tree);
    data::translate(&values, evaluates, &mut tree, reading);
    tree.into_node()
}

/// Translates the keys of `TrainingArguments` and returns whether the run evaluates.
/// `logging_steps` is the dialect's default, which its `eval_steps` follows.
pub(crate) fn training_arguments(
    root: &Node,
    values: &Values,
    path: &Path,
    logging_steps: u64,
    tree: &mut Tree,
    reading: &mut Reading,
) -> bool {
    axes::refuse_unread(root, reading);
    settings::batch(values, path, tree, reading);
    settings::parallel(values, path, tree, reading);
    settings::model(values, path, tree, reading);
    settings::budget(values, tree);
    settings::optimizer(values, tree);
    schedule::learning_rate(values, tree, reading);
    schedule::checkpoint(values, tree, reading);
    tree.text_if("output", values.text("output_dir"));
    schedule::evaluation(values, logging_steps, tree, reading)
}

/// The native name of the trainer in a program's name: `trl/scripts/dpo.py`, or `sft` of TRL's own
/// command line.
pub(crate) fn trainer_of(script: &Path) -> Option<String> {
    objective::by_name(script).map(native_name)
}

/// Refuses TRL trainers whose batch is not known here, by the name of the program or recipe. Returns whether
/// it did.
pub(crate) fn refuse_unsupported(path: &Path, span: Option<Span>, reading: &mut Reading) -> bool {
    let Some(name) = objective::unsupported(path) else {
        return false;
    };
    reading.error(
        "unsupported-value",
        span,
        format!("this recipe is for TRL's trainer {name}, whose batch rules are not known here"),
        "if it is per-device batch × accumulation × processes, read it as `--dialect transformers`",
    );
    true
}

/// Whether a key belongs to one of TRL's trainers or to the handbook, and to none of transformers'
/// own scripts.
pub(crate) fn only_trl_has(key: &str) -> bool {
    keys::kind_in_training(key).is_none()
        && keys::example(key).is_none()
        && (keys::shared(key).is_some() || !keys::owners(key).is_empty())
}

/// Whether a program with these arguments is one of TRL's: TRL alone has one of them, and TRL knows
/// them all. Arguments that scripts commonly define themselves do not count.
pub(crate) fn trl_argument(arguments: &Node) -> Option<&str> {
    let names = || {
        let entries = arguments.entries().unwrap_or_default().iter();
        entries.map(|entry| entry.name.as_str())
    };
    let distinctive = names().find(|name| only_trl_has(name) && !keys::is_common(name))?;
    let known = |name: &str| {
        keys::is_known(name)
            || keys::example(name).is_some()
            || abbreviation::meant(name, keys::all()) != abbreviation::Meant::Nothing
    };
    names().all(known).then_some(distinctive)
}

/// Whether an argument is a boolean, which may come without a value.
pub(crate) fn is_switch(key: &str) -> bool {
    keys::is_bool(key)
}

/// Whether an argument is known and takes a value that is more than a boolean.
pub(crate) fn takes_value(key: &str) -> bool {
    let example = keys::example(key);
    let known = keys::shared(key).is_some() || !keys::owners(key).is_empty() || example.is_some();
    known && !keys::is_bool(key) && example != Some(keys::Kind::Bool)
}

/// Checks keys that the trainer does not have. The script may define them itself. TRL's own scripts refuse
/// unknown arguments and ignore unknown keys of a file; TRL's command line passes both to `accelerate launch`,
/// which refuses them (TRL 1.16.0 `scripts/sft.py`, `cli/commands/training.py`). A misspelled batch key and a
/// batch key of another trainer are errors: the batch would be another than the written one.
fn refuse_unknown(root: &Node, objective: Objective, reading: &mut Reading) {
    const RULE: &str = "unknown-key";
    let this = keys::name(objective);
    let known = keys::known(objective);
    let command = reading.files.command.map(|(file, _)| file);
    for entry in root.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        if name == RESERVED || keys::kind(name, objective).is_some() {
            continue;
        }
        let at = Some(entry.name_span);
        let file = Some(entry.name_span.file);
        let (typed, overridden) = (file == command, file == reading.files.command_line);
        let owners: Vec<&str> = keys::owners(name).into_iter().map(keys::name).collect();
        if !owners.is_empty() {
            let message = format!(
                "`{name}` is a key of {} recipes, and this recipe is for {this}",
                owners.join(", ")
            );
            if reading.by_trl || typed || overridden || keys::sets_batch(name) {
                let help = format!(
                    "remove it, or set `evenkeel.objective` if this recipe is not for {this}: upstream refuses the file"
                );
                reading.error(RULE, at, message, help);
            } else {
                let help = format!(
                    "remove it if the script does not define it, or set `evenkeel.objective` if this recipe is not for {this}"
                );
                reading.warning(RULE, at, message, help);
            }
            continue;
        }
        if keys::is_launcher_key(name) && !typed {
            reading.warning(
                RULE,
                at,
                format!("only TRL's own command line reads `{name}` from a recipe"),
                "start the job with `trl`, or pass the option to the launcher",
            );
            continue;
        }
        let message = format!("there is no key `{name}` in {this} recipes");
        let near = nearest(name, &known);
        let typo = |near: &&str| {
            let similar = || within(name, [*near], 2).is_some();
            overridden || keys::sets_batch(near) || (typed && similar())
        };
        if let Some(near) = near.filter(typo) {
            reading.error(RULE, at, message, format!("did you mean `{near}`?"));
        } else if overridden {
            reading.error(RULE, at, message, "remove it, or check its spelling");
        } else if typed && reading.of_trl {
            let help = "remove it: TRL's own scripts refuse the command";
            reading.error(RULE, at, message, help);
        } else if reading.by_trl {
            let help =
                "remove it: TRL's command line passes it to `accelerate launch`, which refuses it";
            reading.error(RULE, at, message, help);
        } else {
            let similar = near.map(|near| format!("; a similar key is `{near}`"));
            reading.warning(
                RULE,
                at,
                format!("{message}: read as a key of the script itself"),
                format!(
                    "remove it if it is not one: TRL's own command line refuses it{}",
                    similar.unwrap_or_default()
                ),
            );
        }
    }
}

/// Refuses a recipe for TRL's RLOO before 0.22, which counted its batch in prompts of an episode (0.21.0
/// `trainer/rloo_trainer.py`, `__init__`). Returns whether it did.
fn refuse_older_rloo(root: &Node, reading: &mut Reading) -> bool {
    const FIELDS: [&str; 4] = [
        "local_rollout_forward_batch_size",
        "num_mini_batches",
        "rloo_k",
        "total_episodes",
    ];
    let entries = root.entries().unwrap_or_default();
    let Some(entry) = entries.iter().find(|e| FIELDS.contains(&e.name.as_str())) else {
        return false;
    };
    reading.error(
        "unsupported-value",
        Some(entry.name_span),
        format!(
            "`{}` belongs to TRL's RLOO before 0.22, whose batch rules are not known here",
            entry.name
        ),
        "state the global batch with `--dialect transformers --global-batch-size B`",
    );
    true
}

/// The native name of an objective.
fn native_name(objective: Objective) -> String {
    match serde_json::to_value(objective) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
