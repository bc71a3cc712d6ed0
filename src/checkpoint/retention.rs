//! Removes old checkpoints beside the training, one removal at a time.

use std::fmt::Display;
use std::thread::JoinHandle;

use crate::lifecycle::CheckpointRef;

/// The removals for the newest checkpoints of a run.
pub struct Retention<Error> {
    /// The last checkpoint reference that was processed.
    done: Option<CheckpointRef>,
    working: Option<JoinHandle<Result<(), Error>>>,
}

impl<Error> Default for Retention<Error> {
    fn default() -> Retention<Error> {
        Retention {
            done: None,
            working: None,
        }
    }
}

impl<Error: Display> Retention<Error> {
    /// Starts to remove the checkpoints that `newest` made obsolete, unless that was done or another removal runs. Returns
    /// the error of the previous removal; a surplus copy does not stop training.
    pub fn tend(
        &mut self,
        newest: &CheckpointRef,
        start: impl FnOnce() -> JoinHandle<Result<(), Error>>,
    ) -> Option<String> {
        let ended = (self.working).take_if(|working| working.is_finished());
        let problem = ended.and_then(|ended| ended.join().ok()?.err());
        if self.working.is_none() && self.done.as_ref() != Some(newest) {
            self.done = Some(newest.clone());
            self.working = Some(start());
        }
        problem.map(|problem| problem.to_string())
    }

    /// Waits for the removal that runs. Returns its error.
    pub fn wait(&mut self) -> Option<String> {
        let ended = self.working.take()?.join().ok()?;
        ended.err().map(|problem| problem.to_string())
    }
}
