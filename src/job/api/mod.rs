//! The TrainingJob: what people apply, and what the controller says about it.
//!
//! Plain data, the one source of the CRD's schema: `evenkeel crd` prints it, and a test compares
//! the manifests with it. Nothing here talks to an API server.

pub mod fields;
pub(super) mod schema;
pub mod status;

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResource, CustomResourceExt, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use status::TrainingJobStatus;

/// Trains a recipe on some nodes of the cluster and keeps its global batch, whatever happens to
/// them.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "evenkeel.dev",
    version = "v1alpha1",
    kind = "TrainingJob",
    namespaced,
    shortname = "tj",
    category = "all",
    status = "TrainingJobStatus",
    derive = "PartialEq",
    doc = "Trains a recipe on some nodes of the cluster and keeps its global batch, whatever happens to them.",
    scale(
        spec_replicas_path = ".spec.nodes",
        status_replicas_path = ".status.nodes",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(name = "Wanted", type_ = "integer", json_path = ".spec.nodes"),
    printcolumn(name = "Batch", type_ = "string", json_path = ".status.plan.proof"),
    printcolumn(name = "Progress", type_ = "string", json_path = ".status.progress.share"),
    printcolumn(name = "Loss", type_ = "string", json_path = ".status.progress.loss"),
    printcolumn(name = "Why", type_ = "string", json_path = ".status.why", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("size(self.metadata.name) <= 52")
        .message("a TrainingJob's name may have 52 characters: its pods add to it"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("a TrainingJob's name has lower-case letters, digits and dashes, and begins with a letter: its Service and its pods' hosts are called so")
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
    .message("gpusPerNode, resourceName and checkpoint stay what they were: make another job for other ones")
)]
pub struct TrainingJobSpec {
    /// The recipe. What it says when the job is first planned is kept in the status; a later edit
    /// of a ConfigMap changes nothing.
    pub recipe: RecipeSource,
    /// `KEY=VALUE`, laid over the recipe as `evenkeel plan` lays its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub overrides: Vec<String>,
    /// Nodes to train on; what `kubectl scale` sets. The job runs on the largest feasible number
    /// of nodes up to this one that the pool has; `suspend` is what gives all of them back.
    #[schemars(range(min = 1, max = 1024))]
    pub nodes: u32,
    /// GPUs that each pod asks for; one rank is started for each.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub gpus_per_node: u32,
    /// What a GPU is called in the nodes' allocatable resources; also MIG slices.
    #[serde(default = "nvidia_gpu")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_name: String,
    /// How the job may move.
    #[serde(default)]
    pub elasticity: Elasticity,
    /// The container image; it holds `evenkeel`, and what `trainer.command` needs.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// What trains.
    #[serde(default)]
    pub trainer: Trainer,
    /// Where checkpoints and the run's files go.
    pub checkpoint: CheckpointVolume,
    /// How many failures are forgiven.
    #[serde(default)]
    pub budgets: Budgets,
    /// Commit a checkpoint and give the GPUs back until this is false again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspend: bool,
    /// Laid over every pod that the controller makes: node selectors, tolerations, volumes,
    /// priority class, pull secrets, resources. Containers are matched by name; the trainer's is
    /// `trainer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub pod_template: Option<Value>,
    /// Delete the job so many seconds after it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2147483647))]
    pub ttl_seconds_after_finished: Option<u32>,
}

/// Where a recipe comes from: its text, inline or in a ConfigMap, or one of `files`.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.inline) || !has(self.configMap)")
        .message("give the recipe either inline or as a configMap"),
    validation = Rule::new("has(self.inline) || has(self.configMap) || has(self.files) && has(self.path)")
        .message("give the recipe inline, as a configMap, or as files and the path of the one that it is"),
    validation = Rule::new("!has(self.accelerate) || !has(self.acceleratePath)")
        .message("give the accelerate config either as text or as the path of one of the files")
)]
pub struct RecipeSource {
    /// The recipe's text, in any dialect that `evenkeel plan` reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inline: Option<String>,
    /// A ConfigMap of the job's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapKey>,
    /// Where the recipe stands, seen from the folder that it is started in; some dialects tell by it
    /// what they are. The name of its text, or which of the files it is, or the folder of a tree of
    /// configs among them. Default: recipe.yaml.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub path: Option<String>,
    /// Files that the recipe names or is composed of: their texts by their paths, which begin in the
    /// same folder and stay in it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
    /// An accelerate config beside it, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerate: Option<String>,
    /// Which of the files is the accelerate config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub accelerate_path: Option<String>,
    /// The dialect, where the recipe's keys should not decide: `evenkeel plan --dialect`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// The version of the dialect: `evenkeel plan --dialect-version`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect_version: Option<String>,
}

/// A recipe in a ConfigMap: one key, or several that become files.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapKey {
    /// The ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The key that holds the recipe.
    #[serde(default = "recipe_yaml")]
    pub key: String,
    /// Keys that become files, as in a pod's volume. Where there are any, `path` says which of them is
    /// the recipe, or in which folder its tree is, and `key` nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub items: Vec<KeyToPath>,
}

/// A key of a ConfigMap, and the file that it becomes.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyToPath {
    /// The key.
    pub key: String,
    /// Its path, as among `files`.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
}

/// How the job may move.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Elasticity {
    /// Never on fewer nodes; with fewer the job waits.
    #[schemars(range(min = 1, max = 1024))]
    pub min_nodes: u32,
    /// Never on more, whatever `nodes` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_nodes: Option<u32>,
    /// A larger world must have been possible for so many seconds before the job moves to it.
    #[schemars(range(min = 0, max = 86400))]
    pub grow_delay_seconds: u32,
    /// What a cordoned node means.
    pub on_cordon: OnCordon,
    /// Whether pods wait for nodes that do not exist yet.
    pub capacity: Capacity,
    /// What happens to a batch that no number of ranks splits exactly.
    pub remainder: RemainderPolicy,
    /// Ranks are stopped when their pod's agent has heard nothing for so many seconds: neither from
    /// the API server, nor from the controller, nor from another pod of the generation.
    #[schemars(range(min = 5, max = 3600))]
    pub fence_after_seconds: u32,
    /// How long ranks may take to commit when they are told to drain.
    #[schemars(range(min = 1, max = 3600))]
    pub drain_seconds: u32,
    /// How long to wait for pods of a new world before going on with those that are ready.
    #[schemars(range(min = 1, max = 3600))]
    pub placement_seconds: u32,
}

impl Default for Elasticity {
    fn default() -> Self {
        Elasticity {
            min_nodes: 1,
            max_nodes: None,
            grow_delay_seconds: 30,
            on_cordon: OnCordon::Shrink,
            capacity: Capacity::Discovered,
            remainder: RemainderPolicy::Exact,
            fence_after_seconds: 30,
            drain_seconds: 60,
            placement_seconds: 60,
        }
    }
}

/// What a cordoned node means.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnCordon {
    /// It is about to go: leave it now, with a checkpoint.
    #[default]
    Shrink,
    /// Wait until it is drained: an upgrade may cordon a whole pool at once.
    Wait,
}

/// Whether pods wait for nodes that do not exist yet.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Capacity {
    /// Pods are made for GPUs that are free now.
    #[default]
    Discovered,
    /// Pods are made for `nodes`, so that an autoscaler sees the pending ones.
    Request,
}

/// What happens to a batch that no number of ranks splits exactly.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemainderPolicy {
    /// Such a world is not used.
    #[default]
    Exact,
    /// Whole micro-batches are dealt unevenly; their sum stays the global batch.
    Uneven,
}

/// What trains.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Trainer {
    /// The user's own program, started once for every rank with torchrun's environment; empty: the
    /// built-in trainer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Bytes that a rank of the built-in trainer may use, for example 2GiB; above it the
    /// micro-batch goes down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_memory: Option<String>,
    /// Environment of the ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
}

/// One environment variable.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EnvVar {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its value.
    #[serde(default)]
    pub value: String,
}

/// Where the run's files go. All pods see the same directory.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.claim) || has(self.path)")
        .message("give a claim, or a path that podTemplate mounts")
)]
pub struct CheckpointVolume {
    /// A PersistentVolumeClaim that many nodes may write (ReadWriteMany), mounted at `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Where it is mounted. Default: /checkpoints. The run's files stand in a directory of the
    /// job's name and uid below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

impl CheckpointVolume {
    /// Where the volume is mounted in the pods.
    pub fn mount(&self) -> &str {
        self.path.as_deref().unwrap_or("/checkpoints")
    }
}

/// How many failures are forgiven without progress between them. Lost nodes and pods, drains and
/// rescales never count.
#[derive(JsonSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Budgets {
    /// Failures of the program itself, and ranks that a signal ends while their pods live.
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
        if let Some(schema) = version
            .schema
            .as_mut()
            .and_then(|s| s.open_api_v3_schema.as_mut())
        {
            schema::without_unsigned_formats(schema);
        }
    }
    crd
}

fn one() -> u32 {
    1
}

fn nvidia_gpu() -> String {
    "nvidia.com/gpu".into()
}

fn recipe_yaml() -> String {
    "recipe.yaml".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_charts_definition_is_the_one_of_the_types() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/charts/evenkeel/crds/trainingjobs.yaml"
        );
        is_kept(path, &serde_saphyr::to_string(&crd()).unwrap());
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/manifests/base/crd.yaml");
        is_kept(path, &serde_saphyr::to_string(&crd()).unwrap());
    }

    #[test]
    fn the_page_of_the_fields_is_that_of_the_types() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/trainingjob.md");
        is_kept(path, &fields::page().unwrap());
    }

    fn is_kept(path: &str, text: &str) {
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(path, text).unwrap();
        }
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            kept == text,
            "regenerate {path}: UPDATE=1 cargo test job::api"
        );
    }
}
