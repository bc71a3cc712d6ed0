//! The TrainingJob custom resource: what a user applies, and the status that the controller writes.
//!
//! Plain data, the one source of the CRD's schema. `evenkeel crd` prints it, and a test compares it
//! with the manifests. Nothing here talks to an API server. Doc comments of fields are the texts of
//! `kubectl explain`.

pub mod condition;
pub mod fields;
pub mod guarded;
pub mod recipe_snapshot;
pub mod schema;
pub mod status;

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use status::TrainingJobStatus;

use crate::bucket::is_url;
pub use crate::lifecycle::stall::OnStall;
use crate::plan::DeviceKind;
use crate::recipe::schema::spec::Remainder;
use crate::util::format::outside;

/// Longest name of a TrainingJob, in characters. With it `<job>-<slot>-<attempt>` and `evenkeel-<job>` are
/// DNS labels of at most 63 characters. A rule of the CRD has the same number.
pub const LONGEST_NAME: usize = 52;

/// Trains a recipe on nodes of the cluster and keeps its global batch when their number changes.
#[derive(CustomResource, KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "evenkeel.dev",
    version = "v1alpha1",
    kind = "TrainingJob",
    namespaced,
    shortname = "tj",
    category = "all",
    status = "TrainingJobStatus",
    derive = "PartialEq",
    doc = "Trains a recipe on nodes of the cluster and keeps its global batch when their number changes.",
    scale(
        spec_replicas_path = ".spec.nodes",
        status_replicas_path = ".status.nodes",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.nodes"),
    printcolumn(name = "Batch", type_ = "string", json_path = ".status.plan.formula"),
    printcolumn(name = "Progress", type_ = "string", json_path = ".status.progress.percent"),
    printcolumn(name = "Step", type_ = "integer", json_path = ".status.progress.step"),
    printcolumn(name = "Loss", type_ = "string", json_path = ".status.progress.loss"),
    printcolumn(name = "Tokens/s", type_ = "integer", json_path = ".status.progress.tokensPerSecond"),
    printcolumn(name = "Left", type_ = "string", json_path = ".status.progress.timeLeft"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("size(self.metadata.name) <= 52")
        .message("metadata.name has at most 52 characters: the names of its objects add to it"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name consists of lower-case letters, digits and dashes and begins with a letter: it is part of DNS names"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.recipe) || self.spec.recipe == oldSelf.spec.recipe")
        .message("spec.recipe is immutable once the job is planned; create a new TrainingJob"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.recipe) || has(self.spec.overrides) == has(oldSelf.spec.overrides) && (!has(self.spec.overrides) || self.spec.overrides == oldSelf.spec.overrides)")
        .message("spec.overrides is immutable once the job is planned; create a new TrainingJob")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(
        "!has(self.elasticity) || !has(self.elasticity.minNodes) || self.elasticity.minNodes <= self.nodes"
    )
    .message("elasticity.minNodes is more than nodes"),
    validation = Rule::new(
        "!has(self.elasticity) || !has(self.elasticity.minNodes) || !has(self.elasticity.maxNodes) || self.elasticity.minNodes <= self.elasticity.maxNodes"
    )
    .message("elasticity.minNodes is more than elasticity.maxNodes"),
    validation = Rule::new(
        "self.gpusPerNode == oldSelf.gpusPerNode && self.resourceName == oldSelf.resourceName && self.checkpoint == oldSelf.checkpoint"
    )
    .message("gpusPerNode, resourceName and checkpoint are immutable; create a new TrainingJob"),
    validation = Rule::new(
        "self.trainer.device == oldSelf.trainer.device && has(self.trainer.rankMemory) == has(oldSelf.trainer.rankMemory) && (!has(self.trainer.rankMemory) || self.trainer.rankMemory == oldSelf.trainer.rankMemory)"
    )
    .message("trainer.device and trainer.rankMemory are immutable; create a new TrainingJob"),
    validation = Rule::new(
        "has(self.serviceAccountAnnotations) == has(oldSelf.serviceAccountAnnotations) && (!has(self.serviceAccountAnnotations) || self.serviceAccountAnnotations == oldSelf.serviceAccountAnnotations)"
    )
    .message("serviceAccountAnnotations is immutable; create a new TrainingJob")
)]
pub struct TrainingJobSpec {
    /// The recipe. Immutable once the job is planned.
    pub recipe: RecipeSource,
    /// Overrides of recipe keys as `KEY=VALUE`, applied like the arguments of `evenkeel plan`. Immutable once the job is
    /// planned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 32768)))]
    pub overrides: Vec<String>,
    /// Nodes to train on; `kubectl scale` sets it. The job runs on the largest feasible number of nodes up
    /// to this one. To free all of them, set `suspend`.
    #[schemars(range(min = 1, max = 1024))]
    pub nodes: u32,
    /// GPUs per pod. Each GPU gets one rank. Immutable.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub gpus_per_node: u32,
    /// Name of the GPU resource in the nodes' allocatable resources, also a MIG profile. Immutable.
    #[serde(default = "nvidia_gpu")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_name: String,
    /// Bounds and delays of rescales.
    #[serde(default)]
    pub elasticity: Elasticity,
    /// Container image with everything that `trainer.command` needs. It need not contain `evenkeel`.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// The trainer. Default: the built-in trainer.
    #[serde(default)]
    pub trainer: Trainer,
    /// Files that every pod has in the working directory of its ranks. Default: the image's working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Code>,
    /// Volume of the checkpoints and of the run's files. Immutable.
    pub checkpoint: CheckpointVolume,
    /// Annotations of the pods' ServiceAccount, `evenkeel-<job>`, that give the pods an identity of the cloud: for
    /// example `eks.amazonaws.com/role-arn` or `iam.gke.io/gcp-service-account`. Immutable. Ignored if `podTemplate` has a
    /// `serviceAccountName`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::annotations")]
    pub service_account_annotations: BTreeMap<String, String>,
    /// Failures after which the job gives up.
    #[serde(default)]
    pub budgets: Budgets,
    /// Seconds from `status.startTime` after which the job commits a checkpoint and fails. A suspension resets the
    /// start. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2147483647))]
    pub active_deadline_seconds: Option<u32>,
    /// Seconds without progress after which a rank counts as stalled, from the next generation on. 0: never.
    /// Default: 20 times the longest interval so far, and at least 10 minutes; for an external trainer 30 minutes,
    /// and only once it has reported two steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2147483647))]
    pub progress_deadline_seconds: Option<u32>,
    /// Reaction to a stalled rank. Report: the condition Running gets the reason Stalled. Restart: kill the rank and
    /// start the next generation from the newest checkpoint. ExcludeNode: as Restart, and the node gets no pods of
    /// this job any more; a rank that waited for other ranks, and an external trainer, are only restarted, since the
    /// cause may be on another node.
    #[serde(default)]
    pub on_stall: OnStall,
    /// True: commit a checkpoint and free all GPUs. False: train, from the last checkpoint.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspend: bool,
    /// Number of the wanted proof of the sample ledger. Each larger one makes a pod, with the job's image, volume and limits and
    /// without GPUs, recompute the digests of all consumed samples; the condition LedgerProved has the result. `evenkeel
    /// status JOB --ledger` sets it.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 9999))]
    pub prove_ledger: u32,
    /// A pod template merged into every pod: node selectors, tolerations, volumes, priority class, pull
    /// secrets, resources. Containers are merged by name; the trainer's container is `trainer`. At most
    /// 64 KiB of JSON with 2048 nested values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub pod_template: Option<Value>,
    /// Delete the job this many seconds after it completed or failed. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2147483647))]
    pub ttl_seconds_after_finished: Option<u32>,
}

/// Source of a recipe: a text, a ConfigMap, a command, or `files` with the path of one of them.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.inline) || !has(self.configMap)")
        .message("recipe.inline and recipe.configMap exclude each other"),
    validation = Rule::new("!has(self.command) || !has(self.inline) && !has(self.configMap) && !has(self.path)")
        .message("recipe.command excludes recipe.inline, recipe.configMap and recipe.path"),
    validation = Rule::new("has(self.inline) || has(self.configMap) || has(self.command) || has(self.files) && has(self.path)")
        .message("recipe needs inline, configMap, command, or files with path"),
    validation = Rule::new("!has(self.accelerate) || !has(self.acceleratePath)")
        .message("recipe.accelerate and recipe.acceleratePath exclude each other")
)]
pub struct RecipeSource {
    /// The recipe's text, in any dialect that `evenkeel plan` reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1048576))]
    pub inline: Option<String>,
    /// A ConfigMap in the job's namespace. The job waits until it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapKey>,
    /// Words of the command that is the whole job, such as `torchrun`, `--nproc_per_node`, `8`, `train.py`. No shell reads
    /// them. `trainer.command` is its program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(max = 32768)))]
    pub command: Vec<String>,
    /// Path of the recipe, relative to the folder of `files`: a file, or the folder of a tree of configs.
    /// Some dialects are recognised by it. Default: recipe.yaml.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub path: Option<String>,
    /// Texts of files that the recipe refers to, by relative path. A path must not leave its folder.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::texts")]
    pub files: BTreeMap<String, String>,
    /// Text of an accelerate config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1048576))]
    pub accelerate: Option<String>,
    /// Path of the accelerate config among `files`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub accelerate_path: Option<String>,
    /// The recipe's dialect. Default: recognised by the recipe's keys, as `evenkeel plan` does without
    /// `--dialect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub dialect: Option<String>,
    /// Version of the dialect, as `evenkeel plan --dialect-version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub dialect_version: Option<String>,
    /// Environment of the external trainer's ranks in place of the recipe's `trainer.environment`, with its
    /// placeholders. `evenkeel launch --nodes` writes what the launcher would set.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::variables")]
    pub trainer_environment: BTreeMap<String, String>,
    /// Text of the external trainer's DeepSpeed config, in place of the recipe's `trainer.deepspeed_config`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1048576))]
    pub deepspeed_config: Option<String>,
}

/// A recipe in a ConfigMap: one key, or several that become files.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapKey {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key of the recipe's text. Unused with `items`.
    #[serde(default = "recipe_yaml")]
    #[schemars(length(max = 253))]
    pub key: String,
    /// Keys that become files, as in a ConfigMap volume. `recipe.path` then names the recipe among them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub items: Vec<KeyToPath>,
}

/// A key of a ConfigMap and the path of its file.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyToPath {
    /// Key in the ConfigMap.
    #[schemars(length(max = 253))]
    pub key: String,
    /// Relative path of the file, as in `files`.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
}

/// Bounds and delays of rescales.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Elasticity {
    /// Fewest nodes. With fewer free nodes the job waits and holds no GPU.
    #[schemars(range(min = 1, max = 1024))]
    pub min_nodes: u32,
    /// Most nodes, even if `nodes` is larger. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_nodes: Option<u32>,
    /// Seconds for which a larger world must be possible before the job scales up to it.
    #[schemars(range(min = 0, max = 86400))]
    pub scale_up_delay_seconds: u32,
    /// Reaction to a cordoned node. Drain: leave it when pods on other nodes can take its place, or at once if no
    /// other node has free devices. Wait: stay until the pod is deleted or evicted, since an upgrade may cordon a whole
    /// pool at once.
    pub on_cordon: OnCordon,
    /// Nodes that pods are created for. Discovered: those with free GPUs. Request: all of `nodes`, so that
    /// an autoscaler sees pending pods.
    pub capacity: Capacity,
    /// Numbers of nodes that do not split the global batch exactly. Exact: not used. Uneven: used, with
    /// different numbers of whole micro-batches per rank.
    pub remainder: RemainderPolicy,
    /// Seconds after which an agent without any contact stops its ranks: none of the API server, the
    /// controller and the generation's other pods answered. After the loss of a peer only the API server
    /// counts.
    #[schemars(range(min = 5, max = 3600))]
    pub fence_after_seconds: u32,
    /// Seconds that ranks may take to commit a checkpoint and leave. Then the next generation starts
    /// without that checkpoint.
    #[schemars(range(min = 1, max = 3600))]
    pub drain_seconds: u32,
    /// Seconds to wait for the pods of a new world. Then the job starts with those that are ready.
    #[schemars(range(min = 1, max = 3600))]
    pub placement_seconds: u32,
}

impl Default for Elasticity {
    fn default() -> Self {
        Elasticity {
            min_nodes: 1,
            max_nodes: None,
            scale_up_delay_seconds: 30,
            on_cordon: OnCordon::Drain,
            capacity: Capacity::Discovered,
            remainder: RemainderPolicy::Exact,
            fence_after_seconds: 30,
            drain_seconds: 60,
            placement_seconds: 60,
        }
    }
}

/// Reaction to a cordoned node.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OnCordon {
    /// Commit a checkpoint and leave the node at once.
    #[default]
    Drain,
    /// Stay until the pod is deleted or evicted: an upgrade may cordon a whole pool at once.
    Wait,
}

/// Nodes that pods are created for.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Capacity {
    /// Create pods for free GPUs only.
    #[default]
    Discovered,
    /// Create pods for all of `nodes`, so that an autoscaler sees pending pods.
    Request,
}

/// Worlds that do not split the global batch exactly.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum RemainderPolicy {
    /// Such worlds are not feasible.
    #[default]
    Exact,
    /// Ranks get different numbers of whole micro-batches; their sum is the global batch.
    Uneven,
}

impl From<RemainderPolicy> for Remainder {
    fn from(policy: RemainderPolicy) -> Remainder {
        match policy {
            RemainderPolicy::Exact => Remainder::Exact,
            RemainderPolicy::Uneven => Remainder::Uneven,
        }
    }
}

/// The trainer.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Trainer {
    /// Command of an external trainer, started once per rank with torchrun's environment. A launcher at its start is
    /// replaced; `recipe.files` has the files that its options name. Empty: the built-in trainer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(max = 32768)))]
    pub command: Vec<String>,
    /// Where the built-in trainer computes. Immutable.
    pub device: TrainerDevice,
    /// Memory limit of a rank of the built-in trainer, for example 2GiB. Above it the per-device batch goes
    /// down. Immutable. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub rank_memory: Option<String>,
    /// Shell command that runs once in every pod before its first ranks, for example `pip install -r
    /// requirements.txt`. Its output is in the pod's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32768))]
    pub setup: Option<String>,
    /// Seconds that the setup command may take; then it is killed and tried again. Default: 3600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub setup_seconds: Option<u32>,
    /// Environment variables of the ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024))]
    pub env: Vec<EnvVar>,
    /// Sources of further variables, as in a container: `secretRef`, `configMapRef` and `prefix`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::any_objects")]
    pub env_from: Vec<Value>,
    /// How a pod's log has the lines that its ranks print. Text: after the rank, `[3] epoch 1`. Json: as events with
    /// the name `output`. Evenkeel's own events are JSON in both.
    #[serde(skip_serializing_if = "LogFormat::is_text")]
    pub log_format: LogFormat,
}

/// How a pod's log has the lines that ranks print.
#[derive(
    JsonSchema, clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize,
)]
pub enum LogFormat {
    /// As text, each after its rank.
    #[default]
    Text,
    /// As JSON events.
    Json,
}

impl LogFormat {
    fn is_text(&self) -> bool {
        *self == LogFormat::Text
    }
}

/// An archive of files: tar, compressed with gzip. `evenkeel launch --nodes` creates it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.configMap) != has(self.url)")
        .message("code needs one of configMap and url")
)]
pub struct Code {
    /// ConfigMap whose binary key `code.tar.gz` is the archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub config_map: Option<String>,
    /// URL of the archive in a bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub url: Option<String>,
    /// SHA-256 of the archive, in hexadecimal digits.
    #[schemars(length(min = 64, max = 64))]
    pub sha256: String,
}

/// Key of the archive in a ConfigMap.
pub const CODE_KEY: &str = "code.tar.gz";

/// Where the built-in trainer computes.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum TrainerDevice {
    /// `Cuda` if `resourceName` is nvidia.com/gpu, one of its MIG devices (nvidia.com/mig-…) or a shared form of them
    /// (….shared), else `Cpu`.
    #[default]
    Auto,
    /// On the processor's cores, also in pods with GPUs.
    Cpu,
    /// On the NVIDIA GPUs of the pods. The image contains cuBLASLt, NVRTC and NCCL.
    Cuda,
}

impl TrainerDevice {
    /// The device in pods that request this resource.
    pub fn on(self, resource: &str) -> DeviceKind {
        match self {
            TrainerDevice::Cpu => DeviceKind::Cpu,
            TrainerDevice::Cuda => DeviceKind::Cuda,
            TrainerDevice::Auto => {
                let device = resource.strip_suffix(".shared").unwrap_or(resource);
                if device == NVIDIA_GPU || device.starts_with("nvidia.com/mig-") {
                    DeviceKind::Cuda
                } else {
                    DeviceKind::Cpu
                }
            }
        }
    }
}

/// Resource name of a GPU in NVIDIA's device plugin.
pub const NVIDIA_GPU: &str = "nvidia.com/gpu";

impl TrainingJobSpec {
    /// A number that divides others and that the schema excludes: an older CRD may have admitted it.
    pub fn flaw(&self) -> Option<String> {
        let (nodes, gpus) = (self.nodes.into(), self.gpus_per_node.into());
        outside(1..=1024, [("nodes", nodes)]).or_else(|| outside(1..=64, [("gpusPerNode", gpus)]))
    }

    /// The warning that the built-in trainer leaves the GPUs of its pods unused.
    pub fn idle_devices(&self) -> Option<String> {
        let resource = &self.resource_name;
        let device = self.trainer.device;
        let built_in = self.trainer.command.is_empty();
        let is_gpu =
            resource.contains("gpu") || TrainerDevice::Auto.on(resource) == DeviceKind::Cuda;
        let idle = built_in && is_gpu && device.on(resource) == DeviceKind::Cpu;
        let why = match device {
            TrainerDevice::Auto => "of GPUs it uses NVIDIA's only: ",
            _ => "spec.trainer.device is Cpu: create the job with Auto or Cuda, or ",
        };
        idle.then(|| {
            format!(
                "the built-in trainer computes on CPUs and leaves the {resource} of its pods idle; {why}set \
                 spec.trainer.command to a trainer for GPUs"
            )
        })
    }
}

/// An environment variable.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    /// Name of the variable.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Value of the variable. Default: empty.
    #[serde(default)]
    #[schemars(length(max = 131072))]
    pub value: String,
    /// Source of the value, as in a container: `secretKeyRef`, `configMapKeyRef`, `fieldRef` or `resourceFieldRef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub value_from: Option<Value>,
}

/// Place of the run's files. All pods must see the same one.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.claim) || has(self.path)")
        .message("checkpoint needs a claim, a bucket as path, or a path that podTemplate mounts"),
    validation = Rule::new("!has(self.path) || !self.path.contains('://') || self.path.matches('^(s3|gs|az)://[^/]+')")
        .message("checkpoint.path is a path in the pods, or a bucket: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"),
    validation = Rule::new("!has(self.claim) || !has(self.path) || !self.path.contains('://')")
        .message("checkpoint.claim and a bucket as checkpoint.path exclude each other")
)]
pub struct CheckpointVolume {
    /// Name of a PersistentVolumeClaim with access mode ReadWriteMany, mounted at `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub claim: Option<String>,
    /// Mount path, or a bucket without a claim: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. The
    /// run's directory below it is named by the job's name and uid. Default: /checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub path: Option<String>,
}

impl CheckpointVolume {
    /// Mount path in the pods.
    pub fn mount(&self) -> &str {
        let path = self.path.as_deref().filter(|path| !is_url(path));
        path.unwrap_or("/checkpoints")
    }

    /// URL of the bucket that pods share instead of a volume.
    pub fn bucket(&self) -> Option<&str> {
        self.path.as_deref().filter(|path| is_url(path))
    }
}

/// Failures after which the job gives up. Lost nodes and pods, drains and rescales never count.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Budgets {
    /// Failures of the trainer without progress between them, including ranks that a signal ended in a living
    /// pod. One more fails the job.
    #[schemars(range(min = 0, max = 1000))]
    pub restarts: u32,
}

impl Default for Budgets {
    fn default() -> Self {
        Budgets { restarts: 3 }
    }
}

/// The CustomResourceDefinition.
pub fn crd() -> CustomResourceDefinition {
    let mut crd = TrainingJob::crd();
    for version in &mut crd.spec.versions {
        let schema = version.schema.as_mut();
        if let Some(schema) = schema.and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            schema::without_unsigned_formats(schema);
        }
    }
    crd
}

/// The JSON schema of a TrainingJob, for editors.
pub fn json_schema() -> Result<Value, serde_json::Error> {
    let crd = serde_json::to_value(crd())?;
    let server = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    Ok(schema::of_training_job(server))
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

fn nvidia_gpu() -> String {
    NVIDIA_GPU.into()
}

fn recipe_yaml() -> String {
    "recipe.yaml".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::testing::is_kept;

    #[test]
    fn manifests_match_the_types() {
        let crd = serde_saphyr::to_string(&crd()).unwrap();
        is_kept("charts/evenkeel/crds/trainingjobs.yaml", &crd);
        is_kept("manifests/base/crd.yaml", &crd);
        let schema = serde_json::to_string_pretty(&json_schema().unwrap()).unwrap();
        is_kept("docs/schema/trainingjob.json", &(schema + "\n"));
    }

    /// Paths of the fields below `schema` that have no description, or no upper limit of their length.
    fn incomplete(schema: &Value, path: &str, found: &mut Vec<String>) {
        if schema["x-kubernetes-preserve-unknown-fields"] == true {
            return;
        }
        let limit = match schema["type"].as_str() {
            Some("string") if schema["enum"].is_array() || schema["format"] == "date-time" => None,
            Some("string") => Some("maxLength"),
            Some("array") => Some("maxItems"),
            Some("object") if schema["additionalProperties"].is_object() => Some("maxProperties"),
            _ => None,
        };
        if let Some(limit) = limit.filter(|limit| schema[*limit].is_null()) {
            found.push(format!("{path}: no {limit}"));
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            if field["description"].as_str().is_none_or(str::is_empty) {
                found.push(format!("{path}: no description"));
            }
            incomplete(field, &path, found);
        }
        for below in ["items", "additionalProperties"] {
            if schema[below].is_object() {
                incomplete(&schema[below], &format!("{path}[]"), found);
            }
        }
    }

    #[test]
    fn every_field_is_described_and_bounded() {
        let crd = serde_json::to_value(crd()).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
        let mut found = Vec::new();
        for part in ["spec", "status"] {
            incomplete(&schema[part], part, &mut found);
        }
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn names_without_room_for_the_names_of_objects_are_refused() {
        let crd = serde_json::to_value(crd()).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let rules = schema["x-kubernetes-validations"].as_array().unwrap();
        let rule = |start: &str| {
            let mut rules = rules.iter().filter_map(|rule| rule["rule"].as_str());
            rules.find_map(|rule| rule.strip_prefix(start)).unwrap()
        };
        assert_eq!(
            rule("size(self.metadata.name) <= "),
            LONGEST_NAME.to_string()
        );
        let pattern = rule("self.metadata.name.matches('");
        let pattern = regex::Regex::new(pattern.strip_suffix("')").unwrap()).unwrap();
        for valid in ["a", "a-1", "train-llama-3"] {
            assert!(pattern.is_match(valid), "{valid}");
        }
        for invalid in ["", "a.b", "1a", "A", "a-", "a_b"] {
            assert!(!pattern.is_match(invalid), "{invalid}");
        }
    }

    #[test]
    fn reference_page_matches_the_types() {
        is_kept("docs/trainingjob.md", &fields::page().unwrap());
    }
}
