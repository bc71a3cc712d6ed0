//! A frozen model whose linear layers are in NF4. Every rank has all of it; a block's weights are whole while it computes.

use super::arena::{Arena, Buffer};
use crate::engine::adapters::is_layer;
use crate::engine::{EngineError, Layout, Unit, nf4};

pub struct Quantised {
    units: Vec<Packed>,
    /// The acquired block, in f32.
    place: Buffer,
}

struct Packed {
    unit: Unit,
    /// Codes and scales of the linear layers, in order.
    layers: Vec<[Buffer; 2]>,
    /// All other parameters, in order, f32.
    others: Buffer,
}

impl Quantised {
    /// Reserves memory for the model and calls `initial(unit, offset, out)` for its weights.
    pub fn new(
        layout: &Layout,
        arena: &Arena,
        initial: &dyn Fn(&Unit, usize, &mut [f32]),
    ) -> Result<Quantised, EngineError> {
        let blocks = layout.units.iter().filter(|unit| unit.has_layers());
        let largest = blocks.map(|unit| unit.len).max().unwrap_or(0);
        let mut quantised = Quantised {
            units: Vec::with_capacity(layout.units.len()),
            place: arena.buffer(largest, "the weights of a block")?,
        };
        for (index, unit) in layout.units.iter().enumerate() {
            let what = format!("weights of {} in 4 bits", unit.name);
            let layers = unit.parameters.iter().filter(|it| is_layer(it.role));
            let layers = layers.map(|it| {
                let [bytes, scales] = nf4::sizes(it.len());
                Ok([
                    arena.buffer(bytes.div_ceil(size_of::<f32>()), &what)?,
                    arena.buffer(scales, &what)?,
                ])
            });
            let others = unit.parameters.iter().filter(|it| !is_layer(it.role));
            let others = others.map(|it| it.len()).sum();
            quantised.units.push(Packed {
                unit: unit.clone(),
                layers: layers.collect::<Result<_, EngineError>>()?,
                others: arena.buffer(others, &format!("weights of {}", unit.name))?,
            });
            let mut parameters = vec![0.0; unit.len];
            initial(unit, 0, &mut parameters);
            quantised.import(index, &parameters);
        }
        Ok(quantised)
    }

    /// Quantises one unit's parameters.
    pub fn import(&mut self, unit: usize, parameters: &[f32]) {
        let Packed {
            unit,
            layers,
            others,
        } = &mut self.units[unit];
        let (mut layers, mut at) = (layers.iter_mut(), 0);
        for parameter in &unit.parameters {
            let values = &parameters[parameter.range()];
            if !is_layer(parameter.role) {
                others[at..at + values.len()].copy_from_slice(values);
                at += values.len();
            } else if let Some([codes, scales]) = layers.next() {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(codes);
                nf4::quantise(values, &mut bytes[..values.len().div_ceil(2)], scales);
            }
        }
    }

    /// Makes a unit's parameters whole, until another one's are.
    pub fn acquire(&mut self, unit: usize) {
        let Packed {
            unit,
            layers,
            others,
        } = &self.units[unit];
        if layers.is_empty() {
            return;
        }
        let (mut layers, mut at) = (layers.iter(), 0);
        for parameter in &unit.parameters {
            let place = &mut self.place[parameter.range()];
            if !is_layer(parameter.role) {
                place.copy_from_slice(&others[at..at + place.len()]);
                at += place.len();
            } else if let Some([codes, scales]) = layers.next() {
                let bytes: &[u8] = bytemuck::cast_slice(codes);
                nf4::dequantise(place, &bytes[..parameter.len().div_ceil(2)], scales);
            }
        }
    }

    /// An acquired unit's parameters. Those of the embedding and the head are not quantised.
    pub fn parameters(&self, unit: usize) -> &[f32] {
        let Packed {
            unit,
            layers,
            others,
        } = &self.units[unit];
        match layers.is_empty() {
            true => others,
            false => &self.place[..unit.len],
        }
    }
}
