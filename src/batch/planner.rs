//! From a recipe and a world to a plan, or to everything that is wrong with them.

use super::draft::Draft;
use super::plan::Plan;
use super::request::PlanRequest;
use super::rules;
use crate::recipe::{Diagnostic, Recipe, Severity, Spec, diagnostic};

/// What was found out about a recipe in a world.
#[derive(Debug, Clone, PartialEq)]
pub struct Examined {
    /// Everything that follows from the recipe.
    pub draft: Draft,
    /// What the reader and the rules have to say, in file order.
    pub diagnostics: Vec<Diagnostic>,
}

/// A recipe that may not be run in the world asked for, with all the reasons.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", self.summary())]
pub struct Refused {
    /// What can be said nevertheless.
    pub draft: Box<Draft>,
    /// At least one error, and whatever else was noticed, in file order.
    pub diagnostics: Vec<Diagnostic>,
}

impl Refused {
    fn summary(&self) -> String {
        let told = |first: &Diagnostic| format!("{} ({})", first.message, first.help);
        diagnostic::first_error(&self.diagnostics, told)
            .unwrap_or_else(|| "the recipe does not say enough for a plan".to_owned())
    }
}

/// Plans a recipe, or refuses it with every reason at once.
///
/// The plan depends on nothing but its arguments: the same recipe and request give the same plan.
pub fn plan(recipe: &Recipe, request: &PlanRequest) -> Result<Plan, Refused> {
    examine(recipe, request).finish()
}

/// Works out what can be said about a recipe, and asks every rule about it.
pub fn examine(recipe: &Recipe, request: &PlanRequest) -> Examined {
    let mut draft = Draft::new(recipe, request);
    let mut diagnostics = recipe.diagnostics.clone();
    diagnostics.extend(rules::check(recipe, request, &draft));
    diagnostic::in_file_order(&mut diagnostics);
    draft.outline.diagnostics = diagnostics
        .iter()
        .map(|diagnostic| diagnostic.locate(&recipe.sources))
        .collect();
    Examined { draft, diagnostics }
}

impl Examined {
    /// Whether a rule or the reader says no.
    pub fn has_errors(&self) -> bool {
        self.diagnostics
            .iter()
            .any(|d| d.severity == Severity::Error)
    }

    /// The plan, unless something is wrong or missing.
    pub fn finish(self) -> Result<Plan, Refused> {
        let refused = self.has_errors();
        let Examined { draft, diagnostics } = self;
        if refused {
            let draft = Box::new(draft);
            return Err(Refused { draft, diagnostics });
        }
        draft
            .complete()
            .map_err(|draft| Refused { draft, diagnostics })
    }
}

/// The world of a recipe that nobody gave one: the one that it was written for, else the smallest
/// that it allows.
pub fn default_world(spec: &Spec) -> u64 {
    let axes = super::draft::model_parallel(&spec.parallel).unwrap_or(1);
    spec.batch
        .gpus
        .unwrap_or_else(|| spec.elasticity.min.unwrap_or(1).max(axes))
}

#[cfg(test)]
mod tests;
