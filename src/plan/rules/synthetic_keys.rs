//! `synthetic-keys`: the recipe gives no key that the synthetic language ignores.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::schema::spec::SYNTHETIC;

pub(super) const RULE: Rule = Rule {
    id: "synthetic-keys",
    severity: Severity::Warning,
    summary: "a key has no effect with the synthetic language",
    why: "The synthetic language is generated: it has no columns, splits or shares, needs no tokeniser \
and no packing, and every token of it is a target. `data.held_out` takes its evaluation samples from it. \
Likewise `synthetic` has no effect on a source that is read from files.",
    upstream: "None: the language exists only in Evenkeel.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic, weight: 0.5}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 50000}}]\n"
        ),
    },
    check: Check::Plan(check),
};

/// Keys without effect on a generated language.
const IGNORED: [&str; 10] = [
    "data.train.0.format",
    "data.train.0.split",
    "data.train.0.config",
    "data.train.0.columns",
    "data.train.0.weight",
    "data.evaluation",
    "data.packing",
    "data.answers_only",
    "tokenizer.path",
    "tokenizer.chat_template",
];

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let data = &case.spec().data;
    if data.synthetic().is_some() {
        for path in IGNORED
            .into_iter()
            .filter(|path| case.recipe.span(path).is_some())
        {
            let help = match path {
                "data.evaluation" => format!(
                    "remove it; {} takes samples for evaluation",
                    case.key("data.held_out")
                ),
                "data.train.0.weight" => format!(
                    "remove it; {} states their number",
                    case.key("data.train.0.synthetic.samples")
                ),
                _ => "remove it".to_owned(),
            };
            let message = format!("the synthetic language ignores {}", case.key(path));
            findings.at(&[path], message, help);
        }
    }
    for (index, source) in data.train.iter().enumerate() {
        if source.path != SYNTHETIC && source.synthetic.is_some() {
            let path = format!("data.train.{index}.synthetic");
            let message = format!(
                "{} has no effect: the source is `{}`",
                case.key(&path),
                source.path
            );
            let source = case.set(&format!("data.train.{index}.path"), SYNTHETIC);
            let help = format!("remove it, or set {source}");
            findings.at(&[&path], message, help);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe, wrote};
    use crate::recipe::schema::spec::{DataSource, Synthetic};

    #[test]
    fn keys_without_effect_are_named_at_their_position() {
        let mut recipe = recipe();
        let request = PlanRequest::gpus(1);
        recipe.spec.data.train = vec![DataSource {
            path: "synthetic".to_owned(),
            ..DataSource::default()
        }];
        assert!(only("synthetic-keys", &recipe, &request).is_empty());
        wrote(&mut recipe, "a.yaml", "data.train.0.weight", "weight");
        wrote(&mut recipe, "b.yaml", "data.evaluation", "evaluation");
        let found = only("synthetic-keys", &recipe, &request);
        let messages: Vec<&str> = found.iter().map(|d| d.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "the synthetic language ignores `weight`",
                "the synthetic language ignores `evaluation`"
            ]
        );
        assert!(found.iter().all(|d| d.span.is_some()));
        // Sources from files have weights but no `synthetic`.
        recipe.spec.data.train[0].path = "chat.jsonl".to_owned();
        assert!(only("synthetic-keys", &recipe, &request).is_empty());
        recipe.spec.data.train[0].synthetic = Some(Synthetic::default());
        assert_eq!(only("synthetic-keys", &recipe, &request).len(), 1);
    }
}
