//! Builds a TrainingJob from a recipe and a command line.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::api::{
    CheckpointVolume, Code, Elasticity, EnvVar, LONGEST_NAME, OnStall, RecipeSource,
    RemainderPolicy, TrainerDevice, TrainingJob, TrainingJobSpec,
};

/// Parameters of a launch on a cluster.
#[derive(Debug, Clone, Default)]
pub struct LaunchOptions {
    /// Name of the TrainingJob.
    pub name: String,
    pub nodes: u32,
    /// Devices of each node.
    pub gpus_per_node: u32,
    /// Resource name of the devices.
    pub resource: String,
    pub image: String,
    /// The PersistentVolumeClaim or the bucket for checkpoints.
    pub checkpoint: CheckpointVolume,
    /// The files for the ranks' working directory.
    pub code: Option<Code>,
    /// Shell command for every pod before its first ranks.
    pub setup: Option<String>,
    /// Environment variables of the ranks.
    pub env: Vec<EnvVar>,
    /// Sources of further variables.
    pub env_from: Vec<Value>,
    /// Pod template merged into every pod.
    pub pod_template: Option<Value>,
    /// Annotations of the pods' ServiceAccount.
    pub service_account_annotations: BTreeMap<String, String>,
    pub recipe: RecipeSource,
    /// Overrides of the recipe, `KEY=VALUE`.
    pub overrides: Vec<String>,
    /// Policy for a batch that the ranks do not split exactly.
    pub remainder: RemainderPolicy,
    /// Minimum number of nodes; `None`: 1.
    pub min_nodes: Option<u32>,
    /// Memory limit of a rank, bytes.
    pub rank_memory: Option<u64>,
    /// Seconds without progress after which a rank counts as stalled.
    pub progress_deadline_seconds: Option<u32>,
    pub on_stall: OnStall,
    /// Where the built-in trainer computes.
    pub device: TrainerDevice,
    /// Command of the external trainer; empty for the built-in trainer.
    pub command: Vec<String>,
}

/// Builds the TrainingJob of a launch.
pub fn training_job(options: LaunchOptions) -> TrainingJob {
    let mut job = TrainingJob::new(
        &options.name,
        TrainingJobSpec {
            recipe: options.recipe,
            overrides: options.overrides,
            nodes: options.nodes,
            gpus_per_node: options.gpus_per_node,
            resource_name: options.resource,
            elasticity: Elasticity {
                min_nodes: options.min_nodes.unwrap_or(1),
                remainder: options.remainder,
                ..Elasticity::default()
            },
            image: options.image,
            trainer: Default::default(),
            code: options.code,
            checkpoint: options.checkpoint,
            service_account_annotations: options.service_account_annotations,
            budgets: Default::default(),
            active_deadline_seconds: None,
            progress_deadline_seconds: options.progress_deadline_seconds,
            on_stall: options.on_stall,
            suspend: false,
            pod_template: options.pod_template,
            ttl_seconds_after_finished: None,
        },
    );
    job.spec.trainer.command = options.command;
    job.spec.trainer.device = options.device;
    job.spec.trainer.setup = options.setup;
    job.spec.trainer.env = options.env;
    job.spec.trainer.env_from = options.env_from;
    job.spec.trainer.rank_memory = options.rank_memory.map(|bytes| bytes.to_string());
    job
}

/// A valid Kubernetes name (RFC 1035 label) derived from a recipe's name; `None` if it has no valid
/// character.
pub fn name_of(recipe: &str) -> Option<String> {
    // A name of this form starts with a letter.
    let digit = |c: &char| c.is_ascii_digit();
    let first = recipe.chars().find(char::is_ascii_alphanumeric);
    let mut name = match first.as_ref().is_some_and(digit) {
        true => "job-".to_owned(),
        false => String::new(),
    };
    for char in recipe.chars().map(|c| c.to_ascii_lowercase()) {
        match char {
            'a'..='z' | '0'..='9' => name.push(char),
            _ if name.ends_with('-') || name.is_empty() => {}
            _ => name.push('-'),
        }
    }
    name.truncate(LONGEST_NAME);
    let name = name.trim_end_matches('-');
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_labels() {
        let name = |recipe: &str| name_of(recipe);
        assert_eq!(name("first"), Some("first".into()));
        assert_eq!(
            name("Zephyr_7B.beta (SFT)"),
            Some("zephyr-7b-beta-sft".into())
        );
        assert_eq!(name("--x"), Some("x".into()));
        assert_eq!(name("7b-dpo"), Some("job-7b-dpo".into()));
        assert_eq!(name("…"), None);
        assert_eq!(
            name(&"ab".repeat(60)).map(|name| name.len()),
            Some(LONGEST_NAME)
        );
    }

    #[test]
    fn launch_options_reach_the_training_job() {
        let job = training_job(LaunchOptions {
            name: "first".into(),
            nodes: 8,
            gpus_per_node: 4,
            resource: "nvidia.com/gpu".into(),
            image: "evenkeel/evenkeel:1".into(),
            checkpoint: CheckpointVolume {
                claim: Some("checkpoints".into()),
                path: None,
            },
            recipe: RecipeSource {
                inline: Some("a: 1\n".into()),
                ..RecipeSource::default()
            },
            overrides: vec!["a=2".into()],
            remainder: RemainderPolicy::Uneven,
            rank_memory: Some(2048),
            device: TrainerDevice::Cuda,
            ..LaunchOptions::default()
        });
        insta::assert_snapshot!(serde_saphyr::to_string(&job).unwrap());
    }
}
