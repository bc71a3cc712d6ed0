//! The generation record: published once, never changed, read by agents and ranks.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files;
use crate::batch::Plan;
use crate::durable::{FileError, create_directory, write_json};

/// A generation: everything that its ranks need to know to be of the same world.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Uid of the job it belongs to; ranks refuse strangers by it.
    pub job: String,
    /// From 1, one more for every change of the world.
    pub number: u64,
    /// Why it exists.
    pub reason: Reason,
    /// Who runs it; ranks are numbered through the members in order.
    pub members: Vec<Member>,
    /// The batch arithmetic, executed as it is.
    pub plan: Plan,
    /// The one checkpoint it starts from; `None`: from the initial weights.
    pub start: Option<Pin>,
    /// Where rank 0 listens.
    pub master: Address,
    /// Seconds since the Unix epoch.
    pub created: f64,
}

impl Generation {
    /// Ranks over all members.
    pub fn world(&self) -> u64 {
        self.members.iter().map(|m| m.ranks).sum()
    }

    /// Samples consumed before its first step.
    pub fn start_samples(&self) -> u64 {
        self.start.as_ref().map_or(0, |pin| pin.samples)
    }

    /// The arithmetic of the batch that it starts with.
    pub fn proof(&self) -> String {
        self.plan.proof_at(self.start.as_ref().map(|pin| pin.batch))
    }

    /// The members, each with the first of its ranks.
    pub fn shares(&self) -> impl Iterator<Item = (u64, &Member)> {
        self.members.iter().scan(0, |next, member| {
            let first = *next;
            *next += member.ranks;
            Some((first, member))
        })
    }

    /// The ranks that the pod of this uid runs: the first of them and how many.
    pub fn share_of(&self, pod: &str) -> Option<(u64, u64)> {
        let mut shares = self.shares();
        shares.find_map(|(first, member)| {
            let its = member.pod.as_ref().is_some_and(|p| p.uid == pod);
            its.then_some((first, member.ranks))
        })
    }

    /// Addresses of the other members' pods, those after the pod of this uid first: members that all
    /// ask one other do not all ask the same.
    pub fn others(&self, pod: &str) -> Vec<IpAddr> {
        let pods: Vec<&PodRef> = self.members.iter().filter_map(|m| m.pod.as_ref()).collect();
        let own = pods.iter().position(|other| other.uid == pod);
        let (before, from) = pods.split_at(own.unwrap_or(0));
        let others = from.iter().chain(before).filter(|other| other.uid != pod);
        others.filter_map(|other| other.ip.parse().ok()).collect()
    }

    /// Writes the record where its ranks look for it. All members write the same.
    pub fn write(&self, run: &Path) -> Result<(), FileError> {
        let directory = run.join(files::generation(self.number));
        create_directory(&directory)?;
        write_json(&directory.join(files::RECORD), self)
    }
}

/// One agent's share of a generation. A seat is a place that may be filled again; it is no rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Which seat.
    pub seat: u64,
    /// How many ranks it runs.
    pub ranks: u64,
    /// The pod, on a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
}

/// A pod that is a member of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    /// Its name.
    pub name: String,
    /// Its uid: a pod of the same name that is made again is another one.
    pub uid: String,
    /// Its address.
    pub ip: String,
    /// The node that it runs on.
    pub node: String,
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// IP address or name.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// A committed checkpoint, pinned by path and checksum so that only one lineage counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Relative to the run's directory.
    pub path: String,
    /// Optimiser steps taken.
    pub step: u64,
    /// Samples consumed.
    pub samples: u64,
    /// The global batch of the next step, samples: what the next plan has to keep exact beside the
    /// base batch, where a schedule has moved it.
    pub batch: u64,
    /// xxh3-128 of its manifest, in hex.
    pub checksum: String,
}

/// Why a generation exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Reason {
    /// The job began.
    Started,
    /// A drained or interrupted job goes on.
    Resumed,
    /// Somebody asked for another world.
    Resized {
        /// Ranks before.
        from: u64,
        /// Ranks after.
        to: u64,
    },
    /// A rank was lost.
    RankLost {
        /// Which, as numbered in the generation before.
        rank: u64,
        /// What was seen.
        why: String,
    },
    /// A rank ran out of memory; the plan has a smaller micro-batch.
    OutOfMemory {
        /// Micro-batch before.
        from: u64,
        /// Micro-batch after.
        to: u64,
    },
    /// A rank failed and the job starts again.
    Failed {
        /// The root cause's rank.
        rank: u64,
        /// Its last words.
        why: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Started => write!(f, "started"),
            Reason::Resumed => write!(f, "resumed"),
            Reason::Resized { from, to } => write!(f, "resized {from} → {to}"),
            Reason::RankLost { rank, why } => write!(f, "lost rank {rank}: {why}"),
            Reason::OutOfMemory { from, to } => {
                write!(f, "out of memory: micro-batch {from} → {to}")
            }
            Reason::Failed { rank, why } => write!(f, "rank {rank} failed: {why}"),
        }
    }
}
