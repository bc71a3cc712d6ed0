//! Removes old checkpoints of a run on a cluster. The agent of rank 0 removes them while training
//! runs, up to the checkpoint reference that the controller committed; it never decides by itself
//! which checkpoint is the newest.

use std::path::PathBuf;
use std::thread::JoinHandle;

use crate::checkpoint;
use crate::lifecycle::CheckpointRef;
use crate::train::Setup;

/// Removes old checkpoints, one at a time.
#[derive(Default)]
pub struct Retention {
    /// The last checkpoint reference that was processed.
    done: Option<CheckpointRef>,
    working: Option<JoinHandle<Result<(), String>>>,
}

impl Retention {
    /// Starts to remove the checkpoints that `checkpoint_ref` made obsolete, unless that was done or another
    /// removal runs. `start` is the checkpoint that the running generation started from. Returns
    /// the error of the previous removal; a surplus copy does not stop training.
    pub fn tend(
        &mut self,
        run: PathBuf,
        checkpoint_ref: &CheckpointRef,
        start: Option<&CheckpointRef>,
    ) -> Option<String> {
        let mut problem = None;
        if self.working.as_ref().is_some_and(JoinHandle::is_finished) {
            let ended = self.working.take().map(JoinHandle::join);
            problem = match ended {
                Some(Ok(Err(words))) => Some(words),
                _ => None,
            };
        }
        if self.working.is_some() || self.done.as_ref() == Some(checkpoint_ref) {
            return problem;
        }
        self.done = Some(checkpoint_ref.clone());
        let checkpoint_ref = run.join(&checkpoint_ref.path);
        let start = start.map(|start| run.join(&start.path));
        self.working = Some(std::thread::spawn(move || {
            let setup = Setup::read(&run).map_err(|error| error.to_string())?;
            let Some(keep) = setup.spec.checkpoint.keep else {
                return Ok(());
            };
            let removed = checkpoint::retain_in_run(&run, keep, &checkpoint_ref, start.as_deref());
            removed.map(drop).map_err(|error| error.to_string())
        }));
        problem
    }
}
