//! Whole parameters, gathered ahead of the walk.
//!
//! Two buffers alternate: while one unit computes, the next one is gathered into the other. A released buffer
//! keeps its unit until another unit is gathered into it, so the unit that the walk needs again first (the
//! last block, when backward begins) is still available. The calls alone determine all of this, so that every
//! rank starts the same operations in the same order.

use crate::comm::{Kind, Operation, Pending, World};
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::{EngineError, Layout, Pass};

use super::Part;

/// The buffers and the position of the walk.
pub(super) struct Gather {
    world: World,
    /// Two alternating buffers, and one for the first unit where embeddings are tied: it stays whole until
    /// the head is done.
    places: Vec<GatherBuffer>,
    tied: bool,
    pass: Pass,
    units: usize,
    /// Units of this walk that are gathered or being gathered.
    begun: usize,
}

struct GatherBuffer {
    buffer: Buffer,
    /// The unit whose parameters the buffer holds or receives.
    unit: Option<usize>,
    state: State,
}

enum State {
    Free,
    OnTheWay(Pending),
    Taken,
}

impl Gather {
    pub fn new(
        layout: &Layout,
        tied: bool,
        world: &World,
        arena: &Arena,
    ) -> Result<Self, EngineError> {
        let places = super::place_sizes(layout, tied, world.world())
            .map(|len| {
                Ok(GatherBuffer {
                    buffer: arena.buffer(len, "the gathered weights of a unit")?,
                    unit: None,
                    state: State::Free,
                })
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Gather {
            world: world.clone(),
            places,
            tied,
            pass: Pass::Evaluation,
            units: layout.units.len(),
            begun: 0,
        })
    }

    /// Starts a walk and gathers the first units.
    pub fn begin(&mut self, pass: Pass, parts: &mut [Part]) {
        self.pass = pass;
        self.begun = 0;
        self.prefetch(parts);
    }

    /// Waits until a unit's parameters are whole.
    pub fn acquire(&mut self, unit: usize, parts: &mut [Part]) -> Result<(), EngineError> {
        let place = self.place_of(unit)?;
        if let State::OnTheWay(pending) = std::mem::replace(&mut place.state, State::Taken) {
            place.receive(pending, &mut parts[unit].parameters)?;
        }
        Ok(())
    }

    /// The parameters of an acquired unit of `len` elements; empty when it is not acquired.
    pub fn parameters(&self, unit: usize, len: usize) -> &[f32] {
        let taken =
            |place: &&GatherBuffer| place.unit == Some(unit) && matches!(place.state, State::Taken);
        let place = self.places.iter().find(taken);
        place.map_or(&[], |place| &place.buffer[..len])
    }

    /// Releases a unit's buffer and starts to gather the next unit.
    pub fn release(&mut self, unit: usize, parts: &mut [Part]) {
        for place in &mut self.places {
            if place.unit == Some(unit) && matches!(place.state, State::Taken) {
                place.state = State::Free;
            }
        }
        self.prefetch(parts);
    }

    /// Gathers one vector of a unit outside of walks.
    pub fn whole(&mut self, unit: usize, shard: &mut Buffer) -> Result<&[f32], EngineError> {
        let index = match unit {
            0 if self.tied => 2,
            _ => 0,
        };
        let place = &mut self.places[index];
        place.unit = None;
        let pending = place.send(&self.world, shard);
        place.receive(pending, shard)?;
        Ok(&place.buffer)
    }

    /// The parameters have changed, so every gathered copy is outdated.
    pub fn forget(&mut self) {
        for place in &mut self.places {
            place.unit = None;
        }
    }

    /// Ends the walk at its current position; the next walk gathers again.
    pub fn stop(&mut self, parts: &mut [Part]) {
        for place in &mut self.places {
            let state = std::mem::replace(&mut place.state, State::Free);
            if let (State::OnTheWay(pending), Some(unit)) = (state, place.unit)
                && place.receive(pending, &mut parts[unit].parameters).is_err()
            {
                place.buffer.replace_lost();
            }
        }
        self.begun = 2 * self.units;
        self.forget();
    }

    /// The units of a walk in the order of their acquisition: forward, then, in training, backward from the
    /// last block to the first.
    fn wanted(&self, index: usize) -> Option<usize> {
        let turn = self.units;
        match self.pass {
            _ if index < turn => Some(index),
            Pass::Training(_) => (turn + turn)
                .checked_sub(index + 2)
                .filter(|&unit| unit > 0),
            Pass::Evaluation | Pass::Prediction => None,
        }
    }

    /// Starts to gather the next units of the walk while there are free buffers.
    fn prefetch(&mut self, parts: &mut [Part]) {
        while let Some(unit) = self.wanted(self.begun) {
            let after = self.wanted(self.begun + 1);
            let range = match unit {
                0 if self.tied => 2..3,
                _ => 0..2,
            };
            let free = self.places[range].iter_mut();
            let free = free.filter(|place| matches!(place.state, State::Free));
            // The unit itself may still be present; its successor should stay where it is.
            let Some(place) = free.min_by_key(|place| match place.unit {
                held if held == Some(unit) => 0,
                held if held.is_some() && held == after => 2,
                _ => 1,
            }) else {
                return;
            };
            if place.unit == Some(unit) {
                place.state = State::Taken;
            } else {
                place.unit = Some(unit);
                let pending = place.send(&self.world, &mut parts[unit].parameters);
                place.state = State::OnTheWay(pending);
            }
            self.begun += 1;
        }
    }

    fn place_of(&mut self, unit: usize) -> Result<&mut GatherBuffer, EngineError> {
        let mut places = self.places.iter_mut();
        places
            .find(|place| place.unit == Some(unit) && !matches!(place.state, State::Free))
            .ok_or_else(|| {
                EngineError::Shape(format!("unit {unit} was acquired out of the walk's order"))
            })
    }
}

impl GatherBuffer {
    /// Starts to gather; the shard is lent until the result arrives.
    fn send(&mut self, world: &World, shard: &mut Buffer) -> Pending {
        let shard = shard.lend();
        let mut data = self.buffer.lend();
        // Never beyond the reservation: the buffer is as large as its largest unit.
        data.resize(shard.len() * world.world(), 0.0);
        world.start(Operation {
            kind: Kind::AllGather,
            data,
            shard,
        })
    }

    fn receive(&mut self, pending: Pending, lender: &mut Buffer) -> Result<(), EngineError> {
        let Operation { data, shard, .. } = pending.wait()?;
        lender.restore(shard);
        self.buffer.restore(data);
        Ok(())
    }
}
