//! Whole runs: the batch settles at the value of the theory and stays within its bounds for any input.

use proptest::prelude::*;

use super::*;
use crate::norm::testing::{Gradients, Random};
use crate::recipe::schema::spec::{Estimator, Groups};

/// Runs a controller on drawn gradients with this B_simple, in groups of 16 samples. Returns the batches
/// after 60 steps, in which the smoothed estimates settle.
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
        // Shrinking without hysteresis settles around the expected batch.
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

/// Inputs of a step: nothing, invalid numbers, and gradients of every size.
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
