//! What a recipe names: its model, its tokeniser and its data. The caller's survey finds most of these
//! errors, because rules open no files.

use super::{Case, Check, Example, Findings, Rule, native, surveyed};
use crate::recipe::Severity;
use crate::recipe::schema::spec::SYNTHETIC;

pub(super) const RULES: &[&Rule] = &[
    &MODEL_MISSING,
    &MODEL_SHAPE,
    &TOKENIZER_MISSING,
    &VOCABULARY_TOO_SMALL,
    &SEQUENCE_TOO_LONG,
    &DATA_MISSING,
    &SYNTHETIC_LANGUAGE,
    &SYNTHETIC_KEYS,
];

/// The rules of what is not on this machine.
pub(super) const MISSING: [&Rule; 3] = [&MODEL_MISSING, &TOKENIZER_MISSING, &DATA_MISSING];

/// An example of 128 samples a step, with these keys in addition.
const fn with(keys: &'static str) -> Example {
    native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 16}\n",
    )
    .and(keys)
}

const MODEL_MISSING: Rule = Rule {
    id: "model-missing",
    severity: Severity::Error,
    summary: "the model that the recipe names is not on this machine",
    text: include_str!("texts/model-missing.md"),
    wrong: with("  model: {path: models/that/does-not/exist}\n"),
    right: with(
        "  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n",
    ),
    check: Check::PlanWarning(surveyed),
};

const MODEL_SHAPE: Rule = Rule {
    id: "model-shape",
    severity: Severity::Error,
    summary: "the model's sizes are inconsistent",
    text: include_str!("texts/model-shape.md"),
    wrong: with(
        "  model:\n    config: {hidden_size: 64, num_attention_heads: 6, num_hidden_layers: 2, vocab_size: 256}\n",
    ),
    right: with(
        "  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n",
    ),
    check: Check::Plan(surveyed),
};

const TOKENIZER_MISSING: Rule = Rule {
    id: "tokenizer-missing",
    severity: Severity::Error,
    summary: "the tokeniser that the recipe names is not on this machine",
    text: include_str!("texts/tokenizer-missing.md"),
    wrong: with(
        "  tokenizer: {path: nowhere/tokenizer.json}\n  data:\n    train: [{path: chat.jsonl}]\n",
    ),
    right: with("  tokenizer: {path: byte}\n  data:\n    train: [{path: chat.jsonl}]\n"),
    check: Check::PlanWarning(surveyed),
};

const VOCABULARY_TOO_SMALL: Rule = Rule {
    id: "vocabulary-too-small",
    severity: Severity::Error,
    summary: "the data contain token ids without an embedding in the model",
    text: include_str!("texts/vocabulary-too-small.md"),
    wrong: with(
        "  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 128}\n  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 256}}]\n",
    ),
    right: with(
        "  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 256}}]\n",
    ),
    check: Check::Plan(surveyed),
};

const SEQUENCE_TOO_LONG: Rule = Rule {
    id: "sequence-too-long",
    severity: Severity::Error,
    summary: "samples are longer than the model's number of positions",
    text: include_str!("texts/sequence-too-long.md"),
    wrong: with(
        "  data: {sequence_length: 4096}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256, max_position_embeddings: 2048}\n",
    ),
    right: with(
        "  data: {sequence_length: 2048}\n  model:\n    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256, max_position_embeddings: 2048}\n",
    ),
    check: Check::Plan(surveyed),
};

const DATA_MISSING: Rule = Rule {
    id: "data-missing",
    severity: Severity::Error,
    summary: "the data that the recipe names are not on this machine",
    text: include_str!("texts/data-missing.md"),
    wrong: with("  data:\n    train: [{path: data/nowhere/train.jsonl}]\n"),
    right: with("  data:\n    train: [{path: synthetic}]\n"),
    check: Check::PlanWarning(surveyed),
};

const SYNTHETIC_LANGUAGE: Rule = Rule {
    id: "synthetic-language",
    severity: Severity::Error,
    summary: "the synthetic language is mostly noise, or is not the only source",
    text: include_str!("texts/synthetic-language.md"),
    wrong: with(
        "  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 64, branching: 64}}]\n",
    ),
    right: with(
        "  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 64, branching: 4}}]\n",
    ),
    check: Check::Plan(surveyed),
};

const SYNTHETIC_KEYS: Rule = Rule {
    id: "synthetic-keys",
    severity: Severity::Warning,
    summary: "a key has no effect with the synthetic language",
    text: include_str!("texts/synthetic-keys.md"),
    wrong: with("  data:\n    train: [{path: synthetic, weight: 0.5}]\n"),
    right: with("  data:\n    train: [{path: synthetic, synthetic: {samples: 50000}}]\n"),
    check: Check::Plan(synthetic_keys),
};

/// Keys without effect on a generated language.
const IGNORED: [&str; 13] = [
    "data.train.0.format",
    "data.train.0.split",
    "data.train.0.config",
    "data.train.0.columns",
    "data.train.0.weight",
    "data.evaluation",
    "data.packing",
    "data.packing_strategy",
    "data.answers_only",
    "data.completions_only",
    "data.extra_token",
    "tokenizer.path",
    "tokenizer.chat_template",
];

fn synthetic_keys(case: &Case<'_>, findings: &mut Findings<'_>) {
    let data = &case.spec().data;
    let generated = data.synthetic().is_some();
    let stated = |path: &&str| generated && case.recipe.span(path).is_some();
    for path in IGNORED.into_iter().filter(stated) {
        let (held_out, samples) = ("data.held_out", "data.train.0.synthetic.samples");
        let help = match path {
            "data.evaluation" => format!(
                "remove it; {} takes samples for evaluation",
                case.key(held_out)
            ),
            "data.train.0.weight" => {
                format!("remove it; {} states their number", case.key(samples))
            }
            _ => "remove it".to_owned(),
        };
        let message = format!("the synthetic language ignores {}", case.key(path));
        findings.at(&[path], message, help);
    }
    for (index, source) in data.train.iter().enumerate() {
        if source.path != SYNTHETIC && source.synthetic.is_some() {
            let path = format!("data.train.{index}.synthetic");
            let set = case.set(&format!("data.train.{index}.path"), SYNTHETIC);
            findings.at(
                &[&path],
                format!(
                    "{} has no effect: the source is `{}`",
                    case.key(&path),
                    source.path
                ),
                format!("remove it, or set {set}"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe, reported, wrote};
    use crate::recipe::Severity::{Error, Warning};
    use crate::recipe::schema::spec::{DataSource, Synthetic};

    #[test]
    fn a_missing_model_fails_a_launch_and_not_a_plan() {
        assert_eq!(reported("model-missing"), [vec![Warning], vec![Error]]);
    }

    #[test]
    fn an_inconsistent_shape_is_refused_for_every_trainer() {
        assert_eq!(reported("model-shape"), [vec![Error], vec![Error]]);
    }

    #[test]
    fn a_missing_tokenizer_fails_a_launch_and_not_a_plan() {
        assert_eq!(reported("tokenizer-missing"), [vec![Warning], vec![Error]]);
    }

    #[test]
    fn an_id_without_an_embedding_is_refused_for_every_trainer() {
        assert_eq!(reported("vocabulary-too-small"), [vec![Error], vec![Error]]);
    }

    #[test]
    fn a_sample_beyond_the_positions_is_refused_for_every_trainer() {
        assert_eq!(reported("sequence-too-long"), [vec![Error], vec![Error]]);
    }

    #[test]
    fn missing_data_fail_a_launch_and_not_a_plan() {
        assert_eq!(reported("data-missing"), [vec![Warning], vec![Error]]);
    }

    #[test]
    fn a_language_of_noise_is_refused_for_every_trainer() {
        assert_eq!(reported("synthetic-language"), [vec![Error], vec![Error]]);
    }

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
