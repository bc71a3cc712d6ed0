//! The CPU engine: f32 on every core, with the processor's widest vectors.
//!
//! `backend` and `head` carry out the operations of a walk with the arithmetic of `cpu_kernels`,
//! `workspace` the activations, `store` the parameters and gradients, and `arena` counts their memory.

mod arena;
mod backend;
mod head;
mod store;
mod workspace;

use rayon::{ThreadPool, ThreadPoolBuilder};

use self::arena::Arena;
use self::store::Store;
use self::workspace::Workspace;
use super::{
    Accumulated, AdamW, Capacity, Engine, EngineError, Layout, Measure, MicroBatch, ModelConfig,
    Pass, Reduced, Strategy, Training, Unit, UnitState, Walk, initial, layout,
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
    config: ModelConfig,
    layout: Layout,
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
        let tied = config.tie_word_embeddings;
        let fill = |unit: &Unit, offset, out: &mut [f32]| {
            if let Some(seed) = seed {
                initial::fill(unit, &config, seed, offset, out);
            }
        };
        let held = (options.strategy, options.measure);
        let store = pool.install(|| Store::new(&layout, tied, held, world, &arena, &fill))?;
        Ok(CpuEngine {
            pool,
            arena,
            config,
            layout,
            store,
            workspace: None,
            activation_checkpointing: options.activation_checkpointing,
        })
    }

    /// Checks a micro-batch and reserves memory for it.
    fn admit(&mut self, micro_batch: MicroBatch<'_>) -> Result<(), EngineError> {
        micro_batch.check(&self.config)?;
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
        let (arena, config) = (&self.arena, &self.config);
        let checkpointing = self.activation_checkpointing;
        let workspace = self
            .pool
            .install(|| Workspace::new(arena, config, capacity, checkpointing))?;
        self.workspace = Some(workspace);
        Ok(())
    }

    /// Runs a micro-batch on this engine's threads with the workspace from [`CpuEngine::admit`].
    fn run(&mut self, pass: Pass, micro_batch: MicroBatch<'_>) -> Result<Accumulated, EngineError> {
        let walk = Walk {
            config: &self.config,
            layout: &self.layout,
        };
        let store = &mut self.store;
        let workspace = self
            .workspace
            .as_mut()
            .ok_or_else(|| EngineError::Shape("no memory was reserved".to_owned()))?;
        let run = || backend::run(walk, store, workspace, micro_batch, pass);
        self.pool.install(run)
    }
}

impl Engine for CpuEngine {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn reserve(&mut self, batch: usize, seq_len: usize) -> Result<(), EngineError> {
        let capacity = Capacity::new(&self.config, batch, seq_len)?;
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
        let targets = micro_batch.target_tokens();
        let training = self.store.next(measure, (targets, last))?;
        self.run(Pass::Training(training), micro_batch)
    }

    fn join(&mut self, _last: bool) -> Result<(), EngineError> {
        let pass = Pass::Training(Training::default());
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
        let result = self.run(Pass::Evaluation, micro_batch)?;
        Ok((result.loss, result.targets))
    }

    fn join_evaluation(&mut self) -> Result<(), EngineError> {
        self.pool.install(|| self.store.join(Pass::Evaluation))
    }

    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        self.layout.unit(unit)?;
        let mut state = self.store.export(unit, wanted)?;
        if let Some(state) = &mut state {
            self.layout.units[unit].state_to_files(state);
        }
        Ok(state)
    }

    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError> {
        self.layout.unit(unit)?.check_state(state)?;
        let state = self.layout.units[unit].state_from_files(state);
        self.store.import(unit, &state);
        Ok(())
    }

    fn memory(&self) -> (u64, u64) {
        (self.arena.used(), self.arena.peak())
    }
}

#[cfg(test)]
mod tests;
