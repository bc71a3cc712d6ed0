//! Progress bars: one for the samples of the budget, with the measures of the training below it, and one for
//! data preparation. Events are printed above.

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use super::line::{self, BETWEEN, Line};
use super::progress::Progress;
use crate::telemetry::Event;
use crate::telemetry::human::count;
use crate::util::wrap;

/// Period of the spinner, which shows that a long step is alive.
const TICK: Duration = Duration::from_millis(150);

/// A terminal on standard output.
pub(super) struct Terminal {
    bars: MultiProgress,
    /// Bar for the samples of the budget, from the first generation on.
    training: Option<ProgressBar>,
    /// The preparation in progress and its bar.
    preparing: Option<(String, ProgressBar)>,
    colour: bool,
}

impl Terminal {
    pub fn stdout() -> Terminal {
        let choice = anstream::AutoStream::choice(&std::io::stdout());
        Terminal {
            bars: MultiProgress::with_draw_target(ProgressDrawTarget::stdout()),
            training: None,
            preparing: None,
            colour: choice != anstream::ColorChoice::Never,
        }
    }

    pub fn event(&mut self, event: &Event, progress: &Progress) {
        if let Event::Preparing { what, done, total } = event {
            return self.prepare(what, *done, *total);
        }
        self.preparing = None;
        if let Event::Step(step) = event {
            let measures = line::measures(step, progress);
            return self.advance(progress, &fitting(&measures, columns().saturating_sub(2)));
        }
        if let Event::Finished { .. } = event {
            self.training = None;
        }
        self.print(&Line::of(event, progress));
        if let Event::GenerationStarted { .. } = event {
            self.advance(progress, "waiting for the first step");
        }
    }

    fn prepare(&mut self, what: &str, done: u64, total: u64) {
        if self.preparing.as_ref().is_none_or(|(now, _)| now != what) {
            let place = if total > 0 {
                " {wide_bar} {human_pos}/{human_len}"
            } else {
                " {human_pos}"
            };
            let bar = self.bar(&format!("{{spinner}} {{prefix}}{place}"), total);
            bar.set_prefix(what.to_owned());
            self.preparing = Some((what.to_owned(), bar));
        }
        if let Some((_, bar)) = &self.preparing {
            bar.set_position(done);
        }
        if done >= total && total > 0 {
            self.preparing = None;
        }
    }

    /// Moves the training bar to the current progress.
    fn advance(&mut self, progress: &Progress, measures: &str) {
        let bar = match self.training.take() {
            Some(bar) => bar,
            None => self.bar("{spinner} {wide_bar} {prefix}\n  {msg}", progress.budget),
        };
        let mut place = format!(
            "{:.0}% {}/{}",
            (100.0 * progress.share()).floor(),
            count(progress.samples as f64),
            count(progress.budget as f64)
        );
        if let Some(left) = line::left(progress) {
            place += &format!(" {left}");
        }
        bar.set_length(progress.budget);
        bar.set_position(progress.samples);
        // Padded to its greatest width, so that the bar's end does not move.
        bar.set_prefix(format!("{place:>28}"));
        bar.set_message(measures.to_owned());
        self.training = Some(bar);
    }

    fn bar(&self, template: &str, length: u64) -> ProgressBar {
        let mut template = template.to_owned();
        if self.colour {
            template = template
                .replace("{spinner}", "{spinner:.cyan}")
                .replace("{wide_bar}", "{wide_bar:.cyan/dim}");
        }
        let style = ProgressStyle::with_template(&template)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("━╸─");
        let bar = ProgressBar::new(length)
            .with_style(style)
            .with_finish(ProgressFinish::AndClear);
        let bar = self.bars.add(bar);
        bar.enable_steady_tick(TICK);
        bar
    }

    fn print(&self, line: &Line) {
        let mut text = line.wrapped(columns());
        if !self.colour {
            text = anstream::adapter::strip_str(&text).to_string();
        }
        // The reader may have closed the terminal; training continues.
        let _ = self.bars.println(text);
    }
}

/// As many leading parts as fit into `available` columns.
fn fitting(parts: &[String], available: usize) -> String {
    let mut text = String::new();
    for part in parts {
        let between = if text.is_empty() { "" } else { BETWEEN };
        let columns = [&text, between, part]
            .iter()
            .map(|t| t.chars().count())
            .sum::<usize>();
        if columns > available {
            break;
        }
        text += between;
        text += part;
    }
    text
}

/// Width of the terminal, in columns.
fn columns() -> usize {
    wrap::columns(std::io::stdout()).unwrap_or(80).max(20)
}
