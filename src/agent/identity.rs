//! Who and where the agent of a pod is.

use std::path::PathBuf;

/// Who and where this agent is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// This program.
    pub program: PathBuf,
    /// The pod's uid.
    pub pod: String,
    /// The run's directory, on the volume that all pods of the job see.
    pub run: PathBuf,
    /// Devices that ranks can be started on.
    pub devices: u64,
    /// Cores that the ranks share.
    pub cores: u64,
}
