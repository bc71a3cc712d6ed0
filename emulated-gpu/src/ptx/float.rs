//! Floating-point arithmetic as PTX defines it, on the bits of a number.
//!
//! Results of f32, f16 and bf16 are exact or rounded to odd in f64 (Boldo and Melquiond, 2008: a value
//! rounded to odd with two more bits than the target rounds to it as the exact value would), then rounded
//! once in the wanted direction. Rounding to nearest takes the processor's own f32 where it is IEEE's.

use super::instruction::{L32, LANES};

/// A direction of rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Rounding, flushing of subnormal numbers and clamping, packed into the argument of a generic function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    pub round: Round,
    /// Subnormal operands and results become zero of their sign.
    pub ftz: bool,
    /// Results are clamped to [0, 1], NaN to 0.
    pub sat: bool,
}

impl Mode {
    pub const NEAREST: Self = Self {
        round: Round::Nearest,
        ftz: false,
        sat: false,
    };

    pub const fn pack(self) -> u8 {
        self.round as u8 | (self.ftz as u8) << 2 | (self.sat as u8) << 3
    }

    const fn unpack(bits: u8) -> Self {
        let round = match bits & 3 {
            0 => Round::Nearest,
            1 => Round::Zero,
            2 => Round::Down,
            _ => Round::Up,
        };
        Self {
            round,
            ftz: bits & 4 != 0,
            sat: bits & 8 != 0,
        }
    }
}

/// A binary format with an implicit leading bit.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    pub exponent: u32,
    pub mantissa: u32,
    pub nan: u32,
}

pub const F32: Format = Format {
    exponent: 8,
    mantissa: 23,
    nan: 0x7fff_ffff,
};
pub const F16: Format = Format {
    exponent: 5,
    mantissa: 10,
    nan: 0x7fff,
};
pub const BF16: Format = Format {
    exponent: 8,
    mantissa: 7,
    nan: 0x7fff,
};

/// Rounds a number, exact or rounded to odd, to a format.
pub fn round(x: f64, format: Format, direction: Round) -> u32 {
    let sign = u32::from(x.is_sign_negative()) << (format.exponent + format.mantissa);
    let infinity = ((1u32 << format.exponent) - 1) << format.mantissa;
    if x.is_nan() {
        return format.nan;
    }
    if x.is_infinite() {
        return sign | infinity;
    }
    let bits = x.to_bits();
    let field = (bits >> 52 & 0x7ff) as i32;
    let fraction = bits & ((1 << 52) - 1);
    // x = significand × 2^exponent.
    let (significand, exponent) = match field {
        0 => (fraction, -1074),
        _ => (fraction | 1 << 52, field - 1075),
    };
    if significand == 0 {
        return sign;
    }
    let least_normal = 2 - (1 << (format.exponent - 1));
    let mantissa = format.mantissa as i32;
    let leading = exponent + 63 - significand.leading_zeros() as i32;
    // The exponent of the result's last bit.
    let unit = leading.max(least_normal) - mantissa;
    // f64 has more bits than every format, so bits are dropped, never added, except for f64's subnormals.
    let drop = (unit - exponent).clamp(0, 63) as u32;
    let kept = (significand >> drop) as u32;
    let rest = significand & ((1 << drop) - 1);
    let half = (1u64 << drop) >> 1;
    let away = match direction {
        Round::Nearest => rest > half || (rest == half && rest != 0 && kept & 1 == 1),
        Round::Zero => false,
        Round::Down => rest != 0 && sign != 0,
        Round::Up => rest != 0 && sign == 0,
    };
    let biased = (unit - (least_normal - mantissa)) as u32;
    let rounded = u64::from(biased) << format.mantissa;
    let rounded = rounded + u64::from(kept) + u64::from(away);
    if rounded < u64::from(infinity) {
        return sign | rounded as u32;
    }
    let to_infinity = match direction {
        Round::Nearest => true,
        Round::Zero => false,
        Round::Down => sign != 0,
        Round::Up => sign == 0,
    };
    sign | if to_infinity { infinity } else { infinity - 1 }
}

/// The nearest bf16 of an f32, ties to even.
#[inline(always)]
pub fn nearest_bf16(bits: u32) -> u32 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        BF16.nan
    } else {
        // The carry of a number beyond the largest gives infinity.
        (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    }
}

/// The nearest tf32 of an f32, in the upper 19 bits; a tie is rounded away from zero or to even.
#[inline(always)]
pub fn nearest_tf32(bits: u32, away: bool) -> u32 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return F32.nan;
    }
    let half = if away {
        0x1000
    } else {
        0xfff + (bits >> 13 & 1)
    };
    (bits + half) & !0x1fff
}

/// Exact; NaN keeps its bits, too.
#[inline(always)]
pub fn bf16_to_f32(bits: u32) -> u32 {
    bits << 16
}

/// Makes a rounded result odd if it differs from the exact one by an error of the given sign.
pub fn to_odd(rounded: f64, error: f64) -> f64 {
    let bits = rounded.to_bits();
    if error == 0.0 || bits & 1 == 1 || !rounded.is_finite() {
        return rounded;
    }
    f64::from_bits(if (error > 0.0) == (rounded > 0.0) {
        bits + 1
    } else {
        bits - 1
    })
}

/// a + b rounded to odd; a zero sum of numbers of opposite sign is negative when rounding down.
fn add_to_odd(a: f64, b: f64, round: Round) -> f64 {
    let sum = a + b;
    if sum == 0.0 && round == Round::Down && (a.is_sign_negative() || b.is_sign_negative()) {
        return -0.0;
    }
    // Knuth's two-sum.
    let of_b = sum - a;
    to_odd(sum, (a - (sum - of_b)) + (b - of_b))
}

fn divide_to_odd(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    if quotient == 0.0 || !quotient.is_finite() || !b.is_finite() {
        return quotient;
    }
    let rest = (-quotient).mul_add(b, a);
    to_odd(quotient, if b > 0.0 { rest } else { -rest })
}

fn root_to_odd(x: f64) -> f64 {
    let root = x.sqrt();
    if root == 0.0 || !root.is_finite() {
        return root;
    }
    to_odd(root, (-root).mul_add(root, x))
}

/// The value of a number of 16 bits.
pub fn wide(bits: u32, format: Format) -> f64 {
    f64::from(match format.exponent {
        5 => half::f16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits << 16),
    })
}

/// A subnormal f32 becomes zero of its sign.
#[inline(always)]
pub fn flush(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 {
        bits & 0x8000_0000
    } else {
        bits
    }
}

#[inline(always)]
fn operand<const M: u8>(bits: u32) -> f32 {
    f32::from_bits(if const { Mode::unpack(M).ftz } {
        flush(bits)
    } else {
        bits
    })
}

/// Canonical NaN, flushing and clamping.
#[inline(always)]
fn result<const M: u8>(x: f32) -> u32 {
    let mode = const { Mode::unpack(M) };
    if mode.sat {
        // Written so that NaN and −0 give +0.
        return if x > 0.0 { x.min(1.0) } else { 0.0 }.to_bits();
    }
    let bits = if x.is_nan() { F32.nan } else { x.to_bits() };
    if mode.ftz { flush(bits) } else { bits }
}

/// An exact result, or one rounded to odd. A result is flushed if it is subnormal as an f32 whose exponent has no limit.
fn result_of_odd<const M: u8>(x: f64) -> u32 {
    let mode = const { Mode::unpack(M) };
    const SCALE: f64 = (1u64 << 63) as f64;
    let magnitude = |bits: u32| f64::from(f32::from_bits(bits)).abs();
    let rounded = if mode.ftz
        && x.abs() < 2.0 * f64::from(f32::MIN_POSITIVE)
        && magnitude(round(x * SCALE, F32, mode.round)) < f64::from(f32::MIN_POSITIVE) * SCALE
    {
        f32::copysign(0.0, x as f32)
    } else {
        f32::from_bits(round(x, F32, mode.round))
    };
    result::<M>(rounded)
}

/// A result that is rounded to the nearest. With `.ftz`, one that rounds up to the least normal number may still be
/// tiny: `odd` is the same result rounded to odd.
#[inline(always)]
fn nearest_result<const M: u8>(x: f32, odd: impl FnOnce() -> f64) -> u32 {
    if const { Mode::unpack(M).ftz } && x.abs() == f32::MIN_POSITIVE {
        result_of_odd::<M>(odd())
    } else {
        result::<M>(x)
    }
}

const fn nearest(m: u8) -> bool {
    m & 3 == 0
}

#[inline(always)]
pub fn add<const M: u8>(a: u32, b: u32) -> u32 {
    let (a, b) = (operand::<M>(a), operand::<M>(b));
    if const { nearest(M) } {
        return result::<M>(a + b);
    }
    let mode = const { Mode::unpack(M) };
    result_of_odd::<M>(add_to_odd(f64::from(a), f64::from(b), mode.round))
}

#[inline(always)]
pub fn sub<const M: u8>(a: u32, b: u32) -> u32 {
    add::<M>(a, b ^ 0x8000_0000)
}

#[inline(always)]
pub fn mul<const M: u8>(a: u32, b: u32) -> u32 {
    let (a, b) = (operand::<M>(a), operand::<M>(b));
    let odd = || f64::from(a) * f64::from(b);
    if const { nearest(M) } {
        return nearest_result::<M>(a * b, odd);
    }
    result_of_odd::<M>(odd())
}

#[inline(always)]
pub fn fma<const M: u8>(a: u32, b: u32, c: u32) -> u32 {
    let (a, b, c) = (operand::<M>(a), operand::<M>(b), operand::<M>(c));
    let mode = const { Mode::unpack(M) };
    let odd = || add_to_odd(f64::from(a) * f64::from(b), f64::from(c), mode.round);
    if const { nearest(M) } {
        return nearest_result::<M>(a.mul_add(b, c), odd);
    }
    result_of_odd::<M>(odd())
}

/// `fma` on all lanes, with the processor's instruction where it has one.
#[inline(always)]
pub fn fma_lanes<const M: u8>(a: &L32, b: &L32, c: &L32, d: &mut L32) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for lane in 0..LANES {
                d[lane] = fma::<M>(a[lane], b[lane], c[lane]);
            }
        },
    );
}

#[inline(always)]
pub fn div<const M: u8>(a: u32, b: u32) -> u32 {
    let (a, b) = (operand::<M>(a), operand::<M>(b));
    if const { nearest(M) } {
        // No quotient rounds up to the least normal number.
        return result::<M>(a / b);
    }
    result_of_odd::<M>(divide_to_odd(f64::from(a), f64::from(b)))
}

pub fn rcp<const M: u8>(a: u32) -> u32 {
    div::<M>(1f32.to_bits(), a)
}

pub fn sqrt<const M: u8>(a: u32) -> u32 {
    let a = operand::<M>(a);
    if const { nearest(M) } {
        return result::<M>(a.sqrt());
    }
    result_of_odd::<M>(root_to_odd(f64::from(a)))
}

pub fn neg<const M: u8>(a: u32) -> u32 {
    result::<M>(-operand::<M>(a))
}

pub fn abs<const M: u8>(a: u32) -> u32 {
    result::<M>(operand::<M>(a).abs())
}

/// −0 is less than +0; a NaN loses against a number unless `NAN`.
#[inline(always)]
pub fn min<const M: u8, const NAN: bool>(a: u32, b: u32) -> u32 {
    let (x, y) = (operand::<M>(a), operand::<M>(b));
    if x.is_nan() || y.is_nan() {
        return one_number::<M, NAN>(x, y);
    }
    let least = if x < y || (x == y && x.is_sign_negative()) {
        x
    } else {
        y
    };
    least.to_bits()
}

#[inline(always)]
pub fn max<const M: u8, const NAN: bool>(a: u32, b: u32) -> u32 {
    let (x, y) = (operand::<M>(a), operand::<M>(b));
    if x.is_nan() || y.is_nan() {
        return one_number::<M, NAN>(x, y);
    }
    let most = if x > y || (x == y && x.is_sign_positive()) {
        x
    } else {
        y
    };
    most.to_bits()
}

fn one_number<const M: u8, const NAN: bool>(x: f32, y: f32) -> u32 {
    match (x.is_nan(), y.is_nan()) {
        (false, true) if !NAN => x.to_bits(),
        (true, false) if !NAN => y.to_bits(),
        _ => F32.nan,
    }
}

/// Approximations. The emulator gives the nearest f32 or its neighbour, which every stated bound of PTX allows.
pub mod approximate {
    use super::{operand, result};

    pub fn ex2<const M: u8>(a: u32) -> u32 {
        result::<M>(operand::<M>(a).exp2())
    }

    pub fn lg2<const M: u8>(a: u32) -> u32 {
        result::<M>(operand::<M>(a).log2())
    }

    pub fn rsqrt<const M: u8>(a: u32) -> u32 {
        result::<M>((1.0 / f64::from(operand::<M>(a)).sqrt()) as f32)
    }

    pub fn sin<const M: u8>(a: u32) -> u32 {
        result::<M>(operand::<M>(a).sin())
    }

    pub fn cos<const M: u8>(a: u32) -> u32 {
        result::<M>(operand::<M>(a).cos())
    }

    pub fn tanh<const M: u8>(a: u32) -> u32 {
        result::<M>(operand::<M>(a).tanh())
    }
}

/// Arithmetic on one number of 16 bits; `BRAIN` selects bf16 instead of f16.
pub mod small {
    use super::{BF16, F16, Format, Mode, Round, add_to_odd, round, wide};

    const fn format(brain: bool) -> Format {
        if brain { BF16 } else { F16 }
    }

    fn operand<const M: u8, const BRAIN: bool>(bits: u32) -> f64 {
        let format = const { format(BRAIN) };
        let subnormal = bits >> format.mantissa & ((1 << format.exponent) - 1) == 0;
        if const { Mode::unpack(M).ftz } && subnormal {
            return wide(bits & 0x8000, format);
        }
        wide(bits, format)
    }

    fn result<const M: u8, const BRAIN: bool>(x: f64) -> u32 {
        let mode = const { Mode::unpack(M) };
        let x = match mode.sat {
            true if x > 0.0 => x.min(1.0),
            true => 0.0,
            false => x,
        };
        let format = const { format(BRAIN) };
        let bits = round(x, format, Round::Nearest);
        let subnormal = bits >> format.mantissa & ((1 << format.exponent) - 1) == 0;
        if mode.ftz && subnormal {
            bits & 0x8000
        } else {
            bits
        }
    }

    pub fn add<const M: u8, const BRAIN: bool>(a: u32, b: u32) -> u32 {
        let (a, b) = (operand::<M, BRAIN>(a), operand::<M, BRAIN>(b));
        result::<M, BRAIN>(add_to_odd(a, b, Round::Nearest))
    }

    pub fn sub<const M: u8, const BRAIN: bool>(a: u32, b: u32) -> u32 {
        add::<M, BRAIN>(a, b ^ 0x8000)
    }

    pub fn mul<const M: u8, const BRAIN: bool>(a: u32, b: u32) -> u32 {
        result::<M, BRAIN>(operand::<M, BRAIN>(a) * operand::<M, BRAIN>(b))
    }

    pub fn fma<const M: u8, const BRAIN: bool>(a: u32, b: u32, c: u32) -> u32 {
        let product = operand::<M, BRAIN>(a) * operand::<M, BRAIN>(b);
        let c = operand::<M, BRAIN>(c);
        result::<M, BRAIN>(add_to_odd(product, c, Round::Nearest))
    }

    pub fn neg<const M: u8, const BRAIN: bool>(a: u32) -> u32 {
        round(
            -operand::<M, BRAIN>(a),
            const { format(BRAIN) },
            Round::Nearest,
        )
    }

    pub fn abs<const M: u8, const BRAIN: bool>(a: u32) -> u32 {
        round(
            operand::<M, BRAIN>(a).abs(),
            const { format(BRAIN) },
            Round::Nearest,
        )
    }

    pub fn min<const M: u8, const BRAIN: bool>(a: u32, b: u32) -> u32 {
        let (x, y) = (operand::<M, BRAIN>(a), operand::<M, BRAIN>(b));
        let first = y.is_nan() || x < y || (x == y && x.is_sign_negative());
        result::<M, BRAIN>(if first { x } else { y })
    }

    pub fn max<const M: u8, const BRAIN: bool>(a: u32, b: u32) -> u32 {
        let (x, y) = (operand::<M, BRAIN>(a), operand::<M, BRAIN>(b));
        let first = y.is_nan() || x > y || (x == y && x.is_sign_positive());
        result::<M, BRAIN>(if first { x } else { y })
    }
}

/// The canonical NaN that f64 operations give here; PTX does not say which one it is.
pub fn canonical64(x: f64) -> u64 {
    if x.is_nan() {
        return 0x7fff_ffff_ffff_ffff;
    }
    x.to_bits()
}

/// −0 is less than +0; a NaN loses against a number.
pub fn min64(a: u64, b: u64) -> u64 {
    let (x, y) = (f64::from_bits(a), f64::from_bits(b));
    let first = y.is_nan() || x < y || (x == y && x.is_sign_negative());
    canonical64(if first { x } else { y })
}

pub fn max64(a: u64, b: u64) -> u64 {
    let (x, y) = (f64::from_bits(a), f64::from_bits(b));
    let first = y.is_nan() || x > y || (x == y && x.is_sign_positive());
    canonical64(if first { x } else { y })
}
