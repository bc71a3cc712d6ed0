//! The state of training besides the weights. It is the same on every rank, and every checkpoint holds it.

use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::checkpoint::Checkpoint;
use crate::norm::Controller;
use crate::samples::Ledger;

/// The state of training between two steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainState {
    /// Number of optimiser steps taken.
    pub step: u64,
    pub samples: u64,
    /// Chooses the next batch.
    pub controller: Controller,
    /// The ledger of the committed history, from the first sample on.
    pub ledger: Ledger,
}

impl TrainState {
    /// The state that a checkpoint holds.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<TrainState, TrainError> {
        serde_json::from_value(checkpoint.state()?).map_err(|error| TrainError::State { error })
    }

    /// The state in the bytes of a checkpoint's file.
    pub fn parse(bytes: &[u8]) -> Result<TrainState, TrainError> {
        serde_json::from_slice(bytes).map_err(|error| TrainError::State { error })
    }

    /// The JSON form in checkpoints.
    pub(super) fn to_json(&self) -> Result<serde_json::Value, TrainError> {
        serde_json::to_value(self).map_err(|error| TrainError::State { error })
    }
}
