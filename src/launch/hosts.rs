//! Other machines as the place of a run: which hosts, how they are reached, and which of them are there now.

mod list;
mod pool;
pub mod slurm;
mod ssh;

use std::sync::Arc;

use crate::host::{Remote, ToHost, Unreached};
pub use list::{HostError, Listed, absolute, changed, read, written};
pub use pool::{HostNews, Hosts, Lost, Unreachable};
use slurm::Node;
use slurm::jobs::Jobs;
use ssh::{Login, Program};

/// A host and how it is reached.
#[derive(Debug, Clone)]
pub enum Reach {
    Ssh(Listed),
    /// A node of the allocation that the launcher is in.
    Slurm(Node),
    /// The node of a one-node job that Evenkeel submits, by the job's number from 1.
    SlurmJob(Arc<Jobs>, u64),
}

/// What became of a call to a host; `None`: Slurm has not given it yet.
pub type Called = Result<Option<Reached>, Unreached>;

/// A host that is reached.
pub struct Reached {
    remote: Arc<Remote>,
    /// Its name, for people.
    name: String,
    /// The address by which the other hosts reach it too.
    address: String,
}

impl Reach {
    /// Its name, for people, before it is reached.
    fn name(&self) -> String {
        match self {
            Reach::Ssh(listed) => listed.to_string(),
            Reach::Slurm(node) => node.name.clone(),
            Reach::SlurmJob(jobs, number) => jobs.submission.name_of(*number),
        }
    }

    /// GPUs of it that may be used; `None`: all.
    fn most_gpus(&self) -> Option<u64> {
        match self {
            Reach::Ssh(listed) => listed.gpus,
            Reach::Slurm(node) => node.step.gpus,
            Reach::SlurmJob(jobs, _) => jobs.step.gpus,
        }
    }

    /// Processes that train there without GPUs.
    fn procs(&self) -> u64 {
        match self {
            Reach::Ssh(listed) => listed.procs.unwrap_or(1),
            Reach::Slurm(_) | Reach::SlurmJob(..) => 1,
        }
    }

    /// Whether a new run begins without it.
    fn is_optional(&self) -> bool {
        matches!(self, Reach::SlurmJob(..))
    }

    /// `note` takes what takes long.
    fn connect(&self, program: &Program, first: &ToHost, note: &dyn Fn(String)) -> Called {
        let reached = |remote, name, address| {
            Ok(Some(Reached {
                remote: Arc::new(remote),
                name,
                address,
            }))
        };
        let node = match self {
            Reach::Ssh(listed) => {
                let remote = Login(listed).connect(program, first, note)?;
                return reached(remote, self.name(), Login::address(listed));
            }
            Reach::Slurm(node) => Some(node.clone()),
            Reach::SlurmJob(jobs, number) => {
                let node = jobs.node(*number);
                node.map_err(|error| Unreached::Unstarted(error.to_string()))?
            }
        };
        let Some(node) = node else { return Ok(None) };
        reached(node.connect(&program.path, first)?, node.name, node.address)
    }

    /// What the user can do about a host that is not reached.
    fn remedy(&self, why: &Unreached) -> String {
        match self {
            Reach::Ssh(listed) => Login(listed).remedy(why),
            Reach::Slurm(node) => node.remedy(),
            Reach::SlurmJob(..) => "see what `squeue --me` shows".to_owned(),
        }
    }

    /// The host has said that it is about to end, and has ended.
    fn has_left(&self) {
        if let Reach::SlurmJob(jobs, number) = self {
            // One that cannot be asked now is called again, and leaves again.
            let _ = jobs.give_up(*number);
        }
    }
}
