//! The plots of a report and their data.

use super::axis::Format;
use super::chart::{Chart, Range, Rule, Span};
use super::series::Series;
use super::{GenerationFacts, LossOf, ReportInput};
use crate::telemetry::{EvaluationRecord, PreferenceRecord, StepRecord};

/// The axis of samples that all plots share.
pub fn span(input: &ReportInput) -> Span {
    Span::new(
        end(input),
        input
            .generations
            .iter()
            .map(|generation| generation.start_samples as f64)
            .collect(),
    )
}

/// Samples at the right end of the plots.
fn end(input: &ReportInput) -> u64 {
    let steps = input.steps.last().map(|step| step.samples);
    let evaluations = input
        .evaluations
        .last()
        .map(|evaluation| evaluation.samples);
    let generations = input.generations.last().map(|row| row.start_samples);
    steps.max(evaluations).max(generations).unwrap_or(0)
}

/// All plots that have data.
pub fn all(input: &ReportInput) -> Vec<Chart> {
    let charts = [
        loss(input),
        rewards(input),
        accuracy(input),
        kl(input),
        log_probabilities(input),
        batch(input),
        ratio(input),
        coordinates(input),
        throughput(input),
        learning_rate(input),
        world(input),
    ];
    charts
        .into_iter()
        .filter(|chart| {
            let drawn = chart.series.iter().any(|series| !series.points.is_empty());
            drawn || !chart.holes.is_empty()
        })
        .collect()
}

/// A value of every step, split into finite values and the samples where it is not finite.
fn over_steps(
    input: &ReportInput,
    of: impl Fn(&StepRecord) -> Option<f64>,
) -> (Vec<(f64, f64)>, Vec<f64>) {
    let mut values = Vec::new();
    let mut holes = Vec::new();
    for step in &input.steps {
        match of(step) {
            Some(value) if value.is_finite() => values.push((step.samples as f64, value)),
            // The trainer did not report it.
            Some(_) if step.external.is_some() => {}
            Some(_) => holes.push(step.samples as f64),
            None => {}
        }
    }
    (values, holes)
}

/// A number of every evaluation that has it; `None` if none has.
fn evaluated(
    input: &ReportInput,
    name: &'static str,
    class: &'static str,
    of: impl Fn(&EvaluationRecord) -> Option<f64>,
) -> Option<Series> {
    let all = input.evaluations.iter();
    let points = all.filter_map(|it| Some((it.samples as f64, of(it)?)));
    let points: Vec<(f64, f64)> = points.filter(|(_, value)| value.is_finite()).collect();
    (!points.is_empty()).then(|| Series::dots(name, class, &points))
}

fn loss(input: &ReportInput) -> Chart {
    let (train, holes) = over_steps(input, |step| Some(step.loss));
    let mut series = vec![Series::line("training", "blue", &train)];
    series.extend(evaluated(input, "evaluation", "orange", |it| Some(it.loss)));
    let floor = input.floor.map(|floor| Rule {
        name: format!("entropy of the data {floor:.4}"),
        class: "green",
        y: floor,
    });
    Chart {
        id: "loss",
        title: "Loss",
        note: match input.loss_of {
            _ if input.is_external() => "As the trainer reports it.",
            LossOf::CrossEntropy => "Mean cross-entropy per target token, in nats.",
            LossOf::Tokens => "Mean over the target tokens of a batch.",
            LossOf::Samples => "Mean over the samples of a batch, of which each adds the sum over its target tokens.",
            LossOf::Preferences => "Mean over the samples of a batch.",
        }
        .to_owned(),
        range: Range::Values,
        format: Format::Decimal,
        series,
        rules: floor.into_iter().collect(),
        holes,
        ..Chart::default()
    }
}

/// A mean over the preferences of every step.
fn preferences(
    input: &ReportInput,
    of: impl Fn(&PreferenceRecord) -> Option<f64>,
) -> Vec<(f64, f64)> {
    over_steps(input, |step| of(step.preferences.as_ref()?)).0
}

fn rewards(input: &ReportInput) -> Chart {
    let of = |of: fn(&PreferenceRecord) -> Option<f64>| preferences(input, of);
    let mut series = vec![
        Series::line("chosen", "blue", &of(|it| it.reward_chosen)),
        Series::line("rejected", "orange", &of(|it| it.reward_rejected)),
        Series::line("margin", "green", &of(PreferenceRecord::margin)),
    ];
    series.extend(evaluated(input, "margin, evaluation", "violet", |it| {
        it.preferences.as_ref()?.margin()
    }));
    Chart {
        id: "rewards",
        title: "Rewards",
        note: "β × log-ratio of the completions to the reference model, or × log-probability without one."
            .to_owned(),
        range: Range::Values,
        format: Format::Decimal,
        series,
        ..Chart::default()
    }
}

fn accuracy(input: &ReportInput) -> Chart {
    let training = preferences(input, |it| it.accuracy);
    let mut series = vec![Series::line("training", "teal", &training)];
    series.extend(evaluated(input, "evaluation", "orange", |it| {
        it.preferences.as_ref()?.accuracy
    }));
    Chart {
        id: "accuracy",
        title: "Reward accuracy",
        note: "Share of pairs whose chosen completion has the larger reward.".to_owned(),
        format: Format::Decimal,
        series,
        ..Chart::default()
    }
}

fn kl(input: &ReportInput) -> Chart {
    Chart {
        id: "kl",
        title: "KL",
        note: "KTO's estimate of the divergence from the start weights, in nats.".to_owned(),
        format: Format::Decimal,
        series: vec![Series::line(
            "KL",
            "violet",
            &preferences(input, |it| it.kl),
        )],
        ..Chart::default()
    }
}

fn log_probabilities(input: &ReportInput) -> Chart {
    let of = |of: fn(&PreferenceRecord) -> Option<f64>| preferences(input, of);
    Chart {
        id: "log-probabilities",
        title: "Log-probabilities",
        note: "Of the completions, in nats.".to_owned(),
        range: Range::Values,
        series: vec![
            Series::line("chosen", "blue", &of(|it| it.logps_chosen)),
            Series::line("rejected", "orange", &of(|it| it.logps_rejected)),
        ],
        ..Chart::default()
    }
}

fn batch(input: &ReportInput) -> Chart {
    // The batch of a step starts at the samples consumed before it.
    let batches: Vec<(f64, f64)> = input
        .steps
        .iter()
        .map(|step| {
            (
                step.samples.saturating_sub(step.batch) as f64,
                step.batch as f64,
            )
        })
        .collect();
    let constant = batches.windows(2).all(|pair| pair[0].1 == pair[1].1);
    Chart {
        id: "batch",
        title: "Global batch",
        note:
            "Samples per optimiser step. The recipe's schedule or its norm test may change it; a \
               change of ranks (a vertical line) never does."
                .to_owned(),
        range: if constant {
            Range::FromZero
        } else {
            Range::Named
        },
        series: vec![Series::steps("batch", "blue", &batches, end(input) as f64)],
        ..Chart::default()
    }
}

fn ratio(input: &ReportInput) -> Chart {
    let (ratios, holes) = over_steps(input, |step| {
        let test = step.norm_test.as_ref()?;
        Some(test.ratio / test.threshold)
    });
    Chart {
        id: "ratio",
        title: "Norm test, r/η²",
        note: "How noisy the gradient is against what the test allows. Above 1 the batch is too \
               small and may grow."
            .to_owned(),
        range: Range::Logarithmic,
        format: Format::Decimal,
        series: vec![Series::line("r/η²", "violet", &ratios)],
        rules: vec![Rule {
            name: "threshold 1".to_owned(),
            class: "red",
            y: 1.0,
        }],
        holes,
        ..Chart::default()
    }
}

fn coordinates(input: &ReportInput) -> Chart {
    let (shares, holes) = over_steps(input, |step| {
        let test = step.coordinate_test.as_ref()?;
        Some(test.share.unwrap_or(f64::NAN))
    });
    Chart {
        id: "coordinates",
        title: "Coordinate-wise test",
        note:
            "Share of the model's coordinates for which the batch is large enough. A diagnostic: \
               it does not steer."
                .to_owned(),
        format: Format::Decimal,
        series: vec![Series::line("coordinate share", "violet", &shares)],
        holes,
        ..Chart::default()
    }
}

fn throughput(input: &ReportInput) -> Chart {
    let (rates, _) = over_steps(input, |step| {
        (step.tokens > 0).then(|| step.tokens as f64 / step.seconds)
    });
    Chart {
        id: "throughput",
        title: "Throughput",
        note: if input.is_external() {
            "Tokens per second between two reports of the trainer, over all ranks.".to_owned()
        } else {
            "Target tokens per second of each step, over all ranks.".to_owned()
        },
        series: vec![Series::line("tokens/s", "teal", &rates)],
        ..Chart::default()
    }
}

fn learning_rate(input: &ReportInput) -> Chart {
    let (rates, _) = over_steps(input, |step| Some(step.learning_rate));
    Chart {
        id: "learning-rate",
        title: "Learning rate",
        note: "As a function of the samples consumed, so that it does not depend on the batch."
            .to_owned(),
        format: Format::Scientific,
        series: vec![Series::line("learning rate", "blue", &rates)],
        ..Chart::default()
    }
}

fn world(input: &ReportInput) -> Chart {
    let end = end(input) as f64;
    let rows = &input.generations;
    let start = |row: &GenerationFacts| row.start_samples as f64;
    let worlds: Vec<(f64, f64)> = rows
        .iter()
        .map(|row| (start(row), row.world as f64))
        .collect();
    let ends = rows.iter().skip(1).map(start).chain([end]);
    Chart {
        id: "generations",
        title: "Generations",
        note: "Ranks that train together, with each generation's number below. A generation \
               starts from a checkpoint of the one before it; the table says why."
            .to_owned(),
        series: vec![Series::steps("ranks", "orange", &worlds, end)],
        names: rows
            .iter()
            .zip(ends)
            .map(|(row, end)| (start(row), end, row.generation.to_string()))
            .collect(),
        ..Chart::default()
    }
}
