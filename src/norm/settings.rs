//! Conditions on a schedule before a run starts, and their messages.
//!
//! The recipe reader checks the range of each number. This module checks the numbers against each other and
//! against the plan.

use serde::{Deserialize, Serialize};

use crate::recipe::schema::spec::{Estimator, Groups, NormTest};

/// Conditions that a generation's plan sets for the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    /// The base global batch, samples.
    pub base_batch: u64,
    /// Every batch is a multiple of this, samples; it divides the base batch.
    pub quantum: u64,
    /// The sample budget of the whole run.
    pub budget: u64,
    /// The micro-batch, samples; it divides the quantum.
    pub micro_batch: u64,
    /// Data-parallel ranks, J in the paper.
    pub workers: u64,
    /// Whether gradients are sharded (FSDP, ZeRO-2).
    pub sharded: bool,
}

/// Why a schedule cannot be run under a plan, and what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ScheduleError(pub(super) String);

impl Conditions {
    /// Checks that the plan's numbers fit together.
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let (quantum, micro_batch, base) = (self.quantum, self.micro_batch, self.base_batch);
        let positive = quantum > 0 && micro_batch > 0 && base > 0 && self.workers > 0;
        if !positive || !quantum.is_multiple_of(micro_batch) || !base.is_multiple_of(quantum) {
            return Err(ScheduleError(format!(
                "quantum {quantum} does not fit: it must be a multiple of micro-batch {micro_batch} and divide \
                 base batch {base}; plan again"
            )));
        }
        Ok(())
    }
}

/// Checks the batches of a fixed schedule.
pub(super) fn check_batches(key: &str, batches: &[u64], quantum: u64) -> Result<(), ScheduleError> {
    if batches.is_empty() {
        return Err(ScheduleError(format!(
            "{key} is empty; name at least one, or use `kind: constant`"
        )));
    }
    for (i, batch) in batches.iter().enumerate() {
        multiple(&format!("{key}.{i}.batch"), *batch, quantum)?;
    }
    Ok(())
}

/// Checks that every allowed world splits `batch` exactly.
pub(super) fn multiple(key: &str, batch: u64, quantum: u64) -> Result<(), ScheduleError> {
    if batch > 0 && batch.is_multiple_of(quantum) {
        return Ok(());
    }
    let below = (batch - batch % quantum).max(quantum);
    let above = below.saturating_add(quantum);
    Err(ScheduleError(format!(
        "{key} {batch} is not a multiple of the quantum {quantum}; use {below} or {above}, \
         a smaller batch.per_device_batch_size, or narrow elasticity.min and elasticity.max"
    )))
}

pub(super) fn check_norm_test(
    settings: &NormTest,
    conditions: &Conditions,
) -> Result<(), ScheduleError> {
    let (max, base) = (settings.max_batch, conditions.base_batch);
    if max < base {
        return Err(ScheduleError(format!(
            "schedule.max_batch {max} is below the base batch {base}; raise it, or lower batch.global"
        )));
    }
    let accumulation = max.div_ceil(conditions.workers * conditions.micro_batch);
    let workers = conditions.sharded && settings.measured_groups() == Groups::Workers;
    if workers && accumulation > 1 && !settings.unsharded_accumulation {
        let asked = match settings.estimator {
            Estimator::Paper => "estimator: paper",
            Estimator::Unbiased => "groups: workers",
        };
        return Err(ScheduleError(format!(
            "{asked} needs each worker's gradient over up to {accumulation} micro-batches, which \
             sharding never holds unsharded; set schedule.unsharded_accumulation: true (a whole \
             gradient in memory on every rank), or use estimator: unbiased with groups: micro-batches"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norm::Controller;
    use crate::recipe::schema::spec::{BatchSchedule, ReplayRun, Stage};

    fn conditions() -> Conditions {
        Conditions {
            base_batch: 256,
            quantum: 16,
            budget: 2_000_000,
            micro_batch: 4,
            workers: 4,
            sharded: false,
        }
    }

    /// The refusal of a schedule; `None` if it is accepted.
    fn refused(schedule: &BatchSchedule, conditions: Conditions) -> Option<String> {
        let refused = Controller::new(schedule, conditions).err();
        refused.map(|error| error.to_string())
    }

    #[test]
    fn a_maximum_below_the_base_batch_is_refused() {
        let settings = NormTest {
            max_batch: 128,
            ..NormTest::default()
        };
        assert_eq!(
            refused(&BatchSchedule::NormTest(settings), conditions()).as_deref(),
            Some(
                "schedule.max_batch 128 is below the base batch 256; raise it, or lower batch.global"
            )
        );
    }

    #[test]
    fn fixed_schedules_are_refused_where_they_cannot_be_split_or_add_up() {
        let stages = |stages: &[(f64, u64)]| BatchSchedule::Stages {
            stages: stages
                .iter()
                .map(|&(share, batch)| Stage { share, batch })
                .collect(),
        };
        let replay = |runs: &[(u64, u64)]| BatchSchedule::Replay {
            runs: runs
                .iter()
                .map(|&(batch, steps)| ReplayRun { batch, steps })
                .collect(),
        };
        let refusal = |schedule| refused(schedule, conditions()).unwrap();
        let messages = [
            refusal(&stages(&[])),
            refusal(&stages(&[(0.5, 256), (0.25, 512)])),
            refusal(&stages(&[(0.5, 256), (0.5, 500)])),
            refusal(&replay(&[])),
            refusal(&replay(&[(256, 1), (8, 3)])),
            refusal(&replay(&[(0, 3)])),
        ];
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn a_quantum_that_no_world_could_use_is_refused() {
        for (quantum, micro_batch) in [(0, 4), (16, 0), (24, 4), (16, 3), (512, 4)] {
            let conditions = Conditions {
                quantum,
                micro_batch,
                ..conditions()
            };
            let refused = refused(&BatchSchedule::Constant, conditions).unwrap();
            assert!(
                refused.starts_with(&format!("quantum {quantum} does not fit")),
                "{refused}"
            );
        }
    }

    #[test]
    fn sharded_workers_need_unsharded_accumulation_or_are_refused() {
        let sharded = Conditions {
            sharded: true,
            ..conditions()
        };
        let paper = NormTest {
            estimator: Estimator::Paper,
            ..NormTest::default()
        };
        let with = |settings: NormTest| refused(&BatchSchedule::NormTest(settings), sharded);
        let message = with(paper.clone()).unwrap();
        insta::assert_snapshot!(message);
        let workers = NormTest {
            groups: Groups::Workers,
            ..NormTest::default()
        };
        assert!(with(workers.clone()).is_some());
        for accepted in [
            NormTest {
                unsharded_accumulation: true,
                ..paper.clone()
            },
            NormTest {
                groups: Groups::MicroBatches,
                ..NormTest::default()
            },
        ] {
            assert_eq!(with(accepted), None);
        }
        // Without accumulation a worker has one micro-batch, whose gradient exists unsharded for a moment.
        let wide = Conditions {
            workers: 64,
            ..sharded
        };
        let small = NormTest {
            max_batch: 256,
            ..workers
        };
        assert_eq!(refused(&BatchSchedule::NormTest(small), wide), None);
    }
}
