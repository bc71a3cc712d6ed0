//! Parameters, gradients and optimiser states of every unit on the device.

use std::ops::Range;

use super::arena::Bump;
use super::options::{CudaOptions, Precision};
use super::workspace::PARTIALS;
use crate::engine::adapters::is_layer;
use crate::engine::{Adapted, Layout, Measure, Parameter, Unit, nf4, part};

const F32: usize = size_of::<f32>();

/// The part of every unit that a rank holds. A sharded unit is padded to `world` equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    pub rank: usize,
    /// Number of parts; 1 if every rank holds everything.
    pub world: usize,
    /// The step's gradient is kept whole until the step is reduced.
    pub whole_gradient: bool,
}

impl Share {
    /// The share of a rank that holds everything.
    pub const EVERYTHING: Share = Share {
        rank: 0,
        world: 1,
        whole_gradient: true,
    };

    pub fn is_sharded(self) -> bool {
        self.world > 1
    }

    /// Elements of a part of a unit of `len` elements, with padding.
    pub fn held(self, len: usize) -> usize {
        len.div_ceil(self.world)
    }

    /// Elements of all parts.
    pub fn padded(self, len: usize) -> usize {
        self.held(len) * self.world
    }

    /// The elements of this rank's part, without padding.
    pub fn part(self, len: usize) -> Range<usize> {
        part(len, self.rank, self.world)
    }

    /// The address of this rank's part of a whole, padded unit of f32.
    pub fn part_of(self, whole: u64, len: usize) -> u64 {
        whole + (self.rank * self.held(len) * F32) as u64
    }
}

/// The states of a rank.
#[derive(Debug)]
pub struct Held {
    /// What is trained: the model, or one unit with all adapters and the modules that are trained whole.
    pub trained: State,
    /// The model below adapters.
    pub frozen: Option<State>,
}

impl Held {
    /// Takes the buffers. `share` is that of the model.
    pub fn place(
        bump: &mut Bump,
        (model, adapted): (&Layout, Option<&Adapted>),
        tied: bool,
        options: &CudaOptions,
        share: Share,
    ) -> Held {
        let precision = options.precision;
        let holds = match options.forward_only {
            true => Holds::Weights,
            false => Holds::Steps(options.measure),
        };
        let Some(adapted) = adapted else {
            return Held {
                trained: State::place(bump, model, tied, precision, holds, share),
                frozen: None,
            };
        };
        let is_nested = adapted.settings.is_nested;
        let (below, share) = match adapted.settings.is_quantised {
            true => (Holds::Codes { is_nested }, Share::EVERYTHING),
            false => (Holds::Weights, share),
        };
        // Adapters are small: every rank has all of them, whatever is sharded.
        let (of, all) = (&adapted.trained, Share::EVERYTHING);
        Held {
            trained: State::place(bump, of, false, precision, holds, all),
            frozen: Some(State::place(bump, model, tied, precision, below, share)),
        }
    }

    /// The state with the model's weights.
    pub fn model(&self) -> &State {
        self.frozen.as_ref().unwrap_or(&self.trained)
    }
}

/// What a state holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Holds {
    /// Weights and all that steps need, which may request these measurements.
    Steps(Measure),
    /// Weights that no step changes. Products in bf16 need no master weights.
    Weights,
    /// The same, with the linear layers of blocks in 4 bits. Nested: their scales are in 8 bits.
    Codes { is_nested: bool },
}

impl Holds {
    /// Whether steps change the weights.
    pub fn trains(self) -> bool {
        matches!(self, Holds::Steps(_))
    }
}

/// Addresses of everything that lives as long as the engine.
#[derive(Debug)]
pub struct State {
    pub holds: Holds,
    pub share: Share,
    /// In the layout's order.
    pub units: Vec<UnitAddresses>,
    /// Gradients of one micro-batch, each the size of the largest unit that uses it: adjacent units take turns,
    /// so that one is added to its sum or reduced while the next is computed. Exports of a sharded model use
    /// them, too. `None` if every rank holds everything and no micro-batch is measured.
    pub scratch: Option<[u64; 2]>,
    /// The same for tied embeddings, whose gradient is in progress beside every other unit's.
    pub scratch_of_tied: Option<u64>,
    /// The factors of AdamW, without and with weight decay.
    pub factors: [u64; 2],
    /// `None` if every rank holds everything.
    pub places: Option<Places>,
    /// Linear layers in 4 bits.
    pub quantised: Option<Quantised>,
}

/// Addresses of one unit. Every buffer has the length of this rank's part, unless stated.
#[derive(Debug, Clone, Copy)]
pub struct UnitAddresses {
    /// Master weights, f32; empty without [`UnitAddresses::has_master`].
    pub weights: u64,
    /// Whether there are f32 weights. Frozen ones have only their copy, but tokens are looked up in f32.
    pub has_master: bool,
    /// The bf16 copy of the weights for matrix products. A sharded embedding has none: its f32 weights are
    /// gathered, because tokens are looked up in them.
    pub copy: Option<u64>,
    /// The unit's vectors in their order, f32, whole; 0 beyond the last.
    pub vectors: [u64; VECTORS],
    /// The step's gradient, f32; the padded unit's length with [`Share::whole_gradient`].
    pub gradient: u64,
    /// First moment of AdamW, f32.
    pub exp_avg: u64,
    /// Second moment of AdamW, f32.
    pub exp_avg_sq: u64,
    /// Sums for the coordinate-wise test, f32, if a step may measure coordinates: the unit's length.
    pub squares: Option<u64>,
}

/// A model whose linear layers are in NF4. Every rank has all of it; a block's weights are whole while it computes.
#[derive(Debug)]
pub struct Quantised {
    /// By unit.
    pub layers: Vec<Vec<Layer>>,
    /// The acquired block for matrix products, of the size of the largest.
    pub place: u64,
    /// [`nf4::CODE`].
    pub table: u64,
    /// [`nf4::numbers`].
    pub numbers: u64,
}

/// The weights of a linear layer in 4 bits.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Of the weights within the unit.
    pub range: Range<usize>,
    /// See [`nf4::sizes`].
    pub codes: u64,
    /// f32; of nested ones while the block is acquired.
    pub scales: u64,
    pub nested: Option<NestedScales>,
}

/// Scales in 8 bits.
#[derive(Debug, Clone)]
pub struct NestedScales {
    /// Their number.
    pub count: usize,
    pub codes: u64,
    /// Of their groups, and then their mean, f32.
    pub factors: u64,
}

/// A unit's weights on this rank, whole.
#[derive(Debug, Clone, Copy)]
pub struct Whole {
    /// f32; for the embedding only.
    pub table: u64,
    /// For matrix products: bf16, or f32 with [`Precision::F32`].
    pub operands: u64,
    /// As [`UnitAddresses::vectors`].
    pub vectors: [u64; VECTORS],
}

/// Places for gathered weights.
#[derive(Debug)]
pub struct Places {
    /// Adjacent units take turns, so that one is gathered while the other computes.
    pub turns: [u64; 2],
    /// Tied embeddings stay gathered until the head is done: f32, and for matrix products.
    pub of_tied: Option<[u64; 2]>,
    /// The vectors of all units, f32.
    pub vectors: u64,
    /// Their number of elements.
    pub vectors_len: usize,
    /// ‖this rank's part of the step's gradient‖², f64.
    pub norm: u64,
    /// Its partial sums, f64.
    pub partials: u64,
}

/// The most vectors of a unit: two norms with biases, seven biases of linear layers, and the norms of queries and keys.
pub const VECTORS: usize = 13;

/// Bytes of AdamW's factors, a structure of seven f32.
pub const FACTORS: usize = 7 * F32;

impl State {
    pub fn place(
        bump: &mut Bump,
        layout: &Layout,
        tied: bool,
        precision: Precision,
        holds: Holds,
        share: Share,
    ) -> State {
        let sharded = share.is_sharded();
        let trains = holds.trains();
        let measure = match holds {
            Holds::Steps(measure) => measure,
            Holds::Weights | Holds::Codes { .. } => Measure::default(),
        };
        let trained = |len: usize| if trains { len } else { 0 };
        let nested = match holds {
            Holds::Codes { is_nested } => Some(is_nested),
            Holds::Steps(_) | Holds::Weights => None,
        };
        let in_codes = |unit: &Unit| nested.is_some() && unit.has_layers();
        // Matrix products use the embedding only as a tied head; sharded, that has another place.
        let has_copy = |unit: &Unit| {
            let is_operand = !unit.is_looked_up() || tied && !sharded;
            precision == Precision::Bf16 && is_operand && !in_codes(unit)
        };
        let has_master = |unit: &Unit| {
            let is_read = trains || unit.is_looked_up() || precision == Precision::F32;
            is_read && !in_codes(unit)
        };
        // Kernels read vectors in f32, whole.
        let are_apart = |unit: &Unit| sharded || !has_master(unit);
        let vectors_len = layout
            .units
            .iter()
            .filter(|unit| are_apart(unit))
            .flat_map(vectors)
            .map(|vector| vector.len())
            .sum();
        let all_vectors = bump.f32(vectors_len);
        let mut next = all_vectors;
        let units = layout.units.iter().map(|unit| {
            let held = share.held(unit.len);
            let has_master = has_master(unit);
            let weights = bump.f32(if has_master { held } else { 0 });
            let mut addresses = [0; VECTORS];
            for (address, vector) in addresses.iter_mut().zip(vectors(unit)) {
                if are_apart(unit) {
                    *address = next;
                    next += (vector.len() * F32) as u64;
                } else {
                    *address = weights + (vector.start * F32) as u64;
                }
            }
            UnitAddresses {
                weights,
                has_master,
                copy: has_copy(unit).then(|| bump.take(held, precision.size())),
                vectors: addresses,
                gradient: bump.f32(match share.whole_gradient {
                    true => trained(share.padded(unit.len)),
                    false => trained(held),
                }),
                exp_avg: bump.f32(trained(held)),
                exp_avg_sq: bump.f32(trained(held)),
                squares: measure.coordinates.then(|| bump.f32(unit.len)),
            }
        });
        let units = units.collect();
        let quantised =
            nested.map(|is_nested| Quantised::place(bump, layout, precision, is_nested));
        let apart = trains && (measure.micro_batches || sharded);
        let embedding = share.padded(layout.units.first().map_or(0, |unit| unit.len));
        let scratch = if sharded {
            turns(layout, tied, |unit| share.padded(unit.len))
        } else {
            [layout.largest_unit(); 2]
        };
        State {
            holds,
            share,
            units,
            scratch: apart.then(|| scratch.map(|len| bump.f32(len))),
            scratch_of_tied: (apart && tied).then(|| bump.f32(embedding)),
            factors: [(); 2].map(|()| bump.take(FACTORS, 1)),
            places: sharded.then(|| {
                let bytes = |unit: &Unit| {
                    let size = if has_copy(unit) {
                        precision.size()
                    } else {
                        F32
                    };
                    share.padded(unit.len) * size
                };
                Places {
                    turns: turns(layout, tied, bytes).map(|bytes| bump.take(bytes, 1)),
                    of_tied: tied.then(|| {
                        let table = bump.f32(embedding);
                        match precision {
                            Precision::F32 => [table, table],
                            Precision::Bf16 => [table, bump.take(embedding, precision.size())],
                        }
                    }),
                    vectors: all_vectors,
                    vectors_len,
                    norm: bump.take(1, size_of::<f64>()),
                    partials: bump.take(PARTIALS, size_of::<f64>()),
                }
            }),
            quantised,
        }
    }

    /// A unit's weights, if every rank holds everything; of a quantised block while it is acquired.
    pub fn whole(&self, unit: usize) -> Whole {
        let UnitAddresses {
            weights,
            copy,
            vectors,
            ..
        } = self.units[unit];
        let in_codes = self.quantised.as_ref();
        let place = in_codes.filter(|it| !it.layers[unit].is_empty());
        Whole {
            table: weights,
            operands: place.map_or(copy.unwrap_or(weights), |it| it.place),
            vectors,
        }
    }

    /// Whether the gradient of each micro-batch is reduced to shards as soon as it is complete.
    pub fn scatters(&self) -> bool {
        self.holds.trains() && self.share.is_sharded() && !self.share.whole_gradient
    }

    /// The sums for the coordinate-wise test with their numbers of elements, from the last unit to the first.
    pub fn squares(&self, layout: &Layout) -> impl Iterator<Item = (u64, usize)> {
        let units = self.units.iter().zip(&layout.units).rev();
        units.filter_map(|(addresses, unit)| Some((addresses.squares?, unit.len)))
    }

    /// The addresses with which this rank updates its part of a unit of `len` elements.
    pub fn part(&self, unit: usize, len: usize) -> UnitAddresses {
        let addresses = self.units[unit];
        UnitAddresses {
            gradient: if self.share.whole_gradient {
                self.share.part_of(addresses.gradient, len)
            } else {
                addresses.gradient
            },
            ..addresses
        }
    }
}

impl Quantised {
    fn place(bump: &mut Bump, layout: &Layout, precision: Precision, is_nested: bool) -> Quantised {
        let blocks = layout.units.iter().filter(|unit| unit.has_layers());
        let largest = blocks.map(|unit| unit.len).max().unwrap_or(0);
        let place = bump.take(largest, precision.size());
        let numbers = bump.f32(256);
        let all = layout.units.iter().flat_map(|unit| &unit.parameters);
        let all = all.filter(|it| is_nested && is_layer(it.role));
        let most_scales = all.map(|it| nf4::sizes(it.len())[1]).max();
        let scales_of_layer = bump.f32(most_scales.unwrap_or(0));
        let layers = layout.units.iter().map(|unit| {
            let layers = unit.parameters.iter().filter(|it| is_layer(it.role));
            let layers = layers.map(|layer| {
                let [bytes, scales] = nf4::sizes(layer.len());
                Layer {
                    range: layer.range(),
                    codes: bump.take(bytes, 1),
                    scales: match is_nested {
                        true => scales_of_layer,
                        false => bump.f32(scales),
                    },
                    nested: is_nested.then(|| NestedScales {
                        count: scales,
                        codes: bump.take(scales, 1),
                        factors: bump.f32(nf4::groups(scales) + 1),
                    }),
                }
            });
            layers.collect()
        });
        Quantised {
            layers: layers.collect(),
            place,
            table: bump.f32(nf4::CODE.len()),
            numbers,
        }
    }
}

/// The ranges of a unit's vectors.
pub fn vectors(unit: &Unit) -> impl Iterator<Item = Range<usize>> {
    unit.vectors().map(Parameter::range)
}

/// The larger sizes of the two places in which the units take turns: the even units in the first, the odd ones
/// in the second. Tied embeddings are in neither.
fn turns(layout: &Layout, tied: bool, size: impl Fn(&Unit) -> usize) -> [usize; 2] {
    [0, 1].map(|turn| {
        let units = layout.units.iter().enumerate().skip(usize::from(tied));
        let of_turn = units.filter(|(index, _)| index % 2 == turn);
        let sizes = of_turn.map(|(_, unit)| size(unit));
        sizes.max().unwrap_or(0)
    })
}

#[cfg(test)]
mod tests {
    use super::super::arena::bytes_of;
    use super::*;
    use crate::engine::layout;
    use crate::engine::testing::{config, tied};

    /// Bytes of a rank's state by the formula of `docs/gpu.md`, without the rounding of buffers.
    fn formula(layout: &Layout, is_tied: bool, precision: Precision, share: Share) -> usize {
        let all = |units: &[Unit]| -> usize { units.iter().map(|unit| share.held(unit.len)).sum() };
        let embedding = share.padded(layout.units[0].len);
        let of_turn = |turn: usize, size: &dyn Fn(usize) -> usize| {
            let units = layout.units.iter().enumerate().skip(usize::from(is_tied));
            let sizes = units
                .filter(|(unit, _)| unit % 2 == turn)
                .map(|(unit, of)| size(unit) * share.padded(of.len));
            sizes.max().unwrap()
        };
        let turns = |size: &dyn Fn(usize) -> usize| of_turn(0, size) + of_turn(1, size);
        let vectors: usize = layout
            .units
            .iter()
            .flat_map(vectors)
            .map(|vector| vector.len())
            .sum();
        let bf16 = usize::from(precision == Precision::Bf16);
        let gathered = |unit: usize| if bf16 == 1 && unit > 0 { 2 } else { 4 };
        16 * all(&layout.units)
            + bf16 * 2 * all(&layout.units[1..])
            + turns(&|_| 4)
            + turns(&gathered)
            + usize::from(is_tied) * (4 + 4 + bf16 * 2) * embedding
            + 4 * vectors
    }

    #[test]
    fn a_sharded_state_has_the_documented_memory() {
        for (config, is_tied) in [(config(), false), (tied(), true)] {
            let layout = layout(&config);
            for (world, precision) in [
                (2, Precision::F32),
                (3, Precision::Bf16),
                (8, Precision::Bf16),
            ] {
                let share = Share {
                    rank: 1,
                    world,
                    whole_gradient: false,
                };
                let place = |bump: &mut Bump| {
                    let holds = Holds::Steps(Measure::default());
                    State::place(bump, &layout, is_tied, precision, holds, share)
                };
                let buffers = 5 * layout.units.len() + 12;
                let rounding = 256 * buffers + PARTIALS * size_of::<f64>();
                let expected = formula(&layout, is_tied, precision, share);
                let bytes = bytes_of(place) as usize;
                assert!(
                    (expected..expected + rounding).contains(&bytes),
                    "{bytes}, not {expected}"
                );
            }
        }
    }
}
