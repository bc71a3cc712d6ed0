//! Every rank holds everything: one process, or data parallelism with replicas (DDP).
//!
//! The first micro-batch of a step writes its gradient directly into the accumulator, so nothing is zeroed.
//! Later ones add to it; where micro-batches may be measured, they use a unit-sized scratch first. In the
//! last micro-batch each unit's all-reduce starts when its backward is done and runs beside the rest of the
//! backward pass.

use super::squares::{Squares, not_measured};
use super::{Gradient, Pass, Store};
use crate::comm::{Operation, Pending, World};
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::cpu::kernels::{adamw, vector};
use crate::engine::{AdamW, EngineError, Layout, Measure, Reduced, Unit, UnitState, part};

/// Whole units on every rank.
pub struct Replicated {
    units: Vec<Replica>,
    world: Option<World>,
    /// Micro-batches may be measured: all but the first of a step use the scratch.
    measures_micro_batches: bool,
    squares: Option<Squares>,
    /// Gradient of one micro-batch, the size of the largest unit.
    scratch: Buffer,
    /// The same for tied embeddings, whose gradient is in progress beside every other unit's.
    scratch_of_tied: Option<Buffer>,
    /// Micro-batches whose gradients the accumulators hold.
    accumulated: u64,
    /// Their target tokens, including those of the current walk.
    targets: u64,
    /// The purpose of the current walk.
    pass: Pass,
    /// ‖gradient of this micro-batch‖².
    squared_norm: f64,
}

struct Replica {
    unit: Unit,
    parameters: Buffer,
    gradient: Buffer,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    /// The all-reduce in progress; it holds the gradient's elements.
    reduction: Option<Box<dyn Pending>>,
    /// ‖this rank's gradient‖² of the step, once known.
    squared_norm: Option<f64>,
}

impl Replicated {
    /// Reserves memory for every unit and calls `initial(unit, out)` for its weights.
    ///
    /// `world` is `None` where this process trains alone; `tied` says that the head uses the first unit;
    /// `measure` holds the measurements that any step may request.
    pub fn new(
        layout: &Layout,
        tied: bool,
        measure: Measure,
        world: Option<World>,
        arena: &Arena,
        initial: &dyn Fn(&Unit, &mut [f32]),
    ) -> Result<Replicated, EngineError> {
        let mut units = Vec::with_capacity(layout.units.len());
        for unit in &layout.units {
            let buffer = |what: &str| arena.buffer(unit.len, &format!("{what} of {}", unit.name));
            let mut parameters = buffer("weights")?;
            initial(unit, &mut parameters);
            units.push(Replica {
                unit: unit.clone(),
                parameters,
                gradient: buffer("gradient")?,
                exp_avg: buffer("optimiser state")?,
                exp_avg_sq: buffer("optimiser state")?,
                reduction: None,
                squared_norm: None,
            });
        }
        let scratch = |len| arena.buffer(len, "the gradient of one micro-batch");
        Ok(Replicated {
            scratch: scratch(layout.largest_unit())?,
            scratch_of_tied: match layout.units.first() {
                Some(first) if tied => Some(scratch(first.len)?),
                _ => None,
            },
            units,
            world: world.filter(|world| world.world() > 1),
            measures_micro_batches: measure.micro_batches,
            squares: Squares::new(layout, measure, arena)?,
            accumulated: 0,
            targets: 0,
            pass: Pass::Evaluation,
            squared_norm: 0.0,
        })
    }

    /// The measurements of this walk.
    fn measure(&self) -> Measure {
        match self.pass {
            Pass::Training { measure, .. } => measure,
            Pass::Evaluation => Measure::default(),
        }
    }

    /// Whether this micro-batch's gradient is kept separate until it is measured.
    fn apart(&self) -> bool {
        let measured = self.measures_micro_batches || self.measure().micro_batches;
        measured && self.accumulated > 0
    }

    /// This rank's gradient of a unit is final: measures it (unless ‖·‖² is known) and starts its reduction.
    fn finish(&mut self, unit: usize, measure: Measure, known: Option<f64>) {
        let replica = &mut self.units[unit];
        if measure.coordinates
            && !measure.micro_batches
            && let Some(squares) = &mut self.squares
        {
            squares.add(unit, &replica.gradient, self.targets);
        }
        // Without other ranks this is the global norm; it is computed while the gradient is in the caches.
        replica.squared_norm = (measure.worker || self.world.is_none())
            .then(|| known.unwrap_or_else(|| vector::squared_norm(&replica.gradient)));
        if let Some(world) = &self.world {
            replica.reduction = Some(world.start(Operation::AllReduce(replica.gradient.lend())));
        }
    }

    /// Clears the step's gradient.
    fn clear(&mut self) {
        self.accumulated = 0;
        self.targets = 0;
        if let Some(squares) = &mut self.squares {
            squares.clear();
        }
    }
}

impl Replica {
    /// Whether [`Replicated::finish`] has run for this unit in this step.
    fn finished(&self) -> bool {
        self.reduction.is_some() || self.squared_norm.is_some()
    }
}

impl Store for Replicated {
    fn begin(&mut self, pass: Pass) -> Result<(), EngineError> {
        if let Pass::Training {
            measure, targets, ..
        } = pass
        {
            if measure.coordinates && self.squares.is_none() {
                return Err(not_measured());
            }
            self.targets += targets;
        }
        self.pass = pass;
        self.squared_norm = 0.0;
        Ok(())
    }

    fn acquire(&mut self, _unit: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn parameters(&self, unit: usize) -> &[f32] {
        &self.units[unit].parameters
    }

    fn gradient(&mut self, unit: usize) -> (&[f32], Gradient<'_>) {
        let apart = self.apart();
        let replica = &mut self.units[unit];
        let values = if apart {
            let scratch = match &mut self.scratch_of_tied {
                Some(scratch) if unit == 0 => scratch,
                _ => &mut self.scratch,
            };
            &mut scratch[..replica.unit.len]
        } else {
            &mut replica.gradient[..]
        };
        let add = !apart && self.accumulated > 0;
        (&replica.parameters, Gradient { values, add })
    }

    fn release(&mut self, _unit: usize) {}

    fn complete(&mut self, unit: usize) -> Result<(), EngineError> {
        let Pass::Training {
            measure,
            targets,
            last,
        } = self.pass
        else {
            return Ok(());
        };
        let apart = self.apart();
        let replica = &mut self.units[unit];
        let scratch = match &self.scratch_of_tied {
            Some(scratch) if unit == 0 => scratch,
            _ => &self.scratch,
        };
        let scratch = apart.then(|| &scratch[..replica.unit.len]);
        if measure.coordinates
            && measure.micro_batches
            && let Some(squares) = &mut self.squares
        {
            squares.add(unit, scratch.unwrap_or(&replica.gradient), targets);
        }
        // ‖accumulated gradient‖², where measuring this micro-batch yields it too.
        let mut accumulated = None;
        match scratch {
            Some(scratch) if measure.micro_batches => {
                let (own, sum) = vector::add_measuring(&mut replica.gradient, scratch);
                self.squared_norm += own;
                accumulated = Some(sum);
            }
            Some(scratch) => vector::accumulate(&mut replica.gradient, scratch),
            None if measure.micro_batches => {
                let squared_norm = vector::squared_norm(&replica.gradient);
                self.squared_norm += squared_norm;
                accumulated = Some(squared_norm);
            }
            None => {}
        }
        if last {
            self.finish(unit, measure, accumulated);
        }
        Ok(())
    }

    fn end(&mut self) -> Result<Option<f64>, EngineError> {
        if self.pass == Pass::Evaluation {
            return Ok(None);
        }
        self.accumulated += 1;
        let measured = self.measure().micro_batches;
        Ok(measured.then_some(self.squared_norm))
    }

    fn join(&mut self, _pass: Pass) -> Result<(), EngineError> {
        Ok(())
    }

    fn reduce(&mut self, measure: Measure) -> Result<Reduced, EngineError> {
        // In the order in which backward completes the units, as on every other rank.
        for unit in (0..self.units.len()).rev() {
            if self.accumulated == 0 {
                self.units[unit].gradient.fill(0.0);
            }
            if !self.units[unit].finished() {
                self.finish(unit, measure, None);
            }
        }
        let (mut global, mut local) = (0.0, 0.0);
        for replica in self.units.iter_mut().rev() {
            let own = replica.squared_norm.take();
            let reduced = match replica.reduction.take() {
                Some(reduction) => {
                    replica.gradient.restore(super::all_reduced(reduction)?);
                    None
                }
                None => own,
            };
            local += own.unwrap_or(0.0);
            global += reduced.unwrap_or_else(|| vector::squared_norm(&replica.gradient));
        }
        if let Some(squares) = self.squares.as_mut().filter(|_| measure.coordinates) {
            squares.reduce(self.world.as_ref())?;
        }
        Ok(Reduced {
            squared_norm: global,
            local_squared_norm: measure.worker.then_some(local),
        })
    }

    fn coordinates(&self, show: &mut dyn FnMut(&[f32], &[f32])) -> Result<(), EngineError> {
        let (rank, world) = match &self.world {
            Some(world) => (world.rank(), world.world()),
            None => (0, 1),
        };
        for (unit, replica) in self.units.iter().enumerate() {
            let part = part(replica.unit.len, rank, world);
            let squares = self.squares.as_ref();
            let squares = squares.and_then(|squares| squares.part(unit, part.clone()));
            show(squares.ok_or_else(not_measured)?, &replica.gradient[part]);
        }
        Ok(())
    }

    fn update(&mut self, step: AdamW) -> Result<(), EngineError> {
        for replica in &mut self.units {
            adamw::update(
                &replica.unit,
                0,
                &mut replica.parameters,
                &replica.gradient,
                &mut replica.exp_avg,
                &mut replica.exp_avg_sq,
                &step,
            );
        }
        self.clear();
        Ok(())
    }

    fn discard(&mut self) {
        for replica in &mut self.units {
            if let Some(reduction) = replica.reduction.take()
                && let Ok(elements) = super::all_reduced(reduction)
            {
                replica.gradient.restore(elements);
            }
            replica.gradient.replace_lost();
            replica.squared_norm = None;
        }
        self.clear();
    }

    fn export(&mut self, unit: usize, wanted: bool) -> Result<Option<UnitState>, EngineError> {
        let replica = &self.units[unit];
        Ok(wanted.then(|| UnitState {
            parameters: replica.parameters.to_vec(),
            exp_avg: replica.exp_avg.to_vec(),
            exp_avg_sq: replica.exp_avg_sq.to_vec(),
        }))
    }

    fn import(&mut self, unit: usize, state: &UnitState) -> Result<(), EngineError> {
        let replica = &mut self.units[unit];
        replica.parameters.copy_from_slice(&state.parameters);
        replica.exp_avg.copy_from_slice(&state.exp_avg);
        replica.exp_avg_sq.copy_from_slice(&state.exp_avg_sq);
        Ok(())
    }
}
