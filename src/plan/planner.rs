//! From a recipe and a world to a plan, or to all errors in them.

use super::arithmetic::gcd;
use super::batch_plan::Plan;
use super::draft::{self, Draft, global_batch};
use super::request::PlanRequest;
use super::rules;
use super::runner::{AskedRunner, Runner};
use crate::recipe::schema::spec::Remainder;
use crate::recipe::syntax::diagnostic;
use crate::recipe::{Diagnostic, Recipe, Spec};

/// The result of checking a recipe in a world.
#[derive(Debug, Clone, PartialEq)]
pub struct Examined {
    /// Every number that follows from the recipe.
    pub draft: Draft,
    /// Findings of the reader and the rules, in file order.
    pub diagnostics: Vec<Diagnostic>,
}

/// A recipe that cannot run in the requested world, with all reasons.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", self.summary())]
pub struct Refused {
    /// The numbers that follow despite the errors.
    pub draft: Box<Draft>,
    /// At least one error, and all other findings, in file order.
    pub diagnostics: Vec<Diagnostic>,
}

impl Refused {
    fn summary(&self) -> String {
        let line = |first: &Diagnostic| format!("{} ({})", first.message, first.help);
        let first = diagnostic::first_error(&self.diagnostics, line);
        first.unwrap_or_else(|| "the recipe does not state enough for a plan".to_owned())
    }
}

/// Plans a recipe, or refuses it with all reasons.
///
/// The plan depends only on its arguments: the same recipe and request give the same plan.
pub fn plan(recipe: &Recipe, request: &PlanRequest) -> Result<Plan, Refused> {
    examine(recipe, request).finish()
}

/// Whether the requested world may have a split of the batch. It costs one division, where [`plan`] derives
/// every number and runs every rule: if this is false, `plan` refuses the world.
pub fn may_split(recipe: &Recipe, request: &PlanRequest) -> bool {
    let spec = &recipe.spec;
    let Some(ranks) = draft::ranks(request.gpus, &spec.parallel) else {
        return false;
    };
    // DeepSpeed's elasticity derives a batch for each world.
    let Some(global) = request.global_batch_size.or_else(|| global_batch(spec)) else {
        return true;
    };
    let current = request.current_batch.filter(|&batch| batch > 0);
    let current = current.unwrap_or(global);
    match spec.batch.remainder {
        Remainder::Exact => gcd(global, current).is_multiple_of(ranks),
        Remainder::Uneven => ranks <= global.min(current),
    }
}

/// Derives the numbers of a recipe and runs every rule.
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
    /// Whether a rule or the reader reports an error.
    pub fn has_errors(&self) -> bool {
        diagnostic::has_error(&self.diagnostics)
    }

    /// The plan, unless there is an error or a gap.
    pub fn finish(self) -> Result<Plan, Refused> {
        let refused = self.has_errors();
        let Examined { draft, diagnostics } = self;
        let plan = if refused {
            Err(Box::new(draft))
        } else {
            draft.complete()
        };
        plan.map_err(|draft| Refused { draft, diagnostics })
    }
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
