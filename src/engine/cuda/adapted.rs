//! The adapters of a walk's layers on the device: low `[n, rank]` = scale · x · Aᵀ, and y += low · Bᵀ in the layer's columns.
//! All but the gradient of the matrices and a sum in the residual stream is real.

use super::backend::{CudaBackend, product};
use super::cublaslt::{Operand, Product, transposed};
use super::error::CudaError;
use super::launches::{Dropout, Enqueued};
use super::options::Precision;
use crate::engine::walk::Linear;
use crate::engine::{Adapter, Adapters, Direction};

impl CudaBackend<'_> {
    /// Adds the output of the adapters for `x` to `y`, which has this element.
    pub(super) fn adapt(&self, linear: &Linear, x: u64, y: (u64, Precision)) -> Enqueued {
        let Some(settings) = self.settings() else {
            return Ok(());
        };
        let (rank, element) = (settings.rank, y.1);
        for adapter in &linear.adapters {
            self.down(linear, adapter, x)?;
            let sizes = [self.tokens(), rank, adapter.columns.len()];
            let low = self.operand(self.work.low, rank);
            let b = transposed(self.matrix(adapter.b.start, rank));
            let y = y.0 + (adapter.columns.start * element.size()) as u64;
            self.multiply(Product {
                added: Some(y),
                stride: linear.outputs(),
                element,
                ..product(sizes, low, b, y)
            })?;
        }
        Ok(())
    }

    /// Adds the gradient of the adapters' input to `dx`, and leaves that of `low` for
    /// [`CudaBackend::adapt_backward_weight`].
    pub(super) fn adapt_backward_input(&self, linear: &Linear, dy: u64, dx: u64) -> Enqueued {
        let Some(settings) = self.settings() else {
            return Ok(());
        };
        let (n, rank, inputs) = (self.tokens(), settings.rank, linear.inputs);
        let compute = &self.streams.compute;
        for (index, adapter) in linear.adapters.iter().enumerate() {
            let dlow = self.dlow(index, rank);
            let b = self.matrix(adapter.b.start, rank);
            let sizes = [n, adapter.columns.len(), rank];
            self.multiply(Product {
                factor: settings.scale(),
                ..product(sizes, self.columns(linear, adapter, dy), b, dlow.address)
            })?;
            let a = self.matrix(adapter.a.start, inputs);
            let of_input = product([n, rank, inputs], dlow, a, dx);
            let Some(dropout) = self.dropout(adapter) else {
                self.multiply(Product {
                    added: Some(dx),
                    ..of_input
                })?;
                continue;
            };
            let result = self.work.dropped;
            self.multiply(Product { result, ..of_input })?;
            let (direction, on) = (Direction::Backward, (dx, result));
            self.kernels
                .dropout(compute, direction, on, inputs, dropout, self.shape)?;
        }
        Ok(())
    }

    /// The gradient of the adapters: dlowᵀ · x, and in the layer's columns dyᵀ · low.
    pub(super) fn adapt_backward_weight(&self, linear: &Linear, dy: u64, x: u64) -> Enqueued {
        let Some(settings) = self.settings().filter(|_| !linear.adapters.is_empty()) else {
            return Ok(());
        };
        let (n, rank) = (self.tokens(), settings.rank);
        let gradient = self.trained_gradient(0);
        for (index, adapter) in linear.adapters.iter().enumerate() {
            let x = self.operand(self.down(linear, adapter, x)?, linear.inputs);
            let (dlow, low) = (self.dlow(index, rank), self.operand(self.work.low, rank));
            let of_a = gradient.part(&adapter.a);
            self.gradient_product((dlow, rank), (x, linear.inputs), of_a, n)?;
            let dy = (self.columns(linear, adapter, dy), adapter.columns.len());
            self.gradient_product(dy, (low, rank), gradient.part(&adapter.b), n)?;
        }
        Ok(())
    }

    /// Computes `low`. Returns the adapter's input: `x`, or that with dropout.
    fn down(&self, linear: &Linear, adapter: &Adapter, x: u64) -> Result<u64, CudaError> {
        let (n, inputs) = (self.tokens(), linear.inputs);
        let Some(settings) = self.settings() else {
            return Ok(x);
        };
        let x = match self.dropout(adapter) {
            None => x,
            Some(dropout) => {
                let (compute, dropped) = (&self.streams.compute, self.work.dropped);
                let (direction, on) = (Direction::Forward, (dropped, x));
                self.kernels
                    .dropout(compute, direction, on, inputs, dropout, self.shape)?;
                dropped
            }
        };
        let a = transposed(self.matrix(adapter.a.start, inputs));
        let sizes = [n, inputs, settings.rank];
        self.multiply(Product {
            factor: settings.scale(),
            ..product(sizes, self.operand(x, inputs), a, self.work.low)
        })?;
        Ok(x)
    }

    fn settings(&self) -> Option<&Adapters> {
        self.walk.adapted.map(|adapted| &adapted.settings)
    }

    /// What drops inputs of an adapter, where anything does.
    fn dropout(&self, adapter: &Adapter) -> Option<Dropout> {
        Some(Dropout {
            share: self.settings()?.dropout as f32,
            keys: self.work.inputs.dropout.filter(|_| self.shape.drops)?,
            adapter: adapter.number,
        })
    }

    /// A matrix of the adapters for products, from an element of their unit on.
    fn matrix(&self, start: usize, width: usize) -> Operand {
        let unit = self.held.trained.whole(0).operands;
        self.operand(self.real_at(unit, start), width)
    }

    /// The gradient of `low` of the adapter with this number in its layer.
    fn dlow(&self, index: usize, rank: usize) -> Operand {
        let before = index * self.tokens() * rank;
        self.operand(self.real_at(self.work.dlow, before), rank)
    }

    /// The adapter's columns in the gradient of the output of layers that are computed together.
    fn columns(&self, linear: &Linear, adapter: &Adapter, dy: u64) -> Operand {
        self.operand(self.real_at(dy, adapter.columns.start), linear.outputs())
    }
}
