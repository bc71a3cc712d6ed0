//! Reduction of gradients from whole units to shards.
//!
//! A micro-batch's gradient of a unit exists whole from its backward until it is reduced. Two buffers
//! alternate: one is reduced and scattered while the backward pass fills the other. The norm test may need
//! the accumulated gradient of this rank. It exists only if it is kept whole for the whole step, at the cost
//! of a whole model's gradient.

use crate::comm::{CommError, Operation, Pending, World};
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::cpu::kernels::vector;
use crate::engine::cpu::store::Gradient;
use crate::engine::{EngineError, Layout};

use super::Shard;

/// Progress of a step at a micro-batch.
#[derive(Clone, Copy)]
pub(super) struct StepProgress {
    /// Training walks before this one, including joined ones.
    pub walks: u64,
    /// This rank's micro-batches before this one.
    pub own: u64,
    /// Whether this micro-batch's gradient is kept separate from the accumulated one.
    pub apart: bool,
    /// Whether the norm of this micro-batch's gradient is computed; the gradient is then kept separate.
    pub measured: bool,
}

/// The places for gradients of whole units.
pub(super) struct Scatter {
    world: World,
    /// Two alternating buffers, and one for the first unit where embeddings are tied: its gradient is in
    /// progress beside every other.
    places: Vec<ScatterBuffer>,
    tied: bool,
    /// Whole accumulated gradients by unit, if they are kept.
    whole: Option<Vec<Buffer>>,
}

struct ScatterBuffer {
    buffer: Buffer,
    /// Receives the shard of a gradient that is added to the accumulated one.
    addend: Buffer,
    state: State,
}

enum State {
    Free,
    Open(usize),
    Reducing(Reduction),
}

struct Reduction {
    unit: usize,
    /// Whether the reduction writes the accumulated gradient's shard instead of an addend.
    first: bool,
    pending: Box<dyn Pending>,
}

impl Scatter {
    /// `whole`: keep this rank's accumulated gradient unsharded until the step is reduced.
    pub fn new(
        layout: &Layout,
        tied: bool,
        whole: bool,
        world: &World,
        arena: &Arena,
    ) -> Result<Self, EngineError> {
        let ranks = world.world();
        let place = |len| {
            let addend = if whole { 0 } else { len / ranks };
            Ok(ScatterBuffer {
                buffer: arena.buffer(len, "the gradient of one micro-batch")?,
                addend: arena.buffer(addend, "the gradient of one micro-batch")?,
                state: State::Free,
            })
        };
        let sizes = super::place_sizes(layout, tied, ranks);
        let units = layout.units.iter().map(|unit| {
            let len = unit.len.div_ceil(ranks) * ranks;
            arena.buffer(len, &format!("unsharded gradient of {}", unit.name))
        });
        Ok(Scatter {
            world: world.clone(),
            places: sizes.map(place).collect::<Result<_, EngineError>>()?,
            tied,
            whole: whole.then(|| units.collect()).transpose()?,
        })
    }

    /// Whether accumulated gradients are kept whole.
    pub fn keeps_whole(&self) -> bool {
        self.whole.is_some()
    }

    /// Starts a walk; the gradient of tied embeddings is needed soon.
    pub fn begin(&mut self, shards: &mut [Shard]) -> Result<(), EngineError> {
        self.places[2..]
            .iter_mut()
            .try_for_each(|place| place.finish(shards))
    }

    pub fn gradient(&mut self, shard: &Shard, progress: StepProgress) -> Gradient<'_> {
        let len = shard.unit.len;
        let add = progress.own > 0;
        if self.whole.is_none() || (add && progress.apart) {
            return Gradient {
                values: &mut self.open(shard)[..len],
                add: false,
            };
        }
        let whole = self.whole.iter_mut().flatten().nth(shard.index);
        Gradient {
            values: whole.map_or(&mut [], |whole| &mut whole[..len]),
            add,
        }
    }

    /// Zeroes a unit's gradient, for a rank without a micro-batch.
    pub fn nothing(&mut self, shard: &Shard) {
        self.open(shard).fill(0.0);
    }

    /// A unit's finished gradient of this micro-batch: kept separate, or the first of the step.
    pub fn micro_batch(&self, shard: &Shard) -> Result<&[f32], EngineError> {
        let apart = self.places.iter().find(|place| place.holds(shard.index));
        let apart = apart.map(|place| &place.buffer);
        let whole = || self.whole.as_ref()?.get(shard.index);
        let gradient = apart.or_else(whole);
        let gradient = gradient.ok_or_else(|| no_gradient(shard.index))?;
        Ok(&gradient[..shard.unit.len])
    }

    /// This rank's accumulated gradients by unit, with padding, if they are kept whole.
    pub fn accumulated(&self) -> impl Iterator<Item = &[f32]> {
        self.whole.iter().flatten().map(|whole| &whole[..])
    }

    /// Takes a unit's finished gradient and starts to reduce it. Returns its squared norm when it is
    /// measured.
    pub fn complete(
        &mut self,
        unit: usize,
        shards: &mut [Shard],
        StepProgress {
            walks,
            own,
            apart,
            measured,
        }: StepProgress,
    ) -> Result<Option<f64>, EngineError> {
        let len = shards[unit].unit.len;
        if let Some(whole) = &mut self.whole {
            let sum = &mut whole[unit][..len];
            if own == 0 || !apart {
                return Ok(measured.then(|| vector::squared_norm(sum)));
            }
            let place = &mut self.places[place_index(self.tied, unit, true)];
            place.state = State::Free;
            let gradient = &place.buffer[..len];
            if measured {
                return Ok(Some(vector::add_measuring(sum, gradient).0));
            }
            vector::accumulate(sum, gradient);
            return Ok(None);
        }
        let Some(place) = self.places.iter_mut().find(|place| place.holds(unit)) else {
            return Err(no_gradient(unit));
        };
        let squared_norm = measured.then(|| vector::squared_norm(&place.buffer[..len]));
        let first = walks == 0;
        let shard = if first {
            shards[unit].gradient.lend()
        } else {
            let mut addend = place.addend.lend();
            addend.resize(shards[unit].len, 0.0);
            addend
        };
        let data = place.buffer.lend();
        let pending = self.world.start(Operation::ReduceScatter { data, shard });
        place.state = State::Reducing(Reduction {
            unit,
            first,
            pending,
        });
        // The next unit needs the other buffer.
        for place in &mut self.places[..2] {
            if !matches!(&place.state, State::Reducing(reduction) if reduction.unit == unit) {
                place.finish(shards)?;
            }
        }
        Ok(squared_norm)
    }

    /// Waits for all reductions.
    pub fn finish(&mut self, shards: &mut [Shard]) -> Result<(), EngineError> {
        for place in &mut self.places {
            place.finish(shards)?;
        }
        Ok(())
    }

    /// Reduces the accumulated gradients if they are kept whole, and returns the squared norm of this rank's.
    /// `nothing`: this rank has accumulated none.
    pub fn reduce_whole(
        &mut self,
        shards: &mut [Shard],
        nothing: bool,
    ) -> Result<Option<f64>, EngineError> {
        let Some(whole) = &mut self.whole else {
            return Ok(None);
        };
        let mut squared_norm = 0.0;
        let mut under_way = Vec::with_capacity(shards.len());
        for (buffer, unit) in whole.iter_mut().zip(&mut *shards) {
            if nothing {
                buffer.fill(0.0);
            } else {
                squared_norm += vector::squared_norm(&buffer[..unit.unit.len]);
            }
            let (data, shard) = (buffer.lend(), unit.gradient.lend());
            under_way.push(self.world.start(Operation::ReduceScatter { data, shard }));
        }
        for ((buffer, unit), pending) in whole.iter_mut().zip(shards).zip(under_way) {
            let (data, shard) = scattered(pending)?;
            buffer.restore(data);
            // A reduction may use the padding as scratch, but it must stay zero.
            buffer[unit.unit.len..].fill(0.0);
            unit.gradient.restore(shard);
        }
        Ok(Some(squared_norm))
    }

    /// Ends the reductions in progress and discards their results.
    pub fn stop(&mut self, shards: &mut [Shard]) {
        for place in &mut self.places {
            if place.finish(shards).is_err() {
                place.buffer.replace_lost();
                place.addend.replace_lost();
            }
            place.state = State::Free;
        }
        for whole in self.whole.iter_mut().flatten() {
            whole.replace_lost();
        }
    }

    /// A unit's place in progress, with zeros for padding.
    fn open(&mut self, shard: &Shard) -> &mut [f32] {
        let index = shard.index;
        let place = match self.places.iter().position(|place| place.holds(index)) {
            Some(open) => &mut self.places[open],
            None => {
                let free = matches!(self.places[0].state, State::Free);
                let place = &mut self.places[place_index(self.tied, index, free)];
                place.state = State::Open(index);
                let padded = shard.len * self.world.world();
                let mut data = place.buffer.lend();
                data.resize(padded, 0.0);
                data[shard.unit.len..].fill(0.0);
                place.buffer.restore(data);
                place
            }
        };
        &mut place.buffer
    }
}

/// The place of a unit's gradient.
fn place_index(tied: bool, unit: usize, first_is_free: bool) -> usize {
    match (tied && unit == 0, first_is_free) {
        (true, _) => 2,
        (false, true) => 0,
        (false, false) => 1,
    }
}

fn no_gradient(unit: usize) -> EngineError {
    EngineError::Shape(format!("unit {unit} has no gradient to complete"))
}

impl ScatterBuffer {
    /// Whether the place holds a unit's gradient of the current micro-batch.
    fn holds(&self, unit: usize) -> bool {
        matches!(self.state, State::Open(open) if open == unit)
    }

    /// Waits for the reduction in progress, if any, and accumulates its result.
    fn finish(&mut self, shards: &mut [Shard]) -> Result<(), EngineError> {
        let reduction = match std::mem::replace(&mut self.state, State::Free) {
            State::Reducing(reduction) => reduction,
            other => {
                self.state = other;
                return Ok(());
            }
        };
        let (data, shard) = scattered(reduction.pending)?;
        self.buffer.restore(data);
        let sum = &mut shards[reduction.unit].gradient;
        if reduction.first {
            sum.restore(shard);
        } else {
            vector::accumulate(sum, &shard);
            self.addend.restore(shard);
        }
        Ok(())
    }
}

/// Waits for a reduce-scatter and returns its elements.
fn scattered(pending: Box<dyn Pending>) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
    match pending.wait()? {
        Operation::ReduceScatter { data, shard } => Ok((data, shard)),
        other => Err(
            CommError::Misuse(format!("{} came back for a reduce-scatter", other.name())).into(),
        ),
    }
}
