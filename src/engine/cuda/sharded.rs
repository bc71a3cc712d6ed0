//! Full sharding (FSDP, ZeRO-3): a walk gathers each unit's weights before it uses them, and reduces each
//! unit's gradient to shards as soon as it is complete. Both run on the peers' stream, beside the model.
//!
//! Two places alternate: even units use the first, odd ones the second. While one unit computes, its neighbour is
//! gathered into the other place. When backward begins, the head and the last block are still in their places. Tied
//! embeddings have a third place, because the head needs them, too. With the units 0 … n - 1, every walk on every
//! rank therefore has the same collectives in the same order:
//!
//! ```text
//! begin      all-reduce the norms
//! forward    gather 0 … gather n-1
//! backward   gather n-3, reduce-scatter n-1, gather n-4, reduce-scatter n-2, …, reduce-scatter 0
//! ```
//!
//! A training walk gathers 2n - 3 units and reduce-scatters n. A rank without a micro-batch joins with gradients
//! of zero. In bf16, units are gathered as operands of matrix products. What kernels read in f32 travels in f32:
//! the embedding, and the weights of all norms, to which every rank contributes its parts before a walk.
//! Gradients are reduced in f32; their padding is zeroed before. Frozen units are only gathered.

use std::sync::Arc;

use super::driver::{Device, Event, Stream};
use super::error::CudaError;
use super::launches::{Enqueued, Kernels};
use super::options::Precision;
use super::peers::Peers;
use super::state::{Places, State, Whole, vectors};
use crate::engine::{Direction, Layout};

const F32: usize = size_of::<f32>();

/// The events that order the streams.
pub struct Events {
    /// By unit: its weights are in their place.
    gathered: Vec<Event>,
    /// By unit: the compute stream no longer reads its place.
    released: Vec<Event>,
    /// By unit: its gradient's scratch is free.
    scattered: Vec<Event>,
    /// The compute stream's work before a walk.
    before: Event,
}

impl Events {
    pub fn new(device: &Arc<Device>, units: usize) -> Result<Events, CudaError> {
        let of_units = || (0..units).map(|_| device.event()).collect::<Result<_, _>>();
        Ok(Events {
            gathered: of_units()?,
            released: of_units()?,
            scattered: of_units()?,
            before: device.event()?,
        })
    }
}

/// The sharded model. The methods only enqueue work.
#[derive(Clone, Copy)]
pub struct Shards<'a> {
    pub layout: &'a Layout,
    pub kernels: &'a Kernels,
    pub compute: &'a Stream,
    pub state: &'a State,
    pub places: &'a Places,
    pub events: &'a Events,
    pub peers: &'a Peers,
}

impl<'a> Shards<'a> {
    /// Starts a walk and gathers the norms and the first units.
    pub fn begin(&self) -> Enqueued {
        self.after_compute()?;
        // Frozen ones are whole since their import.
        if self.state.holds.trains() {
            self.gather_vectors()?;
        }
        // With tied embeddings, both turns are free beside the first unit.
        let first = if self.is_tied() { 3 } else { 2 };
        for unit in 0..first.min(self.units()) {
            self.gather(unit)?;
        }
        Ok(())
    }

    /// The compute stream waits until the unit's weights are in their place.
    pub fn acquire(&self, unit: usize) -> Enqueued {
        self.compute.wait(&self.events.gathered[unit])
    }

    /// The weights of an acquired unit.
    pub fn whole(&self, unit: usize) -> Whole {
        let [table, operands] = match self.places.of_tied {
            Some(place) if unit == 0 => place,
            _ => [self.places.turns[unit % 2]; 2],
        };
        Whole {
            table,
            operands,
            vectors: self.state.units[unit].vectors,
        }
    }

    /// The compute stream has finished with the unit's weights for now: the next unit is gathered into their
    /// place. Tied embeddings keep their place.
    pub fn release(&self, unit: usize, direction: Direction) -> Enqueued {
        let next = match direction {
            _ if unit == 0 && self.is_tied() => None,
            Direction::Forward => Some(unit + 2).filter(|&next| next < self.units()),
            // The embedding's backward needs no weights.
            Direction::Backward => unit.checked_sub(2).filter(|&next| next > 0),
        };
        let Some(next) = next else {
            return Ok(());
        };
        let released = &self.events.released[unit];
        self.compute.record(released)?;
        self.peers.stream.wait(released)?;
        self.gather(next)
    }

    /// Reduces a micro-batch's gradient of a unit once `complete` has happened. `first`: no rank has reduced
    /// another one in this step.
    pub fn scatter(&self, unit: usize, complete: &Event, first: bool) -> Enqueued {
        self.peers.stream.wait(complete)?;
        self.scatter_now(unit, first)
    }

    /// The collective that reads the unit's scratch has ended.
    pub fn scattered(&self, unit: usize) -> &'a Event {
        &self.events.scattered[unit]
    }

    /// Takes part in an evaluation of the other ranks.
    pub fn join_evaluation(&self) -> Enqueued {
        self.begin()?;
        self.join_forward()
    }

    /// Takes part in a training walk of the other ranks with a gradient of zero.
    pub fn join(&self, first: bool) -> Enqueued {
        self.begin()?;
        self.join_forward()?;
        for unit in (0..self.units()).rev() {
            if unit > 0 {
                self.release(unit, Direction::Backward)?;
            }
            if self.state.scatters() {
                self.zero(self.scratch(unit), 0, self.padded(unit))?;
                self.scatter_now(unit, first)?;
            }
        }
        Ok(())
    }

    fn join_forward(&self) -> Enqueued {
        let first = usize::from(self.is_tied());
        for unit in first..self.units() - 1 {
            self.release(unit, Direction::Forward)?;
        }
        Ok(())
    }

    /// Finishes the reduction of the step's gradient, which may be whole until now. Returns the address of the
    /// squared norm of this rank's part.
    pub fn reduce(&self, coordinates: bool) -> Result<u64, CudaError> {
        self.after_compute()?;
        let (stream, share) = (&self.peers.stream, self.state.share);
        // SAFETY: the norm is an f64.
        unsafe { stream.fill_zero(self.places.norm, size_of::<f64>())? };
        for unit in (0..self.units()).rev() {
            let len = self.layout.units[unit].len;
            let (part, whole) = (
                self.state.part(unit, len).gradient,
                self.state.units[unit].gradient,
            );
            if share.whole_gradient {
                self.zero(whole, len, self.padded(unit))?;
                self.peers.reduce_scatter(whole, part, share.held(len))?;
            }
            let result = (self.places.norm, self.places.partials);
            self.kernels
                .squared_norm(stream, result, part, share.held(len))?;
        }
        if coordinates {
            for (squares, elements) in self.state.squares(self.layout) {
                self.peers.all_reduce(squares, elements)?;
            }
        }
        Ok(self.places.norm)
    }

    /// Gathers an f32 vector of a unit's length from every rank's part; returns where it is, whole.
    pub fn gather_vector(&self, unit: usize, part: u64) -> Result<u64, CudaError> {
        self.after_compute()?;
        let whole = self.scratch(unit);
        let held = self.state.share.held(self.layout.units[unit].len);
        self.peers.all_gather(part, whole, held, Precision::F32)?;
        Ok(whole)
    }

    /// The peers' stream waits for everything that the compute stream has.
    fn after_compute(&self) -> Enqueued {
        self.compute.record(&self.events.before)?;
        self.peers.stream.wait(&self.events.before)
    }

    fn gather(&self, unit: usize) -> Enqueued {
        let (stream, whole) = (&self.peers.stream, self.whole(unit));
        let len = self.layout.units[unit].len;
        let held = self.state.share.held(len);
        let addresses = &self.state.units[unit];
        if let Some(copy) = addresses.copy {
            self.peers
                .all_gather(copy, whole.operands, held, Precision::Bf16)?;
        } else {
            let (weights, table) = (addresses.weights, whole.table);
            self.peers
                .all_gather(weights, table, held, Precision::F32)?;
            if whole.operands != table {
                self.kernels.cast(stream, whole.operands, table, len)?;
            }
        }
        stream.record(&self.events.gathered[unit])
    }

    /// Makes the vectors whole: the sum of every rank's parts, which are zero elsewhere.
    fn gather_vectors(&self) -> Enqueued {
        let (stream, places) = (&self.peers.stream, self.places);
        self.zero(places.vectors, 0, places.vectors_len)?;
        for (addresses, unit) in self.state.units.iter().zip(&self.layout.units) {
            let part = self.state.share.part(unit.len);
            for (vector, at) in vectors(unit).zip(addresses.vectors) {
                let (from, to) = (vector.start.max(part.start), vector.end.min(part.end));
                if from < to {
                    let at = at + ((from - vector.start) * F32) as u64;
                    let held = addresses.weights + ((from - part.start) * F32) as u64;
                    // SAFETY: both are ranges of the state.
                    unsafe { stream.copy(at, held, (to - from) * F32)? };
                }
            }
        }
        self.peers.all_reduce(places.vectors, places.vectors_len)
    }

    fn scatter_now(&self, unit: usize, first: bool) -> Enqueued {
        let (stream, share) = (&self.peers.stream, self.state.share);
        let (whole, sum) = (self.scratch(unit), self.state.units[unit].gradient);
        let len = self.layout.units[unit].len;
        let held = share.held(len);
        self.zero(whole, len, self.padded(unit))?;
        if first {
            self.peers.reduce_scatter(whole, sum, held)?;
        } else {
            let part = share.part_of(whole, len);
            self.peers.reduce_scatter(whole, part, held)?;
            self.kernels.add_gradient(stream, sum, part, held)?;
        }
        stream.record(&self.events.scattered[unit])
    }

    /// The place of a unit's gradient of one micro-batch.
    fn scratch(&self, unit: usize) -> u64 {
        let tied = self.state.scratch_of_tied.filter(|_| unit == 0);
        let turns = self.state.scratch.unwrap_or_default();
        tied.unwrap_or(turns[unit % 2])
    }

    /// Zeroes the elements from `from` up to `to` of a buffer of f32, on the peers' stream.
    fn zero(&self, buffer: u64, from: usize, to: usize) -> Enqueued {
        let at = buffer + (from * F32) as u64;
        // SAFETY: the callers name a part of a buffer of the state.
        unsafe { self.peers.stream.fill_zero(at, (to - from) * F32) }
    }

    fn padded(&self, unit: usize) -> usize {
        self.state.share.padded(self.layout.units[unit].len)
    }

    fn units(&self) -> usize {
        self.layout.units.len()
    }

    fn is_tied(&self) -> bool {
        self.places.of_tied.is_some()
    }
}
