//! Tests of the controller: helpers, and properties of every schedule. `fixed` compares fixed schedules with
//! the paper's step counts, `guards` tests each guard of the norm test, `printed` tests the paper's form, and
//! `simulated` runs both estimators on simulated gradients.

mod fixed;
mod guards;
mod printed;
mod simulated;

use super::*;
use crate::recipe::schema::spec::NormTest;

const BUDGET: u64 = 2_000_000;

fn conditions(base_batch: u64, quantum: u64) -> Conditions {
    Conditions {
        base_batch,
        quantum,
        budget: BUDGET,
        micro_batch: quantum.min(4),
        workers: 4,
        sharded: false,
    }
}

fn controller(settings: NormTest) -> Controller {
    Controller::new(&BatchSchedule::NormTest(settings), conditions(256, 16)).unwrap()
}

/// Sums of a step of `batch` samples, as their expectation for this true V and |grad|².
fn expected(variance: f64, gradient: f64, batch: u64, groups: u64) -> Sums {
    Sums {
        groups,
        weighted: gradient + groups as f64 * variance / batch as f64,
        total: gradient + variance / batch as f64,
        batch,
    }
}

/// Lets the controller observe `steps` such steps; returns its decisions.
fn steps(controller: &mut Controller, steps: u64, variance: f64, gradient: f64) -> Vec<Decision> {
    (1..=steps)
        .map(|step| {
            let sums = expected(variance, gradient, controller.batch(), 64);
            controller.observe(step, 0, false, Some(sums))
        })
        .collect()
}

#[test]
fn a_generation_of_another_world_keeps_the_batch_or_is_refused() {
    let mut controller = controller(NormTest {
        growth_cap: None,
        ..NormTest::default()
    });
    steps(&mut controller, 1, 20.0, 1.0);
    assert_eq!(controller.batch(), 464);
    let mut same = controller.clone();
    let moved = Conditions {
        workers: 2,
        quantum: 8,
        micro_batch: 8,
        ..conditions(256, 8)
    };
    let change = same.refit(moved).unwrap().unwrap();
    insta::assert_snapshot!(change, @"the norm test now compares micro-batches of 8 samples instead of micro-batches of 4 samples and rounds batches to multiples of 8 instead of 16: later batches may differ from those of an undisturbed run");
    assert_eq!(same.batch(), 464);
    let refused = controller.refit(conditions(256, 32)).unwrap_err();
    insta::assert_snapshot!(refused.to_string(), @"the checkpoint's current batch 464 is not a multiple of the quantum 32; use 448 or 480, a smaller batch.per_device_batch_size, or narrow elasticity.min and elasticity.max");
    let refused = controller.refit(conditions(512, 16)).unwrap_err();
    insta::assert_snapshot!(refused.to_string(), @"the checkpoint's base batch is 256, the plan's is 512; resume with batch.global: 256");
    assert_eq!(controller.batch(), 464);
}

#[test]
fn a_generation_with_other_groups_is_reported() {
    let change = |groups, moved| {
        let settings = NormTest {
            groups,
            ..NormTest::default()
        };
        controller(settings).refit(moved).unwrap()
    };
    let halved = Conditions {
        workers: 2,
        ..conditions(256, 16)
    };
    // The same micro-batches, dealt to fewer workers.
    assert_eq!(change(Groups::MicroBatches, halved), None);
    insta::assert_snapshot!(change(Groups::Workers, halved).unwrap(), @"the norm test now compares 2 workers instead of 4 workers: later batches may differ from those of an undisturbed run");
    let smaller = Conditions {
        micro_batch: 1,
        ..conditions(256, 16)
    };
    insta::assert_snapshot!(change(Groups::MicroBatches, smaller).unwrap(), @"the norm test now compares micro-batches of 1 sample instead of micro-batches of 4 samples: later batches may differ from those of an undisturbed run");
    assert_eq!(change(Groups::Workers, smaller), None);
    let mut constant = Controller::new(&BatchSchedule::Constant, conditions(256, 16)).unwrap();
    assert_eq!(constant.refit(conditions(256, 8)), Ok(None));
}

#[test]
fn constant_schedules_measure_nothing() {
    let mut controller = Controller::new(&BatchSchedule::Constant, conditions(256, 16)).unwrap();
    assert_eq!(controller.requested_groups(1), None);
    let decision = controller.observe(1, 256, false, None);
    assert_eq!(
        (decision.next_batch, decision.reason, decision.threshold),
        (256, Reason::Scheduled, None)
    );
}
