//! What the controller says about a TrainingJob, and all it needs to go on after a crash: names of
//! pods are derived from it, so a pod that exists is never made twice.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingJobSpec, schema};
use crate::batch::Plan;
use crate::job::{Generation, Outcome, OwnCheckpoint, Pin, Reason};

/// Where a TrainingJob stands. Written by the controller only.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainingJobStatus {
    /// The generation of the spec that the rest speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word: Pending, Placing, Running, Draining, Waiting, Suspended, Complete, Failed.
    pub state: State,
    /// Why it is in that state, one line.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Planned, PodsReady, Running, Rescaling, Suspended, Complete, Failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// Nodes of the running generation.
    pub nodes: u32,
    /// Selects the job's pods; read through the scale subresource.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub selector: String,
    /// The recipe as it was when the job was first planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<RecipeSnapshot>,
    /// The batch arithmetic that holds now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanSummary>,
    /// The pods that should exist.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub seats: Vec<Seat>,
    /// Attempts used so far, over all seats: the number in the next pod's name.
    pub attempts: u32,
    /// The newest generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<Current>,
    /// The newest committed checkpoint of the lineage that counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub checkpoint: Option<Pin>,
    /// The newest checkpoint of the user's own program that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_checkpoint: Option<OwnCheckpoint>,
    /// Micro-batches must not be above this any more: a rank ran out of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_limit: Option<u64>,
    /// Failures of the program since the last progress, and ranks that were killed in pods that live;
    /// `budgets.restarts` are forgiven.
    pub restarts: u32,
    /// Nodes and pods that were lost.
    pub disruptions: u32,
    /// How far training is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Since when a larger world has been possible, seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub larger_since: Option<f64>,
    /// Since when another world has been needed, seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change_since: Option<f64>,
    /// After a failure of the program: not started again before, seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<f64>,
    /// Pods that ended before they could train; new ones are made after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_failures: Option<PodFailures>,
    /// Since when pods are being placed, seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placing_since: Option<f64>,
    /// The newest changes of the world, oldest first; at most [`HISTORY`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<Change>,
    /// When it ended, seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished: Option<f64>,
    /// The last lines that a failed rank printed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub last_words: String,
}

impl TrainingJobStatus {
    /// The program of the user's own that the newest generation was planned for; before there is one, the
    /// spec's. Empty: the built-in trainer.
    pub fn command<'a>(&'a self, spec: &'a TrainingJobSpec) -> &'a [String] {
        let current = self.generation.as_ref();
        let planned = current.and_then(|current| current.command.as_ref());
        planned.unwrap_or(&spec.trainer.command)
    }
}

/// How many changes of the world the status keeps.
pub const HISTORY: usize = 20;

/// What a TrainingJob is doing.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum State {
    /// Not looked at yet.
    #[default]
    Pending,
    /// Its pods are being placed.
    Placing,
    /// Training.
    Running,
    /// Its ranks commit and leave, for another world or because they were told to.
    Draining,
    /// No feasible world fits into the pool.
    Waiting,
    /// `spec.suspend` is true; its GPUs are given back.
    Suspended,
    /// The budget is reached.
    Complete,
    /// It cannot go on.
    Failed,
}

/// The recipe as it was read first.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecipeSnapshot {
    /// Its text; empty where it is one of the files.
    pub text: String,
    /// The accelerate config beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerate: Option<String>,
    /// `KEY=VALUE` laid over it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<String>,
    /// Where it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Which of the files is the accelerate config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerate_path: Option<String>,
    /// Files that it names or is composed of, by their paths.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
    /// Its dialect, where it was named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// The version of the dialect, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect_version: Option<String>,
    /// xxh3-128 of all of it, in hex.
    pub hash: String,
}

/// The plan's numbers, for people.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanSummary {
    /// For example `4 × 16 × 2 = 128`: data-parallel size × micro-batch × accumulation, of the batch that
    /// is trained with now. Where the norm test has raised that, the recipe's own stands behind it:
    /// `4 × 16 × 4 = 256 (base 128)`.
    pub proof: String,
    /// Samples per optimiser step over all devices.
    pub global_batch_size: u64,
    /// Samples per device and forward pass.
    pub per_device_batch_size: u64,
    /// Forward passes per step.
    pub gradient_accumulation_steps: u64,
    /// Ranks.
    pub world_size: u64,
    /// Numbers of nodes that split the batch, up to `nodes` or a little more.
    pub feasible_nodes: Vec<u32>,
    /// What the rules warn of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl PlanSummary {
    /// The numbers of a plan.
    pub fn of(plan: &Plan, feasible_nodes: Vec<u32>) -> PlanSummary {
        let warnings = plan.outline.diagnostics.iter();
        PlanSummary {
            proof: plan.proof.clone(),
            global_batch_size: plan.global_batch_size,
            per_device_batch_size: plan.per_device_batch_size,
            gradient_accumulation_steps: plan.gradient_accumulation_steps,
            world_size: plan.outline.world_size,
            feasible_nodes,
            warnings: warnings
                .map(|d| format!("{}: {}", d.rule, d.message))
                .collect(),
        }
    }
}

/// A place for a pod. A seat is not a rank: ranks are numbered anew in every generation.
#[derive(
    JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Seat {
    /// Which seat.
    pub number: u32,
    /// Which attempt to fill it.
    pub attempt: u32,
}

impl Seat {
    /// The name of the pod that fills it.
    pub fn pod(&self, job: &str) -> String {
        format!("{job}-{}-{}", self.number, self.attempt)
    }
}

/// The newest generation.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Current {
    /// Its record, as ranks and agents read it.
    #[schemars(schema_with = "schema::any_object")]
    pub record: Generation,
    /// The user's own program that its plan is for; empty: the built-in trainer. An edit that is refused
    /// is not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// Its ranks are to agree on a step, commit and leave.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drain: bool,
    /// After a loss: what its ranks are to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_loss: Option<AfterLoss>,
    /// How it ended. Nothing of it runs any more, or what still runs is fenced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub outcome: Option<Outcome>,
    /// When that was seen, seconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<f64>,
}

/// Pods that ended before they could train: their image lacks the program, a kubelet refuses them.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodFailures {
    /// Rounds of such pods since the last generation or the last edit of the spec.
    pub count: u32,
    /// How the newest ended.
    pub last: String,
    /// No new pod is made before, seconds since the Unix epoch.
    pub again: f64,
}

/// What the ranks of a generation that lost one of them are to do.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AfterLoss {
    /// This rank commits the whole state alone; the others leave. `None`: all leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<u64>,
}

/// How far training is.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Samples consumed.
    pub samples: u64,
    /// Samples after which training ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<u64>,
    /// The two as a share, for example `42 %`.
    pub share: String,
    /// Optimiser steps taken.
    pub step: u64,
    /// The training loss of the newest step, nats per target token.
    pub loss: String,
    /// The current global batch, samples.
    pub batch: u64,
    /// Target tokens per second.
    pub tokens_per_second: u64,
}

/// One change of the world.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// The generation that it led to.
    pub generation: u64,
    /// Why, for people.
    pub reason: String,
    /// Nodes before and after.
    pub from: u32,
    /// Nodes after.
    pub to: u32,
    /// Samples consumed at the change.
    pub samples: u64,
    /// The batch arithmetic after it.
    pub proof: String,
    /// When it was seen to be needed, seconds since the Unix epoch.
    pub since: f64,
    /// Seconds from then to the end of the ranks of the generation before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drained: Option<f64>,
    /// Seconds from then to the publication of this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
    /// Seconds from then until the agents had started their ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// Seconds from then until all ranks had restored their state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<f64>,
    /// Seconds from then to the end of the first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_step: Option<f64>,
}

impl Change {
    /// A change to `record`, needed since `since`.
    pub fn to(record: &Generation, from: u32, since: f64) -> Change {
        Change {
            generation: record.number,
            reason: Reason::to_string(&record.reason),
            from,
            to: u32::try_from(record.members.len()).unwrap_or(u32::MAX),
            samples: record.start_samples(),
            proof: record.proof(),
            since,
            drained: None,
            published: None,
            started: None,
            restored: None,
            first_step: None,
        }
    }
}
