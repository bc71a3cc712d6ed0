//! The out-of-memory descent: a smaller micro-batch, the same global batch.
//!
//! Every rank takes the same step, because it depends on the plan alone. The planner makes the next plan
//! with [`super::PlanRequest::per_device_batch_size_limit`] set to the step's micro-batch, so that it checks every rule
//! again.

use super::arithmetic::{divisors, gcd};
use super::batch_plan::Plan;
use crate::recipe::schema::spec::Remainder;

/// The smaller micro-batches that keep the global batch exact with more accumulation, the largest
/// first; none at the end of the descent. `current` is the batch that the run has reached, samples:
/// if a schedule has changed the batch, that one stays exact too.
///
/// Under uneven dealing they divide both batches; under exact dealing they divide a rank's share of both.
/// The caller takes the first one for which the planner finds a plan: a rule may refuse a step, such as a
/// stage whose batch it does not divide.
pub fn descend(plan: &Plan, current: u64) -> impl Iterator<Item = u64> + use<> {
    let both = gcd(plan.global_batch_size, current);
    let share = match plan.outline.remainder {
        Remainder::Exact => both / plan.data_parallel_size.max(1),
        Remainder::Uneven => both,
    };
    let per_device_batch_size = plan.per_device_batch_size;
    divisors(share.max(1))
        .into_iter()
        .rev()
        .filter(move |&smaller| smaller < per_device_batch_size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::rules::testing::recipe;
    use crate::plan::{PlanRequest, plan};

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
