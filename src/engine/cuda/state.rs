//! Parameters, gradients and optimiser states of every unit on the device.

use super::arena::Bump;
use super::precision::Precision;
use crate::engine::{Layout, Measure};

/// Addresses of everything that lives as long as the engine.
#[derive(Debug)]
pub struct State {
    /// In the layout's order.
    pub units: Vec<UnitAddresses>,
    /// Gradients of one micro-batch, each the size of the largest unit: adjacent units take turns, so that
    /// one is added to its sum while the next is computed. `None` unless micro-batches are measured.
    pub scratch: Option<[u64; 2]>,
    /// The same for tied embeddings, whose gradient is in progress beside every other unit's.
    pub scratch_of_tied: Option<u64>,
    /// The factors of AdamW, without and with weight decay.
    pub factors: [u64; 2],
}

/// Addresses of one unit. Every buffer has the unit's length.
#[derive(Debug)]
pub struct UnitAddresses {
    /// Master weights, f32.
    pub weights: u64,
    /// The weights for matrix products: a bf16 copy, or the master weights themselves.
    pub operands: u64,
    /// The step's gradient, f32.
    pub gradient: u64,
    /// First moment of AdamW, f32.
    pub exp_avg: u64,
    /// Second moment of AdamW, f32.
    pub exp_avg_sq: u64,
    /// Sums for the coordinate-wise test, f32, if a step may measure coordinates.
    pub squares: Option<u64>,
}

/// Bytes of AdamW's factors, a structure of seven f32.
pub const FACTORS: usize = 7 * size_of::<f32>();

impl State {
    /// Takes the buffers. `measure` holds the measurements that any step may request.
    pub fn place(
        bump: &mut Bump,
        layout: &Layout,
        tied: bool,
        precision: Precision,
        measure: Measure,
    ) -> State {
        let units = layout.units.iter().map(|unit| {
            let weights = bump.f32(unit.len);
            UnitAddresses {
                weights,
                operands: match precision {
                    Precision::F32 => weights,
                    Precision::Bf16 => bump.take(unit.len, precision.size()),
                },
                gradient: bump.f32(unit.len),
                exp_avg: bump.f32(unit.len),
                exp_avg_sq: bump.f32(unit.len),
                squares: measure.coordinates.then(|| bump.f32(unit.len)),
            }
        });
        let units = units.collect();
        let apart = measure.micro_batches;
        let embedding = layout.units.first().map_or(0, |unit| unit.len);
        State {
            units,
            scratch: apart.then(|| [(); 2].map(|()| bump.f32(layout.largest_unit()))),
            scratch_of_tied: (apart && tied).then(|| bump.f32(embedding)),
            factors: [(); 2].map(|()| bump.take(FACTORS, 1)),
        }
    }
}
