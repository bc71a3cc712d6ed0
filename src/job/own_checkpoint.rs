//! A checkpoint of a program of the user's own, as far as it is told from another one.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A checkpoint that is another one than before is progress.
#[derive(JsonSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnCheckpoint {
    /// Where it is.
    pub path: PathBuf,
    /// Of a single file, which a program may write again and again under one name: when it was last
    /// changed, seconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<f64>,
}
