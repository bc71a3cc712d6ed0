//! Final norm, head and loss, forward and backward in one pass.
//!
//! Rows without a target never reach the head. The other rows are processed in chunks, so that only one
//! chunk's logits exist; their gradient overwrites them.

use super::kernels::{cross_entropy, linear, rmsnorm};
use super::store::{Gradient, Store};
use super::workspace::Shared;
use crate::engine::{IGNORE, ModelConfig};

/// The head of one micro-batch.
pub struct Head<'a> {
    /// Shape of the model.
    pub config: &'a ModelConfig,
    /// The unit with the final norm, and with the head's weights unless they are tied.
    pub unit: usize,
    /// `[n]`.
    pub targets: &'a [u32],
}

impl Head<'_> {
    /// Summed loss and targets of the last block's output x `[n, hidden]`.
    pub fn forward(&self, store: &Store, x: &[f32], shared: &mut Shared) -> (f64, u64) {
        let rows = self.rows();
        let mut loss = 0.0;
        for rows in rows.chunks(shared.head_rows) {
            let targets = self.logits(store, x, rows, shared);
            let logits = &mut shared.logits[..rows.len() * self.config.vocab_size];
            loss += cross_entropy::forward(logits, &targets, self.config.vocab_size);
        }
        (loss, rows.len() as u64)
    }

    /// As [`Head::forward`], with the gradients: of x in `shared.dx`, of the weights in the store.
    pub fn forward_backward(
        &self,
        store: &mut Store,
        x: &[f32],
        shared: &mut Shared,
    ) -> (f64, u64) {
        let (hidden, vocabulary) = (self.config.hidden_size, self.config.vocab_size);
        let rows = self.rows();
        shared.dx[..x.len()].fill(0.0);
        if rows.is_empty() {
            self.no_gradient(store);
        }
        let mut loss = 0.0;
        for (chunk, rows) in rows.chunks(shared.head_rows).enumerate() {
            let n = rows.len();
            let targets = self.logits(store, x, rows, shared);
            let logits = &mut shared.logits[..n * vocabulary];
            loss += cross_entropy::forward_backward(logits, &targets, vocabulary);

            // The weights' gradient first, then that of the norm's output in place of the output.
            let normed = &mut shared.wide[..n * hidden];
            let (w, Gradient { values, add }) = store.gradient(self.matrix_unit());
            let matrix = self.matrix(w.len());
            linear::backward_weight(
                &mut values[matrix.clone()],
                logits,
                normed,
                n,
                add || chunk > 0,
            );
            linear::backward_input(normed, logits, &w[matrix], n);

            let dx = &mut shared.head[..n * hidden];
            dx.fill(0.0);
            let (w, Gradient { values, add }) = store.gradient(self.unit);
            let gathered = &shared.narrow[..n * hidden];
            let (inverse, norm_scratch) = shared.norm_scratch.split_at_mut(n);
            rmsnorm::backward(
                normed,
                dx,
                (&mut values[..hidden], add || chunk > 0),
                gathered,
                inverse,
                &w[..hidden],
                norm_scratch,
            );
            for (&row, dx) in rows.iter().zip(dx.chunks_exact(hidden)) {
                shared.dx[row * hidden..][..hidden].copy_from_slice(dx);
            }
        }
        (loss, rows.len() as u64)
    }

    /// The rows with a target.
    fn rows(&self) -> Vec<usize> {
        (0..self.targets.len())
            .filter(|&row| self.targets[row] != IGNORE)
            .collect()
    }

    /// Leaves x's rows in `narrow`, the norm's output in `wide`, the inverse rms at the beginning of
    /// `norm_scratch` and the logits; returns the targets of the rows.
    fn logits(&self, store: &Store, x: &[f32], rows: &[usize], shared: &mut Shared) -> Vec<u32> {
        let (n, hidden) = (rows.len(), self.config.hidden_size);
        let gathered = &mut shared.narrow[..n * hidden];
        for (&row, into) in rows.iter().zip(gathered.chunks_exact_mut(hidden)) {
            into.copy_from_slice(&x[row * hidden..][..hidden]);
        }
        let normed = &mut shared.wide[..n * hidden];
        rmsnorm::forward(
            normed,
            &mut shared.norm_scratch[..n],
            gathered,
            &store.parameters(self.unit)[..hidden],
            self.config.rms_norm_eps,
        );
        let w = store.parameters(self.matrix_unit());
        let logits = &mut shared.logits[..n * self.config.vocab_size];
        linear::forward(logits, normed, &w[self.matrix(w.len())], n);
        rows.iter().map(|&row| self.targets[row]).collect()
    }

    /// Without targets the gradients are zero; places that are to be overwritten must be zeroed.
    fn no_gradient(&self, store: &mut Store) {
        for unit in [self.matrix_unit(), self.unit] {
            let (_, Gradient { values, add }) = store.gradient(unit);
            if !add {
                values.fill(0.0);
            }
        }
    }

    /// The unit with the head's weights.
    fn matrix_unit(&self) -> usize {
        if self.config.tie_word_embeddings {
            0
        } else {
            self.unit
        }
    }

    /// Range of the weights `[vocabulary, hidden]` within a unit of `len` elements: its end.
    fn matrix(&self, len: usize) -> std::ops::Range<usize> {
        len - self.config.vocab_size * self.config.hidden_size..len
    }
}
