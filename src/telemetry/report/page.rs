//! Fills the page's template: headline figures above the plots, tables below.

use minijinja::Environment;
use minijinja::value::Serde;
use serde_json::json;

use super::chart::Chart;
use super::series::COLUMNS;
use super::{LossOf, ReportInput, charts};
use crate::telemetry::StepRecord;
use crate::telemetry::divergence::{limit, warning};
use crate::telemetry::human::{UNKNOWN, count, duration, from_floor, grouped, plural};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("hover.js");

/// The page as HTML. The template escapes all text from a recipe.
pub fn render(input: &ReportInput) -> Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    environment.add_filter("steps", |number: u64| plural(number, "step"));
    environment.add_template("page.html", PAGE)?;
    let charts = charts::all(input);
    let span = charts::span(input);
    let (first, last) = span.axis.ends();
    let starts = span.generations.iter().map(|&start| span.x(start));
    let curves: serde_json::Map<_, _> = charts
        .iter()
        .map(|chart| (chart.id.to_owned(), chart.data()))
        .collect();
    let data = json!({ "samples": [first, last], "curves": curves });
    let mut evaluation_headings = vec![
        "Samples",
        "Generation",
        "Loss",
        match input.loss_of {
            LossOf::Preferences => "Rewards",
            LossOf::CrossEntropy | LossOf::Tokens | LossOf::Samples => "Perplexity",
        },
        "Target tokens",
    ];
    evaluation_headings.extend(input.floor.map(|_| "From the floor"));
    environment.get_template("page.html")?.render(Serde(json!({
        "style": STYLE,
        "script": SCRIPT,
        "title": input.title,
        "formula": input.formula,
        "figures": figures(input),
        "divergence": divergence(input),
        "ledger": input.ledger,
        "charts": charts.iter().map(|chart| chart.view(&span)).collect::<Vec<_>>(),
        "xs": span.ticks(),
        "starts": starts.collect::<Vec<_>>(),
        "thinned": charts.iter().any(Chart::is_thinned),
        "columns": COLUMNS,
        // A script's text ends at the first `</`, whatever surrounds it.
        "data": data.to_string().replace('<', "\\u003c"),
        "generations": generations(input),
        "evaluation_headings": evaluation_headings,
        "evaluations": evaluations(input),
        "continuations": continuations(input),
        "details": input.details,
    })))
}

/// The headline figures: label, value, and a line below it. None before the first step.
fn figures(input: &ReportInput) -> Vec<(&'static str, String, String)> {
    let (Some(first), Some(last)) = (input.steps.first(), input.steps.last()) else {
        return Vec::new();
    };
    let (tokens, rate) = throughput(input.steps.iter());
    let stepping: f64 = input.steps.iter().map(|step| step.seconds).sum();
    let wall = last.time - first.time + first.seconds;
    let (label, loss) = match input.evaluations.last() {
        Some(evaluation) => ("Evaluation loss", evaluation.loss),
        None => {
            // An external trainer may report a step without its loss.
            let mut losses = input.steps.iter().rev().map(|step| step.loss);
            let reported = losses.find(|loss| !input.is_external() || loss.is_finite());
            ("Training loss", reported.unwrap_or(f64::NAN))
        }
    };
    let batches: Vec<u64> = input.steps.iter().map(|step| step.batch).collect();
    let changes = batches.windows(2).filter(|pair| pair[0] != pair[1]).count();
    let steps = plural(last.step, "step");
    let mut worlds: Vec<u64> = input.generations.iter().map(|row| row.world).collect();
    worlds.dedup();
    let loss_note = match input.floor {
        Some(floor) => from_floor(loss, floor),
        None if input.is_external() => "as the trainer reports it".to_owned(),
        None => match input.loss_of {
            LossOf::CrossEntropy => format!("perplexity {}", count(loss.exp())),
            LossOf::Tokens => "a mean over target tokens".to_owned(),
            LossOf::Samples | LossOf::Preferences => "a mean over samples".to_owned(),
        },
    };
    let samples_note = match input.budget {
        Some(budget) => format!("of {} in {steps}", grouped(budget)),
        None => format!("in {steps}"),
    };
    let batch_note = match changes {
        0 => "the same throughout".to_owned(),
        n => plural(n as u64, "change"),
    };
    let tokens_note = match (input.is_external(), tokens) {
        (true, 0) => "the trainer reports no tokens".to_owned(),
        (true, tokens) => format!("{} tokens between reports", count(tokens as f64)),
        (false, tokens) => format!("{} target tokens", count(tokens as f64)),
    };
    let ranks_note = match input.generations.len() {
        0 | 1 => "the same throughout".to_owned(),
        n => format!("{} in {n} generations", arrow(&worlds)),
    };
    let time_note = format!("of which {} in steps", duration(stepping));
    vec![
        (label, loss_text(loss), loss_note),
        ("Samples", grouped(last.samples), samples_note),
        (
            "Global batch",
            arrow(&[first.batch, last.batch]),
            batch_note,
        ),
        ("Throughput", format!("{rate} tok/s"), tokens_note),
        ("Time", duration(wall), time_note),
        ("Ranks", last.world.to_string(), ranks_note),
    ]
}

/// The tokens of steps, and their tokens per second as text. An external trainer's first report states no tokens.
fn throughput<'s>(steps: impl Iterator<Item = &'s StepRecord>) -> (u64, String) {
    let counted = steps.filter(|step| step.tokens > 0);
    let (tokens, seconds) = counted.fold((0, 0.0), |(tokens, seconds), step| {
        (tokens + step.tokens, seconds + step.seconds)
    });
    let rate = (tokens > 0).then(|| count(tokens as f64 / seconds));
    (tokens, rate.unwrap_or_else(unknown))
}

/// For example `128 → 512`; a long sequence is shortened to its ends.
fn arrow(values: &[u64]) -> String {
    let mut values = values.to_vec();
    values.dedup();
    let texts: Vec<String> = values.iter().map(|&value| grouped(value)).collect();
    match &texts[..] {
        [first, _, .., _, last] if texts.len() > 4 => format!("{first} → … → {last}"),
        _ => texts.join(" → "),
    }
}

/// A warning about a final loss that no language model should have.
fn divergence(input: &ReportInput) -> Option<String> {
    let step = input.steps.last().map(|step| step.loss);
    let evaluation = input.evaluations.last().map(|evaluation| evaluation.loss);
    let loss = evaluation.or(step)?;
    let absurd = input.vocabulary > 0 && loss > limit(input.vocabulary);
    absurd.then(|| warning(loss, input.vocabulary))
}

/// The rows of the table of generations.
fn generations(input: &ReportInput) -> Vec<[String; 8]> {
    let mut rows = Vec::new();
    for row in &input.generations {
        let steps = || {
            let all = input.steps.iter();
            all.filter(|step| step.generation == row.generation)
        };
        // A report of an external trainer covers several steps.
        let done = match (steps().next(), steps().next_back()) {
            (Some(first), Some(last)) if last.external.is_some() => last.step - first.step + 1,
            _ => steps().count() as u64,
        };
        rows.push([
            row.generation.to_string(),
            row.world.to_string(),
            row.formula.clone(),
            row.reason.clone(),
            grouped(row.start_samples),
            grouped(done),
            row.seconds_to_first_step.map_or_else(unknown, duration),
            throughput(steps()).1,
        ]);
    }
    rows
}

/// The rows of the table of evaluations.
fn evaluations(input: &ReportInput) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for evaluation in &input.evaluations {
        let loss = evaluation.loss;
        let above = |floor: f64| format!("{:+.1}%", 100.0 * (loss / floor - 1.0));
        let mut row = vec![
            grouped(evaluation.samples),
            evaluation.generation.to_string(),
            loss_text(loss),
            match &evaluation.preferences {
                Some(record) => record.measures().collect::<Vec<_>>().join(" · "),
                None if input.loss_of == LossOf::CrossEntropy => count(loss.exp()),
                None => unknown(),
            },
            grouped(evaluation.tokens),
        ];
        row.extend(input.floor.map(above));
        rows.push(row);
    }
    rows
}

/// The rows of the table of continued texts.
fn continuations(input: &ReportInput) -> Vec<[&str; 3]> {
    let all = input.continuations.iter();
    all.map(|it| [&it.begin, &it.model, &it.data].map(String::as_str))
        .collect()
}

fn loss_text(loss: f64) -> String {
    if loss.is_finite() {
        format!("{loss:.4}")
    } else {
        "not finite".to_owned()
    }
}

fn unknown() -> String {
    UNKNOWN.to_owned()
}
