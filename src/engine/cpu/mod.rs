//! The CPU engine: f32 on every core, with the processor's widest vectors.
//!
//! `backend` and `head` carry out the operations of a walk with the arithmetic of `cpu_kernels`,
//! `workspace` the activations, `store` the parameters and gradients, and `arena` counts their memory.

mod arena;
mod backend;
mod head;
mod held;
mod quantised;
mod store;
mod workspace;

use rayon::{ThreadPool, ThreadPoolBuilder};

use self::arena::{Arena, Buffer};
use self::backend::With;
use self::held::Held;
use self::store::{Purpose, Store};
use self::workspace::Workspace;
use super::adapters::{frozen_from_files, trained};
use super::{
    Accumulated, AdamW, Adapted, Adapters, BatchLoss, Capacity, Engine, EngineError, Layout,
    Measure, MicroBatch, ModelConfig, Pass, Place, Reduced, Sequence, Strategy, TokenLoss,
    Training, Unit, UnitState, Walk, Weigh, cache_len, initial, layout, no_sequence, trains,
};
use crate::comm::World;

/// Options of a [`CpuEngine`].
#[derive(Debug, Clone, PartialEq, Default)]
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
    /// Hold only weights, and the activations of one block: nothing is trained.
    pub forward_only: bool,
    pub token_loss: TokenLoss,
    /// Train only these; the model is frozen.
    pub adapters: Option<Adapters>,
    /// Add the gradients of micro-batches in fixed point, so that their sum has the same bits in every order: with
    /// micro-batches of one sample, in every world and strategy. It takes 8 more bytes a trained parameter of the rank.
    pub in_fixed_point: bool,
}

impl CpuOptions {
    fn purpose(&self) -> Purpose {
        Purpose {
            strategy: self.strategy,
            measure: self.measure,
            forward_only: self.forward_only,
            in_fixed_point: self.in_fixed_point,
        }
    }
}

/// Threads to compute with; `None`: as many as there are processors.
fn pool(threads: Option<usize>) -> Result<ThreadPool, EngineError> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads.unwrap_or(0))
        .thread_name(|index| format!("engine-{index}"));
    pool.build().map_err(|error| EngineError::Shape(format!("threads cannot be started: {error}; raise the limits of memory (`ulimit -v`) and of processes (`ulimit -u`, or those of the container)")))
}

/// A Llama on this machine's processors.
pub struct CpuEngine {
    pool: ThreadPool,
    arena: Arena,
    config: ModelConfig,
    layout: Layout,
    adapted: Option<Adapted>,
    store: Held,
    workspace: Option<Workspace>,
    sequence: Option<Sequence<Buffer>>,
    activation_checkpointing: bool,
    forward_only: bool,
    token_loss: TokenLoss,
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
        let pool = pool(options.threads)?;
        let arena = Arena::new(options.memory_limit);
        let layout = layout(&config);
        let tied = config.tie_word_embeddings;
        let fill = |unit: &Unit, offset, out: &mut [f32]| {
            if let Some(seed) = seed {
                initial::fill(unit, &config, seed, offset, out);
            }
        };
        let adapted = (options.adapters.clone()).map(|it| Adapted::new(&layout, it));
        let store = pool.install(|| match &adapted {
            None => {
                let purpose = options.purpose();
                let trained = Store::new(&layout, tied, purpose, world, &arena, &fill)?;
                Ok::<_, EngineError>(Held::whole(trained))
            }
            Some(adapted) => {
                let of = (&layout, adapted);
                Held::adapted(&config, of, &options, world, &arena, (&fill, seed))
            }
        })?;
        Ok(CpuEngine {
            pool,
            arena,
            config,
            layout,
            adapted,
            store,
            workspace: None,
            sequence: None,
            activation_checkpointing: options.activation_checkpointing,
            forward_only: options.forward_only,
            token_loss: options.token_loss,
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
        let adapters = self.adapted.as_ref().map(|adapted| &adapted.settings);
        let keeps = (self.activation_checkpointing, self.forward_only);
        let workspace = self
            .pool
            .install(|| Workspace::new(arena, config, capacity, keeps, adapters))?;
        self.workspace = Some(workspace);
        Ok(())
    }

    /// Runs a micro-batch on this engine's threads with the workspace from [`CpuEngine::admit`].
    fn run(
        &mut self,
        pass: Pass,
        micro_batch: MicroBatch<'_>,
        weigh: Option<Weigh<'_>>,
    ) -> Result<(Accumulated, Vec<f64>), EngineError> {
        let walk = Walk {
            config: &self.config,
            layout: &self.layout,
            adapted: self.adapted.as_ref(),
        };
        let store = &mut self.store;
        let workspace = self
            .workspace
            .as_mut()
            .ok_or_else(|| EngineError::Shape("no memory was reserved".to_owned()))?;
        let sequence = self.sequence.as_mut();
        let with = With {
            sequence,
            weigh,
            token_loss: self.token_loss,
        };
        let run = || backend::run(walk, store, workspace, micro_batch, pass, with);
        self.pool.install(run)
    }
}

impl Engine for CpuEngine {
    fn layout(&self) -> &Layout {
        trained(self.adapted.as_ref(), &self.layout)
    }

    fn frozen(&self) -> Option<&Layout> {
        self.adapted.as_ref().map(|_| &self.layout)
    }

    fn import_frozen(&mut self, unit: usize, parameters: &[f32]) -> Result<(), EngineError> {
        let adapted = self.adapted.as_ref();
        let parameters = frozen_from_files(adapted, &self.layout, unit, parameters)?;
        self.store.import_frozen(unit, &parameters);
        Ok(())
    }

    fn reserve(&mut self, batch: usize, seq_len: usize) -> Result<(), EngineError> {
        let capacity = Capacity::new(&self.config, batch, seq_len)?;
        match &self.workspace {
            Some(workspace) if workspace.capacity == capacity => Ok(()),
            _ => self.reserve_workspace(capacity),
        }
    }

    fn accumulate_loss(
        &mut self,
        micro_batch: MicroBatch<'_>,
        loss: BatchLoss<'_>,
        measure: Measure,
        last: bool,
    ) -> Result<Accumulated, EngineError> {
        trains(self.forward_only)?;
        self.admit(micro_batch)?;
        let (count, weigh) = loss.counted(micro_batch);
        let training = self.store.trained.next(measure, (count, last))?;
        Ok(self.run(Pass::Training(training), micro_batch, weigh)?.0)
    }

    fn join(&mut self, _last: bool) -> Result<(), EngineError> {
        let pass = Pass::Training(Training::default());
        self.pool.install(|| self.store.join(pass))
    }

    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError> {
        self.pool.install(|| self.store.trained.reduce(measure))
    }

    fn coordinates(&mut self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError> {
        self.store.trained.coordinates(show)
    }

    fn update(&mut self, step: AdamW) -> Result<(), EngineError> {
        self.pool.install(|| self.store.update(step));
        Ok(())
    }

    fn discard(&mut self) {
        self.store.discard();
    }

    fn rejoin(&mut self, place: Place) -> Result<(), EngineError> {
        self.store.rejoin(place.world)?;
        if self.pool.current_num_threads() != place.threads {
            self.pool = pool(Some(place.threads))?;
            // Each thread has a part of it.
            self.workspace = None;
        }
        Ok(())
    }

    fn evaluate(&mut self, micro_batch: MicroBatch<'_>) -> Result<(f64, u64), EngineError> {
        self.admit(micro_batch)?;
        let (result, _) = self.run(Pass::Evaluation, micro_batch, None)?;
        Ok((result.loss, result.targets))
    }

    fn losses(&mut self, micro_batch: MicroBatch<'_>) -> Result<Vec<f64>, EngineError> {
        self.admit(micro_batch)?;
        Ok(self.run(Pass::Evaluation, micro_batch, None)?.1)
    }

    fn join_evaluation(&mut self) -> Result<(), EngineError> {
        self.pool.install(|| self.store.join(Pass::Evaluation))
    }

    fn begin_sequence(&mut self, len: usize) -> Result<(), EngineError> {
        self.sequence = None;
        let elements = cache_len(&self.config, len)?;
        let caches = (0..self.config.num_hidden_layers)
            .map(|_| self.arena.buffer(elements, "keys and values"))
            .collect::<Result<_, _>>()?;
        let sequence = Sequence::new(caches, len);
        self.reserve_workspace(sequence.capacity())?;
        self.sequence = Some(sequence);
        Ok(())
    }

    fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let sequence = self.sequence.as_ref().ok_or_else(no_sequence)?;
        for micro_batch in sequence.parts(tokens)? {
            micro_batch.check(&self.config)?;
            self.run(Pass::Prediction, micro_batch, None)?;
        }
        let workspace = self.workspace.as_ref();
        let logits = workspace.map(|workspace| &workspace.shared.logits);
        Ok(logits.map_or(Vec::new(), |logits| {
            logits[..self.config.vocab_size].to_vec()
        }))
    }

    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        self.layout().unit(unit)?;
        trains(self.forward_only)?;
        let mut state = self.store.trained.export(unit, wanted)?;
        if let Some(state) = &mut state {
            self.layout().units[unit].state_to_files(state);
        }
        Ok(state)
    }

    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError> {
        let of = trained(self.adapted.as_ref(), &self.layout).unit(unit)?;
        of.check_state(state)?;
        self.store.import(unit, &of.state_from_files(state));
        Ok(())
    }

    fn memory(&self) -> (u64, u64) {
        (self.arena.used(), self.arena.peak())
    }
}

#[cfg(test)]
mod tests;
