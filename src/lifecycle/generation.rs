//! The generation record: published once, never changed, read by agents and ranks.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

use super::files;
use crate::plan::{MAX_BATCH, Plan};
use crate::util::durable::{FileError, create_directory, read_json, write_json};
use crate::util::format::{count, outside};
use crate::util::time;

/// One fenced incarnation of the world: everything that its ranks need to agree on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Uid of the job.
    pub job: String,
    /// Starts at 1 and increases by one with every change of the world.
    pub number: u64,
    pub reason: Reason,
    /// Ranks are numbered through the members in this order.
    pub members: Vec<Member>,
    /// The batch arithmetic, executed unchanged.
    pub plan: Plan,
    /// The checkpoint it starts from; `None`: the initial weights.
    pub start: Option<CheckpointRef>,
    /// The state with which it begins, if processes of an earlier generation bring it ([`Member::carries`]); it is newer
    /// than `start`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carried: Option<Carried>,
    /// Uids of pods of earlier generations that are known to be lost. What they might still copy is not waited for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<String>,
    /// Address on which rank 0 listens.
    pub master: Address,
    /// Seconds since the Unix epoch; RFC 3339 in JSON.
    #[serde(with = "crate::util::time::rfc3339")]
    pub created: f64,
}

/// State of training that processes bring from one generation into the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// Number of the generation whose processes continue.
    pub from: u64,
    /// The rank whose state counts. Ranks with another one, or none, receive it.
    pub rank: u64,
    /// Steps taken.
    pub step: u64,
    pub samples: u64,
    /// The batch of the next step, samples.
    pub batch: u64,
}

impl Carried {
    /// What cannot be in the record of this generation.
    fn flaw(&self, of: &Generation) -> Option<String> {
        let counts = [("step", self.step), ("samples", self.samples)];
        let from = [("from", self.from)];
        (outside(1..=of.number.saturating_sub(1), from))
            .or_else(|| outside(0..=of.world().saturating_sub(1), [("rank", self.rank)]))
            .or_else(|| outside(0..=LARGEST_COUNT, counts))
            .or_else(|| outside(1..=MAX_BATCH, [("batch", self.batch)]))
    }
}

/// Largest count of samples, steps and tokens: JSON numbers are exact up to here.
pub const LARGEST_COUNT: u64 = 1 << 53;
/// Most members of a generation.
pub const MEMBERS: u64 = 1024;
/// Most ranks of a member.
const RANKS: u64 = 64;

impl Generation {
    /// What cannot be in a record; `None` in each that a launcher or controller made.
    pub fn flaw(&self) -> Option<String> {
        let members = self.members.len() as u64;
        if let Some(flaw) = outside(1..=LARGEST_COUNT, [("number", self.number)]) {
            return Some(flaw);
        }
        if !(1..=MEMBERS).contains(&members) {
            return Some(format!("it has {}", count(members, "member")));
        }
        let mut ranks = self.members.iter().map(|member| member.ranks);
        if let Some(ranks) = ranks.find(|ranks| !(1..=RANKS).contains(ranks)) {
            return Some(format!("a member has {}", count(ranks, "rank")));
        }
        let brought = self
            .members
            .iter()
            .map(|it| (it.carries.len() as u64, it.ranks));
        if let Some((brought, ranks)) = brought.into_iter().find(|(brought, ranks)| brought > ranks)
        {
            let brought = count(brought, "process");
            return Some(format!(
                "a member of {} carries {brought}",
                count(ranks, "rank")
            ));
        }
        if let Some(carried) = self.carried
            && let Some(flaw) = carried.flaw(self)
        {
            return Some(format!("carried: {flaw}"));
        }
        let lost = self.lost.len() as u64;
        if lost > MEMBERS {
            return Some(format!("it has {}", count(lost, "lost pod")));
        }
        if let Some(flaw) = self.plan.flaw() {
            return Some(format!("plan: {flaw}"));
        }
        let (world, planned) = (self.world(), self.plan.facts.world_size);
        if world != planned {
            return Some(format!(
                "its members have {}, but plan.world_size is {planned}",
                count(world, "rank")
            ));
        }
        let start = self.start.as_ref().and_then(CheckpointRef::flaw);
        start.map(|flaw| format!("start: {flaw}"))
    }

    /// World size: ranks over all members.
    pub fn world(&self) -> u64 {
        self.members.iter().map(|m| m.ranks).sum()
    }

    /// Samples consumed before its first step.
    pub fn start_samples(&self) -> u64 {
        let start = || self.start.as_ref().map(|start| start.samples);
        let carried = self.carried.map(|carried| carried.samples);
        carried.or_else(start).unwrap_or(0)
    }

    /// Steps taken before its first one.
    pub fn start_step(&self) -> u64 {
        let start = || self.start.as_ref().map(|start| start.step);
        let carried = self.carried.map(|carried| carried.step);
        carried.or_else(start).unwrap_or(0)
    }

    /// Formula of the global batch that it starts with.
    pub fn formula(&self) -> String {
        let start = || self.start.as_ref().map(|start| start.batch);
        let carried = self.carried.map(|carried| carried.batch);
        self.plan.formula_at(carried.or_else(start))
    }

    /// The members, each with its first rank.
    pub fn shares(&self) -> impl Iterator<Item = (u64, &Member)> {
        self.members.iter().scan(0, |next, member| {
            let first = *next;
            *next += member.ranks;
            Some((first, member))
        })
    }

    /// Ranks of the generation before whose processes continue as the first ones of the member with this first rank.
    pub fn carries(&self, first: u64) -> &[u64] {
        let of_member = self.shares().find(|(its, _)| *its == first);
        of_member.map_or(&[], |(_, member)| &member.carries)
    }

    /// The pods of its members.
    pub fn pods(&self) -> impl Iterator<Item = &PodRef> {
        self.members.iter().filter_map(|member| member.pod.as_ref())
    }

    /// The ranks of the pod with this uid: the first rank and their number.
    pub fn ranks_of_pod(&self, pod: &str) -> Option<(u64, u64)> {
        let mut shares = self.shares();
        shares.find_map(|(first, member)| {
            let its = member.pod.as_ref().is_some_and(|p| p.uid == pod);
            its.then_some((first, member.ranks))
        })
    }

    /// The other members' pods. Starts with the pods after the pod with this uid, so that members that each
    /// ask one other pod do not all ask the same one.
    pub fn peers(&self, pod: &str) -> Vec<Peer> {
        let pods: Vec<&PodRef> = self.pods().collect();
        let own = pods.iter().position(|other| other.uid == pod);
        let (before, from) = pods.split_at(own.unwrap_or(0));
        let others = from.iter().chain(before).filter(|other| other.uid != pod);
        others.filter_map(|other| other.peer()).collect()
    }

    /// Writes the record to its path in the run directory. All members write the same content.
    pub fn write(&self, run: &Path) -> Result<(), FileError> {
        self.write_as(run, files::RECORD)
    }

    /// [`Generation::write`] under another name.
    pub fn write_as(&self, run: &Path, name: &str) -> Result<(), FileError> {
        let directory = run.join(files::generation(self.number));
        create_directory(&directory)?;
        let path = directory.join(name);
        // A rank of another member may be about to open the file. A shared file system may then refuse it.
        match read_json::<Generation>(&path) {
            Ok(written) if written == *self => Ok(()),
            _ => write_json(&path, &self.sealed()),
        }
    }

    /// The record as JSON with its checksum, as volume and bucket have it.
    pub fn sealed(&self) -> Value {
        let mut record = serde_json::to_value(self).unwrap_or_default();
        let checksum = checksum(&record);
        record[CHECKSUM] = checksum.into();
        record
    }
}

/// Fields of a record.
pub const FIELDS: [&str; 8] = [
    "job", "number", "reason", "members", "plan", "start", "master", "created",
];
/// Key of a record's checksum.
const CHECKSUM: &str = "checksum";

/// xxh3-128 of a record as JSON without its checksum, in hexadecimal digits.
fn checksum(record: &Value) -> String {
    let bytes = serde_json::to_vec(record).unwrap_or_default();
    format!("{:032x}", xxh3_128(&bytes))
}

/// Why the text of a record is not what was written. One of an earlier version has no checksum.
pub fn damage(text: &[u8]) -> Option<String> {
    let mut record: Value = match serde_json::from_slice(text) {
        Ok(record) => record,
        Err(error) => return Some(error.to_string()),
    };
    let fields = record.as_object_mut()?;
    let Some(stated) = fields.remove(CHECKSUM) else {
        // The key itself may be damaged.
        let unknown = fields.keys().find(|key| !FIELDS.contains(&key.as_str()));
        return unknown.map(|key| format!("it has the field `{key}`, which no record has"));
    };
    let stated = stated.as_str().unwrap_or("no text");
    let found = checksum(&record);
    (stated != found).then(|| format!("its checksum is {found} where {stated} was written"))
}

/// One agent's share of a generation. A slot is not a rank, and its pod may be replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Number of the slot.
    pub slot: u64,
    /// Ranks that it runs.
    pub ranks: u64,
    /// Its ranks of the generation before ([`Carried::from`]) whose processes continue as its first ranks, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carries: Vec<u64>,
    /// `None` outside a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
}

/// A pod that is a member of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    pub name: String,
    /// A recreated pod of the same name has another uid.
    pub uid: String,
    pub ip: String,
    pub node: String,
}

impl PodRef {
    /// Where its agent answers; `None` if its address is invalid.
    pub fn peer(&self) -> Option<Peer> {
        Some(Peer {
            host: self.ip.parse().ok()?,
            pod: self.uid.clone(),
        })
    }
}

/// The agent of another pod, for those who ask it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub host: IpAddr,
    /// Uid of its pod.
    pub pod: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// IP address or host name.
    pub host: String,
    pub port: u16,
}

/// A committed checkpoint, by path and checksum: exactly one lineage of checkpoints counts.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointRef {
    /// Path relative to the run's directory.
    #[schemars(length(max = 4096))]
    pub path: String,
    /// Optimiser steps since the start of the run.
    pub step: u64,
    /// Samples consumed since the start of the run.
    pub samples: u64,
    /// Global batch of the next step, samples. After a batch schedule has raised it, the next plan keeps
    /// this batch exact beside the recipe's.
    pub batch: u64,
    /// xxh3-128 of the checkpoint's manifest, in hexadecimal digits.
    #[schemars(length(max = 32))]
    pub checksum: String,
}

impl CheckpointRef {
    /// What cannot be in a reference.
    pub fn flaw(&self) -> Option<String> {
        if self.step.max(self.samples) > LARGEST_COUNT {
            return Some(format!(
                "it is of step {} and {} samples",
                self.step, self.samples
            ));
        }
        outside(1..=MAX_BATCH, [("batch", self.batch)])
    }
}

/// A checkpoint of an external trainer. A different one than before counts as progress.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExternalCheckpoint {
    /// Absolute path in the pods.
    #[schemars(length(max = 4096))]
    pub path: PathBuf,
    /// When a checkpoint that is a single file was last modified: a trainer may overwrite one file.
    #[serde(
        default,
        rename = "modifiedTime",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "time::schema")]
    pub changed: Option<MicroTime>,
}

/// Why a generation exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Reason {
    /// First generation of a new job.
    Started,
    /// A drained or interrupted job continues.
    Resumed,
    /// A scale up or scale down.
    Resized { from: u64, to: u64 },
    /// The previous generation lost a rank.
    RankLost {
        /// As numbered in the previous generation.
        rank: u64,
        /// How the loss was observed.
        #[serde(rename = "message")]
        message: String,
    },
    /// A rank ran out of memory; the new plan has a smaller micro-batch.
    OutOfMemory {
        /// Micro-batch of the previous plan.
        from: u64,
        /// Micro-batch of the new plan.
        to: u64,
    },
    /// A rank failed and the job restarts.
    Failed {
        /// Rank of the root cause.
        rank: u64,
        #[serde(rename = "message")]
        message: String,
    },
}

impl Reason {
    /// All that [`Reason::name`] returns.
    pub const NAMES: [&str; 6] = [
        "started",
        "resumed",
        "resized",
        "rank-lost",
        "out-of-memory",
        "failed",
    ];

    /// Its name in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Reason::Started => "started",
            Reason::Resumed => "resumed",
            Reason::Resized { .. } => "resized",
            Reason::RankLost { .. } => "rank-lost",
            Reason::OutOfMemory { .. } => "out-of-memory",
            Reason::Failed { .. } => "failed",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Started => write!(f, "started"),
            Reason::Resumed => write!(f, "resumed"),
            Reason::Resized { from, to } => write!(f, "resized {from} → {to}"),
            Reason::RankLost { rank, message } => write!(f, "lost rank {rank}: {message}"),
            Reason::OutOfMemory { from, to } => {
                write!(f, "out of memory: micro-batch {from} → {to}")
            }
            Reason::Failed { rank, message } => write!(f, "rank {rank} failed: {message}"),
        }
    }
}
#[cfg(test)]
pub mod testing {
    use super::*;

    /// A new generation that starts from nothing.
    pub fn record(number: u64, members: Vec<Member>, plan: Plan) -> Generation {
        Generation {
            job: "uid".to_owned(),
            number,
            reason: Reason::Started,
            members,
            plan,
            start: None,
            carried: None,
            lost: Vec::new(),
            master: Address {
                host: String::new(),
                port: 0,
            },
            created: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::{self, Request};

    #[test]
    fn a_record_is_not_replaced_by_the_same() {
        let recipe =
            "per_device_train_batch_size: 4\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let recipe = recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
        let plan = plan(&recipe, &PlanRequest::gpus(2)).unwrap();
        let written = testing::record(1, Vec::new(), plan);
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join("gen-1/record.json");
        let inode = || std::fs::metadata(&path).unwrap().ino();
        written.write(run.path()).unwrap();
        let first = inode();
        written.write(run.path()).unwrap();
        assert_eq!(inode(), first);
        std::fs::write(&path, "{").unwrap();
        written.write(run.path()).unwrap();
        assert_eq!(read_json::<Generation>(&path).unwrap(), written);
    }
}
