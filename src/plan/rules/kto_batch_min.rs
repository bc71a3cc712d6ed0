//! `kto-batch-min`: KTO has at least 2 samples in a micro-batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::schema::spec::Objective;
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "kto-batch-min",
    severity: Severity::Error,
    summary: "KTO needs a micro-batch of at least 2",
    why: "KTO estimates its KL term from mismatched pairs within one device's micro-batch: each \
prompt with the next sample's completion. With a single sample the pair is the sample itself, and \
the term becomes its own reward. Accumulation does not help, because the pairs are made per forward \
pass. The loss `apo_zero_unpaired` has no such term. HALOs makes its pairs in the same way and refuses \
only a single sample over all devices, so there the finding is a warning.",
    upstream: "TRL f2cd577, `trainer/kto_trainer.py` (`calculate_KL`): raises \"Actual (not effective) batch size \
must be > 1\". HALOs 4831988, \
`train/dataloader.py` (`UnpairedPreferenceDataLoader`): the sample after each one in its micro-batch, \
which for a single one is itself.",
    wrong: Example {
        flags: "--gpus 32",
        recipe: native!("  objective: kto\n  batch: {global: 32, per_device_batch_size: 4}\n"),
    },
    right: Example {
        flags: "--gpus 16",
        recipe: native!("  objective: kto\n  batch: {global: 32, per_device_batch_size: 4}\n"),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(split) = case
        .draft
        .split
        .filter(|split| split.per_device_batch_size < 2)
    else {
        return;
    };
    if case.spec().objective != Objective::Kto || case.spec().generation.without_kl {
        return;
    }
    let global = split.per_device_batch_size * split.micro_batches;
    let help = match case.spec().batch.per_device_batch_size {
        Some(1) => format!(
            "raise {} to 2 or more",
            case.key("batch.per_device_batch_size")
        ),
        _ if split.ranks * 2 > global => {
            format!("use at most {} data-parallel ranks", global / 2)
        }
        _ => "use a world in which every rank gets an even number of samples".to_owned(),
    };
    // HALOs requires only two samples over all devices (`unpaired-batch-min`), and continues.
    let severity = match case.recipe.dialect {
        Dialect::Halos => Severity::Warning,
        _ => Severity::Error,
    };
    findings.add(
        severity,
        &["batch.per_device_batch_size"],
        format!(
            "KTO with a micro-batch of {} cannot estimate its KL term: {}",
            split.per_device_batch_size,
            split.formula()
        ),
        help,
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::Objective;
    use crate::recipe::{Dialect, Severity};

    #[test]
    fn one_sample_per_device_is_refused_after_the_rescale() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Kto;
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
    }
}
