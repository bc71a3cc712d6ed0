//! A frozen model whose linear layers are in NF4. Every rank has all of it; a block's weights are whole while it computes.

use super::arena::{Arena, Buffer};
use crate::engine::adapters::is_layer;
use crate::engine::{EngineError, Layout, Unit, nf4};

pub struct Quantised {
    units: Vec<Packed>,
    /// The acquired block, in f32.
    place: Buffer,
    /// The scales of a layer where they have codes themselves, and the numbers of these.
    scales: Buffer,
    numbers: [f32; 256],
}

struct Packed {
    unit: Unit,
    /// The linear layers, in order.
    layers: Vec<Layer>,
    /// All other parameters, in order, f32.
    others: Buffer,
}

/// A linear layer's weights.
struct Layer {
    codes: Buffer,
    scales: Scales,
}

enum Scales {
    Whole(Buffer),
    /// In 8 bits, around their mean.
    Nested {
        codes: Buffer,
        factors: Buffer,
        offset: f32,
    },
}

impl Quantised {
    /// Reserves memory for the model and calls `initial(unit, offset, out)` for its weights. Nested: scales are in 8 bits.
    pub fn new(
        layout: &Layout,
        is_nested: bool,
        arena: &Arena,
        initial: &dyn Fn(&Unit, usize, &mut [f32]),
    ) -> Result<Quantised, EngineError> {
        let blocks = layout.units.iter().filter(|unit| unit.has_layers());
        let largest = blocks.map(|unit| unit.len).max().unwrap_or(0);
        let all = layout.units.iter().flat_map(|unit| &unit.parameters);
        let layers = all.filter(|it| is_nested && is_layer(it.role));
        let most_scales = layers.map(|it| nf4::sizes(it.len())[1]).max();
        let mut quantised = Quantised {
            units: Vec::with_capacity(layout.units.len()),
            place: arena.buffer(largest, "the weights of a block")?,
            scales: arena.buffer(most_scales.unwrap_or(0), "the scales of a layer")?,
            numbers: nf4::numbers(),
        };
        for (index, unit) in layout.units.iter().enumerate() {
            let what = format!("weights of {} in 4 bits", unit.name);
            let layers = unit.parameters.iter().filter(|it| is_layer(it.role));
            let layers = layers.map(|it| {
                let [bytes, scales] = nf4::sizes(it.len());
                let of_bytes = |bytes: usize| arena.buffer(bytes.div_ceil(size_of::<f32>()), &what);
                Ok(Layer {
                    codes: of_bytes(bytes)?,
                    scales: match is_nested {
                        false => Scales::Whole(arena.buffer(scales, &what)?),
                        true => Scales::Nested {
                            codes: of_bytes(scales)?,
                            factors: arena.buffer(nf4::groups(scales), &what)?,
                            offset: 0.0,
                        },
                    },
                })
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
        let place = &mut self.scales;
        for parameter in &unit.parameters {
            let values = &parameters[parameter.range()];
            if !is_layer(parameter.role) {
                others[at..at + values.len()].copy_from_slice(values);
                at += values.len();
            } else if let Some(layer) = layers.next() {
                let [bytes, count] = nf4::sizes(values.len());
                let of_values = &mut bytemuck::cast_slice_mut(&mut layer.codes)[..bytes];
                match &mut layer.scales {
                    Scales::Whole(scales) => nf4::quantise(values, of_values, scales),
                    Scales::Nested {
                        codes,
                        factors,
                        offset,
                    } => {
                        let scales = &mut place[..count];
                        nf4::quantise(values, of_values, scales);
                        let codes = &mut bytemuck::cast_slice_mut(codes)[..count];
                        *offset = nf4::quantise_scales(scales, codes, factors);
                    }
                }
            }
        }
    }

    /// Sets parameters of one unit that are not quantised, from an element of the unit on.
    pub fn set(&mut self, unit: usize, start: usize, parameters: &[f32]) {
        let Packed { unit, others, .. } = &mut self.units[unit];
        let before = unit.parameters.iter().take_while(|it| it.offset < start);
        let before = before.filter(|it| !is_layer(it.role));
        let at: usize = before.map(|it| it.len()).sum();
        others[at..at + parameters.len()].copy_from_slice(parameters);
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
            } else if let Some(layer) = layers.next() {
                let [bytes, count] = nf4::sizes(parameter.len());
                let of_values = &bytemuck::cast_slice(&layer.codes)[..bytes];
                match &layer.scales {
                    Scales::Whole(scales) => nf4::dequantise(place, of_values, scales),
                    Scales::Nested {
                        codes,
                        factors,
                        offset,
                    } => {
                        let scales = &mut self.scales[..count];
                        let codes = &bytemuck::cast_slice(codes)[..count];
                        nf4::dequantise_scales(scales, codes, factors, *offset, &self.numbers);
                        nf4::dequantise(place, of_values, scales);
                    }
                }
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
