//! The rules that a recipe must satisfy before a run starts.
//!
//! A rule is a value: its id, its severity, the page that `evenkeel explain` prints, an example
//! that breaks it and one that satisfies it (a test runs both), and a pure check. Checks read the
//! recipe and the [`Draft`] made from it, and never each other.

mod batch;
mod built_in;
mod deepspeed;
mod external;
mod inputs;
mod lengths;
mod memory;
mod objective;
mod page;
mod reader;
mod schedule;
mod world;

use std::collections::HashSet;
use std::sync::LazyLock;

use super::draft::{Draft, model_parallel};
use super::memory::Memory;
use super::request::PlanRequest;
use super::split::Split;
use crate::recipe::schema::spec::Remainder;
use crate::recipe::{Diagnostic, Dialect, Next, Recipe, Severity, Span, Spec};

pub use page::page;

/// Every rule, ordered by id.
pub static RULES: LazyLock<Vec<&'static Rule>> = LazyLock::new(|| {
    let mut rules = [
        batch::RULES,
        built_in::RULES,
        deepspeed::RULES,
        external::RULES,
        inputs::RULES,
        lengths::RULES,
        memory::RULES,
        objective::RULES,
        reader::RULES,
        schedule::RULES,
        world::RULES,
    ]
    .concat();
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
    /// `texts/ID.md`: the consequence of breaking it, and under [`UPSTREAM`] what upstream does, with file and revision.
    text: &'static str,
    /// A recipe that breaks the rule.
    pub wrong: Example,
    /// The same recipe, corrected.
    pub right: Example,
    /// When it is checked, and by which function.
    pub check: Check,
}

/// The heading between the two parts of a rule's text.
const UPSTREAM: &str = "\n## Upstream\n\n";

impl Rule {
    /// The consequence of breaking it, a line for each paragraph.
    pub fn why(&self) -> String {
        let (why, _) = self.parts();
        let paragraphs = why.split("\n\n").map(|lines| lines.replace('\n', " "));
        paragraphs.collect::<Vec<String>>().join("\n\n")
    }

    /// The upstream behaviour, with file and revision.
    pub fn upstream(&self) -> &'static str {
        self.parts().1
    }

    fn parts(&self) -> (&'static str, &'static str) {
        let parts = self.text.split_once(UPSTREAM);
        parts.unwrap_or((self.text, ""))
    }
}

/// A recipe, with the flags to plan it.
pub struct Example {
    /// Arguments after `evenkeel plan recipe.yaml`.
    pub flags: &'static str,
    /// Parts of the recipe's text: what several examples share, and what is special.
    parts: [&'static str; 3],
}

impl Example {
    /// The text of the recipe's file.
    pub fn recipe(&self) -> String {
        self.parts.concat()
    }

    /// The example with these lines in addition.
    const fn and(self, more: &'static str) -> Example {
        let [head, middle, _] = self.parts;
        let parts = [head, middle, more];
        Example { parts, ..self }
    }
}

/// An example with this whole text.
const fn file(flags: &'static str, text: &'static str) -> Example {
    let parts = [text, "", ""];
    Example { flags, parts }
}

/// A native recipe with these keys of `spec`.
const fn native(flags: &'static str, spec: &'static str) -> Example {
    let head = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n";
    let parts = [head, spec, ""];
    Example { flags, parts }
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
    /// The planner, where the user's program runs the plan.
    External(fn(&Case<'_>, &mut Findings<'_>)),
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

    /// The recipe's memory and that of a device, bytes, when both are known.
    fn memory(&self) -> Option<(Memory<'_>, u64)> {
        let available = self.request.device_memory?;
        Some((
            Memory::of(self.spec(), self.recipe.dialect, self.request)?,
            available,
        ))
    }

    /// The split, if it is uneven.
    fn uneven(&self) -> Option<Split> {
        let uneven = |split: &Split| split.remainder == Remainder::Uneven;
        self.draft.split.filter(uneven)
    }

    /// Whether this number of data-parallel ranks splits the global batch exactly.
    fn is_feasible(&self, ranks: u64) -> bool {
        let axes = model_parallel(&self.spec().parallel);
        axes.is_some_and(|axes| {
            self.draft
                .facts
                .feasible_gpu_counts
                .contains(&(ranks * axes))
        })
    }

    /// The count with its unit: `1 GPU`, `8 GPUs`, or processes.
    fn count(&self, count: u64) -> String {
        self.request.count(count)
    }

    /// The feasible counts within the elasticity bounds nearest to the requested one, two on each side:
    /// `4, 8 or 16 GPUs`.
    fn feasible_near(&self) -> String {
        let elasticity = &self.spec().elasticity;
        let allowed = elasticity.min.unwrap_or(1)..=elasticity.max.unwrap_or(u64::MAX);
        let counts = self.draft.facts.feasible_gpu_counts.iter().copied();
        let counts: Vec<u64> = counts.filter(|count| allowed.contains(count)).collect();
        match nearest(&counts, self.request.gpus).as_str() {
            "" => "another global batch".to_owned(),
            "1" => self.count(1),
            near => format!("{near} {}", self.request.runner.device().noun(2)),
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
        self.add(self.severity, paths, message.into(), help.into());
    }

    /// Adds a warning of a rule that also reports errors.
    fn warn(&mut self, paths: &[&str], message: impl Into<String>, help: impl Into<String>) {
        self.add(Severity::Warning, paths, message.into(), help.into());
    }

    /// Adds a note of a rule that also reports errors or warnings.
    fn note(&mut self, paths: &[&str], message: impl Into<String>, help: impl Into<String>) {
        self.add(Severity::Note, paths, message.into(), help.into());
    }

    /// Adds a finding of the rule's severity at a place.
    fn spot(&mut self, span: Span, message: String, help: String) {
        self.found.push(Diagnostic {
            rule: self.rule.id.to_owned(),
            severity: self.severity,
            message,
            help,
            span: Some(span),
            hides_batch: false,
            next: None,
        });
    }

    /// Says which words of the command end the last finding.
    fn ended_by<W: Into<String>>(&mut self, words: impl IntoIterator<Item = W>) {
        if let Some(last) = self.found.last_mut() {
            last.next = Next::words(words);
        }
    }

    fn add(&mut self, severity: Severity, paths: &[&str], message: String, help: String) {
        self.found.push(Diagnostic {
            rule: self.rule.id.to_owned(),
            severity,
            message,
            help,
            span: paths.iter().find_map(|path| self.recipe.span(path)),
            hides_batch: false,
            next: None,
        });
    }
}

/// The counts nearest to another one, two on each side: `4, 8 or 16`; empty if there are none.
fn nearest(counts: &[u64], to: u64) -> String {
    let above = counts.partition_point(|&count| count < to);
    let near = &counts[above.saturating_sub(2)..(above + 2).min(counts.len())];
    let words: Vec<String> = near.iter().map(u64::to_string).collect();
    match words.as_slice() {
        [some @ .., last] if !some.is_empty() => format!("{} or {last}", some.join(", ")),
        words => words.concat(),
    }
}

/// The multiples of `unit` nearest to a number that is none: `128 or 256`.
fn multiples(unit: u64, number: u64) -> String {
    match number - number % unit {
        0 => unit.to_string(),
        below => format!("{below} or {}", below.saturating_add(unit)),
    }
}

/// The check of rules about files and engines, which the planner cannot examine: reports the findings of
/// the caller's survey for the rule. Several paths may have one place, such as the sources of training and evaluation.
fn surveyed(case: &Case<'_>, findings: &mut Findings<'_>) {
    let rule = findings.rule.id;
    let mut seen = HashSet::new();
    for flaw in case.request.flaws.iter().filter(|flaw| flaw.rule == rule) {
        let paths: Vec<&str> = flaw.paths.iter().map(String::as_str).collect();
        let span = paths.iter().find_map(|path| case.recipe.span(path));
        if seen.insert((&flaw.message, span.map(|span| (span.file, span.start)))) {
            findings.at(&paths, flaw.message.as_str(), flaw.help.as_str());
        }
    }
}

/// The rule with an id.
pub fn find(id: &str) -> Option<&'static Rule> {
    RULES.iter().copied().find(|rule| rule.id == id)
}

/// Whether a rule reports that what a recipe names is not on this machine: its model, its tokeniser or its data.
pub fn is_missing_input(id: &str) -> bool {
    inputs::MISSING.iter().any(|rule| rule.id == id)
}

/// The findings of all rules.
pub fn check(recipe: &Recipe, request: &PlanRequest, draft: &Draft) -> Vec<Diagnostic> {
    let case = Case {
        recipe,
        request,
        draft,
    };
    RULES.iter().flat_map(|rule| judge(rule, &case)).collect()
}

/// Whether another trainer will run the plan: an external trainer, or the only possible one if the recipe
/// names neither a model nor data, because its script or another recipe does.
fn is_for_another_trainer(case: &Case<'_>) -> bool {
    let spec = case.spec();
    match case.recipe.dialect {
        _ if case.request.runner.is_external() => true,
        Dialect::Accelerate | Dialect::Deepspeed => true,
        Dialect::Transformers => spec.model.path.is_none() && spec.data.train.is_empty(),
        _ => false,
    }
}

/// The findings of one rule; empty if the rule does not apply to the plan.
fn judge(rule: &'static Rule, case: &Case<'_>) -> Vec<Diagnostic> {
    let runner = case.request.runner;
    let launched = runner.is_built_in();
    let (check, severity) = match rule.check {
        Check::Plan(check) => (check, rule.severity),
        Check::PlanWarning(check) if launched => (check, rule.severity),
        Check::PlanWarning(_) if is_for_another_trainer(case) => return Vec::new(),
        Check::PlanWarning(check) => (check, rule.severity.max(Severity::Warning)),
        Check::Trainer(check) if launched => (check, rule.severity),
        Check::External(check) if runner.is_external() => (check, rule.severity),
        Check::Trainer(_) | Check::External(_) | Check::Reader => return Vec::new(),
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
