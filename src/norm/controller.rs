//! The batch controller: chooses the global batch of every schedule through one set of calls.
//!
//! A controller is a value and part of every checkpoint. One rank lets it observe each step and broadcasts
//! the [`Decision`], or all ranks do so from the same all-reduced [`Sums`]. A restored controller continues
//! exactly where the saved one stopped.

use serde::{Deserialize, Serialize};

use super::coordinate::CoordinateTest;
use super::decision::{Decision, Reason};
use super::estimator::Sums;
use super::settings::{self, Conditions, ScheduleError};
use super::tester::Tester;
use crate::recipe::schema::spec::{BatchSchedule, Groups, LearningRateOnGrowth, ReplayRun, Stage};
use crate::util::format::count;

/// Chooses the global batch of every step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Controller {
    conditions: Conditions,
    policy: Policy,
    batch: u64,
}

/// A schedule with the state of its test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum Policy {
    Constant,
    NormTest(Box<Tester>),
    Stages { stages: Vec<Stage> },
    Replay { runs: Vec<ReplayRun> },
}

impl Policy {
    /// Checks the schedule against the conditions, and these against each other.
    fn check(&self, conditions: &Conditions) -> Result<(), ScheduleError> {
        conditions.check()?;
        let quantum = conditions.quantum;
        match self {
            Policy::Constant => Ok(()),
            Policy::NormTest(tester) => settings::check_norm_test(&tester.settings, conditions),
            Policy::Stages { stages } => {
                let batches: Vec<u64> = stages.iter().map(|stage| stage.batch).collect();
                settings::check_batches("schedule.stages", &batches, quantum)?;
                let sum: f64 = stages.iter().map(|stage| stage.share).sum();
                if (sum - 1.0).abs() > 1e-6 {
                    return Err(ScheduleError(format!(
                        "the shares of schedule.stages add up to {sum}; they must add up to 1"
                    )));
                }
                Ok(())
            }
            Policy::Replay { runs } => {
                let batches: Vec<u64> = runs.iter().map(|run| run.batch).collect();
                settings::check_batches("schedule.runs", &batches, quantum)
            }
        }
    }
}

impl Controller {
    /// The controller of a new run.
    pub fn new(schedule: &BatchSchedule, conditions: Conditions) -> Result<Self, ScheduleError> {
        let policy = match schedule.clone() {
            BatchSchedule::Constant => Policy::Constant,
            BatchSchedule::NormTest(settings) => Policy::NormTest(Box::new(Tester::new(settings))),
            BatchSchedule::Stages { stages } => Policy::Stages { stages },
            BatchSchedule::Replay { runs } => Policy::Replay { runs },
        };
        policy.check(&conditions)?;
        let mut controller = Controller {
            conditions,
            policy,
            batch: conditions.base_batch,
        };
        controller.batch = controller.scheduled(0, 0);
        Ok(controller)
    }

    /// Moves a controller to another generation's plan. The base batch must not differ, and the batch reached
    /// so far must be a multiple of the new quantum: a change of the world never changes the batch. Returns
    /// what makes later decisions of the norm test differ from those of an undisturbed run, if anything does.
    pub fn refit(&mut self, conditions: Conditions) -> Result<Option<String>, ScheduleError> {
        if conditions.base_batch != self.conditions.base_batch {
            let (was, now) = (self.conditions.base_batch, conditions.base_batch);
            return Err(ScheduleError(format!(
                "the checkpoint's base batch is {was}, the plan's is {now}; resume with batch.global: {was}"
            )));
        }
        self.policy.check(&conditions)?;
        let key = "the checkpoint's current batch";
        settings::multiple(key, self.batch, conditions.quantum)?;
        let change = self.change(&conditions);
        self.conditions = conditions;
        Ok(change)
    }

    /// How the norm test measures or rounds differently under `new` conditions. Decisions depend on the groups
    /// and on the quantum, and on nothing else that a plan sets.
    fn change(&self, new: &Conditions) -> Option<String> {
        let Policy::NormTest(tester) = &self.policy else {
            return None;
        };
        let old = &self.conditions;
        let mut changes = Vec::new();
        let groups = match tester.settings.measured_groups() {
            Groups::MicroBatches => [new, old].map(|conditions| {
                format!(
                    "micro-batches of {}",
                    count(conditions.micro_batch, "sample")
                )
            }),
            Groups::Workers => [new, old].map(|conditions| count(conditions.workers, "worker")),
        };
        let [now, before] = groups;
        if now != before {
            changes.push(format!("compares {now} instead of {before}"));
        }
        if old.quantum != new.quantum {
            changes.push(format!(
                "rounds batches to multiples of {} instead of {}",
                new.quantum, old.quantum
            ));
        }
        (!changes.is_empty()).then(|| {
            format!(
                "the norm test now {}: later batches may differ from those of an undisturbed run",
                changes.join(" and ")
            )
        })
    }

    /// The global batch of the next step, samples.
    pub fn batch(&self) -> u64 {
        self.batch
    }

    /// Factor of the next step's learning rate.
    pub fn learning_rate_factor(&self) -> f64 {
        match &self.policy {
            Policy::NormTest(tester)
                if tester.settings.learning_rate == LearningRateOnGrowth::Sqrt =>
            {
                (self.batch as f64 / self.conditions.base_batch as f64).sqrt()
            }
            _ => 1.0,
        }
    }

    /// The groups whose squared norms step `step` must measure, counted from 1: the gradient of every
    /// micro-batch, or every rank's accumulated gradient before the reduction.
    pub fn requested_groups(&self, step: u64) -> Option<Groups> {
        match &self.policy {
            Policy::NormTest(tester) => {
                tester.requested_groups(step, self.batch, self.conditions.quantum)
            }
            _ => None,
        }
    }

    /// The coordinate-wise test (a diagnostic) when it is due in step `step`, counted from 1.
    pub fn requested_coordinates(&self, step: u64) -> Option<CoordinateTest> {
        match &self.policy {
            Policy::NormTest(tester) => tester.coordinate_test(step),
            _ => None,
        }
    }

    /// Records a finished step and chooses the next batch. `step` counts from 1, `samples` are those consumed
    /// after the step, `warming_up` says whether the learning rate still rises, and `sums` holds the norms
    /// that [`Controller::requested_groups`] requested.
    pub fn observe(
        &mut self,
        step: u64,
        samples: u64,
        warming_up: bool,
        sums: Option<Sums>,
    ) -> Decision {
        let due = self.requested_groups(step).is_some();
        let mut decision = Decision {
            next_batch: self.scheduled(step, samples),
            ..Decision::default()
        };
        if let Policy::NormTest(tester) = &mut self.policy {
            decision.threshold = Some(tester.threshold());
            match sums {
                _ if !due => decision.reason = Reason::NotDue,
                None => decision.reason = Reason::NotMeasured,
                Some(sums) => {
                    match tester.decide(self.batch, &self.conditions, warming_up, &sums) {
                        Ok(decided) => decision = decided,
                        Err(why) => decision.reason = Reason::Undefined(why),
                    }
                }
            }
        }
        self.batch = decision.next_batch;
        decision
    }

    /// The batch of the step after `steps` steps and `samples` samples, without regard to tests: for the norm
    /// test, the current batch. A stage ends with its share of the budget, and the last stage or run never.
    fn scheduled(&self, steps: u64, samples: u64) -> u64 {
        let batch = match &self.policy {
            Policy::Constant | Policy::NormTest(_) => None,
            Policy::Stages { stages } => {
                let mut share = 0.0;
                let current = stages.iter().find(|stage| {
                    share += stage.share;
                    (samples as f64) < share * self.conditions.budget as f64
                });
                current.or(stages.last()).map(|stage| stage.batch)
            }
            Policy::Replay { runs } => {
                let mut end = 0u64;
                let current = runs.iter().find(|run| {
                    end = end.saturating_add(run.steps);
                    steps < end
                });
                current.or(runs.last()).map(|run| run.batch)
            }
        };
        batch.unwrap_or(self.batch)
    }
}

#[cfg(test)]
mod tests;
