//! Schedules: learning rate, evaluation and checkpoints.

use crate::recipe::dialects::deepspeed::number;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;

use super::values::Values;
use super::versions::Versions;

/// `lr_scheduler_type` and the native shape; empty without a counterpart.
const SCHEDULERS: [(&str, &str); 12] = [
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("constant", "constant"),
    ("constant_with_warmup", "constant"),
    ("inverse_sqrt", "inverse-sqrt"),
    ("polynomial", "linear"),
    ("cosine_with_min_lr", "cosine"),
    ("cosine_warmup_with_min_lr", "cosine"),
    ("cosine_with_restarts", ""),
    ("reduce_lr_on_plateau", ""),
    ("warmup_stable_decay", ""),
    ("greedy", ""),
];

/// Translates the learning rate. `polynomial` ends at 1e-7 and is linear with its default power.
pub(crate) fn learning_rate(
    values: &Values,
    versions: Versions,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    tree.plain_if("learning_rate.peak", values.float("learning_rate"));
    let scheduler = values.text("lr_scheduler_type");
    if let Some(given) = &scheduler {
        // The enum's values are lower case and its lookup is case-sensitive, and so is this one.
        let name = given.value.as_str();
        match SCHEDULERS.iter().find(|(known, _)| *known == name) {
            Some((_, "")) => reading.warning(
                "unsupported-value",
                Some(given.span),
                format!("the built-in trainer has no `{name}` schedule"),
                "set `lr_scheduler_type` to `cosine`, `linear`, `constant_with_warmup` or `inverse_sqrt`",
            ),
            Some((_, shape)) => tree.plain("learning_rate.shape", &given.with(shape)),
            None => {
                let words = SCHEDULERS.iter().map(|(known, _)| *known);
                reading.unknown_value("lr_scheduler_type", name, given.span, words);
            }
        }
    }
    let name = scheduler.as_ref().map_or("linear", |s| s.value.as_str());
    let kwargs = values.node("lr_scheduler_kwargs");
    // Without a stated peak it is the trainer's default.
    let peak = tree.get("learning_rate.peak").and_then(number);
    let floor = kwargs.and_then(|kwargs| floor(name, kwargs, peak.unwrap_or(5e-5)));
    tree.plain_if("learning_rate.floor", floor);
    warmup(values, name, versions, tree, reading);
}

/// The minimum learning rate as a share of the peak.
fn floor(scheduler: &str, kwargs: &Node, peak: f64) -> Option<Given<f64>> {
    let given = |key: &str| {
        let node = kwargs.get(key)?;
        let key = format!("lr_scheduler_kwargs.{key}");
        Some(Given::new(key, number(node)?, node.span))
    };
    let share = |given: Given<f64>| given.with(given.value / peak);
    match scheduler {
        "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => {
            given("min_lr_rate").or_else(|| given("min_lr").map(share))
        }
        "polynomial" => given("lr_end").map(share),
        _ => None,
    }
}

/// Whether the native schedule follows a scheduler of transformers with its `lr_scheduler_kwargs`: it has a counterpart,
/// and no argument that is not read changes its shape.
pub(super) fn is_followed(scheduler: &str, kwargs: Option<&Node>) -> bool {
    let read: &[&str] = match scheduler {
        "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => &["min_lr", "min_lr_rate"],
        "polynomial" => &["lr_end"],
        _ => &[],
    };
    let entries = kwargs.and_then(Node::entries).unwrap_or_default();
    let known = SCHEDULERS.iter().find(|(name, _)| *name == scheduler);
    known.is_none_or(|(_, shape)| !shape.is_empty())
        && entries
            .iter()
            .all(|entry| read.contains(&entry.name.as_str()))
}

/// The warm-up that counts; 0 is none. Steps win over the ratio, except in transformers 5, where a ratio replaces them.
///
/// Source: transformers 4.57.6 and 5.14.1 `training_args.py` (`__post_init__`, `get_warmup_steps`).
pub(super) fn stated_warmup(values: &Values, versions: Versions) -> Option<Given<f64>> {
    let positive = |given: Option<Given<f64>>| given.filter(|given| given.value != 0.0);
    let (steps, ratio) = (values.float("warmup_steps"), values.float("warmup_ratio"));
    if versions.transformers_since(5, 0) && ratio.is_some() {
        return positive(ratio);
    }
    positive(steps).or_else(|| positive(ratio))
}

/// Since transformers 5 a number of steps below 1 is a ratio.
fn warmup(
    values: &Values,
    scheduler: &str,
    versions: Versions,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let Some(given) = stated_warmup(values, versions) else {
        return;
    };
    if scheduler == "constant" {
        reading.warning(
            "unsupported-value",
            Some(given.span),
            format!(
                "`{}` has no effect: the schedule `constant` has no warm-up",
                given.key
            ),
            "use `lr_scheduler_type: constant_with_warmup`",
        );
    } else if given.key == "warmup_steps"
        && given.value.fract() != 0.0
        && !versions.transformers_since(5, 0)
    {
        let value = given.value;
        reading.error(
            "wrong-type",
            Some(given.span),
            format!("`warmup_steps` is {value}; before transformers 5 it takes a whole number"),
            if value < 1.0 {
                format!("write `warmup_ratio: {value}` for a share of the steps")
            } else {
                "give a whole number".to_owned()
            },
        );
    } else if given.key == "warmup_ratio" || given.value.abs() < 1.0 {
        tree.plain("learning_rate.warmup_ratio", &given);
    } else {
        tree.plain("learning_rate.warmup_steps", &given);
    }
}

/// The interval of evaluation or checkpoints.
enum When {
    Never,
    Steps,
    Epoch,
}

/// The interval in `eval_strategy` or `save_strategy`; only the latter has `best`.
fn when(given: &Given<String>, words: &[&'static str], reading: &mut Reading) -> When {
    match given.value.to_lowercase().as_str() {
        // PyYAML has read a boolean; the warning about it names the word.
        "no" | "off" | "false" => When::Never,
        "steps" => When::Steps,
        "epoch" | "best" => When::Epoch,
        _ => {
            let words = words.iter().copied();
            reading.unknown_value(&given.key, &given.value, given.span, words);
            When::Never
        }
    }
}

/// Translates evaluation; returns whether the run evaluates.
pub(crate) fn evaluation(
    values: &Values,
    versions: Versions,
    tree: &mut Tree,
    reading: &mut Reading,
) -> bool {
    // Where both exist, the older key wins (transformers 4.50.3 `training_args.py`, `__post_init__`).
    let strategy = values.text("evaluation_strategy");
    let strategy = strategy.or_else(|| values.text("eval_strategy"));
    let words = ["no", "steps", "epoch"];
    let when = strategy
        .as_ref()
        .map_or(When::Never, |given| when(given, &words, reading));
    if !matches!(when, When::Never) {
        tree.default("evaluation.per_device_batch_size", 8);
    }
    for key in ["per_gpu_eval_batch_size", "per_device_eval_batch_size"] {
        tree.plain_if("evaluation.per_device_batch_size", values.int(key));
    }
    // Without `eval_steps`, evaluation follows `logging_steps`.
    let positive = |key| values.float(key).filter(|given| given.value != 0.0);
    match (
        when,
        positive("eval_steps").or_else(|| positive("logging_steps")),
    ) {
        (When::Never, _) => return false,
        (When::Epoch, _) => {
            let on = strategy.map(|given| given.with(true));
            tree.plain_if("evaluation.every_epoch", on);
        }
        (When::Steps, Some(steps)) => interval("evaluation", &steps, tree, reading),
        (When::Steps, None) => {
            // The default of `logging_steps`: TRL's own since 0.19.
            let default = if versions.trl_since(0, 19) { 10 } else { 500 };
            let steps = strategy.map(|given| given.with(default));
            tree.plain_if("evaluation.every_steps", steps);
        }
    }
    true
}

/// Checkpoints: every 500 steps by default.
pub(crate) fn checkpoint(values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let strategy = values.text("save_strategy");
    let words = ["no", "steps", "epoch", "best"];
    match strategy
        .as_ref()
        .map_or(When::Steps, |given| when(given, &words, reading))
    {
        When::Never => {}
        When::Epoch => {
            let on = strategy.map(|given| given.with(true));
            tree.plain_if("checkpoint.every_epoch", on);
        }
        When::Steps => match values.float("save_steps") {
            // Not above 0: never (transformers 5.24.0 `trainer_callback.py`, `DefaultFlowCallback`).
            Some(steps) if steps.value <= 0.0 => {}
            Some(steps) => interval("checkpoint", &steps, tree, reading),
            None => tree.default("checkpoint.every_steps", 500),
        },
    }
    // Not above 0: all stay (`trainer_utils.py`, `rotate_checkpoints`).
    let kept = values.int("save_total_limit");
    tree.plain_if("checkpoint.keep", kept.filter(|kept| kept.value > 0));
}

/// A number of steps; below 1 a share of the run.
fn interval(part: &str, steps: &Given<f64>, tree: &mut Tree, reading: &mut Reading) {
    if steps.value < 1.0 && steps.value > 0.0 {
        tree.plain(&format!("{part}.every_share"), steps);
    } else if steps.value.fract() == 0.0 {
        tree.plain(
            &format!("{part}.every_steps"),
            &steps.with(steps.value as i128),
        );
    } else {
        reading.error(
            "out-of-range",
            Some(steps.span),
            format!("`{}` is {}", steps.key, steps.value),
            "give a whole number of steps, or a share of the run below 1",
        );
    }
}
