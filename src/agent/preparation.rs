//! Preparing a run before its first generation, in a process of its own: data are counted and
//! tokenised, weights looked at, and what cannot be used is refused.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{Identity, Membership};
use crate::durable::{self, FileError};
use crate::job::agent_state::Problem;
use crate::train::Setup;

/// The process.
pub struct Preparation {
    child: Child,
    log: PathBuf,
}

impl Preparation {
    /// Starts it.
    pub fn start(identity: &Identity, job: &Membership) -> Result<Preparation, FileError> {
        // On its container's own disk.
        let files = std::env::temp_dir().join("evenkeel-recipe");
        durable::create_directory(&files)?;
        let carried = files.join("recipe.json");
        durable::write_json(&carried, &(&job.recipe, job.remainder))?;
        let log = files.join("prepare.log");
        let world = job
            .generation
            .as_ref()
            .map_or(1, |current| current.record.world());
        let mut command = Command::new(&identity.program);
        command
            .arg("prepare")
            .arg(&carried)
            .arg("--out")
            .arg(&identity.run)
            .args(["--procs", &world.to_string()]);
        if let Some(bytes) = &job.rank_memory {
            command.args(["--rank-memory", bytes]);
        }
        let words =
            File::create(&log).map_err(|error| FileError::from_io("write", &log, 0, error))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(words)
            .spawn()
            .map_err(|error| FileError::from_io("run", &identity.program, 0, error))?;
        Ok(Preparation { child, log })
    }

    /// Whether it has ended well; an error if it has not.
    pub fn ended(&mut self) -> Result<bool, Problem> {
        let refused = |message: String| Problem {
            reason: "PreparationFailed".into(),
            message,
            deterministic: true,
        };
        match self.child.try_wait() {
            Ok(None) => Ok(false),
            Ok(Some(status)) if status.success() => Ok(true),
            Ok(Some(status)) => {
                let words = super::ranks::last_lines(&self.log);
                Err(refused(match words.is_empty() {
                    true => format!("preparing the run ended with {status}"),
                    false => words,
                }))
            }
            Err(error) => Err(refused(format!("preparing the run: {error}"))),
        }
    }
}

/// Samples after which training ends, as the prepared run has it.
pub fn budget(setup: &Path) -> Option<u64> {
    let setup: Setup = durable::read_json(setup).ok()?;
    setup.budget_samples
}
