//! The losses over preferences of HALOs, and how it makes rows.
//!
//! Source: HALOs 4831988, `train/trainers.py` (`DPOTrainer` to `KTOTrainer`), `train/dataloader.py`
//! (`tokenize_batch_element`, `UnpairedPreferenceDataLoader`), `train/data.py` (`get_feedback`).

use crate::recipe::dialects::hydra::Values;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;
use crate::recipe::schema::untrained::{Untrained, UntrainedReason};

/// Trainers and data loaders that the built-in trainer has, with the loss of the tree that is instead of another.
const TRAINED: [(&str, &[&str]); 2] = [
    (
        "loss.trainer",
        &[
            "DPOTrainer",
            "CDPOTrainer",
            "IPOTrainer",
            "SimPOTrainer",
            "KTOTrainer",
        ],
    ),
    (
        "loss.dataloader",
        &["PairedPreferenceDataLoader", "UnpairedPreferenceDataLoader"],
    ),
];

/// Translates the loss and the rules for rows.
pub(super) fn translate(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
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
    tree.default("data.rows.cut", "turns");
    let prompt = values.int("model.max_prompt_length", reading);
    tree.plain_if("data.rows.max_prompt_length", prompt);
}

/// Finds a trainer or a data loader that is planned as another one.
pub(super) fn find(values: &Values<'_>, reading: &mut Reading) {
    for (key, trained) in TRAINED {
        let Some(node) = values.node(key) else {
            continue;
        };
        let name = node.text().unwrap_or_default();
        if !trained.contains(&name) {
            reading.untrained.push(Untrained {
                key: key.to_owned(),
                value: name.to_owned(),
                span: node.span,
                reason: UntrainedReason::Unsupported(Some("loss=dpo".to_owned())),
            });
        }
    }
}
