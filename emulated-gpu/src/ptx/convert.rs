//! `cvt` between all types, lane by lane.

use super::float::{BF16, F16, F32, Format, Round, flush, round, to_odd, wide};

/// A type of `cvt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    Signed(u32),
    Unsigned(u32),
    F16,
    Bf16,
    F32,
    F64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convert {
    pub to: Type,
    pub from: Type,
    /// Rounds to the target's precision.
    pub round: Round,
    /// Rounds to an integer first.
    pub to_integer: Option<Round>,
    pub ftz: bool,
    pub sat: bool,
    /// Negative results become zero.
    pub relu: bool,
    /// Bits of the destination register, to which an integer is extended.
    pub width: u32,
}

impl Convert {
    /// Converts the bits of a source register.
    pub fn apply(self, bits: u64) -> u64 {
        use Type::{Signed, Unsigned};
        match (self.from, self.to) {
            (Signed(_) | Unsigned(_), Signed(_) | Unsigned(_)) => self.store(self.integer(bits)),
            (Signed(_) | Unsigned(_), _) => {
                let value = self.integer(bits);
                if self.to == Type::F64 {
                    return (value as f64).to_bits();
                }
                self.store_float(integer_to_odd(value))
            }
            (from, Signed(_) | Unsigned(_)) => self.float_to_integer(self.float(bits), from),
            _ => {
                let x = self.float(bits);
                let x = self
                    .to_integer
                    .map_or(x, |direction| integral(x, direction));
                self.store_float(x)
            }
        }
    }

    fn integer(self, bits: u64) -> i128 {
        match self.from {
            Type::Signed(n) => i128::from((bits << (64 - n)) as i64 >> (64 - n)),
            Type::Unsigned(n) => i128::from(bits << (64 - n) >> (64 - n)),
            _ => 0,
        }
    }

    fn float(self, bits: u64) -> f64 {
        match self.from {
            Type::F16 => wide(bits as u32, F16),
            Type::Bf16 => wide(bits as u32, BF16),
            Type::F32 if self.ftz => f64::from(f32::from_bits(flush(bits as u32))),
            Type::F32 => f64::from(f32::from_bits(bits as u32)),
            _ => f64::from_bits(bits),
        }
    }

    /// Extends an integer to the destination register; `sat` clamps it to the target's range.
    fn store(self, value: i128) -> u64 {
        let extended = match self.to {
            Type::Signed(n) => {
                let most = (1i128 << (n - 1)) - 1;
                let value = if self.sat {
                    value.clamp(-most - 1, most)
                } else {
                    value
                };
                (((value as u64) << (64 - n)) as i64 >> (64 - n)) as u64
            }
            Type::Unsigned(n) => {
                let value = if self.sat {
                    value.clamp(0, (1i128 << n) - 1)
                } else {
                    value
                };
                (value as u64) << (64 - n) >> (64 - n)
            }
            _ => value as u64,
        };
        extended << (64 - self.width) >> (64 - self.width)
    }

    fn float_to_integer(self, x: f64, from: Type) -> u64 {
        let (bits, least, most) = match self.to {
            Type::Signed(n) => (n, -(1i128 << (n - 1)), (1i128 << (n - 1)) - 1),
            Type::Unsigned(n) => (n, 0, (1i128 << n) - 1),
            _ => return 0,
        };
        if x.is_nan() {
            return if from != Type::F64 && bits != 64 {
                0
            } else {
                1 << (bits - 1)
            };
        }
        let x = integral(x, self.to_integer.unwrap_or(Round::Zero));
        // `as` saturates; every conversion from floating point clamps.
        self.store((x as i128).clamp(least, most))
    }

    fn store_float(self, x: f64) -> u64 {
        let mut x = x;
        if self.sat {
            x = if x > 0.0 { x.min(1.0) } else { 0.0 };
        }
        // NaN stays.
        if self.relu && x <= 0.0 {
            x = 0.0;
        }
        let to = |format: Format| u64::from(round(x, format, self.round));
        match self.to {
            Type::F16 => to(F16),
            Type::Bf16 => to(BF16),
            // NaN keeps its leading bits, as from bf16.
            Type::F32 if self.from == Type::F64 && x.is_nan() => u64::from((x as f32).to_bits()),
            Type::F32 => {
                let bits = to(F32) as u32;
                u64::from(if self.ftz { flush(bits) } else { bits })
            }
            _ => super::float::canonical64(x),
        }
    }
}

/// An integer in f64, rounded to odd.
fn integer_to_odd(value: i128) -> f64 {
    let rounded = value as f64;
    let back = rounded as i128;
    to_odd(rounded, (value - back) as f64)
}

/// Rounds to an integer; keeps NaN and the sign of zero.
fn integral(x: f64, direction: Round) -> f64 {
    match direction {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}
