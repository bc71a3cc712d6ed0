//! The planner and the norm test's controller compared.

use std::path::PathBuf;

use evenkeel::norm;
use evenkeel::plan::{self, PlanRequest};
use evenkeel::recipe::spec::{
    BatchSchedule, Estimator, Groups, NormTest, ReplayRun, Stage, Strategy as Sharding,
};
use evenkeel::recipe::{self, Recipe, Request, Severity};
use proptest::prelude::*;

fn read(path: PathBuf) -> Recipe {
    recipe::read(&Request {
        path: path.clone(),
        ..Request::default()
    })
    .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn schedule() -> impl Strategy<Value = BatchSchedule> {
    let test = (0.01..2.0, 1..=100_u64, 1..2000_u64, any::<[bool; 3]>()).prop_map(
        |(eta, interval, max_batch, [paper, workers, unsharded_accumulation])| {
            BatchSchedule::NormTest(NormTest {
                eta,
                interval,
                max_batch,
                estimator: if paper {
                    Estimator::Paper
                } else {
                    Estimator::Unbiased
                },
                groups: if workers {
                    Groups::Workers
                } else {
                    Groups::MicroBatches
                },
                unsharded_accumulation,
                ..NormTest::default()
            })
        },
    );
    let stage = (0..=4_u32, 1..300_u64).prop_map(|(quarters, batch)| Stage {
        share: f64::from(quarters) / 4.0,
        batch,
    });
    let stages = prop::collection::vec(stage, 0..4);
    let run = (1..300_u64, 1..9_u64).prop_map(|(batch, steps)| ReplayRun { batch, steps });
    let runs = prop::collection::vec(run, 0..4);
    prop_oneof![
        4 => test,
        2 => stages.prop_map(|stages| BatchSchedule::Stages { stages }),
        1 => runs.prop_map(|runs| BatchSchedule::Replay { runs }),
        1 => Just(BatchSchedule::Constant),
    ]
}

proptest! {
    /// The controller accepts exactly the schedules that the rules accept.
    #[test]
    fn the_rules_and_the_controller_agree_on_schedules(
        schedule in schedule(),
        (global, per_device_batch_size, gpus) in (1..300_u64, 1..20_u64, 1..9_u64),
        bounds: bool, sharded: bool, uneven: bool,
    ) {
        let mut recipe = read("examples/microllama-300m-ddp-norm.yaml".into());
        let spec = &mut recipe.spec;
        spec.batch = Default::default();
        spec.batch.global = Some(global);
        spec.batch.per_device_batch_size = Some(per_device_batch_size);
        if uneven {
            spec.batch.remainder = recipe::spec::Remainder::Uneven;
        }
        spec.parallel.strategy = if sharded { Sharding::Fsdp } else { Sharding::Ddp };
        spec.elasticity.min = bounds.then_some(gpus);
        spec.elasticity.max = bounds.then_some(gpus);
        spec.schedule = schedule;
        let request = PlanRequest::gpus(gpus);
        let draft = plan::examine(&recipe, &request);
        let (Some(quantum), Some(split)) = (draft.quantum, draft.split) else {
            return Ok(());
        };
        let conditions = norm::Conditions {
            base_batch: global,
            quantum,
            budget: 2_000_000,
            micro_batch: split.per_device_batch_size,
            workers: gpus,
            sharded,
        };
        let accepted = norm::Controller::new(&recipe.spec.schedule, conditions);
        // The controller reports a measurement of one group, which has no variance, at each step.
        let errors: Vec<&str> = draft
            .findings
            .iter()
            .filter(|d| d.severity == Severity::Error && d.rule != "one-group")
            .map(|d| d.rule.as_str())
            .collect();
        prop_assert_eq!(accepted.is_ok(), errors.is_empty(), "{:?} {:?}", accepted, errors);
    }
}
