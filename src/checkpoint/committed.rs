//! A committed checkpoint: its directory, its progress and its checksum.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Checksum;

/// A committed checkpoint; a generation's record references it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    pub path: PathBuf,
    /// The generation that wrote it.
    pub generation: u64,
    /// Optimiser steps so far, over all generations.
    pub step: u64,
    /// Samples consumed so far.
    pub samples: u64,
    /// Checksum of its manifest, which holds the checksums of all other files.
    pub checksum: Checksum,
}
