//! The rules: what a recipe must satisfy before anything is started, one file each.
//!
//! A rule is a value: its id, how serious it is, the page behind `evenkeel explain`, an example
//! that breaks it and one that does not (a test runs both), and a pure check. Checks look at the
//! recipe and at the [`Draft`] made from it, and never at each other.

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
mod own_program;
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

/// The rules that are checked here.
static OWN: &[&Rule] = &[
    &auto_find_shrinks_batch::RULE,
    &batch_divisible::RULE,
    &batch_too_large::RULE,
    &budget_missing::RULE,
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
    &own_program::RULE,
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

/// Every rule, in the order of their ids.
pub static RULES: LazyLock<Vec<&'static Rule>> = LazyLock::new(|| {
    let mut rules: Vec<&Rule> = OWN.iter().chain(reader::RULES).copied().collect();
    rules.sort_unstable_by_key(|rule| rule.id);
    rules
});

/// One rule.
pub struct Rule {
    /// Kebab case, the argument of `evenkeel explain`.
    pub id: &'static str,
    /// How serious its findings are at worst.
    pub severity: Severity,
    /// One line.
    pub summary: &'static str,
    /// What goes wrong otherwise.
    pub why: &'static str,
    /// What the upstream code does: file and revision.
    pub upstream: &'static str,
    /// Breaks the rule.
    pub wrong: Example,
    /// Says the same and does not.
    pub right: Example,
    /// Who checks it, and how.
    pub check: Check,
}

/// A recipe with the flags that it is planned with.
pub struct Example {
    /// What follows `evenkeel plan recipe.yaml`.
    pub flags: &'static str,
    /// The file.
    pub recipe: &'static str,
}

/// Who checks a rule.
pub enum Check {
    /// The planner, for every plan.
    Plan(fn(&Case<'_>, &mut Findings<'_>)),
    /// The planner, which warns: another trainer or another machine may run the plan. `launch`
    /// refuses.
    Foreseen(fn(&Case<'_>, &mut Findings<'_>)),
    /// The reader, before there is anything to plan.
    Reader,
    /// `launch`, since it is about the built-in trainer only.
    Trainer(fn(&Case<'_>, &mut Findings<'_>)),
}

/// What a rule looks at.
pub struct Case<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// The world asked for.
    pub request: &'a PlanRequest,
    /// What follows from both.
    pub draft: &'a Draft,
}

impl Case<'_> {
    fn spec(&self) -> &Spec {
        &self.recipe.spec
    }

    /// Who will run it.
    fn trainer(&self) -> Trainer {
        match self.spec().trainer.is_own() {
            true => Trainer::Own,
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

    /// Whether so many data-parallel ranks split the global batch exactly.
    fn is_feasible(&self, ranks: u64) -> bool {
        let axes = model_parallel(&self.spec().parallel);
        axes.is_some_and(|axes| {
            self.draft
                .outline
                .feasible_gpu_counts
                .contains(&(ranks * axes))
        })
    }

    /// `1 GPU`, `8 GPUs`, or as many processes.
    fn count(&self, count: u64) -> String {
        self.request.devices.count(count)
    }

    /// The feasible counts nearest to the one asked for, two on each side: `4, 8 or 16 GPUs`.
    fn feasible_near(&self) -> String {
        let counts = &self.draft.outline.feasible_gpu_counts;
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

    /// An override that sets a key, as it is typed on the command line, in backquotes.
    fn set(&self, path: &str, value: &str) -> String {
        format!("`{}={value}`", self.recipe.key(path))
    }
}

/// What a rule found.
pub struct Findings<'a> {
    rule: &'static Rule,
    /// How serious a plain finding is in this plan.
    severity: Severity,
    recipe: &'a Recipe,
    found: Vec<Diagnostic>,
}

impl Findings<'_> {
    /// A finding as serious as the rule, at the first of the paths that somebody wrote.
    fn at(&mut self, paths: &[&str], message: impl Into<String>, help: impl Into<String>) {
        self.add(self.severity, paths, message, help);
    }

    /// A finding that is less serious than the rule at its worst.
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

/// The check of every rule about files and engines, which nothing here knows: it reports what the
/// caller's survey found that belongs to the rule.
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

/// Everything that the rules have to say.
pub fn check(recipe: &Recipe, request: &PlanRequest, draft: &Draft) -> Vec<Diagnostic> {
    let case = Case {
        recipe,
        request,
        draft,
    };
    let rules = OWN.iter().copied();
    rules.flat_map(|rule| judge(rule, &case)).collect()
}

/// Whether another trainer will run it: the user's own, or the only one that can where a recipe names
/// neither a model nor data, since its script or the recipe beside it does.
fn is_for_another_trainer(case: &Case<'_>) -> bool {
    let spec = case.spec();
    match case.recipe.dialect {
        _ if case.trainer() == Trainer::Own => true,
        Dialect::Accelerate | Dialect::Deepspeed => true,
        Dialect::Transformers => spec.model.path.is_none() && spec.data.train.is_empty(),
        _ => false,
    }
}

/// What one rule has to say; nothing where it is not this plan's business.
fn judge(rule: &'static Rule, case: &Case<'_>) -> Vec<Diagnostic> {
    let launched = case.trainer() == Trainer::BuiltIn;
    let (check, severity) = match rule.check {
        Check::Plan(check) => (check, rule.severity),
        Check::Foreseen(check) if launched => (check, rule.severity),
        Check::Foreseen(_) if is_for_another_trainer(case) => return Vec::new(),
        Check::Foreseen(check) => (check, rule.severity.max(Severity::Warning)),
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
