//! Hosts that Slurm gives: the nodes of the allocation that this process is in, each reached by a job step (`srun`), and
//! jobs that Evenkeel submits itself ([`jobs`]). Texts are those of Slurm 22.05.

pub mod jobs;
pub mod submission;

use std::path::Path;
use std::process::{Command, Stdio};

use super::list::HostError;
use crate::host::{Remote, ToHost, Unreached};

/// The job in whose allocation this process runs.
const JOB: &str = "SLURM_JOB_ID";
/// The nodes of the allocation, in Slurm's short form (`n[1-3]`).
const NODES: &str = "SLURM_JOB_NODELIST";
/// How often Slurm has requeued the job.
const RESTARTS: &str = "SLURM_RESTART_COUNT";
/// The array of jobs to which the job belongs.
const ARRAY: &str = "SLURM_ARRAY_JOB_ID";
/// The number of this process among those that `srun` has started.
const TASK: &str = "SLURM_PROCID";

/// Seconds after which a command of Slurm is given up.
const LONGEST: &str = "60";

/// A node of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub job: String,
    pub name: String,
    /// By which the other nodes reach it.
    pub address: String,
    pub step: Step,
}

/// The job step on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Options of `srun`.
    pub options: Vec<String>,
    /// GPUs of the node that may be used; `None`: all.
    pub gpus: Option<u64>,
}

/// Whether this process runs in an allocation.
pub fn is_inside() -> bool {
    std::env::var_os(JOB).is_some()
}

/// Whether Slurm has started this job again, after a preemption or a failure.
pub fn is_requeued() -> bool {
    restarts() > 0
}

/// How often Slurm had requeued this job before it started it.
fn restarts() -> u64 {
    let count = std::env::var(RESTARTS).ok();
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// The number of this process if `srun` has started several; only the first one launches.
pub fn later_task() -> Option<String> {
    std::env::var(TASK).ok().filter(|task| task != "0")
}

/// The nodes of the allocation that this process is in.
pub fn nodes(step: &Step) -> Result<Vec<Node>, HostError> {
    let (Ok(job), Ok(nodes)) = (std::env::var(JOB), std::env::var(NODES)) else {
        let problem = "this is not inside an allocation of Slurm; add `--nodes N` to submit the run, or start this command by \
                       `sbatch --nodes N --no-kill --wrap '…'`";
        return Err(HostError(problem.to_owned()));
    };
    if let Ok(array) = std::env::var(ARRAY) {
        return Err(HostError(format!(
            "this is a job of the array {array}, whose jobs would all write one run; submit a job without `--array`"
        )));
    }
    nodes_of(&job, &nodes, step)
}

/// These nodes of a job, which may be in Slurm's short form.
fn nodes_of(job: &str, nodes: &str, step: &Step) -> Result<Vec<Node>, HostError> {
    let names = call("scontrol", &["show", "hostnames", nodes], "")?;
    let shown = call("scontrol", &["--oneliner", "show", "node", nodes], "")?;
    let nodes = names.split_whitespace().map(|name| Node {
        job: job.to_owned(),
        name: name.to_owned(),
        address: address(&shown, name).unwrap_or(name).to_owned(),
        step: step.clone(),
    });
    Ok(nodes.collect())
}

/// Calls a command of Slurm with this standard input.
fn call(program: &str, arguments: &[&str], input: &str) -> Result<String, HostError> {
    let failed = |problem: &str| HostError(format!("cannot ask Slurm with {program}: {problem}"));
    let io = |error: std::io::Error| failed(&error.to_string());
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", LONGEST, program])
        .args(arguments);
    // They would change the jobs that are submitted.
    let of_sbatch = std::env::vars_os().map(|(name, _)| name);
    let of_sbatch = of_sbatch.filter(|name| name.as_encoded_bytes().starts_with(b"SBATCH_"));
    for name in of_sbatch {
        command.env_remove(name);
    }
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(io)?;
    if let Some(mut standard_input) = child.stdin.take() {
        // One that has ended says why below.
        let _ = std::io::Write::write_all(&mut standard_input, input.as_bytes());
    }
    let output = child.wait_with_output().map_err(io)?;
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Some(124 | 137) => Err(failed(&format!("no answer for {LONGEST} s"))),
        Some(127) => Err(failed("it is not installed here; run this where it is")),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.trim().trim_start_matches(&format!("{program}: "));
            Err(failed(said.trim_start_matches("error: ")))
        }
    }
}

/// The address of a node in the output of `scontrol --oneliner show node`.
fn address<'a>(shown: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = shown.lines();
    let line = lines.find(|line| field(line, "NodeName") == Some(name))?;
    field(line, "NodeAddr")
}

/// The value of a key in a line of `scontrol --oneliner show`.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let mut words = line.split_whitespace();
    words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

impl Node {
    /// Connects by a job step that has all of the node that the job has. The program is on a disk that the nodes share.
    pub fn connect(&self, program: &Path, first: &ToHost) -> Result<Remote, Unreached> {
        let mut command = Command::new("srun");
        command
            .args(["--jobid", &self.job, "--nodelist", &self.name])
            .args(["--nodes=1", "--ntasks=1", "--overlap", "--unbuffered"])
            .args(["--job-name=evenkeel", "--cpu-bind=none", "--quiet"])
            .args(&self.step.options)
            .arg(program)
            .arg("host");
        Remote::connect(command, first)
    }

    /// What the user can do about a node that is not reached.
    pub fn remedy(&self) -> String {
        format!(
            "see what `srun --jobid {} --overlap --nodelist {} hostname` does",
            self.job, self.name
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_node_is_read_from_its_line() {
        let shown = "NodeName=n1 Arch=x86_64 CPUTot=2 NodeAddr=10.8.0.1 NodeHostName=n1 Port=0\n\
                     NodeName=n10 Arch=x86_64 NodeAddr=10.8.0.10 NodeHostName=n10\n";
        assert_eq!(address(shown, "n10"), Some("10.8.0.10"));
        assert_eq!(address(shown, "n1"), Some("10.8.0.1"));
        assert_eq!(address(shown, "n2"), None);
    }
}
