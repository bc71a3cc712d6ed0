//! A trainer's reaction to an out-of-memory error: the exact descent, or that of transformers with
//! `auto_find_batch_size`, which lowers only the micro-batch.
//!
//! Source: accelerate 16cb6eb, `utils/memory.py` (`find_executable_batch_size`): int(0.9 × b) on
//! every failure since 1.9.0, before that b // 2; at 0 it gives up.

use std::fmt;
use std::iter::successors;
use std::str::FromStr;

use serde::Serialize;

use super::batch_plan::Plan;
use super::descent::descend;
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
    /// The micro-batch, samples.
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
        let (ranks, per_device_batch_size) = (plan.data_parallel_size, plan.per_device_batch_size);
        let passes = plan.gradient_accumulation_steps;
        let global = plan.global_batch_size;
        let step = |per_device_batch_size: u64, passes: u64, global: u64| OomStep {
            per_device_batch_size,
            gradient_accumulation_steps: passes,
            global_batch_size: global,
        };
        if self == OomPolicy::Exact {
            let first = std::iter::once(per_device_batch_size);
            let exact = first.chain(descend(plan, global));
            return exact
                .map(|per_device_batch_size| {
                    step(
                        per_device_batch_size,
                        (global / per_device_batch_size).div_ceil(ranks),
                        global,
                    )
                })
                .collect();
        }
        successors(Some(per_device_batch_size), |per_device_batch_size| {
            self.smaller(*per_device_batch_size).filter(|m| *m > 0)
        })
        .map(|per_device_batch_size| {
            step(
                per_device_batch_size,
                passes,
                ranks
                    .saturating_mul(per_device_batch_size)
                    .saturating_mul(passes),
            )
        })
        .collect()
    }
}

impl FromStr for OomPolicy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(name, OomPolicy::ALL)
    }
}

#[cfg(test)]
mod tests {
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
}
