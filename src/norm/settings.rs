//! Conditions on a schedule before a run starts, and their messages.
//!
//! The recipe reader checks the range of each number. This module checks the numbers against each other and
//! against the plan.

use serde::{Deserialize, Serialize};

use crate::recipe::schema::spec::{BatchSchedule, Estimator, Groups, NormTest, ReplayRun, Stage};

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

/// Why a schedule cannot be run under a plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// The plan's numbers do not fit together.
    #[error(
        "quantum {quantum} does not fit: it must be a multiple of micro-batch {micro_batch} and divide \
         base batch {base}; plan again"
    )]
    Quantum {
        /// The quantum, in samples.
        quantum: u64,
        /// The micro-batch, in samples.
        micro_batch: u64,
        /// The base batch, in samples.
        base: u64,
    },
    /// The largest batch is below the first.
    #[error(
        "schedule.max_batch {max} is below the base batch {base}; raise it, or lower batch.global"
    )]
    MaximumBelowBase {
        /// The maximum, in samples.
        max: u64,
        /// The base batch, in samples.
        base: u64,
    },
    /// The shares of the stages are not the whole budget.
    #[error("the shares of schedule.stages add up to {sum}; they must add up to 1")]
    Shares {
        /// The sum of the shares; it must be 1.
        sum: f64,
    },
    /// A list of stages or runs is empty.
    #[error("{key} is empty; name at least one, or use `kind: constant`")]
    Empty {
        /// The setting's native path.
        key: &'static str,
    },
    /// A batch that some allowed world cannot split evenly.
    #[error(
        "{key} {batch} is not a multiple of the quantum {quantum}; use {below} or {above}, \
         a smaller batch.per_device_batch_size, or narrow elasticity.min and elasticity.max"
    )]
    NotAMultiple {
        /// The setting's native path.
        key: String,
        /// The batch, in samples.
        batch: u64,
        /// The quantum, in samples.
        quantum: u64,
        /// The nearest multiple below, at least the quantum itself.
        below: u64,
        /// The nearest multiple above.
        above: u64,
    },
    /// Under sharding no rank holds a worker's accumulated gradient.
    #[error(
        "{asked} needs each worker's gradient over up to {accumulation} micro-batches, which \
         sharding never holds unsharded; set schedule.unsharded_accumulation: true (a whole \
         gradient in memory on every rank), or use estimator: unbiased with groups: micro-batches"
    )]
    ShardedWorkers {
        /// The setting that requires it.
        asked: &'static str,
        /// Micro-batches that a worker accumulates at the maximum batch.
        accumulation: u64,
    },
    /// The checkpoint belongs to a run with another base batch.
    #[error(
        "the checkpoint's base batch is {was}, the plan's is {now}; resume with batch.global: {was}"
    )]
    BaseChanged {
        /// The checkpoint's base batch, in samples.
        was: u64,
        /// The plan's base batch, in samples.
        now: u64,
    },
}

/// Checks that every allowed world splits `batch` exactly.
pub(super) fn multiple(key: String, batch: u64, quantum: u64) -> Result<(), ScheduleError> {
    if batch > 0 && batch.is_multiple_of(quantum) {
        return Ok(());
    }
    let below = batch - batch % quantum;
    Err(ScheduleError::NotAMultiple {
        key,
        batch,
        quantum,
        below: below.max(quantum),
        above: below.max(quantum).saturating_add(quantum),
    })
}

impl Conditions {
    /// Checks that the plan's numbers fit together.
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let (quantum, micro_batch, base) = (self.quantum, self.micro_batch, self.base_batch);
        let positive = quantum > 0 && micro_batch > 0 && base > 0 && self.workers > 0;
        if positive && quantum.is_multiple_of(micro_batch) && base.is_multiple_of(quantum) {
            Ok(())
        } else {
            Err(ScheduleError::Quantum {
                quantum,
                micro_batch,
                base,
            })
        }
    }
}

/// Checks a schedule against the conditions. [`super::Controller::new`] calls it first; a planner can call it
/// before anything starts.
pub fn check(schedule: &BatchSchedule, conditions: &Conditions) -> Result<(), ScheduleError> {
    conditions.check()?;
    match schedule {
        BatchSchedule::Constant => Ok(()),
        BatchSchedule::NormTest(settings) => check_norm_test(settings, conditions),
        BatchSchedule::Stages { stages } => check_stages(stages, conditions.quantum),
        BatchSchedule::Replay { runs } => check_runs(runs, conditions.quantum),
    }
}

fn check_norm_test(settings: &NormTest, conditions: &Conditions) -> Result<(), ScheduleError> {
    let max_batch = settings.max_batch;
    if max_batch < conditions.base_batch {
        return Err(ScheduleError::MaximumBelowBase {
            max: max_batch,
            base: conditions.base_batch,
        });
    }
    let accumulation = max_batch.div_ceil(conditions.workers * conditions.micro_batch);
    if conditions.sharded
        && groups(settings) == Groups::Workers
        && accumulation > 1
        && !settings.unsharded_accumulation
    {
        return Err(ScheduleError::ShardedWorkers {
            asked: match settings.estimator {
                Estimator::Paper => "estimator: paper",
                Estimator::Unbiased => "groups: workers",
            },
            accumulation,
        });
    }
    Ok(())
}

/// The unit of a group; the printed estimator uses workers only.
pub fn groups(settings: &NormTest) -> Groups {
    match settings.estimator {
        Estimator::Paper => Groups::Workers,
        Estimator::Unbiased => settings.groups,
    }
}

fn check_stages(stages: &[Stage], quantum: u64) -> Result<(), ScheduleError> {
    if stages.is_empty() {
        return Err(ScheduleError::Empty {
            key: "schedule.stages",
        });
    }
    for (i, stage) in stages.iter().enumerate() {
        multiple(format!("schedule.stages.{i}.batch"), stage.batch, quantum)?;
    }
    let sum: f64 = stages.iter().map(|stage| stage.share).sum();
    if (sum - 1.0).abs() > 1e-6 {
        return Err(ScheduleError::Shares { sum });
    }
    Ok(())
}

fn check_runs(runs: &[ReplayRun], quantum: u64) -> Result<(), ScheduleError> {
    if runs.is_empty() {
        return Err(ScheduleError::Empty {
            key: "schedule.runs",
        });
    }
    for (i, run) in runs.iter().enumerate() {
        multiple(format!("schedule.runs.{i}.batch"), run.batch, quantum)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn refusal(schedule: &BatchSchedule) -> String {
        check(schedule, &conditions()).unwrap_err().to_string()
    }

    #[test]
    fn a_maximum_below_the_base_batch_is_refused() {
        let settings = NormTest {
            max_batch: 128,
            ..NormTest::default()
        };
        let refused = check(&BatchSchedule::NormTest(settings), &conditions());
        assert_eq!(
            refused,
            Err(ScheduleError::MaximumBelowBase {
                max: 128,
                base: 256
            })
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
            let refused = check(&BatchSchedule::Constant, &conditions);
            assert!(matches!(refused, Err(ScheduleError::Quantum { .. })));
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
        let with = |settings: NormTest| check(&BatchSchedule::NormTest(settings), &sharded);
        let message = with(paper.clone()).unwrap_err().to_string();
        insta::assert_snapshot!(message);
        let workers = NormTest {
            groups: Groups::Workers,
            ..NormTest::default()
        };
        assert!(with(workers.clone()).is_err());
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
            assert_eq!(with(accepted), Ok(()));
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
        assert_eq!(check(&BatchSchedule::NormTest(small), &wide), Ok(()));
    }
}
