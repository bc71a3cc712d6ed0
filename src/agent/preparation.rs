//! Preparing a run before its first generation, in a process of its own: data are counted and
//! tokenised, weights looked at, and what cannot be used is refused.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use super::{Identity, Membership, OomKills};
use crate::durable::{self, FileError};
use crate::job::agent_state::Problem;
use crate::job::protocol::exit;
use crate::train::Setup;

/// The process.
pub struct Preparation {
    child: Child,
    log: PathBuf,
    /// Kills by the kernel since it was started.
    oom_kills: OomKills,
}

impl Preparation {
    /// Starts it.
    pub fn start(identity: &Identity, job: &Membership) -> Result<Preparation, FileError> {
        // Whoever mounted the volume hears of it if this is refused; the process would only say so.
        durable::create_directory(&identity.run)?;
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
        let oom_kills = OomKills::watch();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(words)
            .spawn()
            .map_err(|error| FileError::from_io("run", &identity.program, 0, error))?;
        Ok(Preparation {
            child,
            log,
            oom_kills,
        })
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended well; an error if it has not.
    pub fn ended(&mut self) -> Result<bool, Problem> {
        match self.child.try_wait() {
            Ok(None) => Ok(false),
            Ok(Some(status)) if status.success() => Ok(true),
            Ok(Some(status)) => {
                let words = super::ranks::last_lines(&self.log);
                Err(failed(status, &words, self.oom_kills.raised()))
            }
            Err(error) => Err(problem(
                format!("preparing the run cannot be waited for: {error}"),
                false,
            )),
        }
    }
}

/// What an end means that was not well. Only a refusal would be the same again: what a signal ended,
/// or a volume that is full or away, may be well the next time.
fn failed(status: ExitStatus, words: &str, oom_killed: bool) -> Problem {
    let said = match words.is_empty() {
        true => String::new(),
        false => format!(": {words}"),
    };
    if let Some(signal) = status.signal() {
        return problem(
            match signal == 9 && oom_killed {
                true => {
                    "preparing the run was killed by the kernel's out-of-memory killer, and is \
                         tried again: give the container more memory (resources.limits in \
                         podTemplate)"
                        .into()
                }
                false => format!(
                    "preparing the run was ended by signal {signal}, and is tried again{said}"
                ),
            },
            false,
        );
    }
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(exit::FAILED | exit::UNUSABLE) if words.is_empty() => {
            problem(format!("preparing the run ended with {status}"), true)
        }
        Some(exit::FAILED | exit::UNUSABLE) => problem(words.to_owned(), true),
        Some(exit::TRY_AGAIN) => problem(
            format!("the run could not be prepared, which is tried again{said}"),
            false,
        ),
        _ => problem(
            format!("preparing the run ended with {status}, and is tried again{said}"),
            false,
        ),
    }
}

fn problem(message: String, deterministic: bool) -> Problem {
    Problem {
        reason: "PreparationFailed".into(),
        message,
        deterministic,
    }
}

/// Samples after which training ends, as the prepared run has it.
pub fn budget(setup: &Path) -> Option<u64> {
    let setup: Setup = durable::read_json(setup).ok()?;
    setup.budget_samples
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a wait status of this kind means; `code` is what the program returned.
    fn ended(code: u8, words: &str) -> Problem {
        failed(ExitStatus::from_raw(i32::from(code) << 8), words, false)
    }

    #[test]
    fn only_a_refusal_ends_the_job() {
        for code in [exit::FAILED, exit::UNUSABLE] {
            let refused = ended(code, "error: data.path: no such file");
            assert!(refused.deterministic);
            assert_eq!(refused.message, "error: data.path: no such file");
        }
        let full = ended(exit::TRY_AGAIN, "error: no space left on the disk of /c");
        assert!(!full.deterministic);
        assert_eq!(
            full.message,
            "the run could not be prepared, which is tried again: error: no space left on the disk \
             of /c"
        );
        // A bug is no word about the recipe.
        assert!(!ended(101, "thread 'main' panicked").deterministic);
    }

    #[test]
    fn a_preparation_that_was_killed_says_by_whom() {
        let killed = |oom| failed(ExitStatus::from_raw(9), "", oom);
        assert!(!killed(true).deterministic && !killed(false).deterministic);
        assert!(killed(true).message.contains("out-of-memory killer"));
        assert_eq!(
            killed(false).message,
            "preparing the run was ended by signal 9, and is tried again"
        );
    }
}
