//! What `evenkeel launch` shows while it trains: a progress bar on a terminal, a quiet log
//! elsewhere, JSON lines for programs.
//!
//! All of them are fed the same [`Event`]s and take their clock from the records, so that a run
//! looks the same whenever it is replayed. A reader that goes away (a closed pipe) never stops
//! training: errors of writing are dropped here, on purpose.

mod line;
mod progress;
mod terminal;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};

use super::{Event, StepRecord};
use line::Line;
use progress::Progress;
use terminal::Terminal;

/// How events are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Progress bars, with lines above them.
    Terminal,
    /// Lines only; steps at most every [`PLAIN_SECONDS`].
    Plain,
    /// Every event as a JSON object on a line of its own.
    JsonLines,
    /// Warnings and lost ranks only.
    Quiet,
    /// The same and the end, as JSON objects.
    QuietJsonLines,
}

/// Seconds between the step lines of [`Mode::Plain`].
pub const PLAIN_SECONDS: f64 = 10.0;

impl Mode {
    /// [`Mode::Terminal`] where standard output is a terminal that can move its cursor, else
    /// [`Mode::Plain`].
    pub fn detect() -> Mode {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if io::stdout().is_terminal() && !dumb {
            Mode::Terminal
        } else {
            Mode::Plain
        }
    }
}

/// Shows a run's events.
pub struct Display {
    sink: Sink,
    progress: Progress,
    /// What was said to be prepared, so that it is said once.
    prepared: BTreeSet<String>,
    /// Time of the last step that [`Sink::Plain`] printed.
    printed: Option<f64>,
}

enum Sink {
    Terminal(Terminal),
    Plain(Box<dyn Write + Send>),
    JsonLines(Box<dyn Write + Send>),
    Quiet(Box<dyn Write + Send>),
    QuietJsonLines(Box<dyn Write + Send>),
}

impl Display {
    /// Shows events on standard output (standard error for [`Mode::Quiet`]).
    pub fn new(mode: Mode) -> Display {
        Display::on(match mode {
            Mode::Terminal => Sink::Terminal(Terminal::stdout()),
            Mode::Plain => Sink::Plain(Box::new(anstream::stdout())),
            Mode::JsonLines => Sink::JsonLines(Box::new(io::stdout())),
            Mode::Quiet => Sink::Quiet(Box::new(anstream::stderr())),
            Mode::QuietJsonLines => Sink::QuietJsonLines(Box::new(io::stdout())),
        })
    }

    fn on(sink: Sink) -> Display {
        Display {
            sink,
            progress: Progress::default(),
            prepared: BTreeSet::new(),
            printed: None,
        }
    }

    /// Shows one event.
    pub fn event(&mut self, event: &Event) {
        self.progress.take(event);
        match &mut self.sink {
            Sink::Terminal(terminal) => terminal.event(event, &self.progress),
            Sink::Plain(out) => {
                let wanted = match event {
                    Event::Step(step) => step_is_due(&mut self.printed, step, &self.progress),
                    Event::Preparing { what, .. } => self.prepared.insert(what.clone()),
                    Event::GenerationStarted { .. } => {
                        self.printed = None;
                        true
                    }
                    _ => true,
                };
                if wanted {
                    write(out, Line::of(event, &self.progress).plain());
                }
            }
            Sink::JsonLines(out) => write_json(out, event),
            Sink::QuietJsonLines(out) => {
                let end = matches!(event, Event::Finished { .. });
                if end || Line::of(event, &self.progress).is_alarm() {
                    write_json(out, event);
                }
            }
            Sink::Quiet(out) => {
                let line = Line::of(event, &self.progress);
                if line.is_alarm() {
                    write(out, line.plain());
                }
            }
        }
    }
}

/// Whether a step is printed: the first, the last, and one every [`PLAIN_SECONDS`].
fn step_is_due(printed: &mut Option<f64>, step: &StepRecord, progress: &Progress) -> bool {
    let due = printed.is_none_or(|last| (step.time - last).abs() >= PLAIN_SECONDS)
        || progress.share() >= 1.0;
    if due {
        *printed = Some(step.time);
    }
    due
}

fn write_json(out: &mut (impl Write + ?Sized), event: &Event) {
    if let Ok(json) = serde_json::to_string(event) {
        write(out, json);
    }
}

fn write(out: &mut (impl Write + ?Sized), mut line: String) {
    line.push('\n');
    // Whoever read this is gone; training goes on.
    let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
pub(super) mod tests;
