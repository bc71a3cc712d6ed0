//! One sequence that grows: its tokens' keys and values are kept, so that each token is computed once.

use super::{Capacity, EngineError, IGNORE, MicroBatch, ModelConfig};

/// Most tokens that are computed together, so that a long prompt needs no more activations.
const CHUNK: usize = 512;
const NO_TARGETS: [u32; CHUNK] = [IGNORE; CHUNK];

/// A sequence of an engine.
pub struct Sequence<C> {
    /// The places of keys and values, one for each block, of [`cache_len`] elements: `[len, 2 × kv_heads × head_dim]`, the
    /// key heads of a token, then its value heads.
    pub caches: Vec<C>,
    /// Tokens so far.
    pub past: usize,
    /// The most tokens.
    len: usize,
}

/// Elements of a block's keys and values of `len` tokens.
///
/// # Errors
/// The model cannot have such sequences.
pub fn cache_len(config: &ModelConfig, len: usize) -> Result<usize, EngineError> {
    config.check_sequence(len)?;
    if len == 0 {
        return Err(EngineError::Shape("a sequence of no tokens".to_owned()));
    }
    Ok(len * (config.qkv() - config.queries()))
}

impl<C> Sequence<C> {
    /// An empty sequence of up to `len` tokens.
    pub fn new(caches: Vec<C>, len: usize) -> Sequence<C> {
        Sequence {
            caches,
            past: 0,
            len,
        }
    }

    /// The capacity of a workspace for its tokens.
    pub fn capacity(&self) -> Capacity {
        Capacity {
            tokens: self.len.min(CHUNK),
            seq_len: self.len,
        }
    }

    /// The micro-batches that continue it by these tokens.
    ///
    /// # Errors
    /// There are no tokens, or more than the sequence has places for.
    pub fn parts<'t>(
        &self,
        tokens: &'t [u32],
    ) -> Result<impl Iterator<Item = MicroBatch<'t>> + use<'t, C>, EngineError> {
        if tokens.is_empty() || self.past + tokens.len() > self.len {
            return Err(EngineError::Shape(format!(
                "{} tokens cannot follow the {} of a sequence of at most {}",
                tokens.len(),
                self.past,
                self.len
            )));
        }
        Ok(tokens.chunks(CHUNK).map(|tokens| MicroBatch {
            tokens,
            targets: &NO_TARGETS[..tokens.len()],
            batch: 1,
            seq_len: tokens.len(),
            ..MicroBatch::default()
        }))
    }
}

/// The error for tokens without a sequence.
pub fn no_sequence() -> EngineError {
    EngineError::Shape("no sequence was begun".to_owned())
}

/// Refuses what needs more than a forward pass to an engine that is only for these.
pub fn trains(forward_only: bool) -> Result<(), EngineError> {
    match forward_only {
        true => Err(EngineError::Shape(
            "the engine was created without memory for training".to_owned(),
        )),
        false => Ok(()),
    }
}
