//! The losses of HALOs, and how it makes rows.
//!
//! Source: HALOs 4831988, `train/trainers.py` (`DPOTrainer` to `KTOTrainer`), `train/dataloader.py`
//! (`tokenize_batch_element`, `UnpairedPreferenceDataLoader`), `train/data.py` (`get_feedback`); 61b9ee6, `trainers.py`,
//! `dataloader.py`.

use super::version::Version;
use crate::recipe::dialects::hydra::Values;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::Tree;
use crate::recipe::schema::untrained::{Untrained, UntrainedReason};
use crate::recipe::syntax::node::Node;

/// Trainers that the built-in trainer has.
const TRAINERS: &[&str] = &[
    "DPOTrainer",
    "CDPOTrainer",
    "IPOTrainer",
    "SimPOTrainer",
    "KTOTrainer",
];

/// Those of the legacy tree, of losses over preferences.
const LEGACY_TRAINERS: &[&str] = &["DPOTrainer", "CDPOTrainer", "ORPOTrainer", "KTOTrainer"];

/// The trainer and the data loader of the legacy tree for supervised fine-tuning.
const LEGACY_SFT: (&[&str], &[&str]) = (&["SFTTrainer"], &["SFTDataLoader"]);

/// Data loaders that the built-in trainer has.
const LOADERS: &[&str] = &["PairedPreferenceDataLoader", "UnpairedPreferenceDataLoader"];

/// Data sets of the legacy tree of which the start of a long prompt is kept.
const KEEP_START: &[&str] = &["shp", "ultrabin"];

/// Translates the loss and the rules for rows.
pub(super) fn translate(
    values: &Values<'_>,
    version: Version,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let trainer = values.text("loss.trainer", reading);
    let trainer = trainer.map(|given| given.value).unwrap_or_default();
    let mut put = |path: &str, key: &str, tree: &mut Tree| {
        let given = values.float(key, reading);
        tree.plain_if(&format!("preference.{path}"), given);
    };
    match trainer.as_str() {
        "IPOTrainer" => {
            tree.default("preference.loss", "ipo");
            tree.default("preference.by_token", true);
            put("beta", "loss.tau", tree);
        }
        "ORPOTrainer" => {
            tree.default("preference.likelihood_by_completion", true);
            put("beta", "loss.OR_scale", tree);
        }
        _ => put("beta", "loss.beta", tree),
    }
    match trainer.as_str() {
        "CDPOTrainer" => put("label_smoothing", "loss.epsilon", tree),
        "SimPOTrainer" => put("target_margin", "loss.gamma_beta_ratio", tree),
        "KTOTrainer" => {
            put("desirable_weight", "loss.desirable_weight", tree);
            put("undesirable_weight", "loss.undesirable_weight", tree);
            tree.default("preference.kl_completions", "next");
        }
        _ => {}
    }
    if version == Version::Legacy {
        decoded_rows(values, tree, reading);
    } else {
        tree.default("data.rows.cut", "turns");
        let prompt = values.int("model.max_prompt_length", reading);
        tree.plain_if("data.rows.max_prompt_length", prompt);
    }
}

/// Translates the loss of supervised fine-tuning and its rules for rows.
pub(super) fn translate_supervised(
    values: &Values<'_>,
    version: Version,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    if version == Version::Legacy {
        // `SFTTrainer` adds the log-probabilities of an answer up.
        tree.default("likelihood.mean", "samples");
        decoded_rows(values, tree, reading);
    } else {
        let prompt = values.int("model.max_prompt_length", reading);
        tree.plain_if("data.max_prompt_length", prompt);
    }
}

/// The rules for rows of the legacy tree.
fn decoded_rows(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    tree.default("data.rows.tokens", "decoded");
    for (mark, key) in [
        ("user", "human_prefix"),
        ("user_end", "human_suffix"),
        ("assistant", "assistant_prefix"),
        ("assistant_end", "assistant_suffix"),
    ] {
        let given = values.text(key, reading);
        tree.text_if(&format!("data.marks.{mark}"), given);
    }
    let names = values.texts("datasets", reading);
    if names.iter().all(|name| keeps_start(&name.value)) {
        tree.default("data.rows.prompt_keeps", "start");
    }
    let prompt = values.int("model.max_prompt_length", reading);
    tree.plain_if("data.rows.max_prompt_length", prompt);
}

fn keeps_start(data_set: &str) -> bool {
    KEEP_START.contains(&data_set)
}

/// Finds a trainer or a data loader that is planned as another one, and data sets of which other parts of prompts are kept.
pub(super) fn find(
    values: &Values<'_>,
    version: Version,
    objective: Objective,
    reading: &mut Reading,
) {
    let is_legacy = version == Version::Legacy;
    let is_supervised = objective.is_likelihood();
    let (trainers, loaders, instead) = match (is_legacy, is_supervised) {
        (false, _) => (TRAINERS, LOADERS, "loss=dpo"),
        (true, false) => (LEGACY_TRAINERS, LOADERS, "loss=dpo"),
        (true, true) => (LEGACY_SFT.0, LEGACY_SFT.1, "loss=sft"),
    };
    let mut refuse = |key: &str, node: &Node, instead: Option<&str>| {
        reading.untrained.push(Untrained {
            key: key.to_owned(),
            value: node.shown().to_owned(),
            span: node.span,
            reason: UntrainedReason::Unsupported(instead.map(str::to_owned)),
        });
    };
    for (key, trained) in [("loss.trainer", trainers), ("loss.dataloader", loaders)] {
        let Some(node) = values.node(key) else {
            continue;
        };
        // Later trees refuse what differs in supervised fine-tuning by other keys.
        let is_asked = is_legacy || !is_supervised;
        if is_asked && !trained.contains(&node.text().unwrap_or_default()) {
            refuse(key, node, Some(instead));
        }
    }
    let names = values.texts("datasets", &mut Reading::default());
    let start = names.iter().filter(|name| keeps_start(&name.value)).count();
    if let Some(node) = values.node("datasets")
        && is_legacy
        && start > 0
        && start < names.len()
    {
        refuse("datasets", node, None);
    }
}
