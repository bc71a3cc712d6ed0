//! From a recipe and a world to a plan, or to all errors in them.

use super::batch_plan::Plan;
use super::draft::{self, Draft};
use super::request::PlanRequest;
use super::rules;
use super::runner::{AskedRunner, Runner};
use crate::recipe::syntax::diagnostic;
use crate::recipe::{Diagnostic, Recipe, Spec};

/// Plans a recipe, or refuses it with all reasons.
///
/// The plan depends only on its arguments: the same recipe and request give the same plan.
pub fn plan(recipe: &Recipe, request: &PlanRequest) -> Result<Plan, Box<Draft>> {
    examine(recipe, request).finish()
}

/// Derives the numbers of a recipe and runs every rule.
pub fn examine(recipe: &Recipe, request: &PlanRequest) -> Draft {
    #[cfg(test)]
    EXAMINED.with_borrow_mut(|worlds| worlds.push(request.gpus));
    let draft = Draft::new(recipe, request);
    let mut findings = recipe.diagnostics.clone();
    findings.extend(rules::check(recipe, request, &draft));
    diagnostic::in_file_order(&mut findings);
    draft.judged(recipe, findings)
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
