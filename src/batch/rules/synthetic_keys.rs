//! `synthetic-keys`: keys that a source has no use for are pointed out.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::Severity;
use crate::recipe::spec::SYNTHETIC;

pub(super) const RULE: Rule = Rule {
    id: "synthetic-keys",
    severity: Severity::Warning,
    summary: "a key does nothing beside the synthetic language",
    why: "The synthetic language is made, not read: it has no columns, splits or shares, needs no tokenizer \
and no packing, and every token of it is a target. Its evaluation samples are its own, taken by \
`data.held_out`. Likewise a source that is read from files has no use for `synthetic`.",
    upstream: "None: the language is Evenkeel's own.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, micro: 16}\n  data:\n    train: [{path: synthetic, weight: 0.5}]\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, micro: 16}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 50000}}]\n"
        ),
    },
    check: Check::Plan(check),
};

/// Keys without meaning for a language that is made.
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
                    "remove it; {} says how many there are",
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
                "{} does nothing: the source is `{}`",
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
    use crate::batch::PlanRequest;
    use crate::batch::rules::testing::{only, recipe, wrote};
    use crate::recipe::spec::{DataSource, Synthetic};

    #[test]
    fn keys_that_do_nothing_are_named_where_they_stand() {
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
        // Files have weights; what they have not is a language.
        recipe.spec.data.train[0].path = "chat.jsonl".to_owned();
        assert!(only("synthetic-keys", &recipe, &request).is_empty());
        recipe.spec.data.train[0].synthetic = Some(Synthetic::default());
        assert_eq!(only("synthetic-keys", &recipe, &request).len(), 1);
    }
}
