//! The element type of activations and matrix products.

use super::cublaslt::Element;

/// Arithmetic of the engine. Master weights, gradients, the residual stream and all sums are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// Activations and operands of matrix products in bf16.
    #[default]
    Bf16,
    /// Everything in f32, without TF32; for comparisons with the CPU engine.
    F32,
}

impl Precision {
    /// Bytes of an activation's element.
    pub fn size(self) -> usize {
        match self {
            Precision::Bf16 => 2,
            Precision::F32 => 4,
        }
    }

    /// The element type of activations in matrix products.
    pub fn element(self) -> Element {
        match self {
            Precision::Bf16 => Element::Bf16,
            Precision::F32 => Element::F32,
        }
    }

    /// The options that compile a kernel for this precision.
    pub fn options(self) -> Vec<String> {
        match self {
            Precision::Bf16 => vec!["-DREAL_BF16=1".to_owned()],
            Precision::F32 => Vec::new(),
        }
    }
}
