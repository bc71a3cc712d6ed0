//! Copies between the host and the device, through pinned memory.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::driver::{Device, Pinned, Stream};
use super::error::CudaError;
use super::launches::Kernels;
use super::options::Precision;
use super::state::{Layer, State, vectors};
use crate::engine::{Unit, nf4};

/// Bytes of the pinned memory.
const BYTES: usize = 4 << 20;

/// Fills in the elements of a unit from an offset on; they are 0 before.
pub type Values<'a> = &'a dyn Fn(usize, &mut [f32]);

/// Pinned memory for copies, each of which has ended when its call returns.
pub struct Staging {
    memory: Pinned,
}

impl Staging {
    pub fn new(device: &Arc<Device>) -> Result<Staging, CudaError> {
        let memory = device.pinned(BYTES, "staging")?;
        Ok(Staging { memory })
    }

    /// Copies bytes to a buffer of at least as many.
    pub fn upload(&mut self, stream: &Stream, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let mut at = to;
        for part in bytes.chunks(BYTES) {
            self.memory.bytes_mut()[..part.len()].copy_from_slice(part);
            // SAFETY: the destination is a buffer of at least these bytes, and the pinned memory does not
            // change until the copy is done.
            unsafe { stream.upload(at, &self.memory, 0..part.len())? };
            stream.synchronize()?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Copies bytes from a buffer of at least as many.
    pub fn download(
        &mut self,
        stream: &Stream,
        from: u64,
        bytes: &mut [u8],
    ) -> Result<(), CudaError> {
        let mut at = from;
        for part in bytes.chunks_mut(BYTES) {
            // SAFETY: the source is a buffer of at least these bytes; the host reads them after the copy.
            unsafe { stream.download(&mut self.memory, 0, at, part.len())? };
            stream.synchronize()?;
            part.copy_from_slice(&self.memory.bytes()[..part.len()]);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes this rank's part of a unit's weights.
    pub fn write(
        &mut self,
        (stream, kernels): (&Stream, &Kernels),
        state: &State,
        (index, unit): (usize, &Unit),
        values: Values<'_>,
    ) -> Result<(), CudaError> {
        let (at, share) = (&state.units[index], state.share);
        // Vectors of a sharded model that is trained are gathered by each walk.
        if !at.has_master || share.is_sharded() && !state.holds.trains() {
            for (range, address) in vectors(unit).zip(at.vectors) {
                let len = range.len();
                self.fill(stream, (address, len, Precision::F32), range, values)?;
            }
        }
        if let Some(quantised) = &state.quantised {
            for layer in &quantised.layers[index] {
                self.quantise(stream, layer, values)?;
            }
        }
        let (part, held) = (share.part(unit.len), share.held(unit.len));
        if at.has_master {
            let master = (at.weights, held, Precision::F32);
            self.fill(stream, master, part, values)?;
            if let Some(copy) = at.copy {
                kernels.cast(stream, copy, at.weights, held)?;
            }
        } else if let Some(copy) = at.copy {
            self.fill(stream, (copy, held, Precision::Bf16), part, values)?;
        }
        stream.synchronize()
    }

    /// Writes a range of a unit to a buffer of this many elements; the others are 0, because padding is gathered, too.
    fn fill(
        &mut self,
        stream: &Stream,
        (to, len, element): (u64, usize, Precision),
        range: Range<usize>,
        values: Values<'_>,
    ) -> Result<(), CudaError> {
        let most = BYTES / size_of::<f32>();
        let mut at = to;
        for start in range.clone().step_by(most) {
            let mut floats = vec![0.0f32; most.min(range.end - start)];
            values(start, &mut floats);
            match element {
                Precision::F32 => self.upload(stream, at, bytemuck::cast_slice(&floats))?,
                Precision::Bf16 => {
                    let halves: Vec<bf16> = floats.iter().map(|&it| bf16::from_f32(it)).collect();
                    self.upload(stream, at, bytemuck::cast_slice(&halves))?;
                }
            }
            at += (floats.len() * element.size()) as u64;
        }
        let padding = (len - range.len()) * element.size();
        // SAFETY: the padding is the end of the buffer.
        unsafe { stream.fill_zero(at, padding) }
    }

    /// Writes a linear layer in 4 bits.
    fn quantise(
        &mut self,
        stream: &Stream,
        layer: &Layer,
        values: Values<'_>,
    ) -> Result<(), CudaError> {
        let mut weights = vec![0.0; layer.range.len()];
        values(layer.range.start, &mut weights);
        let [bytes, blocks] = nf4::sizes(weights.len());
        let (mut codes, mut scales) = (vec![0; bytes], vec![0.0f32; blocks]);
        nf4::quantise(&weights, &mut codes, &mut scales);
        self.upload(stream, layer.codes, &codes)?;
        let Some(nested) = &layer.nested else {
            return self.upload(stream, layer.scales, bytemuck::cast_slice(&scales));
        };
        let (mut codes, mut factors) = (vec![0; blocks], vec![0.0f32; nf4::groups(blocks)]);
        let offset = nf4::quantise_scales(&scales, &mut codes, &mut factors);
        factors.push(offset);
        self.upload(stream, nested.codes, &codes)?;
        self.upload(stream, nested.factors, bytemuck::cast_slice(&factors))
    }
}
