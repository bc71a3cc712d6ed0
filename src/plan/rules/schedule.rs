//! Schedules of the batch: the norm test, stages and replays.

use super::{Case, Check, Example, Findings, Rule, multiples, native};
use crate::recipe::Severity;
use crate::recipe::schema::spec::{BatchSchedule, Estimator, Groups, Strategy};

pub(super) const RULES: &[&Rule] = &[
    &SCHEDULE_EMPTY,
    &STAGE_SHARES,
    &SCHEDULE_QUANTUM,
    &MAX_BATCH_BELOW_BASE,
    &NORM_TEST_NEVER_GROWS,
    &ONE_GROUP,
    &PAPER_ETA_OUT_OF_REACH,
    &SHARDED_WORKERS,
];

/// An example of 256 samples a step, with these keys in addition.
const fn with(keys: &'static str) -> Example {
    native(
        "--gpus 4",
        "  batch: {global: 256, per_device_batch_size: 4}\n",
    )
    .and(keys)
}

const SCHEDULE_EMPTY: Rule = Rule {
    id: "schedule-empty",
    severity: Severity::Error,
    summary: "a stage-wise or replayed schedule without stages or runs",
    text: include_str!("texts/schedule-empty.md"),
    wrong: with("  schedule: {kind: stages, stages: []}\n"),
    right: with("  schedule: {kind: constant}\n"),
    check: Check::Plan(schedule_empty),
};

fn schedule_empty(case: &Case<'_>, findings: &mut Findings<'_>) {
    let path = match &case.spec().schedule {
        BatchSchedule::Stages { stages } if stages.is_empty() => "schedule.stages",
        BatchSchedule::Replay { runs } if runs.is_empty() => "schedule.runs",
        _ => return,
    };
    let constant = case.set("schedule", "constant");
    findings.at(
        &[path, "schedule"],
        format!("{} is empty", case.key(path)),
        format!("name at least one, or use {constant}"),
    );
}

/// Tolerance of the sum: shares are decimals.
const TOLERANCE: f64 = 1e-6;

const STAGE_SHARES: Rule = Rule {
    id: "stage-shares",
    severity: Severity::Error,
    summary: "the shares of a stage-wise schedule do not add up to 1",
    text: include_str!("texts/stage-shares.md"),
    wrong: with(
        "  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.4, batch: 512}]\n",
    ),
    right: with(
        "  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.5, batch: 512}]\n",
    ),
    check: Check::Plan(stage_shares),
};

fn stage_shares(case: &Case<'_>, findings: &mut Findings<'_>) {
    let BatchSchedule::Stages { stages } = &case.spec().schedule else {
        return;
    };
    let sum: f64 = stages.iter().map(|stage| stage.share).sum();
    if !stages.is_empty() && (sum - 1.0).abs() > TOLERANCE {
        let key = case.key("schedule.stages");
        let message = format!("the shares of {key} add up to {sum}");
        findings.at(
            &["schedule.stages", "schedule"],
            message,
            "make them add up to 1",
        );
    }
}

const SCHEDULE_QUANTUM: Rule = Rule {
    id: "schedule-quantum",
    severity: Severity::Error,
    summary: "a batch of the schedule is not a multiple of the quantum",
    text: include_str!("texts/schedule-quantum.md"),
    wrong: with(
        "  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.5, batch: 400}]\n",
    ),
    right: with(
        "  elasticity: {min: 4, max: 4}\n  schedule:\n    kind: stages\n    stages: [{share: 0.5, batch: 256}, {share: 0.5, batch: 400}]\n",
    ),
    check: Check::Plan(schedule_quantum),
};

fn schedule_quantum(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (list, batches): (&str, Vec<u64>) = match &case.spec().schedule {
        BatchSchedule::Stages { stages } => ("stages", stages.iter().map(|s| s.batch).collect()),
        BatchSchedule::Replay { runs } => ("runs", runs.iter().map(|run| run.batch).collect()),
        BatchSchedule::Constant | BatchSchedule::NormTest(_) => return,
    };
    let Some(quantum) = case.draft.quantum else {
        return;
    };
    for (i, batch) in batches.into_iter().enumerate() {
        if batch > 0 && batch.is_multiple_of(quantum) {
            continue;
        }
        let path = format!("schedule.{list}.{i}");
        findings.at(
            &[&format!("{path}.batch"), &path, "schedule"],
            format!(
                "batch {batch} of {} is not a multiple of the quantum {quantum}, which every \
                 allowed world splits",
                case.key(&path)
            ),
            format!(
                "use {}, a smaller {}, or narrow {} and {}",
                multiples(quantum, batch),
                case.key("batch.per_device_batch_size"),
                case.key("elasticity.min"),
                case.key("elasticity.max")
            ),
        );
    }
}

const MAX_BATCH_BELOW_BASE: Rule = Rule {
    id: "max-batch-below-base",
    severity: Severity::Error,
    summary: "the norm test's maximum batch is below the base batch",
    text: include_str!("texts/max-batch-below-base.md"),
    wrong: with("  schedule: {kind: norm-test, max_batch: 128}\n"),
    right: with("  schedule: {kind: norm-test, max_batch: 8192}\n"),
    check: Check::Plan(max_batch_below_base),
};

fn max_batch_below_base(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(test), Some(global)) = (
        case.spec().schedule.norm_test(),
        case.draft.global_batch_size,
    ) else {
        return;
    };
    let paths = ["schedule.max_batch", "schedule", "batch.global"];
    let (key, max) = (case.key(paths[0]), test.max_batch);
    if max < global {
        findings.at(
            &paths,
            format!("{key} {max} is below the base batch {global}"),
            format!("raise it above {global}, or lower the global batch"),
        );
    } else if let Some(quantum) = case.draft.quantum
        && max - max % quantum <= global
    {
        findings.warn(
            &paths,
            format!(
                "the batch can never grow: {key} {max} leaves no multiple of the quantum {quantum} \
                 above the base batch {global}"
            ),
            format!(
                "raise it to {} or more, or narrow {} and {} for a finer quantum",
                global.saturating_add(quantum),
                case.key("elasticity.min"),
                case.key("elasticity.max")
            ),
        );
    }
}

const NORM_TEST_NEVER_GROWS: Rule = Rule {
    id: "norm-test-never-grows",
    severity: Severity::Warning,
    summary: "with η of 1 or more the norm test never fails",
    text: include_str!("texts/norm-test-never-grows.md"),
    wrong: with("  schedule: {kind: norm-test, eta: 1.5}\n"),
    right: with("  schedule: {kind: norm-test, eta: 0.15}\n"),
    check: Check::Plan(norm_test_never_grows),
};

fn norm_test_never_grows(case: &Case<'_>, findings: &mut Findings<'_>) {
    if let Some(test) = case.spec().schedule.norm_test()
        && test.estimator == Estimator::Unbiased
        && test.eta >= 1.0
    {
        let (key, eta) = (case.key("schedule.eta"), test.eta);
        findings.at(
            &["schedule.eta"],
            format!("{key} {eta} is not below 1: the test never fails"),
            "use a value between 0.05 and 0.5",
        );
    }
}

const ONE_GROUP: Rule = Rule {
    id: "one-group",
    severity: Severity::Error,
    summary: "the norm test has only one group",
    text: include_str!("texts/one-group.md"),
    wrong: native(
        "--gpus 1",
        "  batch: {global: 64, per_device_batch_size: 64}\n  schedule: {kind: norm-test}\n",
    ),
    right: native(
        "--gpus 1",
        "  batch: {global: 64, per_device_batch_size: 16}\n  schedule: {kind: norm-test}\n",
    ),
    check: Check::Plan(one_group),
};

fn one_group(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(_), Some(split)) = (case.spec().schedule.norm_test(), case.draft.split) else {
        return;
    };
    match compares_workers(case) {
        Some((path, asked)) if split.ranks < 2 => findings.at(
            &[path],
            format!("{asked} compares workers, and this world has 1"),
            format!(
                "use 2 or more data-parallel ranks, or {}",
                micro_batches(case)
            ),
        ),
        None if split.micro_batches < 2 => {
            let (path, samples) = ("batch.per_device_batch_size", split.per_device_batch_size);
            findings.at(
                &[path, "schedule"],
                format!(
                    "the norm test compares micro-batches, and a step of {} has 1",
                    split.batch()
                ),
                format!("lower {} below {samples}", case.key(path)),
            );
        }
        _ => {}
    }
}

/// The setting with which the norm test compares workers, and its text; `None` if it compares
/// micro-batches.
fn compares_workers(case: &Case<'_>) -> Option<(&'static str, &'static str)> {
    let test = case.spec().schedule.norm_test()?;
    match (test.estimator, test.groups) {
        (Estimator::Paper, _) => Some(("schedule.estimator", "`estimator: paper`")),
        (Estimator::Unbiased, Groups::Workers) => Some(("schedule.groups", "`groups: workers`")),
        (Estimator::Unbiased, Groups::MicroBatches) => None,
    }
}

/// The settings that compare micro-batches.
fn micro_batches(case: &Case<'_>) -> String {
    format!(
        "{} with {}",
        case.set("schedule.estimator", "unbiased"),
        case.set("schedule.groups", "micro-batches")
    )
}

const PAPER_ETA_OUT_OF_REACH: Rule = Rule {
    id: "paper-eta-out-of-reach",
    severity: Severity::Warning,
    summary: "with few workers the paper's test rarely asks for more than the base batch",
    text: include_str!("texts/paper-eta-out-of-reach.md"),
    wrong: with("  schedule: {kind: norm-test, estimator: paper, eta: 0.2}\n"),
    right: with("  schedule: {kind: norm-test, estimator: unbiased, eta: 0.2}\n"),
    check: Check::Plan(paper_eta_out_of_reach),
};

fn paper_eta_out_of_reach(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(test), Some(split)) = (case.spec().schedule.norm_test(), case.draft.split) else {
        return;
    };
    if test.estimator != Estimator::Paper || split.ranks < 2 {
        return;
    }
    let global = split.batch() as f64;
    let others = (split.ranks - 1) as f64;
    let target = others / (test.eta * test.eta);
    if target < global {
        findings.at(
            &["schedule.eta", "schedule.estimator"],
            format!(
                "for pure noise {} workers and η {} ask for about {target:.0} samples, fewer than \
                 the base batch of {global}",
                split.ranks, test.eta
            ),
            format!(
                "use {}, or η below {:.3} with this estimator",
                case.set("schedule.estimator", "unbiased"),
                (others / global).sqrt()
            ),
        );
    }
}

const SHARDED_WORKERS: Rule = Rule {
    id: "sharded-workers",
    severity: Severity::Error,
    summary: "the norm test needs gradients that sharding does not keep",
    text: include_str!("texts/sharded-workers.md"),
    wrong: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n  schedule: {kind: norm-test, estimator: paper, eta: 0.1}\n",
    ),
    right: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 4}\n  parallel: {strategy: fsdp}\n  schedule: {kind: norm-test, estimator: paper, eta: 0.1, unsharded_accumulation: true}\n",
    ),
    check: Check::Plan(sharded_workers),
};

fn sharded_workers(case: &Case<'_>, findings: &mut Findings<'_>) {
    let strategy = case.spec().parallel.strategy;
    let sharded = matches!(strategy, Strategy::Fsdp | Strategy::Zero2);
    let (Some(test), Some(split), Some((path, asked))) = (
        case.spec().schedule.norm_test(),
        case.draft.split,
        compares_workers(case),
    ) else {
        return;
    };
    let pass = split.ranks * split.per_device_batch_size;
    let accumulation = test.max_batch.div_ceil(pass);
    if sharded && accumulation > 1 && !test.unsharded_accumulation {
        findings.at(
            &[path, "schedule"],
            format!(
                "{asked} needs each worker's gradient over up to {accumulation} micro-batches, \
                 which sharding does not keep"
            ),
            format!(
                "set {} (a whole gradient on every rank), or use {}",
                case.set("schedule.unsharded_accumulation", "true"),
                micro_batches(case)
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only, recipe};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::{
        BatchSchedule, Estimator, Groups, ReplayRun, Stage, Strategy,
    };

    #[test]
    fn an_empty_replay_is_refused() {
        let mut recipe = recipe();
        recipe.spec.schedule = BatchSchedule::Replay { runs: Vec::new() };
        assert_eq!(
            only("schedule-empty", &recipe, &PlanRequest::gpus(4)).len(),
            1
        );
        let runs = vec![ReplayRun {
            batch: 128,
            steps: 1,
        }];
        recipe.spec.schedule = BatchSchedule::Replay { runs };
        assert!(only("schedule-empty", &recipe, &PlanRequest::gpus(4)).is_empty());
    }

    #[test]
    fn shares_are_the_whole_budget() {
        let of = |shares: &[f64]| {
            let mut recipe = recipe();
            let stages = shares.iter().map(|&share| Stage { share, batch: 128 });
            recipe.spec.schedule = BatchSchedule::Stages {
                stages: stages.collect(),
            };
            only("stage-shares", &recipe, &PlanRequest::gpus(4)).len()
        };
        assert_eq!(of(&[0.025, 0.025, 0.95]), 0);
        assert_eq!(of(&[0.1; 10]), 0);
        assert_eq!(of(&[0.5, 0.4]), 1);
        assert_eq!(of(&[1.0, 0.5]), 1);
    }

    #[test]
    fn every_wrong_batch_is_named_and_bounds_give_a_finer_quantum() {
        let mut recipe = recipe();
        let stage = |share, batch| Stage { share, batch };
        recipe.spec.schedule = BatchSchedule::Stages {
            stages: vec![stage(0.2, 128), stage(0.2, 192), stage(0.6, 64)],
        };
        let of = |recipe: &crate::recipe::Recipe| {
            only("schedule-quantum", recipe, &PlanRequest::gpus(4))
        };
        let found = of(&recipe);
        assert_eq!(found.len(), 2);
        assert!(
            found[0].help.starts_with("use 128 or 256"),
            "{}",
            found[0].help
        );
        recipe.spec.elasticity.min = Some(4);
        recipe.spec.elasticity.max = Some(4);
        assert!(of(&recipe).is_empty());
    }

    #[test]
    fn a_maximum_that_allows_no_growth_is_reported() {
        let of = |max| {
            let recipe = norm_test(|test| test.max_batch = max);
            let found = only("max-batch-below-base", &recipe, &PlanRequest::gpus(4));
            found.first().map(|d| d.severity)
        };
        assert_eq!(of(64), Some(Severity::Error));
        assert_eq!(of(200), Some(Severity::Warning));
        assert_eq!(of(256), None);
    }

    #[test]
    fn only_the_unbiased_test_is_bounded_by_one() {
        let of = |eta, estimator| {
            let recipe = norm_test(|test| (test.eta, test.estimator) = (eta, estimator));
            only("norm-test-never-grows", &recipe, &PlanRequest::gpus(4)).len()
        };
        assert_eq!(of(1.0, Estimator::Unbiased), 1);
        assert_eq!(of(0.99, Estimator::Unbiased), 0);
        assert_eq!(of(1.0, Estimator::Paper), 0);
    }

    #[test]
    fn one_worker_or_one_micro_batch_is_refused() {
        let found = |recipe: &crate::recipe::Recipe, gpus| {
            only("one-group", recipe, &PlanRequest::gpus(gpus)).len()
        };
        let mut recipe = norm_test(|_| {});
        assert_eq!(found(&recipe, 1), 0);
        recipe.spec.batch.per_device_batch_size = Some(128);
        assert_eq!(found(&recipe, 1), 1);
        assert_eq!(found(&recipe, 2), 0);
        let workers = norm_test(|test| test.groups = Groups::Workers);
        assert_eq!((found(&workers, 1), found(&workers, 2)), (1, 0));
        let paper = norm_test(|test| test.estimator = Estimator::Paper);
        assert_eq!((found(&paper, 1), found(&paper, 2)), (1, 0));
    }

    #[test]
    fn the_papers_setting_is_out_of_reach() {
        let of = |eta| {
            let mut recipe = norm_test(|test| (test.eta, test.estimator) = (eta, Estimator::Paper));
            recipe.spec.batch.global = Some(256);
            only("paper-eta-out-of-reach", &recipe, &PlanRequest::gpus(4))
        };
        assert!(of(0.2)[0].message.contains("about 75 samples"));
        assert!(of(0.2)[0].help.contains("η below 0.108"));
        assert!(of(0.1).is_empty());
    }

    #[test]
    fn workers_under_sharding_need_unsharded_accumulation() {
        let of = |strategy, change: &dyn Fn(&mut crate::recipe::schema::spec::NormTest)| {
            let mut recipe = norm_test(change);
            recipe.spec.parallel.strategy = strategy;
            only("sharded-workers", &recipe, &PlanRequest::gpus(4)).len()
        };
        assert_eq!(
            of(Strategy::Fsdp, &|test| test.estimator = Estimator::Paper),
            1
        );
        assert_eq!(
            of(Strategy::Zero2, &|test| test.groups = Groups::Workers),
            1
        );
        assert_eq!(of(Strategy::Ddp, &|test| test.groups = Groups::Workers), 0);
        assert_eq!(of(Strategy::Fsdp, &|_| {}), 0);
        let paid = |test: &mut crate::recipe::schema::spec::NormTest| {
            test.estimator = Estimator::Paper;
            test.unsharded_accumulation = true;
        };
        assert_eq!(of(Strategy::Fsdp, &paid), 0);
    }
}
