//! Parameters, gradients and optimiser states of every unit: whole on every rank (DDP), or a part of everything
//! (FSDP, ZeRO-3).
//!
//! Every unit is a flat vector. Under sharding it is padded to a multiple of the world size, and rank r holds the
//! r-th part of its parameters, gradient and optimiser states; the padding is always zero. [`gather`] makes
//! parameters whole while a unit computes, [`scatter`] reduces gradients to shards; both run beside compute. If every
//! rank holds everything, its part is the whole: nothing is gathered, and the all-reduce of each unit's gradient starts
//! in the last micro-batch, when its backward is done, and runs beside the rest of the backward pass.
//!
//! A gradient that is whole on this rank until the step is reduced ([`Keeps::whole`]) is accumulated in place: the
//! first micro-batch of a step overwrites it, so nothing is zeroed, and later ones add to it. Where micro-batches may
//! be measured, they use a separate buffer first.
//!
//! In fixed point (`determinism: world`) every micro-batch has its gradient apart. It is rounded to integers and added to
//! those of the step, which ranks reduce as integers. At the end of the step the sum is rounded to f32. No sum depends on
//! the order of its addends then, so that neither the split nor the strategy changes a bit.
//!
//! The model walks the units and requests each one's parameters and a place for its gradient. With n units, every
//! walk on every rank has this order:
//!
//! ```text
//! begin(pass)
//! forward    acquire(0) … acquire(n-1)
//! backward   complete(n-1)                                       (Pass::Training only)
//!            acquire(n-2) complete(n-2) … acquire(1) complete(1) complete(0)
//! end()
//! ```
//!
//! Forward and backward of the last unit are one step (the head never stores its logits), so it is acquired
//! once. The embedding's backward needs no parameters, so it is not acquired again. `release(u)` follows as
//! soon as the walk no longer needs a unit's parameters: before the next `acquire`, except that tied
//! embeddings stay acquired until the head is done. The calls alone therefore determine the next unit to
//! prefetch.
//!
//! Under sharding a step reduces once per micro-batch. Ranks with fewer micro-batches join the walks of the others
//! with a gradient of zero.
//!
//! A failed walk is not continued; the caller calls [`Store::discard`] or gives up.

mod gather;
mod scatter;
mod squares;

use cpu_kernels::adamw::{self, Factors};
use cpu_kernels::fixed::{self, Added};
use cpu_kernels::vector;

use self::gather::Gather;
use self::scatter::{Scatter, no_gradient};
use self::squares::{Squares, not_measured};
use super::arena::{Arena, Buffer};
use crate::comm::{Kind, Operation, Pending, World};
use crate::engine::{
    AdamW, EngineError, Keeps, Layout, Measure, Pass, Reduced, Step, Strategy, Training, Unit,
    UnitState, not_norms, not_whole, part, sum_over_ranks,
};

/// The place for a unit's gradient of the current micro-batch.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// `unit.len` elements.
    pub values: &'a mut [f32],
    /// Whether to add to the values; otherwise they are unspecified and every one of them must be
    /// overwritten.
    pub add: bool,
}

/// The state of this rank; the module doc states the order of calls.
pub struct Store {
    /// `None` without other ranks.
    world: Option<World>,
    tied: bool,
    parts: Vec<Part>,
    /// `None` if every rank holds everything.
    gather: Option<Gather>,
    scatter: Scatter,
    keeps: Keeps,
    /// Nothing is trained: walks in both directions only read the parameters.
    is_frozen: bool,
    /// Other collectives of a walk, which other ranks may have more often, keep a reduction from starting within it.
    reduces_late: bool,
    squares: Option<Squares>,
    /// The purpose of the current walk.
    pass: Pass,
    /// The measurements of this step.
    measure: Measure,
    step: Step,
    /// Target tokens of the latest micro-batch.
    targets: u64,
    /// ‖gradient of the latest micro-batch‖², where measured.
    squared_norm: f64,
    /// In fixed point, the largest absolute value in the gradient of the latest micro-batch.
    peak: f32,
    /// The sum of the peaks of this rank's micro-batches in the step, [`fixed::peak_units`].
    peaks: u64,
}

/// What a rank's state is for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Purpose {
    pub strategy: Strategy,
    pub measure: Measure,
    /// Only weights: nothing is trained.
    pub forward_only: bool,
    /// Gradients are added in fixed point.
    pub in_fixed_point: bool,
}

/// This rank's part of one unit.
struct Part {
    unit: Unit,
    /// Offset of the part in the unit.
    offset: usize,
    /// Length of the part in elements, including padding.
    len: usize,
    parameters: Buffer,
    /// The part of the step's gradient, after its reduction.
    gradient: Buffer,
    /// The same in fixed point, if it is added so: this rank's until its reduction.
    sum: Option<Buffer<i64>>,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    /// This rank's gradient of the whole, padded unit before its reduction, if it is not `gradient` itself.
    unsharded: Option<Buffer>,
    /// This rank's gradient is final and measured.
    finished: bool,
    /// ‖this rank's gradient‖² of the step, where measured.
    squared_norm: Option<f64>,
    /// The reduction in progress; it holds the gradient's elements.
    reduction: Option<PendingSum>,
}

/// A reduction in progress.
enum PendingSum {
    Floats(Pending),
    Integers(Pending<i64>),
}

impl Part {
    /// This rank's gradient of the whole unit, if it is kept.
    fn whole(&mut self) -> &mut [f32] {
        let whole = self.unsharded.as_mut().unwrap_or(&mut self.gradient);
        &mut whole[..self.unit.len]
    }

    /// Waits for the reduction in progress, if any.
    fn finish_reduction(&mut self) -> Result<(), EngineError> {
        let Some(reduction) = self.reduction.take() else {
            return Ok(());
        };
        let Operation { data, shard, .. } = match (reduction, &mut self.sum) {
            (PendingSum::Floats(reduction), _) => reduction.wait()?,
            (PendingSum::Integers(reduction), Some(sum)) => {
                sum.restore(reduction.wait()?.data);
                return Ok(());
            }
            (PendingSum::Integers(_), None) => return Ok(()),
        };
        match &mut self.unsharded {
            Some(whole) => {
                whole.restore(data);
                // A reduction may use the padding as scratch, but it must stay zero.
                whole[self.unit.len..].fill(0.0);
                self.gradient.restore(shard);
            }
            None => self.gradient.restore(data),
        }
        Ok(())
    }
}

impl Store {
    /// Reserves memory for this rank's part of every unit and calls `initial(unit, offset, out)` for its
    /// weights.
    ///
    /// `world` is `None` where this process trains alone; `tied` says that the head uses the first unit;
    /// `measure` holds the measurements that any step may request.
    pub fn new(
        layout: &Layout,
        tied: bool,
        Purpose {
            strategy,
            measure,
            forward_only,
            in_fixed_point,
        }: Purpose,
        world: Option<World>,
        arena: &Arena,
        initial: &dyn Fn(&Unit, usize, &mut [f32]),
    ) -> Result<Store, EngineError> {
        // Without other ranks the only part is the whole.
        let world = world.filter(|world| world.world() > 1);
        let (sharding, unsharded) = match strategy {
            Strategy::Replicated => (None, false),
            Strategy::Sharded {
                unsharded_accumulation,
            } => (world.as_ref(), unsharded_accumulation && !in_fixed_point),
        };
        let (rank, ranks) = sharding.map_or((0, 1), |world| (world.rank(), world.world()));
        let kind = if sharding.is_some() {
            "shard of the "
        } else {
            ""
        };
        let mut parts = Vec::with_capacity(layout.units.len());
        for unit in &layout.units {
            let len = unit.len.div_ceil(ranks);
            let buffer =
                |len, what: &str| arena.buffer(len, &format!("{kind}{what} of {}", unit.name));
            let trained = if forward_only { 0 } else { len };
            let mut parameters = buffer(len, "weights")?;
            initial(unit, rank * len, &mut parameters);
            let mut part = Part {
                unit: unit.clone(),
                offset: rank * len,
                len,
                parameters,
                gradient: buffer(trained, "gradient")?,
                sum: None,
                exp_avg: buffer(trained, "optimiser state")?,
                exp_avg_sq: buffer(trained, "optimiser state")?,
                unsharded: None,
                finished: false,
                squared_norm: None,
                reduction: None,
            };
            if in_fixed_point {
                let what = format!("{kind}gradient in fixed point of {}", unit.name);
                part.sum = Some(arena.integers(trained, &what)?);
            }
            if sharding.is_some() && unsharded {
                let what = format!("unsharded gradient of {}", unit.name);
                part.unsharded = Some(arena.buffer(len * ranks, &what)?);
            }
            parts.push(part);
        }
        let keeps = Keeps {
            whole: sharding.is_none() || unsharded || forward_only,
            in_fixed_point,
            measure,
        };
        let gather = sharding.map(|world| Gather::new(layout, tied, world, arena));
        Ok(Store {
            gather: gather.transpose()?,
            scatter: Scatter::new(layout, tied, keeps, sharding, arena)?,
            keeps,
            is_frozen: forward_only,
            reduces_late: sharding.is_some(),
            squares: Squares::new(layout, measure, arena)?,
            world,
            tied,
            parts,
            pass: Pass::Evaluation,
            measure: Measure::default(),
            step: Step::default(),
            targets: 0,
            squared_norm: 0.0,
            peak: 0.0,
            peaks: 0,
        })
    }

    /// See [`crate::engine::Engine::rejoin`].
    pub fn rejoin(&mut self, world: Option<World>) -> Result<(), EngineError> {
        if self.gather.is_some() {
            return Err(not_whole());
        }
        self.discard();
        self.world = world.filter(|world| world.world() > 1);
        Ok(())
    }

    /// Starts no reduction within a walk.
    pub fn reducing_late(self) -> Store {
        Store {
            reduces_late: true,
            ..self
        }
    }

    /// Sets one unit's parameters from an element of the unit on.
    pub fn set(&mut self, unit: usize, start: usize, parameters: &[f32]) {
        let part = &mut self.parts[unit];
        let from = start.max(part.offset);
        let to = (start + parameters.len()).min(part.offset + part.len);
        if from < to {
            let held = from - part.offset..to - part.offset;
            part.parameters[held].copy_from_slice(&parameters[from - start..to - start]);
        }
        self.forget();
    }

    /// What a training walk does with the gradient of this rank's next micro-batch, which has this many target tokens
    /// and may be the last of its step.
    pub fn next(
        &mut self,
        measure: Measure,
        (targets, last): (u64, bool),
    ) -> Result<Training, EngineError> {
        let training = self.step.begin(self.keeps, measure, (targets, last))?;
        (self.measure, self.targets) = (measure, targets);
        (self.squared_norm, self.peak) = (0.0, 0.0);
        Ok(training)
    }

    /// Starts a walk over the units.
    pub fn begin(&mut self, pass: Pass) -> Result<(), EngineError> {
        if pass.training().is_some() && !self.is_frozen {
            self.scatter.begin(&mut self.parts)?;
        }
        self.pass = pass;
        if let Some(gather) = &mut self.gather {
            gather.begin(pass, &mut self.parts);
        }
        Ok(())
    }

    /// Makes the unit's parameters whole until they are released. Fails when the world has ended, so that no walk is
    /// finished that no rank needs.
    pub fn acquire(&mut self, unit: usize) -> Result<(), EngineError> {
        match (&mut self.gather, &self.world) {
            (Some(gather), _) => gather.acquire(unit, &mut self.parts),
            (None, Some(world)) => Ok(world.check()?),
            (None, None) => Ok(()),
        }
    }

    /// An acquired unit's parameters, `unit.len` elements.
    pub fn parameters(&self, unit: usize) -> &[f32] {
        let part = &self.parts[unit];
        match &self.gather {
            Some(gather) => gather.parameters(unit, part.unit.len),
            None => &part.parameters,
        }
    }

    /// An acquired unit's parameters and the place for its gradient. In backward the first unit's parameters
    /// may be empty, because it is not acquired there. The place and its values stay the same until the
    /// unit's [`Store::complete`], and so does `add`.
    pub fn gradient(&mut self, unit: usize) -> (&[f32], Gradient<'_>) {
        let training = self.pass.training().unwrap_or_default();
        let Part {
            unit: of,
            len,
            parameters,
            gradient,
            unsharded,
            ..
        } = &mut self.parts[unit];
        let parameters = match &self.gather {
            Some(gather) => gather.parameters(unit, of.len),
            None => parameters,
        };
        let gradient = if training.apart {
            Gradient {
                values: self.scatter.open(unit, of.len, *len),
                add: false,
            }
        } else {
            let whole = unsharded.as_mut().unwrap_or(gradient);
            Gradient {
                values: &mut whole[..of.len],
                add: !training.first,
            }
        };
        (parameters, gradient)
    }

    /// The walk does not need the unit's parameters for now.
    pub fn release(&mut self, unit: usize) {
        if let Some(gather) = &mut self.gather {
            gather.release(unit, &mut self.parts);
        }
    }

    /// The unit's gradient of this micro-batch is complete: the store may measure, reduce and free it.
    pub fn complete(&mut self, unit: usize) -> Result<(), EngineError> {
        let Some(training) = self.pass.training().filter(|_| !self.is_frozen) else {
            return Ok(());
        };
        let Training {
            first, measured, ..
        } = training;
        let part = &mut self.parts[unit];
        let len = part.unit.len;
        if let Some(squares) = &mut self.squares
            && training.micro_batch_squares
        {
            let gradient = match self.scatter.of(unit) {
                Some(gradient) => &gradient[..len],
                None if self.keeps.whole => part.whole(),
                None => return Err(no_gradient(unit)),
            };
            squares.add(unit, gradient, self.targets);
        }
        if !self.keeps.whole {
            let added = self
                .scatter
                .reduce(unit, &mut self.parts, first, measured)?;
            self.note(added);
            return Ok(());
        }
        if let Some(sum) = &mut part.sum {
            let gradient = self.scatter.close(unit).ok_or_else(|| no_gradient(unit))?;
            let added = fixed::add(&mut sum[..len], &gradient[..len], first);
            self.note(added);
            if training.last && !self.reduces_late {
                self.start_reduction(unit);
            }
            return Ok(());
        }
        // ‖this micro-batch's gradient‖² and ‖the sum‖².
        let norms = match self.scatter.close(unit) {
            Some(gradient) if measured => {
                Some(vector::add_measuring(part.whole(), &gradient[..len]))
            }
            Some(gradient) => {
                vector::accumulate(part.whole(), &gradient[..len]);
                None
            }
            None if measured => {
                let norm = vector::squared_norm(part.whole());
                Some((norm, norm))
            }
            None => None,
        };
        self.squared_norm += norms.map_or(0.0, |(own, _)| own);
        if training.last {
            self.finish(unit, self.measure, norms.map(|(_, sum)| sum));
            // Shards are reduced at the end of the step: other ranks may gather more often.
            if !self.reduces_late {
                self.start_reduction(unit);
            }
        }
        Ok(())
    }

    /// What is known of a unit of the micro-batch's gradient.
    fn note(&mut self, added: Added) {
        self.squared_norm += added.squared_norm;
        // The bits of sizes are ordered as the sizes are, and NaN is the largest.
        self.peak = f32::from_bits(self.peak.to_bits().max(added.peak.to_bits()));
    }

    /// This rank's gradient of a unit is final: measures it, unless ‖·‖² is known.
    fn finish(&mut self, unit: usize, measure: Measure, known: Option<f64>) {
        let part = &mut self.parts[unit];
        part.finished = true;
        if let Some(squares) = &mut self.squares
            && measure.coordinates
            && !measure.micro_batches
        {
            squares.add(unit, part.whole(), self.step.targets);
        }
        // Without other ranks this is the global norm; it is computed while the gradient is in the caches.
        if measure.worker || self.world.is_none() {
            let norm = known.unwrap_or_else(|| vector::squared_norm(part.whole()));
            part.squared_norm = Some(norm);
        }
    }

    /// Starts to reduce this rank's gradient of a unit.
    fn start_reduction(&mut self, unit: usize) {
        let Some(world) = &self.world else {
            return;
        };
        let part = &mut self.parts[unit];
        part.reduction = Some(match (&mut part.sum, &mut part.unsharded) {
            (Some(sum), _) => {
                PendingSum::Integers(world.start_fixed(Operation::all_reduce(sum.lend())))
            }
            (None, Some(whole)) => PendingSum::Floats(world.start(Operation {
                kind: Kind::ReduceScatter,
                data: whole.lend(),
                shard: part.gradient.lend(),
            })),
            (None, None) => {
                PendingSum::Floats(world.start(Operation::all_reduce(part.gradient.lend())))
            }
        });
    }

    /// Ends the walk. Returns ‖gradient of this micro-batch‖² when [`Measure::micro_batches`] requests it.
    pub fn end(&mut self) -> Option<f64> {
        self.pass.training()?;
        self.step.end();
        self.peaks = self.peaks.saturating_add(fixed::peak_units(self.peak));
        self.measure.micro_batches.then_some(self.squared_norm)
    }

    /// Takes part in a walk of the other ranks without a micro-batch.
    pub fn join(&mut self, pass: Pass) -> Result<(), EngineError> {
        if self.gather.is_none() {
            return Ok(());
        }
        let last = self.parts.len() - 1;
        self.begin(pass)?;
        for unit in 0..=last {
            self.acquire(unit)?;
            if unit > 0 || !self.tied {
                self.release(unit);
            }
        }
        if self.tied {
            self.release(0);
        }
        if pass.training().is_none() {
            return Ok(());
        }
        for unit in (0..=last).rev() {
            if unit > 0 && unit < last {
                self.acquire(unit)?;
                self.release(unit);
            }
            if !self.keeps.whole && !self.is_frozen {
                let part = &self.parts[unit];
                self.scatter.open(unit, part.unit.len, part.len).fill(0.0);
                let first = self.step.walks == 0;
                self.scatter.reduce(unit, &mut self.parts, first, false)?;
            }
        }
        self.step.join();
        Ok(())
    }

    /// Finishes the reduction of the step's gradient over the ranks. The gradient of a rank without a
    /// micro-batch in this step is zero.
    pub fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError> {
        self.scatter.finish(&mut self.parts)?;
        if self.keeps.in_fixed_point {
            return self.reduce_in_fixed_point();
        }
        // ‖reduced gradient‖² of a replicated model, computed while the all-reduces of later units run.
        let mut reduced = 0.0;
        let units = self.parts.len();
        if self.keeps.whole {
            // In the order in which backward completes the units, as on every other rank.
            for unit in (0..units).rev() {
                if self.step.accumulated == 0 {
                    self.parts[unit].whole().fill(0.0);
                }
                if !self.parts[unit].finished {
                    self.finish(unit, measure, None);
                }
                if self.parts[unit].reduction.is_none() {
                    self.start_reduction(unit);
                }
            }
            for part in self.parts.iter_mut().rev() {
                part.finish_reduction()?;
                if self.gather.is_none() && self.world.is_some() {
                    reduced += vector::squared_norm(&part.gradient);
                }
            }
        } else if self.step.walks == 0 {
            for part in &mut self.parts {
                part.gradient.fill(0.0);
            }
        }
        if let Some(squares) = self.squares.as_mut().filter(|_| measure.coordinates) {
            squares.reduce(self.world.as_ref())?;
        }
        let mut order: Vec<&Part> = self.parts.iter().collect();
        if self.gather.is_none() {
            order.reverse();
        }
        let norms = order.iter().map(|part| part.squared_norm);
        let local = match self.step.accumulated {
            _ if self.keeps.whole => norms.sum(),
            0 => Some(0.0),
            1 if self.measure.micro_batches || self.measure.worker => Some(self.squared_norm),
            _ => None,
        };
        if measure.worker && local.is_none() {
            return Err(EngineError::Shape(
                "the norm of this rank's gradient was not requested with its micro-batch, and the \
                 reduction has replaced the gradient"
                    .to_owned(),
            ));
        }
        let squared_norm = match (&self.world, local) {
            (None, Some(local)) => local,
            (Some(_), _) if self.gather.is_none() => reduced,
            _ => order
                .iter()
                .map(|part| vector::squared_norm(&part.gradient))
                .sum(),
        };
        Ok(Reduced {
            squared_norm: match &self.world {
                Some(world) if self.gather.is_some() => sum_over_ranks(world, squared_norm)?,
                _ => squared_norm,
            },
            local_squared_norm: local.filter(|_| measure.worker),
        })
    }

    /// As [`Store::reduce`], of integers. The norm is infinite if any gradient of a micro-batch was not finite, or if all of
    /// them may exceed the range of the sum.
    fn reduce_in_fixed_point(&mut self) -> Result<Reduced, EngineError> {
        for unit in (0..self.parts.len()).rev() {
            let part = &mut self.parts[unit];
            let has_none = match self.keeps.whole {
                true => self.step.accumulated == 0,
                false => self.step.walks == 0,
            };
            if let Some(sum) = part.sum.as_mut().filter(|_| has_none) {
                sum.fill(0);
            }
            if self.keeps.whole && part.reduction.is_none() {
                self.start_reduction(unit);
            }
        }
        let mut squares = 0u128;
        for part in self.parts.iter_mut().rev() {
            part.finish_reduction()?;
            if let Some(sum) = &part.sum {
                let of_unit = fixed::round(&mut part.gradient, sum);
                squares = squares.saturating_add(of_unit);
            }
        }
        let mut peaks = self.peaks;
        if let Some(world) = &self.world {
            let own = [&squares.to_le_bytes()[..], &peaks.to_le_bytes()].concat();
            let others = world.exchange(&own)?;
            let parts = others.iter().map(|part| squares_and_peaks(part));
            let parts: Vec<(u128, u64)> = parts.collect::<Result<_, _>>()?;
            peaks = parts.iter().fold(0, |sum, part| sum.saturating_add(part.1));
            if self.gather.is_some() {
                squares = parts.iter().fold(0, |sum, part| sum.saturating_add(part.0));
            }
        }
        let fits = peaks <= i64::MAX as u64;
        Ok(Reduced {
            squared_norm: if fits {
                fixed::squares(squares)
            } else {
                f64::INFINITY
            },
            local_squared_norm: None,
        })
    }

    /// Passes this rank's part of the coordinates to `show`; see [`crate::engine::Engine::coordinates`].
    pub fn coordinates(&self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError> {
        let (rank, ranks) = self
            .world
            .as_ref()
            .map_or((0, 1), |world| (world.rank(), world.world()));
        for (index, held) in self.parts.iter().enumerate() {
            let part = part(held.unit.len, rank, ranks);
            let gradient = match &self.gather {
                Some(_) => &held.gradient[..part.len()],
                None => &held.gradient[part.clone()],
            };
            let squares = self.squares.as_ref();
            let squares = squares.and_then(|squares| squares.part(index, part));
            show(squares.ok_or_else(not_measured)?, gradient);
        }
        Ok(())
    }

    /// The optimiser step on the reduced gradient; clears the step's gradient.
    pub fn update(&mut self, step: AdamW) {
        let factors = [false, true].map(|decay| Factors::new(&step, decay));
        for part in &mut self.parts {
            let held = part.offset..part.offset + part.len;
            for (range, decay) in part.unit.decay_ranges(held) {
                adamw::update(
                    &factors[usize::from(decay)],
                    &mut part.parameters[range.clone()],
                    &part.gradient[range.clone()],
                    &mut part.exp_avg[range.clone()],
                    &mut part.exp_avg_sq[range],
                );
            }
        }
        self.forget();
        self.clear();
    }

    /// Discards the step's gradient, also during a walk or a reduction.
    pub fn discard(&mut self) {
        if let Some(gather) = &mut self.gather {
            gather.stop(&mut self.parts);
        }
        self.scatter.stop(&mut self.parts);
        for part in &mut self.parts {
            let _ = part.finish_reduction();
            // Elements that a collective did not return are lost with its world; the memory is not.
            let buffers = [&mut part.gradient, &mut part.parameters];
            for buffer in buffers.into_iter().chain(&mut part.unsharded) {
                buffer.replace_lost();
            }
            if let Some(sum) = &mut part.sum {
                sum.replace_lost();
            }
        }
        self.clear();
    }

    /// Clears the step's gradient.
    fn clear(&mut self) {
        self.step = Step::default();
        self.peaks = 0;
        for part in &mut self.parts {
            part.finished = false;
            part.squared_norm = None;
        }
        if let Some(squares) = &mut self.squares {
            squares.clear();
        }
    }

    /// One unit's state, unsharded. Every rank calls it; only ranks with `wanted` receive the result.
    pub fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        let part = &mut self.parts[unit];
        let len = part.unit.len;
        let mut vector = |part: &mut Buffer| {
            let whole = match &mut self.gather {
                Some(gather) => gather.whole(unit, part)?,
                None => part,
            };
            let wanted = if wanted { len } else { 0 };
            Ok::<_, EngineError>(whole[..wanted].to_vec())
        };
        let state = UnitState {
            parameters: vector(&mut part.parameters)?,
            exp_avg: vector(&mut part.exp_avg)?,
            exp_avg_sq: vector(&mut part.exp_avg_sq)?,
        };
        Ok(wanted.then_some(state))
    }

    /// Sets one unit's state; its vectors have the unit's length.
    pub fn import(&mut self, unit: usize, state: &UnitState) {
        let part = &mut self.parts[unit];
        let end = (part.offset + part.len).min(part.unit.len);
        let held = part.offset.min(end)..end;
        for (part, whole) in [
            (&mut part.parameters, &state.parameters),
            (&mut part.exp_avg, &state.exp_avg),
            (&mut part.exp_avg_sq, &state.exp_avg_sq),
        ] {
            // Without steps there are no moments.
            let held = held.start..held.end.min(held.start + part.len());
            part[..held.len()].copy_from_slice(&whole[held]);
        }
        self.forget();
    }

    /// The parameters have changed, so every gathered copy is outdated.
    fn forget(&mut self) {
        if let Some(gather) = &mut self.gather {
            gather.forget();
        }
    }
}

/// The message of a rank at the end of a reduction in fixed point.
fn squares_and_peaks(message: &[u8]) -> Result<(u128, u64), EngineError> {
    let parts = message.split_first_chunk().and_then(|(squares, peaks)| {
        let peaks = peaks.try_into().ok()?;
        Some((u128::from_le_bytes(*squares), u64::from_le_bytes(peaks)))
    });
    parts.ok_or_else(not_norms)
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
