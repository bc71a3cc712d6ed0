//! The page around the plots: headline figures above, tables below.

use super::chart::Chart;
use super::html::{Cell, escape, table};
use super::series::COLUMNS;
use super::{ReportInput, charts};
use crate::telemetry::StepRecord;
use crate::telemetry::divergence::{limit, warning};
use crate::telemetry::human::{UNKNOWN, count, duration, from_floor, grouped, plural};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("hover.js");

/// The policy forbids every request.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; \
                      script-src 'unsafe-inline'; img-src data:";

/// The page as HTML.
pub fn render(input: &ReportInput) -> String {
    let title = escape(&input.title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>{title}: training report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header>\n<p class=\"kind\">Evenkeel training report</p>\n<h1>{title}</h1>\n\
         <p class=\"formula\">{formula} <span>data-parallel size × micro-batch × accumulation = \
         global batch</span></p>\n</header>\n<main>\n{headline}{divergence}{ledger}{plots}{generations}\
         {evaluations}{details}</main>\n</body>\n</html>\n",
        formula = escape(&input.facts.formula),
        headline = headline(input),
        divergence = divergence(input),
        ledger = ledger(input),
        plots = plots(input),
        generations = generations(input),
        evaluations = evaluations(input),
        details = details(input),
    )
}

/// A headline figure with a line below it.
struct Figure {
    label: &'static str,
    value: String,
    note: String,
}

fn headline(input: &ReportInput) -> String {
    let (Some(first), Some(last)) = (input.steps.first(), input.steps.last()) else {
        return "<p class=\"empty\">No step has been committed yet.</p>\n".to_owned();
    };
    let mut html = "<dl class=\"figures\">\n".to_owned();
    for figure in figures(input, first, last) {
        html += &format!(
            "<div><dt>{}</dt><dd>{}</dd><dd class=\"small\">{}</dd></div>\n",
            figure.label,
            escape(&figure.value),
            escape(&figure.note)
        );
    }
    html + "</dl>\n"
}

fn figures(input: &ReportInput, first: &StepRecord, last: &StepRecord) -> Vec<Figure> {
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
    vec![
        Figure {
            label,
            value: loss_text(loss),
            note: match input.floor {
                Some(floor) => from_floor(loss, floor),
                None if input.is_external() => "as the trainer reports it".to_owned(),
                None => format!("perplexity {}", count(loss.exp())),
            },
        },
        Figure {
            label: "Samples",
            value: grouped(last.samples),
            note: match input.facts.budget {
                Some(budget) => format!("of {} in {steps}", grouped(budget)),
                None => format!("in {steps}"),
            },
        },
        Figure {
            label: "Global batch",
            value: arrow(&[first.batch, last.batch]),
            note: match changes {
                0 => "the same throughout".to_owned(),
                n => plural(n as u64, "change"),
            },
        },
        Figure {
            label: "Throughput",
            value: format!("{rate} tok/s"),
            note: match (input.is_external(), tokens) {
                (true, 0) => "the trainer reports no tokens".to_owned(),
                (true, tokens) => format!("{} tokens between reports", count(tokens as f64)),
                (false, tokens) => format!("{} target tokens", count(tokens as f64)),
            },
        },
        Figure {
            label: "Time",
            value: duration(wall),
            note: format!("of which {} in steps", duration(stepping)),
        },
        Figure {
            label: "Ranks",
            value: last.world.to_string(),
            note: match input.generations.len() {
                0 | 1 => "the same throughout".to_owned(),
                n => format!("{} in {n} generations", arrow(&worlds)),
            },
        },
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
fn divergence(input: &ReportInput) -> String {
    let step = input.steps.last().map(|step| step.loss);
    let evaluation = input.evaluations.last().map(|evaluation| evaluation.loss);
    let absurd = |loss: &f64| input.vocabulary > 0 && *loss > limit(input.vocabulary);
    let Some(loss) = evaluation.or(step).filter(absurd) else {
        return String::new();
    };
    format!(
        "<p class=\"verdict broken\"><span aria-hidden=\"true\">!</span> \
         <span><b>Loss</b> {}</span></p>\n",
        escape(&warning(loss, input.vocabulary))
    )
}

fn ledger(input: &ReportInput) -> String {
    let Some(verdict) = &input.ledger else {
        return String::new();
    };
    let (class, sign) = if verdict.proven {
        ("proven", "✓")
    } else {
        ("broken", "✗")
    };
    format!(
        "<p class=\"verdict {class}\"><span aria-hidden=\"true\">{sign}</span> \
         <span><b>Ledger</b> {}</span></p>\n",
        escape(&verdict.text)
    )
}

/// The plots, and their points for the script.
fn plots(input: &ReportInput) -> String {
    let charts = charts::all(input);
    if charts.is_empty() {
        return String::new();
    }
    let span = charts::span(input);
    let figures: String = charts.iter().map(|chart| chart.html(&span)).collect();
    let (low, high) = span.axis.ends();
    let curves: serde_json::Map<String, serde_json::Value> = charts
        .iter()
        .map(|chart| (chart.id.to_owned(), chart.data()))
        .collect();
    let data = serde_json::json!({ "samples": [low, high], "curves": curves });
    let thinned = if charts.iter().any(Chart::is_thinned) {
        format!(
            " Where there are more steps than can be told apart, they are put together in \
             {COLUMNS} columns: the line is each column's mean, the band behind it reaches from \
             its lowest to its highest value."
        )
    } else {
        String::new()
    };
    // A script's text ends at the first `</`, whatever surrounds it.
    let data = data.to_string().replace('<', "\\u003c");
    format!(
        "<section class=\"plots\" aria-label=\"Plots over the samples consumed\">\n{figures}\
         </section>\n<p class=\"note\">All plots run over the samples consumed. Vertical lines \
         mark new generations.{thinned} Point at a plot to read its values<span id=\"at\"></span>.</p>\n\
         <script type=\"application/json\" id=\"data\">{data}</script>\n\
         <script>\n{SCRIPT}</script>\n"
    )
}

fn generations(input: &ReportInput) -> String {
    if input.generations.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<Cell>> = input
        .generations
        .iter()
        .map(|row| {
            let steps = || {
                let all = input.steps.iter();
                all.filter(|step| step.generation == row.generation)
            };
            // A report of an external trainer covers several steps.
            let done = match (steps().next(), steps().next_back()) {
                (Some(first), Some(last)) if last.external.is_some() => last.step - first.step + 1,
                _ => steps().count() as u64,
            };
            vec![
                Cell::Short(row.generation.to_string()),
                Cell::Short(row.world.to_string()),
                Cell::Short(row.formula.clone()),
                Cell::Long(row.reason.clone()),
                Cell::Short(grouped(row.start_samples)),
                Cell::Short(grouped(done)),
                Cell::Short(row.seconds_to_first_step.map_or_else(unknown, duration)),
                Cell::Short(throughput(steps()).1),
            ]
        })
        .collect();
    let headings = [
        "Generation",
        "Ranks",
        "Batch",
        "Reason",
        "From sample",
        "Steps",
        "To first step",
        "Tokens/s",
    ];
    format!(
        "<section><h2>Generations</h2>\n{}</section>\n",
        table(&headings, &rows)
    )
}

fn evaluations(input: &ReportInput) -> String {
    if input.evaluations.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<Cell>> = input
        .evaluations
        .iter()
        .map(|evaluation| {
            let loss = evaluation.loss;
            let mut row = vec![
                Cell::Short(grouped(evaluation.samples)),
                Cell::Short(evaluation.generation.to_string()),
                Cell::Short(loss_text(loss)),
                Cell::Short(count(loss.exp())),
                Cell::Short(grouped(evaluation.tokens)),
            ];
            let above = |floor: f64| format!("{:+.1}%", 100.0 * (loss / floor - 1.0));
            row.extend(input.floor.map(|floor| Cell::Short(above(floor))));
            row
        })
        .collect();
    let mut headings = vec![
        "Samples",
        "Generation",
        "Loss",
        "Perplexity",
        "Target tokens",
    ];
    headings.extend(input.floor.map(|_| "From the floor"));
    format!(
        "<section><h2>Evaluations</h2>\n{}</section>\n",
        table(&headings, &rows)
    )
}

fn details(input: &ReportInput) -> String {
    if input.facts.details.is_empty() {
        return String::new();
    }
    let mut html = "<section><h2>Run</h2>\n<dl class=\"details\">\n".to_owned();
    for fact in &input.facts.details {
        html += &format!(
            "<dt>{}</dt><dd>{}</dd>\n",
            escape(&fact.label),
            escape(&fact.value)
        );
    }
    html + "</dl></section>\n"
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
