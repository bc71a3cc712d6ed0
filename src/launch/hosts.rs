//! Other machines as the place of a run: which hosts, how they are reached, and which of them are there now.

mod list;
mod pool;
pub mod slurm;
mod ssh;

use crate::host::{Remote, ToHost, Unreached};
pub use list::{HostError, Listed, read};
pub use pool::{HostNews, Hosts, Unreachable};
use slurm::Node;
use ssh::{Login, Program};

/// A host and how it is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    Ssh(Listed),
    Slurm(Node),
}

impl Reach {
    /// Its name, for people.
    fn name(&self) -> String {
        match self {
            Reach::Ssh(listed) => listed.to_string(),
            Reach::Slurm(node) => node.name.clone(),
        }
    }

    /// GPUs of it that may be used; `None`: all.
    fn most_gpus(&self) -> Option<u64> {
        match self {
            Reach::Ssh(listed) => listed.gpus,
            Reach::Slurm(_) => None,
        }
    }

    /// Processes that train there without GPUs.
    fn procs(&self) -> u64 {
        match self {
            Reach::Ssh(listed) => listed.procs.unwrap_or(1),
            Reach::Slurm(_) => 1,
        }
    }

    /// The address by which the other hosts reach it too.
    fn address(&self) -> String {
        match self {
            Reach::Ssh(listed) => Login::address(listed),
            Reach::Slurm(node) => node.address.clone(),
        }
    }

    /// `note` takes what takes long.
    fn connect(
        &self,
        program: &Program,
        first: &ToHost,
        note: &dyn Fn(String),
    ) -> Result<Remote, Unreached> {
        match self {
            Reach::Ssh(listed) => Login(listed).connect(program, first, note),
            Reach::Slurm(node) => node.connect(&program.path, first),
        }
    }

    /// What the user can do about a host that is not reached.
    fn remedy(&self, why: &Unreached) -> String {
        match self {
            Reach::Ssh(listed) => Login(listed).remedy(why),
            Reach::Slurm(node) => node.remedy(),
        }
    }
}
