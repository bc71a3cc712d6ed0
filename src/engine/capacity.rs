//! The micro-batches for which an engine has reserved memory.

use super::{EngineError, ModelConfig};

/// Largest sizes of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Number of tokens, batch × seq_len.
    pub tokens: usize,
    /// Tokens of the longest sequence.
    pub seq_len: usize,
}

impl Capacity {
    /// The capacity for micro-batches up to `batch` × `seq_len`.
    ///
    /// # Errors
    /// There are no tokens, or the model cannot have such sequences.
    pub fn new(
        config: &ModelConfig,
        batch: usize,
        seq_len: usize,
    ) -> Result<Capacity, EngineError> {
        config.check_sequence(seq_len)?;
        let tokens = batch.saturating_mul(seq_len);
        if tokens == 0 {
            return Err(EngineError::Shape(format!(
                "a micro-batch of {batch} × {seq_len} has no tokens"
            )));
        }
        Ok(Capacity { tokens, seq_len })
    }

    /// Whether `self` supports everything that `other` does.
    pub fn covers(self, other: Capacity) -> bool {
        self.tokens >= other.tokens && self.seq_len >= other.seq_len
    }

    /// The maximum of both sizes.
    pub fn with(self, other: Capacity) -> Capacity {
        Capacity {
            tokens: self.tokens.max(other.tokens),
            seq_len: self.seq_len.max(other.seq_len),
        }
    }
}
