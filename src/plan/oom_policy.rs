//! A trainer's reaction to an out-of-memory error: the exact descent, or that of transformers with
//! `auto_find_batch_size`, which lowers only the micro-batch.
//!
//! Every rank takes the same step, because it depends on the plan alone. The planner makes the next plan
//! with [`super::PlanRequest::per_device_batch_size_limit`] set to the step's micro-batch, so that it checks every
//! rule again.
//!
//! Source: accelerate 16cb6eb, `utils/memory.py` (`find_executable_batch_size`): int(0.9 × b) on
//! every failure since 1.9.0, before that b // 2; at 0 it gives up.

use std::fmt;
use std::iter::{once, successors};
use std::str::FromStr;

use serde::Serialize;

use super::arithmetic::{divisors, gcd};
use super::batch_plan::Plan;
use crate::recipe::schema::spec::Remainder;
use crate::util::suggest::{UnknownName, by_name};

/// The reaction to an out-of-memory error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OomPolicy {
    /// The next smaller divisor, and more accumulation: the global batch stays.
    #[default]
    Exact,
    /// Nine tenths of the micro-batch, rounded down, with the same accumulation.
    Transformers,
    /// Half of the micro-batch, as before accelerate 1.9.
    #[serde(rename = "transformers-before-1.9")]
    TransformersBefore1_9,
}

impl fmt::Display for OomPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One step of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct OomStep {
    pub per_device_batch_size: u64,
    /// Forward passes per optimiser step.
    pub gradient_accumulation_steps: u64,
    /// Samples of a step with these numbers.
    pub global_batch_size: u64,
}

impl OomPolicy {
    /// The values of the command-line flag.
    const ALL: [OomPolicy; 3] = [
        OomPolicy::Exact,
        OomPolicy::Transformers,
        OomPolicy::TransformersBefore1_9,
    ];

    /// The micro-batch after a failure of `per_device_batch_size`, in upstream's policies; 0 is their end. `None`
    /// for the exact descent, which needs a plan.
    pub fn smaller(self, per_device_batch_size: u64) -> Option<u64> {
        match self {
            OomPolicy::Exact => None,
            OomPolicy::Transformers => {
                u64::try_from(u128::from(per_device_batch_size) * 9 / 10).ok()
            }
            OomPolicy::TransformersBefore1_9 => Some(per_device_batch_size / 2),
        }
    }

    /// The steps of repeated failures, from the plan's micro-batch down to the last.
    pub fn ladder(self, plan: &Plan) -> Vec<OomStep> {
        let (ranks, passes) = (plan.data_parallel_size, plan.gradient_accumulation_steps);
        let (first, global) = (plan.per_device_batch_size, plan.global_batch_size);
        let smaller: Vec<u64> = if self == OomPolicy::Exact {
            descend(plan, global).collect()
        } else {
            let sizes = successors(self.smaller(first), |size| self.smaller(*size));
            sizes.take_while(|size| *size > 0).collect()
        };
        let step = |size: u64| {
            let (passes, global) = match self {
                OomPolicy::Exact => ((global / size).div_ceil(ranks), global),
                _ => (passes, ranks.saturating_mul(size).saturating_mul(passes)),
            };
            OomStep {
                per_device_batch_size: size,
                gradient_accumulation_steps: passes,
                global_batch_size: global,
            }
        };
        once(first).chain(smaller).map(step).collect()
    }
}

/// The smaller micro-batches that keep the global batch exact with more accumulation, the largest
/// first; none at the end of the descent. `current` is the batch that the run has reached, samples:
/// if a schedule has changed the batch, that one stays exact too.
///
/// Under uneven dealing they divide both batches; under exact dealing they divide a rank's share of both.
/// The caller takes the first one for which the planner finds a plan: a rule may refuse a step, such as a
/// stage whose batch it does not divide.
pub fn descend(plan: &Plan, current: u64) -> impl Iterator<Item = u64> + use<> {
    let both = gcd(plan.global_batch_size, current);
    let share = match plan.facts.remainder {
        Remainder::Exact => both / plan.data_parallel_size.max(1),
        Remainder::Uneven => both,
    };
    let per_device_batch_size = plan.per_device_batch_size;
    divisors(share.max(1))
        .into_iter()
        .rev()
        .filter(move |&smaller| smaller < per_device_batch_size)
}

impl FromStr for OomPolicy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(name, OomPolicy::ALL)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::rules::testing::recipe;
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::corpus;

    /// From a micro-batch down to the 0 at which upstream gives up.
    fn down(policy: OomPolicy, start: u64) -> Vec<u64> {
        let next = |per_device_batch_size: &u64| {
            policy
                .smaller(*per_device_batch_size)
                .filter(|_| *per_device_batch_size > 0)
        };
        successors(Some(start), next).collect()
    }

    #[test]
    fn upstreams_back_off_is_reproduced_row_by_row() {
        let Some(root) = corpus::root() else { return };
        let table = std::fs::read_to_string(root.join("golden/oom_backoff.csv")).unwrap();
        let mut rows = corpus::csv(&table);
        assert_eq!(
            rows.next().unwrap(),
            [
                "start",
                "accelerate_ge_1_9_0_int_0_9",
                "accelerate_lt_1_9_0_floor_half"
            ]
        );
        let numbers =
            |text: &str| -> Vec<u64> { text.split(' ').map(|n| n.parse().unwrap()).collect() };
        let mut checked = 0;
        for row in rows {
            let start = row[0].parse().unwrap();
            assert_eq!(down(OomPolicy::Transformers, start), numbers(&row[1]));
            assert_eq!(
                down(OomPolicy::TransformersBefore1_9, start),
                numbers(&row[2])
            );
            checked += 1;
        }
        assert_eq!(checked, 13);
    }

    #[test]
    fn only_the_exact_descent_keeps_the_global_batch() {
        let plan = plan(&recipe(), &PlanRequest::gpus(4)).unwrap();
        let of = |policy: OomPolicy| {
            let steps = policy.ladder(&plan).into_iter();
            let steps = steps.map(|s| (s.per_device_batch_size, s.global_batch_size));
            steps.collect::<Vec<_>>()
        };
        assert_eq!(
            of(OomPolicy::Exact),
            [(16, 128), (8, 128), (4, 128), (2, 128), (1, 128)]
        );
        assert_eq!(
            of(OomPolicy::Transformers)[..3],
            [(16, 128), (14, 112), (12, 96)]
        );
        assert_eq!(
            of(OomPolicy::TransformersBefore1_9)[..3],
            [(16, 128), (8, 64), (4, 32)]
        );
        assert_eq!(of(OomPolicy::Transformers).last(), Some(&(1, 8)));
    }

    #[test]
    fn every_name_is_a_policy() {
        for name in ["exact", "transformers", "transformers-before-1.9"] {
            let policy: OomPolicy = name.parse().unwrap();
            assert_eq!(policy.to_string(), name);
        }
        assert!("halve".parse::<OomPolicy>().is_err());
    }

    /// The plans from the recipe's micro-batch down to the last.
    fn steps(
        global: u64,
        per_device_batch_size: u64,
        gpus: u64,
        remainder: Remainder,
    ) -> Vec<Plan> {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(global);
        recipe.spec.batch.per_device_batch_size = Some(per_device_batch_size);
        recipe.spec.batch.remainder = remainder;
        let mut request = PlanRequest::gpus(gpus);
        let mut plans = vec![plan(&recipe, &request).unwrap()];
        while let Some(per_device_batch_size) = descend(&plans[plans.len() - 1], global).next() {
            request.per_device_batch_size_limit = Some(per_device_batch_size);
            plans.push(plan(&recipe, &request).unwrap());
        }
        plans
    }

    #[test]
    fn descent_steps_through_the_divisors_down_to_one() {
        let proofs: Vec<String> = steps(96, 12, 4, Remainder::Exact)
            .into_iter()
            .map(|plan| plan.formula)
            .collect();
        assert_eq!(
            proofs,
            [
                "4 × 12 × 2 = 96",
                "4 × 8 × 3 = 96",
                "4 × 6 × 4 = 96",
                "4 × 4 × 6 = 96",
                "4 × 3 × 8 = 96",
                "4 × 2 × 12 = 96",
                "4 × 1 × 24 = 96"
            ]
        );
    }

    #[test]
    fn uneven_dealing_descends_through_the_divisors_of_the_batch() {
        let micros: Vec<u64> = steps(128, 16, 3, Remainder::Uneven)
            .iter()
            .map(|plan| plan.per_device_batch_size)
            .collect();
        assert_eq!(micros, [16, 8, 4, 2, 1]);
    }

    #[test]
    fn steps_divide_a_grown_batch_too() {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(12);
        recipe.spec.batch.per_device_batch_size = Some(6);
        let planned = plan(&recipe, &PlanRequest::gpus(1)).unwrap();
        // 4 divides the base batch of 12, but not the 18 that the run has reached.
        assert_eq!(descend(&planned, 12).collect::<Vec<_>>(), [4, 3, 2, 1]);
        assert_eq!(descend(&planned, 18).collect::<Vec<_>>(), [3, 2, 1]);
    }

    proptest! {
        #[test]
        fn every_step_divides_the_batch_that_the_run_has_reached(
            base in 1..60u64, times in 1..20u64, gpus in 1..5u64, per_device_batch_size in 1..64u64, uneven: bool,
        ) {
            let mut recipe = recipe();
            recipe.spec.batch.global = Some(base * gpus);
            recipe.spec.batch.per_device_batch_size = Some(per_device_batch_size);
            recipe.spec.elasticity = crate::recipe::schema::spec::Elasticity {
                min: Some(gpus),
                max: Some(gpus),
                spares: 0,
            };
            if uneven {
                recipe.spec.batch.global = Some(base * gpus + gpus - 1);
                recipe.spec.batch.remainder = Remainder::Uneven;
            }
            let first = plan(&recipe, &PlanRequest::gpus(gpus)).unwrap();
            let current = first.global_batch_size + times * first.quantum;
            for smaller in descend(&first, current) {
                let request = PlanRequest {
                    per_device_batch_size_limit: Some(smaller),
                    current_batch: Some(current),
                    ..PlanRequest::gpus(gpus)
                };
                let next = plan(&recipe, &request).unwrap();
                prop_assert_eq!(next.per_device_batch_size, smaller);
                prop_assert_eq!(current % next.quantum, 0);
                for batch in [next.global_batch_size, current] {
                    let dealt: u64 = next.deal(batch).iter().sum();
                    prop_assert_eq!(dealt * smaller, batch);
                }
            }
        }

        #[test]
        fn descent_keeps_the_global_batch_and_ends_at_one(
            share in 1..300u64, gpus in 1..9u64, per_device_batch_size in 1..64u64, uneven: bool,
        ) {
            let remainder = if uneven { Remainder::Uneven } else { Remainder::Exact };
            let global = if uneven { share + gpus } else { share * gpus };
            let plans = steps(global, per_device_batch_size, gpus, remainder);
            for pair in plans.windows(2) {
                prop_assert!(pair[1].per_device_batch_size < pair[0].per_device_batch_size);
            }
            for plan in &plans {
                let dealt: u64 = plan.deal(global).iter().sum();
                prop_assert_eq!(dealt * plan.per_device_batch_size, global);
            }
            prop_assert_eq!(plans[plans.len() - 1].per_device_batch_size, 1);
        }
    }
}
