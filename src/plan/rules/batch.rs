//! The global batch: whether the recipe determines it, and whether it splits over the ranks.

use std::path::Path;

use super::built_in::trains;
use super::{Case, Check, Findings, Rule, file, is_for_another_trainer, native};
use crate::plan::DeviceKind;
use crate::plan::MAX_BATCH;
use crate::plan::arithmetic::divisors;
use crate::plan::draft::{DEFAULT_MICRO, model_parallel};
use crate::plan::split::{Cap, Split, Splitter};
use crate::recipe::schema::overrides::COMMAND_LINE;
use crate::recipe::schema::spec::{Division, EvaluationDivision};
use crate::recipe::syntax::shell::{self, COMMAND};
use crate::recipe::{Dialect, Recipe, Severity, SourceFile};

pub(super) const RULES: &[&Rule] = &[
    &GLOBAL_BATCH_UNKNOWN,
    &GLOBAL_BATCH_CONFLICT,
    &BATCH_TOO_LARGE,
    &BATCH_DIVISIBLE,
    &UNEVEN_DEALING,
    &GLOBAL_BATCH_CONSTANT,
    &EFFECTIVE_BATCH_FLOORED,
    &AUTO_FIND_SHRINKS_BATCH,
];

const GLOBAL_BATCH_UNKNOWN: Rule = Rule {
    id: "global-batch-unknown",
    severity: Severity::Error,
    summary: "the recipe does not determine its global batch",
    text: include_str!("texts/global-batch-unknown.md"),
    wrong: file(
        "--gpus 4",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    ),
    right: file(
        "--gpus 4 --recipe-gpus 8",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    ),
    check: Check::Plan(global_batch_unknown),
};

/// The command that plans the same recipe with a further flag.
fn next_command(case: &Case<'_>, flag: &str) -> String {
    let Recipe { files, sources, .. } = case.recipe;
    let path = |file| {
        sources
            .get(file)
            .map(|source: &SourceFile| source.path.as_path())
    };
    let command = files.command.and_then(|(file, _)| path(file));
    let typed = command == Some(Path::new(COMMAND));
    // A script may name the recipe, and is what the user gave.
    let given = command.filter(|_| !typed);
    let mut words = vec!["evenkeel plan".to_owned()];
    if let Some(path) = given.or(files.recipe.and_then(path)) {
        words.push(shell::join(&[path.display().to_string()]));
    }
    if case.request.runner.device() == DeviceKind::Cuda {
        words.push(format!("--gpus {}", case.request.gpus));
    }
    words.push(flag.to_owned());
    words.extend(typed.then(|| "-- …".to_owned()));
    format!("`{}`", words.join(" "))
}

/// The file that the user gave, as a word of a command.
fn given_file(case: &Case<'_>) -> Option<String> {
    let file = case.recipe.files.recipe?;
    let source = case.recipe.sources.get(file)?;
    Some(shell::join(&[source.path.display().to_string()]))
}

/// The words that give the samples of a step.
const BATCH_GIVEN: [&str; 2] = ["--global-batch-size", "B"];

fn global_batch_unknown(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (dialect, batch) = (case.recipe.dialect, &case.spec().batch);
    if case.draft.global_batch_size.is_some() || case.draft.recipe_product.is_some() {
        return;
    }
    if dialect == Dialect::Accelerate {
        findings.at(
            &[],
            "an accelerate config gives the number of devices, but no batch",
            format!(
                "plan the recipe that is launched with it, `evenkeel plan RECIPE --accelerate {}`, or give the samples of \
                 a step, {}",
                given_file(case).unwrap_or_else(|| "FILE".to_owned()),
                next_command(case, "--global-batch-size B"),
            ),
        );
        findings.ended_by(BATCH_GIVEN);
        return;
    }
    if case.recipe.part {
        findings.note(
            &[],
            "this part of a config tree has no batch",
            "plan the whole tree: give its directory, and choose this part on the command line",
        );
        return;
    }
    // `deepspeed-elastic-batch` and `parallelism-product` report why these have no batch.
    let deepspeed = dialect == Dialect::Deepspeed;
    if (deepspeed && batch.elastic.is_some())
        || (batch.gpus.is_some() && batch.per_device_batch_size.is_some())
    {
        return;
    }
    let paths = ["batch.per_device_batch_size", "batch.accumulation"];
    match batch.per_device_batch_size {
        Some(per_device_batch_size) => {
            let accumulation = batch.accumulation.unwrap_or(1);
            let each = u128::from(per_device_batch_size) * u128::from(accumulation);
            findings.at(
                &paths,
                format!(
                    "the recipe gives {per_device_batch_size} × {accumulation} = {each} samples per device, but not \
                     the number of devices"
                ),
                format!(
                    "give the number of GPUs that it was written for, {}, or the samples of a step, `--global-batch-size B`",
                    next_command(case, "--recipe-gpus N")
                ),
            );
            findings.ended_by(["--recipe-gpus", "N"]);
        }
        None if deepspeed => {
            findings.at(
                &[],
                "the DeepSpeed config has no batch: \"auto\" takes the batch of a trainer",
                format!(
                    "give it with the trainer's arguments, `evenkeel plan -- deepspeed train.py --deepspeed {} …`, or give \
                     the samples of a step, {}",
                    given_file(case).unwrap_or_else(|| "FILE".to_owned()),
                    next_command(case, "--global-batch-size B"),
                ),
            );
            findings.ended_by(BATCH_GIVEN);
        }
        None => {
            let given = next_command(case, "--global-batch-size B");
            let mut help = format!("give the samples of a step, {given}");
            if [Dialect::Transformers, Dialect::HandbookTrl].contains(&dialect) {
                help += "; for a `Trainer`'s default write `--per_device_train_batch_size 8`";
            }
            findings.at(&paths, "no key that is read states the batch", help);
            findings.ended_by(BATCH_GIVEN);
        }
    }
}

const GLOBAL_BATCH_CONFLICT: Rule = Rule {
    id: "global-batch-conflict",
    severity: Severity::Error,
    summary: "the stated global batch is not the product of the recipe's numbers",
    text: include_str!("texts/global-batch-conflict.md"),
    wrong: native(
        "--gpus 8",
        "  batch: {global: 256, per_device_batch_size: 16, accumulation: 1, gpus: 8}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {global: 256, per_device_batch_size: 16, accumulation: 2, gpus: 8}\n",
    ),
    check: Check::Plan(global_batch_conflict),
};

fn global_batch_conflict(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let (Some(global), Some(product), Some(accumulation)) =
        (batch.global, case.draft.recipe_product, batch.accumulation)
    else {
        return;
    };
    // The launch has resolved this for a run; from then on only the run's own batch counts.
    if u128::from(global) == product || case.request.is_of_a_run() {
        return;
    }
    let paths = ["batch.global"];
    let message = format!(
        "{} is {global}, but the recipe's numbers give {} × {} × {accumulation} = {product}",
        case.key("batch.global"),
        case.draft.recipe_ranks.unwrap_or(1),
        batch.per_device_batch_size.unwrap_or(1),
    );
    let span = case.recipe.span("batch.global");
    let file = span.and_then(|span| case.recipe.sources.get(span.file));
    if file.is_some_and(|file| file.path.as_os_str() == COMMAND_LINE) {
        let help = format!("{global} counts; remove it to keep {product}");
        findings.warn(&paths, message, help);
    } else {
        let help = format!(
            "remove {} or {}, or make them agree",
            case.key("batch.accumulation"),
            case.key("batch.global")
        );
        findings.at(&paths, message, help);
    }
}

const BATCH_TOO_LARGE: Rule = Rule {
    id: "batch-too-large",
    severity: Severity::Error,
    summary: "micro-batch × accumulation × ranks exceeds the largest global batch",
    text: include_str!("texts/batch-too-large.md"),
    wrong: native(
        "--gpus 8",
        "  batch: {per_device_batch_size: 1048576, accumulation: 1048576, gpus: 8}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {per_device_batch_size: 16, accumulation: 4, gpus: 8}\n",
    ),
    check: Check::Plan(batch_too_large),
};

fn batch_too_large(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let stated = case.request.global_batch_size.or(batch.global);
    if stated.is_none()
        && let Some(product) = case.draft.recipe_product
        && product > u128::from(MAX_BATCH)
    {
        findings.at(
            &["batch.per_device_batch_size", "batch.accumulation"],
            format!(
                "{} ranks × {} × {} is a global batch of {product} samples, more than {MAX_BATCH}",
                case.draft.recipe_ranks.unwrap_or(1),
                batch.per_device_batch_size.unwrap_or(1),
                batch.accumulation.unwrap_or(1)
            ),
            format!(
                "lower {} or {}: both count for one device",
                case.key("batch.per_device_batch_size"),
                case.key("batch.accumulation")
            ),
        );
    }
}

const BATCH_DIVISIBLE: Rule = Rule {
    id: "batch-divisible",
    severity: Severity::Error,
    summary: "the global batch does not split exactly over the data-parallel ranks",
    text: include_str!("texts/batch-divisible.md"),
    wrong: native(
        "--gpus 6",
        "  batch: {global: 128, per_device_batch_size: 16}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 16}\n",
    ),
    check: Check::Plan(batch_divisible),
};

fn batch_divisible(case: &Case<'_>, findings: &mut Findings<'_>) {
    check_passes(case, findings);
    let (Some(global), Some(ranks), None) = (
        case.draft.global_batch_size,
        case.draft.data_parallel_size,
        case.draft.split,
    ) else {
        return;
    };
    let reached = case.request.current_batch;
    let (name, batch) = match reached {
        Some(current) if global.is_multiple_of(ranks) && !current.is_multiple_of(ranks) => (
            format!("batch {current}, which the run has reached,"),
            current,
        ),
        _ => (format!("global batch {global}"), global),
    };
    let mut help = format!("use {}", case.feasible_near());
    let stated = case.spec().batch.per_device_batch_size;
    let cap = Cap::at(stated.unwrap_or(DEFAULT_MICRO));
    let uneven = Splitter::new(global, reached, cap, &|_, _| true).uneven(ranks);
    // A run keeps the remainder policy that it started with.
    if let Some(split) = uneven
        && !case.request.is_of_a_run()
        && !case.request.runner.is_external()
        && only_another_trainer(case).is_none()
    {
        help += &format!(
            ", or deal micro-batches unevenly with `--remainder uneven`: {}",
            split.formula()
        );
    }
    findings.at(
        &["batch.global", "batch.per_device_batch_size"],
        format!(
            "{name} does not split over {ranks} data-parallel ranks: {batch} % {ranks} = {}",
            batch % ranks
        ),
        help,
    );
}

/// HALOs divides by the recipe's accumulation too. In the world that a recipe was written for, its batch
/// must be a multiple of both.
fn check_passes(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(global), Some(upstream)) = (case.draft.global_batch_size, case.draft.upstream) else {
        return;
    };
    let (ranks, passes) = (upstream.ranks, upstream.accumulation);
    let fits = !global.is_multiple_of(ranks) || upstream.used == global;
    let exact = case.spec().batch.division == Division::Exact;
    if !exact || fits || case.request.is_of_a_run() {
        return;
    }
    let share = global / ranks;
    let shares = divisors(share);
    let smaller = shares.iter().rfind(|&&smaller| smaller < passes);
    let set = case.set("batch.accumulation", &smaller.unwrap_or(&1).to_string());
    let mut help = format!("set {set}");
    if share < passes && case.spec().evaluation.division == EvaluationDivision::Passes {
        help += &format!(
            "; before 2025-05-01 {} counted one accumulation step, so {global} meant {}: \
             `--dialect-version before-2025-05-01`",
            case.key("batch.global"),
            global.saturating_mul(passes)
        );
    }
    findings.at(
        &["batch.accumulation", "batch.global"],
        format!(
            "global batch {global} does not split over {ranks} data-parallel ranks × {passes} \
             accumulation steps: {global} % ({ranks} × {passes}) = {}",
            u128::from(global) % (u128::from(ranks) * u128::from(passes))
        ),
        help,
    );
}

const UNEVEN_DEALING: Rule = Rule {
    id: "uneven-dealing",
    severity: Severity::Error,
    summary: "some ranks run one micro-batch more than others, which only the built-in trainer supports",
    text: include_str!("texts/uneven-dealing.md"),
    wrong: native(
        "--gpus 3 --remainder uneven",
        "  objective: reward\n  batch: {global: 128, per_device_batch_size: 16}\n",
    ),
    right: native(
        "--gpus 4 --remainder uneven",
        "  objective: reward\n  batch: {global: 128, per_device_batch_size: 16}\n",
    ),
    check: Check::Plan(uneven_dealing),
};

fn uneven_dealing(case: &Case<'_>, findings: &mut Findings<'_>) {
    let paths = ["batch.remainder"];
    // `external-trainer` reports it for an external trainer.
    let Some(split) = case.uneven().filter(|_| !case.request.runner.is_external()) else {
        return;
    };
    if let Some(why) = only_another_trainer(case) {
        findings.at(
            &paths,
            format!(
                "micro-batches are dealt unevenly, {}, which only the built-in trainer supports, and {why}",
                split.formula()
            ),
            format!("use {}", case.feasible_near()),
        );
        return;
    }
    let more = split.micro_batches % split.ranks;
    let (most, idle) = (split.accumulation(), 100.0 * split.idle_share());
    findings.note(
        &paths,
        format!(
            "{more} of {} ranks run {most} micro-batches, the others {}: ranks are idle {idle:.0} % \
             of the time",
            split.ranks,
            most - 1,
        ),
        format!("the batch is exact; no rank is idle at {}", case.feasible_near()),
    );
}

/// Why the built-in trainer cannot run the plan, as a half-sentence; `None` if it can. Differences in
/// precision and kernels do not count.
fn only_another_trainer(case: &Case<'_>) -> Option<String> {
    let (spec, request) = (case.spec(), case.request);
    if !trains(case) {
        return Some(format!("it does not train {}", spec.objective));
    }
    if model_parallel(&spec.parallel).is_some_and(|devices| devices > 1) {
        return Some("it splits no model over devices".to_owned());
    }
    // A command starts another trainer.
    let command = case.recipe.files.command.is_some() && !request.runner.is_built_in();
    (command || is_for_another_trainer(case)).then(|| "this is a plan for another one".to_owned())
}

const GLOBAL_BATCH_CONSTANT: Rule = Rule {
    id: "global-batch-constant",
    severity: Severity::Note,
    summary: "upstream would train with another global batch in this world",
    text: include_str!("texts/global-batch-constant.md"),
    wrong: file(
        "--gpus 4 --recipe-gpus 8",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    ),
    right: file(
        "--gpus 8 --recipe-gpus 8",
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\nevenkeel:\n  objective: sft\n",
    ),
    check: Check::Plan(global_batch_constant),
};

fn global_batch_constant(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (dialect, batch) = (case.recipe.dialect, &case.spec().batch);
    let (Some(per_device_batch_size), Some(split)) =
        (batch.per_device_batch_size, case.draft.split)
    else {
        return;
    };
    // DeepSpeed asserts a stated train batch: `deepspeed-batch-triple`. A program that is not read has an accumulation of
    // its own.
    let is_known = dialect != Dialect::Deepspeed && batch.accumulation.is_some();
    let stated = batch.global.is_some() && !is_known;
    let (ranks, accumulation, global) =
        (split.ranks, batch.accumulation.unwrap_or(1), split.batch());
    let upstream = u128::from(ranks) * u128::from(per_device_batch_size) * u128::from(accumulation);
    if dialect != Dialect::Native && !stated && upstream != u128::from(global) {
        findings.at(
            &["batch.accumulation", "batch.per_device_batch_size"],
            format!(
                "as written, {ranks} data-parallel ranks would train with {ranks} × {per_device_batch_size} × \
                 {accumulation} = {upstream} samples a step instead of {global}"
            ),
            format!(
                "no action needed: the plan keeps {global}, {}",
                split.formula()
            ),
        );
    }
}

const EFFECTIVE_BATCH_FLOORED: Rule = Rule {
    id: "effective-batch-floored",
    severity: Severity::Error,
    summary: "upstream drops samples of every batch",
    text: include_str!("texts/effective-batch-floored.md"),
    wrong: native(
        "--gpus 8",
        "  batch: {global: 4, accumulation: 1, division: floored}\n",
    ),
    right: native(
        "--gpus 4",
        "  batch: {global: 64, accumulation: 2, division: floored}\n",
    ),
    check: Check::Plan(effective_batch_floored),
};

fn effective_batch_floored(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (Some(global), Some(upstream)) = (case.draft.global_batch_size, case.draft.upstream) else {
        return;
    };
    if case.spec().batch.division != Division::Floored || upstream.used == global {
        return;
    }
    let (ranks, passes, per_device_batch_size, used) = (
        upstream.ranks,
        upstream.accumulation,
        upstream.per_device_batch_size,
        upstream.used,
    );
    let on = case.count(ranks);
    let formula = format!("⌊⌊{global} / {passes}⌋ / {ranks}⌋ = {per_device_batch_size}");
    let paths = ["batch.global", "batch.accumulation"];
    let mut exact = Vec::new();
    if global.is_multiple_of(passes) {
        exact = divisors(global / passes);
    }
    let exact: Vec<String> = exact.iter().take(8).map(u64::to_string).collect();
    let counts = match exact.as_slice() {
        [] => String::new(),
        [one] => format!("{one} GPU drops no sample; "),
        counts => format!("{} GPUs drop no sample; ", counts.join(", ")),
    };
    if used == 0 {
        let key = case.key("batch.global");
        // What the plan changes, given upstream too.
        let split = case.draft.split.map(|split| split.accumulation());
        let fewer = split.filter(|fewer| (1..passes).contains(fewer));
        let fewer = fewer.map(|fewer| case.set("batch.accumulation", &fewer.to_string()));
        let plans = fewer
            .iter()
            .map(|fewer| format!("{fewer} keeps the batch; "));
        let plans: String = plans.collect();
        findings.at(
            &paths,
            format!("on {on} upstream gives every GPU an empty batch: {formula}"),
            format!("{plans}{counts}raise {key} to {} or more", passes * ranks),
        );
        if let Some(fewer) = fewer {
            findings.ended_by([fewer.trim_matches('`')]);
        }
        return;
    }
    findings.warn(
        &paths,
        format!(
            "on {on} upstream trains on {used} of {global} samples a step: {formula}, and \
             {ranks} × {per_device_batch_size} × {passes} = {used}"
        ),
        format!("{counts}`--global-batch-size {used}` trains as upstream would"),
    );
}

const AUTO_FIND_SHRINKS_BATCH: Rule = Rule {
    id: "auto-find-shrinks-batch",
    severity: Severity::Warning,
    summary: "upstream's `auto_find_batch_size` silently shrinks the global batch",
    text: include_str!("texts/auto-find-shrinks-batch.md"),
    wrong: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 16, auto_find: true}\n",
    ),
    right: native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 16}\n",
    ),
    check: Check::Plan(auto_find_shrinks_batch),
};

fn auto_find_shrinks_batch(case: &Case<'_>, findings: &mut Findings<'_>) {
    let batch = &case.spec().batch;
    let split = case.draft.split;
    if let Some(split) = split
        && let Some(smaller) = case.request.oom_policy.smaller(split.per_device_batch_size)
    {
        let what = match smaller {
            0 => format!("{} is the last micro-batch", split.per_device_batch_size),
            _ => format!(
                "{} instead of {}",
                after_a_failure(&split, split.per_device_batch_size, smaller),
                split.batch()
            ),
        };
        findings.at(
            &["batch.per_device_batch_size", "batch.global"],
            format!("upstream's policy shrinks the global batch: {what}"),
            "leave `--oom-policy` out: accumulation then rises and the global batch stays",
        );
    }
    if batch.auto_find {
        let lost = match (batch.per_device_batch_size, split) {
            (Some(stated), Some(split)) if stated > 1 => {
                let smaller = stated * 9 / 10;
                format!(": {}", after_a_failure(&split, stated, smaller))
            }
            _ => String::new(),
        };
        findings.at(
            &["batch.auto_find"],
            format!(
                "{} shrinks the global batch upstream{lost}",
                case.key("batch.auto_find")
            ),
            "remove it: after an out-of-memory error Evenkeel lowers the micro-batch and raises \
             accumulation, so the global batch stays",
        );
    }
}

/// The batch that upstream's finder leaves after one failure.
fn after_a_failure(split: &Split, from: u64, to: u64) -> String {
    let (ranks, passes) = (split.ranks, split.accumulation());
    let batch = u128::from(ranks) * u128::from(to) * u128::from(passes);
    format!("one failure and {from} becomes {to}, {ranks} × {to} × {passes} = {batch}")
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{only, recipe, wrote};
    use crate::plan::{DeviceKind, PlanRequest, Runner, plan};
    use crate::recipe;
    use crate::recipe::schema::spec::{Division, Objective, Remainder};
    use crate::recipe::{Dialect, Recipe, Severity};

    #[test]
    fn a_per_device_batch_without_devices_is_not_enough() {
        let mut recipe = recipe();
        recipe.spec.batch.global = None;
        recipe.spec.batch.accumulation = Some(2);
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert_eq!(
            found[0].message,
            "the recipe gives 16 × 2 = 32 samples per device, but not the number of devices"
        );
        recipe.spec.batch.gpus = Some(8);
        assert!(only("global-batch-unknown", &recipe, &PlanRequest::gpus(4)).is_empty());
        recipe.dialect = Dialect::Accelerate;
        recipe.spec.batch = Default::default();
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert_eq!(found[0].severity, Severity::Error);
        assert!(found[0].help.contains("--accelerate FILE"));
        recipe.dialect = Dialect::Native;
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert_eq!(found[0].message, "no key that is read states the batch");
        recipe.dialect = Dialect::Transformers;
        let found = only("global-batch-unknown", &recipe, &PlanRequest::gpus(4));
        assert!(found[0].help.contains("--per_device_train_batch_size 8"));
    }

    #[test]
    fn a_file_that_contradicts_itself_is_refused_and_the_command_line_wins() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(256);
        recipe.spec.batch.accumulation = Some(1);
        recipe.spec.batch.gpus = Some(8);
        let of = |recipe: &crate::recipe::Recipe| {
            only("global-batch-conflict", recipe, &PlanRequest::gpus(8))
        };
        assert_eq!(of(&recipe)[0].severity, Severity::Error);
        assert_eq!(
            of(&recipe)[0].message,
            "`batch.global` is 256, but the recipe's numbers give 8 × 16 × 1 = 128"
        );
        wrote(
            &mut recipe,
            "command line",
            "batch.global",
            "--global-batch-size",
        );
        assert_eq!(of(&recipe)[0].severity, Severity::Warning);
        recipe.spec.batch.global = Some(128);
        assert!(of(&recipe).is_empty());
    }

    #[test]
    fn a_started_run_is_not_checked_again() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(256);
        recipe.spec.batch.accumulation = Some(1);
        recipe.spec.batch.gpus = Some(8);
        let request = PlanRequest {
            global_batch_size: Some(256),
            ..PlanRequest::gpus(8)
        };
        assert!(only("global-batch-conflict", &recipe, &request).is_empty());
    }

    #[test]
    fn absurd_products_are_refused_with_the_number() {
        let mut recipe = recipe();
        recipe.spec.batch.global = None;
        recipe.spec.batch.per_device_batch_size = Some(1 << 32);
        recipe.spec.batch.accumulation = Some(1 << 32);
        recipe.spec.batch.gpus = Some(1 << 20);
        let request = PlanRequest::gpus(8);
        let found = only("batch-too-large", &recipe, &request);
        assert!(found[0].message.contains(&(1_u128 << 84).to_string()));
        assert!(plan(&recipe, &request).is_err());
    }

    #[test]
    fn names_the_remainder_and_the_counts_on_both_sides() {
        let found = only("batch-divisible", &recipe(), &PlanRequest::gpus(6));
        assert_eq!(
            found[0].message,
            "global batch 128 does not split over 6 data-parallel ranks: 128 % 6 = 2"
        );
        assert_eq!(
            found[0].help,
            "use 2, 4, 8 or 16 GPUs, or deal micro-batches unevenly with `--remainder uneven`: \
             16 × (2 + 2 + 1 + 1 + 1 + 1) = 128"
        );
    }

    #[test]
    fn counts_outside_of_the_elasticity_bounds_are_not_suggested() {
        let mut recipe = recipe();
        recipe.spec.elasticity.max = Some(7);
        let help = |recipe: &crate::recipe::Recipe| {
            let found = only("batch-divisible", recipe, &PlanRequest::gpus(6));
            found[0].help.split(", or deal").next().unwrap().to_owned()
        };
        assert_eq!(help(&recipe), "use 2 or 4 GPUs");
        recipe.spec.elasticity.min = Some(3);
        assert_eq!(help(&recipe), "use 4 GPUs");
        recipe.spec.elasticity.min = Some(5);
        assert_eq!(help(&recipe), "use another global batch");
    }

    #[test]
    fn uneven_dealing_is_offered_only_where_the_trainer_supports_it() {
        let mut recipe = recipe();
        recipe.spec.objective = crate::recipe::schema::spec::Objective::Reward;
        let found = only("batch-divisible", &recipe, &PlanRequest::gpus(6));
        assert_eq!(found[0].help, "use 2, 4, 8 or 16 GPUs");
    }

    #[test]
    fn one_process_is_not_called_gpus_and_a_run_keeps_its_remainder_policy() {
        let mut request = PlanRequest::of(
            Runner::Any {
                device: DeviceKind::Cpu,
            },
            6,
        );
        request.global_batch_size = Some(7);
        let found = only("batch-divisible", &recipe(), &request);
        assert_eq!(found[0].help, "use 1 or 7 processes");
        request.gpus = 200;
        request.global_batch_size = Some(1);
        let found = only("batch-divisible", &recipe(), &request);
        assert_eq!(found[0].help, "use 1 process");
    }

    #[test]
    fn more_ranks_than_samples_do_not_offer_uneven_dealing() {
        let found = only("batch-divisible", &recipe(), &PlanRequest::gpus(200));
        assert!(found[0].message.ends_with("128 % 200 = 128"));
        assert_eq!(found[0].help, "use 64 or 128 GPUs");
    }

    #[test]
    fn a_grown_batch_must_split_too() {
        let mut request = PlanRequest::gpus(8);
        request.current_batch = Some(132);
        let found = only("batch-divisible", &recipe(), &request);
        assert!(
            found[0].message.contains("132 % 8 = 4"),
            "{}",
            found[0].message
        );
    }

    #[test]
    fn accumulation_must_divide_where_upstream_divides_by_it() {
        let mut recipe = recipe();
        recipe.dialect = crate::recipe::Dialect::Halos;
        let batch = &mut recipe.spec.batch;
        batch.global = Some(8);
        batch.per_device_batch_size = None;
        batch.accumulation = Some(8);
        batch.division = crate::recipe::schema::spec::Division::Exact;
        recipe.spec.evaluation.division = crate::recipe::schema::spec::EvaluationDivision::Passes;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("batch-divisible", recipe, &PlanRequest::gpus(gpus))
        };
        let found = of(&recipe, 4);
        assert_eq!(
            found[0].message,
            "global batch 8 does not split over 4 data-parallel ranks × 8 accumulation steps: \
             8 % (4 × 8) = 8"
        );
        assert!(found[0].help.contains("so 8 meant 64"), "{}", found[0].help);
        assert!(of(&recipe, 1).is_empty());
        // In another world than the recipe's, the plan may change accumulation.
        recipe.spec.batch.gpus = Some(1);
        assert!(of(&recipe, 4).is_empty());
    }

    #[test]
    fn exact_and_uneven_splits_are_fine() {
        assert!(only("batch-divisible", &recipe(), &PlanRequest::gpus(64)).is_empty());
        let mut uneven = recipe();
        uneven.spec.batch.remainder = crate::recipe::schema::spec::Remainder::Uneven;
        assert!(only("batch-divisible", &uneven, &PlanRequest::gpus(6)).is_empty());
    }

    #[test]
    fn message_states_the_idle_share() {
        let mut recipe = recipe();
        recipe.spec.batch.remainder = Remainder::Uneven;
        let found = only("uneven-dealing", &recipe, &PlanRequest::gpus(3));
        assert_eq!(
            found[0].message,
            "2 of 3 ranks run 3 micro-batches, the others 2: ranks are idle 11 % of the time"
        );
        assert!(only("uneven-dealing", &recipe, &PlanRequest::gpus(4)).is_empty());
    }

    #[test]
    fn uneven_plans_for_other_trainers_are_refused() {
        let mut recipe = recipe();
        recipe.spec.batch.remainder = Remainder::Uneven;
        let device = DeviceKind::Cuda;
        let (any, external) = (Runner::Any { device }, Runner::External { device });
        let finding = |recipe: &Recipe, runner| {
            let found = only("uneven-dealing", recipe, &PlanRequest::of(runner, 3)).remove(0);
            (found.severity, found.message)
        };
        assert_eq!(finding(&recipe, any).0, Severity::Note);
        let refused = only("external-trainer", &recipe, &PlanRequest::of(external, 3)).remove(0);
        assert_eq!(refused.severity, Severity::Error);
        assert!(
            refused
                .message
                .ends_with("which only the built-in trainer supports"),
            "{refused:?}"
        );
        recipe.spec.objective = Objective::Grpo;
        let (severity, message) = finding(&recipe, any);
        assert_eq!(severity, Severity::Error);
        assert!(message.ends_with("it does not train grpo"), "{message}");
        recipe.spec.objective = Objective::Sft;
        recipe.spec.parallel.tensor = 1;
        recipe.spec.parallel.context = 3;
        let request = PlanRequest::gpus(9);
        let found = only("uneven-dealing", &recipe, &request).remove(0);
        assert!(
            found.message.ends_with("no model over devices"),
            "{found:?}"
        );
    }

    #[test]
    fn an_uneven_plan_for_a_command_is_refused() {
        let words = "torchrun --nproc_per_node 4 run_clm.py --per_device_train_batch_size 8 \
                     --output_dir o --do_train";
        let recipe = recipe::read(&recipe::Request {
            command: words.split_whitespace().map(str::to_owned).collect(),
            settings: vec![recipe::Setting {
                flag: "--remainder",
                path: "batch.remainder",
                value: "uneven".to_owned(),
            }],
            ..Default::default()
        })
        .unwrap();
        let found = only("uneven-dealing", &recipe, &PlanRequest::gpus(6));
        assert_eq!(found[0].severity, Severity::Error);
        assert!(found[0].help.starts_with("use "), "{}", found[0].help);
    }

    #[test]
    fn note_names_the_batch_that_upstream_would_use() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::HandbookTrl;
        // The accumulation of a program that is not read is not known.
        assert!(only("global-batch-constant", &recipe, &PlanRequest::gpus(4)).is_empty());
        recipe.spec.batch.accumulation = Some(1);
        let found = only("global-batch-constant", &recipe, &PlanRequest::gpus(4));
        assert_eq!(
            found[0].message,
            "as written, 4 data-parallel ranks would train with 4 × 16 × 1 = 64 samples a step \
             instead of 128"
        );
        assert!(only("global-batch-constant", &recipe, &PlanRequest::gpus(8)).is_empty());
    }

    #[test]
    fn both_numbers_and_the_exact_counts_are_named() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(64);
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.accumulation = Some(2);
        recipe.spec.batch.division = Division::Floored;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("effective-batch-floored", recipe, &PlanRequest::gpus(gpus))
        };
        let found = of(&recipe, 6);
        assert_eq!(found[0].severity, Severity::Warning);
        assert_eq!(
            found[0].message,
            "on 6 GPUs upstream trains on 60 of 64 samples a step: ⌊⌊64 / 2⌋ / 6⌋ = 5, and \
             6 × 5 × 2 = 60"
        );
        assert_eq!(
            found[0].help,
            "1, 2, 4, 8, 16, 32 GPUs drop no sample; `--global-batch-size 60` trains as upstream would"
        );
        for gpus in [1, 2, 4, 8, 16, 32] {
            assert!(of(&recipe, gpus).is_empty(), "{gpus}");
        }
        let empty = of(&recipe, 64);
        assert_eq!(empty[0].severity, Severity::Error);
        assert!(
            empty[0].message.contains("an empty batch"),
            "{}",
            empty[0].message
        );
        // In another world than the recipe's, the plan's numbers count, not the recipe's.
        recipe.spec.batch.gpus = Some(4);
        assert!(of(&recipe, 6).is_empty());
        recipe.spec.batch.gpus = None;
        recipe.spec.batch.division = Division::Exact;
        assert!(of(&recipe, 6).is_empty());
    }

    #[test]
    fn message_shows_the_batch_after_one_failure() {
        let mut recipe = recipe();
        recipe.spec.batch.auto_find = true;
        let found = only("auto-find-shrinks-batch", &recipe, &PlanRequest::gpus(8));
        assert!(
            found[0]
                .message
                .ends_with("16 becomes 14, 8 × 14 × 1 = 112"),
            "{}",
            found[0].message
        );
    }
}
