//! The weights of a rank: all of them trained, or frozen ones with adapters.

use std::ops::Range;

use super::CpuOptions;
use super::arena::Arena;
use super::quantised::Quantised;
use super::store::{Gradient, Purpose, Store};
use crate::comm::World;
use crate::engine::adapters::Saved;
use crate::engine::{
    AdamW, Adapted, EngineError, Layout, ModelConfig, Pass, Strategy, Unit, UnitState,
};

/// Fills in the weights of a unit from an offset on.
type Draw<'d> = &'d dyn Fn(&Unit, usize, &mut [f32]);

/// The stores of a rank.
pub struct Held {
    /// What is trained: the model, or one unit with all adapters and the modules that are trained whole.
    pub trained: Store,
    /// The model below adapters.
    pub frozen: Option<Frozen>,
    /// The modules that are trained whole beside adapters.
    saved: Vec<Saved>,
}

pub enum Frozen {
    Whole(Box<Store>),
    Quantised(Box<Quantised>),
}

impl Frozen {
    /// An acquired unit's parameters.
    fn parameters(&self, unit: usize) -> &[f32] {
        match self {
            Frozen::Whole(store) => store.parameters(unit),
            Frozen::Quantised(model) => model.parameters(unit),
        }
    }
}

impl Held {
    /// Of a rank that trains the whole model.
    pub fn whole(trained: Store) -> Held {
        Held {
            trained,
            frozen: None,
            saved: Vec::new(),
        }
    }

    /// Reserves memory for adapters and the frozen model below them, whose weights `initial` draws from the `seed`.
    pub fn adapted(
        config: &ModelConfig,
        (model, adapted): (&Layout, &Adapted),
        options: &CpuOptions,
        world: Option<World>,
        arena: &Arena,
        (initial, seed): (Draw<'_>, Option<u64>),
    ) -> Result<Held, EngineError> {
        // Adapters are small: every rank has all of them, whatever is sharded.
        let purpose = Purpose {
            strategy: Strategy::Replicated,
            ..options.purpose()
        };
        let draw = |_: &Unit, offset, out: &mut [f32]| {
            adapted.draw((model, config), seed, offset, out);
        };
        let trained = Store::new(
            &adapted.trained,
            false,
            purpose,
            world.clone(),
            arena,
            &draw,
        )?;
        let frozen = if adapted.settings.is_quantised {
            let is_nested = adapted.settings.is_nested;
            Frozen::Quantised(Box::new(Quantised::new(model, is_nested, arena, initial)?))
        } else {
            let purpose = Purpose {
                strategy: options.strategy,
                forward_only: true,
                ..Purpose::default()
            };
            let tied = config.tie_word_embeddings;
            let store = Store::new(model, tied, purpose, world, arena, initial)?;
            Frozen::Whole(Box::new(store))
        };
        Ok(Held {
            trained: match options.strategy {
                Strategy::Replicated => trained,
                Strategy::Sharded { .. } => trained.reducing_late(),
            },
            frozen: Some(frozen),
            saved: adapted.saved.clone(),
        })
    }

    /// Sets a unit of the frozen model, with which the modules of it begin that are trained whole.
    pub fn import_frozen(&mut self, unit: usize, parameters: &[f32]) {
        match &mut self.frozen {
            Some(Frozen::Whole(store)) => store.set(unit, 0, parameters),
            Some(Frozen::Quantised(model)) => model.import(unit, parameters),
            None => {}
        }
        for saved in self.saved.iter().filter(|saved| saved.unit == unit) {
            self.trained
                .set(0, saved.at, &parameters[saved.range.clone()]);
        }
    }

    /// Sets the state of a trained unit.
    pub fn import(&mut self, unit: usize, state: &UnitState) {
        self.trained.import(unit, state);
        self.copy_saved();
    }

    /// The optimiser step.
    pub fn update(&mut self, step: AdamW) {
        self.trained.update(step);
        self.copy_saved();
    }

    /// Copies the modules that are trained whole to the model, where walks read them.
    fn copy_saved(&mut self) {
        for saved in &self.saved {
            let values = &self.trained.parameters(0)[saved.trained()];
            match &mut self.frozen {
                Some(Frozen::Whole(store)) => store.set(saved.unit, saved.range.start, values),
                Some(Frozen::Quantised(model)) => model.set(saved.unit, saved.range.start, values),
                None => {}
            }
        }
    }

    /// See [`crate::engine::Engine::rejoin`].
    pub fn rejoin(&mut self, world: Option<World>) -> Result<(), EngineError> {
        if let Some(Frozen::Whole(frozen)) = &mut self.frozen {
            frozen.rejoin(world.clone())?;
        }
        self.trained.rejoin(world)
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
            Some(frozen) => frozen.parameters(unit),
        }
    }

    /// Parameters of a unit, empty unless it is acquired, and the place for their gradient unless they are frozen.
    pub fn gradient(
        &mut self,
        unit: usize,
        range: &Range<usize>,
    ) -> (&[f32], Option<Gradient<'_>>) {
        let (place, parameters) = match &self.frozen {
            None => {
                let (parameters, Gradient { values, add }) = self.trained.gradient(unit);
                let values = &mut values[range.clone()];
                let parameters = parameters.get(range.clone()).unwrap_or_default();
                return (parameters, Some(Gradient { values, add }));
            }
            Some(frozen) => {
                let mut places = self
                    .saved
                    .iter()
                    .filter_map(|saved| saved.place(unit, range));
                let parameters = frozen.parameters(unit).get(range.clone());
                (places.next(), parameters.unwrap_or_default())
            }
        };
        let gradient = place.map(|place| {
            let (_, Gradient { values, add }) = self.trained.gradient(0);
            let values = &mut values[place];
            Gradient { values, add }
        });
        (parameters, gradient)
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
