//! The output of `evenkeel launch` while it trains: a progress bar on a terminal, a quiet log elsewhere, JSON
//! lines for programs.
//!
//! All modes receive the same [`Event`]s and take their clock from the records, so that a replayed run looks
//! the same. A closed pipe never stops training: write errors are dropped here on purpose.

mod line;
mod progress;
mod terminal;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};

use super::{Event, StepRecord};
use crate::util::wrap;
use line::Line;
use progress::Progress;
use terminal::Terminal;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Progress bars, with lines above them.
    Terminal,
    /// Lines only; steps at most every [`PLAIN_SECONDS`].
    Plain,
    /// Every event as one line of JSON.
    JsonLines,
    /// Warnings, lost ranks and the result.
    Quiet,
    /// The same as lines of JSON.
    QuietJsonLines,
}

/// Seconds between the step lines of [`Mode::Plain`].
pub const PLAIN_SECONDS: f64 = 10.0;

impl Mode {
    /// Whether only warnings, errors and the result are shown.
    pub fn is_quiet(self) -> bool {
        matches!(self, Mode::Quiet | Mode::QuietJsonLines)
    }

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

/// Shows the events of a run.
pub struct Display {
    sink: Sink,
    progress: Progress,
    /// Preparations already reported, so that each is reported once.
    prepared: BTreeSet<String>,
    /// Time of the last step that [`Sink::Plain`] printed.
    printed: Option<f64>,
    /// Columns of lines. `None`: unlimited.
    width: Option<usize>,
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
        let mut display = Display::on(match mode {
            Mode::Terminal => Sink::Terminal(Terminal::stdout()),
            Mode::Plain => Sink::Plain(Box::new(anstream::stdout())),
            Mode::JsonLines => Sink::JsonLines(Box::new(io::stdout())),
            Mode::Quiet => Sink::Quiet(Box::new(anstream::stderr())),
            Mode::QuietJsonLines => Sink::QuietJsonLines(Box::new(io::stdout())),
        });
        display.width = match mode {
            Mode::Quiet => wrap::columns(io::stderr()),
            _ => wrap::columns(io::stdout()),
        };
        display
    }

    fn on(sink: Sink) -> Display {
        Display {
            sink,
            progress: Progress::default(),
            prepared: BTreeSet::new(),
            printed: None,
            width: None,
        }
    }

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
                    write(out, shown(&Line::of(event, &self.progress), self.width));
                }
            }
            Sink::JsonLines(out) => write_json(out, event),
            Sink::QuietJsonLines(out) => {
                if Line::of(event, &self.progress).is_for_quiet() {
                    write_json(out, event);
                }
            }
            Sink::Quiet(out) => {
                let line = Line::of(event, &self.progress);
                if line.is_for_quiet() {
                    write(out, shown(&line, self.width));
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

fn shown(line: &Line, width: Option<usize>) -> String {
    width.map_or_else(|| line.plain(), |width| line.wrapped(width))
}

fn write_json(out: &mut (impl Write + ?Sized), event: &Event) {
    if let Ok(json) = serde_json::to_string(event) {
        write(out, json);
    }
}

fn write(out: &mut (impl Write + ?Sized), mut line: String) {
    line.push('\n');
    // The reader may have closed the pipe; training continues.
    let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
pub(super) mod tests;
