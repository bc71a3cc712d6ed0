//! The lengths of a run: its budget, its data, and its evaluations.

use super::{Case, Check, Example, Findings, Rule, multiples, native};
use crate::plan::arithmetic::gcd;
use crate::plan::horizon::{round_interval, rounding_unit};
use crate::recipe::schema::spec::{BatchSchedule, EvaluationDivision};
use crate::recipe::{Dialect, Severity};
use crate::util::format::count;

pub(super) const RULES: &[&Rule] = &[
    &BUDGET_MISSING,
    &WARMUP_EXCEEDS_BUDGET,
    &DATASET_SMALLER_THAN_BATCH,
    &DATASET_TRUNCATED,
    &EVAL_DATA_MISSING,
    &EVAL_INTERVAL_MULTIPLE,
    &EVAL_BATCH_DIVISIBLE,
];

/// An example of 128 samples a step, with these keys in addition.
const fn with(keys: &'static str) -> Example {
    native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 16}\n",
    )
    .and(keys)
}

const BUDGET_MISSING: Rule = Rule {
    id: "budget-missing",
    severity: Severity::Error,
    summary: "the recipe does not say how long to train",
    text: include_str!("texts/budget-missing.md"),
    wrong: native("", "  batch: {global: 128, per_device_batch_size: 16}\n"),
    right: native(
        "",
        "  batch: {global: 128, per_device_batch_size: 16}\n  budget: {samples: 100000}\n",
    ),
    check: Check::Trainer(budget_missing),
};

fn budget_missing(case: &Case<'_>, findings: &mut Findings<'_>) {
    let budget = &case.spec().budget;
    // `global-batch-unknown` covers a config of `accelerate launch`, which is not a recipe.
    let recipe = case.recipe.dialect != Dialect::Accelerate;
    if recipe && budget.samples.is_none() && budget.steps.is_none() && budget.epochs.is_none() {
        let message = "no key that is read says how long to train";
        let [samples, steps, epochs] =
            ["budget.samples", "budget.steps", "budget.epochs"].map(|path| case.key(path));
        let help = format!("give {samples}, {steps} or {epochs}");
        findings.at(&["budget"], message, help);
    }
}

const WARMUP_EXCEEDS_BUDGET: Rule = Rule {
    id: "warmup-exceeds-budget",
    severity: Severity::Warning,
    summary: "the learning rate is still warming up when the budget ends",
    text: include_str!("texts/warmup-exceeds-budget.md"),
    wrong: with("  budget: {samples: 10000}\n  learning_rate: {warmup_steps: 100}\n"),
    right: with("  budget: {samples: 10000}\n  learning_rate: {warmup_ratio: 0.1}\n"),
    check: Check::Plan(warmup_exceeds_budget),
};

fn warmup_exceeds_budget(case: &Case<'_>, findings: &mut Findings<'_>) {
    if let Some(horizon) = &case.draft.horizon
        && let (Some(warmup), Some(budget)) = (horizon.warmup_samples, horizon.budget_samples)
        && warmup > 0
        && warmup >= budget
    {
        findings.at(
            &[
                "learning_rate.warmup_samples",
                "learning_rate.warmup_steps",
                "learning_rate.warmup_ratio",
            ],
            format!("warm-up takes {warmup} samples, but the budget is {budget}"),
            "shorten the warm-up, or raise the budget",
        );
    }
}

const DATASET_SMALLER_THAN_BATCH: Rule = Rule {
    id: "dataset-smaller-than-batch",
    severity: Severity::Error,
    summary: "the data set holds fewer samples than one global batch",
    text: include_str!("texts/dataset-smaller-than-batch.md"),
    wrong: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 100}}]\n",
    ),
    right: native(
        "--gpus 4",
        "  batch: {global: 64, per_device_batch_size: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 100}}]\n",
    ),
    check: Check::Plan(dataset_smaller_than_batch),
};

fn dataset_smaller_than_batch(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some((samples, dropped, global)) = lengths(case) else {
        return few_rows(case, findings);
    };
    if samples >= global {
        return;
    }
    let message = format!(
        "the data hold {}, one global batch takes {global}",
        count(samples, "sample")
    );
    let smaller = format!("a global batch of {samples} or less, or more data");
    if samples == 0 {
        let message = "the data hold no samples";
        findings.at(&["data.train"], message, "give other data");
    } else if dropped > 0 {
        let help = format!("use {}, {smaller}", wrapping(case));
        findings.at(&["batch.last_batch", "data.train"], message, help);
    } else {
        findings.warn(
            &["data.train", "batch.global"],
            format!("{message}: a step sees the same sample more than once"),
            format!("use {smaller}"),
        );
    }
}

/// Warns where the samples are not counted and the files hold fewer rows than a batch takes.
fn few_rows(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (rows, global) = (case.request.data_rows, case.draft.global_batch_size);
    if let (Some(rows), Some(global)) = (rows, global)
        && rows < global
    {
        findings.warn(
            &["data.train.0.path", "data.train", "batch.global"],
            format!("the training files hold {}, one global batch takes {global}", count(rows, "row")),
            "give other data, or a smaller batch, unless the program makes several samples of a row",
        );
    }
}

/// Samples of the data, samples that an epoch drops, and the global batch, if all are known.
fn lengths(case: &Case<'_>) -> Option<(u64, u64, u64)> {
    let draft = case.draft;
    let dropped = draft.horizon.as_ref()?.dropped_samples;
    Some((draft.data_samples?, dropped, draft.global_batch_size?))
}

const DATASET_TRUNCATED: Rule = Rule {
    id: "dataset-truncated",
    severity: Severity::Warning,
    summary: "every epoch drops the samples that do not fill its last batch",
    text: include_str!("texts/dataset-truncated.md"),
    wrong: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 16, last_batch: drop}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 1000}}]\n",
    ),
    right: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 16, last_batch: wrap}\n  data:\n    train: [{path: synthetic, synthetic: {samples: 1000}}]\n",
    ),
    check: Check::Plan(dataset_truncated),
};

fn dataset_truncated(case: &Case<'_>, findings: &mut Findings<'_>) {
    // With less than one batch, `dataset-smaller-than-batch` reports it.
    if let Some((samples, dropped, global)) = lengths(case)
        && dropped > 0
        && samples > dropped
    {
        findings.at(
            &["batch.last_batch"],
            format!(
                "{samples} samples are {} batches of {global}: every epoch drops {dropped}",
                samples / global
            ),
            format!(
                "fill the last batch from the next epoch with {}, or choose a divisor of {samples}",
                wrapping(case)
            ),
        );
    }
}

/// The setting that drops nothing, in the recipe's dialect; upstream dialects use a boolean.
fn wrapping(case: &Case<'_>) -> String {
    let path = "batch.last_batch";
    match &*case.recipe.key(path) {
        "dataloader_drop_last" => case.set(path, "false"),
        _ => case.set(path, "wrap"),
    }
}

const EVAL_DATA_MISSING: Rule = Rule {
    id: "eval-data-missing",
    severity: Severity::Error,
    summary: "the recipe requests evaluations but names no evaluation data",
    text: include_str!("texts/eval-data-missing.md"),
    wrong: with("  data:\n    train: [{path: synthetic}]\n  evaluation: {every_samples: 12800}\n"),
    right: with(
        "  data:\n    train: [{path: synthetic}]\n    held_out: 512\n  evaluation: {every_samples: 12800}\n",
    ),
    check: Check::PlanWarning(eval_data_missing),
};

fn eval_data_missing(case: &Case<'_>, findings: &mut Findings<'_>) {
    let data = &case.spec().data;
    // The synthetic language has no evaluation sources.
    let sources = !data.evaluation.is_empty() && data.synthetic().is_none();
    let intervals = case.spec().evaluation.intervals();
    if let Some(asked) = intervals.first()
        && !(data.train.is_empty() || sources || data.held_out.is_some())
    {
        let asked = case.key(asked);
        findings.at(
            &intervals,
            format!("{asked} requests evaluations, but there are no evaluation data"),
            format!(
                "hold samples out ({}), name sources in {}, or remove {asked}",
                case.set("data.held_out", "0.01"),
                case.key("data.evaluation")
            ),
        );
    }
}

const EVAL_INTERVAL_MULTIPLE: Rule = Rule {
    id: "eval-interval-multiple",
    severity: Severity::Error,
    summary: "the evaluation interval is not a multiple of the global batch",
    text: include_str!("texts/eval-interval-multiple.md"),
    wrong: with("  evaluation: {every_samples: 100, rounding: batch}\n"),
    right: with("  evaluation: {every_samples: 1024}\n"),
    check: Check::Plan(eval_interval_multiple),
};

fn eval_interval_multiple(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let (Some(every), Some(global)) = (spec.evaluation.every_samples, case.draft.global_batch_size)
    else {
        return;
    };
    let paths = ["evaluation.every_samples"];
    let interval = format!("{} {every}", case.key(paths[0]));
    let unit = rounding_unit(spec, global);
    if every % unit != 0 {
        match round_interval(spec, global, every) {
            None => findings.at(
                &paths,
                format!(
                    "{interval} is less than a batch of {unit}: upstream rounds it down to 0, and \
                     fails at the first step"
                ),
                format!("use {unit} or a multiple of it"),
            ),
            Some(rounded) => findings.warn(
                &paths,
                format!(
                    "{interval} is not a multiple of the batch {unit}: upstream rounds it down to {rounded}"
                ),
                format!("use {}", multiples(unit, every)),
            ),
        }
    } else if every < global {
        findings.warn(
            &paths,
            format!("{interval} is less than one global batch of {global}: every step ends with an evaluation"),
            format!("use {global} or a multiple of it"),
        );
    } else if every % global != 0 && spec.schedule == BatchSchedule::Constant {
        findings.note(
            &paths,
            format!(
                "{interval} is not a multiple of the global batch {global}: the first evaluation \
                 comes after {} samples",
                every.next_multiple_of(global)
            ),
            format!("use {}", multiples(global, every)),
        );
    }
}

const EVAL_BATCH_DIVISIBLE: Rule = Rule {
    id: "eval-batch-divisible",
    severity: Severity::Error,
    summary: "the evaluation batch does not split, or does not hold whole groups of generations",
    text: include_str!("texts/eval-batch-divisible.md"),
    wrong: native(
        "--gpus 2",
        "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  evaluation: {per_device_batch_size: 2, every_samples: 640}\n  generation: {num_generations: 8}\n",
    ),
    right: native(
        "--gpus 2",
        "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  evaluation: {per_device_batch_size: 4, every_samples: 640}\n  generation: {num_generations: 8}\n",
    ),
    check: Check::Plan(eval_batch_divisible),
};

fn eval_batch_divisible(case: &Case<'_>, findings: &mut Findings<'_>) {
    check_batch(case, findings);
    let (evaluation, generation) = (&case.spec().evaluation, &case.spec().generation);
    let group = generation
        .num_generations_eval
        .or(generation.num_generations);
    let (Some(per_device_batch_size), Some(group), Some(ranks)) = (
        evaluation.per_device_batch_size,
        group.filter(|group| *group > 0),
        case.draft.data_parallel_size,
    ) else {
        return;
    };
    let compares =
        case.spec().objective.default_generations().is_some() && !generation.counts_prompts;
    let product = u128::from(per_device_batch_size) * u128::from(ranks);
    if compares && !evaluation.intervals().is_empty() && !product.is_multiple_of(u128::from(group))
    {
        let key = case.key("evaluation.per_device_batch_size");
        findings.at(
            &[
                "evaluation.per_device_batch_size",
                "generation.num_generations_eval",
                "generation.num_generations",
            ],
            format!(
                "evaluation batches of {ranks} × {per_device_batch_size} = {product} do not hold whole groups of \
                 {group} generations"
            ),
            format!("use a multiple of {} for {key}", group / gcd(ranks, group)),
        );
    }
}

/// Checks a batch over all devices, divided as in the recipe's dialect.
fn check_batch(case: &Case<'_>, findings: &mut Findings<'_>) {
    let evaluation = &case.spec().evaluation;
    let (Some(batch), Some(ranks)) = (evaluation.batch, case.draft.data_parallel_size) else {
        return;
    };
    // Only the built-in trainer deals unevenly, and it evaluates unevenly too.
    if case.uneven().is_some() {
        return;
    }
    let passes = match evaluation.division {
        EvaluationDivision::Passes => {
            let planned = case.draft.split.map(|split| split.accumulation());
            planned.or(case.spec().batch.accumulation).unwrap_or(1)
        }
        EvaluationDivision::Ranks | EvaluationDivision::Floored => 1,
    };
    let by = u128::from(ranks) * u128::from(passes);
    let rest = u128::from(batch) % by;
    if rest == 0 {
        return;
    }
    let mut divisor = count(ranks, "rank");
    if passes > 1 {
        divisor += &format!(" × {passes} accumulation steps");
    }
    let used = u128::from(batch) - rest;
    let help = match used {
        0 => format!("use {by} or a multiple of it"),
        used => format!("use {used} or {}", used + by),
    };
    let paths = ["evaluation.batch"];
    let message = format!(
        "{} {batch} does not split over {divisor}",
        case.key(paths[0])
    );
    if evaluation.division == EvaluationDivision::Floored && used > 0 {
        let message = format!("{message}: upstream evaluates {used} of them and drops {rest}");
        findings.warn(&paths, message, help);
    } else {
        let message = format!("{message}: {batch} % {by} = {rest}");
        let more = u128::from(batch) - rest + by;
        let words = case.set(paths[0], &more.to_string());
        findings.at(&paths, message, help);
        findings.ended_by([words.trim_matches('`')]);
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{launched, only, recipe};
    use crate::recipe::schema::spec::{
        DataSource, EvaluationDivision, IntervalRounding, LastBatch, Objective,
    };
    use crate::recipe::{Dialect, Severity};

    #[test]
    fn a_run_needs_a_budget_and_a_plan_does_not() {
        let mut recipe = recipe();
        assert_eq!(launched("budget-missing", &recipe).len(), 1);
        recipe.spec.budget.epochs = Some(1.0);
        assert!(launched("budget-missing", &recipe).is_empty());
    }

    #[test]
    fn warm_up_must_end_before_the_budget() {
        let mut recipe = recipe();
        recipe.spec.budget.steps = Some(10);
        let mut of = |steps| {
            recipe.spec.learning_rate.warmup_steps = Some(steps);
            only("warmup-exceeds-budget", &recipe, &PlanRequest::gpus(8)).len()
        };
        assert_eq!((of(0), of(9), of(10)), (0, 0, 1));
    }

    #[test]
    fn an_epoch_without_a_batch_is_refused() {
        let mut recipe = recipe();
        let mut of = |samples, last_batch| {
            recipe.spec.batch.last_batch = last_batch;
            let request = PlanRequest {
                data_samples: Some(samples),
                ..PlanRequest::gpus(8)
            };
            let found = only("dataset-smaller-than-batch", &recipe, &request);
            found.first().map(|d| d.severity)
        };
        assert_eq!(of(100, LastBatch::Drop), Some(Severity::Error));
        assert_eq!(of(100, LastBatch::Wrap), Some(Severity::Warning));
        assert_eq!(of(0, LastBatch::Wrap), Some(Severity::Error));
        assert_eq!(of(128, LastBatch::Drop), None);
    }

    #[test]
    fn dropped_samples_are_counted() {
        let mut recipe = recipe();
        let mut request = PlanRequest::gpus(8);
        request.data_samples = Some(1000);
        assert!(only("dataset-truncated", &recipe, &request).is_empty());
        recipe.spec.batch.last_batch = LastBatch::Drop;
        let found = only("dataset-truncated", &recipe, &request);
        assert_eq!(
            found[0].message,
            "1000 samples are 7 batches of 128: every epoch drops 104"
        );
        request.data_samples = Some(1024);
        assert!(only("dataset-truncated", &recipe, &request).is_empty());
    }

    fn source(path: &str) -> DataSource {
        DataSource {
            path: path.to_owned(),
            ..DataSource::default()
        }
    }

    #[test]
    fn evaluations_without_data_are_reported_and_not_launched() {
        let rule = "eval-data-missing";
        let mut recipe = recipe();
        recipe.spec.evaluation.every_samples = Some(1280);
        assert!(launched(rule, &recipe).is_empty(), "no data at all");
        recipe.spec.data.train = vec![source("a.jsonl")];
        let planned = only(rule, &recipe, &PlanRequest::gpus(1));
        assert_eq!(planned[0].severity, Severity::Warning);
        assert_eq!(launched(rule, &recipe)[0].severity, Severity::Error);
        recipe.spec.data.held_out = Some(0.01);
        assert!(launched(rule, &recipe).is_empty());
        recipe.spec.data.held_out = None;
        recipe.spec.data.evaluation = vec![source("b.jsonl")];
        assert!(launched(rule, &recipe).is_empty());
        recipe.spec.data.train = vec![source("synthetic")];
        assert_eq!(launched(rule, &recipe).len(), 1, "a language has no files");
        recipe.spec.evaluation.every_samples = None;
        assert!(launched(rule, &recipe).is_empty());
        recipe.spec.evaluation.every_epoch = true;
        recipe.dialect = Dialect::HandbookTrl;
        let found = launched(rule, &recipe);
        assert!(
            found[0].help.contains("`evenkeel.data.held_out=0.01`"),
            "{}",
            found[0].help
        );
    }

    #[test]
    fn intervals_between_steps_are_noted() {
        let mut recipe = recipe();
        let mut of = |every| {
            recipe.spec.evaluation.every_samples = Some(every);
            let found = only("eval-interval-multiple", &recipe, &PlanRequest::gpus(8));
            found.first().map(|d| d.help.clone())
        };
        assert_eq!(of(1024), None);
        assert_eq!(of(1000).as_deref(), Some("use 896 or 1024"));
        assert_eq!(of(100).as_deref(), Some("use 128 or a multiple of it"));
    }

    #[test]
    fn an_interval_that_rounds_down_to_zero_is_refused() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(64);
        recipe.spec.batch.accumulation = Some(4);
        let mut of = |every, rounding| {
            recipe.spec.evaluation.every_samples = Some(every);
            recipe.spec.evaluation.rounding = rounding;
            let found = only("eval-interval-multiple", &recipe, &PlanRequest::gpus(4));
            found.first().map(|d| (d.severity, d.message.clone()))
        };
        let (severity, message) = of(20_000, IntervalRounding::Batch).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            message.ends_with("upstream rounds it down to 19968"),
            "{message}"
        );
        let (severity, _) = of(32, IntervalRounding::Batch).unwrap();
        assert_eq!(severity, Severity::Error);
        // One accumulation step has 16 samples; evaluations after every step only warn.
        assert_eq!(of(32, IntervalRounding::Pass).unwrap().0, Severity::Warning);
    }

    #[test]
    fn a_batch_over_all_devices_follows_upstreams_division() {
        let mut recipe = recipe();
        recipe.spec.evaluation.batch = Some(32);
        recipe.spec.batch.global = Some(64);
        recipe.spec.batch.per_device_batch_size = Some(4);
        let mut of = |division, gpus| {
            recipe.spec.evaluation.division = division;
            let found = only("eval-batch-divisible", &recipe, &PlanRequest::gpus(gpus));
            found.first().map(|d| (d.severity, d.message.clone()))
        };
        // 64 is 4 × 4 × 4.
        assert_eq!(of(EvaluationDivision::Passes, 4), None);
        assert_eq!(of(EvaluationDivision::Ranks, 32), None);
        let (severity, message) = of(EvaluationDivision::Ranks, 64).unwrap();
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("32 % 64 = 32"), "{message}");
        let (severity, message) = of(EvaluationDivision::Floored, 6).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(
            message.ends_with("evaluates 30 of them and drops 2"),
            "{message}"
        );
        assert_eq!(
            of(EvaluationDivision::Floored, 64).unwrap().0,
            Severity::Error
        );
    }

    #[test]
    fn grpo_evaluates_whole_groups() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Grpo;
        recipe.spec.generation.num_generations = Some(8);
        recipe.spec.evaluation.per_device_batch_size = Some(2);
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("eval-batch-divisible", recipe, &PlanRequest::gpus(gpus))
        };
        assert!(of(&recipe, 2).is_empty());
        recipe.spec.evaluation.every_steps = Some(10);
        assert_eq!(
            of(&recipe, 2)[0].help,
            "use a multiple of 4 for `evaluation.per_device_batch_size`"
        );
        assert!(of(&recipe, 4).is_empty());
        recipe.spec.objective = Objective::Sft;
        assert!(of(&recipe, 2).is_empty());
    }
}
