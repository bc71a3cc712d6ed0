//! Checks the recipe's model and data on this machine for the planner, which opens no files.

use std::path::Path;

use super::model::{self, Found};
use super::request::data_of;
use crate::batch::{Flaw, PlanRequest, Trainer};
use crate::recipe::Recipe;
use crate::train::data::{self, About};

/// Adds to the request all facts about the recipe's model and data that need no read of the data.
/// Relative paths start at `base`.
pub fn survey(recipe: &Recipe, base: &Path, request: PlanRequest) -> PlanRequest {
    survey_with_model(recipe, base, request).0
}

/// As [`survey`], also returning the model.
pub(super) fn survey_with_model(
    recipe: &Recipe,
    base: &Path,
    request: PlanRequest,
) -> (PlanRequest, Found) {
    // An `accelerate launch` config has neither; an option group lacks one of them.
    if recipe.part {
        return (request, Found::default());
    }
    let spec = &recipe.spec;
    // An external trainer may download what is absent here.
    let trainer = match spec.trainer.is_own() {
        true => Trainer::Any,
        false => request.trainer,
    };
    let key = recipe.keys();
    let mut model = model::find(spec, trainer, &key);
    let found = data::look(&data_of(recipe, &key, model.shape.as_ref(), base, base));
    let may_download = |on_hub: bool| on_hub && trainer == Trainer::Any;
    let found = found
        .into_iter()
        .filter(|finding| !may_download(finding.on_hub));
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
