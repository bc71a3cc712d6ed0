//! Shapes in a checkpoint: the model's units and their parameters.

use serde::{Deserialize, Serialize};

use crate::engine::{Layout, Unit};

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

impl From<&Unit> for UnitShape {
    fn from(unit: &Unit) -> Self {
        let tensor = |parameter: &crate::engine::Parameter| TensorShape {
            name: parameter.name.clone(),
            shape: parameter.shape.clone(),
        };
        UnitShape {
            name: unit.name.clone(),
            parameters: unit.parameters.iter().map(tensor).collect(),
        }
    }
}

/// The shapes of a layout's units.
pub(super) fn unit_shapes(layout: &Layout) -> Vec<UnitShape> {
    layout.units.iter().map(UnitShape::from).collect()
}
