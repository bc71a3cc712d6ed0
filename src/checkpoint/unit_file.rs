//! The shapes of units, and the two files of each: weights under Hugging Face's names, and AdamW's moments as
//! `exp_avg.<name>` and `exp_avg_sq.<name>`. The data of a file is the unit's vectors without conversion, one after the
//! other.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata};
use serde::{Deserialize, Serialize};

use super::checksum::{FileEntry, Hasher, PIECE};
use super::names;
use super::verified::{Damage, VerifiedFile, damage};
use crate::checkpoint::tensor_file;
use crate::engine::{ADAPTER, Layout, Parameter, Unit, UnitState};

/// A parameter's name and shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorShape {
    /// Name of the tensor in Hugging Face's layout.
    pub name: String,
    /// Row-major dimensions, `[out, in]` for linear layers.
    pub shape: Vec<usize>,
}

/// A unit of the checkpoint's model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitShape {
    /// Name in the engine's layout.
    pub name: String,
    /// Parameters in the order of the unit's files.
    pub parameters: Vec<TensorShape>,
}

impl UnitShape {
    /// Number of elements of all parameters.
    pub fn elements(&self) -> usize {
        let elements = |tensor: &TensorShape| tensor.shape.iter().product::<usize>();
        self.parameters.iter().map(elements).sum()
    }

    /// Bytes of `vectors` vectors of this unit; `None` on overflow.
    pub(super) fn checked_bytes(&self, vectors: usize) -> Option<u64> {
        self.parameters.iter().try_fold(0_u64, |sum, tensor| {
            let bytes = (tensor.shape.iter())
                .try_fold(4 * vectors as u64, |n, &size| n.checked_mul(size as u64))?;
            sum.checked_add(bytes)
        })
    }
}

/// The shapes of a layout's units.
pub(super) fn unit_shapes(layout: &Layout) -> Vec<UnitShape> {
    let tensor = |parameter: &Parameter| TensorShape {
        name: parameter.name.clone(),
        shape: parameter.shape.clone(),
    };
    let shape = |unit: &Unit| UnitShape {
        name: unit.name.clone(),
        parameters: unit.parameters.iter().map(tensor).collect(),
    };
    layout.units.iter().map(shape).collect()
}

/// Whether these are the units of adapters, and not of a whole model.
pub(super) fn is_adapter(units: &[UnitShape]) -> bool {
    matches!(units, [unit] if unit.name == ADAPTER)
}

/// The kind of a unit's file. A tensor-name prefix belongs to each of the unit's vectors in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// `UnitState::parameters`.
    Weights,
    /// `UnitState::exp_avg` and `UnitState::exp_avg_sq`.
    Moments,
}

impl Content {
    /// Both files of a unit.
    pub const ALL: [Content; 2] = [Content::Weights, Content::Moments];

    /// File name of one of these units.
    pub fn file_name(self, unit: usize, all: &[UnitShape]) -> String {
        let units = all.len();
        match self {
            Content::Weights if is_adapter(all) => names::ADAPTER_MODEL.to_owned(),
            Content::Weights => names::model_file(unit, units),
            Content::Moments => names::optimizer_file(unit, units),
        }
    }

    fn prefixes(self) -> &'static [&'static str] {
        match self {
            Content::Weights => &[""],
            Content::Moments => &["exp_avg.", "exp_avg_sq."],
        }
    }

    /// Number of vectors of the unit's length in the file.
    pub fn vectors_of_unit(self) -> usize {
        self.prefixes().len()
    }

    fn vectors(self, state: &UnitState) -> Vec<&[f32]> {
        match self {
            Content::Weights => vec![&state.parameters],
            Content::Moments => vec![&state.exp_avg, &state.exp_avg_sq],
        }
    }

    fn vectors_mut(self, state: &mut UnitState) -> Vec<&mut Vec<f32>> {
        match self {
            Content::Weights => vec![&mut state.parameters],
            Content::Moments => vec![&mut state.exp_avg, &mut state.exp_avg_sq],
        }
    }

    /// Names and shapes of the file's tensors in order.
    fn tensors(self, unit: &UnitShape) -> impl Iterator<Item = (String, &[usize])> {
        self.prefixes().iter().flat_map(|prefix| {
            unit.parameters
                .iter()
                .map(move |tensor| (format!("{prefix}{}", tensor.name), &tensor.shape[..]))
        })
    }

    /// The header of a unit's file, and the whole size of the file in bytes.
    pub fn header(self, unit: &UnitShape) -> Result<(Vec<u8>, u64), safetensors::SafeTensorError> {
        let (header, data) = tensor_file::header(self.tensors(unit), Dtype::F32)?;
        let size = header.len() as u64 + data;
        Ok((header, size))
    }
}

/// Writes one file without fsync; the vectors of `state` must have the unit's length.
pub fn write(
    path: &Path,
    header: &[u8],
    content: Content,
    state: &UnitState,
) -> io::Result<(File, FileEntry)> {
    let mut file = File::create(path)?;
    let mut hasher = Hasher::default();
    let vectors = content.vectors(state);
    let data = vectors.iter().map(|vector| bytemuck::cast_slice(vector));
    for piece in std::iter::once(header)
        .chain(data)
        .flat_map(|bytes| bytes.chunks(PIECE))
    {
        hasher.update(piece);
        file.write_all(piece)?;
    }
    Ok((file, hasher.finish()))
}

/// Reads one file into its vectors of `state`. After an error their content is unspecified.
pub fn read(
    path: &Path,
    entry: FileEntry,
    content: Content,
    unit: &UnitShape,
    state: &mut UnitState,
) -> Result<(), Damage> {
    let mut file = VerifiedFile::open(path, entry)?;
    let mut size = [0; 8];
    file.fill(&mut size)?;
    let data = (content.vectors_of_unit() * unit.elements() * size_of::<f32>()) as u64;
    let header_size = u64::from_le_bytes(size);
    if header_size.checked_add(8 + data) != Some(entry.bytes) {
        let reason = format!(
            "has {} bytes, which are not a header of {header_size} and data of {data}",
            entry.bytes
        );
        return Err(damage(path, reason));
    }
    let mut header = vec![0; header_size as usize];
    file.fill(&mut header)?;
    for vector in content.vectors_mut(state) {
        *vector = vec![0.0; unit.elements()];
        file.fill(bytemuck::cast_slice_mut(vector))?;
    }
    file.finish()?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| damage(path, format!("has a header that cannot be parsed: {error}")))?;
    let mut start = 0;
    for (name, shape) in content.tensors(unit) {
        let end = start + shape.iter().product::<usize>() * size_of::<f32>();
        let fits = metadata.info(&name).is_some_and(|info| {
            info.dtype == Dtype::F32 && info.shape == shape && info.data_offsets == (start, end)
        });
        if !fits {
            let reason = format!("does not hold `{name}` where it belongs");
            return Err(damage(path, reason));
        }
        start = end;
    }
    Ok(())
}
