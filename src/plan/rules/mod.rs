//! The rules that a recipe must satisfy before a run starts, one file each.
//!
//! A rule is a value: its id, its severity, the page that `evenkeel explain` prints, an example
//! that breaks it and one that satisfies it (a test runs both), and a pure check. Checks read the
//! recipe and the [`Draft`] made from it, and never each other.

mod page;

/// A native recipe whose `spec` is the text.
macro_rules! native {
    ($spec:literal) => {
        concat!(
            "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n",
            $spec
        )
    };
}

mod auto_find_shrinks_batch;
mod batch_divisible;
mod batch_too_large;
mod budget_missing;
mod checkpoint_portable;
mod data_missing;
mod dataset_smaller_than_batch;
mod dataset_truncated;
mod deepspeed_batch_triple;
mod deepspeed_elastic_batch;
mod effective_batch_floored;
mod elasticity_bounds;
mod eval_batch_divisible;
mod eval_data_missing;
mod eval_interval_multiple;
mod external_trainer;
mod fsdp_batch_min;
mod generation_batch_divisible;
mod global_batch_conflict;
mod global_batch_constant;
mod global_batch_unknown;
mod kto_batch_min;
mod max_batch_below_base;
mod mini_batch_divisible;
mod model_missing;
mod model_needs_sharding;
mod model_shape;
mod norm_test_never_grows;
mod one_group;
mod one_machine;
mod optimizer_state_lost;
mod paper_eta_out_of_reach;
mod parallelism_product;
mod rank_memory;
mod reader;
mod schedule_empty;
mod schedule_quantum;
mod sequence_too_long;
mod sharded_workers;
mod stage_shares;
mod start_batch_estimate;
mod synthetic_keys;
mod synthetic_language;
mod tokenizer_missing;
mod trainer_model;
mod trainer_numerics;
mod trainer_objective;
mod trainer_parallelism;
mod trainer_weights;
mod uneven_dealing;
mod unpaired_batch_min;
mod vocabulary_too_small;
mod warmup_exceeds_budget;

use std::sync::LazyLock;

use super::draft::{Draft, model_parallel};
use super::horizon::Horizon;
use super::memory::Device;
use super::request::{PlanRequest, Trainer};
use crate::recipe::{Diagnostic, Dialect, Recipe, Severity, Spec};

pub use page::page;

/// Rules that the planner checks.
static PLANNER_RULES: &[&Rule] = &[
    &auto_find_shrinks_batch::RULE,
    &batch_divisible::RULE,
    &batch_too_large::RULE,
    &budget_missing::RULE,
    &checkpoint_portable::RULE,
    &data_missing::RULE,
    &dataset_smaller_than_batch::RULE,
    &dataset_truncated::RULE,
    &deepspeed_batch_triple::RULE,
    &deepspeed_elastic_batch::RULE,
    &effective_batch_floored::RULE,
    &elasticity_bounds::RULE,
    &eval_batch_divisible::RULE,
    &eval_data_missing::RULE,
    &eval_interval_multiple::RULE,
    &external_trainer::RULE,
    &fsdp_batch_min::RULE,
    &generation_batch_divisible::RULE,
    &global_batch_conflict::RULE,
    &global_batch_constant::RULE,
    &global_batch_unknown::RULE,
    &kto_batch_min::RULE,
    &max_batch_below_base::RULE,
    &mini_batch_divisible::RULE,
    &model_missing::RULE,
    &model_needs_sharding::RULE,
    &model_shape::RULE,
    &norm_test_never_grows::RULE,
    &one_group::RULE,
    &one_machine::RULE,
    &optimizer_state_lost::RULE,
    &paper_eta_out_of_reach::RULE,
    &parallelism_product::RULE,
    &rank_memory::RULE,
    &schedule_empty::RULE,
    &schedule_quantum::RULE,
    &sequence_too_long::RULE,
    &sharded_workers::RULE,
    &stage_shares::RULE,
    &start_batch_estimate::RULE,
    &synthetic_keys::RULE,
    &synthetic_language::RULE,
    &tokenizer_missing::RULE,
    &trainer_model::RULE,
    &trainer_numerics::RULE,
    &trainer_objective::RULE,
    &trainer_parallelism::RULE,
    &trainer_weights::RULE,
    &uneven_dealing::RULE,
    &unpaired_batch_min::RULE,
    &vocabulary_too_small::RULE,
    &warmup_exceeds_budget::RULE,
];

/// Every rule, ordered by id.
pub static RULES: LazyLock<Vec<&'static Rule>> = LazyLock::new(|| {
    let mut rules: Vec<&Rule> = PLANNER_RULES.iter().chain(reader::RULES).copied().collect();
    rules.sort_unstable_by_key(|rule| rule.id);
    rules
});

/// A rule, its documentation and its check.
pub struct Rule {
    /// Kebab case, the argument of `evenkeel explain`.
    pub id: &'static str,
    /// The worst severity of its findings.
    pub severity: Severity,
    /// One line, for lists and pages.
    pub summary: &'static str,
    /// The consequence of breaking it.
    pub why: &'static str,
    /// The upstream behaviour, with file and revision.
    pub upstream: &'static str,
    /// A recipe that breaks the rule.
    pub wrong: Example,
    /// The same recipe, corrected.
    pub right: Example,
    /// When it is checked, and by which function.
    pub check: Check,
}

/// A recipe, with the flags to plan it.
pub struct Example {
    /// Arguments after `evenkeel plan recipe.yaml`.
    pub flags: &'static str,
    /// The text of the recipe's file.
    pub recipe: &'static str,
}

/// When a rule is checked.
pub enum Check {
    /// The planner, for every plan.
    Plan(fn(&Case<'_>, &mut Findings<'_>)),
    /// The planner, as a warning, because another trainer or another machine may run the plan. `launch`
    /// refuses.
    PlanWarning(fn(&Case<'_>, &mut Findings<'_>)),
    /// The reader, before planning.
    Reader,
    /// `launch`, because the rule concerns only the built-in trainer.
    Trainer(fn(&Case<'_>, &mut Findings<'_>)),
}

/// The input of a check.
pub struct Case<'a> {
    /// The recipe, with the position of every value.
    pub recipe: &'a Recipe,
    /// The requested world, with its limits.
    pub request: &'a PlanRequest,
    /// The draft made from recipe and request.
    pub draft: &'a Draft,
}

impl Case<'_> {
    fn spec(&self) -> &Spec {
        &self.recipe.spec
    }

    /// The trainer that will run the plan.
    fn trainer(&self) -> Trainer {
        match self.spec().trainer.is_external() {
            true => Trainer::External,
            false => self.request.trainer,
        }
    }

    /// The devices' memory, when it and the model's shape are known.
    fn memory(&self) -> Option<Device<'_>> {
        Device::of(self.spec(), self.request)
    }

    /// Samples of the data, the lengths that follow and the global batch, when they are known.
    fn known_lengths(&self) -> Option<(u64, &Horizon, u64)> {
        let draft = self.draft;
        Some((
            draft.data_samples?,
            draft.horizon.as_ref()?,
            draft.global_batch_size?,
        ))
    }

    /// Whether this number of data-parallel ranks splits the global batch exactly.
    fn is_feasible(&self, ranks: u64) -> bool {
        let axes = model_parallel(&self.spec().parallel);
        axes.is_some_and(|axes| {
            self.draft
                .outline
                .feasible_gpu_counts
                .contains(&(ranks * axes))
        })
    }

    /// The count with its unit: `1 GPU`, `8 GPUs`, or processes.
    fn count(&self, count: u64) -> String {
        self.request.devices.count(count)
    }

    /// The feasible counts within the elasticity bounds nearest to the requested one, two on each side:
    /// `4, 8 or 16 GPUs`.
    fn feasible_near(&self) -> String {
        let elasticity = &self.spec().elasticity;
        let allowed = elasticity.min.unwrap_or(1)..=elasticity.max.unwrap_or(u64::MAX);
        let counts = self.draft.outline.feasible_gpu_counts.iter().copied();
        let counts: Vec<u64> = counts.filter(|count| allowed.contains(count)).collect();
        let above = counts.partition_point(|&count| count < self.request.gpus);
        let near = &counts[above.saturating_sub(2)..(above + 2).min(counts.len())];
        match near {
            [] => "another global batch".to_owned(),
            [one] => self.count(*one),
            [some @ .., last] => {
                let words: Vec<String> = some.iter().map(u64::to_string).collect();
                format!("{} or {}", words.join(", "), self.count(*last))
            }
        }
    }

    /// A key as the user's dialect spells it, in backquotes.
    fn key(&self, path: &str) -> String {
        format!("`{}`", self.recipe.key(path))
    }

    /// An override that sets a key, as on the command line, in backquotes.
    fn set(&self, path: &str, value: &str) -> String {
        format!("`{}={value}`", self.recipe.key(path))
    }
}

/// The findings of a rule.
pub struct Findings<'a> {
    rule: &'static Rule,
    /// How serious a plain finding is in this plan.
    severity: Severity,
    recipe: &'a Recipe,
    found: Vec<Diagnostic>,
}

impl Findings<'_> {
    /// Adds a finding of the rule's severity, at the first of the paths that the recipe contains.
    fn at(&mut self, paths: &[&str], message: impl Into<String>, help: impl Into<String>) {
        self.add(self.severity, paths, message, help);
    }

    /// Adds a finding below the rule's worst severity.
    fn add(
        &mut self,
        severity: Severity,
        paths: &[&str],
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        self.found.push(Diagnostic {
            rule: self.rule.id.to_owned(),
            severity,
            message: message.into(),
            help: help.into(),
            span: paths.iter().find_map(|path| self.recipe.span(path)),
        });
    }
}

/// The check of rules about files and engines, which the planner cannot examine: reports the findings of
/// the caller's survey for the rule.
fn surveyed(case: &Case<'_>, findings: &mut Findings<'_>) {
    let rule = findings.rule.id;
    for flaw in case.request.flaws.iter().filter(|flaw| flaw.rule == rule) {
        let paths: Vec<&str> = flaw.paths.iter().map(String::as_str).collect();
        findings.at(&paths, flaw.message.as_str(), flaw.help.as_str());
    }
}

/// The rule with an id.
pub fn find(id: &str) -> Option<&'static Rule> {
    RULES.iter().copied().find(|rule| rule.id == id)
}

/// The findings of all rules.
pub fn check(recipe: &Recipe, request: &PlanRequest, draft: &Draft) -> Vec<Diagnostic> {
    let case = Case {
        recipe,
        request,
        draft,
    };
    let rules = PLANNER_RULES.iter().copied();
    rules.flat_map(|rule| judge(rule, &case)).collect()
}

/// Whether another trainer will run the plan: an external trainer, or the only possible one if the recipe
/// names neither a model nor data, because its script or another recipe does.
fn is_for_another_trainer(case: &Case<'_>) -> bool {
    let spec = case.spec();
    match case.recipe.dialect {
        _ if case.trainer() == Trainer::External => true,
        Dialect::Accelerate | Dialect::Deepspeed => true,
        Dialect::Transformers => spec.model.path.is_none() && spec.data.train.is_empty(),
        _ => false,
    }
}

/// The findings of one rule; empty if the rule does not apply to the plan.
fn judge(rule: &'static Rule, case: &Case<'_>) -> Vec<Diagnostic> {
    let launched = case.trainer() == Trainer::BuiltIn;
    let (check, severity) = match rule.check {
        Check::Plan(check) => (check, rule.severity),
        Check::PlanWarning(check) if launched => (check, rule.severity),
        Check::PlanWarning(_) if is_for_another_trainer(case) => return Vec::new(),
        Check::PlanWarning(check) => (check, rule.severity.max(Severity::Warning)),
        Check::Trainer(check) if launched => (check, rule.severity),
        Check::Trainer(_) | Check::Reader => return Vec::new(),
    };
    let mut findings = Findings {
        rule,
        severity,
        recipe: case.recipe,
        found: Vec::new(),
    };
    check(case, &mut findings);
    findings.found
}

#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;
