//! Fixed schedules against the paper's step counts, the norm test's guards one by one, and both
//! estimators steering simulated runs.

use proptest::prelude::*;

use super::*;
use crate::norm::estimator::Undefined;
use crate::norm::synthetic::{Gradients, Random};
use crate::norm::{Limit, record};
use crate::recipe::spec::{Estimator, Groups, NormTest};

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

fn replay(runs: &[(u64, u64)]) -> BatchSchedule {
    BatchSchedule::Replay {
        runs: runs
            .iter()
            .map(|&(batch, steps)| ReplayRun { batch, steps })
            .collect(),
    }
}

/// Steps and samples of a fixed schedule until its budget is reached, as the training loop runs it.
fn run(schedule: &BatchSchedule, base: u64, quantum: u64) -> (u64, u64) {
    let mut controller = Controller::new(schedule, conditions(base, quantum)).unwrap();
    let (mut step, mut samples) = (0, 0);
    while samples < BUDGET {
        step += 1;
        samples += controller.batch();
        assert_eq!(controller.wants(step), Request::None);
        let decision = controller.observe(step, samples, false, None);
        assert_eq!(decision.next_batch, controller.batch());
    }
    (step, samples)
}

/// What the paper prints of each run whose schedule it prints: steps and mean batch.
fn assert_paper(schedule: &BatchSchedule, base: u64, quantum: u64, steps: u64, mean: f64) {
    let (ran, samples) = run(schedule, base, quantum);
    assert_eq!(ran, steps);
    let realised = samples as f64 / ran as f64;
    assert!((realised - mean).abs() < 1.0, "{realised}, printed {mean}");
}

#[test]
fn the_papers_recorded_schedules_replay_to_its_step_counts() {
    let micro = [
        (replay(&[(256, 1), (3776, 530)]), 531, 3770.0),
        (
            replay(&[(256, 1), (2112, 3), (2240, 9), (8192, 241)]),
            254,
            7878.0,
        ),
        (
            replay(&[(256, 1), (1344, 3), (1392, 4), (2384, 835)]),
            843,
            2373.0,
        ),
        (replay(&[(256, 1), (1152, 7), (8192, 244)]), 252, 7965.0),
    ];
    for (schedule, steps, mean) in &micro {
        assert_paper(schedule, 256, 16, *steps, *mean);
    }
    let tiny = replay(&[
        (128, 1),
        (272, 4),
        (344, 1),
        (952, 1),
        (1200, 2),
        (1600, 10),
        (8192, 242),
    ]);
    assert_paper(&tiny, 128, 8, 261, 7676.0);
}

#[test]
fn constant_batches_give_the_papers_step_counts() {
    for (batch, steps) in [(2048, 977), (4096, 489), (8192, 245)] {
        assert_eq!(run(&BatchSchedule::Constant, batch, 64).0, steps);
    }
}

#[test]
fn stage_wise_warmup_gives_the_papers_step_count() {
    let stages = BatchSchedule::Stages {
        stages: [(0.025, 2048), (0.025, 4096), (0.95, 8192)]
            .map(|(share, batch)| Stage { share, batch })
            .to_vec(),
    };
    assert_paper(&stages, 2048, 64, 269, 7439.0);
    let first = Controller::new(&stages, conditions(256, 64)).unwrap();
    assert_eq!(first.batch(), 2048, "the first stage counts, not the base");
}

#[test]
fn a_replay_keeps_its_last_batch() {
    let mut controller =
        Controller::new(&replay(&[(256, 1), (512, 2)]), conditions(256, 16)).unwrap();
    let batches: Vec<u64> = (1..=6)
        .map(|step| {
            let batch = controller.batch();
            controller.observe(step, 0, false, None);
            batch
        })
        .collect();
    assert_eq!(batches, [256, 512, 512, 512, 512, 512]);
    assert_eq!(
        BatchSchedule::Replay {
            runs: record(batches)
        },
        replay(&[(256, 1), (512, 5)])
    );
}

/// Sums of a step of `batch` samples with these true V and |grad|², as their expectation.
fn expected(variance: f64, gradient: f64, batch: u64, groups: u64) -> Sums {
    Sums {
        groups,
        weighted: gradient + groups as f64 * variance / batch as f64,
        total: gradient + variance / batch as f64,
        batch,
    }
}

/// Lets the controller see `steps` steps of such sums; the decisions.
fn steps(controller: &mut Controller, steps: u64, variance: f64, gradient: f64) -> Vec<Decision> {
    (1..=steps)
        .map(|step| {
            let sums = expected(variance, gradient, controller.batch(), 64);
            controller.observe(step, 0, false, Some(sums))
        })
        .collect()
}

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
    assert_eq!(gated.wants(1), Request::MicroBatches);
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
        .filter(|&step| controller.wants(step) != Request::None)
        .collect();
    assert_eq!(due, [3, 6, 9]);
    assert_eq!(controller.wants_coordinates(3), None);
    let test = controller.wants_coordinates(4).unwrap();
    assert_eq!(test.groups, Request::MicroBatches);
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
    assert_eq!(steps(&mut plain, 1, 1e6, 1.0)[0].learning_rate_factor, 1.0);
    let mut sqrt = controller(NormTest {
        learning_rate: LearningRateOnGrowth::Sqrt,
        ..NormTest::default()
    });
    assert_eq!(sqrt.learning_rate_factor(), 1.0);
    let decisions = steps(&mut sqrt, 2, 1e6, 1.0);
    assert_eq!(decisions[0].learning_rate_factor, 2f64.sqrt());
    assert_eq!(decisions[1].learning_rate_factor, 2.0);
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

#[test]
fn the_printed_form_grows_at_once_by_whole_micro_batches_and_stops_at_the_maximum() {
    // J·M = 256/4 = 64 and T = 3722: micro = 59, b = 3776, the paper's run at η = 0.15.
    let mut controller = controller(NormTest {
        estimator: Estimator::Paper,
        eta: 0.15,
        ..NormTest::default()
    });
    assert_eq!(controller.wants(1), Request::Workers);
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
    assert_eq!(controller.wants(4), Request::None);
}

#[test]
fn the_printed_batch_goes_up_to_the_quantum_where_it_is_no_multiple() {
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
fn the_printed_form_with_four_workers_cannot_print_the_papers_own_batches() {
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

/// Runs a controller on drawn gradients with this B_simple, groups of 16 samples; the batches
/// after a warm-up of 60 steps, over which the smoothed estimates come in.
fn simulate(settings: NormTest, noise_scale: f64, steps: u64, seed: u64) -> Vec<u64> {
    let mut gradients = Gradients {
        dimensions: 256,
        mean: 1.0,
        sigma: noise_scale.sqrt(),
        random: Random::new(seed),
    };
    let mut controller =
        Controller::new(&BatchSchedule::NormTest(settings), conditions(32, 16)).unwrap();
    (1..=60 + steps)
        .map(|step| {
            let groups = vec![16; controller.batch() as usize / 16];
            let sums = gradients.sums(&groups);
            let decision = controller.observe(step, 0, step <= 60, Some(sums));
            decision.next_batch
        })
        .skip(60)
        .collect()
}

#[test]
fn the_batch_settles_at_the_noise_scale_times_one_minus_eta_squared_over_eta_squared() {
    for (eta, noise_scale) in [(0.5, 50.0), (0.3, 20.0), (0.7, 400.0)] {
        let expected = noise_scale * (1.0 - eta * eta) / (eta * eta);
        let settings = NormTest {
            eta,
            ema: 0.95,
            ..NormTest::default()
        };
        // Monotone: the highest excursion of the smoothed estimate counts.
        let monotone = simulate(settings.clone(), noise_scale, 400, 11);
        let last = *monotone.last().unwrap() as f64;
        assert!(monotone.is_sorted());
        assert!(
            (0.95..1.25).contains(&(last / expected)),
            "η {eta}: settled at {last}, expected {expected}"
        );
        // Shrinking with no hysteresis: around it.
        let shrinking = simulate(
            NormTest {
                shrink: true,
                hysteresis: 1.0,
                ..settings
            },
            noise_scale,
            400,
            12,
        );
        let mean = shrinking[100..].iter().sum::<u64>() as f64 / 300.0;
        assert!(
            (mean / expected - 1.0).abs() < 0.08,
            "η {eta}: {mean} on average, expected {expected}"
        );
    }
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
    same.refit(moved).unwrap();
    assert_eq!(same.batch(), 464);
    let refused = controller.refit(conditions(256, 32)).unwrap_err();
    insta::assert_snapshot!(refused.to_string(), @"the checkpoint's current batch 464 is not a multiple of the quantum 32; use 448 or 480, a smaller batch.micro, or narrow elasticity.min and elasticity.max");
    let refused = controller.refit(conditions(512, 16)).unwrap_err();
    assert_eq!(refused, ScheduleError::BaseChanged { was: 256, now: 512 });
    assert_eq!(controller.batch(), 464);
}

#[test]
fn constant_schedules_measure_nothing() {
    let mut controller = Controller::new(&BatchSchedule::Constant, conditions(256, 16)).unwrap();
    assert_eq!(controller.wants(1), Request::None);
    let decision = controller.observe(1, 256, false, None);
    assert_eq!(
        (decision.next_batch, decision.reason, decision.threshold),
        (256, Reason::Scheduled, None)
    );
}

fn any_settings() -> impl Strategy<Value = NormTest> {
    (
        (prop::bool::ANY, 0.01..1.5f64, 1..6u64, 0..4000u64),
        (
            prop::option::of(1.01..4.0f64),
            prop::bool::ANY,
            0.1..=1.0f64,
        ),
        (0.0..0.99f64, prop::bool::ANY, prop::bool::ANY),
    )
        .prop_map(
            |(
                (paper, eta, interval, above),
                (growth_cap, shrink, hysteresis),
                (ema, after_warmup, workers),
            )| NormTest {
                estimator: if paper {
                    Estimator::Paper
                } else {
                    Estimator::Unbiased
                },
                eta,
                interval,
                max_batch: 240 + above,
                growth_cap,
                shrink,
                hysteresis,
                ema,
                after_warmup,
                groups: if workers {
                    Groups::Workers
                } else {
                    Groups::MicroBatches
                },
                ..NormTest::default()
            },
        )
}

/// What steps may bring: nothing, nonsense, and gradients of every size.
fn any_sums() -> impl Strategy<Value = Option<(u64, f64, f64)>> {
    let norm = prop_oneof![
        8 => (-12.0..12.0f64).prop_map(f64::exp),
        1 => Just(0.0),
        1 => Just(f64::NAN),
        1 => Just(f64::INFINITY),
        1 => Just(f64::MIN_POSITIVE),
    ];
    prop::option::weighted(0.9, (1..70u64, norm.clone(), norm))
}

proptest! {
    #[test]
    fn every_batch_is_a_multiple_within_its_bounds_and_a_restored_controller_goes_on(
        settings in any_settings(),
        quantum in prop::sample::select(vec![1u64, 3, 4, 12, 48, 60, 240]),
        steps in prop::collection::vec((any_sums(), prop::bool::ANY), 1..40),
    ) {
        let conditions = Conditions { micro_batch: 1, ..conditions(240, quantum) };
        let mut controller =
            Controller::new(&BatchSchedule::NormTest(settings.clone()), conditions).unwrap();
        for (step, (sums, warming_up)) in (1..).zip(steps) {
            let batch = controller.batch();
            let sums = sums.map(|(groups, spread, total)| Sums {
                groups,
                weighted: total + spread,
                total,
                batch,
            });
            let json = serde_json::to_string(&controller).unwrap();
            let mut restored: Controller = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(&restored, &controller);
            let decision = controller.observe(step, step * 240, warming_up, sums);
            prop_assert_eq!(
                restored.observe(step, step * 240, warming_up, sums),
                decision
            );
            prop_assert_eq!(&restored, &controller);

            let next = controller.batch();
            prop_assert_eq!(next, decision.next_batch);
            prop_assert!(next.is_multiple_of(quantum));
            prop_assert!(next >= 240 && next <= settings.max_batch);
            let printed = settings.estimator == Estimator::Paper;
            if printed || !settings.shrink {
                prop_assert!(next >= batch);
            }
            if let (false, Some(cap)) = (printed, settings.growth_cap) {
                prop_assert!(next <= ((batch as f64 * cap) as u64).max(batch + quantum));
            }
            if !printed {
                prop_assert!(decision.ratio.is_none_or(|r| (0.0..=1.0).contains(&r)));
            }
        }
    }
}
