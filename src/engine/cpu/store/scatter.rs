//! Reduction of gradients from whole units to shards.
//!
//! A micro-batch's gradient of a unit exists whole from its backward until it is reduced. Two buffers
//! alternate: one is reduced and scattered while the backward pass fills the other. Where a rank's gradient is kept
//! whole for the whole step, one buffer holds a micro-batch's gradient until it is measured and added. In fixed point a
//! gradient is rounded to integers, which are reduced in its place.

use cpu_kernels::fixed::{self, Added};
use cpu_kernels::vector;

use crate::comm::{Kind, Operation, Pending, World};
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::{EngineError, Keeps, Layout};

use super::{Part, PendingSum};

/// The places for gradients of whole units.
pub(super) struct Scatter {
    /// `None` if gradients are not reduced here.
    world: Option<World>,
    /// Two alternating buffers, of which the second exists only if gradients are reduced here; and a last one for the
    /// first unit where embeddings are tied: its gradient is in progress beside every other.
    places: Vec<ScatterBuffer>,
    tied: bool,
}

struct ScatterBuffer {
    buffer: Buffer,
    reduced: Reduced,
    state: State,
}

/// What is reduced of a gradient. The addend receives the shard of a gradient that is added to the accumulated one.
enum Reduced {
    /// The gradient itself, in f32.
    Floats { addend: Buffer },
    /// The gradient in fixed point.
    Integers {
        data: Buffer<i64>,
        addend: Buffer<i64>,
    },
}

impl Reduced {
    fn replace_lost(&mut self) {
        match self {
            Reduced::Floats { addend } => addend.replace_lost(),
            Reduced::Integers { data, addend } => {
                data.replace_lost();
                addend.replace_lost();
            }
        }
    }
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
    pending: PendingSum,
}

impl Scatter {
    /// `keeps_whole`: gradients are accumulated whole, not reduced here, and only micro-batches that may be measured have
    /// one apart.
    pub fn new(
        layout: &Layout,
        tied: bool,
        Keeps {
            whole: keeps_whole,
            in_fixed_point,
            measure,
        }: Keeps,
        world: Option<&World>,
        arena: &Arena,
    ) -> Result<Self, EngineError> {
        let ranks = world.map_or(1, |world| world.world());
        let place = |len| {
            let what = "the gradient of one micro-batch";
            let (whole, addend) = if keeps_whole {
                (0, 0)
            } else {
                (len, len / ranks)
            };
            Ok(ScatterBuffer {
                buffer: arena.buffer(len, what)?,
                reduced: if in_fixed_point {
                    Reduced::Integers {
                        data: arena.integers(whole, what)?,
                        addend: arena.integers(addend, what)?,
                    }
                } else {
                    Reduced::Floats {
                        addend: arena.buffer(addend, what)?,
                    }
                },
                state: State::Free,
            })
        };
        let sizes = super::place_sizes(layout, tied, ranks).skip(usize::from(keeps_whole));
        let are_used = !keeps_whole || measure.micro_batches || in_fixed_point;
        let sizes = sizes.filter(|_| are_used);
        Ok(Scatter {
            world: world.filter(|_| !keeps_whole).cloned(),
            places: sizes.map(place).collect::<Result<_, EngineError>>()?,
            tied,
        })
    }

    /// Starts a walk; the gradient of tied embeddings is needed soon.
    pub fn begin(&mut self, parts: &mut [Part]) -> Result<(), EngineError> {
        match self.places.last_mut() {
            Some(place) if self.tied => place.finish(parts),
            _ => Ok(()),
        }
    }

    /// The place for a unit's gradient of this micro-batch, `len` elements; `part` is the length of a shard.
    pub fn open(&mut self, unit: usize, len: usize, part: usize) -> &mut [f32] {
        let held = self.places.iter().position(|place| place.holds(unit));
        let index = held.unwrap_or_else(|| {
            if self.tied && unit == 0 {
                self.places.len() - 1
            } else {
                let untied = self.places.len() - usize::from(self.tied);
                usize::from(untied > 1 && !matches!(self.places[0].state, State::Free))
            }
        });
        let place = &mut self.places[index];
        if held.is_none() {
            place.state = State::Open(unit);
            // A reduction takes exactly the padded unit.
            if let Some(world) = &self.world {
                let mut data = place.buffer.lend();
                data.resize(part * world.world(), 0.0);
                data[len..].fill(0.0);
                place.buffer.restore(data);
            }
        }
        &mut place.buffer[..len]
    }

    /// A unit's separate gradient of this micro-batch, and what follows it in its place.
    pub fn of(&self, unit: usize) -> Option<&[f32]> {
        let place = self.places.iter().find(|place| place.holds(unit))?;
        Some(&place.buffer)
    }

    /// As [`Scatter::of`]; the place is free afterwards.
    pub fn close(&mut self, unit: usize) -> Option<&[f32]> {
        let place = self.places.iter_mut().find(|place| place.holds(unit))?;
        place.state = State::Free;
        Some(&place.buffer)
    }

    /// Starts to reduce a unit's finished gradient. Returns what is known of it: in fixed point its peak and its squared norm,
    /// otherwise the norm if it is `measured`. `first`: no rank has reduced another one in this step.
    pub fn reduce(
        &mut self,
        unit: usize,
        parts: &mut [Part],
        first: bool,
        measured: bool,
    ) -> Result<Added, EngineError> {
        let place = self.places.iter_mut().find(|place| place.holds(unit));
        let (Some(place), Some(world)) = (place, &self.world) else {
            return Err(no_gradient(unit));
        };
        let part = &mut parts[unit];
        let len = part.unit.len;
        let mut added = Added::default();
        let pending = match (&mut place.reduced, &mut part.sum) {
            (Reduced::Integers { data, addend }, Some(sum)) => {
                let mut data = data.lend();
                data.resize(part.len * world.world(), 0);
                added = fixed::add(&mut data[..len], &place.buffer[..len], true);
                data[len..].fill(0);
                let into = if first { sum } else { addend };
                PendingSum::Integers(world.start_fixed(scattered(data, into, part.len)))
            }
            (Reduced::Floats { addend }, _) => {
                if measured {
                    added.squared_norm = vector::squared_norm(&place.buffer[..len]);
                }
                let into = if first { &mut part.gradient } else { addend };
                PendingSum::Floats(world.start(scattered(place.buffer.lend(), into, part.len)))
            }
            (Reduced::Integers { .. }, None) => return Err(no_gradient(unit)),
        };
        place.state = State::Reducing(Reduction {
            unit,
            first,
            pending,
        });
        // The next unit needs the other buffer.
        for place in &mut self.places[..2] {
            if !matches!(&place.state, State::Reducing(reduction) if reduction.unit == unit) {
                place.finish(parts)?;
            }
        }
        Ok(added)
    }

    /// Waits for all reductions.
    pub fn finish(&mut self, parts: &mut [Part]) -> Result<(), EngineError> {
        for place in &mut self.places {
            place.finish(parts)?;
        }
        Ok(())
    }

    /// Ends the reductions in progress and discards their results.
    pub fn stop(&mut self, parts: &mut [Part]) {
        for place in &mut self.places {
            if place.finish(parts).is_err() {
                place.buffer.replace_lost();
                place.reduced.replace_lost();
            }
            place.state = State::Free;
        }
    }
}

pub(super) fn no_gradient(unit: usize) -> EngineError {
    EngineError::Shape(format!("unit {unit} has no gradient to complete"))
}

impl ScatterBuffer {
    /// Whether the place holds a unit's gradient of the current micro-batch.
    fn holds(&self, unit: usize) -> bool {
        matches!(self.state, State::Open(open) if open == unit)
    }

    /// Waits for the reduction in progress, if any, and accumulates its result.
    fn finish(&mut self, parts: &mut [Part]) -> Result<(), EngineError> {
        let Reduction {
            unit,
            first,
            pending,
        } = match std::mem::replace(&mut self.state, State::Free) {
            State::Reducing(reduction) => reduction,
            other => {
                self.state = other;
                return Ok(());
            }
        };
        let part = &mut parts[unit];
        match (pending, &mut self.reduced) {
            (PendingSum::Floats(pending), Reduced::Floats { addend }) => {
                let sums = (&mut part.gradient, addend);
                receive(pending, &mut self.buffer, sums, first, vector::accumulate)
            }
            (PendingSum::Integers(pending), Reduced::Integers { data, addend }) => {
                let sum = part.sum.as_mut().ok_or_else(|| no_gradient(unit))?;
                receive(pending, data, (sum, addend), first, fixed::accumulate)
            }
            _ => Err(no_gradient(unit)),
        }
    }
}

/// A reduction of the whole to a shard of `len` elements, which `into` receives.
fn scattered<T: Copy + Default>(data: Vec<T>, into: &mut Buffer<T>, len: usize) -> Operation<T> {
    let mut shard = into.lend();
    shard.resize(len, T::default());
    Operation {
        kind: Kind::ReduceScatter,
        data,
        shard,
    }
}

/// Waits for a reduction of `whole`, whose shard is the `sum` if it is the `first`, otherwise an addend.
fn receive<T: Copy + Default>(
    pending: Pending<T>,
    whole: &mut Buffer<T>,
    (sum, addend): (&mut Buffer<T>, &mut Buffer<T>),
    first: bool,
    accumulate: impl Fn(&mut [T], &[T]),
) -> Result<(), EngineError> {
    let Operation { data, shard, .. } = pending.wait()?;
    whole.restore(data);
    if first {
        sum.restore(shard);
    } else {
        accumulate(sum, &shard);
        addend.restore(shard);
    }
    Ok(())
}
