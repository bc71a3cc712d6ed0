//! A reference to a checkpoint of an external trainer.

use std::path::PathBuf;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::util::time;

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
