//! Recipes for tests of the rules, built as values instead of read from files.

use super::{Case, find, judge};
use crate::plan::{AskedRunner, DeviceKind, Draft, Flaw, PlanRequest, Runner};
use crate::recipe::schema::spec::{BatchSchedule, NormTest, Objective, Precision, Strategy};
use crate::recipe::{
    Diagnostic, Dialect, Recipe, Severity, Sources, Span, Spec, ValueSource, ValueSources,
};

/// A native recipe: a global batch of 128, micro-batch 16, and nothing else.
pub(in crate::plan) fn recipe() -> Recipe {
    let mut spec = Spec::default();
    spec.batch.global = Some(128);
    spec.batch.per_device_batch_size = Some(16);
    Recipe {
        dialect: Dialect::Native,
        version: None,
        detected: "made by a test".to_owned(),
        part: false,
        spec,
        value_sources: ValueSources::new(),
        sources: Sources::default(),
        files: Default::default(),
        untrained: Vec::new(),
        accelerate: None,
        launch: None,
        variables: Default::default(),
        launcher_replaced: false,
        lacks_batch_arguments: false,
        diagnostics: Vec::new(),
    }
}

/// Supervised fine-tuning of a 7B model in bf16, sharded, with activation checkpointing.
pub(in crate::plan) fn seven_billion() -> Recipe {
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
pub(in crate::plan) fn norm_test(change: impl FnOnce(&mut NormTest)) -> Recipe {
    let mut test = NormTest::default();
    change(&mut test);
    let mut recipe = recipe();
    recipe.spec.schedule = BatchSchedule::NormTest(test);
    recipe
}

/// Records that `path` was read from `file`, under `key`.
pub(in crate::plan) fn wrote(recipe: &mut Recipe, file: &str, path: &str, key: &str) {
    let file = recipe.sources.add(file, format!("{key}: value\n"));
    let span = Span {
        file,
        start: 0,
        end: key.len(),
        line: 1,
        column: 1,
    };
    let key = key.to_owned();
    recipe
        .value_sources
        .insert(path.to_owned(), ValueSource { key, span });
}

/// The findings of one rule.
pub(in crate::plan) fn only(id: &str, recipe: &Recipe, request: &PlanRequest) -> Vec<Diagnostic> {
    let runner = match request.runner {
        Runner::Any { device } => Runner::of(&recipe.spec, AskedRunner::Any, device, None),
        runner => runner,
    };
    let request = &PlanRequest {
        runner,
        ..request.clone()
    };
    let draft = Draft::new(recipe, request);
    let case = Case {
        recipe,
        request,
        draft: &draft,
    };
    judge(find(id).unwrap(), &case)
}

/// The findings of one rule when the built-in trainer runs the plan on one process.
pub(in crate::plan) fn launched(id: &str, recipe: &Recipe) -> Vec<Diagnostic> {
    only(id, recipe, &launch())
}

/// A request for the built-in trainer on one process.
pub(in crate::plan) fn launch() -> PlanRequest {
    limited(None)
}

/// The same with a memory limit of a rank, bytes.
pub(in crate::plan) fn limited(rank_memory: Option<u64>) -> PlanRequest {
    let runner = Runner::BuiltIn {
        device: DeviceKind::Cpu,
        rank_memory,
    };
    PlanRequest::of(runner, 1)
}

/// The severities of a rule that only reports the caller's findings: in a plan, and in a launch.
pub(in crate::plan) fn reported(id: &'static str) -> [Vec<Severity>; 2] {
    let flaw = |rule| Flaw {
        rule,
        paths: vec!["model.path".to_owned()],
        message: "it is wrong".to_owned(),
        help: "fix it".to_owned(),
    };
    [PlanRequest::gpus(1), launch()].map(|request| {
        let request = PlanRequest {
            // The second one has the same place and is not repeated.
            flaws: vec![flaw("another-rule"), flaw(id), flaw(id)],
            ..request
        };
        let found = only(id, &recipe(), &request);
        found.into_iter().map(|d| d.severity).collect()
    })
}
