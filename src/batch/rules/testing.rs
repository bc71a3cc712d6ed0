//! Recipes for tests of the rules, made as values: what a reader would return.

use super::{Case, Check, Findings, check_trainer, find};
use crate::batch::{Draft, PlanRequest};
use crate::recipe::spec::{BatchSchedule, NormTest, Objective, Precision, Strategy};
use crate::recipe::{Diagnostic, Dialect, Place, Places, Recipe, Sources, Span, Spec};

/// A native recipe: a global batch of 128, micro-batch 16, and nothing else.
pub(in crate::batch) fn recipe() -> Recipe {
    let mut spec = Spec::default();
    spec.batch.global = Some(128);
    spec.batch.micro = Some(16);
    Recipe {
        dialect: Dialect::Native,
        detected: "made by a test".to_owned(),
        spec,
        places: Places::new(),
        sources: Sources::default(),
        diagnostics: Vec::new(),
    }
}

/// Supervised fine-tuning of a 7B model in bf16, sharded, with activation checkpointing.
pub(in crate::batch) fn seven_billion() -> Recipe {
    let mut recipe = recipe();
    recipe.spec.objective = Objective::Sft;
    recipe.spec.parallel.strategy = Strategy::Fsdp;
    recipe.spec.data.sequence_length = 2048;
    recipe.spec.model.path = Some("mistralai/Mistral-7B-v0.1".to_owned());
    recipe.spec.model.precision = Precision::Bf16;
    recipe.spec.model.activation_checkpointing = true;
    recipe
}

/// The recipe with a norm test.
pub(in crate::batch) fn norm_test(change: impl FnOnce(&mut NormTest)) -> Recipe {
    let mut test = NormTest::default();
    change(&mut test);
    let mut recipe = recipe();
    recipe.spec.schedule = BatchSchedule::NormTest(test);
    recipe
}

/// Notes that a value stood in a file of its own, under a key.
pub(in crate::batch) fn wrote(recipe: &mut Recipe, file: &str, path: &str, key: &str) {
    let file = recipe.sources.add(file, format!("{key}: value\n"));
    let span = Span {
        file,
        start: 0,
        end: key.len(),
        line: 1,
        column: 1,
    };
    let key = key.to_owned();
    recipe.places.insert(path.to_owned(), Place { key, span });
}

/// What one rule finds.
pub(in crate::batch) fn only(id: &str, recipe: &Recipe, request: &PlanRequest) -> Vec<Diagnostic> {
    let rule = find(id).unwrap();
    let Check::Plan(check) = rule.check else {
        panic!("{id} is not checked for plans");
    };
    let draft = Draft::new(recipe, request);
    let case = Case {
        recipe,
        request,
        draft: &draft,
    };
    let mut findings = Findings {
        rule,
        recipe,
        found: Vec::new(),
    };
    check(&case, &mut findings);
    findings.found
}

/// The ids of what the built-in trainer's rules find on one GPU.
pub(in crate::batch) fn trainer(recipe: &Recipe) -> Vec<String> {
    let request = PlanRequest::gpus(1);
    let draft = Draft::new(recipe, &request);
    let found = check_trainer(recipe, &request, &draft);
    found.into_iter().map(|d| d.rule).collect()
}
