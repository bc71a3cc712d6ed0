//! From a recipe and a world to a plan, or to all errors in them.

use super::batch_plan::Plan;
use super::draft::{self, Draft};
use super::request::PlanRequest;
use super::rules;
use super::runner::{AskedRunner, Runner};
use crate::recipe::syntax::diagnostic;
use crate::recipe::{Diagnostic, Recipe, Spec};

/// Why a recipe without an error has no plan.
pub(super) const NOT_ENOUGH: &str = "the recipe does not state enough for a plan";

/// A recipe in a world: its numbers, and what the rules find in them. As an error, they allow no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", self.summary())]
pub struct Examined {
    /// Every number that follows from the recipe, despite the errors.
    pub draft: Draft,
    /// Findings of the reader and the rules, in file order.
    pub diagnostics: Vec<Diagnostic>,
}

/// Plans a recipe, or refuses it with all reasons.
///
/// The plan depends only on its arguments: the same recipe and request give the same plan.
pub fn plan(recipe: &Recipe, request: &PlanRequest) -> Result<Plan, Box<Examined>> {
    examine(recipe, request).finish()
}

/// Derives the numbers of a recipe and runs every rule.
pub fn examine(recipe: &Recipe, request: &PlanRequest) -> Examined {
    #[cfg(test)]
    EXAMINED.with_borrow_mut(|worlds| worlds.push(request.gpus));
    let mut draft = Draft::new(recipe, request);
    let mut diagnostics = recipe.diagnostics.clone();
    diagnostics.extend(rules::check(recipe, request, &draft));
    diagnostic::in_file_order(&mut diagnostics);
    draft.facts.diagnostics = diagnostics
        .iter()
        .map(|diagnostic| diagnostic.locate(&recipe.sources))
        .collect();
    Examined { draft, diagnostics }
}

impl Examined {
    /// Whether a rule or the reader reports an error.
    pub fn has_errors(&self) -> bool {
        diagnostic::has_error(&self.diagnostics)
    }

    /// The plan, unless there is an error or a gap.
    pub fn finish(self) -> Result<Plan, Box<Examined>> {
        self.plan().ok_or_else(|| Box::new(self))
    }

    /// As [`Examined::finish`]; `None`: there is an error or a gap.
    pub fn plan(&self) -> Option<Plan> {
        self.draft.complete().filter(|_| !self.has_errors())
    }

    pub fn errors(&self) -> impl Iterator<Item = &Diagnostic> {
        self.diagnostics.iter().filter(|found| found.is_error())
    }

    /// The first error with the way out.
    fn summary(&self) -> String {
        let line = |first: &Diagnostic| format!("{} ({})", first.message, first.help);
        let first = diagnostic::first_error(&self.diagnostics, line);
        first.unwrap_or_else(|| NOT_ENOUGH.to_owned())
    }
}

#[cfg(test)]
thread_local! {
    static EXAMINED: std::cell::RefCell<Vec<u64>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// The worlds that this thread has examined, for tests that count them.
#[cfg(test)]
pub fn examined() -> Vec<u64> {
    EXAMINED.with_borrow(Vec::clone)
}

/// What the built-in trainer refuses in a plan for any runner: the first error that is not already one of the plan's
/// `findings`. `None`: nothing, or the runner is decided.
pub fn refused_by_built_in(
    recipe: &Recipe,
    request: &PlanRequest,
    findings: &[Diagnostic],
) -> Option<String> {
    let Runner::Any { device } = request.runner else {
        return None;
    };
    let built_in = PlanRequest {
        runner: Runner::of(&recipe.spec, AskedRunner::BuiltIn, device, None),
        ..request.clone()
    };
    let refusals = rules::check(recipe, &built_in, &Draft::new(recipe, &built_in));
    let is_new = |refusal: &Diagnostic| {
        refusal.is_error()
            && findings
                .iter()
                .all(|known| known.message != refusal.message)
    };
    refusals
        .into_iter()
        .find(is_new)
        .map(|refusal| refusal.message)
}

/// The world of a recipe when the request states none: the one that it was written for, else the smallest
/// that it allows.
pub fn default_world(spec: &Spec) -> u64 {
    let axes = draft::model_parallel(&spec.parallel).unwrap_or(1);
    spec.batch
        .gpus
        .unwrap_or_else(|| spec.elasticity.min.unwrap_or(1).max(axes))
}

#[cfg(test)]
mod tests;
