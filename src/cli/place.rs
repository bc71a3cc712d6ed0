//! `--on PLACE`: where the ranks of a launch run.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::bail;

use super::processes::{Asked, DeviceChoice, Gpus, Processes, device_of};
use crate::inventory::Devices;
use crate::launch::hosts::slurm::jobs::Jobs;
use crate::launch::hosts::{self, Hosts, Reach};
use crate::plan::{DeviceKind, DeviceMemory};
use crate::util::format::count;

/// Where the ranks of a launch run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Here,
    /// Pods of a Kubernetes cluster.
    Kubernetes,
    /// Hosts that `ssh` reaches: a list, or the file of one.
    Ssh(String),
    /// Nodes that Slurm gives: those of the allocation that this process is in, or of jobs that are submitted.
    Slurm,
}

/// A text that names no place.
#[derive(Debug, thiserror::Error)]
#[error("the places are `here`, `ssh:HOST,HOST…`, `ssh:FILE`, `slurm` and `k8s`")]
pub struct NoPlace;

impl FromStr for Place {
    type Err = NoPlace;

    fn from_str(text: &str) -> Result<Place, NoPlace> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("here", "") => Ok(Place::Here),
            ("k8s", "") => Ok(Place::Kubernetes),
            ("slurm", "") => Ok(Place::Slurm),
            ("ssh", listed) => Ok(Place::Ssh(listed.to_owned())),
            _ => Err(NoPlace),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Here => "here",
            Place::Kubernetes => "k8s",
            Place::Ssh(_) => "ssh",
            Place::Slurm => "slurm",
        })
    }
}

/// The hosts of a place.
#[derive(Debug, Default)]
pub struct Reachable {
    pub hosts: Vec<Reach>,
    /// The jobs of Slurm that Evenkeel has submitted for the run.
    pub jobs: Option<Arc<Jobs>>,
}

impl Reachable {
    /// The hosts that a user names.
    pub fn of_list(listed: &str) -> anyhow::Result<Reachable> {
        let hosts = hosts::read(listed)?.into_iter().map(Reach::Ssh);
        Ok(Reachable {
            hosts: hosts.collect(),
            jobs: None,
        })
    }
}

/// The GPUs of all hosts.
fn gpus(hosts: &Hosts, device: DeviceChoice) -> Gpus {
    let mut all = Gpus {
        devices: Vec::new(),
        unused: None,
        problem: None,
        problem_of_several: None,
    };
    for (name, facts, devices) in hosts.facts() {
        let usable = Gpus::of_devices(devices.to_vec(), Default::default).devices;
        let of_host = |problem: &Option<String>| {
            let problem = problem.as_ref().filter(|_| device != DeviceChoice::Cpu);
            problem.map(|problem| format!("{name}: {problem}"))
        };
        all.devices.extend(usable);
        all.problem = all.problem.or_else(|| of_host(&facts.problem));
        let several = all.problem_of_several;
        all.problem_of_several = several.or_else(|| of_host(&facts.problem_of_several));
    }
    all
}

/// Refuses more processes than the hosts have devices for.
fn on_slots(processes: Processes, slots: u64) -> anyhow::Result<Processes> {
    let (has, remedy) = match processes.device {
        DeviceKind::Cpu => (
            format!("room for {}", count(slots, "process")),
            "use `--procs` for fewer, or write `procs=N` after the name of a host in the list",
        ),
        DeviceKind::Cuda => (
            count(slots, "GPU"),
            "use `--procs` for fewer, or more hosts",
        ),
    };
    if processes.count > slots {
        bail!(
            "the hosts have {has}, and {} were asked for; {remedy}",
            processes.count
        );
    }
    Ok(processes)
}

impl Asked {
    /// The processes of these hosts: as many as they have GPUs, else as the list says.
    pub fn on_hosts(self, hosts: &Hosts, external: bool) -> anyhow::Result<Processes> {
        if external {
            return self.external_on_hosts(hosts);
        }
        let gpus = gpus(hosts, self.device);
        let without_gpus = gpus.problem.is_some() || self.device == DeviceChoice::Cpu;
        let slots = hosts.slots_on(DeviceKind::Cpu);
        let usable = if without_gpus {
            slots
        } else {
            gpus.devices.len() as u64
        };
        let this = self.to_begin(hosts, usable);
        let stated = this.procs.or(this.world);
        let several = !without_gpus && stated != Some(1);
        if let Some(problem) = hosts.different_gpus().filter(|_| several) {
            bail!("{problem}");
        }
        let asked = match stated {
            None if without_gpus => Asked {
                procs: Some(slots),
                ..this
            },
            _ => this,
        };
        let processes = asked.built_in(gpus)?;
        let slots = hosts.slots_on(processes.device);
        on_slots(processes, slots)
    }

    /// The processes of an external trainer, each on one GPU if the hosts have any.
    fn external_on_hosts(self, hosts: &Hosts) -> anyhow::Result<Processes> {
        let gpus = hosts.slots_on(DeviceKind::Cuda);
        let device = device_of(gpus > 0);
        let slots = hosts.slots_on(device);
        let processes = Processes {
            device,
            ..self.to_begin(hosts, slots).external(slots)?
        };
        on_slots(processes, slots)
    }

    /// The processes with which hosts begin that have these slots: fewer until Slurm gives further nodes.
    fn to_begin(self, hosts: &Hosts, slots: u64) -> Asked {
        let most = if hosts.may_grow() {
            slots.max(1)
        } else {
            u64::MAX
        };
        Asked {
            procs: self.procs.map(|procs| procs.min(most)),
            ..self
        }
    }
}

/// The memory of the devices of these hosts: that of the smallest.
pub fn memory(hosts: &Hosts, processes: &Processes) -> Option<DeviceMemory> {
    if processes.device == DeviceKind::Cuda {
        let devices = gpus(hosts, DeviceChoice::Cuda).devices;
        return Devices::Gpus { devices }.memory().map(DeviceMemory::Each);
    }
    hosts
        .least_memory()
        .map(|of_rank| DeviceMemory::Shared(of_rank * processes.count))
}
