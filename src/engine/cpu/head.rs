//! Final norm, head and loss, forward and backward in one pass.
//!
//! Rows without a target never reach the head. The other rows are processed in chunks, so that only one
//! chunk's logits exist; their gradient overwrites them.

use cpu_kernels::{cross_entropy, linear};

use super::backend::{CpuBackend, norm_backward, norm_forward, place, unused};
use super::store::Gradient;
use crate::engine::IGNORE;
use crate::engine::walk::{Head, Slot};

impl CpuBackend<'_> {
    /// Sets loss and targets of the last block's output; with `gradient` also leaves the gradient of that output in
    /// `dx` and of the weights in the store. Without it, and where the losses are weighed, sets the losses of all tokens.
    pub(super) fn set_loss(&mut self, head: &Head, gradient: bool) {
        let n = self.tokens() * self.config.hidden_size;
        let last = Slot::Residual(self.config.num_hidden_layers);
        let x = self.buffer(last).lend();
        let targets = self.micro_batch.targets;
        let rows: Vec<usize> = (0..targets.len())
            .filter(|&row| targets[row] != IGNORE)
            .collect();
        self.targets = rows.len() as u64;
        if gradient {
            self.shared.dx[..n].fill(0.0);
            if rows.is_empty() {
                self.no_gradient(head);
            }
        }
        let weigh = self.weigh.take();
        let weights = match weigh {
            Some(weigh) => {
                self.set_losses(head, &x, &rows);
                Some(weigh(&self.losses))
            }
            None if gradient => None,
            None => {
                self.set_losses(head, &x, &rows);
                self.buffer(last).restore(x);
                return;
            }
        };
        for (chunk, rows) in rows.chunks(self.shared.head_rows).enumerate() {
            self.logits_of(head, &x, rows);
            let targets: Vec<u32> = rows.iter().map(|&row| targets[row]).collect();
            let vocabulary = self.config.vocab_size;
            let logits = &mut self.shared.logits[..rows.len() * vocabulary];
            let weights: Option<Vec<f32>> = weights
                .as_ref()
                .map(|weights| rows.iter().map(|&row| weights[row]).collect());
            let weights = weights.as_deref();
            let loss = self.token_loss;
            let losses =
                cross_entropy::forward_backward(logits, &targets, weights, vocabulary, loss);
            if weights.is_none() {
                self.loss += losses.iter().sum::<f64>();
            }
            self.backward(head, rows, chunk > 0);
        }
        self.buffer(last).restore(x);
        self.publish();
    }

    /// Sets the losses of the `rows` of x, and their sum.
    fn set_losses(&mut self, head: &Head, x: &[f32], rows: &[usize]) {
        self.losses = vec![0.0; self.tokens()];
        for rows in rows.chunks(self.shared.head_rows) {
            self.logits_of(head, x, rows);
            let targets = self.micro_batch.targets;
            let targets: Vec<u32> = rows.iter().map(|&row| targets[row]).collect();
            let logits = &mut self.shared.logits[..rows.len() * self.config.vocab_size];
            let vocabulary = self.config.vocab_size;
            let losses = cross_entropy::forward(logits, &targets, vocabulary, self.token_loss);
            self.loss += losses.iter().sum::<f64>();
            for (&row, loss) in rows.iter().zip(losses) {
                self.losses[row] = loss;
            }
        }
    }

    /// The logits of the last token, in the first row of `logits`.
    pub(super) fn last_logits(&mut self, head: &Head) {
        let last = Slot::Residual(self.config.num_hidden_layers);
        let x = self.buffer(last).lend();
        self.logits_of(head, &x, &[self.tokens() - 1]);
        self.buffer(last).restore(x);
    }

    /// Leaves x's rows in `narrow`, the norm's output in `wide`, its statistics at the beginning of
    /// `norm_scratch` and the logits.
    fn logits_of(&mut self, head: &Head, x: &[f32], rows: &[usize]) {
        let (n, hidden) = (rows.len(), self.config.hidden_size);
        let (store, shared) = (&*self.store, &mut *self.shared);
        let gathered = &mut shared.narrow[..n * hidden];
        for (&row, into) in rows.iter().zip(gathered.chunks_exact_mut(hidden)) {
            into.copy_from_slice(&x[row * hidden..][..hidden]);
        }
        let normed = &mut shared.wide[..n * hidden];
        let statistics = &mut shared.norm_scratch[..n * self.config.norm.statistics()];
        let w = &store.parameters(head.unit)[head.norm.range.clone()];
        norm_forward(self.config, normed, statistics, gathered, w);
        let w = &store.parameters(head.logits.unit)[head.logits.weights.clone()];
        let logits = &mut shared.logits[..n * self.config.vocab_size];
        linear::forward(logits, normed, w, n);
    }

    /// From the gradient of the logits of these rows to that of x in `dx`, and of the weights: added to those of the
    /// rows before if any `precede`.
    fn backward(&mut self, head: &Head, rows: &[usize], precede: bool) {
        let (n, hidden) = (rows.len(), self.config.hidden_size);
        let shared = &mut *self.shared;
        let logits = &shared.logits[..n * self.config.vocab_size];
        // The weights' gradient first, then that of the norm's output in place of the output.
        let normed = &mut shared.wide[..n * hidden];
        let (w, gradient) = (self.store).gradient(head.logits.unit, &head.logits.weights);
        if let Some(Gradient { values, add }) = gradient {
            linear::backward_weight(values, logits, normed, n, add || precede);
        }
        linear::backward_input(normed, logits, w, n);

        let dx = &mut shared.head[..n * hidden];
        dx.fill(0.0);
        let (w, gradient) = self.store.gradient(head.unit, &head.norm.range);
        let gathered = &shared.narrow[..n * hidden];
        let statistics = n * self.config.norm.statistics();
        let (statistics, scratch) = shared.norm_scratch.split_at_mut(statistics);
        let mut unused = unused(&gradient, w.len());
        let (dw, add) = place(gradient, &mut unused);
        let dw = (dw, add || precede);
        let input = (gathered, &*statistics);
        norm_backward(self.config, (normed, dx), dw, input, w, scratch);
        for (&row, dx) in rows.iter().zip(dx.chunks_exact(hidden)) {
            shared.dx[row * hidden..][..hidden].copy_from_slice(dx);
        }
    }

    /// Without targets the gradients are zero; places that are to be overwritten must be zeroed.
    fn no_gradient(&mut self, head: &Head) {
        let logits = (head.logits.unit, &head.logits.weights);
        for (unit, range) in [logits, (head.unit, &head.norm.range)] {
            if let (_, Some(Gradient { values, add: false })) = self.store.gradient(unit, range) {
                values.fill(0.0);
            }
        }
    }
}
