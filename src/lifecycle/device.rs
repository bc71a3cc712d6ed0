//! The devices that the built-in trainer computes on.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the built-in trainer computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// On a share of the processor's cores.
    #[default]
    Cpu,
    /// On one NVIDIA GPU for each rank.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        })
    }
}
