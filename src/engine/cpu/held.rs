//! The weights of a rank: all of them trained, or frozen ones with adapters.

use super::CpuOptions;
use super::arena::Arena;
use super::quantised::Quantised;
use super::store::{Gradient, Store};
use crate::comm::World;
use crate::engine::{
    Adapted, EngineError, Layout, Measure, ModelConfig, Pass, Strategy, Unit, initial,
};

/// The stores of a rank.
pub struct Held {
    /// What is trained: the model, or one unit with all adapters.
    pub trained: Store,
    /// The model below adapters.
    pub frozen: Option<Frozen>,
}

pub enum Frozen {
    Whole(Box<Store>),
    Quantised(Quantised),
}

impl Held {
    /// Reserves memory for adapters and the frozen model below them, whose weights `initial` draws.
    pub fn adapted(
        config: &ModelConfig,
        (model, adapted): (&Layout, &Adapted),
        options: &CpuOptions,
        world: Option<World>,
        arena: &Arena,
        initial: &dyn Fn(&Unit, usize, &mut [f32]),
    ) -> Result<Held, EngineError> {
        // Adapters are small: every rank has all of them, whatever is sharded.
        let held = (Strategy::Replicated, options.measure, options.forward_only);
        let draw = |unit: &Unit, offset, out: &mut [f32]| {
            initial::fill(unit, config, adapted.settings.seed, offset, out);
        };
        let trained = Store::new(&adapted.trained, false, held, world.clone(), arena, &draw)?;
        let frozen = if adapted.settings.is_quantised {
            Frozen::Quantised(Quantised::new(model, arena, initial)?)
        } else {
            let held = (options.strategy, Measure::default(), true);
            let tied = config.tie_word_embeddings;
            let store = Store::new(model, tied, held, world, arena, initial)?;
            Frozen::Whole(Box::new(store))
        };
        Ok(Held {
            trained: match options.strategy {
                Strategy::Replicated => trained,
                Strategy::Sharded { .. } => trained.reducing_late(),
            },
            frozen: Some(frozen),
        })
    }

    pub fn begin(&mut self, pass: Pass) -> Result<(), EngineError> {
        if let Some(Frozen::Whole(frozen)) = &mut self.frozen {
            frozen.begin(pass)?;
        }
        self.trained.begin(pass)
    }

    /// Makes a unit's parameters whole until they are released.
    pub fn acquire(&mut self, unit: usize) -> Result<(), EngineError> {
        match &mut self.frozen {
            None => self.trained.acquire(unit),
            Some(Frozen::Whole(store)) => store.acquire(unit),
            Some(Frozen::Quantised(model)) => {
                model.acquire(unit);
                Ok(())
            }
        }
    }

    pub fn release(&mut self, unit: usize) {
        match &mut self.frozen {
            None => self.trained.release(unit),
            Some(Frozen::Whole(store)) => store.release(unit),
            Some(Frozen::Quantised(_)) => {}
        }
    }

    /// An acquired unit's parameters.
    pub fn parameters(&self, unit: usize) -> &[f32] {
        match &self.frozen {
            None => self.trained.parameters(unit),
            Some(Frozen::Whole(store)) => store.parameters(unit),
            Some(Frozen::Quantised(model)) => model.parameters(unit),
        }
    }

    /// An acquired unit's parameters, and the place for its gradient unless they are frozen.
    pub fn gradient(&mut self, unit: usize) -> (&[f32], Option<Gradient<'_>>) {
        if self.frozen.is_some() {
            return (self.parameters(unit), None);
        }
        let (parameters, gradient) = self.trained.gradient(unit);
        (parameters, Some(gradient))
    }

    /// Takes part in a walk of the other ranks without a micro-batch.
    pub fn join(&mut self, pass: Pass) -> Result<(), EngineError> {
        if let Some(Frozen::Whole(frozen)) = &mut self.frozen {
            frozen.join(pass)?;
        }
        self.trained.join(pass)
    }

    /// Discards the step's gradient, also during a walk or a reduction.
    pub fn discard(&mut self) {
        if let Some(Frozen::Whole(frozen)) = &mut self.frozen {
            frozen.discard();
        }
        self.trained.discard();
    }
}
