//! Identity and resources of a pod's agent.

use std::path::PathBuf;

use crate::util::key::Key;

/// Identity and resources of this agent.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Path of the `evenkeel` executable.
    pub program: PathBuf,
    /// Uid of the TrainingJob.
    pub job: String,
    /// The job's key.
    pub key: Key,
    /// Uid of the pod.
    pub pod: String,
    /// The run directory, on the volume that all pods of the job share.
    pub run: PathBuf,
    /// Devices available to ranks.
    pub devices: u64,
    /// CPU cores shared by the ranks.
    pub cores: u64,
}
