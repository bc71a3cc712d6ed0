//! Events as one line of text each, the same on terminals and in logs: a label, right-aligned as in cargo's
//! output, and parts. Lines are wrapped between parts.

use anstyle::{AnsiColor, Color, Style};

use super::progress::Progress;
use crate::telemetry::human::{
    count, duration, from_floor, grouped, learning_rate, plural, whole_duration,
};
use crate::telemetry::{Event, StepRecord};
use crate::util::format::bytes;
use crate::util::wrap;

/// Columns of the right-aligned label.
const LABEL: usize = 10;
/// Separator between the parts of a line.
pub(super) const BETWEEN: &str = " · ";

/// One event as text.
pub(super) struct Line {
    label: &'static str,
    tone: Tone,
    parts: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tone {
    /// The run is healthy.
    Fine,
    /// Worth knowing, but no fault.
    Notable,
    /// A person should act.
    Alarm,
    /// The run has ended well.
    Result,
}

impl Line {
    /// The line of an event. `progress` has already taken the event in.
    pub fn of(event: &Event, progress: &Progress) -> Line {
        let (label, tone, parts) = match event {
            Event::Planned {
                name,
                formula,
                budget,
                devices,
                floor,
                ..
            } => {
                let mut parts = vec![name.clone(), formula.clone()];
                parts.extend((*budget > 0).then(|| plural(*budget, "sample")));
                parts.push(devices.clone());
                parts.extend(floor.map(|floor| format!("loss cannot go below {floor:.4}")));
                ("Plan", Tone::Fine, parts)
            }
            Event::Preparing { what, total, .. } => {
                let mut parts = vec![what.clone()];
                if *total > 0 {
                    parts.push(format!("{} in total", grouped(*total)));
                }
                ("Preparing", Tone::Fine, parts)
            }
            Event::GenerationStarted {
                generation,
                world,
                formula,
                reason,
                start_samples,
            } => {
                let mut parts = vec![
                    format!("{generation}: {reason}"),
                    ranks(*world),
                    formula.clone(),
                ];
                if *start_samples > 0 {
                    parts.push(format!("from sample {}", grouped(*start_samples)));
                }
                ("Generation", Tone::Fine, parts)
            }
            Event::Step(step) => ("Step", Tone::Fine, step_parts(step, progress)),
            Event::Evaluation(evaluation) => {
                let mut parts = vec![format!("loss {:.4}", evaluation.loss)];
                let preferences = evaluation.preferences.iter();
                parts.extend(preferences.flat_map(|record| record.measures()));
                parts.push(at(evaluation.samples));
                parts.extend(
                    progress
                        .floor
                        .map(|floor| from_floor(evaluation.loss, floor)),
                );
                ("Evaluation", Tone::Fine, parts)
            }
            Event::Checkpoint {
                samples,
                seconds,
                bytes: size,
            } => (
                "Checkpoint",
                Tone::Fine,
                vec![
                    at(*samples),
                    format!("{} in {}", bytes(*size), duration(*seconds)),
                ],
            ),
            Event::BatchChanged {
                samples,
                from,
                to,
                ratio,
                threshold,
                reason,
            } => {
                let mut parts = vec![
                    format!("{} → {}", grouped(*from), grouped(*to)),
                    at(*samples),
                ];
                if let (Some(ratio), Some(threshold)) = (ratio, threshold) {
                    parts.push(format!("r/η² {:.2}", ratio / threshold));
                }
                parts.push(reason.clone());
                ("Batch", Tone::Notable, parts)
            }
            Event::Waiting { message } => ("Waiting", Tone::Notable, vec![message.clone()]),
            Event::Output { rank, line } => ("Rank", Tone::Fine, vec![format!("{rank}: {line}")]),
            Event::RankLost { rank, reason } => {
                ("Lost", Tone::Alarm, vec![format!("rank {rank}: {reason}")])
            }
            Event::Draining { message } => ("Draining", Tone::Notable, vec![message.clone()]),
            Event::DrainCancelled { message } => {
                ("Continuing", Tone::Notable, vec![message.clone()])
            }
            Event::Rescaled {
                from,
                to,
                seconds,
                message,
            } => (
                "Rescaled",
                Tone::Notable,
                vec![
                    format!("{from} → {} in {}", ranks(*to), duration(*seconds)),
                    message.clone(),
                ],
            ),
            Event::Straggler {
                rank,
                seconds,
                usual,
            } => (
                "Slow",
                Tone::Alarm,
                vec![format!(
                    "rank {rank} took {} for its part of a step, {} are usual",
                    duration(*seconds),
                    duration(*usual)
                )],
            ),
            Event::Note { message } => ("Note", Tone::Fine, vec![message.clone()]),
            Event::Warning { message } => ("Warning", Tone::Alarm, vec![message.clone()]),
            Event::Finished {
                samples,
                steps,
                loss,
                seconds,
            } => {
                let mut parts = vec![format!("loss {loss:.4}")];
                parts.extend(progress.floor.map(|floor| from_floor(*loss, floor)));
                parts.push(plural(*samples, "sample"));
                parts.push(plural(*steps, "step"));
                parts.push(duration(*seconds));
                ("Finished", Tone::Result, parts)
            }
        };
        Line { label, tone, parts }
    }

    /// Whether quiet modes show the line.
    pub fn is_for_quiet(&self) -> bool {
        matches!(self.tone, Tone::Alarm | Tone::Result)
    }

    /// The line with ANSI colours (which `anstream` strips where they do not belong).
    pub fn plain(&self) -> String {
        format!("{} {}", self.label(), self.parts.join(BETWEEN))
    }

    /// The line wrapped to `width` columns, between its parts, or between words where a part is too long;
    /// continuation lines are indented below the first part.
    pub fn wrapped(&self, width: usize) -> String {
        let available = width.saturating_sub(LABEL + 1).max(20);
        let mut text = format!("{} ", self.label());
        for (nth, line) in filled(&self.parts, available).into_iter().enumerate() {
            if nth > 0 {
                text += &format!("\n{:LABEL$} ", "");
            }
            text += &line;
        }
        text
    }

    fn label(&self) -> String {
        let colour = match self.tone {
            Tone::Fine | Tone::Result => AnsiColor::Green,
            Tone::Notable => AnsiColor::Cyan,
            Tone::Alarm => AnsiColor::Yellow,
        };
        let style = Style::new().bold().fg_color(Some(Color::Ansi(colour)));
        format!("{style}{:>LABEL$}{style:#}", self.label)
    }
}

/// The parts of a step's line, most important first.
pub(super) fn step_parts(step: &StepRecord, progress: &Progress) -> Vec<String> {
    let mut parts = vec![grouped(step.step), amount(progress)];
    parts.extend(measures(step, progress));
    parts.extend(left(progress));
    parts
}

/// The current measures of the training, most important first.
pub(super) fn measures(step: &StepRecord, progress: &Progress) -> Vec<String> {
    let mut parts = Vec::new();
    // An external trainer may not report it.
    if step.external.is_none() || step.loss.is_finite() {
        parts.push(format!("loss {:.4}", step.loss));
    }
    parts.extend(step.preferences.iter().flat_map(|it| it.measures()));
    parts.push(format!("batch {}", grouped(step.batch)));
    parts.extend(progress.ratio.map(|ratio| format!("r/η² {ratio:.2}")));
    let share = progress.coordinate_share;
    parts.extend(share.map(|share| format!("coordinate share {share:.2}")));
    parts.extend(
        progress
            .tokens_per_second()
            .filter(|rate| *rate > 0.0)
            .map(|rate| format!("{} tok/s", count(rate))),
    );
    if step.learning_rate.is_finite() {
        parts.push(format!("lr {}", learning_rate(step.learning_rate)));
    }
    parts
}

/// `76.8k of 200k samples (38%)`.
pub(super) fn amount(progress: &Progress) -> String {
    let samples = count(progress.samples as f64);
    if progress.budget == 0 {
        return format!("{samples} samples");
    }
    let budget = count(progress.budget as f64);
    format!(
        "{samples} of {budget} samples ({:.0}%)",
        (100.0 * progress.share()).floor()
    )
}

/// `3m12s left`.
pub(super) fn left(progress: &Progress) -> Option<String> {
    let seconds = progress.seconds_left()?;
    Some(format!("{} left", whole_duration(seconds)))
}

fn ranks(world: u64) -> String {
    plural(world, "rank")
}

fn at(samples: u64) -> String {
    format!("at {}", plural(samples, "sample"))
}

/// Fills lines of `available` columns with parts.
fn filled(parts: &[String], available: usize) -> Vec<String> {
    let width = |text: &str| text.chars().count();
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        match lines.last_mut() {
            Some(line) if width(line) + width(BETWEEN) + width(part) <= available => {
                line.push_str(BETWEEN);
                line.push_str(part);
            }
            _ => lines.extend(wrap::cell(part, available)),
        }
    }
    lines
}
