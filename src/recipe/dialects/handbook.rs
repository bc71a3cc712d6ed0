//! Recipes of the alignment-handbook and of TRL: flat YAML whose keys are fields of upstream's
//! dataclasses, launched with `accelerate launch … --config recipe.yaml`.
//!
//! The batch is per device. The number of devices is in the accelerate config, or not stated.

pub(crate) mod abbreviation;
pub(crate) mod accelerator;
mod data;
pub(crate) mod deepspeed;
pub(crate) mod effects;
pub(crate) mod keys;
pub(crate) mod objective;
mod preference;
mod schedule;
pub(crate) mod settings;
pub(crate) mod values;
pub(crate) mod versions;

use std::path::Path;

use crate::recipe::dialects::accelerate::options::is_launcher_key;
use crate::recipe::schema::axes;
use crate::recipe::schema::deepspeed::is_config;
use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{
    Confidence, Detected, ReadAs, ReadOptions, Reader, Resume, Translated, others,
};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::{nearest, within};

use values::Values;
use versions::Versions;

/// Reads YAML recipes of the alignment-handbook and of TRL.
pub struct Handbook;

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
        let (mut native, version) = translate(&mut root, asked, reading);
        if reading.only_by_name && !BATCH.iter().any(|key| root.get(key).is_some()) {
            // The program may set another batch itself, as TRL's `examples/scripts/rloo.py` does.
            native.remove_path("batch.per_device_batch_size");
            native.remove_path("batch.accumulation");
        }
        let states = |key: &&str| root.get(key).is_some();
        if !BATCH[..2].iter().any(states) && has_other_batch(&root) {
            native.remove_path("batch.per_device_batch_size");
        }
        let upstreams = |keys: &[&str]| reading.program.has_upstreams_defaults(keys);
        remove_defaults(&root, &mut native, upstreams);
        Translated {
            version,
            ..Translated::whole(root, native)
        }
    }

    fn has_versions(&self) -> bool {
        true
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

/// Whether a file has the batch of another program, `per_device_batch_size`.
fn has_other_batch(root: &Node) -> bool {
    let entries = root.entries().unwrap_or_default();
    entries.iter().any(|entry| {
        let name = entry.name.as_str();
        name.ends_with("batch_size") && !name.contains("eval") && !keys::is_known(name)
    })
}

fn translate(
    root: &mut Node,
    asked: &ReadOptions<'_>,
    reading: &mut Reading,
) -> (Node, Option<ReadAs>) {
    let path = asked.path;
    let Some(objective) = objective::detect(root, path, reading) else {
        return (Node::mapping(root.span), None);
    };
    let known = keys::known(objective);
    abbreviation::expand(root, &known, |key| keys::kind(key, objective), reading);
    let root = &*root;
    let (versions, read_as) = versions::choose(root, Some(objective), asked.version, reading);
    if !refuse_older(root, objective, path, reading) {
        refuse_unknown(root, objective, &known, reading);
        refuse_of_other_versions(root, Some(objective), versions, reading);
    }
    let taken = |key: &str| versions.takes(key, Some(objective));
    let kind_of = |key: &str| keys::kind(key, objective).filter(|_| taken(key));
    let values = Values::check(root, "", kind_of, reading);
    if objective.is_likelihood() || objective.is_over_preferences() {
        let is_known = |key: &str| taken(key) && keys::kind(key, objective).is_some();
        effects::find(root, objective, versions, is_known, reading);
    }
    let mut tree = Tree::new(root.span);
    tree.default("objective", objective);
    settings::name(&values, path, &mut tree, reading);
    settings::objective_defaults(objective, versions, &values, &mut tree);
    settings::likelihood(&values, objective, &mut tree);
    let evaluates = training_arguments(&values, path, versions, &mut tree, reading);
    // A program beside TRL's may define other keys; `lora_r` alone asks TRL for nothing.
    let own = settings::adapters(root).filter(|given| !keys::is_known(&given.key));
    if let Some(given) = own {
        tree.plain("model.adapters", &given);
    } else {
        warn_of_unused_adapter(root, reading);
    }
    // `trl/trainer/model_config.py` (040e32d).
    if values.is_true("use_peft") {
        tree.default("model.lora_rank", 16);
        tree.default("model.lora_alpha", 32.0);
        tree.default("model.lora_dropout", 0.05);
        tree.plain_if("model.lora_alpha", values.float("lora_alpha"));
        tree.plain_if("model.lora_dropout", values.float("lora_dropout"));
        tree.plain_if("model.use_rslora", values.bool("use_rslora"));
    }
    settings::adapter_sizes(root, &mut tree);
    settings::lengths(&values, objective, versions, &mut tree);
    data::translate(&values, evaluates, &mut tree, reading);
    if objective.is_over_preferences() {
        preference::translate(objective, &values, versions, &mut tree);
    }
    if objective == Objective::Dpo {
        warn_of_smoothing(&values, asked, versions, reading);
    }
    (tree.into_node(), Some(read_as))
}

/// Warns of an adapter's sizes where nothing asks for one. `use_peft: false` asks for none.
fn warn_of_unused_adapter(root: &Node, reading: &mut Reading) {
    const SIZES: [&str; 3] = ["lora_r", "lora_alpha", "lora_target_modules"];
    let entries = root.entries().unwrap_or_default();
    let size = entries
        .iter()
        .find(|entry| SIZES.contains(&entry.name.as_str()));
    if let Some(size) = size.filter(|_| root.get("use_peft").is_none()) {
        let key = &size.name;
        let message =
            format!("`{key}` without `use_peft`: TRL's scripts train all weights, not an adapter");
        let help = "set `use_peft: true` for an adapter, or `use_peft: false` to train all weights";
        reading.warning("adapter-unused", Some(size.name_span), message, help);
    }
}

/// Reports the keys that the versions do not have. TRL's own scripts ignore them in a file, and a program may define
/// an argument of that name.
pub(crate) fn refuse_of_other_versions(
    root: &Node,
    objective: Option<Objective>,
    versions: Versions,
    reading: &mut Reading,
) {
    let command = reading.files.command.map(|(file, _)| file);
    for entry in root.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        if versions.takes(name, objective) {
            continue;
        }
        let file = Some(entry.name_span.file);
        let typed = file == command && reading.of_trl;
        let overridden = file == reading.files.command_line;
        let is_error = keys::sets_batch(name) || typed || (overridden && objective.is_some());
        reading.diagnostics.push(Diagnostic {
            rule: "unknown-key".to_owned(),
            severity: if is_error {
                Severity::Error
            } else {
                Severity::Warning
            },
            message: format!(
                "`{name}` has no effect in {versions}: {}",
                versions.lack(name, objective)
            ),
            help: format!(
                "remove it, or name the version that trains this recipe: `--dialect-version {}`",
                match objective {
                    Some(_) => "trl-0.9,transformers-4.41",
                    None => "transformers-4.41",
                }
            ),
            span: Some(entry.name_span),
            hides_batch: false,
            next: None,
        });
    }
}

/// Keys of which upstream ignores the second one beside the first.
const SHADOWING: [(&str, &str); 5] = [
    ("max_seq_length", "max_length"),
    ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    ("per_gpu_eval_batch_size", "per_device_eval_batch_size"),
    ("activation_checkpointing", "gradient_checkpointing"),
    ("evaluation_strategy", "eval_strategy"),
];

/// Refuses an override beside a key of the file that wins over it.
fn refuse_shadowed(values: &Values, versions: Versions, reading: &mut Reading) {
    let command_line = reading.files.command_line;
    let warmup = schedule::stated_warmup(values, versions);
    let warmup = warmup.map(|given| match given.key.as_str() {
        "warmup_ratio" => ("warmup_ratio", "warmup_steps"),
        _ => ("warmup_steps", "warmup_ratio"),
    });
    for (winner, loser) in SHADOWING.into_iter().chain(warmup) {
        let (Some(winning), Some(losing)) = (values.node(winner), values.node(loser)) else {
            continue;
        };
        let overridden = |node: &Node| Some(node.span.file) == command_line;
        if overridden(losing) && !overridden(winning) {
            reading.error(
                "unknown-override",
                Some(losing.span),
                format!("`{loser}` has no effect: the recipe sets `{winner}`, which wins over it"),
                format!("override `{winner}` instead"),
            );
        }
    }
}

/// Warns of a smoothing that depends on TRL's version (TRL issue #3906), unless the user names the version.
fn warn_of_smoothing(
    values: &Values,
    asked: &ReadOptions<'_>,
    versions: Versions,
    reading: &mut Reading,
) {
    if asked.version.is_some() && !versions.trl_since(0, 29) {
        return;
    }
    let smoothing = values
        .float("label_smoothing")
        .filter(|given| given.value > 0.0);
    let losses = values.node("loss_type");
    let is_sigmoid = losses.is_none_or(|losses| {
        let listed = losses.items().unwrap_or(std::slice::from_ref(losses));
        listed.iter().any(|loss| loss.text() == Some("sigmoid"))
    });
    if let Some(given) = smoothing.filter(|_| is_sigmoid) {
        reading.warning(
            "unsupported-value",
            Some(given.span),
            format!("`label_smoothing` is {} with `loss_type` sigmoid: TRL 0.29 and newer ignore it, TRL 0.28 and HALOs apply it", given.value),
            "set `loss_type: robust`, or remove the smoothing, so that every version trains the same",
        );
    }
}

/// Translates the keys of `TrainingArguments` and returns whether the run evaluates.
pub(crate) fn training_arguments(
    values: &Values,
    path: &Path,
    versions: Versions,
    tree: &mut Tree,
    reading: &mut Reading,
) -> bool {
    // Upstream cuts tokens to the length and shifts the targets by one inside of it.
    tree.default("data.extra_token", false);
    refuse_shadowed(values, versions, reading);
    settings::batch(values, path, tree, reading);
    settings::parallel(values, path, versions, tree, reading);
    settings::model(values, path, tree, reading);
    settings::budget(values, tree);
    settings::tensorboard(values, tree);
    settings::optimizer(values, tree);
    schedule::learning_rate(values, versions, tree, reading);
    schedule::checkpoint(values, tree, reading);
    tree.text_if("output", values.text("output_dir"));
    schedule::evaluation(values, versions, tree, reading)
}

/// Names by which programs beside upstream's call the length of a run.
const OWN_LENGTHS: Words = Words(
    "epochs max_epochs max_train_steps n_epochs num_epochs steps total_episodes total_epochs total_steps train_epochs \
     train_steps",
);

/// Removes the defaults of `TrainingArguments` that the program may replace. `upstreams`: whether the defaults of these
/// keys are upstream's.
pub(crate) fn remove_defaults(root: &Node, native: &mut Node, upstreams: impl Fn(&[&str]) -> bool) {
    let own_lengths: Vec<&str> = OWN_LENGTHS.iter().collect();
    let has = |keys: &[&str]| keys.iter().any(|key| root.get(key).is_some());
    for (keys, others, path) in [
        (
            ["num_train_epochs", "max_steps"],
            own_lengths.as_slice(),
            "budget.epochs",
        ),
        (
            ["save_steps", "save_strategy"],
            &[] as &[&str],
            "checkpoint.every_steps",
        ),
        (
            ["save_steps", "save_strategy"],
            &[],
            "checkpoint.every_epoch",
        ),
    ] {
        if !has(&keys) && (has(others) || !upstreams(&[&keys[..], others].concat())) {
            native.remove_path(path);
        }
    }
}

/// The native name of the trainer in a program's name: `trl/scripts/dpo.py`, or `sft` of TRL's own
/// command line.
pub(crate) fn trainer_of(script: &Path) -> Option<String> {
    Some(objective::by_name(script)?.to_string())
}

/// Whether the program with the name of a trainer, given by its native name, is TRL's or uses it, by its arguments: it has
/// none that TRL refuses for this trainer, a prefix of several options or another trainer's, and at most half are its own.
pub(crate) fn takes(arguments: &Node, trainer: &str) -> bool {
    let Ok(objective) = serde_json::from_value(trainer.into()) else {
        return false;
    };
    let known = keys::known(objective);
    let (mut taken, mut own) = (0_usize, 0_usize);
    for entry in arguments.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        let is_known = keys::kind(name, objective).is_some()
            || keys::example(name).is_some()
            || older_fields(objective).is_some_and(|(fields, ..)| fields.has(name));
        match abbreviation::meant(name, known.iter().copied()) {
            _ if is_known => taken += 1,
            abbreviation::Meant::One(_) => taken += 1,
            abbreviation::Meant::Nothing if keys::owners(name).is_empty() => own += 1,
            abbreviation::Meant::Several(_) | abbreviation::Meant::Nothing => return false,
        }
    }
    own <= taken
}

/// Refuses TRL trainers whose batch is not known here, by the name of the program or recipe. Returns whether
/// it did.
pub(crate) fn refuse_unsupported(path: &Path, span: Option<Span>, reading: &mut Reading) -> bool {
    let Some(name) = objective::unsupported(path) else {
        return false;
    };
    reading.batch_unknown(
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
    let of_transformers = keys::kind_in_training(key).or_else(|| keys::example(key));
    of_transformers.is_none() && keys::is_known(key)
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
            || matches!(
                abbreviation::meant(name, keys::all()),
                abbreviation::Meant::One(_)
            )
    };
    names().all(known).then_some(distinctive)
}

/// Whether an argument is a boolean, which may come without a value.
pub(crate) fn is_switch(key: &str) -> bool {
    keys::agreed(key) == Some(keys::Kind::Bool)
}

/// Whether an argument is known and takes a value that is more than a boolean.
pub(crate) fn takes_value(key: &str) -> bool {
    let example = keys::example(key);
    let known = keys::is_known(key) || example.is_some();
    known && !is_switch(key) && example != Some(keys::Kind::Bool)
}

/// Checks keys that the trainer does not have. The script may define them itself. TRL's own scripts refuse
/// unknown arguments and ignore unknown keys of a file; TRL's command line passes both to `accelerate launch`,
/// which refuses them (TRL 1.16.0 `scripts/sft.py`, `cli/commands/training.py`). A misspelled batch key and a
/// batch key of another trainer are errors: the batch would be another than the written one.
fn refuse_unknown(
    root: &Node,
    objective: Objective,
    known: &[&'static str],
    reading: &mut Reading,
) {
    let this = keys::name(objective);
    let command = reading.files.command.map(|(file, _)| file);
    for entry in root.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        if name == RESERVED || keys::kind(name, objective).is_some() || reading.program.sets(name) {
            continue;
        }
        let file = Some(entry.name_span.file);
        let overridden = file == reading.files.command_line;
        // Another program than TRL's own scripts may define the argument.
        let typed = file == command && reading.of_trl;
        let owners: Vec<&str> = keys::owners(name).into_iter().map(keys::name).collect();
        let near = nearest(name, known);
        let typo = near.filter(|near| {
            let similar = || within(name, [*near], 2).is_some();
            // A long name is a spelling of it, a short one may be another key.
            let of_batch = keys::sets_batch(near) && (name.len() > 12 || similar());
            // An axis is refused as one.
            overridden || (of_batch && !axes::is_size(name)) || (typed && similar())
        });
        let message = format!("there is no key `{name}` in {this} recipes");
        let (severity, message, help) = if !owners.is_empty() {
            let owners = owners.join(", ");
            let message =
                format!("`{name}` is a key of {owners} recipes, and this recipe is for {this}");
            let other = format!("set `evenkeel.objective` if this recipe is not for {this}");
            if reading.by_trl || typed || overridden || keys::sets_batch(name) {
                let help = format!("remove it, or {other}: upstream refuses the file");
                (Severity::Error, message, help)
            } else {
                let help = format!("remove it if the script does not define it, or {other}");
                (Severity::Warning, message, help)
            }
        } else if is_launcher_key(name) && file != command {
            let message = format!("only TRL's own command line reads `{name}` from a recipe");
            let help = "start the job with `trl`, or pass the option to the launcher";
            (Severity::Warning, message, help.to_owned())
        } else if let Some(near) = typo {
            (Severity::Error, message, format!("did you mean `{near}`?"))
        } else if overridden {
            let help = "remove it, or check its spelling";
            (Severity::Error, message, help.to_owned())
        } else if typed {
            let help = "remove it: TRL's own scripts refuse the command";
            (Severity::Error, message, help.to_owned())
        } else if reading.by_trl {
            let help =
                "remove it: TRL's command line passes it to `accelerate launch`, which refuses it";
            (Severity::Error, message, help.to_owned())
        } else {
            let similar = near.map_or(String::new(), |near| format!("; a similar key is `{near}`"));
            let message = format!("{message}: read as a key of the script itself");
            let help = "remove it if it is not one: TRL's own command line refuses it";
            (Severity::Warning, message, format!("{help}{similar}"))
        };
        let mut problem = Diagnostic::error("unknown-key", Some(entry.name_span), message, help);
        problem.severity = severity;
        // Another program's file may have such a key.
        let of_trl = overridden || typed || reading.by_trl;
        problem.hides_batch = severity == Severity::Error && !of_trl;
        reading.diagnostics.push(problem);
    }
}

/// Fields of the configs of TRL's older trainers that the newer ones lack, and batch fields, which the newer PPO
/// trainer computes and ignores as arguments.
///
/// Sources: TRL 0.3.0 to 0.11.4 `trainer/ppo_config.py`, 0.9.6 `trainer/ppo_trainer.py` (`__init__`, `step`: a step
/// takes `mini_batch_size` × `gradient_accumulation_steps` × processes), `examples/scripts/ppo.py`; 0.21.0
/// `trainer/rloo_trainer.py` (`__init__`: the batch counts prompts of an episode).
const OLDER_PPO: Words = Words(
    "accelerator_kwargs adap_kl_ctrl backward_batch_size compare_steps early_stopping \
     forward_batch_size horizon init_kl_coef kl_penalty log_with model_name optimize_cuda_cache \
     optimize_device_cache ppo_epochs project_kwargs push_to_hub_if_best_kwargs query_dataset \
     ratio_threshold reward_model score_clip steps target target_kl task_name tracker_kwargs \
     tracker_project_name use_score_norm use_score_scaling use_seq2seq batch_size \
     mini_batch_size",
);
/// See [`OLDER_PPO`].
const OLDER_RLOO: Words =
    Words("local_rollout_forward_batch_size num_mini_batches rloo_k total_episodes");

/// The older PPO trainer's scripts, by names that the newer trainer's scripts do not have.
const OLDER_SCRIPTS: [&str; 2] = ["examples/scripts/ppo.py", "ppo_multi_adapter.py"];

/// The fields that only an older trainer has, its name and its scripts.
fn older_fields(objective: Objective) -> Option<(Words, &'static str, &'static [&'static str])> {
    match objective {
        Objective::Ppo => Some((OLDER_PPO, "PPO before 0.12", &OLDER_SCRIPTS)),
        Objective::Rloo => Some((OLDER_RLOO, "RLOO before 0.22", &[])),
        _ => None,
    }
}

/// Refuses a recipe for TRL's PPO before 0.12 or RLOO before 0.22, whose defaults differ between versions. Returns
/// whether it did.
fn refuse_older(root: &Node, objective: Objective, path: &Path, reading: &mut Reading) -> bool {
    let Some((fields, trainer, scripts)) = older_fields(objective) else {
        return false;
    };
    if objective == Objective::Ppo && BATCH[..2].iter().any(|key| root.get(key).is_some()) {
        return false;
    }
    let mut entries = root.entries().unwrap_or_default().iter();
    let (evidence, span) = match entries.find(|entry| fields.has(&entry.name)) {
        Some(entry) => (entry.name.clone(), entry.name_span),
        None if scripts.iter().any(|script| path.ends_with(script)) => {
            (path.display().to_string(), root.span)
        }
        None => return false,
    };
    reading.batch_unknown(
        "unsupported-value",
        Some(span),
        format!("`{evidence}` belongs to TRL's {trainer}, whose batch rules are not known here"),
        "name the version of TRL that it is for, if it is a newer one: `--dialect-version`",
    );
    true
}

#[cfg(test)]
mod tests;
