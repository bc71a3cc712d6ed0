//! The CUDA engine: a model on one GPU, behind [`Engine`].

use std::collections::HashMap;
use std::sync::Arc;

use cpu_kernels::{adamw::Factors, rope};
use half::bf16;

use super::arena::{Bump, Slab, bytes_of};
use super::backend::{CudaBackend, Streams, Weighing};
use super::compiler::Compiler;
use super::cublaslt::Blas;
use super::driver::{Device, Event, Graph, Pinned};
use super::error::CudaError;
use super::kernels::attention::MOST_HEAD_DIM;
use super::launches::Kernels;
use super::measured::Measured;
use super::options::{CudaOptions, Precision};
use super::peers::Peers;
use super::sharded::{Events, Shards};
use super::staging::Staging;
use super::state::{FACTORS, Held, Share, UnitAddresses, vectors};
use super::workspace::{Scalars, Shape, Workspace};
use crate::comm::World;
use crate::engine::adapters::{frozen_from_files, trained};
use crate::engine::{
    Accumulated, AdamW, Adapted, BatchLoss, Capacity, Engine, EngineError, Keeps, Layout, Measure,
    MicroBatch, ModelConfig, Pass, Place, Reduced, Sequence, Step, Strategy, Unit, UnitState, Walk,
    Weigh, cache_len, initial, layout, nf4, no_sequence, no_worker_gradient, not_whole, part,
    trains,
};

/// Graphs that are kept; a run has a few shapes of micro-batches.
const MOST_GRAPHS: usize = 32;

/// A model on one GPU.
pub struct CudaEngine {
    config: ModelConfig,
    layout: Layout,
    adapted: Option<Adapted>,
    options: CudaOptions,
    /// Passes that have run; `None` until their second run is captured.
    graphs: HashMap<(Pass, Shape), Option<Graph>>,
    kernels: Kernels,
    blas: Blas,
    streams: Streams,
    state: Slab<Held>,
    reserved: Option<Reserved>,
    sequence: Option<Slab<Sequence<u64>>>,
    /// `None` where this process trains alone.
    peers: Option<Peers>,
    /// `None` if every rank holds the whole model.
    sharding: Option<Events>,
    staging: Staging,
    factors: Pinned,
    results: Pinned,
    step: Step,
    /// ‖this rank's gradient of the step‖², once its last micro-batch has run.
    squared_norm: Option<f64>,
    /// Bytes of device memory that the engine may use.
    limit: u64,
    peak: u64,
    device: Arc<Device>,
}

struct Reserved {
    capacity: Capacity,
    slab: Slab<Workspace>,
    /// Pinned memory from which [`Workspace::inputs`] are sent.
    inputs: Pinned,
    /// For the losses of the tokens and their factors, once losses are weighed.
    weighing: Option<Pinned>,
}

impl CudaEngine {
    /// Allocates the model's state and initialises its weights from the seed. Without a seed they are zero
    /// until an import. `world` is `None` where this process trains alone.
    pub fn new(
        config: ModelConfig,
        options: CudaOptions,
        device: &Arc<Device>,
        world: Option<World>,
        seed: Option<u64>,
    ) -> Result<CudaEngine, EngineError> {
        config.validate()?;
        supported(&config)?;
        let limit = options.memory_limit.unwrap_or(device.total_memory);
        let created = CudaEngine::create(config, options, device, world.as_ref(), limit);
        let mut engine = created.map_err(|error| descends(error, 0, limit))?;
        // Memory that is short here may be that of a process that is about to end, so the rank may try again.
        engine.peers = world
            .map(|world| Peers::join(device, world, engine.options.activity.clone()))
            .transpose()?;
        let used = engine.used();
        let initialised = engine.initialise(seed);
        initialised.map_err(|error| descends(error, used, limit))?;
        Ok(engine)
    }

    fn create(
        config: ModelConfig,
        options: CudaOptions,
        device: &Arc<Device>,
        world: Option<&World>,
        limit: u64,
    ) -> Result<CudaEngine, EngineError> {
        let layout = layout(&config);
        let adapted = (options.adapters.clone()).map(|it| Adapted::new(&layout, it));
        let tied = config.tie_word_embeddings;
        let precision = options.precision;
        let share = share(options.strategy, world);
        let place = |bump: &mut _| {
            let layouts = (&layout, adapted.as_ref());
            Held::place(bump, layouts, tied, &options, share)
        };
        within(0, bytes_of(place), limit, "weights and optimiser states")?;
        let compiler = Compiler::new(options.kernel_cache.clone());
        let kernels = Kernels::load(device, &compiler, &config, precision, options.token_loss)?;
        let events = || -> Result<Vec<Event>, CudaError> {
            let units = &trained(adapted.as_ref(), &layout).units;
            units.iter().map(|_| device.event()).collect()
        };
        let streams = Streams {
            compute: device.stream()?,
            side: device.stream()?,
            complete: events()?,
            added: events()?,
        };
        let state = Slab::allocate(device, "weights and optimiser states", place)?;
        Ok(CudaEngine {
            graphs: HashMap::new(),
            kernels,
            blas: match &options.products {
                Some(files) => Blas::new(device)?
                    .measuring(Measured::read(files.clone(), Measured::LEAST_FLOPS)),
                None => Blas::new(device)?,
            },
            streams,
            peak: state.bytes(),
            sharding: (state.at.model().share.is_sharded())
                .then(|| Events::new(device, layout.units.len()))
                .transpose()?,
            state,
            reserved: None,
            sequence: None,
            peers: None,
            staging: Staging::new(device)?,
            factors: device.pinned(2 * FACTORS, "factors")?,
            results: device.pinned(Scalars::BYTES, "results")?,
            step: Step::default(),
            squared_norm: None,
            limit,
            device: device.clone(),
            config,
            layout,
            adapted,
            options,
        })
    }

    /// Weights from the seeds, and optimiser states of zero.
    fn initialise(&mut self, seed: Option<u64>) -> Result<(), EngineError> {
        let (held, config) = (&self.state.at, &self.config);
        let on = (&self.streams.compute, &self.kernels);
        if let Some(quantised) = &held.model().quantised {
            let table = bytemuck::cast_slice(&nf4::CODE);
            self.staging.upload(on.0, quantised.table, table)?;
            let numbers = nf4::numbers();
            let numbers = bytemuck::cast_slice(&numbers);
            self.staging.upload(on.0, quantised.numbers, numbers)?;
        }
        let adapted = self.adapted.as_ref();
        let of_model = &self.layout;
        let below = (held.frozen.iter()).map(|frozen| (frozen, of_model, None));
        let all = below.chain([(&held.trained, trained(adapted, of_model), adapted)]);
        for (state, layout, adapted) in all {
            for (index, unit) in layout.units.iter().enumerate() {
                let values = |offset, out: &mut [f32]| match (adapted, seed) {
                    (Some(adapted), _) => adapted.draw((of_model, config), seed, offset, out),
                    (None, Some(seed)) => initial::fill(unit, config, seed, offset, out),
                    (None, None) => {}
                };
                self.staging.write(on, state, (index, unit), &values)?;
                let bytes = state.share.held(unit.len) * size_of::<f32>();
                let moments = [state.units[index].exp_avg, state.units[index].exp_avg_sq];
                for moment in moments.into_iter().filter(|_| state.holds.trains()) {
                    // SAFETY: the moments have the length of the rank's part.
                    unsafe { on.0.fill_zero(moment, bytes)? };
                }
            }
        }
        Ok(on.0.synchronize()?)
    }

    /// Sets the weights of a unit: of the frozen model, or of what is trained.
    fn set_weights(
        &mut self,
        unit: usize,
        is_frozen: bool,
        parameters: &[f32],
    ) -> Result<(), EngineError> {
        if let (Some(peers), Some(_)) = (&self.peers, &self.sharding) {
            // A joined walk may still gather the weights.
            peers.synchronize()?;
        }
        let held = &self.state.at;
        let (state, layout) = match held.frozen.as_ref().filter(|_| is_frozen) {
            Some(frozen) => (frozen, &self.layout),
            None => (&held.trained, trained(self.adapted.as_ref(), &self.layout)),
        };
        let values = |offset: usize, out: &mut [f32]| {
            out.copy_from_slice(&parameters[offset..offset + out.len()]);
        };
        let on = (&self.streams.compute, &self.kernels);
        let of = (unit, &layout.units[unit]);
        Ok(self.staging.write(on, state, of, &values)?)
    }

    /// Sets the modules of a unit of the model that are trained whole.
    fn set_saved(&mut self, unit: usize, parameters: &[f32]) -> Result<(), EngineError> {
        let compute = &self.streams.compute;
        let addresses = &self.state.at.trained.units[0];
        let saved = self.adapted.iter().flat_map(|adapted| &adapted.saved);
        for saved in saved.filter(|saved| saved.unit == unit) {
            let values = bytemuck::cast_slice(&parameters[saved.range.clone()]);
            let to = addresses.weights + (saved.at * size_of::<f32>()) as u64;
            self.staging.upload(compute, to, values)?;
            if let Some(copy) = addresses.copy {
                let copy = copy + (saved.at * self.options.precision.size()) as u64;
                self.kernels.cast(compute, copy, to, saved.range.len())?;
            }
        }
        Ok(())
    }

    /// Copies the modules that are trained whole to the model, where walks read them.
    fn copy_saved(&self) -> Result<(), EngineError> {
        let (trained, Some(frozen)) = (&self.state.at.trained.units[0], &self.state.at.frozen)
        else {
            return Ok(());
        };
        let precision = self.options.precision;
        let copy = |(to, from): (u64, u64), starts: [usize; 2], len: usize, size: usize| {
            let [to, from] = [(to, starts[0]), (from, starts[1])]
                .map(|(address, start)| address + (start * size) as u64);
            // SAFETY: both are ranges of the state.
            unsafe { self.streams.compute.copy(to, from, len * size) }
        };
        for saved in self.adapted.iter().flat_map(|adapted| &adapted.saved) {
            let (at, unit) = (&frozen.units[saved.unit], &self.layout.units[saved.unit]);
            let part = frozen.share.part(unit.len);
            let held = saved.range.start.max(part.start)..saved.range.end.min(part.end);
            if !held.is_empty() {
                let starts = [
                    held.start - part.start,
                    saved.at + held.start - saved.range.start,
                ];
                if at.has_master {
                    copy(
                        (at.weights, trained.weights),
                        starts,
                        held.len(),
                        size_of::<f32>(),
                    )?;
                }
                if let (Some(to), Some(from)) = (at.copy, trained.copy) {
                    copy((to, from), starts, held.len(), precision.size())?;
                }
            }
            // Whole on every rank, also of a sharded model.
            for (vector, address) in vectors(unit).zip(at.vectors) {
                if let Some(place) = saved.place(saved.unit, &vector) {
                    let starts = [0, place.start];
                    copy(
                        (address, trained.weights),
                        starts,
                        place.len(),
                        size_of::<f32>(),
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Copies f32 from the device.
    fn download(&mut self, from: u64, elements: usize) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0f32; elements];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.staging.download(&self.streams.compute, from, bytes)?;
        Ok(values)
    }

    /// Checks a micro-batch and reserves memory for it.
    fn admit(&mut self, micro_batch: MicroBatch<'_>) -> Result<Shape, EngineError> {
        micro_batch.check(&self.config)?;
        if !micro_batch.noise.is_empty() && !self.options.noisy {
            return Err(EngineError::Shape(
                "the engine has no memory for noise on the embeddings; create it with `noisy`"
                    .to_owned(),
            ));
        }
        if !micro_batch.starts.is_empty() && !self.options.packed {
            return Err(EngineError::Shape(
                "the engine has no memory for packed rows; create it with `packed`".to_owned(),
            ));
        }
        let shape = Shape::of(micro_batch);
        let reserved = self.reserved.as_ref().map(|reserved| reserved.capacity);
        if let Some(capacity) = Capacity::of(micro_batch).beyond(reserved) {
            self.reserve_workspace(capacity)?;
        }
        Ok(shape)
    }

    /// Replaces the workspace by one of exactly this size.
    fn reserve_workspace(&mut self, capacity: Capacity) -> Result<(), EngineError> {
        if i32::try_from(capacity.tokens).is_err() {
            return Err(EngineError::Shape(format!(
                "a micro-batch of {} tokens is larger than {}",
                capacity.tokens,
                i32::MAX
            )));
        }
        // The old workspace is freed first, so that both never exist together; its graphs name its addresses.
        self.graphs.clear();
        self.reserved = None;
        let what = format!("activations of {} tokens", capacity.tokens);
        let place = |bump: &mut _| Workspace::place(bump, &self.config, capacity, &self.options);
        within(self.state.bytes(), bytes_of(place), self.limit, &what)?;
        let slab = Slab::allocate(&self.device, &what, place)?;
        let mut table = vec![0.0; capacity.seq_len * self.config.rotary_dim()];
        rope::fill_table(&mut table, &self.config.frequencies());
        let bytes = bytemuck::cast_slice(&table);
        let compute = &self.streams.compute;
        self.staging.upload(compute, slab.at.rope, bytes)?;
        let mut inputs = self.device.pinned(slab.at.inputs.bytes, "micro-batches")?;
        inputs.bytes_mut().fill(0);
        self.reserved = Some(Reserved {
            capacity,
            slab,
            inputs,
            weighing: None,
        });
        self.peak = self.peak.max(self.used());
        Ok(())
    }

    /// Sends a micro-batch to the device, runs the pass and returns its results.
    fn run(
        &mut self,
        pass: Pass,
        micro_batch: MicroBatch<'_>,
        weigh: Option<Weigh<'_>>,
    ) -> Result<Scalars, EngineError> {
        let shape = self.admit(micro_batch)?;
        let scalars = self.run_admitted(pass, shape, micro_batch, weigh);
        if scalars.is_err() {
            // A part of the pass may be enqueued, and the next one changes its inputs.
            self.settle();
        }
        scalars
    }

    /// Waits for both streams, whatever their work gives.
    fn settle(&self) {
        for stream in [&self.streams.compute, &self.streams.side] {
            let _ = stream.synchronize();
        }
    }

    fn run_admitted(
        &mut self,
        pass: Pass,
        shape: Shape,
        micro_batch: MicroBatch<'_>,
        weigh: Option<Weigh<'_>>,
    ) -> Result<Scalars, EngineError> {
        let reserved = self.reserved.as_mut().ok_or_else(nothing_reserved)?;
        let (inputs, scalars) = (reserved.slab.at.inputs, reserved.slab.at.scalars);
        let (bytes, unmoved) = (reserved.inputs.bytes_mut(), self.config.padding_token());
        inputs.fill(
            bytes,
            micro_batch,
            [self.step.latest, self.step.targets],
            unmoved,
        );
        // SAFETY: the pinned memory has the size of the inputs, and changes only after the next
        // synchronisation.
        unsafe {
            let compute = &self.streams.compute;
            compute.upload(inputs.tokens, &reserved.inputs, 0..inputs.bytes)?;
        }
        // Graphs of collectives could not be aborted one by one.
        let last = pass.training().is_some_and(|training| training.last);
        let collective = self.sharding.is_some() || last && self.peers.is_some();
        // Each token of a sequence would need another graph.
        if let Some(weigh) = weigh {
            self.walk_weighing(pass, shape, weigh)?;
        } else if self.options.no_graphs || collective || pass == Pass::Prediction {
            self.walk(pass, shape, None)?;
        } else {
            let graph = match self.graphs.remove(&(pass, shape)) {
                // The first launch of a kernel may load its code, which a capture may refuse.
                None => {
                    self.walk(pass, shape, None)?;
                    None
                }
                Some(graph) => {
                    let graph = graph.map_or_else(|| self.capture(pass, shape), Ok)?;
                    self.streams.compute.launch_graph(&graph)?;
                    Some(graph)
                }
            };
            if self.graphs.len() >= MOST_GRAPHS {
                self.graphs.clear();
            }
            self.graphs.insert((pass, shape), graph);
        }
        let compute = &self.streams.compute;
        // SAFETY: the scalars have these bytes; the host reads them after the copy.
        unsafe {
            compute.download(&mut self.results, 0, scalars, Scalars::BYTES)?;
        }
        match &self.peers {
            // The walk has waited for gathered weights, and a rank may be lost.
            Some(peers) if self.sharding.is_some() => peers.synchronize_with(compute)?,
            _ => compute.synchronize()?,
        }
        Ok(Scalars::from_bytes(self.results.bytes()))
    }

    fn capture(&self, pass: Pass, shape: Shape) -> Result<Graph, EngineError> {
        self.streams.compute.begin_capture()?;
        let walked = self.walk(pass, shape, None);
        // A failed capture is ended too, so that the stream is usable again.
        let graph = self.streams.compute.end_capture();
        walked?;
        Ok(graph?)
    }

    /// A walk that stops between forward and backward, where the host weighs the losses: no graph.
    fn walk_weighing(
        &mut self,
        pass: Pass,
        shape: Shape,
        weigh: Weigh<'_>,
    ) -> Result<(), EngineError> {
        let reserved = self.reserved.as_mut().ok_or_else(nothing_reserved)?;
        let bytes = reserved.capacity.tokens * (size_of::<f64>() + size_of::<f32>());
        let mut host = match reserved.weighing.take() {
            Some(host) => host,
            None => self.device.pinned(bytes, "the losses of tokens")?,
        };
        let weighing = Weighing {
            weigh,
            host: &mut host,
        };
        let walked = self.walk(pass, shape, Some(weighing));
        // After an error the factors may still be on their way: `run` waits for them.
        if let Some(reserved) = &mut self.reserved {
            reserved.weighing = Some(host);
        }
        walked
    }

    fn walk(
        &self,
        pass: Pass,
        shape: Shape,
        weighing: Option<Weighing<'_>>,
    ) -> Result<(), EngineError> {
        let mut backend = CudaBackend {
            walk: Walk {
                config: &self.config,
                layout: &self.layout,
                adapted: self.adapted.as_ref(),
            },
            pass,
            precision: self.options.precision,
            kernels: &self.kernels,
            blas: &self.blas,
            streams: &self.streams,
            held: &self.state.at,
            work: self.work()?,
            peers: self.peers.as_ref(),
            shards: self.shards(),
            shape,
            sequence: (self.sequence.as_ref())
                .filter(|_| pass == Pass::Prediction)
                .map(|sequence| &sequence.at),
            weighing,
        };
        Ok(backend.run()?)
    }

    /// The first row of [`Workspace::logits`], which a prediction has computed.
    fn logits(&mut self) -> Result<Vec<f32>, EngineError> {
        let (at, elements) = (self.work()?.logits, self.config.vocab_size);
        match self.options.precision {
            Precision::F32 => self.download(at, elements),
            Precision::Bf16 => {
                let mut logits = vec![bf16::ZERO; elements];
                let bytes = bytemuck::cast_slice_mut(&mut logits);
                self.staging.download(&self.streams.compute, at, bytes)?;
                Ok(logits.into_iter().map(bf16::to_f32).collect())
            }
        }
    }

    /// The sharded model; `None` if every rank holds all of it.
    fn shards(&self) -> Option<Shards<'_>> {
        let state = self.state.at.model();
        Some(Shards {
            layout: &self.layout,
            kernels: &self.kernels,
            compute: &self.streams.compute,
            state,
            places: state.places.as_ref()?,
            events: self.sharding.as_ref()?,
            peers: self.peers.as_ref()?,
        })
    }

    /// The same if its shards are trained.
    fn sharded_training(&self) -> Option<Shards<'_>> {
        self.shards().filter(|shards| shards.state.holds.trains())
    }

    fn work(&self) -> Result<&Workspace, EngineError> {
        let reserved = self.reserved.as_ref().ok_or_else(nothing_reserved)?;
        Ok(&reserved.slab.at)
    }

    /// Device memory that the engine holds, in bytes.
    fn used(&self) -> u64 {
        let reserved = self.reserved.as_ref().map(|reserved| reserved.slab.bytes());
        let sequence = self.sequence.as_ref().map(Slab::bytes);
        self.state.bytes() + reserved.unwrap_or(0) + sequence.unwrap_or(0)
    }

    /// Runs `work`; its errors become those of every engine.
    fn checked<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        work(self).map_err(|error| match (&self.peers, error) {
            (Some(peers), EngineError::Cuda(error)) if error.is_of_nccl() => peers.named(error),
            (_, error) => descends(error, self.used(), self.limit),
        })
    }

    /// ‖the step's gradient‖², computed apart from a micro-batch.
    fn measure_step(&mut self) -> Result<f64, EngineError> {
        let work = self.work()?;
        let (norm, partials) = (work.scalars, work.square_partials[0]);
        let compute = &self.streams.compute;
        // SAFETY: the scalars have these bytes.
        unsafe { compute.fill_zero(norm, Scalars::BYTES)? };
        for (addresses, unit) in self.trained_units() {
            let result = (norm, partials);
            self.kernels
                .squared_norm(compute, result, addresses.gradient, unit.len)?;
        }
        self.download_f64(norm)
    }

    /// Finishes the sum of the step's gradient over the ranks, which the last micro-batch has `started` unless
    /// this rank had none. Returns the address of ‖the sum‖².
    fn reduce_over_ranks(
        &self,
        peers: &Peers,
        started: bool,
        measure: Measure,
    ) -> Result<u64, EngineError> {
        let work = self.work()?;
        let (norm, partials) = (work.reduced_norm, work.square_partials[2]);
        if !started {
            self.streams.compute.synchronize()?;
            // SAFETY: the norm is an f64.
            unsafe { peers.stream.fill_zero(norm, size_of::<f64>())? };
            // In the order in which backward completes the units, as on every other rank.
            for (addresses, unit) in self.trained_units().rev() {
                let gradient = addresses.gradient;
                peers.all_reduce(gradient, unit.len)?;
                let result = (norm, partials);
                self.kernels
                    .squared_norm(&peers.stream, result, gradient, unit.len)?;
            }
        }
        if measure.coordinates {
            for (squares, elements) in self.state.at.trained.squares(self.layout()) {
                peers.all_reduce(squares, elements)?;
            }
        }
        Ok(norm)
    }

    /// What is trained, with where it is.
    fn trained_units(&self) -> impl DoubleEndedIterator<Item = (&UnitAddresses, &Unit)> {
        self.state.at.trained.units.iter().zip(&self.layout().units)
    }

    /// Copies an f64 from the device.
    fn download_f64(&mut self, from: u64) -> Result<f64, EngineError> {
        let compute = &self.streams.compute;
        // SAFETY: the source is an f64; the host reads it after the copy.
        unsafe { compute.download(&mut self.results, 0, from, size_of::<f64>())? };
        compute.synchronize()?;
        let bytes = &self.results.bytes()[..size_of::<f64>()];
        Ok(bytemuck::pod_read_unaligned(bytes))
    }

    /// Sets what no micro-batch has written in this step to zero: the gradient, and the coordinate sums.
    fn zero_gradient(&mut self) -> Result<(), EngineError> {
        let trained = &self.state.at.trained;
        for (addresses, unit) in self.trained_units() {
            let elements = match (trained.scatters(), self.step.walks) {
                (false, _) => unit.len,
                (true, 0) => trained.share.held(unit.len),
                // The shards hold the other ranks' gradient.
                (true, _) => continue,
            };
            let bytes = elements * size_of::<f32>();
            // SAFETY: the buffer has at least these bytes.
            unsafe { self.streams.compute.fill_zero(addresses.gradient, bytes)? };
        }
        self.zero_squares()
    }

    /// Sets the coordinate sums to zero.
    fn zero_squares(&mut self) -> Result<(), EngineError> {
        for (squares, elements) in self.state.at.trained.squares(self.layout()) {
            let bytes = elements * size_of::<f32>();
            // SAFETY: the buffer has as many elements.
            unsafe { self.streams.compute.fill_zero(squares, bytes)? };
        }
        Ok(())
    }

    fn update_on_device(&mut self, step: &AdamW) -> Result<(), EngineError> {
        let compute = &self.streams.compute;
        compute.synchronize()?;
        let both = [false, true].map(|decay| Factors::new(step, decay).values());
        let bytes = self.factors.bytes_mut();
        bytes[..2 * FACTORS].copy_from_slice(bytemuck::cast_slice(both.as_flattened()));
        let trained = &self.state.at.trained;
        let factors = trained.factors;
        for (at, address) in factors.into_iter().enumerate() {
            // SAFETY: the device has as many bytes for each, and the host changes them only after the next
            // synchronisation.
            unsafe { compute.upload(address, &self.factors, at * FACTORS..(at + 1) * FACTORS)? };
        }
        for (index, unit) in self.layout().units.iter().enumerate() {
            let addresses = trained.part(index, unit.len);
            let part = trained.share.part(unit.len);
            for (range, decay) in unit.decay_ranges(part) {
                let factors = factors[usize::from(decay)];
                self.kernels.adamw(compute, &addresses, range, factors)?;
            }
        }
        self.copy_saved()
    }

    fn clear(&mut self) {
        self.step = Step::default();
        self.squared_norm = None;
    }
}

impl Engine for CudaEngine {
    fn layout(&self) -> &Layout {
        trained(self.adapted.as_ref(), &self.layout)
    }

    fn frozen(&self) -> Option<&Layout> {
        self.adapted.as_ref().map(|_| &self.layout)
    }

    fn import_frozen(&mut self, unit: usize, parameters: &[f32]) -> Result<(), EngineError> {
        let adapted = self.adapted.as_ref();
        let parameters = frozen_from_files(adapted, &self.layout, unit, parameters)?;
        self.checked(|engine| {
            engine.set_weights(unit, true, &parameters)?;
            engine.set_saved(unit, &parameters)
        })
    }

    fn reserve(&mut self, batch: usize, seq_len: usize) -> Result<(), EngineError> {
        let capacity = Capacity::new(&self.config, batch, seq_len)?;
        match &self.reserved {
            Some(reserved) if reserved.capacity == capacity => Ok(()),
            _ => self.checked(|engine| engine.reserve_workspace(capacity)),
        }
    }

    fn accumulate_loss(
        &mut self,
        micro_batch: MicroBatch<'_>,
        loss: BatchLoss<'_>,
        measure: Measure,
        last: bool,
    ) -> Result<Accumulated, EngineError> {
        trains(self.options.forward_only)?;
        let (count, weigh) = loss.counted(micro_batch);
        let scatters = self.state.at.trained.scatters();
        let keeps = Keeps {
            in_fixed_point: false,
            whole: !scatters,
            measure: self.options.measure,
        };
        let training = self.step.begin(keeps, measure, (count, last))?;
        let pass = Pass::Training(training);
        let scalars = self.checked(|engine| engine.run(pass, micro_batch, weigh))?;
        self.step.end();
        let own = if last && !training.apart {
            scalars.whole
        } else {
            scalars.own
        };
        self.squared_norm = if scatters {
            training.measured.then_some(own)
        } else {
            last.then_some(scalars.whole)
        };
        Ok(Accumulated {
            loss: scalars.loss,
            targets: micro_batch.target_tokens(),
            squared_norm: measure.micro_batches.then_some(own),
        })
    }

    /// A rank without micro-batches takes part in the gathers and reductions of a sharded model. If every rank
    /// holds everything, it adds its zeros in `reduce`.
    fn join(&mut self, _last: bool) -> Result<(), EngineError> {
        self.checked(|engine| {
            if engine.state.at.trained.scatters() && engine.step.walks == 0 {
                // Later micro-batches of the step add to the sums.
                engine.zero_squares()?;
            }
            if let Some(shards) = engine.shards() {
                shards.join(engine.step.walks == 0)?;
            }
            engine.step.join();
            Ok(())
        })
    }

    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError> {
        self.checked(|engine| {
            if engine.step.accumulated == 0 {
                engine.zero_gradient()?;
            }
            let started = engine.squared_norm;
            let local = match engine.step.accumulated {
                0 => Some(0.0),
                // The gradients of several micro-batches were never whole together.
                micro_batches if engine.state.at.trained.scatters() => {
                    started.filter(|_| micro_batches == 1)
                }
                _ if started.is_none() => Some(engine.measure_step()?),
                _ => started,
            };
            if measure.worker && local.is_none() {
                return Err(no_worker_gradient());
            }
            let mut squared_norm = local.unwrap_or(0.0);
            if let Some(peers) = &engine.peers {
                // A collective in the last micro-batch would come between gathers of other ranks.
                let is_started = started.is_some() && engine.sharding.is_none();
                let norm = match engine.sharded_training() {
                    Some(shards) => shards.reduce(measure.coordinates)?,
                    None => engine.reduce_over_ranks(peers, is_started, measure)?,
                };
                peers.synchronize()?;
                squared_norm = engine.download_f64(norm)?;
            }
            if let Some(shards) = engine.sharded_training() {
                squared_norm = shards.peers.sum(squared_norm)?;
            }
            Ok(Reduced {
                squared_norm,
                local_squared_norm: local.filter(|_| measure.worker),
            })
        })
    }

    fn coordinates(&mut self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError> {
        for unit in 0..self.layout().units.len() {
            let len = self.layout().units[unit].len;
            let addresses = self.state.at.trained.part(unit, len);
            let squares = addresses.squares.ok_or_else(|| {
                EngineError::Shape("the engine has no memory for coordinates".to_owned())
            })?;
            let part = match &self.peers {
                Some(peers) => part(len, peers.world().rank(), peers.world().world()),
                None => 0..len,
            };
            let at = |buffer: u64| buffer + (part.start * size_of::<f32>()) as u64;
            let gradient = if self.state.at.trained.share.is_sharded() {
                addresses.gradient
            } else {
                at(addresses.gradient)
            };
            let (weighted, summed) = self.checked(|engine| {
                let weighted = engine.download(at(squares), part.len())?;
                Ok((weighted, engine.download(gradient, part.len())?))
            })?;
            show(&weighted, &summed);
        }
        Ok(())
    }

    fn update(&mut self, step: AdamW) -> Result<(), EngineError> {
        self.checked(|engine| engine.update_on_device(&step))?;
        self.clear();
        Ok(())
    }

    fn discard(&mut self) {
        // The next step must not change a gradient that is still being added over the ranks. A lost rank ends
        // the run elsewhere.
        if let Some(peers) = &self.peers {
            let _ = peers.synchronize();
        }
        self.clear();
    }

    fn rejoin(&mut self, place: Place) -> Result<(), EngineError> {
        if self.sharding.is_some() {
            return Err(not_whole());
        }
        self.clear();
        // Ends what the old world's ranks do together on the device.
        self.peers = None;
        self.settle();
        self.options.activity = place.activity;
        let join = |world| Peers::join(&self.device, world, self.options.activity.clone());
        self.peers = place.world.map(join).transpose()?;
        Ok(())
    }

    fn evaluate(&mut self, micro_batch: MicroBatch<'_>) -> Result<(f64, u64), EngineError> {
        let pass = Pass::Evaluation;
        let scalars = self.checked(|engine| engine.run(pass, micro_batch, None))?;
        Ok((scalars.loss, micro_batch.target_tokens()))
    }

    fn losses(&mut self, micro_batch: MicroBatch<'_>) -> Result<Vec<f64>, EngineError> {
        let mut losses = vec![0.0; micro_batch.tokens.len()];
        self.checked(|engine| {
            engine.run(Pass::Evaluation, micro_batch, None)?;
            let from = engine.work()?.losses;
            let bytes = bytemuck::cast_slice_mut(&mut losses);
            Ok(engine
                .staging
                .download(&engine.streams.compute, from, bytes)?)
        })?;
        Ok(losses)
    }

    fn join_evaluation(&mut self) -> Result<(), EngineError> {
        self.checked(|engine| {
            if let Some(shards) = engine.shards() {
                shards.join_evaluation()?;
            }
            Ok(())
        })
    }

    fn begin_sequence(&mut self, len: usize) -> Result<(), EngineError> {
        self.sequence = None;
        let elements = cache_len(&self.config, len)?;
        let (layers, size) = (self.config.num_hidden_layers, self.options.precision.size());
        let place = |bump: &mut Bump| {
            let caches = (0..layers).map(|_| bump.take(elements, size));
            Sequence::new(caches.collect(), len)
        };
        let what = format!("keys and values of {len} tokens");
        self.checked(|engine| {
            within(engine.used(), bytes_of(place), engine.limit, &what)?;
            let sequence = Slab::allocate(&engine.device, &what, place)?;
            engine.reserve_workspace(sequence.at.capacity())?;
            engine.sequence = Some(sequence);
            Ok(())
        })
    }

    fn append(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let sequence = self.sequence.as_ref().ok_or_else(no_sequence)?;
        for micro_batch in sequence.at.parts(tokens)? {
            self.checked(|engine| engine.run(Pass::Prediction, micro_batch, None))?;
            if let Some(sequence) = &mut self.sequence {
                sequence.at.past += micro_batch.tokens.len();
            }
        }
        self.checked(|engine| engine.logits())
    }

    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        let len = self.layout().unit(unit)?.len;
        trains(self.options.forward_only)?;
        let addresses = self.state.at.trained.units[unit];
        let mut vector = |part: u64| {
            self.checked(|engine| {
                let mut whole = part;
                if let Some(shards) = engine.sharded_training() {
                    whole = shards.gather_vector(unit, part)?;
                    shards.peers.synchronize()?;
                }
                let elements = if wanted { len } else { 0 };
                engine.download(whole, elements)
            })
        };
        let mut state = UnitState {
            parameters: vector(addresses.weights)?,
            exp_avg: vector(addresses.exp_avg)?,
            exp_avg_sq: vector(addresses.exp_avg_sq)?,
        };
        if wanted {
            self.layout().units[unit].state_to_files(&mut state);
        }
        Ok(wanted.then_some(state))
    }

    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError> {
        let of = self.layout().unit(unit)?;
        of.check_state(state)?;
        let state = of.state_from_files(state);
        self.checked(|engine| {
            engine.set_weights(unit, false, &state.parameters)?;
            let trained = &engine.state.at.trained;
            let part = trained.share.part(state.parameters.len());
            let moments = [
                (trained.units[unit].exp_avg, &state.exp_avg),
                (trained.units[unit].exp_avg_sq, &state.exp_avg_sq),
            ];
            for (to, values) in moments.into_iter().filter(|_| trained.holds.trains()) {
                let bytes = bytemuck::cast_slice(&values[part.clone()]);
                engine.staging.upload(&engine.streams.compute, to, bytes)?;
            }
            engine.copy_saved()
        })
    }

    fn memory(&self) -> (u64, u64) {
        (self.used(), self.peak)
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // Memory is freed only when the device no longer uses it. After an error there is nothing to wait for.
        self.peers = None;
        self.settle();
    }
}

/// The part of every unit that this rank holds. Without other ranks the only shard is the whole.
fn share(strategy: Strategy, world: Option<&World>) -> Share {
    match (strategy, world) {
        (
            Strategy::Sharded {
                unsharded_accumulation,
            },
            Some(world),
        ) if world.world() > 1 => Share {
            rank: world.rank(),
            world: world.world(),
            whole_gradient: unsharded_accumulation,
        },
        _ => Share::EVERYTHING,
    }
}

/// Refuses shapes that the kernels do not support.
pub fn supported(config: &ModelConfig) -> Result<(), EngineError> {
    let head_dim = config.head_dim;
    if head_dim > MOST_HEAD_DIM || !head_dim.is_multiple_of(2) {
        return Err(EngineError::Shape(format!(
            "the head size {head_dim} is odd or larger than {MOST_HEAD_DIM}, the largest on CUDA; train on \
             CPUs"
        )));
    }
    let largest = [config.vocab_size, config.inner(), config.hidden_size];
    match largest
        .into_iter()
        .find(|&size| i32::try_from(size).is_err())
    {
        Some(size) => Err(EngineError::Shape(format!(
            "a matrix of {size} columns is too large for CUDA"
        ))),
        None => Ok(()),
    }
}

/// Refuses an allocation over the limit before it is made.
fn within(used: u64, bytes: u64, limit: u64, what: &str) -> Result<(), EngineError> {
    let needed = used.saturating_add(bytes);
    if needed > limit {
        return Err(EngineError::OutOfMemory {
            needed,
            limit,
            what: what.to_owned(),
        });
    }
    Ok(())
}

/// Out-of-memory errors of CUDA become those of every engine, so that the ranks descend together.
fn descends(error: EngineError, used: u64, limit: u64) -> EngineError {
    match error {
        EngineError::Cuda(CudaError::OutOfMemory { what, bytes }) => EngineError::OutOfMemory {
            needed: used.saturating_add(bytes),
            limit,
            what,
        },
        error => error,
    }
}

fn nothing_reserved() -> EngineError {
    EngineError::Shape("no memory was reserved".to_owned())
}
