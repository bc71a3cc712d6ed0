//! The definition of rounding, in exact arithmetic: an oracle that shares nothing with the emulator.

use std::cmp::Ordering;

/// A number times 2^300, in two's complement; holds every product of two f32 and their sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Exact([u64; 10]);

const SCALE: i32 = 300;

impl Exact {
    pub fn of(mantissa: i128, exponent: i32) -> Self {
        let mut words = [0; 10];
        let shift = usize::try_from(exponent + SCALE).expect("the exponent is in range");
        let magnitude = mantissa.unsigned_abs();
        for bit in (0..128).filter(|bit| magnitude >> bit & 1 == 1) {
            words[(bit + shift) / 64] |= 1 << ((bit + shift) % 64);
        }
        let positive = Self(words);
        if mantissa < 0 {
            positive.negated()
        } else {
            positive
        }
    }

    fn negated(self) -> Self {
        let one = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        Self(self.0.map(|word| !word)).plus(Self(one))
    }

    pub fn plus(self, other: Self) -> Self {
        let mut carry = false;
        let words = std::array::from_fn(|i| {
            let (sum, first) = self.0[i].overflowing_add(other.0[i]);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            carry = first || second;
            sum
        });
        Self(words)
    }

    pub fn compare(self, other: Self) -> Ordering {
        let sign = |x: Self| (x.0[9] as i64).signum();
        let difference = self.plus(other.negated());
        match sign(difference) {
            -1 => Ordering::Less,
            _ if difference.0 == [0; 10] => Ordering::Equal,
            _ => Ordering::Greater,
        }
    }
}

#[derive(Clone, Copy)]
pub struct Format {
    pub exponent: u32,
    pub mantissa: u32,
}

pub const F32: Format = Format {
    exponent: 8,
    mantissa: 23,
};
pub const F16: Format = Format {
    exponent: 5,
    mantissa: 10,
};
pub const BF16: Format = Format {
    exponent: 8,
    mantissa: 7,
};

impl Format {
    fn sign_bit(self) -> u64 {
        1 << (self.exponent + self.mantissa)
    }

    pub fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.mantissa
    }

    pub fn is_finite(self, bits: u64) -> bool {
        bits & self.infinity() != self.infinity()
    }

    /// The value as mantissa · 2^exponent; infinity as the number that would follow the largest.
    pub fn parts(self, bits: u64) -> (i128, i32) {
        let field = (bits & self.infinity()) >> self.mantissa;
        let fraction = i128::from(bits & ((1 << self.mantissa) - 1));
        let bias = (1 << (self.exponent - 1)) - 1 + self.mantissa as i32;
        let (mantissa, exponent) = match field {
            0 => (fraction, 1 - bias),
            _ => (fraction | 1 << self.mantissa, field as i32 - bias),
        };
        let negative = bits & self.sign_bit() != 0;
        (if negative { -mantissa } else { mantissa }, exponent)
    }

    /// Numbers in their order; both zeros are 0.
    fn ordinal(self, bits: u64) -> i64 {
        let magnitude = (bits & !self.sign_bit()) as i64;
        if bits & self.sign_bit() != 0 {
            -magnitude
        } else {
            magnitude
        }
    }

    fn at(self, ordinal: i64) -> (i128, i32) {
        let sign = if ordinal < 0 { self.sign_bit() } else { 0 };
        self.parts(ordinal.unsigned_abs() | sign)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Whether the bits are the exact value rounded; `compare` orders the exact value and m · 2^e.
pub fn is_rounded(
    bits: u64,
    format: Format,
    round: Round,
    compare: impl Fn(i128, i32) -> Ordering,
) -> bool {
    let ordinal = format.ordinal(bits);
    let infinity = format.infinity() as i64;
    if ordinal.abs() > infinity {
        return false;
    }
    let to = |ordinal: i64| {
        let (mantissa, exponent) = format.at(ordinal);
        compare(mantissa, exponent)
    };
    let sign = compare(0, 0);
    if ordinal == 0 && sign != Ordering::Equal {
        let negative = bits & format.sign_bit() != 0;
        if negative != (sign == Ordering::Less) {
            return false;
        }
    }
    let down = match round {
        Round::Nearest => {
            let beside = |other: i64| {
                let ((m, e), (n, f)) = (format.at(ordinal), format.at(other));
                let least = e.min(f);
                let middle = (m << (e - least)) + (n << (f - least));
                compare(middle, least - 1)
            };
            let even = ordinal % 2 == 0;
            let above = ordinal == infinity
                || match beside(ordinal + 1) {
                    Ordering::Less => true,
                    Ordering::Equal => even,
                    Ordering::Greater => false,
                };
            let below = ordinal == -infinity
                || match beside(ordinal - 1) {
                    Ordering::Greater => true,
                    Ordering::Equal => even,
                    Ordering::Less => false,
                };
            return above && below;
        }
        Round::Zero => sign != Ordering::Less,
        Round::Down => true,
        Round::Up => false,
    };
    if down {
        let reached = ordinal == -infinity || (ordinal < infinity && to(ordinal) != Ordering::Less);
        reached && (ordinal + 1 >= infinity || to(ordinal + 1) == Ordering::Less)
    } else {
        let reached =
            ordinal == infinity || (ordinal > -infinity && to(ordinal) != Ordering::Greater);
        reached && (ordinal - 1 <= -infinity || to(ordinal - 1) == Ordering::Greater)
    }
}
