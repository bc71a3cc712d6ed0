//! Lane loops, and integer functions of one lane.

use super::*;

// Lane loops over a function of one lane.
macro_rules! f1 {
    ($f:expr) => {
        (|a: &L32, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Unary32
    };
}
macro_rules! f2 {
    ($f:expr) => {
        (|a: &L32, b: &L32, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Binary32
    };
}
macro_rules! f3 {
    ($f:expr) => {
        (|a: &L32, b: &L32, c: &L32, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane], c[lane]);
            }
        }) as Ternary32
    };
}
macro_rules! g1 {
    ($f:expr) => {
        (|a: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Unary64
    };
}
macro_rules! g2 {
    ($f:expr) => {
        (|a: &L64, b: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Binary64
    };
}
macro_rules! g3 {
    ($f:expr) => {
        (|a: &L64, b: &L64, c: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane], c[lane]);
            }
        }) as Ternary64
    };
}
macro_rules! shift64 {
    ($f:expr) => {
        (|a: &L64, b: &L32, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Shift64
    };
}
macro_rules! wide {
    ($f:expr) => {
        (|a: &L32, b: &L32, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]);
            }
        }) as Wide
    };
}
macro_rules! wide_add {
    ($f:expr) => {
        (|a: &L32, b: &L32, c: &L64, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane], b[lane]).wrapping_add(c[lane]);
            }
        }) as WideAdd
    };
}
macro_rules! widen {
    ($f:expr) => {
        (|a: &L32, d: &mut L64| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Widen
    };
}
macro_rules! narrow {
    ($f:expr) => {
        (|a: &L64, d: &mut L32| {
            for lane in 0..LANES {
                d[lane] = $f(a[lane]);
            }
        }) as Narrow
    };
}
macro_rules! compare32 {
    ($f:expr) => {
        (|a: &L32, b: &L32| {
            let mut mask = 0;
            for lane in 0..LANES {
                mask |= u32::from($f(a[lane], b[lane])) << lane;
            }
            mask
        }) as Compare32
    };
}
macro_rules! compare64 {
    ($f:expr) => {
        (|a: &L64, b: &L64| {
            let mut mask = 0;
            for lane in 0..LANES {
                mask |= u32::from($f(a[lane], b[lane])) << lane;
            }
            mask
        }) as Compare64
    };
}

/// The expression with the constant that packs the mode.
macro_rules! by_mode {
    ($mode:expr, $m:ident, $e:expr) => {
        by_mode!(@ $mode, $m, $e, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $mode:expr, $m:ident, $e:expr, $($value:literal)*) => {
        match $mode.pack() {
            $($value => {
                const $m: u8 = $value;
                $e
            })*
            _ => return Err("the rounding mode is not implemented".into()),
        }
    };
}

/// The same for operations that only round to nearest.
macro_rules! by_flush {
    ($mode:expr, $m:ident, $e:expr) => {
        by_mode!(@ $mode, $m, $e, 0 4 8 12)
    };
}

macro_rules! compare_integers {
    ($name:expr, $lanes:ident, $of:expr) => {
        match $name {
            "eq" => $lanes!(|a, b| $of(a) == $of(b)),
            "ne" => $lanes!(|a, b| $of(a) != $of(b)),
            "lt" | "lo" => $lanes!(|a, b| $of(a) < $of(b)),
            "le" | "ls" => $lanes!(|a, b| $of(a) <= $of(b)),
            "gt" | "hi" => $lanes!(|a, b| $of(a) > $of(b)),
            "ge" | "hs" => $lanes!(|a, b| $of(a) >= $of(b)),
            other => return Err(format!("the comparison `.{other}` is not implemented").into()),
        }
    };
}

macro_rules! compare_floats {
    ($name:expr, $lanes:ident, $of:expr) => {
        match $name {
            "eq" => $lanes!(|a, b| $of(a) == $of(b)),
            "ne" => $lanes!(|a, b| $of(a) < $of(b) || $of(a) > $of(b)),
            "lt" => $lanes!(|a, b| $of(a) < $of(b)),
            "le" => $lanes!(|a, b| $of(a) <= $of(b)),
            "gt" => $lanes!(|a, b| $of(a) > $of(b)),
            "ge" => $lanes!(|a, b| $of(a) >= $of(b)),
            "equ" => $lanes!(|a, b| matches!($of(a).partial_cmp(&$of(b)), Some(Equal) | None)),
            "neu" => $lanes!(|a, b| $of(a) != $of(b)),
            "ltu" => $lanes!(|a, b| matches!($of(a).partial_cmp(&$of(b)), Some(Less) | None)),
            "leu" => $lanes!(|a, b| $of(a).partial_cmp(&$of(b)) != Some(Greater)),
            "gtu" => $lanes!(|a, b| matches!($of(a).partial_cmp(&$of(b)), Some(Greater) | None)),
            "geu" => $lanes!(|a, b| $of(a).partial_cmp(&$of(b)) != Some(Less)),
            "num" => $lanes!(|a, b| !$of(a).is_nan() && !$of(b).is_nan()),
            "nan" => $lanes!(|a, b| $of(a).is_nan() || $of(b).is_nan()),
            other => return Err(format!("the comparison `.{other}` is not implemented").into()),
        }
    };
}

/// A function of 16-bit numbers on both halves.
pub fn halves2(a: u32, b: u32, f: impl Fn(u32, u32) -> u32) -> u32 {
    f(a & 0xffff, b & 0xffff) | f(a >> 16, b >> 16) << 16
}

pub fn s16(a: u32) -> i32 {
    i32::from(a as u16 as i16)
}

pub fn s32(a: u32) -> i32 {
    a as i32
}

pub fn s64(a: u64) -> i64 {
    a as i64
}

pub fn u32_of(a: u32) -> u32 {
    a
}

pub fn u64_of(a: u64) -> u64 {
    a
}

pub fn f32_of(a: u32) -> f32 {
    f32::from_bits(a)
}

pub fn f32_flushed(a: u32) -> f32 {
    f32::from_bits(float::flush(a))
}

pub fn f64_of(a: u64) -> f64 {
    f64::from_bits(a)
}

pub fn f16_of(a: u32) -> f64 {
    float::wide(a, float::F16)
}

pub fn bf16_of(a: u32) -> f64 {
    float::wide(a, float::BF16)
}

/// Division by zero has an unspecified result; the emulator gives all ones, as GPUs do.
pub fn divided<T>(quotient: Option<T>, ones: T) -> T {
    quotient.unwrap_or(ones)
}

pub fn quotient32(a: u32, b: u32) -> u32 {
    if b == 0 {
        return u32::MAX;
    }
    (a as i32).wrapping_div(b as i32) as u32
}

pub fn rest32(a: u32, b: u32) -> u32 {
    if b == 0 {
        return a;
    }
    (a as i32).wrapping_rem(b as i32) as u32
}

pub fn quotient64(a: u64, b: u64) -> u64 {
    if b == 0 {
        return u64::MAX;
    }
    (a as i64).wrapping_div(b as i64) as u64
}

pub fn rest64(a: u64, b: u64) -> u64 {
    if b == 0 {
        return a;
    }
    (a as i64).wrapping_rem(b as i64) as u64
}

pub fn quotient16(a: u32, b: u32) -> u32 {
    match s16(b) {
        0 => 0xffff,
        b => (s16(a).wrapping_div(b) & 0xffff) as u32,
    }
}

pub fn rest16(a: u32, b: u32) -> u32 {
    match s16(b) {
        0 => a,
        b => (s16(a).wrapping_rem(b) & 0xffff) as u32,
    }
}

pub fn high_u32(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

pub fn high_s32(a: u32, b: u32) -> u32 {
    ((i64::from(s32(a)) * i64::from(s32(b))) >> 32) as u32
}

pub fn high_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

pub fn high_s64(a: u64, b: u64) -> u64 {
    ((i128::from(s64(a)) * i128::from(s64(b))) >> 64) as u64
}

/// Shifts clamp their count to the width.
pub fn shr_s32(a: u32, by: u32) -> u32 {
    ((a as i32) >> by.min(31)) as u32
}

pub fn shr_s64(a: u64, by: u32) -> u64 {
    ((a as i64) >> by.min(63)) as u64
}

pub fn extract_u(value: u64, at: u64, len: u64) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    if at >= 64 || len == 0 {
        return 0;
    }
    let field = value >> at;
    if len >= 64 {
        field
    } else {
        field & ((1 << len) - 1)
    }
}

/// The sign bit is the field's highest, or the value's where the field ends beyond it.
pub fn extract_s(value: u64, at: u64, len: u64, bits: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let last = u64::from(bits - 1);
    let value = ((value << (64 - bits)) as i64) >> (64 - bits);
    let sign = (value >> (at + len - 1).min(last)) & 1;
    let mut field = 0u64;
    for i in 0..u64::from(bits) {
        let bit = if i < len && at + i <= last {
            (value >> (at + i)) & 1
        } else {
            sign
        };
        field |= (bit as u64) << i;
    }
    field
}

pub fn insert(field: u64, into: u64, at: u64, len: u64, bits: u32) -> u64 {
    let (at, len) = (at & 0xff, len & 0xff);
    let mut result = into;
    for i in 0..len {
        let to = at + i;
        if to >= u64::from(bits) {
            break;
        }
        result = result & !(1 << to) | (field >> i & 1) << to;
    }
    result
}

pub fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    let mut result = 0;
    for i in 0..4 {
        let select = selector >> (4 * i) & 0xf;
        let byte = (bytes >> (8 * (select & 7))) as u8;
        let byte = if select & 8 == 0 {
            byte
        } else if byte & 0x80 != 0 {
            0xff
        } else {
            0
        };
        result |= u32::from(byte) << (8 * i);
    }
    result
}

/// The logical function of three inputs by its truth table.
pub fn lop3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let mut result = 0;
    for case in 0..8u64 {
        if table >> case & 1 == 1 {
            let a = if case & 4 != 0 { a } else { !a };
            let b = if case & 2 != 0 { b } else { !b };
            let c = if case & 1 != 0 { c } else { !c };
            result |= a & b & c;
        }
    }
    result & 0xffff_ffff
}

/// The position of the highest one (or of the highest bit unlike the sign); all ones without one.
pub fn highest(a: u64, bits: u32, signed: bool, shift: bool) -> u64 {
    let value = if signed {
        let value = ((a << (64 - bits)) as i64) >> (64 - bits);
        (if value < 0 { !value } else { value }) as u64
    } else {
        a
    };
    if value == 0 {
        return 0xffff_ffff;
    }
    let at = 63 - u64::from(value.leading_zeros());
    if shift { u64::from(bits) - 1 - at } else { at }
}

pub fn funnel_left(low: u32, high: u32, by: u32) -> u32 {
    let both = u64::from(high) << 32 | u64::from(low);
    (both << by >> 32) as u32
}

pub fn funnel_right(low: u32, high: u32, by: u32) -> u32 {
    let both = u64::from(high) << 32 | u64::from(low);
    (both >> by) as u32
}

/// The first number becomes the upper half.
#[inline(always)]
pub fn halves_of(high: u32, low: u32, round: impl Fn(u32) -> u32) -> u32 {
    round(high) << 16 | round(low)
}

pub fn nearest_f16(bits: u32) -> u32 {
    float::round(f64::from(f32_of(bits)), float::F16, Round::Nearest)
}

/// Negative numbers become zero, NaN stays.
pub fn relu_of(bits: u32) -> u32 {
    if f32_of(bits) <= 0.0 { 0 } else { bits }
}
