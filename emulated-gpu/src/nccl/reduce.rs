//! Elements of operands, and their reductions in the order of ranks.
//!
//! Sums of f16 and bf16 are f32 and are rounded once. Hardware may round after each rank: compare with a bound.

use half::{bf16, f16};

/// `ncclDataType_t`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Element {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
}

impl Element {
    pub const ALL: [Element; 10] = [
        Element::I8,
        Element::U8,
        Element::I32,
        Element::U32,
        Element::I64,
        Element::U64,
        Element::F16,
        Element::F32,
        Element::F64,
        Element::Bf16,
    ];

    /// The element with this number. 8-bit floats are not modelled.
    pub fn new(number: i32) -> Option<Element> {
        Element::ALL.get(usize::try_from(number).ok()?).copied()
    }

    pub fn bytes(self) -> usize {
        match self {
            Element::I8 | Element::U8 => 1,
            Element::F16 | Element::Bf16 => 2,
            Element::I32 | Element::U32 | Element::F32 => 4,
            Element::I64 | Element::U64 | Element::F64 => 8,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Element::I8 => "i8",
            Element::U8 => "u8",
            Element::I32 => "i32",
            Element::U32 => "u32",
            Element::I64 => "i64",
            Element::U64 => "u64",
            Element::F16 => "f16",
            Element::F32 => "f32",
            Element::F64 => "f64",
            Element::Bf16 => "bf16",
        }
    }

    pub fn is_float(self) -> bool {
        matches!(
            self,
            Element::F16 | Element::F32 | Element::F64 | Element::Bf16
        )
    }
}

/// `ncclRedOp_t`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reduction {
    Sum = 0,
    Prod = 1,
    Max = 2,
    Min = 3,
    Avg = 4,
    /// A sum of operands that each rank multiplies by its own factor.
    PreMulSum = 5,
}

impl Reduction {
    pub const ALL: [Reduction; 6] = [
        Reduction::Sum,
        Reduction::Prod,
        Reduction::Max,
        Reduction::Min,
        Reduction::Avg,
        Reduction::PreMulSum,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Prod => "prod",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Avg => "avg",
            Reduction::PreMulSum => "pre-multiplied sum",
        }
    }
}

/// Reduces operands of equal length, one of each rank.
pub fn reduce(element: Element, reduction: Reduction, parts: &[&[u8]]) -> Vec<u8> {
    match element {
        Element::I8 => fold::<i8, 1>(reduction, parts),
        Element::U8 => fold::<u8, 1>(reduction, parts),
        Element::I32 => fold::<i32, 4>(reduction, parts),
        Element::U32 => fold::<u32, 4>(reduction, parts),
        Element::I64 => fold::<i64, 8>(reduction, parts),
        Element::U64 => fold::<u64, 8>(reduction, parts),
        Element::F16 => fold::<f16, 2>(reduction, parts),
        Element::F32 => fold::<f32, 4>(reduction, parts),
        Element::F64 => fold::<f64, 8>(reduction, parts),
        Element::Bf16 => fold::<bf16, 2>(reduction, parts),
    }
}

/// Multiplies an operand of floats by one of them, and rounds.
pub fn scale(element: Element, operand: &[u8], factor: &[u8]) -> Vec<u8> {
    let factors: Vec<u8> = factor.repeat(operand.len() / factor.len().max(1));
    reduce(element, Reduction::Prod, &[operand, &factors])
}

fn fold<E: Number<N>, const N: usize>(reduction: Reduction, parts: &[&[u8]]) -> Vec<u8> {
    let count = parts.first().map_or(0, |part| part.len() / N);
    let mut result = Vec::with_capacity(count * N);
    for index in 0..count {
        let mut values = parts.iter().filter_map(|part| {
            let bytes = part.get(index * N..(index + 1) * N)?;
            Some(E::load(bytes.try_into().ok()?))
        });
        let Some(first) = values.next() else { break };
        let reduced = values.fold(first, |sum, value| match reduction {
            Reduction::Sum | Reduction::Avg | Reduction::PreMulSum => E::add(sum, value),
            Reduction::Prod => E::multiply(sum, value),
            Reduction::Max if value > sum => value,
            Reduction::Min if value < sum => value,
            Reduction::Max | Reduction::Min => sum,
        });
        let reduced = match reduction {
            Reduction::Avg => E::divide(reduced, parts.len()),
            _ => reduced,
        };
        result.extend(E::store(reduced));
    }
    result
}

/// An element of `N` bytes and the type of its sums.
trait Number<const N: usize> {
    type Sum: Copy + PartialOrd;

    fn load(bytes: [u8; N]) -> Self::Sum;
    fn store(sum: Self::Sum) -> [u8; N];
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn multiply(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn divide(sum: Self::Sum, ranks: usize) -> Self::Sum;
}

macro_rules! integers {
    ($($integer:ty: $bytes:literal)*) => {
        $(impl Number<$bytes> for $integer {
            type Sum = $integer;

            fn load(bytes: [u8; $bytes]) -> $integer {
                <$integer>::from_le_bytes(bytes)
            }
            fn store(sum: $integer) -> [u8; $bytes] {
                sum.to_le_bytes()
            }
            fn add(a: $integer, b: $integer) -> $integer {
                a.wrapping_add(b)
            }
            fn multiply(a: $integer, b: $integer) -> $integer {
                a.wrapping_mul(b)
            }
            fn divide(sum: $integer, ranks: usize) -> $integer {
                sum / ranks as $integer
            }
        })*
    };
}

integers! { i8: 1 u8: 1 i32: 4 u32: 4 i64: 8 u64: 8 }

macro_rules! floats {
    ($($float:ty: $bytes:literal, $sum:ty, $load:expr, $store:expr;)*) => {
        $(impl Number<$bytes> for $float {
            type Sum = $sum;

            fn load(bytes: [u8; $bytes]) -> $sum {
                $load(<$float>::from_le_bytes(bytes))
            }
            fn store(sum: $sum) -> [u8; $bytes] {
                <$float>::to_le_bytes($store(sum))
            }
            fn add(a: $sum, b: $sum) -> $sum {
                a + b
            }
            fn multiply(a: $sum, b: $sum) -> $sum {
                a * b
            }
            fn divide(sum: $sum, ranks: usize) -> $sum {
                sum / ranks as $sum
            }
        })*
    };
}

floats! {
    f32: 4, f32, std::convert::identity, std::convert::identity;
    f64: 8, f64, std::convert::identity, std::convert::identity;
    f16: 2, f32, f16::to_f32, f16::from_f32;
    bf16: 2, f32, bf16::to_f32, bf16::from_f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<const N: usize>(values: &[[u8; N]]) -> Vec<u8> {
        values.concat()
    }

    #[test]
    fn sums_of_bf16_are_f32_and_are_rounded_once() {
        // 256 + 1 + 1 + 1 + 1: each hop alone would round back to 256.
        let [large, one] = [256.0, 1.0].map(|value| bf16::from_f32(value).to_le_bytes());
        let parts = [&large[..], &one, &one, &one, &one];
        let sum = reduce(Element::Bf16, Reduction::Sum, &parts);
        assert_eq!(sum, bf16::from_f32(260.0).to_le_bytes());
    }

    #[test]
    fn every_reduction_has_its_meaning() {
        let [a, b] = [[7i32, -3], [2, 5]].map(|pair| bytes(&pair.map(i32::to_le_bytes)));
        let expect = [
            (Reduction::Sum, [9, 2]),
            (Reduction::Prod, [14, -15]),
            (Reduction::Max, [7, 5]),
            (Reduction::Min, [2, -3]),
            (Reduction::Avg, [4, 1]),
        ];
        for (reduction, expected) in expect {
            let reduced = reduce(Element::I32, reduction, &[&a, &b]);
            assert_eq!(reduced, bytes(&expected.map(i32::to_le_bytes)));
        }
    }

    #[test]
    fn a_factor_multiplies_each_element() {
        let operand = bytes(&[1.5f64, -2.0].map(f64::to_le_bytes));
        let scaled = scale(Element::F64, &operand, &0.5f64.to_le_bytes());
        assert_eq!(scaled, bytes(&[0.75f64, -1.0].map(f64::to_le_bytes)));
    }
}
