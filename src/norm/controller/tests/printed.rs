//! The test as the paper prints it.

use super::*;
use crate::norm::testing::{Gradients, Random};
use crate::recipe::schema::spec::Estimator;

#[test]
fn the_printed_form_grows_at_once_by_whole_micro_batches_and_stops_at_the_maximum() {
    // J·M = 256/4 = 64 and T = 3722: micro = 59, b = 3776, the paper's run at η = 0.15.
    let mut controller = controller(NormTest {
        estimator: Estimator::Paper,
        eta: 0.15,
        ..NormTest::default()
    });
    assert_eq!(controller.requested_groups(1), Some(Groups::Workers));
    let sums = |target: f64| {
        Some(Sums {
            groups: 4,
            weighted: 1.0 + target * 0.15 * 0.15,
            total: 1.0,
            batch: 256,
        })
    };
    let decision = controller.observe(1, 256, true, sums(3721.5));
    assert_eq!(decision.next_batch, 3776, "no warm-up gate, no cap");
    assert_eq!(decision.target, Some(3722.0));
    let decision = controller.observe(2, 0, false, sums(3000.0));
    assert_eq!(
        (decision.next_batch, decision.reason),
        (3776, Reason::Enough)
    );
    let decision = controller.observe(3, 0, false, sums(9000.0));
    assert_eq!(decision.next_batch, 8192);
    assert_eq!(decision.reason.to_string(), "grew ×2.17 (maximum)");
    assert_eq!(controller.requested_groups(4), None);
}

#[test]
fn the_printed_batch_is_rounded_up_to_the_quantum() {
    // Base 12 at micro-batch 3: J·M = 4, T = 14 prints b = 16, which worlds of 4 × 3 cannot split.
    let mut controller = Controller::new(
        &BatchSchedule::NormTest(NormTest {
            estimator: Estimator::Paper,
            eta: 0.5,
            ..NormTest::default()
        }),
        Conditions {
            micro_batch: 3,
            ..conditions(12, 12)
        },
    )
    .unwrap();
    let sums = Sums {
        groups: 4,
        weighted: 1.0 + 14.0 * 0.25,
        total: 1.0,
        batch: 12,
    };
    assert_eq!(controller.observe(1, 12, false, Some(sums)).next_batch, 24);
}

#[test]
fn the_printed_form_with_four_workers_cannot_reach_the_papers_batches() {
    // In expectation T·η² ≤ J − 1, and so T ≤ 134 at η = 0.15: never above the base batch of 256,
    // where the paper reports 3776.
    let mut gradients = Gradients {
        dimensions: 256,
        mean: 0.0,
        sigma: 1.0,
        random: Random::new(7),
    };
    let mut controller = controller(NormTest {
        estimator: Estimator::Paper,
        eta: 0.15,
        ..NormTest::default()
    });
    for step in 1..=50 {
        let sums = gradients.sums(&[64; 4]);
        let decision = controller.observe(step, 0, false, Some(sums));
        assert_eq!(decision.next_batch, 256);
    }
}
