//! The norm test's guards, one by one.

use super::*;
use crate::norm::Limit;
use crate::norm::estimator::Undefined;

#[test]
fn growth_is_capped_then_meets_its_target() {
    // B_simple 100, η 0.2: b* = 2400. From 256 by doubling: 512, 1024, 2048, then 2400.
    let mut controller = controller(NormTest::default());
    let decisions = steps(&mut controller, 40, 100.0, 1.0);
    let batches: Vec<u64> = decisions.iter().map(|d| d.next_batch).collect();
    assert_eq!(batches[..3], [512, 1024, 2048]);
    assert_eq!(
        decisions[0].reason,
        Reason::Grew {
            from: 256,
            to: 512,
            limit: Some(Limit::Cap)
        }
    );
    assert_eq!(decisions[0].reason.to_string(), "grew ×2 (cap)");
    assert!((decisions[0].noise_scale.unwrap() - 100.0).abs() < 1e-9);
    assert!((decisions[0].ratio.unwrap() - 100.0 / 356.0).abs() < 1e-12);
    assert_eq!(decisions[3].reason.to_string(), "grew ×1.16");
    // At b = 2400 exactly, r = η² to rounding.
    assert!(batches[39] == 2400 || batches[39] == 2416);
    assert_eq!(decisions[39].reason, Reason::Enough);
}

#[test]
fn one_decision_grows_by_at_most_one_over_eta_squared_without_a_cap() {
    let settings = NormTest {
        growth_cap: None,
        max_batch: 1_000_000,
        ..NormTest::default()
    };
    let mut uncapped = controller(settings.clone());
    let decision = uncapped.observe(1, 0, false, Some(expected(1.0, 0.0, 256, 64)));
    assert_eq!(decision.ratio, Some(1.0));
    assert_eq!(decision.noise_scale, None);
    assert_eq!(decision.next_batch, 256 * 25);
    let mut never = controller(NormTest {
        eta: 1.0,
        ..settings
    });
    let decision = never.observe(1, 0, false, Some(expected(1.0, 0.0, 256, 64)));
    assert_eq!(decision.reason, Reason::Enough);
}

#[test]
fn nothing_grows_while_the_learning_rate_warms_up() {
    let mut gated = controller(NormTest::default());
    let sums = Some(expected(1e6, 1.0, 256, 64));
    assert_eq!(gated.requested_groups(1), Some(Groups::MicroBatches));
    let decision = gated.observe(1, 256, true, sums);
    assert_eq!(
        (decision.next_batch, decision.reason),
        (256, Reason::WarmingUp)
    );
    assert!(decision.ratio.is_some());
    assert_eq!(gated.observe(2, 512, false, sums).next_batch, 512);

    let mut ungated = controller(NormTest {
        after_warmup: false,
        ..NormTest::default()
    });
    assert_eq!(ungated.observe(1, 256, true, sums).next_batch, 512);
}

#[test]
fn tests_run_every_interval_steps() {
    let mut controller = controller(NormTest {
        interval: 3,
        coordinate_interval: 2,
        ..NormTest::default()
    });
    let due: Vec<u64> = (1..=9)
        .filter(|&step| controller.requested_groups(step).is_some())
        .collect();
    assert_eq!(due, [3, 6, 9]);
    assert_eq!(controller.requested_coordinates(3), None);
    let test = controller.requested_coordinates(4).unwrap();
    assert_eq!(test.groups, Groups::MicroBatches);
    assert!((test.threshold - 0.04).abs() < 1e-12);
    let decision = controller.observe(1, 256, false, Some(expected(1e6, 1.0, 256, 64)));
    assert_eq!(
        (decision.next_batch, decision.reason),
        (256, Reason::NotDue)
    );
    let decision = controller.observe(3, 768, false, None);
    assert_eq!(decision.reason, Reason::NotMeasured);
}

#[test]
fn targets_round_up_and_the_maximum_down_to_the_quantum() {
    let mut controller = Controller::new(
        &BatchSchedule::NormTest(NormTest {
            max_batch: 1000,
            growth_cap: None,
            ..NormTest::default()
        }),
        conditions(96, 48),
    )
    .unwrap();
    // B_simple 20: b* = 480; from 96, T = 96/0.04·20/116 = 413.8 → 432.
    let decision = controller.observe(1, 0, false, Some(expected(20.0, 1.0, 96, 8)));
    assert_eq!(decision.next_batch, 432);
    assert!((decision.target.unwrap() - 413.79).abs() < 0.01);
    let decision = controller.observe(2, 0, false, Some(expected(1e9, 1.0, 432, 8)));
    assert_eq!(decision.next_batch, 960);
    assert_eq!(decision.reason.to_string(), "grew ×2.22 (maximum)");
    let decision = controller.observe(3, 0, false, Some(expected(1e9, 1.0, 960, 8)));
    assert_eq!(
        (decision.next_batch, decision.reason),
        (960, Reason::AtMaximum)
    );
}

#[test]
fn a_small_cap_still_allows_one_quantum() {
    let mut controller = Controller::new(
        &BatchSchedule::NormTest(NormTest {
            growth_cap: Some(1.1),
            ..NormTest::default()
        }),
        conditions(16, 16),
    )
    .unwrap();
    let decision = controller.observe(1, 0, false, Some(expected(1e9, 1.0, 16, 4)));
    assert_eq!(decision.next_batch, 32);
}

#[test]
fn the_batch_shrinks_only_when_asked_and_far_below() {
    let settled = |shrink, gradient| {
        let mut controller = controller(NormTest {
            shrink,
            ema: 0.0,
            ..NormTest::default()
        });
        steps(&mut controller, 10, 100.0, 1.0);
        let sums = expected(100.0, gradient, controller.batch(), 64);
        controller.observe(11, 0, false, Some(sums))
    };
    assert_eq!(settled(false, 10.0).reason, Reason::Enough);
    // B_simple 62: r·b/η² is 0.63 of the batch, within the hysteresis of 0.5.
    assert_eq!(settled(true, 1.6).reason, Reason::Enough);
    let shrunk = settled(true, 10.0);
    assert_eq!(shrunk.reason.to_string(), "shrank ×0.11");
    let floor = settled(true, 1000.0);
    assert_eq!(floor.next_batch, 256, "never below the base batch");
}

#[test]
fn the_learning_rate_follows_the_root_of_the_growth_when_asked() {
    let mut plain = controller(NormTest::default());
    steps(&mut plain, 1, 1e6, 1.0);
    assert_eq!(plain.learning_rate_factor(), 1.0);
    let mut sqrt = controller(NormTest {
        learning_rate: LearningRateOnGrowth::Sqrt,
        ..NormTest::default()
    });
    assert_eq!(sqrt.learning_rate_factor(), 1.0);
    sqrt.observe(1, 0, false, Some(expected(1e6, 1.0, 256, 64)));
    assert_eq!(sqrt.learning_rate_factor(), 2f64.sqrt());
    sqrt.observe(2, 0, false, Some(expected(1e6, 1.0, 512, 64)));
    assert_eq!(sqrt.learning_rate_factor(), 2.0);
}

#[test]
fn smoothing_weighs_a_first_test_fully_and_later_ones_by_a_tenth() {
    let mut controller = controller(NormTest {
        eta: 0.9,
        ..NormTest::default()
    });
    let sums = |variance| Some(expected(variance, 1.0, 256, 64));
    let first = controller.observe(1, 0, false, sums(100.0));
    assert!((first.noise_scale.unwrap() - 100.0).abs() < 1e-9);
    // (0.09·100 + 0.1·50)/0.19 of V, |grad|² staying at 1.
    let second = controller.observe(2, 0, false, sums(50.0));
    assert!((second.noise_scale.unwrap() - 14.0 / 0.19).abs() < 1e-9);
}

#[test]
fn an_undefined_test_changes_nothing() {
    let mut controller = controller(NormTest::default());
    let before = controller.clone();
    for (sums, why) in [
        (expected(1.0, 1.0, 256, 1), Undefined::OneGroup),
        (expected(f64::NAN, 1.0, 256, 4), Undefined::NotFinite),
        (expected(0.0, 0.0, 256, 4), Undefined::ZeroGradient),
    ] {
        let decision = controller.observe(1, 256, false, Some(sums));
        assert_eq!(decision.reason, Reason::Undefined(why));
        assert_eq!((decision.next_batch, decision.ratio), (256, None));
    }
    assert_eq!(controller, before);
}
