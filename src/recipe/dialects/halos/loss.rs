//! The objective of a loss: by its trainer, or else by its data loader.

use crate::recipe::dialects::hydra::Values;
use crate::recipe::dialects::preference::taken_as;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Tree;

/// Upstream's trainers, with the objective that each is planned as.
const TRAINERS: &[(&str, &str)] = &[
    ("SFTTrainer", "sft"),
    ("DPOTrainer", "dpo"),
    ("SimPOTrainer", "simpo"),
    ("ORPOTrainer", "orpo"),
    ("KTOTrainer", "kto"),
    ("GRPOTrainer", "grpo"),
    ("PPOTrainer", "ppo"),
    ("BradleyTerryTrainer", "reward"),
];

/// Data loaders, with an objective whose batches they make.
const LOADERS: &[(&str, &str)] = &[
    ("SFTDataLoader", "sft"),
    ("ConditionalSFTDataLoader", "sft"),
    ("PairedPreferenceDataLoader", "dpo"),
    ("UnpairedPreferenceDataLoader", "kto"),
    ("ScoreDataLoader", "kto"),
    ("HalfPrefDataLoader", "kto"),
    ("GroupUnpairedPreferenceDataLoader", "grpo"),
];

/// Sets the objective. Returns whether it is plain supervised fine-tuning, which has a different learning
/// rate schedule.
pub(super) fn objective(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) -> bool {
    let trainer = values.text("loss.trainer", reading);
    let loader = values.text("loss.dataloader", reading);
    let of = |table: &[(&str, &'static str)], word: &str| {
        let found = table.iter().find(|(known, _)| *known == word);
        found.map(|(_, objective)| *objective)
    };
    let by_trainer = trainer
        .as_ref()
        .and_then(|given| of(TRAINERS, &given.value));
    let by_loader = loader.as_ref().and_then(|given| of(LOADERS, &given.value));
    let conditional = loader
        .as_ref()
        .filter(|l| l.value == "ConditionalSFTDataLoader");
    if let Some(loader) = conditional {
        taken_as(loader, "sft", reading);
    }
    match (&trainer, by_trainer, by_loader) {
        (Some(given), Some(objective), _) => {
            tree.text("objective", &given.with(objective.to_owned()));
        }
        (Some(given), None, Some(objective)) => {
            taken_as(given, objective, reading);
            tree.text("objective", &given.with(objective.to_owned()));
        }
        (Some(given), None, None) => {
            reading.warning(
                "objective-assumed",
                Some(given.span),
                format!(
                    "`loss.trainer` is `{}`, which upstream does not have: assumed to be dpo",
                    given.value
                ),
                "give `evenkeel.objective=…`, or a `loss.dataloader` of upstream",
            );
            tree.default("objective", "dpo");
        }
        // No loss is chosen yet, which is reported elsewhere.
        (None, ..) => tree.default("objective", by_loader.unwrap_or("dpo")),
    }
    loader.is_some_and(|loader| loader.value == "SFTDataLoader")
}
