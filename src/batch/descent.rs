//! The out-of-memory descent: a smaller micro-batch, the same global batch.
//!
//! Every rank comes to the same step, since it follows from the plan alone. The next plan is made
//! by the planner with [`super::PlanRequest::micro_limit`] set to the step's micro-batch, so that
//! every rule is checked again.

use super::arithmetic::divisors;
use super::plan::Plan;
use crate::recipe::spec::Remainder;

/// The next smaller micro-batch that keeps the global batch exact by more accumulation, or `None`
/// at the end of the descent.
///
/// Under uneven dealing it divides the global batch; under exact dealing a rank's share of it.
pub fn descend(plan: &Plan) -> Option<u64> {
    let share = match plan.remainder {
        Remainder::Exact => plan.global_batch_size / plan.data_parallel_size.max(1),
        Remainder::Uneven => plan.global_batch_size,
    };
    divisors(share.max(1))
        .into_iter()
        .rev()
        .find(|&micro| micro < plan.per_device_batch_size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::rules::testing::recipe;
    use crate::batch::{PlanRequest, plan};

    /// The micro-batches from the recipe's own down to the last.
    fn steps(global: u64, micro: u64, gpus: u64, remainder: Remainder) -> Vec<Plan> {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(global);
        recipe.spec.batch.micro = Some(micro);
        recipe.spec.batch.remainder = remainder;
        let mut request = PlanRequest::gpus(gpus);
        let mut plans = vec![plan(&recipe, &request).unwrap()];
        while let Some(micro) = descend(&plans[plans.len() - 1]) {
            request.micro_limit = Some(micro);
            plans.push(plan(&recipe, &request).unwrap());
        }
        plans
    }

    #[test]
    fn descent_goes_through_the_divisors_down_to_one() {
        let proofs: Vec<String> = steps(96, 12, 4, Remainder::Exact)
            .into_iter()
            .map(|plan| plan.proof)
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
    fn uneven_dealing_descends_too() {
        let micros: Vec<u64> = steps(128, 16, 3, Remainder::Uneven)
            .iter()
            .map(|plan| plan.per_device_batch_size)
            .collect();
        assert_eq!(micros, [16, 8, 4, 2, 1]);
    }

    proptest! {
        #[test]
        fn descent_keeps_the_global_batch_and_ends_at_one(
            share in 1..300u64, gpus in 1..9u64, micro in 1..64u64, uneven: bool,
        ) {
            let remainder = if uneven { Remainder::Uneven } else { Remainder::Exact };
            let global = if uneven { share + gpus } else { share * gpus };
            let plans = steps(global, micro, gpus, remainder);
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
