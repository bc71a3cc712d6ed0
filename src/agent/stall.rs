//! Detects that an external trainer makes no progress: no step, no checkpoint and no output on the host of rank 0.

use std::path::{Path, PathBuf};

use super::Tail;
use crate::lifecycle::protocol::Report;
use crate::lifecycle::stall::{ProgressDeadline, StallClock};

/// What an external trainer has shown so far.
pub struct ExternalStall {
    clock: StallClock,
    /// Bytes of output.
    output: u64,
    checkpoint: Option<PathBuf>,
    /// This stall is reported.
    reported: bool,
}

impl ExternalStall {
    pub fn new(deadline: ProgressDeadline) -> ExternalStall {
        ExternalStall {
            clock: StallClock::of_external_trainer(deadline),
            output: 0,
            checkpoint: None,
            reported: false,
        }
    }

    /// Looks for progress; returns what has changed. `stepped`: the trainer has reported a step since the last look.
    /// `checkpoint`: its newest one, if it was looked for.
    pub fn look(
        &mut self,
        tails: &[Tail],
        checkpoint: Option<&Path>,
        stepped: bool,
    ) -> Option<Report> {
        self.clock.look();
        let output = tails.iter().map(Tail::bytes_read).sum();
        let printed = std::mem::replace(&mut self.output, output) != output;
        let saved = checkpoint.is_some_and(|newest| self.checkpoint.as_deref() != Some(newest));
        if saved {
            self.checkpoint = checkpoint.map(Path::to_owned);
        }
        if stepped {
            self.clock.progress();
        } else if printed || saved {
            self.clock.sign();
        }
        if let Some(quiet) = self.clock.stalled(1) {
            let first = !std::mem::replace(&mut self.reported, true);
            let quiet = quiet.as_secs();
            return first.then(|| Report::Stalled {
                message: format!("no progress for {quiet} s: no step, checkpoint or output"),
            });
        }
        std::mem::take(&mut self.reported).then_some(Report::Progressing)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn output_checkpoints_and_steps_are_progress() {
        let mut stall = ExternalStall::new(ProgressDeadline::After(Duration::ZERO));
        let mut stalled = |checkpoint: Option<&str>, stepped| {
            let report = stall.look(&[], checkpoint.map(Path::new), stepped);
            (report.is_some(), stall.reported)
        };
        assert_eq!(stalled(None, false), (true, true));
        assert_eq!(stalled(None, false), (false, true), "reported once");
        assert_eq!(stalled(Some("a"), false), (true, false), "a checkpoint");
        assert_eq!(stalled(Some("a"), false), (true, true), "the same one");
        assert_eq!(stalled(None, true), (true, false), "a step");
    }
}
