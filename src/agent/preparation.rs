//! Separate processes before the first ranks: one prepares the run, that is counts and tokenises data, checks weights and
//! refuses an unusable recipe. Another prepares the pod: it unpacks the job's code and runs its setup command.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::{Identity, Membership};
use crate::host::{OomKills, last_lines};
use crate::lifecycle::agent_state::Problem;
use crate::lifecycle::protocol::exit;
use crate::util::durable::{self, FileError};

pub struct Preparation {
    pub(super) child: Child,
    log: PathBuf,
    /// Kills by the kernel since the process started.
    oom_kills: OomKills,
}

impl Preparation {
    pub fn start(identity: &Identity, job: &Membership) -> Result<Preparation, FileError> {
        // Creating the directory here reports a volume error as a problem of the pod; the process
        // would only print it.
        durable::create_directory(&identity.run)?;
        let files = own_directory()?;
        let snapshot = files.join("recipe.json");
        durable::write_json(&snapshot, &(&job.recipe, job.remainder))?;
        let world = job
            .generation
            .as_ref()
            .map_or(1, |current| current.record.world());
        let mut command = Command::new(&identity.program);
        command
            .arg("prepare")
            .arg(&snapshot)
            .arg("--out")
            .arg(&identity.run)
            .args(["--procs", &world.to_string()])
            .args(["--device", &job.device.to_string()]);
        if let Some(bytes) = &job.rank_memory {
            command.args(["--rank-memory", bytes]);
        }
        command.stdout(Stdio::null());
        Preparation::spawn(command, files.join("prepare.log"))
    }

    /// Starts what the job wants done in the pod before its first ranks.
    pub fn start_setup(identity: &Identity) -> Result<Preparation, FileError> {
        let mut command = Command::new(&identity.program);
        command.arg("setup").stdout(Stdio::inherit());
        Preparation::spawn(command, own_directory()?.join("setup.log"))
    }

    fn spawn(mut command: Command, log: PathBuf) -> Result<Preparation, FileError> {
        let words =
            File::create(&log).map_err(|error| FileError::from_io("write", &log, 0, error))?;
        let oom_kills = OomKills::watch();
        let child = command
            .stdin(Stdio::null())
            .stderr(words)
            .spawn()
            .map_err(|error| FileError::from_io("run", command.get_program().as_ref(), 0, error))?;
        Ok(Preparation {
            child,
            log,
            oom_kills,
        })
    }

    /// Starts a process unless `running` is one; whether it has ended successfully. One that failed is started again, if
    /// that may help.
    pub fn run(
        running: &mut Option<Preparation>,
        start: impl FnOnce() -> Result<Preparation, FileError>,
    ) -> Result<bool, Problem> {
        let mut preparation = match running.take() {
            Some(preparation) => preparation,
            None => start()?,
        };
        let ended = preparation.ended();
        let may_pass = matches!(&ended, Err(problem) if !problem.deterministic);
        *running = (!may_pass).then_some(preparation);
        ended
    }

    fn ended(&mut self) -> Result<bool, Problem> {
        match self.child.try_wait() {
            Ok(None) => Ok(false),
            Ok(Some(status)) if status.success() => Ok(true),
            Ok(Some(status)) => {
                let words = last_lines(&self.log);
                Err(failed(status, &words, self.oom_kills.raised()))
            }
            Err(error) => Err(Problem::new(
                REASON,
                format!("preparing the run cannot be waited for: {error}"),
            )),
        }
    }
}

const REASON: &str = "PreparationFailed";

/// The directory of these processes' files, on the container's own disk.
fn own_directory() -> Result<PathBuf, FileError> {
    let directory = std::env::temp_dir().join("evenkeel-recipe");
    durable::create_directory(&directory)?;
    Ok(directory)
}

/// The problem of a failed preparation. Only a refusal is deterministic: a signal or a full or
/// missing volume may not occur on the next attempt.
fn failed(status: ExitStatus, words: &str, oom_killed: bool) -> Problem {
    let detail = match words {
        "" => String::new(),
        words => format!(": {words}"),
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    let refused = matches!(code, Some(exit::FAILED | exit::UNUSABLE));
    let message = match (status.signal(), code) {
        (Some(9), _) if oom_killed => {
            "preparing the run was killed by the kernel's out-of-memory killer, and will be \
             retried; increase the container's memory (resources.limits in podTemplate)"
                .to_owned()
        }
        (Some(signal), _) => {
            format!("preparing the run was ended by signal {signal} and will be retried{detail}")
        }
        _ if refused && words.is_empty() => format!("preparing the run ended with {status}"),
        _ if refused => words.to_owned(),
        (_, Some(exit::TRY_AGAIN)) => {
            format!("preparing the run failed and will be retried{detail}")
        }
        _ => format!("preparing the run ended with {status} and will be retried{detail}"),
    };
    Problem {
        deterministic: refused,
        ..Problem::new(REASON, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The problem that follows from this exit code and output.
    fn ended(code: u8, words: &str) -> Problem {
        failed(ExitStatus::from_raw(i32::from(code) << 8), words, false)
    }

    #[test]
    fn only_a_refusal_is_deterministic() {
        for code in [exit::FAILED, exit::UNUSABLE] {
            let refused = ended(code, "error: data.path: no such file");
            assert!(refused.deterministic);
            assert_eq!(refused.message, "error: data.path: no such file");
        }
        let full = ended(exit::TRY_AGAIN, "error: no space left on the disk of /c");
        assert!(!full.deterministic);
        assert_eq!(
            full.message,
            "preparing the run failed and will be retried: error: no space left on the disk of /c"
        );
        // A bug does not prove that the recipe is unusable.
        assert!(!ended(101, "thread 'main' panicked").deterministic);
    }

    #[test]
    fn a_killed_preparation_reports_the_killer() {
        let killed = |oom| failed(ExitStatus::from_raw(9), "", oom);
        assert!(!killed(true).deterministic && !killed(false).deterministic);
        assert!(killed(true).message.contains("out-of-memory killer"));
        assert_eq!(
            killed(false).message,
            "preparing the run was ended by signal 9 and will be retried"
        );
    }
}
