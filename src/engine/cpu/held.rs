//! The weights of a rank: all of them trained, or frozen ones with adapters.

use super::store::{Gradient, Store};
use crate::engine::{EngineError, Pass};

/// The stores of a rank.
pub struct Held {
    /// What is trained: the model, or one unit with all adapters.
    pub trained: Store,
    /// The model below adapters.
    pub frozen: Option<Store>,
}

impl Held {
    /// The store with the model's weights.
    fn model(&mut self) -> &mut Store {
        self.frozen.as_mut().unwrap_or(&mut self.trained)
    }

    pub fn begin(&mut self, pass: Pass) -> Result<(), EngineError> {
        if let Some(frozen) = &mut self.frozen {
            frozen.begin(pass)?;
        }
        self.trained.begin(pass)
    }

    /// Makes a unit's parameters whole until they are released.
    pub fn acquire(&mut self, unit: usize) -> Result<(), EngineError> {
        self.model().acquire(unit)
    }

    pub fn release(&mut self, unit: usize) {
        self.model().release(unit);
    }

    /// An acquired unit's parameters.
    pub fn parameters(&self, unit: usize) -> &[f32] {
        let model = self.frozen.as_ref().unwrap_or(&self.trained);
        model.parameters(unit)
    }

    /// An acquired unit's parameters, and the place for its gradient unless they are frozen.
    pub fn gradient(&mut self, unit: usize) -> (&[f32], Option<Gradient<'_>>) {
        match &self.frozen {
            Some(frozen) => (frozen.parameters(unit), None),
            None => {
                let (parameters, gradient) = self.trained.gradient(unit);
                (parameters, Some(gradient))
            }
        }
    }

    /// Takes part in a walk of the other ranks without a micro-batch.
    pub fn join(&mut self, pass: Pass) -> Result<(), EngineError> {
        if let Some(frozen) = &mut self.frozen {
            frozen.join(pass)?;
        }
        self.trained.join(pass)
    }

    /// Discards the step's gradient, also during a walk or a reduction.
    pub fn discard(&mut self) {
        if let Some(frozen) = &mut self.frozen {
            frozen.discard();
        }
        self.trained.discard();
    }
}
