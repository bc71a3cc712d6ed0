//! Detects that an external trainer makes no progress: no step, no checkpoint and no output on the host of rank 0.

use std::path::{Path, PathBuf};

use super::tail::Tail;
use crate::lifecycle::protocol::Report;
use crate::lifecycle::stall::{ProgressDeadline, StallClock};

/// What an external trainer has shown so far.
pub struct ExternalStall {
    clock: StallClock,
    /// Bytes of output.
    output: u64,
    checkpoint: Option<PathBuf>,
}

impl ExternalStall {
    pub fn new(deadline: ProgressDeadline) -> ExternalStall {
        ExternalStall {
            clock: StallClock::of_external_trainer(deadline),
            output: 0,
            checkpoint: None,
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
        self.clock.report(": no step, checkpoint or output", false)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn output_checkpoints_and_steps_are_progress() {
        let mut stall = ExternalStall::new(ProgressDeadline::After(Duration::ZERO));
        let mut look =
            |checkpoint: Option<&str>, stepped| stall.look(&[], checkpoint.map(Path::new), stepped);
        let is_stall = |report| matches!(report, Some(Report::Stalled { .. }));
        assert!(is_stall(look(None, false)));
        assert_eq!(look(None, false), None, "reported once");
        assert_eq!(look(Some("a"), false), Some(Report::Progressing));
        assert!(is_stall(look(Some("a"), false)), "the same checkpoint");
        assert_eq!(look(None, true), Some(Report::Progressing));
    }
}
