//! What Evenkeel submits to Slurm for a run: one job that runs the launcher on the nodes of the smallest world, and a job
//! of one node for each further node, which joins and leaves as the partition gives and takes.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::HostError;
use crate::recipe::schema::run_name;
use crate::recipe::syntax::shell;
use crate::util::key;

/// Variable of the first job, with its [`Submission`].
pub const VARIABLE: &str = "EVENKEEL_SLURM_RUN";
/// Seconds between two questions of a further node's job whether the first job is in the queue.
const POLL_SECONDS: u64 = 20;
/// Seconds between Slurm's SIGTERM and the end of a job.
const NOTICE_SECONDS: u64 = 120;

/// Begins the names of all jobs.
const PREFIX: &str = "evenkeel-";
/// Digits of the path's checksum in a name.
const DIGITS: usize = 6;

/// A run that jobs of Slurm train.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submission {
    /// Name of the first job.
    pub name: String,
    /// Nodes of the first job.
    pub least: u64,
    /// Nodes that the run can use, those of the first job included.
    pub nodes: u64,
    /// Options of `sbatch` for all jobs.
    pub options: Vec<String>,
    /// A shell line before the launch.
    pub setup: Option<String>,
    /// The launch.
    pub command: Vec<String>,
}

/// The name of the first job of a run in this directory, an absolute path.
pub fn name(run_dir: &Path) -> String {
    let run_dir = real(run_dir);
    let digits = &key::sha256(run_dir.as_os_str().as_encoded_bytes())[..DIGITS];
    let label = run_dir.file_name().unwrap_or_default().to_string_lossy();
    format!("{PREFIX}{}-{digits}", run_name::label(&label))
}

/// Whether a job of this name may be the first one of a run.
pub fn is_first(name: &str) -> bool {
    let rest = name.strip_prefix(PREFIX);
    let digits = rest.and_then(|rest| Some(rest.rsplit_once('-')?.1));
    digits.is_some_and(|digits| {
        digits.len() == DIGITS && digits.chars().all(|it| it.is_ascii_hexdigit())
    })
}

/// The path without links, `..` and a slash at its end; its last parts need not exist.
fn real(path: &Path) -> PathBuf {
    let mut known = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(known.pop()),
            Component::CurDir => {}
            part => known.push(part),
        }
        // What does not exist yet is no link.
        known = known.canonicalize().unwrap_or(known);
    }
    known
}

/// An option as a line of a script has it.
fn quoted(option: &str) -> String {
    let plain = |c: char| !c.is_whitespace() && !"\"'\\#".contains(c);
    match option.split_once('=') {
        Some((name, value)) if !value.chars().all(plain) => {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"");
            format!("{name}=\"{value}\"")
        }
        _ => option.to_owned(),
    }
}

impl Submission {
    /// That of the job that this process is in; `None`: Evenkeel has not submitted it.
    pub fn of_process() -> Result<Option<Submission>, HostError> {
        let Some(text) = std::env::var_os(VARIABLE).filter(|_| super::is_inside()) else {
            return Ok(None);
        };
        let text = text.to_string_lossy();
        let submission = serde_json::from_str(&text);
        submission.map(Some).map_err(|error| {
            HostError(format!(
                "{VARIABLE} is not what Evenkeel writes: {error}; unset it, or submit the run again"
            ))
        })
    }

    /// The name of a further node's job.
    pub fn name_of(&self, node: u64) -> String {
        format!("{}-node-{node}", self.name)
    }

    /// The script of the first job. After its time limit, and after an end that Slurm does not repeat, an equal job takes its
    /// place.
    pub fn first(&self) -> String {
        // SIGTERM goes to the batch step only, which lets the ranks of all nodes commit.
        let own = [
            format!("--nodes={}", self.least),
            "--no-kill".to_owned(),
            format!("--signal=B:TERM@{NOTICE_SECONDS}"),
            "--open-mode=append".to_owned(),
        ];
        let state = serde_json::to_string(self).unwrap_or_default();
        let setup = self.setup.iter().map(|line| format!("{line}\n"));
        format!(
            "{}export {VARIABLE}={}\n{}exec {}\n",
            self.head(&self.name, &own),
            shell::join(&[state]),
            setup.collect::<String>(),
            shell::join(&self.command),
        )
    }

    /// The script of a further node's job, which ends when no first job is left.
    pub fn further(&self, node: u64) -> String {
        // SIGTERM goes to the step with the ranks.
        let own = [
            "--nodes=1".to_owned(),
            format!("--signal=TERM@{NOTICE_SECONDS}"),
            "--output=/dev/null".to_owned(),
        ];
        format!(
            "{}# The launcher in {} runs a step here.\nwhile sleep {POLL_SECONDS}; do\n  jobs=$(squeue --noheader --me --format=%i --name={}) || continue\n  \
             [ -n \"$jobs\" ] || exit 0\ndone\n",
            self.head(&self.name_of(node), &own),
            self.name,
            self.name,
        )
    }

    fn head(&self, name: &str, own: &[String]) -> String {
        let named = [format!("--job-name={name}"), "--requeue".to_owned()];
        let options = named.iter().chain(&self.options).chain(own);
        let lines = options.map(|option| format!("#SBATCH {}\n", quoted(option)));
        format!("#!/bin/bash\n{}", lines.collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_jobs_are_known_by_their_names() {
        let first = name(Path::new("/shared/run"));
        assert!(is_first(&first), "{first}");
        assert!(!is_first(
            &format!("{first}-node-123456")[..first.len() + 7]
        ));
        assert!(!is_first("train-123456"));
    }

    #[test]
    fn a_run_has_one_name_by_whatever_path() {
        let place = tempfile::tempdir().unwrap();
        let here = place.path().canonicalize().unwrap();
        std::fs::create_dir(here.join("runs")).unwrap();
        std::os::unix::fs::symlink(here.join("runs"), here.join("link")).unwrap();
        let expected = name(&here.join("runs/new/one"));
        for path in ["runs/new/one/", "link/new/one", "runs/new/../new/./one"] {
            assert_eq!(name(&here.join(path)), expected, "{path}");
        }
        assert_ne!(name(&here.join("runs/new/two")), expected);
    }

    fn submission() -> Submission {
        let words = |text: &'static str| text.split(' ').map(str::to_owned);
        Submission {
            name: name(Path::new("/shared/zephyr_7b run")),
            least: 2,
            nodes: 8,
            options: words(
                "--ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 --partition=a100",
            )
            .chain(["--constraint=a & b".to_owned()])
            .collect(),
            setup: Some("module load cuda".to_owned()),
            command: words("/shared/evenkeel launch recipe.yaml --on slurm --nodes 8 --name it's")
                .collect(),
        }
    }

    #[test]
    fn the_scripts_requeue_their_jobs_and_announce_the_time_limit() {
        insta::assert_snapshot!(submission().first(), @r###"
        #!/bin/bash
        #SBATCH --job-name=evenkeel-zephyr-7b-run-3aeb60
        #SBATCH --requeue
        #SBATCH --ntasks-per-node=1
        #SBATCH --gpus-per-node=8
        #SBATCH --exclusive
        #SBATCH --mem=0
        #SBATCH --partition=a100
        #SBATCH --constraint="a & b"
        #SBATCH --nodes=2
        #SBATCH --no-kill
        #SBATCH --signal=B:TERM@120
        #SBATCH --open-mode=append
        export EVENKEEL_SLURM_RUN='{"name":"evenkeel-zephyr-7b-run-3aeb60","least":2,"nodes":8,"options":["--ntasks-per-node=1","--gpus-per-node=8","--exclusive","--mem=0","--partition=a100","--constraint=a & b"],"setup":"module load cuda","command":["/shared/evenkeel","launch","recipe.yaml","--on","slurm","--nodes","8","--name","it'\''s"]}'
        module load cuda
        exec /shared/evenkeel launch recipe.yaml --on slurm --nodes 8 --name "it's"
        "###);
        insta::assert_snapshot!(submission().further(3), @r###"
        #!/bin/bash
        #SBATCH --job-name=evenkeel-zephyr-7b-run-3aeb60-node-3
        #SBATCH --requeue
        #SBATCH --ntasks-per-node=1
        #SBATCH --gpus-per-node=8
        #SBATCH --exclusive
        #SBATCH --mem=0
        #SBATCH --partition=a100
        #SBATCH --constraint="a & b"
        #SBATCH --nodes=1
        #SBATCH --signal=TERM@120
        #SBATCH --output=/dev/null
        # The launcher in evenkeel-zephyr-7b-run-3aeb60 runs a step here.
        while sleep 20; do
          jobs=$(squeue --noheader --me --format=%i --name=evenkeel-zephyr-7b-run-3aeb60) || continue
          [ -n "$jobs" ] || exit 0
        done
        "###);
    }
}
