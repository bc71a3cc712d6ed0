//! The micro-batches for which an engine has reserved memory.

use super::{EngineError, MicroBatch, ModelConfig};

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

    /// The size of a micro-batch.
    pub fn of(micro_batch: MicroBatch<'_>) -> Capacity {
        Capacity {
            tokens: micro_batch.tokens.len(),
            seq_len: micro_batch.seq_len,
        }
    }

    /// The capacity for this size and everything that is `reserved`; `None` if the latter is enough.
    pub fn beyond(self, reserved: Option<Capacity>) -> Option<Capacity> {
        let Some(reserved) = reserved else {
            return Some(self);
        };
        let both = Capacity {
            tokens: reserved.tokens.max(self.tokens),
            seq_len: reserved.seq_len.max(self.seq_len),
        };
        (both != reserved).then_some(both)
    }
}
