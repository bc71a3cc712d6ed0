//! Every rank holds a shard of everything: full sharding (FSDP, ZeRO-3).
//!
//! Every unit is a flat vector, padded to a multiple of the world size; rank r holds the r-th part of its
//! parameters, gradient and optimiser states. [`gather`] makes parameters whole while a unit computes,
//! [`scatter`] reduces gradients to shards; both run beside compute. The padding is always zero.
//!
//! A step reduces once per micro-batch. Ranks with fewer micro-batches join the walks of the others with a
//! gradient of zero.

mod gather;
mod scatter;

use self::gather::Gather;
use self::scatter::{Scatter, StepProgress};
use super::squares::{Squares, not_measured};
use super::{Gradient, Pass, Store};
use crate::comm::World;
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::cpu::kernels::{adamw, vector};
use crate::engine::{
    AdamW, EngineError, Layout, Measure, Reduced, Unit, UnitState, part, sum_over_ranks,
};

/// Optional memory besides the shards.
#[derive(Debug, Clone, Copy, Default)]
pub struct Holds {
    /// Keeps this rank's gradient whole until the step is reduced (a whole model's memory), so that its norm
    /// exists with several micro-batches.
    pub unsharded_accumulation: bool,
    /// The measurements that any step may request.
    pub measure: Measure,
}

/// The shards of this rank.
pub struct Sharded {
    world: World,
    tied: bool,
    shards: Vec<Shard>,
    gather: Gather,
    scatter: Scatter,
    squares: Option<Squares>,
    /// Micro-batches may be measured: each gradient is kept separate until then.
    measures_micro_batches: bool,
    /// The purpose of the current walk.
    pass: Pass,
    /// The measurements of this step.
    measure: Measure,
    /// Training walks of this step, including joined ones: the same on every rank.
    walks: u64,
    /// This rank's micro-batches in this step.
    own: u64,
    /// Their target tokens, including those of the current walk.
    targets: u64,
    /// ‖gradient of the latest micro-batch‖², where measured.
    squared_norm: f64,
}

/// This rank's part of one unit.
struct Shard {
    index: usize,
    unit: Unit,
    /// Offset of the part in the unit.
    offset: usize,
    /// Length of the part in elements, including padding.
    len: usize,
    parameters: Buffer,
    gradient: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
}

impl Sharded {
    /// Reserves memory for this rank's part of every unit and calls `initial(unit, offset, out)` for its
    /// weights. `tied` says that the head uses the first unit.
    pub fn new(
        layout: &Layout,
        tied: bool,
        holds: Holds,
        world: World,
        arena: &Arena,
        initial: &dyn Fn(&Unit, usize, &mut [f32]),
    ) -> Result<Sharded, EngineError> {
        let mut shards = Vec::with_capacity(layout.units.len());
        for (index, unit) in layout.units.iter().enumerate() {
            let len = unit.len.div_ceil(world.world());
            let offset = world.rank() * len;
            let buffer = |what: &str| arena.buffer(len, &format!("{what} of {}", unit.name));
            let mut parameters = buffer("shard of the weights")?;
            initial(unit, offset, &mut parameters);
            shards.push(Shard {
                index,
                unit: unit.clone(),
                offset,
                len,
                parameters,
                gradient: buffer("shard of the gradient")?,
                exp_avg: buffer("shard of the optimiser state")?,
                exp_avg_sq: buffer("shard of the optimiser state")?,
            });
        }
        Ok(Sharded {
            gather: Gather::new(layout, tied, &world, arena)?,
            scatter: Scatter::new(layout, tied, holds.unsharded_accumulation, &world, arena)?,
            squares: Squares::new(layout, holds.measure, arena)?,
            measures_micro_batches: holds.measure.micro_batches,
            world,
            tied,
            shards,
            pass: Pass::Evaluation,
            measure: Measure::default(),
            walks: 0,
            own: 0,
            targets: 0,
            squared_norm: 0.0,
        })
    }

    /// Progress of the step at the current micro-batch.
    fn progress(&self) -> StepProgress {
        StepProgress {
            walks: self.walks,
            own: self.own,
            apart: self.measures_micro_batches || self.measures(),
            measured: self.measures(),
        }
    }

    /// Whether the norm of this micro-batch's gradient is computed. With a single micro-batch it is also the
    /// norm of this rank's gradient.
    fn measures(&self) -> bool {
        self.measure.micro_batches || (self.measure.worker && !self.scatter.keeps_whole())
    }

    /// Clears the step's gradient.
    fn clear(&mut self) {
        self.walks = 0;
        self.own = 0;
        self.targets = 0;
        if let Some(squares) = &mut self.squares {
            squares.clear();
        }
    }

    /// Completes a unit with a gradient of zero, in a joined walk.
    fn complete_nothing(&mut self, unit: usize) -> Result<(), EngineError> {
        let progress = StepProgress {
            measured: false,
            ..self.progress()
        };
        self.scatter.nothing(&self.shards[unit]);
        self.scatter.complete(unit, &mut self.shards, progress)?;
        Ok(())
    }
}

impl Store for Sharded {
    fn begin(&mut self, pass: Pass) -> Result<(), EngineError> {
        if let Pass::Training {
            measure, targets, ..
        } = pass
        {
            if measure.coordinates && self.squares.is_none() {
                return Err(not_measured());
            }
            if measure.whole_step() && self.own > 0 && !self.scatter.keeps_whole() {
                return Err(EngineError::Shape(
                    "the norm of a rank's accumulated gradient does not exist under full \
                     sharding with more than one micro-batch a step: measure micro-batches, or \
                     accumulate unsharded"
                        .to_owned(),
                ));
            }
            self.measure = measure;
            self.targets += targets;
            self.squared_norm = 0.0;
            self.scatter.begin(&mut self.shards)?;
        }
        self.pass = pass;
        self.gather.begin(pass, &mut self.shards);
        Ok(())
    }

    fn acquire(&mut self, unit: usize) -> Result<(), EngineError> {
        self.gather.acquire(unit, &mut self.shards)
    }

    fn parameters(&self, unit: usize) -> &[f32] {
        self.gather.parameters(&self.shards[unit])
    }

    fn gradient(&mut self, unit: usize) -> (&[f32], Gradient<'_>) {
        let progress = self.progress();
        let shard = &self.shards[unit];
        let gradient = self.scatter.gradient(shard, progress);
        (self.gather.parameters(shard), gradient)
    }

    fn release(&mut self, unit: usize) {
        self.gather.release(unit, &mut self.shards);
    }

    fn complete(&mut self, unit: usize) -> Result<(), EngineError> {
        let progress = self.progress();
        if let (Pass::Training { targets, .. }, Some(squares)) = (self.pass, &mut self.squares)
            && self.measure.coordinates
            && (self.measure.micro_batches || !self.scatter.keeps_whole())
        {
            let gradient = self.scatter.micro_batch(&self.shards[unit])?;
            squares.add(unit, gradient, targets);
        }
        let squared_norm = self.scatter.complete(unit, &mut self.shards, progress)?;
        self.squared_norm += squared_norm.unwrap_or(0.0);
        Ok(())
    }

    fn end(&mut self) -> Result<Option<f64>, EngineError> {
        let Pass::Training { measure, .. } = self.pass else {
            return Ok(None);
        };
        self.walks += 1;
        self.own += 1;
        Ok(measure.micro_batches.then_some(self.squared_norm))
    }

    fn join(&mut self, pass: Pass) -> Result<(), EngineError> {
        let last = self.shards.len() - 1;
        let training = matches!(pass, Pass::Training { .. });
        let reduces = training && !self.scatter.keeps_whole();
        if training {
            self.scatter.begin(&mut self.shards)?;
        }
        self.gather.begin(pass, &mut self.shards);
        for unit in 0..=last {
            self.acquire(unit)?;
            if unit > 0 || !self.tied {
                self.release(unit);
            }
        }
        if self.tied {
            self.release(0);
        }
        if training {
            if reduces {
                self.complete_nothing(last)?;
            }
            for unit in (1..last).rev() {
                self.acquire(unit)?;
                self.release(unit);
                if reduces {
                    self.complete_nothing(unit)?;
                }
            }
            if reduces {
                self.complete_nothing(0)?;
            }
            self.walks += 1;
        }
        Ok(())
    }

    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError> {
        self.scatter.finish(&mut self.shards)?;
        let squares = self.squares.as_mut().filter(|_| measure.coordinates);
        if let Some(squares) = squares {
            for (unit, gradient) in self.scatter.accumulated().enumerate() {
                if !measure.micro_batches && self.own > 0 {
                    squares.add(unit, &gradient[..self.shards[unit].unit.len], self.targets);
                }
            }
            squares.reduce(Some(&self.world))?;
        }
        let whole = self.scatter.reduce_whole(&mut self.shards, self.own == 0)?;
        if self.walks == 0 {
            for shard in &mut self.shards {
                shard.gradient.fill(0.0);
            }
        }
        let own = match self.own {
            _ if whole.is_some() => whole,
            0 => Some(0.0),
            1 if self.measures() => Some(self.squared_norm),
            _ => None,
        };
        if measure.worker && own.is_none() {
            return Err(EngineError::Shape(
                "the norm of this rank's gradient was not asked for with its micro-batch, and \
                 under full sharding the gradient is gone"
                    .to_owned(),
            ));
        }
        let gradients = self.shards.iter().map(|shard| &shard.gradient);
        let part: f64 = gradients
            .map(|gradient| vector::squared_norm(gradient))
            .sum();
        Ok(Reduced {
            squared_norm: sum_over_ranks(&self.world, part)?,
            local_squared_norm: own.filter(|_| measure.worker),
        })
    }

    fn coordinates(&self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError> {
        let (rank, world) = (self.world.rank(), self.world.world());
        for shard in &self.shards {
            let part = part(shard.unit.len, rank, world);
            let gradient = &shard.gradient[..part.len()];
            let squares = self.squares.as_ref();
            let squares = squares.and_then(|squares| squares.part(shard.index, part));
            show(squares.ok_or_else(not_measured)?, gradient);
        }
        Ok(())
    }

    fn update(&mut self, step: AdamW) -> Result<(), EngineError> {
        for shard in &mut self.shards {
            adamw::update(
                &shard.unit,
                shard.offset,
                &mut shard.parameters,
                &shard.gradient,
                &mut shard.exp_avg,
                &mut shard.exp_avg_sq,
                &step,
            );
        }
        self.gather.forget();
        self.clear();
        Ok(())
    }

    fn discard(&mut self) {
        self.gather.stop(&mut self.shards);
        self.scatter.stop(&mut self.shards);
        // Elements that a collective did not return are lost with its world; the memory is not.
        for shard in &mut self.shards {
            shard.gradient.replace_lost();
            shard.parameters.replace_lost();
        }
        self.clear();
    }

    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        let shard = &mut self.shards[unit];
        let len = shard.unit.len;
        let mut gather = |part: &mut Buffer| {
            let whole = self.gather.whole(unit, part)?;
            Ok::<_, EngineError>(wanted.then(|| whole[..len].to_vec()))
        };
        let parameters = gather(&mut shard.parameters)?;
        let exp_avg = gather(&mut shard.exp_avg)?;
        let exp_avg_sq = gather(&mut shard.exp_avg_sq)?;
        Ok(parameters
            .zip(exp_avg)
            .zip(exp_avg_sq)
            .map(|((parameters, exp_avg), exp_avg_sq)| UnitState {
                parameters,
                exp_avg,
                exp_avg_sq,
            }))
    }

    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError> {
        let shard = &mut self.shards[unit];
        let held = part(shard.unit.len, self.world.rank(), self.world.world());
        for (part, whole) in [
            (&mut shard.parameters, &state.parameters),
            (&mut shard.exp_avg, &state.exp_avg),
            (&mut shard.exp_avg_sq, &state.exp_avg_sq),
        ] {
            part[..held.len()].copy_from_slice(&whole[held.clone()]);
        }
        self.gather.forget();
        Ok(())
    }
}

/// Sizes, including padding, of the buffers for whole units that are in use together: two for any unit, and
/// one for the first where embeddings are tied (the other units then share the two).
fn place_sizes(layout: &Layout, tied: bool, world: usize) -> impl Iterator<Item = usize> {
    let padded = move |len: usize| len.div_ceil(world) * world;
    let (first, others) = layout
        .units
        .split_at(usize::from(tied).min(layout.units.len()));
    let largest = others
        .iter()
        .map(|unit| padded(unit.len))
        .max()
        .unwrap_or(0);
    let first = first.first().map(|unit| padded(unit.len));
    [largest, largest].into_iter().chain(first)
}

#[cfg(test)]
mod tests;
