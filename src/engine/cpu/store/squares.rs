//! What the coordinate-wise test needs: Σ G_{i,d}²/n_i for every coordinate d, over the groups of
//! a step. A vector of the size of the model on every rank, whatever the strategy: a group's
//! gradient is squared while it is whole.

use std::ops::Range;

use crate::comm::{Operation, World};
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::cpu::kernels::vector;
use crate::engine::{EngineError, Layout, Measure};

/// The sums by unit: zero from one step to the next, this rank's own until they are reduced.
pub(super) struct Squares {
    units: Vec<Buffer>,
    /// Whether anything was added since they were zero.
    touched: bool,
}

impl Squares {
    /// Takes memory, where a step may measure coordinates.
    pub fn new(
        layout: &Layout,
        measure: Measure,
        arena: &Arena,
    ) -> Result<Option<Squares>, EngineError> {
        if !measure.coordinates {
            return Ok(None);
        }
        let units = layout.units.iter().map(|unit| {
            let what = format!("the coordinate-wise test of {}", unit.name);
            arena.buffer(unit.len, &what)
        });
        Ok(Some(Squares {
            units: units.collect::<Result<_, _>>()?,
            touched: false,
        }))
    }

    /// Adds a group: a unit of the gradient of its summed loss, and its target tokens. Without
    /// any it is no group.
    pub fn add(&mut self, unit: usize, gradient: &[f32], targets: u64) {
        if targets > 0 {
            self.touched = true;
            vector::add_squares(&mut self.units[unit], gradient, 1.0 / targets as f32);
        }
    }

    /// Sums over the ranks; collective.
    pub fn reduce(&mut self, world: Option<&World>) -> Result<(), EngineError> {
        self.touched = true;
        let Some(world) = world else {
            return Ok(());
        };
        let start = |unit: &mut Buffer| world.start(Operation::AllReduce(unit.lend()));
        let under_way: Vec<_> = self.units.iter_mut().map(start).collect();
        for (unit, reduction) in self.units.iter_mut().zip(under_way) {
            unit.restore(super::all_reduced(reduction)?);
        }
        Ok(())
    }

    /// The sums of a part of a unit; none in a step that did not measure them.
    pub fn part(&self, unit: usize, part: Range<usize>) -> Option<&[f32]> {
        self.touched.then(|| &self.units[unit][part])
    }

    /// The step is over.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.touched) {
            for unit in &mut self.units {
                unit.replace_lost();
                unit.fill(0.0);
            }
        }
    }
}

/// That the step measured no coordinates, in words.
pub(super) fn not_measured() -> EngineError {
    EngineError::Shape(
        "coordinates are shown in a step that measures them only, by an engine made for it"
            .to_owned(),
    )
}
