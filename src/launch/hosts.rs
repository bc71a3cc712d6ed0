//! Other machines as the place of a run: which hosts, how they are reached, and which of them are there now.

mod list;
mod pool;
pub mod slurm;
mod ssh;

use std::sync::Arc;

use crate::host::{Remote, ToHost, Unreached};
pub use list::{HostError, Listed, read};
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
    /// A node that a job of its own will have, by its number.
    Further(Arc<Jobs>, u64),
}

/// What became of a call to a host.
pub enum Called {
    Reached(Box<Reached>),
    /// Slurm has not given it yet.
    Waits,
    Failed(Unreached),
}

/// A host that is reached.
pub struct Reached {
    remote: Remote,
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
            Reach::Further(jobs, number) => jobs.submission.name_of(*number),
        }
    }

    /// GPUs of it that may be used; `None`: all.
    fn most_gpus(&self) -> Option<u64> {
        match self {
            Reach::Ssh(listed) => listed.gpus,
            Reach::Slurm(node) => node.gpus,
            Reach::Further(jobs, _) => jobs.gpus(),
        }
    }

    /// Processes that train there without GPUs.
    fn procs(&self) -> u64 {
        match self {
            Reach::Ssh(listed) => listed.procs.unwrap_or(1),
            Reach::Slurm(_) | Reach::Further(..) => 1,
        }
    }

    /// Whether a new run begins without it.
    fn may_come_later(&self) -> bool {
        matches!(self, Reach::Further(..))
    }

    /// `note` takes what takes long.
    fn connect(&self, program: &Program, first: &ToHost, note: &dyn Fn(String)) -> Called {
        let of_node = |node: Node| match node.connect(&program.path, first) {
            Ok(remote) => Called::Reached(Box::new(Reached {
                remote,
                name: node.name,
                address: node.address,
            })),
            Err(why) => Called::Failed(why),
        };
        match self {
            Reach::Ssh(listed) => match Login(listed).connect(program, first, note) {
                Ok(remote) => Called::Reached(Box::new(Reached {
                    remote,
                    name: self.name(),
                    address: Login::address(listed),
                })),
                Err(why) => Called::Failed(why),
            },
            Reach::Slurm(node) => of_node(node.clone()),
            Reach::Further(jobs, number) => match jobs.node(*number) {
                Ok(Some(node)) => of_node(node),
                Ok(None) => Called::Waits,
                Err(error) => Called::Failed(Unreached::Unstarted(error.to_string())),
            },
        }
    }

    /// What the user can do about a host that is not reached.
    fn remedy(&self, why: &Unreached) -> String {
        match self {
            Reach::Ssh(listed) => Login(listed).remedy(why),
            Reach::Slurm(node) => node.remedy(),
            Reach::Further(..) => "see what `squeue --me` shows".to_owned(),
        }
    }

    /// The host has said that it is about to end, and has ended.
    fn has_left(&self) {
        if let Reach::Further(jobs, number) = self {
            // One that cannot be asked now is called again, and leaves again.
            let _ = jobs.give_up(*number);
        }
    }
}
