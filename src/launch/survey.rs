//! What a recipe names, looked at on this machine for the planner, which opens no files.

use std::path::Path;

use super::model::{self, Found};
use super::request::data_of;
use crate::batch::{Flaw, PlanRequest, Trainer};
use crate::recipe::Recipe;
use crate::train::data::{self, About};

/// The request with everything that can be told about the recipe's model and data without reading
/// the data. Relative paths start at `base`.
pub fn survey(recipe: &Recipe, base: &Path, request: PlanRequest) -> PlanRequest {
    look(recipe, base, request).0
}

/// The same, with the model that was found.
pub(super) fn look(recipe: &Recipe, base: &Path, request: PlanRequest) -> (PlanRequest, Found) {
    // A config of `accelerate launch` has neither, an option of a group not both.
    if recipe.part {
        return (request, Found::default());
    }
    let spec = &recipe.spec;
    // What another trainer may fetch for itself need not be here.
    let trainer = match spec.trainer.is_own() {
        true => Trainer::Any,
        false => request.trainer,
    };
    let key = recipe.keys();
    let mut model = model::find(spec, trainer, &key);
    let found = data::look(&data_of(recipe, &key, model.shape.as_ref(), base, base));
    let elsewhere = |on_hub: bool| on_hub && trainer == Trainer::Any;
    let found = found
        .into_iter()
        .filter(|finding| !elsewhere(finding.on_hub));
    let mut flaws = std::mem::take(&mut model.flaws);
    flaws.extend(found.map(|finding| {
        let (message, help) = finding.error.told();
        Flaw {
            rule: match finding.about {
                About::Data => "data-missing",
                About::Language => "synthetic-language",
                About::Tokenizer => "tokenizer-missing",
                About::Vocabulary => "vocabulary-too-small",
            },
            paths: finding.paths,
            message,
            help,
        }
    }));
    let request = PlanRequest {
        model_config: model.stored.clone(),
        flaws,
        ..request
    };
    (request, model)
}

#[cfg(test)]
mod tests;
