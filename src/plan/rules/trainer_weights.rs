//! `trainer-weights`: the built-in trainer trains all weights, unquantised.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;

pub(super) const RULE: Rule = Rule {
    id: "trainer-weights",
    severity: Severity::Error,
    summary: "the built-in trainer has no adapters and no quantised weights",
    why: "Low-rank adapters (PEFT) and weights in 4 or 8 bits change the trained parameters. The built-in \
trainer trains all weights. With a recipe for adapters that would be another experiment under the same \
name.",
    upstream: "None: it concerns Evenkeel's built-in trainer.",
    wrong: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: mistralai/Mistral-7B-v0.1, adapters: true}\n"
        ),
    },
    right: Example {
        flags: "",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: mistralai/Mistral-7B-v0.1}\n"
        ),
    },
    check: Check::Trainer(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let model = &case.spec().model;
    for (path, asked, what) in [
        ("model.adapters", model.adapters, "low-rank adapters"),
        (
            "model.load_in_4bit",
            model.load_in_4bit,
            "weights in 4 bits",
        ),
        (
            "model.load_in_8bit",
            model.load_in_8bit,
            "weights in 8 bits",
        ),
    ] {
        if asked {
            let key = case.recipe.key(path);
            findings.at(
                &[path],
                format!("the built-in trainer has no {what} (`{key}`)"),
                format!("override it with `{key}=false` to train all weights, or plan only"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{launched, recipe};

    #[test]
    fn adapters_and_quantised_weights_are_refused() {
        let mut recipe = recipe();
        recipe.spec.model.adapters = true;
        recipe.spec.model.load_in_4bit = true;
        assert_eq!(launched("trainer-weights", &recipe).len(), 2);
    }
}
