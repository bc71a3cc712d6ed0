//! The walk over the model's units: forward, and backward in reverse order.

use super::arena::Buffer;
use super::block::Block;
use super::head::Head;
use super::kernels::embedding;
use super::store::{Gradient, Pass, Store};
use super::workspace::{Shared, Stash, Workspace};
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
        store: &mut Store,
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
        self.forward(store, inputs, stashes, shared, micro_batch)?;
        let n = micro_batch.tokens.len();
        let (hidden, head_unit) = (self.config.hidden_size, self.head_unit());

        let x = &inputs[head_unit - 1][..n * hidden];
        let (loss, targets) = self.head(micro_batch).forward_backward(store, x, shared);
        self.release_head(store);
        store.complete(head_unit)?;

        let checkpointing = stashes.len() < self.config.num_hidden_layers;
        for unit in (1..head_unit).rev() {
            store.acquire(unit)?;
            let x = &inputs[unit - 1][..n * hidden];
            let stash = (unit - 1) % stashes.len();
            let stash = &mut stashes[stash];
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
            squared_norm: store.end(),
        })
    }

    /// Summed loss and targets of a micro-batch.
    pub fn evaluate(
        &self,
        store: &mut Store,
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
        // No backward follows: one stash and two inputs stay in the caches.
        let (inputs, stashes) = (&mut inputs[..2], &mut stashes[..1]);
        self.forward(store, inputs, stashes, shared, micro_batch)?;
        let n = micro_batch.tokens.len();
        let x = &inputs[1][..n * self.config.hidden_size];
        let result = self.head(micro_batch).forward(store, x, shared);
        self.release_head(store);
        store.end();
        Ok(result)
    }

    /// From the tokens to the last block's output in the last of `inputs`, and to the head's weights. Where there are
    /// fewer stashes or inputs than blocks, later blocks overwrite those of earlier ones.
    fn forward(
        &self,
        store: &mut Store,
        inputs: &mut [Buffer],
        stashes: &mut [Stash],
        shared: &mut Shared,
        micro_batch: MicroBatch<'_>,
    ) -> Result<(), EngineError> {
        let tokens = micro_batch.tokens;
        let len = tokens.len() * self.config.hidden_size;
        store.acquire(0)?;
        let embedded = &mut inputs[0][..len];
        embedding::forward(
            embedded,
            tokens,
            store.parameters(0),
            self.config.hidden_size,
        );
        if !self.config.tie_word_embeddings {
            store.release(0);
        }
        for unit in 1..self.head_unit() {
            store.acquire(unit)?;
            if unit >= inputs.len() {
                // The output of the block before is the input of this one.
                inputs.swap(0, 1);
            }
            let (x, next) = inputs.split_at_mut(unit.min(inputs.len() - 1));
            let stash = (unit - 1) % stashes.len();
            let stash = &mut stashes[stash];
            let block = self.block(unit, micro_batch);
            let w = store.parameters(unit);
            block.fill_stash(w, &x[x.len() - 1][..len], stash, shared);
            block.finish(w, stash, shared, &mut next[0][..len]);
            store.release(unit);
        }
        store.acquire(self.head_unit())
    }

    /// The head needs no parameters any more.
    fn release_head(&self, store: &mut Store) {
        store.release(self.head_unit());
        if self.config.tie_word_embeddings {
            store.release(0);
        }
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
