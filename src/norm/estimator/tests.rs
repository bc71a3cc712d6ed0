use super::*;
use crate::norm::synthetic::{Gradients, Random, mean_and_error, squared_norm};

fn gradients(seed: u64) -> Gradients {
    Gradients {
        dimensions: 32,
        mean: 0.1,
        sigma: 0.23,
        random: Random::new(seed),
    }
}

/// Asserts that `values` average to `truth` within 4.5 standard errors, and that the standard error is small.
fn assert_recovers(what: &str, values: &[f64], truth: f64) {
    let (mean, error) = mean_and_error(values);
    assert!(
        error < 0.03 * truth,
        "{what}: too few draws, {error} of {truth}"
    );
    assert!(
        (mean - truth).abs() < 4.5 * error,
        "{what}: {mean} ± {error}, true {truth}"
    );
}

fn assert_unbiased(what: &str, groups: &[u64], seed: u64) {
    let mut gradients = gradients(seed);
    let draws = 40_000 / groups.len();
    let estimates: Vec<Estimate> = (0..draws)
        .map(|_| gradients.sums(groups).unbiased().unwrap())
        .collect();
    let variances: Vec<f64> = estimates.iter().map(|e| e.variance).collect();
    let squares: Vec<f64> = estimates.iter().map(|e| e.gradient).collect();
    assert_recovers(&format!("{what}: V"), &variances, gradients.variance());
    assert_recovers(
        &format!("{what}: |grad|²"),
        &squares,
        gradients.squared_gradient(),
    );
}

#[test]
fn variance_and_gradient_are_recovered_from_equal_groups() {
    for groups in [2, 3, 4, 8, 16, 64] {
        assert_unbiased(&format!("{groups} × 8"), &vec![8; groups], groups as u64);
    }
}

#[test]
fn variance_and_gradient_are_recovered_from_unequal_groups() {
    assert_unbiased("3/3/2", &[3, 3, 2], 1);
    assert_unbiased("1/15", &[1, 15], 2);
    let uneven: Vec<u64> = (0..64).map(|i| 1 + (i * i) % 13).collect();
    assert_unbiased("64 uneven", &uneven, 3);
}

#[test]
fn unweighted_groups_of_3_3_2_overstate_the_variance_and_weighted_ones_do_not() {
    // Without the weights, E[V] is V·(b/(G−1))·(mean(1/n_i) − 1/N) = V·4·(7/18 − 1/8) = 19/18·V:
    // 1.788 for 1.690 in the design's simulation, 1.058, against 1.056.
    let mut gradients = gradients(4);
    let (mut weighted, mut unweighted) = (Vec::new(), Vec::new());
    for _ in 0..20_000 {
        let (local, total, drawn) = gradients.step(&[3, 3, 2]);
        let sums = local.sums(total, 8);
        let mean_square = drawn
            .iter()
            .zip([3.0, 3.0, 2.0])
            .map(|(g, n)| squared_norm(g) / (n * n))
            .sum::<f64>()
            / 3.0;
        weighted.push(sums.unbiased().unwrap().variance);
        unweighted.push(8.0 / 2.0 * (mean_square - sums.total));
    }
    let truth = gradients.variance();
    assert_recovers("weighted", &weighted, truth);
    assert_recovers("unweighted", &unweighted, truth * 19.0 / 18.0);
    let (mean, error) = mean_and_error(&unweighted);
    assert!(mean - truth > 10.0 * error, "the bias must be visible here");
}

#[test]
fn variance_is_per_sample_when_units_are_tokens() {
    // 8 groups of 2 samples with 50 target tokens each: V of a sample is V of a token / 50, since
    // a sample's gradient is the mean over its tokens.
    let mut gradients = gradients(5);
    let variances: Vec<f64> = (0..4000)
        .map(|_| {
            let (local, total, _) = gradients.step(&[100; 8]);
            local.sums(total, 16).unbiased().unwrap().variance
        })
        .collect();
    assert_recovers("V per sample", &variances, gradients.variance() / 50.0);
}

#[test]
fn two_groups_by_hand() {
    // Summed gradients (6, 0) over 3 units and (0, 2) over 1: g_1 = (2, 0), g_2 = (0, 2),
    // ḡ = (1.5, 0.5); A = (3·4 + 1·4)/4 = 4, C = 2.5.
    let mut local = GroupSums::default();
    local.add(36.0, 3);
    local.add(4.0, 1);
    let sums = local.sums(40.0, 4);
    assert_eq!((sums.weighted, sums.total, sums.groups), (4.0, 2.5, 2));
    let estimate = sums.unbiased().unwrap();
    assert_eq!((estimate.variance, estimate.gradient), (6.0, 1.0));
    assert_eq!(estimate.ratio(4), 0.6);
    assert_eq!(estimate.noise_scale(), Some(6.0));
    let printed = sums.printed().unwrap();
    assert_eq!(printed.variance, 1.5);
    assert_eq!(printed.target(0.5), 3.0);
}

#[test]
fn ranks_add_up_to_one_process() {
    let (mut whole, mut left, mut right) = Default::default();
    let fill = |sums: &mut GroupSums, groups: &[(f64, u64)]| {
        for &(squared_norm, units) in groups {
            sums.add(squared_norm, units);
        }
    };
    fill(&mut whole, &[(36.0, 3), (4.0, 1), (9.0, 2)]);
    fill(&mut left, &[(36.0, 3)]);
    fill(&mut right, &[(4.0, 1), (9.0, 2)]);
    left.merge(&right);
    assert_eq!(left, whole);
}

#[test]
fn a_group_without_target_tokens_does_not_count() {
    let mut local = GroupSums::default();
    local.add(36.0, 3);
    local.add(0.0, 0);
    assert_eq!(local.groups, 1);
    assert_eq!(
        local.sums(36.0, 2).unbiased(),
        Err(Undefined::OneGroup),
        "masked answers must not turn one group into two"
    );
}

#[test]
fn the_printed_test_agrees_at_eta_times_the_root_of_b_over_j_minus_1() {
    for (workers, per_worker) in [(2u64, 16u64), (4, 64), (8, 4)] {
        let mut gradients = gradients(workers);
        let batch = workers * per_worker;
        for eta in [0.05, 0.15, 0.3] {
            let portable = eta * (batch as f64 / (workers - 1) as f64).sqrt();
            for _ in 0..200 {
                let sums = gradients.sums(&vec![per_worker; workers as usize]);
                let printed = sums.printed().unwrap();
                let raw = (sums.weighted - sums.total) / ((workers - 1) as f64 * sums.total);
                let target = batch as f64 * raw / (portable * portable);
                assert_eq!(printed.target(eta), target.ceil());
                assert_eq!(
                    printed.target(eta) > batch as f64,
                    raw > portable * portable
                );
                assert_eq!(printed.ratio(batch) > eta * eta, raw > portable * portable);
            }
        }
    }
}

#[test]
fn pure_noise_gives_the_printed_form_a_target_of_j_minus_1_over_eta_squared() {
    for workers in [2u64, 4, 8] {
        let mut gradients = gradients(workers);
        gradients.mean = 0.0;
        let (mut variance, mut square, mut above) = (0.0, 0.0, 0);
        for _ in 0..4000 {
            let printed = gradients
                .sums(&vec![16; workers as usize])
                .printed()
                .unwrap();
            variance += printed.variance;
            square += printed.squared_norm;
            above += u64::from(printed.target(1.0) > (workers - 1) as f64);
        }
        // The ratio of the means; single draws lie above it about half of the time.
        let ratio = variance / square;
        assert!((ratio / (workers - 1) as f64 - 1.0).abs() < 0.03, "{ratio}");
        assert!((1200..2800).contains(&above), "{above} of 4000");
    }
}

#[test]
fn pure_noise_makes_the_unbiased_ratio_one() {
    let mut gradients = gradients(6);
    gradients.mean = 0.0;
    let mut infinite = 0;
    for _ in 0..1000 {
        let estimate = gradients.sums(&[16; 4]).unbiased().unwrap();
        assert!(estimate.ratio(64) > 0.2);
        infinite += u64::from(estimate.ratio(64) == 1.0 && estimate.noise_scale().is_none());
    }
    assert!((300..700).contains(&infinite), "{infinite} of 1000");
}

#[test]
fn cancellation_below_zero_is_zero_variance() {
    let sums = Sums {
        groups: 4,
        weighted: 1.0 - 1e-6,
        total: 1.0,
        batch: 8,
    };
    let estimate = sums.unbiased().unwrap();
    assert_eq!((estimate.variance, estimate.ratio(8)), (0.0, 0.0));
    assert_eq!(sums.printed().unwrap().target(0.1), 0.0);
}

#[test]
fn norms_on_two_scales_are_refused() {
    // An average in place of a sum: the groups' norms are 4² too small.
    let mut local = GroupSums::default();
    for _ in 0..4 {
        local.add(100.0 / 16.0, 10);
    }
    assert_eq!(
        local.sums(1600.0, 4).unbiased(),
        Err(Undefined::Inconsistent)
    );
}

#[test]
fn a_vanishing_batch_gradient_is_all_noise() {
    let sums = Sums {
        groups: 2,
        weighted: 1.0,
        total: 0.0,
        batch: 8,
    };
    let estimate = sums.unbiased().unwrap();
    assert_eq!(estimate.ratio(8), 1.0);
    assert_eq!(estimate.noise_scale(), None);
    assert_eq!(sums.printed().unwrap().target(0.1), f64::INFINITY);
}

#[test]
fn an_undefined_estimate_states_its_reason() {
    let sums = |groups, weighted, total| Sums {
        groups,
        weighted,
        total,
        batch: 8,
    };
    let cases = [
        (sums(1, 1.0, 1.0), Undefined::OneGroup),
        (sums(4, f64::NAN, 1.0), Undefined::NotFinite),
        (sums(4, 1.0, f64::INFINITY), Undefined::NotFinite),
        (sums(4, 0.0, 0.0), Undefined::ZeroGradient),
        (GroupSums::default().sums(0.0, 8), Undefined::NotFinite),
    ];
    for (sums, why) in cases {
        assert_eq!(sums.unbiased(), Err(why));
        assert_eq!(sums.printed(), Err(why));
    }
}
