//! Identity and resources of a pod's agent.

use std::path::PathBuf;

use crate::bucket::Bucket;
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
    /// The run directory: on the volume that all pods of the job share, or on this pod's disk if there is a bucket.
    pub run: PathBuf,
    /// Where the pods of the job share the run's files without a volume.
    pub bucket: Option<Bucket>,
    /// Whether the job has code or a setup command for its pods.
    pub setup: bool,
    /// Devices available to ranks.
    pub devices: u64,
    /// CPU cores shared by the ranks.
    pub cores: u64,
}
