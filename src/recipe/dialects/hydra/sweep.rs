//! Sweeps: one command line for several jobs. A recipe is one job, so sweeps are refused, with the commands to
//! run instead. Without `--multirun` Hydra refuses them as well.
//!
//! Source: Hydra 1.3, `grammar/OverrideParser.g4` (`simpleChoiceSweep`),
//! `_internal/config_loader_impl.py` (`validate_sweep_overrides_legal`).

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::Span;
use crate::util::suggest::short;

/// The number of values that a help line lists.
const NAMED: usize = 4;

/// The message and the help of a finding.
type Words = (String, String);

/// The finding for comma-separated values.
pub(super) fn values(key: &str, values: &[&str]) -> Words {
    let all = short(&values.join(","));
    let message = format!(
        "`{key}={all}` is a sweep of {} jobs, but a recipe is one job",
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
        "run one job after another: {}{more}; `{key}=[…]` is a list, `{key}='…'` text with a comma",
        one_by_one.join(", then ")
    );
    (message, help)
}

/// The finding for a sweep function of Hydra's grammar; `None` for other functions.
pub(super) fn function(name: &str) -> Option<Words> {
    ["choice", "range", "interval", "glob"]
        .contains(&name)
        .then(|| {
            (
                format!("`{name}(…)` is a sweep of several jobs, but a recipe is one job"),
                "give one value at a time, `KEY=VALUE`".to_owned(),
            )
        })
}

/// Whether an argument is Hydra's flag for sweeps.
pub(super) fn is_flag(text: &str) -> bool {
    matches!(text, "-m" | "--multirun")
}

/// Whether an override sets Hydra's mode to sweeps.
pub(super) fn is_mode(key: &str, value: Option<&Node>) -> bool {
    key == "hydra.mode" && value.is_some_and(is_multirun)
}

/// The finding for the flag and for the mode.
pub(super) fn mode(written: &str) -> Words {
    (
        format!("`{written}` requests several jobs, but a recipe is one job"),
        "remove it, and give one value of every key at a time".to_owned(),
    )
}

/// The finding for a tree whose root requests several jobs.
pub(super) fn in_root(root: &Node) -> Option<(Span, Words)> {
    let mode = root
        .get_path("hydra.mode")
        .filter(|node| is_multirun(node))?;
    Some((mode.span, self::mode("hydra.mode: MULTIRUN")))
}

fn is_multirun(node: &Node) -> bool {
    node.text() == Some("MULTIRUN")
}
