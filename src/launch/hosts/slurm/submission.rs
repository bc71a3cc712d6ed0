//! What Evenkeel submits to Slurm for a run: one job that runs the launcher on the nodes of the smallest world, and a job
//! of one node for each further node, which joins and leaves as the partition gives and takes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::recipe::schema::run_name;
use crate::recipe::syntax::shell;
use crate::util::key;

/// Variable of the first job, with its [`Submission`].
pub const VARIABLE: &str = "EVENKEEL_SLURM_RUN";
/// Seconds between two looks of a further node's job for the first job.
const LOOK: u64 = 20;
/// Seconds before the end of a job at which it is told.
const NOTICE: u64 = 120;

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
    let path = run_dir.as_os_str().as_encoded_bytes();
    let digits = &key::sha256(path)[..6];
    let label = run_dir.file_name().unwrap_or_default().to_string_lossy();
    format!("evenkeel-{}-{digits}", run_name::label(&label))
}

impl Submission {
    /// The name of a further node's job.
    pub fn name_of(&self, node: u64) -> String {
        format!("{}-node-{node}", self.name)
    }

    /// The script of the first job. After its time limit, and after an end that Slurm does not repeat, an equal job takes its
    /// place.
    pub fn first(&self) -> String {
        // Only the batch step is told; it lets the ranks of all nodes commit.
        let own = [
            format!("--nodes={}", self.least),
            "--no-kill".to_owned(),
            format!("--signal=B:TERM@{NOTICE}"),
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
        // The step with the ranks is told.
        let own = [
            "--nodes=1".to_owned(),
            format!("--signal=TERM@{NOTICE}"),
            "--output=/dev/null".to_owned(),
        ];
        format!(
            "{}# {} calls this node.\nwhile sleep {LOOK}; do\n  jobs=$(squeue --noheader --me --format=%i --name={}) || continue\n  \
             [ -n \"$jobs\" ] || exit 0\ndone\n",
            self.head(&self.name_of(node), &own),
            self.name,
            self.name,
        )
    }

    fn head(&self, name: &str, own: &[String]) -> String {
        let named = [format!("--job-name={name}"), "--requeue".to_owned()];
        let options = named.iter().chain(&self.options).chain(own);
        let lines = options.map(|option| format!("#SBATCH {option}\n"));
        format!("#!/bin/bash\n{}", lines.collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submission() -> Submission {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect();
        Submission {
            name: name(Path::new("/shared/zephyr_7b run")),
            least: 2,
            nodes: 8,
            options: words(
                "--ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 --partition=a100 --time=12:00:00",
            ),
            setup: Some("module load cuda".to_owned()),
            command: words("/shared/evenkeel launch recipe.yaml --on slurm --nodes 8 --name it's"),
        }
    }

    #[test]
    fn the_scripts_that_are_submitted() {
        insta::assert_snapshot!(submission().first(), @r###"
        #!/bin/bash
        #SBATCH --job-name=evenkeel-zephyr-7b-run-3aeb60
        #SBATCH --requeue
        #SBATCH --ntasks-per-node=1
        #SBATCH --gpus-per-node=8
        #SBATCH --exclusive
        #SBATCH --mem=0
        #SBATCH --partition=a100
        #SBATCH --time=12:00:00
        #SBATCH --nodes=2
        #SBATCH --no-kill
        #SBATCH --signal=B:TERM@120
        #SBATCH --open-mode=append
        export EVENKEEL_SLURM_RUN='{"name":"evenkeel-zephyr-7b-run-3aeb60","least":2,"nodes":8,"options":["--ntasks-per-node=1","--gpus-per-node=8","--exclusive","--mem=0","--partition=a100","--time=12:00:00"],"setup":"module load cuda","command":["/shared/evenkeel","launch","recipe.yaml","--on","slurm","--nodes","8","--name","it'\''s"]}'
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
        #SBATCH --time=12:00:00
        #SBATCH --nodes=1
        #SBATCH --signal=TERM@120
        #SBATCH --output=/dev/null
        # evenkeel-zephyr-7b-run-3aeb60 calls this node.
        while sleep 20; do
          jobs=$(squeue --noheader --me --format=%i --name=evenkeel-zephyr-7b-run-3aeb60) || continue
          [ -n "$jobs" ] || exit 0
        done
        "###);
    }
}
