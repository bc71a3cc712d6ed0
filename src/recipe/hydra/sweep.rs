//! Sweeps: one line that stands for several jobs. A recipe is one job, so they are refused, with what
//! to run instead; without `--multirun` Hydra refuses them as well.
//!
//! Source: Hydra 1.3, `grammar/OverrideParser.g4` (`simpleChoiceSweep`),
//! `_internal/config_loader_impl.py` (`validate_sweep_overrides_legal`).

use crate::recipe::node::Node;
use crate::recipe::source::Span;
use crate::recipe::suggest::short;

/// The most values that a help line names one by one.
const NAMED: usize = 4;

/// Message and help.
type Words = (String, String);

/// Several values between commas.
pub(super) fn values(key: &str, values: &[&str]) -> Words {
    let all = short(&values.join(","));
    let message = format!(
        "`{key}={all}` is a sweep: {} jobs in one line, and a recipe is one job",
        values.len()
    );
    let one_by_one: Vec<String> = values
        .iter()
        .take(NAMED)
        .map(|value| format!("`{key}={}`", short(value)))
        .collect();
    let more = match values.len() > NAMED {
        true => ", and so on",
        false => "",
    };
    let help = format!(
        "give one after the other: {}{more}; `{key}=[…]` is a list, `{key}='…'` text with a comma",
        one_by_one.join(", then ")
    );
    (message, help)
}

/// A function of Hydra's grammar whose values are several; `None` for the others.
pub(super) fn function(name: &str) -> Option<Words> {
    ["choice", "range", "interval", "glob"]
        .contains(&name)
        .then(|| {
            (
                format!(
                    "`{name}(…)` is a sweep: several jobs in one line, and a recipe is one job"
                ),
                "give one value at a time, `KEY=VALUE`".to_owned(),
            )
        })
}

/// Whether an argument is Hydra's flag for sweeps.
pub(super) fn is_flag(text: &str) -> bool {
    matches!(text, "-m" | "--multirun")
}

/// Whether an override does what the flag does.
pub(super) fn is_mode(key: &str, value: Option<&Node>) -> bool {
    key == "hydra.mode" && value.is_some_and(is_multirun)
}

/// What is said of either.
pub(super) fn mode(written: &str) -> Words {
    (
        format!("`{written}` asks for several jobs, and a recipe is one job"),
        "leave it out, and give one value of every key at a time".to_owned(),
    )
}

/// A tree whose root asks for several jobs.
pub(super) fn in_root(root: &Node) -> Option<(Span, Words)> {
    let mode = root
        .get_path("hydra.mode")
        .filter(|node| is_multirun(node))?;
    Some((mode.span, self::mode("hydra.mode: MULTIRUN")))
}

fn is_multirun(node: &Node) -> bool {
    node.text() == Some("MULTIRUN")
}
