//! `--on PLACE`: where the ranks of a launch run.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;

use super::processes::{Asked, DeviceChoice, Gpus, Processes};
use crate::inventory::Devices;
use crate::launch::hosts::{self, HostError, Hosts, Reach, slurm};
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
    /// The nodes of the Slurm allocation that this process is in.
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

impl Place {
    /// Its hosts, if it is other machines.
    pub fn hosts(&self) -> Result<Vec<Reach>, HostError> {
        match self {
            Place::Here | Place::Kubernetes => Ok(Vec::new()),
            Place::Ssh(listed) => {
                let listed = hosts::read(listed)?;
                Ok(listed.into_iter().map(Reach::Ssh).collect())
            }
            Place::Slurm => Ok(slurm::nodes()?.into_iter().map(Reach::Slurm).collect()),
        }
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

impl Asked {
    /// The processes of these hosts: as many as they have GPUs, else as the list says.
    pub fn on_hosts(self, hosts: &Hosts) -> anyhow::Result<Processes> {
        let gpus = gpus(hosts, self.device);
        let without_gpus = gpus.problem.is_some() || self.device == DeviceChoice::Cpu;
        let slots = hosts.slots_on(DeviceKind::Cpu);
        let stated = self.procs.or(self.world);
        let asked = match stated {
            None if without_gpus => Asked {
                procs: Some(slots),
                ..self
            },
            _ => self,
        };
        let processes = asked.built_in(gpus)?;
        if processes.device == DeviceKind::Cpu && processes.count > slots {
            bail!(
                "the hosts have room for {}, and {} were asked for; write `procs=N` after the name of a host for more",
                count(slots, "process"),
                processes.count
            );
        }
        Ok(processes)
    }
}

/// The memory of the devices of these hosts: that of the smallest.
pub fn memory(hosts: &Hosts, processes: &Processes) -> Option<DeviceMemory> {
    if processes.device == DeviceKind::Cuda {
        let devices = processes.gpus.clone();
        return Devices::Gpus { devices }.memory().map(DeviceMemory::Each);
    }
    hosts
        .least_memory()
        .map(|of_rank| DeviceMemory::Shared(of_rank * processes.count))
}
