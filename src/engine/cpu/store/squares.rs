//! Sums for the coordinate-wise test: Σ G_{i,d}²/n_i for every coordinate d, over the groups of a step. Every
//! rank holds a vector of the model's size, with any strategy: a group's gradient is squared while it is
//! whole.

use cpu_kernels::vector;

use std::ops::Range;

use crate::comm::{Operation, World};
use crate::engine::cpu::arena::{Arena, Buffer};
use crate::engine::{EngineError, Layout, Measure};

/// The sums by unit: zero between steps; each rank has its own until they are reduced.
pub(super) struct Squares {
    units: Vec<Buffer>,
    /// Whether anything was added since the last reset.
    touched: bool,
}

impl Squares {
    /// Reserves memory if a step may measure coordinates.
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

    /// Adds a group: a unit of the gradient of its summed loss, and its target tokens. A group without target
    /// tokens is ignored.
    pub fn add(&mut self, unit: usize, gradient: &[f32], targets: u64) {
        if targets > 0 {
            self.touched = true;
            vector::add_squares(&mut self.units[unit], gradient, 1.0 / targets as f32);
        }
    }

    /// Sums over the ranks; all ranks call it.
    pub fn reduce(&mut self, world: Option<&World>) -> Result<(), EngineError> {
        self.touched = true;
        let Some(world) = world else {
            return Ok(());
        };
        let start = |unit: &mut Buffer| world.start(Operation::all_reduce(unit.lend()));
        let under_way: Vec<_> = self.units.iter_mut().map(start).collect();
        for (unit, reduction) in self.units.iter_mut().zip(under_way) {
            unit.restore(reduction.wait()?.data);
        }
        Ok(())
    }

    /// The sums of a part of a unit; `None` in a step that did not measure them.
    pub fn part(&self, unit: usize, part: Range<usize>) -> Option<&[f32]> {
        self.touched.then(|| &self.units[unit][part])
    }

    /// Resets the sums after a step.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.touched) {
            for unit in &mut self.units {
                unit.replace_lost();
                unit.fill(0.0);
            }
        }
    }
}

/// The error for a step that measured no coordinates.
pub(super) fn not_measured() -> EngineError {
    EngineError::Shape(
        "coordinates are available only in a step that measures them, from an engine made for it"
            .to_owned(),
    )
}
