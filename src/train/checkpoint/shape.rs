//! The shapes that a checkpoint holds: the model's units and their parameters.

use serde::{Deserialize, Serialize};

use crate::engine::{Layout, Unit};

/// A parameter's name and shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorShape {
    /// Hugging Face's name.
    pub name: String,
    /// Row-major.
    pub shape: Vec<usize>,
}

/// A unit of the model that was checkpointed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitShape {
    /// Its name in the engine's layout.
    pub name: String,
    /// Its parameters, in the order in which they lie in its files.
    pub parameters: Vec<TensorShape>,
}

impl UnitShape {
    /// Elements in total.
    pub fn elements(&self) -> usize {
        let elements = |tensor: &TensorShape| tensor.shape.iter().product::<usize>();
        self.parameters.iter().map(elements).sum()
    }

    /// Bytes of `vectors` vectors of this unit, unless the shapes are beyond all bounds.
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
