//! Schedules: learning rate, evaluation and checkpoints.

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;

use super::deepspeed::config_number;
use super::values::Values;

/// `lr_scheduler_type` and the native shape; `None` without a counterpart.
const SCHEDULERS: &[(&str, Option<&str>)] = &[
    ("linear", Some("linear")),
    ("cosine", Some("cosine")),
    ("constant", Some("constant")),
    ("constant_with_warmup", Some("constant")),
    ("inverse_sqrt", Some("inverse-sqrt")),
    ("polynomial", Some("linear")),
    ("cosine_with_min_lr", Some("cosine")),
    ("cosine_warmup_with_min_lr", Some("cosine")),
    ("cosine_with_restarts", None),
    ("reduce_lr_on_plateau", None),
    ("warmup_stable_decay", None),
    ("greedy", None),
];

/// Translates the learning rate. `polynomial` ends at 1e-7 and is linear with its default power.
pub(crate) fn learning_rate(values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let peak = values.float("learning_rate");
    tree.plain_if("learning_rate.peak", peak.clone());
    let scheduler = values.text("lr_scheduler_type");
    if let Some(name) = &scheduler {
        // The enum's values are lower case and its lookup is case-sensitive, and so is this one.
        let known = SCHEDULERS.iter().find(|(known, _)| *known == name.value);
        match known {
            Some((_, Some(shape))) => {
                tree.text("learning_rate.shape", &name.with((*shape).to_owned()));
            }
            Some((_, None)) => {
                reading.warning(
                    "unsupported-value",
                    Some(name.span),
                    format!("the built-in trainer has no `{}` schedule, it uses `linear`", name.value),
                    "set `lr_scheduler_type` to `cosine`, `linear`, `constant_with_warmup` or `inverse_sqrt`",
                );
            }
            None => {
                let words = SCHEDULERS.iter().map(|(known, _)| *known);
                reading.unknown_value("lr_scheduler_type", &name.value, name.span, words);
            }
        }
    }
    let name = scheduler.as_ref().map_or("linear", |s| s.value.as_str());
    let kwargs = values.node("lr_scheduler_kwargs");
    if let Some(floor) = floor(name, kwargs, peak.as_ref().map(|p| p.value)) {
        tree.plain("learning_rate.floor", &floor);
    }
    warmup(values, name, tree, reading);
}

/// The minimum learning rate as a share of the peak.
fn floor(scheduler: &str, kwargs: Option<&Node>, peak: Option<f64>) -> Option<Given<f64>> {
    let kwargs = kwargs?;
    let number = |key: &str| {
        let node = kwargs.get(key)?;
        let value = config_number(node)?;
        let key = format!("lr_scheduler_kwargs.{key}");
        Some(Given::new(key, value, node.span))
    };
    let share = |given: Given<f64>| peak.map(|peak| given.with(given.value / peak));
    match scheduler {
        "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => {
            number("min_lr_rate").or_else(|| share(number("min_lr")?))
        }
        "polynomial" => share(number("lr_end")?),
        _ => None,
    }
}

/// Steps take precedence over the ratio. Since transformers 5 a number of steps below 1 is a ratio.
fn warmup(values: &Values, scheduler: &str, tree: &mut Tree, reading: &mut Reading) {
    let steps = values.float("warmup_steps").filter(|s| s.value != 0.0);
    let ratio = values.float("warmup_ratio").filter(|r| r.value != 0.0);
    if let ("constant", Some(given)) = (scheduler, steps.as_ref().or(ratio.as_ref())) {
        reading.warning(
            "unsupported-value",
            Some(given.span),
            format!(
                "`{}` has no effect: the schedule `constant` has no warm-up",
                given.key
            ),
            "use `lr_scheduler_type: constant_with_warmup`",
        );
        return;
    }
    match (steps, ratio) {
        (Some(steps), _) if steps.value.abs() < 1.0 => {
            tree.plain("learning_rate.warmup_ratio", &steps);
        }
        (Some(steps), _) => tree.plain("learning_rate.warmup_steps", &steps),
        (None, Some(ratio)) => tree.plain("learning_rate.warmup_ratio", &ratio),
        (None, None) => {}
    }
}

/// The interval of evaluation or checkpoints.
enum When {
    Never,
    Steps,
    Epoch,
}

/// `eval_strategy` or `save_strategy`; only the latter has `best`.
fn when(
    values: &Values,
    keys: &[&str],
    default: When,
    words: &[&str],
    reading: &mut Reading,
) -> When {
    let Some(given) = keys.iter().find_map(|key| values.text(key)) else {
        return default;
    };
    match given.value.to_lowercase().as_str() {
        "no" => When::Never,
        "steps" => When::Steps,
        "epoch" | "best" => When::Epoch,
        // PyYAML has read a boolean; the warning about it names the word.
        "off" | "false" => When::Never,
        _ => {
            let words = words.iter().copied();
            reading.unknown_value(&given.key, &given.value, given.span, words);
            When::Never
        }
    }
}

/// Translates evaluation; returns whether the run evaluates. `logging_steps` is the trainer's
/// default of that key.
pub(crate) fn evaluation(
    values: &Values,
    logging_steps: u64,
    tree: &mut Tree,
    reading: &mut Reading,
) -> bool {
    let keys = ["eval_strategy", "evaluation_strategy"];
    let words = ["no", "steps", "epoch"];
    let when = when(values, &keys, When::Never, &words, reading);
    let per_device_batch_size = values
        .int("per_device_eval_batch_size")
        .or_else(|| values.int("per_gpu_eval_batch_size"));
    if !matches!(when, When::Never) {
        tree.default("evaluation.per_device_batch_size", 8);
    }
    tree.plain_if("evaluation.per_device_batch_size", per_device_batch_size);
    match when {
        When::Never => return false,
        When::Epoch => {
            let given = keys.iter().find_map(|key| values.text(key));
            tree.plain_if("evaluation.every_epoch", given.map(|g| g.with(true)));
        }
        When::Steps => {
            // Without `eval_steps`, evaluation follows `logging_steps`.
            let steps = ["eval_steps", "logging_steps"]
                .iter()
                .find_map(|key| values.float(key).filter(|g| g.value != 0.0));
            let asked = || keys.iter().find_map(|key| values.text(key));
            match steps {
                Some(steps) => interval("evaluation", &steps, tree, reading),
                None => tree.plain_if(
                    "evaluation.every_steps",
                    asked().map(|g| g.with(logging_steps)),
                ),
            }
        }
    }
    true
}

/// Checkpoints: every 500 steps by default.
pub(crate) fn checkpoint(values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let words = ["no", "steps", "epoch", "best"];
    let when = when(values, &["save_strategy"], When::Steps, &words, reading);
    match when {
        When::Never => {}
        When::Epoch => {
            let given = values.text("save_strategy");
            tree.plain_if("checkpoint.every_epoch", given.map(|g| g.with(true)));
        }
        When::Steps => match values.float("save_steps") {
            Some(steps) => interval("checkpoint", &steps, tree, reading),
            None => tree.default("checkpoint.every_steps", 500),
        },
    }
    tree.plain_if("checkpoint.keep", values.int("save_total_limit"));
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
