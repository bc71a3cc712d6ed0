//! Old checkpoints of a run on a cluster: the agent of rank 0 removes them, beside the training and
//! up to the checkpoint that the controller has pinned, never by what it thinks is the newest.

use std::path::PathBuf;
use std::thread::JoinHandle;

use crate::durable;
use crate::job::{Pin, files};
use crate::train::{Setup, checkpoint};

/// Removes old checkpoints, one time after another.
#[derive(Default)]
pub struct Retention {
    /// The pin that was last tended to.
    done: Option<Pin>,
    working: Option<JoinHandle<Result<(), String>>>,
}

impl Retention {
    /// Starts removing what `pin` has made old, if that was not done and nothing else is being
    /// removed. `start`: what the running generation began with. Returns what went wrong the last
    /// time; a copy too many is no reason to stop.
    pub fn tend(&mut self, run: PathBuf, pin: &Pin, start: Option<&Pin>) -> Option<String> {
        let mut problem = None;
        if self.working.as_ref().is_some_and(JoinHandle::is_finished) {
            let ended = self.working.take().map(JoinHandle::join);
            problem = match ended {
                Some(Ok(Err(words))) => Some(words),
                _ => None,
            };
        }
        if self.working.is_some() || self.done.as_ref() == Some(pin) {
            return problem;
        }
        self.done = Some(pin.clone());
        let pin = run.join(&pin.path);
        let start = start.map(|start| run.join(&start.path));
        self.working = Some(std::thread::spawn(move || {
            let setup: Setup =
                durable::read_json(&run.join(files::RUN)).map_err(|error| error.to_string())?;
            let Some(keep) = setup.spec.checkpoint.keep else {
                return Ok(());
            };
            let removed = checkpoint::retain_in_run(&run, keep, &pin, start.as_deref());
            removed.map(drop).map_err(|error| error.to_string())
        }));
        problem
    }
}
