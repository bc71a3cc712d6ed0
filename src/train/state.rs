//! What training knows apart from the weights. The same on every rank; every checkpoint holds it.

use serde::{Deserialize, Serialize};

use super::TrainError;
use super::checkpoint::Checkpoint;
use crate::norm::Controller;
use crate::samples::Ledger;

/// The state of training between two steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainState {
    /// Optimiser steps taken.
    pub step: u64,
    /// Samples consumed.
    pub samples: u64,
    /// Which batch comes next, and why.
    pub controller: Controller,
    /// The ledger of the committed history, from the first sample on.
    pub ledger: Ledger,
}

impl TrainState {
    /// The state that a checkpoint holds.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<TrainState, TrainError> {
        serde_json::from_value(checkpoint.state()?).map_err(|error| TrainError::State { error })
    }

    /// As checkpoints hold it.
    pub(super) fn to_json(&self) -> Result<serde_json::Value, TrainError> {
        serde_json::to_value(self).map_err(|error| TrainError::State { error })
    }
}
