//! The CPU engine: f32 on every core, with the processor's widest vectors.
//!
//! `model` walks the units, `block` and `head` compute one unit each, `kernels` holds the arithmetic,
//! `workspace` the activations, `store` the parameters and gradients, and `arena` counts their memory.

mod arena;
mod block;
mod head;
pub(super) mod kernels;
mod model;
mod store;
mod workspace;

use rayon::{ThreadPool, ThreadPoolBuilder};

use self::arena::Arena;
use self::model::Model;
use self::store::{Pass, Store};
use self::workspace::Workspace;
use super::{
    Accumulated, AdamW, Capacity, Engine, EngineError, Layout, Measure, MicroBatch, ModelConfig,
    Reduced, Strategy, Unit, UnitState, initial, layout,
};
use crate::comm::World;

/// Options of a [`CpuEngine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Number of threads; `None`: `RAYON_NUM_THREADS`, or one per core.
    pub threads: Option<usize>,
    /// Bytes that this rank may use; `None`: the machine's physical memory.
    pub memory_limit: Option<u64>,
    /// Store only the inputs of blocks and recompute their activations in backward.
    pub activation_checkpointing: bool,
    /// Distribution of the state over the ranks.
    pub strategy: Strategy,
    /// The measurements that any step may request. Their memory is reserved, and every step adds gradients in
    /// the order that they need, so that measuring changes no bit of the training.
    pub measure: Measure,
}

/// A Llama on this machine's processors.
pub struct CpuEngine {
    pool: ThreadPool,
    arena: Arena,
    model: Model,
    store: Store,
    workspace: Option<Workspace>,
    activation_checkpointing: bool,
}

impl CpuEngine {
    /// Reserves memory for the model and initialises its weights from the seed. Without a seed they are zero
    /// until an import. `world` is `None` where this process trains alone.
    pub fn new(
        config: ModelConfig,
        options: CpuOptions,
        world: Option<World>,
        seed: Option<u64>,
    ) -> Result<CpuEngine, EngineError> {
        config.validate()?;
        let pool = ThreadPoolBuilder::new()
            .num_threads(options.threads.unwrap_or(0))
            .thread_name(|index| format!("engine-{index}"))
            .build()
            .map_err(|error| EngineError::Shape(format!("threads cannot be started: {error}")))?;
        let arena = Arena::new(options.memory_limit);
        let layout = layout(&config);
        let sigma = config.initializer_range;
        let tied = config.tie_word_embeddings;
        let fill = |unit: &Unit, offset, out: &mut [f32]| {
            if let Some(seed) = seed {
                initial::fill(unit, sigma, seed, offset, out);
            }
        };
        let held = (options.strategy, options.measure);
        let store = pool.install(|| Store::new(&layout, tied, held, world, &arena, &fill))?;
        Ok(CpuEngine {
            pool,
            arena,
            model: Model { config, layout },
            store,
            workspace: None,
            activation_checkpointing: options.activation_checkpointing,
        })
    }

    /// Checks a micro-batch and reserves memory for it.
    fn admit(&mut self, micro_batch: MicroBatch<'_>) -> Result<(), EngineError> {
        micro_batch.check(&self.model.config)?;
        let reserved = self.workspace.as_ref().map(|workspace| workspace.capacity);
        match Capacity::of(micro_batch).beyond(reserved) {
            Some(capacity) => self.reserve_workspace(capacity),
            None => Ok(()),
        }
    }

    /// Replaces the workspace by one of exactly this size.
    fn reserve_workspace(&mut self, capacity: Capacity) -> Result<(), EngineError> {
        // The old workspace is dropped first, so that both never count together.
        self.workspace = None;
        let (arena, config) = (&self.arena, &self.model.config);
        let checkpointing = self.activation_checkpointing;
        let workspace = self
            .pool
            .install(|| Workspace::new(arena, config, capacity, checkpointing))?;
        self.workspace = Some(workspace);
        Ok(())
    }

    /// Runs `f` on this engine's threads with the workspace from [`CpuEngine::admit`].
    fn run<R: Send>(
        &mut self,
        f: impl FnOnce(&Model, &mut Store, &mut Workspace) -> R + Send,
    ) -> Result<R, EngineError> {
        let (model, store) = (&self.model, &mut self.store);
        let workspace = self
            .workspace
            .as_mut()
            .ok_or_else(|| EngineError::Shape("no memory was reserved".to_owned()))?;
        Ok(self.pool.install(|| f(model, store, workspace)))
    }
}

impl Engine for CpuEngine {
    fn layout(&self) -> &Layout {
        &self.model.layout
    }

    fn reserve(&mut self, batch: usize, seq_len: usize) -> Result<(), EngineError> {
        let capacity = Capacity::new(&self.model.config, batch, seq_len)?;
        match &self.workspace {
            Some(workspace) if workspace.capacity == capacity => Ok(()),
            _ => self.reserve_workspace(capacity),
        }
    }

    fn accumulate(
        &mut self,
        micro_batch: MicroBatch<'_>,
        measure: Measure,
        last: bool,
    ) -> Result<Accumulated, EngineError> {
        self.admit(micro_batch)?;
        self.run(|model, store, workspace| {
            model.train(store, workspace, micro_batch, (measure, last))
        })?
    }

    fn join(&mut self, last: bool) -> Result<(), EngineError> {
        let pass = Pass::Training {
            measure: Measure::default(),
            targets: 0,
            last,
        };
        self.pool.install(|| self.store.join(pass))
    }

    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError> {
        self.pool.install(|| self.store.reduce(measure))
    }

    fn coordinates(&mut self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError> {
        self.store.coordinates(show)
    }

    fn update(&mut self, step: AdamW) -> Result<(), EngineError> {
        self.pool.install(|| self.store.update(step));
        Ok(())
    }

    fn discard(&mut self) {
        self.store.discard();
    }

    fn evaluate(&mut self, micro_batch: MicroBatch<'_>) -> Result<(f64, u64), EngineError> {
        self.admit(micro_batch)?;
        self.run(|model, store, workspace| model.evaluate(store, workspace, micro_batch))?
    }

    fn join_evaluation(&mut self) -> Result<(), EngineError> {
        self.pool.install(|| self.store.join(Pass::Evaluation))
    }

    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        self.model.layout.unit(unit)?;
        self.store.export(unit, wanted)
    }

    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError> {
        self.model.layout.unit(unit)?.check_state(state)?;
        self.store.import(unit, state);
        Ok(())
    }

    fn memory(&self) -> (u64, u64) {
        (self.arena.used(), self.arena.peak())
    }
}

#[cfg(test)]
mod tests;
