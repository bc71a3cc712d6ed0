//! The verdict about a run's ledger, as commands print it and as the pod that proves a job's ledger reports it.

use serde::{Deserialize, Serialize};

/// Whether every sample of a committed history was consumed exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    pub proved: bool,
    /// The checkpoint whose history was checked, as a path below the run directory.
    pub checkpoint: String,
    /// One line: the proof, or the first fault.
    pub verdict: String,
    /// Samples of the proved history; 0 after a fault.
    pub samples: u64,
    /// The sum of all digests of the proved history, in hexadecimal digits; empty after a fault.
    pub digest: String,
    /// Checksum of the weights in the checkpoint, in hexadecimal digits, which no world changes; absent where only the
    /// history was at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
}
