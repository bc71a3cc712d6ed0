//! The status of a TrainingJob: all that the controller needs to continue after a crash. Pod names
//! are derived from it, so a pod that exists is never made twice.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema::MESSAGE;
use super::{TrainingJobSpec, schema};
use crate::lifecycle::generation::{LARGEST_COUNT, MEMBERS, PodRef};
pub use crate::lifecycle::placement::Slot;
use crate::lifecycle::{CheckpointRef, ExternalCheckpoint, Generation, Outcome, Reason};
use crate::plan::{MAX_BATCH, Plan};
use crate::util::format::outside;
use crate::util::time::{self, micro_time, seconds_between};

/// The observed state of a TrainingJob. Only the controller writes it.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TrainingJobStatus {
    /// The `metadata.generation` of the spec that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Summary of the conditions in one word. Programs read the conditions instead. Pending: not planned.
    /// Placing: pods start and prepare. Running: training. Draining: ranks commit and leave. Waiting: too few free GPUs.
    /// Suspended: `spec.suspend` is true. Complete: the budget is reached. Failed: the job gave up.
    pub phase: Phase,
    /// Reason of the phase for people, one line. Empty while nothing is wrong.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = MESSAGE))]
    pub message: String,
    /// Planned, PodsReady, Running, Rescaling, Suspended, Complete, Failed, Readable. `evenkeel crd --fields`
    /// prints the reasons of each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// Nodes of the newest generation; the scale subresource reports it.
    pub nodes: u32,
    /// Label selector of the job's pods, for the scale subresource.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub selector: String,
    /// What is kept of the recipe since the job was first planned. Later edits of its ConfigMap have no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<KeptRecipe>,
    /// The batch arithmetic of the newest generation, or of the largest feasible world before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanSummary>,
    /// The slots that have a pod. The controller deletes all other pods of the job.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub slots: Vec<Slot>,
    /// Pod attempts so far, over all slots. The next pod's name ends in this number plus 1.
    pub attempts: u32,
    /// The newest job generation: one fenced set of ranks. It is not `metadata.generation`.
    #[serde(rename = "jobGeneration", skip_serializing_if = "Option::is_none")]
    pub generation: Option<Current>,
    /// The newest generation on the volume, if the API server was restored from an older copy of its data. The next
    /// job generation gets a higher number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub later_generation: Option<u64>,
    /// The newest committed checkpoint. The next generation starts from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointRef>,
    /// The newest known checkpoint of an external trainer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external_checkpoint: Option<ExternalCheckpoint>,
    /// When the controller first saw the newest of these checkpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub checkpoint_time: Option<MicroTime>,
    /// Upper limit of the per-device batch, set after a rank ran out of memory. Samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_device_batch_size_limit: Option<u64>,
    /// Failures of the trainer since the last progress, including ranks that a signal ended in a living
    /// pod. Above `spec.budgets.restarts` the job fails.
    pub restarts: u32,
    /// Nodes and pods lost over the life of the job. They never count as failures.
    pub disruptions: u32,
    /// Training progress. Absent until the trainer reports a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Since when a larger world is possible. After `spec.elasticity.scaleUpDelaySeconds` the job scales up.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub scale_up_pending_since: Option<MicroTime>,
    /// Since when another generation is needed. Absent while the job trains undisturbed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub rescale_since: Option<MicroTime>,
    /// Earliest start of the next generation after a failure of the trainer. The pause doubles from 2 s to
    /// 5 min.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub restart_not_before: Option<MicroTime>,
    /// Pods that ended before they could train. New ones follow after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_failures: Option<PodFailures>,
    /// Since when the pods of the next generation are being placed. After
    /// `spec.elasticity.placementSeconds` the ready ones start alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub placement_since: Option<MicroTime>,
    /// The last 20 rescales, oldest first. The start of the job is the first of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = HISTORY))]
    pub history: Vec<Rescale>,
    /// Nodes that get no pods of this job, because a rank made no progress there without waiting for
    /// others, and `spec.onStall` is ExcludeNode.
    /// Another value of it clears the list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = EXCLUDED), inner(length(max = 253)))]
    pub excluded_nodes: Vec<String>,
    /// When the first generation started, or the first one after the last suspension.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub start_time: Option<MicroTime>,
    /// When the job completed or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub completion_time: Option<MicroTime>,
    /// The newest `spec.proveLedger` that was answered; the condition LedgerProved has the answer.
    #[serde(skip_serializing_if = "super::is_zero")]
    #[schemars(range(min = 0, max = 9999))]
    pub ledger_proof: u32,
    /// The last lines of a failed rank, at most 8192 characters. The whole log is in `gen-N/logs` on the
    /// checkpoint volume.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = LOG_TAIL))]
    pub log_tail: String,
}

/// Most pods of a job over its life, and most failures.
const ATTEMPTS: u64 = 1 << 30;
/// Rescales that the status keeps.
pub const HISTORY: usize = 20;
/// Characters of a log tail. The schema has the same limit.
pub const LOG_TAIL: usize = 8192;
/// Excluded nodes. The schema has the same limit.
const EXCLUDED: usize = 64;
/// Warnings of a plan. The schema has the same limit.
const WARNINGS: usize = 64;

impl TrainingJobStatus {
    /// Number of the newest generation.
    pub fn number(&self) -> Option<u64> {
        self.generation
            .as_ref()
            .map(|current| current.record.number)
    }

    /// The newest generation's member with this pod name.
    pub fn member(&self, pod: &str) -> Option<&PodRef> {
        self.members().find(|member| member.name == pod)
    }

    /// The pods of the newest generation's members.
    pub fn members(&self) -> impl Iterator<Item = &PodRef> {
        let current = self.generation.iter();
        current.flat_map(|current| current.record.pods())
    }

    /// Names of the pods in the slots.
    pub fn slot_pods(&self, job: &str) -> BTreeSet<String> {
        self.slots.iter().map(|slot| slot.pod(job)).collect()
    }

    /// Whether the job completed or failed.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Complete | Phase::Failed)
    }

    /// The external trainer's command that the newest generation was planned for; before there is a
    /// generation, the spec's. Empty: the built-in trainer.
    pub fn command<'a>(&'a self, spec: &'a TrainingJobSpec) -> &'a [String] {
        let current = self.generation.as_ref();
        let planned = current.and_then(|current| current.command.as_ref());
        planned.unwrap_or(&spec.trainer.command)
    }

    /// What cannot be in a status; `None` in each that a controller wrote. A person who may write the status of one job
    /// must not stop the controller of all.
    pub fn flaw(&self) -> Option<String> {
        let numbers = [
            ("attempts", self.attempts.into()),
            ("restarts", self.restarts.into()),
            ("disruptions", self.disruptions.into()),
        ];
        let nodes = [("nodes", self.nodes.into())];
        let later = [("laterGeneration", self.later_generation.unwrap_or_default())];
        let limit = self.per_device_batch_size_limit.unwrap_or(1);
        let checkpoint = || {
            self.checkpoint
                .as_ref()?
                .flaw()
                .map(|flaw| format!("checkpoint: {flaw}"))
        };
        outside(0..=ATTEMPTS, numbers)
            .or_else(|| outside(0..=MEMBERS, nodes))
            .or_else(|| outside(0..=LARGEST_COUNT, later))
            .or_else(|| outside(1..=MAX_BATCH, [("perDeviceBatchSizeLimit", limit)]))
            .or_else(checkpoint)
            .or_else(|| self.plan.as_ref()?.flaw())
            .or_else(|| self.progress.as_ref()?.flaw())
            .or_else(|| self.generation.as_ref()?.flaw())
    }

    /// The status with lists and strings shortened to the limits of the schema, since the API server refuses a whole
    /// status for one string that is too long. Messages keep their beginning, a log its end.
    pub fn bounded(mut self) -> TrainingJobStatus {
        shorten(&mut self.message, MESSAGE);
        for condition in &mut self.conditions {
            shorten(&mut condition.message, MESSAGE);
        }
        if let Some(plan) = &mut self.plan {
            shorten(&mut plan.formula, FORMULA);
            plan.warnings.truncate(WARNINGS);
            for warning in &mut plan.warnings {
                shorten(warning, MESSAGE);
            }
        }
        if let Some(progress) = &mut self.progress {
            shorten(&mut progress.loss, NUMBER);
            shorten(&mut progress.share, NUMBER);
        }
        if let Some(failures) = &mut self.pod_failures {
            shorten(&mut failures.message, MESSAGE);
        }
        let oldest = self.excluded_nodes.len().saturating_sub(EXCLUDED);
        self.excluded_nodes.drain(..oldest);
        let oldest = self.history.len().saturating_sub(HISTORY);
        self.history.drain(..oldest);
        for change in &mut self.history {
            shorten(&mut change.message, MESSAGE);
            shorten(&mut change.formula, FORMULA);
        }
        let excess = self.log_tail.chars().count().saturating_sub(LOG_TAIL);
        if excess > 0 {
            self.log_tail = self.log_tail.chars().skip(excess).collect();
        }
        self
    }
}

/// Characters of a formula. The schema has the same limit.
const FORMULA: usize = 512;
/// Characters of a number that is text. The schema has the same limit.
const NUMBER: usize = 32;

/// Cuts `text` to `most` characters.
fn shorten(text: &mut String, most: usize) {
    if let Some((end, _)) = text.char_indices().nth(most) {
        text.truncate(end);
    }
}

/// Summary of the conditions in one word.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Phase {
    /// Not planned yet, or the recipe is missing or refused.
    #[default]
    Pending,
    /// Pods of the next generation are created, scheduled or started, or cannot start their ranks yet: the job's code is
    /// unpacked, its setup command runs, the volume or the bucket is away.
    Placing,
    /// A generation trains.
    Running,
    /// Ranks commit a checkpoint and leave, for a rescale or a suspension.
    Draining,
    /// No feasible number of nodes has enough free GPUs.
    Waiting,
    /// `spec.suspend` is true; the GPUs are free.
    Suspended,
    /// Training reached its budget.
    Complete,
    /// The job ended without reaching its budget.
    Failed,
}

/// What is kept of the recipe since the job was first planned. The texts of the spec cannot change any more; those of a
/// ConfigMap can.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptRecipe {
    /// The recipe's text, if it is that of a ConfigMap.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1048576))]
    pub text: String,
    /// Texts of the recipe's files by their paths, if they are those of a ConfigMap.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub files: BTreeMap<String, String>,
    /// The environment variables that the recipe may refer to: those of `spec.trainer.env`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::variables")]
    pub env: BTreeMap<String, String>,
    /// GPUs for which the recipe counts as written, if its batch depends on them and it does not state them: those of
    /// the first plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536))]
    pub gpus: Option<u64>,
    /// xxh3-128 of all texts and overrides, in hexadecimal digits.
    #[schemars(length(max = 32))]
    pub hash: String,
}

/// The numbers of a plan.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanSummary {
    /// Data-parallel size × per-device batch × accumulation = global batch, for example
    /// `4 × 16 × 2 = 128`. After a batch schedule has raised the global batch, the recipe's follows:
    /// `4 × 16 × 4 = 256 (base 128)`.
    #[schemars(length(max = FORMULA))]
    pub formula: String,
    /// Samples per optimiser step over all devices.
    pub global_batch_size: u64,
    /// Samples per device and forward pass.
    pub per_device_batch_size: u64,
    /// Forward passes per optimiser step.
    pub gradient_accumulation_steps: u64,
    /// Ranks, one per GPU.
    pub world_size: u64,
    /// Numbers of nodes that split the global batch, up to `spec.nodes` plus 8.
    #[schemars(length(max = 1024))]
    pub feasible_nodes: Vec<u32>,
    /// Warnings of the rules, each with the rule's name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = WARNINGS), inner(length(max = MESSAGE)))]
    pub warnings: Vec<String>,
}

impl PlanSummary {
    /// The numbers of a plan.
    pub fn of(spec: &TrainingJobSpec, plan: &Plan, feasible_nodes: Vec<u32>) -> PlanSummary {
        let warnings = plan.facts.diagnostics.iter();
        let warnings = warnings.map(|d| format!("{}: {}", d.rule, d.message));
        PlanSummary {
            formula: plan.formula.clone(),
            global_batch_size: plan.global_batch_size,
            per_device_batch_size: plan.per_device_batch_size,
            gradient_accumulation_steps: plan.gradient_accumulation_steps,
            world_size: plan.facts.world_size,
            feasible_nodes,
            warnings: warnings.chain(spec.idle_devices()).collect(),
        }
    }
}

impl PlanSummary {
    fn flaw(&self) -> Option<String> {
        let numbers = [
            ("plan.globalBatchSize", self.global_batch_size),
            ("plan.perDeviceBatchSize", self.per_device_batch_size),
            (
                "plan.gradientAccumulationSteps",
                self.gradient_accumulation_steps,
            ),
            ("plan.worldSize", self.world_size),
        ];
        outside(1..=MAX_BATCH, numbers)
    }
}

/// The newest job generation.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Current {
    /// The record that ranks and agents read: number, members, plan, start checkpoint, address of rank 0.
    /// The same JSON is in `gen-N/record.json` on the checkpoint volume.
    #[schemars(schema_with = "schema::any_object")]
    pub record: Generation,
    /// The external trainer's command that the plan is for. Empty: the built-in trainer. A refused edit of
    /// the spec does not change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024), inner(length(max = 32768)))]
    pub command: Option<Vec<String>>,
    /// True: the ranks agree on a step, commit a checkpoint and leave.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drain: bool,
    /// With `drain`: the ranks wait in place of a commit, to continue in the next generation with their processes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pause: bool,
    /// Why the ranks leave, for example the cordoned node; the history of the next generation has it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = MESSAGE))]
    pub drain_cause: String,
    /// After the loss of a rank: what the survivors do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_loss: Option<AfterLoss>,
    /// How the generation ended. Its processes have exited, or are fenced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub outcome: Option<Outcome>,
    /// When the controller saw that the generation ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time::schema")]
    pub end_time: Option<MicroTime>,
}

impl Current {
    fn flaw(&self) -> Option<String> {
        if let Some(flaw) = self.record.flaw() {
            return Some(format!("jobGeneration.record: {flaw}"));
        }
        let world = self.record.world();
        let commits = self.after_loss.and_then(|after| after.commit);
        let flaw = match &self.outcome {
            Some(Outcome::Lost { rank, .. } | Outcome::Failed { rank, .. }) => {
                (*rank >= world).then(|| format!("outcome.rank is {rank}"))
            }
            Some(Outcome::OutOfMemory {
                per_device_batch_size,
                smaller,
                ..
            }) => {
                let sizes = [Some(*per_device_batch_size), *smaller];
                let beyond = sizes
                    .into_iter()
                    .flatten()
                    .find(|size| !(1..=MAX_BATCH).contains(size));
                beyond.map(|size| format!("outcome has the micro-batch {size}"))
            }
            _ => None,
        };
        flaw.or_else(|| {
            let rank = commits.filter(|rank| *rank >= world)?;
            Some(format!("afterLoss.committingRank is {rank}"))
        })
        .map(|flaw| format!("jobGeneration.{flaw}"))
    }
}

/// Pods that ended before they could train, for example because their image lacks the program.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodFailures {
    /// Rounds of such pods since the last generation or the last edit of the spec.
    pub count: u32,
    /// How the newest of them ended.
    #[schemars(length(max = MESSAGE))]
    pub message: String,
    /// Earliest time of the next pod. The pause doubles from 2 s to 5 min.
    #[schemars(schema_with = "time::schema")]
    pub retry_not_before: MicroTime,
}

/// What the survivors of a loss do.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AfterLoss {
    /// The rank that commits the whole state alone; the others leave. Absent: all leave.
    #[serde(rename = "committingRank")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<u64>,
}

/// Training progress.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Samples consumed.
    pub samples: u64,
    /// Samples after which training ends.
    #[serde(rename = "budgetSamples")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<u64>,
    /// `samples` as a share of `budgetSamples`, for example `42 %`.
    #[serde(rename = "percent")]
    #[schemars(length(max = NUMBER))]
    pub share: String,
    /// Optimiser steps taken.
    pub step: u64,
    /// Training loss of the newest step, nats per target token. Empty if an external trainer does not report it.
    /// A string, since printer columns have no number format.
    #[schemars(length(max = NUMBER))]
    pub loss: String,
    /// Global batch of the newest step, samples.
    pub batch: u64,
    /// Target tokens per second over all ranks.
    pub tokens_per_second: u64,
    /// Time until the budget is used up, at the speed of the running generation, for example `1h20m`. Empty while
    /// it is unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = NUMBER))]
    pub time_left: String,
}

impl Progress {
    fn flaw(&self) -> Option<String> {
        let numbers = [
            ("progress.samples", self.samples),
            ("progress.budgetSamples", self.budget.unwrap_or_default()),
            ("progress.step", self.step),
            ("progress.batch", self.batch),
            ("progress.tokensPerSecond", self.tokens_per_second),
        ];
        outside(0..=LARGEST_COUNT, numbers)
    }
}

/// One rescale: the change to another generation.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rescale {
    /// Number of the generation that the rescale led to.
    #[serde(rename = "jobGeneration")]
    pub generation: u64,
    /// Cause of the rescale, for people.
    #[schemars(length(max = MESSAGE))]
    pub message: String,
    /// Nodes before; 0 at the start of the job.
    pub from_nodes: u32,
    /// Nodes after.
    pub to_nodes: u32,
    /// Samples consumed before the new generation's first step.
    pub samples: u64,
    /// The batch arithmetic after the rescale.
    #[schemars(length(max = FORMULA))]
    pub formula: String,
    /// When the controller saw that the rescale was needed.
    #[schemars(schema_with = "time::schema")]
    pub start_time: MicroTime,
    /// When each stage of the rescale ended, in seconds after `startTime`.
    #[serde(default)]
    pub stages: RescaleStages,
}

/// The ends of a rescale's stages, in seconds after its `startTime`. A stage that has not ended is absent.
#[derive(JsonSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RescaleStages {
    /// The ranks of the generation before have exited. Absent for the first generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drained_seconds: Option<f64>,
    /// The pods are ready and the status has the new generation's record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published_seconds: Option<f64>,
    /// All agents have started their ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_seconds: Option<f64>,
    /// All ranks have restored the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored_seconds: Option<f64>,
    /// The first optimiser step is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_step_seconds: Option<f64>,
}

impl Rescale {
    /// A rescale to `record`, needed since `since`, seconds since the Unix epoch.
    pub fn to(record: &Generation, from_nodes: u32, since: f64) -> Rescale {
        Rescale {
            generation: record.number,
            message: Reason::to_string(&record.reason),
            from_nodes,
            to_nodes: u32::try_from(record.members.len()).unwrap_or(u32::MAX),
            samples: record.start_samples(),
            formula: record.formula(),
            start_time: micro_time(since),
            stages: RescaleStages::default(),
        }
    }

    /// Seconds from the start of the rescale to `at`, seconds since the Unix epoch.
    pub fn seconds_to(&self, at: f64) -> f64 {
        seconds_between(&self.start_time, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::DeviceKind;

    #[test]
    fn status_of_another_version_is_unreadable() {
        // As an API server leaves one of the version before: fields that it does not know are gone.
        let older = serde_json::json!({"history": [{"samples": 384}], "nodes": 3});
        assert!(serde_json::from_value::<TrainingJobStatus>(older).is_err());
    }

    #[test]
    fn gpus_that_the_built_in_trainer_does_not_use_are_a_warning() {
        let spec = |device: &str, resource: &str, command: &[&str]| {
            let spec = serde_json::json!({
                "nodes": 2, "image": "i", "recipe": {"inline": ""}, "checkpoint": {"claim": "c"},
                "resourceName": resource, "trainer": {"command": command, "device": device},
            });
            serde_json::from_value::<TrainingJobSpec>(spec).unwrap()
        };
        let idle = |resource: &str, command: &[&str]| spec("Cpu", resource, command).idle_devices();
        insta::assert_snapshot!(idle("nvidia.com/gpu", &[]).unwrap(), @"the built-in trainer computes on CPUs and leaves the nvidia.com/gpu of its pods idle; spec.trainer.device is Cpu: create the job with Auto or Cuda, or set spec.trainer.command to a trainer for GPUs");
        insta::assert_snapshot!(spec("Auto", "amd.com/gpu", &[]).idle_devices().unwrap(), @"the built-in trainer computes on CPUs and leaves the amd.com/gpu of its pods idle; of GPUs it uses NVIDIA's only: set spec.trainer.command to a trainer for GPUs");
        assert!(idle("nvidia.com/mig-1g.5gb", &[]).is_some());
        assert_eq!(spec("Auto", "nvidia.com/gpu", &[]).idle_devices(), None);
        assert_eq!(idle("nvidia.com/gpu", &["python", "train.py"]), None);
        assert_eq!(idle("example.com/slot", &[]), None);
        assert_eq!(idle("nvidia.com/nic", &[]), None);
        let device = |resource: &str| spec("Auto", resource, &[]).trainer.device.on(resource);
        for resource in [
            "nvidia.com/gpu",
            "nvidia.com/gpu.shared",
            "nvidia.com/mig-1g.5gb",
        ] {
            assert_eq!(device(resource), DeviceKind::Cuda, "{resource}");
        }
        for resource in ["example.com/gpu", "amd.com/gpu", "nvidia.com/nic"] {
            assert_eq!(device(resource), DeviceKind::Cpu, "{resource}");
        }
    }

    #[test]
    fn times_and_stages_have_units() {
        let rescale = Rescale {
            generation: 2,
            message: "resized 6 → 4".into(),
            from_nodes: 3,
            to_nodes: 2,
            samples: 384,
            formula: "4 × 4 × 6 = 96".into(),
            start_time: micro_time(1_763_866_800.25),
            stages: RescaleStages {
                published_seconds: Some(0.1),
                ..RescaleStages::default()
            },
        };
        let expected = serde_json::json!({
            "jobGeneration": 2, "message": "resized 6 → 4", "fromNodes": 3, "toNodes": 2,
            "samples": 384, "formula": "4 × 4 × 6 = 96",
            "startTime": "2025-11-23T03:00:00.250000Z", "stages": {"publishedSeconds": 0.1},
        });
        assert_eq!(serde_json::to_value(rescale).unwrap(), expected);
    }

    #[test]
    fn status_is_shortened_to_the_limits_of_the_schema() {
        let status = TrainingJobStatus {
            message: "ü".repeat(MESSAGE + 1),
            log_tail: format!("first{}last", "é".repeat(LOG_TAIL)),
            ..TrainingJobStatus::default()
        };
        let status = status.bounded();
        assert_eq!(status.message.chars().count(), MESSAGE);
        assert_eq!(status.log_tail.chars().count(), LOG_TAIL);
        assert!(status.log_tail.ends_with("last"));
        assert_eq!(status.clone().bounded(), status);
    }
}
