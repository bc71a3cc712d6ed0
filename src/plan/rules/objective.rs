//! Batches that a loss or an objective needs.

use super::built_in::trains;
use super::{Case, Check, Findings, Rule, file, native};
use crate::objective::Kl;
use crate::plan::Runner;
use crate::plan::arithmetic::product;
use crate::plan::draft::generation_batch;
use crate::recipe::schema::spec::{Objective, Strategy};
use crate::recipe::{Dialect, Severity};
use crate::util::format::count;

pub(super) const RULES: &[&Rule] = &[
    &GENERATION_BATCH_DIVISIBLE,
    &MINI_BATCH_DIVISIBLE,
    &KTO_BATCH_MIN,
    &KTO_MICRO_BATCH,
    &UNPAIRED_BATCH_MIN,
    &FSDP_BATCH_MIN,
];

const GENERATION_BATCH_DIVISIBLE: Rule = Rule {
    id: "generation-batch-divisible",
    severity: Severity::Error,
    summary: "the generation batch of GRPO or RLOO does not hold whole groups, or does not divide into whole passes",
    text: include_str!("texts/generation-batch-divisible.md"),
    wrong: native(
        "--gpus 8",
        "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_generations: 8, generation_batch_size: 96}\n",
    ),
    right: native(
        "--gpus 8",
        "  objective: grpo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_generations: 8, generation_batch_size: 128}\n",
    ),
    check: Check::Plan(generation_batch_divisible),
};

fn generation_batch_divisible(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let Some(default) = spec.objective.default_generations() else {
        return;
    };
    let grpo = spec.objective == Objective::Grpo;
    if grpo && spec.batch.auto_find {
        let key = case.key("batch.auto_find");
        findings.at(
            &["batch.auto_find"],
            format!("{key} with GRPO: a smaller batch no longer holds whole groups"),
            "remove it: TRL refuses it too",
        );
    }
    let (context, sequence) = (spec.parallel.context, spec.parallel.sequence);
    if grpo && case.recipe.dialect != Dialect::Native && (context > 1 || sequence > 1) {
        findings.at(
            &["parallel.context", "parallel.sequence"],
            format!("GRPO with context-parallel size {context} and sequence-parallel size {sequence}"),
            "set both to 1: TRL builds its inputs after generation and cannot cut them along the sequence",
        );
    }
    let generation = &spec.generation;
    if generation.counts_prompts {
        return;
    }
    let paths = [
        "generation.generation_batch_size",
        "generation.steps_per_generation",
        "generation.num_generations",
        "batch.global",
        "batch.per_device_batch_size",
    ];
    let [size, steps, number, ..] = paths.map(|path| case.key(path));
    if generation.generation_batch_size.is_some() && generation.steps_per_generation.is_some() {
        let message = format!("{size} and {steps} are both given");
        findings.at(&[paths[1], paths[0]], message, "leave one of them out");
        return;
    }
    let group = generation.num_generations.unwrap_or(default);
    if group < 2 {
        let message = format!("{number} is {group}, but a group needs at least 2 completions");
        findings.at(&[paths[2]], message, "use 2 or more");
        return;
    }
    let Some(batch) = generation_batch(spec, case.draft) else {
        return;
    };
    if !batch.is_multiple_of(group) {
        findings.at(
            &paths,
            format!("a generation batch of {batch} does not hold whole groups of {group}"),
            format!(
                "use a multiple of {group}, or another {number}; if the batch counts prompts, as in TRL before 0.15, set {}",
                case.set("generation.counts_prompts", "true")
            ),
        );
    }
    if let Some(split) = case.draft.split
        && generation.group_in_pass
        && let Some(pass) = product(&[split.ranks, split.per_device_batch_size])
        && !pass.is_multiple_of(group)
    {
        let (ranks, per_device_batch_size) = (split.ranks, split.per_device_batch_size);
        findings.at(
            &paths,
            format!(
                "a pass of {ranks} × {per_device_batch_size} = {pass} samples does not hold whole groups of {group}, \
                 which TRL before 0.17 needs"
            ),
            format!("use a micro-batch with which a pass is a multiple of {group}, another world, or TRL 0.17"),
        );
        return;
    }
    if let Some(split) = case.draft.split
        && let (ranks, per_device_batch_size) = (split.ranks, split.per_device_batch_size)
        && let Some(pass) = product(&[ranks, per_device_batch_size])
        && !batch.is_multiple_of(pass)
    {
        findings.at(
            &paths,
            format!(
                "a generation batch of {batch} is not a multiple of a pass, {ranks} × {per_device_batch_size} = \
                 {pass} samples"
            ),
            format!("use a multiple of {pass} for {size}, or another world"),
        );
    }
}

/// Samples that whitening needs in a mini-batch.
const WHITENED: u64 = 8;

const MINI_BATCH_DIVISIBLE: Rule = Rule {
    id: "mini-batch-divisible",
    severity: Severity::Error,
    summary: "PPO's mini-batches do not divide the samples of one device",
    text: include_str!("texts/mini-batch-divisible.md"),
    wrong: native(
        "--gpus 8",
        "  objective: ppo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_mini_batches: 3}\n",
    ),
    right: native(
        "--gpus 8",
        "  objective: ppo\n  batch: {global: 64, per_device_batch_size: 8}\n  generation: {num_mini_batches: 4}\n",
    ),
    check: Check::Plan(mini_batch_divisible),
};

fn mini_batch_divisible(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let (Some(parts), Some(split)) = (spec.generation.num_mini_batches, case.draft.split) else {
        return;
    };
    if spec.objective != Objective::Ppo || parts == 0 {
        return;
    }
    let (per_device_batch_size, passes) = (split.per_device_batch_size, split.accumulation());
    let share = per_device_batch_size * passes;
    let part = share / parts;
    if !share.is_multiple_of(parts) {
        findings.at(
            &["generation.num_mini_batches"],
            format!(
                "{parts} mini-batches do not divide the {per_device_batch_size} × {passes} = {share} samples of a device"
            ),
            format!("use a divisor of {share}, or another world"),
        );
    } else if spec.generation.whiten_rewards && part < WHITENED {
        findings.at(
            &["generation.whiten_rewards", "generation.num_mini_batches"],
            format!("{share} / {parts} = {part} samples in a device's mini-batch are too few for whitening, which needs {WHITENED}"),
            "use fewer mini-batches or devices, or set `whiten_rewards` to false",
        );
    }
}

const KTO_BATCH_MIN: Rule = Rule {
    id: "kto-batch-min",
    severity: Severity::Error,
    summary: "KTO needs a micro-batch of at least 2",
    text: include_str!("texts/kto-batch-min.md"),
    wrong: native(
        "--gpus 32",
        "  objective: kto\n  preference: {kl: micro-batch}\n  batch: {global: 32, per_device_batch_size: 4}\n",
    ),
    right: native(
        "--gpus 16",
        "  objective: kto\n  preference: {kl: micro-batch}\n  batch: {global: 32, per_device_batch_size: 4}\n",
    ),
    check: Check::Plan(kto_batch_min),
};

fn kto_batch_min(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let Some(split) = case.draft.split else {
        return;
    };
    let too_small = split.per_device_batch_size < 2;
    if !too_small || spec.objective != Objective::Kto || spec.generation.without_kl {
        return;
    }
    let pairs = Pairs::of(case);
    if pairs == Pairs::GlobalBatch {
        return;
    }
    let paths = ["batch.per_device_batch_size"];
    let message = format!(
        "KTO with a micro-batch of {} cannot estimate its KL term: {}",
        split.per_device_batch_size,
        split.formula()
    );
    let help = match spec.batch.per_device_batch_size {
        Some(1) => format!("raise {} to 2 or more", case.key(paths[0])),
        _ if split.ranks * 2 > split.batch() => {
            format!("use at most {} data-parallel ranks", split.batch() / 2)
        }
        _ => "use a world in which every rank gets an even number of samples".to_owned(),
    };
    // HALOs requires only two samples over all devices (`unpaired-batch-min`), and continues.
    if case.recipe.dialect == Dialect::Halos || pairs == Pairs::Undecided {
        findings.warn(&paths, message, help);
    } else {
        findings.at(&paths, message, help);
    }
}

const KTO_MICRO_BATCH: Rule = Rule {
    id: "kto-micro-batch",
    severity: Severity::Warning,
    summary: "another micro-batch changes KTO's loss",
    text: include_str!("texts/kto-micro-batch.md"),
    wrong: native(
        "--gpus 16",
        "  objective: kto\n  preference: {kl: micro-batch}\n  batch: {global: 32, per_device_batch_size: 4}\n",
    ),
    right: native(
        "--gpus 4",
        "  objective: kto\n  preference: {kl: micro-batch}\n  batch: {global: 32, per_device_batch_size: 4}\n",
    ),
    check: Check::Plan(kto_micro_batch),
};

fn kto_micro_batch(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let (Some(split), Some(of_recipe)) = (case.draft.split, spec.batch.per_device_batch_size)
    else {
        return;
    };
    let has_kl = spec.objective == Objective::Kto && !spec.generation.without_kl;
    let planned = split.per_device_batch_size;
    if !has_kl || planned == of_recipe || Pairs::of(case) == Pairs::GlobalBatch {
        return;
    }
    findings.warn(
        &["batch.per_device_batch_size"],
        format!(
            "the plan's micro-batch is {planned} instead of {of_recipe}, so KTO's KL term has other pairs: {}",
            split.formula()
        ),
        format!(
            "use a world in which {of_recipe} × ranks divides {}, so that only accumulation changes",
            split.batch()
        ),
    );
}

/// Where the rows are that KTO's KL term pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pairs {
    MicroBatch,
    /// As the built-in trainer makes them.
    GlobalBatch,
    /// It is undecided which trainer runs the plan.
    Undecided,
}

impl Pairs {
    fn of(case: &Case<'_>) -> Pairs {
        if case.spec().preference.kl != Kl::Global || !trains(case) {
            return Pairs::MicroBatch;
        }
        match case.request.runner {
            Runner::External { .. } => Pairs::MicroBatch,
            Runner::Any { .. } if case.recipe.dialect != Dialect::Native => Pairs::Undecided,
            Runner::Any { .. } | Runner::BuiltIn { .. } => Pairs::GlobalBatch,
        }
    }
}

/// Objectives for which HALOs loads unpaired feedback.
const UNPAIRED: [Objective; 3] = [Objective::Kto, Objective::Ppo, Objective::Grpo];

const UNPAIRED_BATCH_MIN: Rule = Rule {
    id: "unpaired-batch-min",
    severity: Severity::Error,
    summary: "a loss on unpaired feedback needs more than one sample over all devices",
    text: include_str!("texts/unpaired-batch-min.md"),
    wrong: file(
        "--gpus 1 --dialect halos --dialect-version head",
        "model: {batch_size: 2, gradient_accumulation_steps: 2, eval_batch_size: 2}\nloss: {trainer: KTOTrainer, dataloader: UnpairedPreferenceDataLoader}\n",
    ),
    right: file(
        "--gpus 2 --dialect halos --dialect-version head",
        "model: {batch_size: 8, gradient_accumulation_steps: 2, eval_batch_size: 8}\nloss: {trainer: KTOTrainer, dataloader: UnpairedPreferenceDataLoader}\n",
    ),
    check: Check::Plan(unpaired_batch_min),
};

fn unpaired_batch_min(case: &Case<'_>, findings: &mut Findings<'_>) {
    let objective = case.spec().objective;
    if objective == Objective::Kto && Pairs::of(case) == Pairs::GlobalBatch {
        return;
    }
    if let Some(split) = case.draft.split
        && case.recipe.dialect == Dialect::Halos
        && UNPAIRED.contains(&objective)
        && split.ranks * split.per_device_batch_size <= 1
    {
        findings.at(
            &["batch.global", "batch.accumulation"],
            format!(
                "{objective} needs more than one sample in an accumulation step: {} steps of 1, {}",
                split.micro_batches,
                split.formula()
            ),
            format!(
                "use 2 or more data-parallel ranks, raise {}, or lower {}",
                case.key("batch.global"),
                case.key("batch.accumulation")
            ),
        );
    }
}

/// Samples on a GPU from which upstream reports that FSDP is faster.
const LEAST: u64 = 2;

const FSDP_BATCH_MIN: Rule = Rule {
    id: "fsdp-batch-min",
    severity: Severity::Warning,
    summary: "fewer than 2 samples a GPU make FSDP slow",
    text: include_str!("texts/fsdp-batch-min.md"),
    wrong: file(
        "--gpus 8 --dialect dpo",
        "trainer: FSDPTrainer\nbatch_size: 16\ngradient_accumulation_steps: 2\neval_batch_size: 16\n",
    ),
    right: file(
        "--gpus 8 --dialect dpo",
        "trainer: FSDPTrainer\nbatch_size: 32\ngradient_accumulation_steps: 2\neval_batch_size: 16\n",
    ),
    check: Check::Plan(fsdp_batch_min),
};

fn fsdp_batch_min(case: &Case<'_>, findings: &mut Findings<'_>) {
    if let Some(split) = case.draft.split
        && case.recipe.dialect == Dialect::Dpo
        && case.spec().parallel.strategy == Strategy::Fsdp
        && split.per_device_batch_size < LEAST
    {
        findings.at(
            &["batch.global", "batch.accumulation"],
            format!(
                "an FSDP trainer with {} a GPU gains little: {}",
                count(split.per_device_batch_size, "sample"),
                split.formula()
            ),
            format!(
                "use fewer GPUs, or lower {}",
                case.key("batch.accumulation")
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::objective::Kl;
    use crate::plan::rules::testing::{launched, only, recipe};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::schema::spec::{Division, Objective, Strategy};
    use crate::recipe::{Dialect, Recipe, Severity};

    fn grpo() -> Recipe {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Grpo;
        recipe.spec.generation.num_generations = Some(8);
        recipe
    }

    fn messages(recipe: &Recipe, gpus: u64) -> Vec<String> {
        let found = only(
            "generation-batch-divisible",
            recipe,
            &PlanRequest::gpus(gpus),
        );
        found.into_iter().map(|d| d.message).collect()
    }

    #[test]
    fn whole_groups_and_whole_passes_are_required() {
        let mut recipe = grpo();
        assert!(messages(&recipe, 8).is_empty());
        recipe.spec.generation.generation_batch_size = Some(100);
        assert_eq!(
            messages(&recipe, 8),
            [
                "a generation batch of 100 does not hold whole groups of 8",
                "a generation batch of 100 is not a multiple of a pass, 8 × 16 = 128 samples"
            ]
        );
        recipe.spec.generation.steps_per_generation = Some(2);
        assert!(messages(&recipe, 8)[0].contains("both given"));
    }

    #[test]
    fn trl_before_0_17_needs_whole_groups_in_a_pass() {
        let mut recipe = grpo();
        recipe.spec.generation.num_generations = Some(32);
        assert!(messages(&recipe, 1).is_empty());
        recipe.spec.generation.group_in_pass = true;
        assert_eq!(
            messages(&recipe, 1),
            [
                "a pass of 1 × 16 = 16 samples does not hold whole groups of 32, which TRL before 0.17 needs"
            ]
        );
        assert!(messages(&recipe, 8).is_empty());
    }

    #[test]
    fn rloo_compares_two_completions_by_default() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Rloo;
        recipe.spec.batch.auto_find = true;
        assert!(messages(&recipe, 8).is_empty());
        recipe.spec.generation.num_generations = Some(1);
        assert!(messages(&recipe, 8)[0].contains("at least 2 completions"));
        recipe.spec.generation.num_generations = Some(3);
        assert!(messages(&recipe, 8)[0].contains("whole groups of 3"));
    }

    #[test]
    fn steps_per_generation_follow_the_world() {
        let mut recipe = grpo();
        recipe.spec.batch.global = None;
        recipe.spec.batch.accumulation = Some(1);
        recipe.spec.batch.gpus = Some(8);
        recipe.spec.generation.steps_per_generation = Some(2);
        let plan = plan(&recipe, &PlanRequest::gpus(4)).unwrap();
        let change = plan
            .facts
            .adjusted
            .iter()
            .find(|a| a.key.contains("steps_per_generation"));
        // 2 × 16 × 8 = 256 completions are 4 passes of 16 × 4.
        assert_eq!(
            change.map(|a| (a.from.as_str(), a.to.as_str())),
            Some(("2", "4"))
        );
    }

    #[test]
    fn whitening_needs_eight_samples() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Ppo;
        recipe.spec.generation.num_mini_batches = Some(2);
        recipe.spec.generation.whiten_rewards = true;
        let of = |gpus| only("mini-batch-divisible", &recipe, &PlanRequest::gpus(gpus));
        assert!(of(8).is_empty());
        assert!(of(16)[0].message.starts_with("8 / 2 = 4 samples"));
    }

    #[test]
    fn mini_batches_divide_a_devices_share() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Ppo;
        recipe.spec.generation.num_mini_batches = Some(4);
        let of = |gpus| only("mini-batch-divisible", &recipe, &PlanRequest::gpus(gpus));
        assert!(of(8).is_empty());
        assert!(of(32).is_empty());
        assert!(
            of(64)[0]
                .message
                .contains("4 mini-batches do not divide the 2 × 1 = 2 samples")
        );
    }

    #[test]
    fn one_sample_per_device_is_refused_after_the_rescale() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Kto;
        recipe.spec.preference.kl = Kl::MicroBatch;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("kto-batch-min", recipe, &PlanRequest::gpus(gpus))
        };
        assert!(of(&recipe, 8).is_empty());
        assert_eq!(
            of(&recipe, 128)[0].help,
            "use at most 64 data-parallel ranks"
        );
        recipe.spec.batch.per_device_batch_size = Some(1);
        assert!(of(&recipe, 8)[0].help.starts_with("raise"));
        recipe.dialect = Dialect::Halos;
        assert_eq!(of(&recipe, 8)[0].severity, Severity::Warning);
        // Of the whole global batch: upstream's trainer refuses what the built-in one runs.
        recipe.spec.preference.kl = Kl::Global;
        recipe.dialect = Dialect::HandbookTrl;
        assert_eq!(of(&recipe, 8)[0].severity, Severity::Warning);
        assert!(launched("kto-batch-min", &recipe).is_empty());
        recipe.dialect = Dialect::Native;
        assert!(of(&recipe, 8).is_empty());
    }

    #[test]
    fn another_micro_batch_changes_the_loss_of_kto() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Kto;
        recipe.spec.preference.kl = Kl::MicroBatch;
        let of = |recipe: &Recipe, gpus| {
            let found = only("kto-micro-batch", recipe, &PlanRequest::gpus(gpus));
            found.into_iter().map(|d| d.message).collect::<Vec<_>>()
        };
        let small = of(&recipe, 64);
        assert!(
            small[0].starts_with("the plan's micro-batch is 2 instead of 16"),
            "{small:?}"
        );
        assert!(of(&recipe, 8).is_empty());
        recipe.spec.preference.kl = Kl::Global;
        assert!(of(&recipe, 64).is_empty());
        recipe.dialect = Dialect::HandbookTrl;
        assert_eq!(of(&recipe, 64).len(), 1);
        recipe.spec.objective = Objective::Dpo;
        assert!(of(&recipe, 64).is_empty());
    }

    #[test]
    fn one_sample_over_all_devices_is_refused_for_unpaired_losses() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Halos;
        recipe.spec.batch.global = Some(4);
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.accumulation = Some(4);
        recipe.spec.batch.division = Division::Exact;
        let mut of = |objective, gpus| {
            recipe.spec.objective = objective;
            only("unpaired-batch-min", &recipe, &PlanRequest::gpus(gpus)).len()
        };
        for objective in [Objective::Kto, Objective::Ppo, Objective::Grpo] {
            assert_eq!(of(objective, 1), 1);
            assert_eq!(of(objective, 2), 0);
        }
        assert_eq!(of(Objective::Dpo, 1), 0);
        recipe.dialect = Dialect::HandbookTrl;
        recipe.spec.objective = Objective::Kto;
        assert!(only("unpaired-batch-min", &recipe, &PlanRequest::gpus(1)).is_empty());
    }

    #[test]
    fn one_sample_per_gpu_warns_for_fsdp_only() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Dpo;
        recipe.spec.parallel.strategy = Strategy::Fsdp;
        recipe.spec.batch.global = Some(32);
        recipe.spec.batch.per_device_batch_size = None;
        recipe.spec.batch.accumulation = Some(2);
        recipe.spec.batch.division = Division::Floored;
        let of = |recipe: &crate::recipe::Recipe, gpus| {
            only("fsdp-batch-min", recipe, &PlanRequest::gpus(gpus)).len()
        };
        assert_eq!((of(&recipe, 8), of(&recipe, 16)), (0, 1));
        recipe.spec.parallel.strategy = Strategy::Ddp;
        assert_eq!(of(&recipe, 16), 0);
    }
}
