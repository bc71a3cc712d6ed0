//! The walk over the model's units: forward, and backward in reverse order.

use super::block::Block;
use super::head::Head;
use super::kernels::embedding;
use super::store::{Gradient, Pass, Store};
use super::workspace::Workspace;
use crate::engine::{Accumulated, EngineError, Layout, Measure, MicroBatch, ModelConfig};

/// A Llama as units and their order.
pub struct Model {
    /// Shape of the model.
    pub config: ModelConfig,
    /// The embedding, the blocks and the head.
    pub layout: Layout,
}

impl Model {
    /// Loss and gradient of a micro-batch; the store receives the gradient.
    pub fn train(
        &self,
        store: &mut dyn Store,
        workspace: &mut Workspace,
        micro_batch: MicroBatch<'_>,
        (measure, last): (Measure, bool),
    ) -> Result<Accumulated, EngineError> {
        store.begin(Pass::Training {
            measure,
            targets: micro_batch.target_tokens(),
            last,
        })?;
        let Workspace {
            inputs,
            stashes,
            shared,
            ..
        } = workspace;
        let n = micro_batch.tokens.len();
        let (hidden, head_unit) = (self.config.hidden_size, self.head_unit());
        let checkpointing = stashes.len() < self.config.num_hidden_layers;

        self.embed(store, micro_batch.tokens, &mut inputs[0])?;
        for unit in 1..head_unit {
            store.acquire(unit)?;
            let (x, next) = inputs.split_at_mut(unit);
            let stash = &mut stashes[if checkpointing { 0 } else { unit - 1 }];
            let block = self.block(unit, micro_batch);
            let w = store.parameters(unit);
            block.fill_stash(w, &x[unit - 1][..n * hidden], stash, shared);
            block.finish(w, stash, shared, &mut next[0][..n * hidden]);
            store.release(unit);
        }

        store.acquire(head_unit)?;
        let x = &inputs[head_unit - 1][..n * hidden];
        let (loss, targets) = self.head(micro_batch).forward_backward(store, x, shared);
        store.release(head_unit);
        if self.config.tie_word_embeddings {
            store.release(0);
        }
        store.complete(head_unit)?;

        for unit in (1..head_unit).rev() {
            store.acquire(unit)?;
            let x = &inputs[unit - 1][..n * hidden];
            let stash = &mut stashes[if checkpointing { 0 } else { unit - 1 }];
            let block = self.block(unit, micro_batch);
            if checkpointing {
                block.fill_stash(store.parameters(unit), x, stash, shared);
            }
            let (w, gradient) = store.gradient(unit);
            block.backward(w, gradient, x, stash, shared);
            store.release(unit);
            store.complete(unit)?;
        }

        let (_, Gradient { values, add }) = store.gradient(0);
        // Tied embeddings already hold the head's part.
        let add = add || self.config.tie_word_embeddings;
        embedding::backward(
            (values, add),
            micro_batch.tokens,
            &shared.dx[..n * hidden],
            hidden,
        );
        store.complete(0)?;

        Ok(Accumulated {
            loss,
            targets,
            squared_norm: store.end()?,
        })
    }

    /// Summed loss and targets of a micro-batch.
    pub fn evaluate(
        &self,
        store: &mut dyn Store,
        workspace: &mut Workspace,
        micro_batch: MicroBatch<'_>,
    ) -> Result<(f64, u64), EngineError> {
        store.begin(Pass::Evaluation)?;
        let Workspace {
            inputs,
            stashes,
            shared,
            ..
        } = workspace;
        let n = micro_batch.tokens.len();
        let (hidden, head_unit) = (self.config.hidden_size, self.head_unit());
        let (first, rest) = inputs.split_at_mut(1);
        let (mut x, mut next) = (&mut first[0], &mut rest[0]);
        let stash = &mut stashes[0];

        self.embed(store, micro_batch.tokens, x)?;
        for unit in 1..head_unit {
            store.acquire(unit)?;
            let block = self.block(unit, micro_batch);
            let w = store.parameters(unit);
            block.fill_stash(w, &x[..n * hidden], stash, shared);
            block.finish(w, stash, shared, &mut next[..n * hidden]);
            store.release(unit);
            std::mem::swap(&mut x, &mut next);
        }
        store.acquire(head_unit)?;
        let result = self
            .head(micro_batch)
            .forward(store, &x[..n * hidden], shared);
        store.release(head_unit);
        if self.config.tie_word_embeddings {
            store.release(0);
        }
        store.end()?;
        Ok(result)
    }

    fn embed(
        &self,
        store: &mut dyn Store,
        tokens: &[u32],
        x: &mut [f32],
    ) -> Result<(), EngineError> {
        let hidden = self.config.hidden_size;
        store.acquire(0)?;
        let x = &mut x[..tokens.len() * hidden];
        embedding::forward(x, tokens, store.parameters(0), hidden);
        if !self.config.tie_word_embeddings {
            store.release(0);
        }
        Ok(())
    }

    /// The index of the last unit, which equals the number of blocks plus one.
    fn head_unit(&self) -> usize {
        self.layout.units.len() - 1
    }

    fn block(&self, unit: usize, micro_batch: MicroBatch<'_>) -> Block<'_> {
        let unit = &self.layout.units[unit];
        Block::new(&self.config, unit, micro_batch.batch, micro_batch.seq_len)
    }

    fn head<'a>(&'a self, micro_batch: MicroBatch<'a>) -> Head<'a> {
        Head {
            config: &self.config,
            unit: self.head_unit(),
            targets: micro_batch.targets,
        }
    }
}
