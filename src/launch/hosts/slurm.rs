//! Hosts of a Slurm allocation, reached by a job step each (`srun`). Texts are those of Slurm 22.05.

use std::path::Path;
use std::process::Command;

use super::list::HostError;
use crate::host::{Remote, ToHost, Unreached};

/// The job in whose allocation this process runs.
const JOB: &str = "SLURM_JOB_ID";
/// The nodes of the allocation, in Slurm's short form (`n[1-3]`).
const NODES: &str = "SLURM_JOB_NODELIST";
/// How often Slurm has requeued the job.
const RESTARTS: &str = "SLURM_RESTART_COUNT";

/// A node of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub job: String,
    pub name: String,
    /// By which the other nodes reach it.
    pub address: String,
}

/// Whether Slurm has started this job again, after a preemption or a failure.
pub fn is_requeued() -> bool {
    std::env::var(RESTARTS).is_ok_and(|count| count != "0")
}

/// The nodes of the allocation that this process is in.
pub fn nodes() -> Result<Vec<Node>, HostError> {
    let (Ok(job), Ok(nodes)) = (std::env::var(JOB), std::env::var(NODES)) else {
        let problem = "this is not inside an allocation of Slurm, which `--on slurm` uses: give this command to `sbatch --nodes N \
             --no-kill --wrap '…'`";
        return Err(HostError(problem.to_owned()));
    };
    let names = scontrol(&["show", "hostnames", &nodes])?;
    let shown = scontrol(&["--oneliner", "show", "node", &nodes])?;
    let nodes = names.split_whitespace().map(|name| Node {
        job: job.clone(),
        name: name.to_owned(),
        address: address(&shown, name).unwrap_or(name).to_owned(),
    });
    Ok(nodes.collect())
}

fn scontrol(arguments: &[&str]) -> Result<String, HostError> {
    let failed = |problem: String| HostError(format!("cannot ask Slurm with scontrol: {problem}"));
    let output = Command::new("scontrol").args(arguments).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The address of a node in the output of `scontrol --oneliner show node`.
fn address<'a>(shown: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str, key: &str| {
        let mut words = line.split_whitespace();
        words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    };
    let line = shown
        .lines()
        .find(|line| value(line, "NodeName") == Some(name))?;
    value(line, "NodeAddr")
}

impl Node {
    /// Connects by a job step that has all of the node that the job has. The program is on a disk that the nodes share.
    pub fn connect(&self, program: &Path, first: &ToHost) -> Result<Remote, Unreached> {
        let mut command = Command::new("srun");
        command
            .args(["--jobid", &self.job, "--nodelist", &self.name])
            .args(["--nodes=1", "--ntasks=1", "--overlap", "--unbuffered"])
            .args(["--job-name=evenkeel", "--cpu-bind=none", "--quiet"])
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
