//! Floating-point instructions against the definition of IEEE's rounding and PTX's rules for NaN, subnormal
//! numbers and clamping.

mod support;

use std::cmp::Ordering;

use half::{bf16, f16};
use support::Random;
use support::exact::{BF16, Exact, F16, F32, Format, Round, is_rounded};
use support::lanes::{Row, apply, assert_form, combinations};

const NAN: u64 = 0x7fff_ffff;

const ROUNDS: [(&str, Round); 4] = [
    (".rn", Round::Nearest),
    (".rz", Round::Zero),
    (".rm", Round::Down),
    (".rp", Round::Up),
];

/// Zeros, subnormal numbers, borders of binades, the largest, infinities, a quiet and a signalling NaN.
const SPECIAL: [u32; 22] = [
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x8080_0000,
    0x0080_0001,
    0x2000_0000,
    0x3380_0000,
    0x3f7f_ffff,
    0x3f80_0000,
    0xbf80_0000,
    0x3f80_0001,
    0x4040_0000,
    0x4b80_0001,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_1234,
    0x7f80_0001,
];

fn f32_rows(operands: usize) -> Vec<Row> {
    let special: Vec<u64> = SPECIAL.iter().map(|&bits| u64::from(bits)).collect();
    let mut rows = combinations(&special, operands);
    let mut random = Random(1);
    for i in 0..2000u64 {
        let mut row = [0; 4];
        for value in &mut row {
            // Half of the rows have near exponents, so that sums cancel.
            let bits = random.bits() & 0xffff_ffff;
            *value = if i % 2 == 0 {
                bits
            } else {
                bits & 0x83ff_ffff | 0x3c00_0000
            };
        }
        rows.push(row);
    }
    rows
}

fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn flush(bits: u64) -> u64 {
    if bits & 0x7f80_0000 == 0 {
        bits & 0x8000_0000
    } else {
        bits
    }
}

fn exact(bits: u64, format: Format) -> Exact {
    let (mantissa, exponent) = format.parts(bits);
    Exact::of(mantissa, exponent)
}

fn product(a: u64, b: u64, format: Format) -> Exact {
    let ((m, e), (n, g)) = (format.parts(a), format.parts(b));
    Exact::of(m * n, e + g)
}

/// The exact value of an operation that is a sum of products, and what the processor gives for infinities
/// and NaN.
type Operation = (
    &'static str,
    usize,
    fn(&Row, Format) -> Exact,
    fn(f32, f32, f32) -> f32,
);

const OPERATIONS: [Operation; 4] = [
    (
        "add",
        2,
        |r, f| exact(r[0], f).plus(exact(r[1], f)),
        |a, b, _| a + b,
    ),
    (
        "sub",
        2,
        |r, f| {
            let (mantissa, exponent) = f.parts(r[1]);
            exact(r[0], f).plus(Exact::of(-mantissa, exponent))
        },
        |a, b, _| a - b,
    ),
    ("mul", 2, |r, f| product(r[0], r[1], f), |a, b, _| a * b),
    (
        "fma",
        3,
        |r, f| product(r[0], r[1], f).plus(exact(r[2], f)),
        |a, b, c| a.mul_add(b, c),
    ),
];

fn operands(count: usize) -> &'static str {
    ["", "{d}, {a};", "{d}, {a}, {b};", "{d}, {a}, {b}, {c};"][count]
}

fn registers(letter: &str, count: usize) -> String {
    letter.repeat(count + 1)
}

/// The sign of an exact zero: opposite signs give −0 only when rounding down.
fn zero_sign(name: &str, row: &Row, round: Round) -> u64 {
    let sign = |bits: u64| bits >> 31 & 1;
    let (a, b) = match name {
        "add" => (sign(row[0]), sign(row[1])),
        "sub" => (sign(row[0]), 1 ^ sign(row[1])),
        "mul" => return (sign(row[0]) ^ sign(row[1])) << 31,
        _ => (sign(row[0]) ^ sign(row[1]), sign(row[2])),
    };
    let negative = if a == b { a == 1 } else { round == Round::Down };
    u64::from(negative) << 31
}

#[test]
fn f32_sums_and_products_are_rounded_as_ieee_defines() {
    for (name, count, exact_of, processor) in OPERATIONS {
        let rows = f32_rows(count);
        for (suffix, round) in ROUNDS {
            let form = format!("{name}{suffix}.f32 {}", operands(count));
            let types = registers("w", count);
            for (row, got) in rows.iter().zip(apply(&form, &types, &rows)) {
                let what = format!("{form} of {row:x?} is {got:#x}");
                if row[..count].iter().any(|&bits| !F32.is_finite(bits)) {
                    let expected = processor(f(row[0]), f(row[1]), f(row[2]));
                    let bits = u64::from(expected.to_bits());
                    assert_eq!(got, if expected.is_nan() { NAN } else { bits }, "{what}");
                    continue;
                }
                let value = exact_of(row, F32);
                let compare = |m, e| value.compare(Exact::of(m, e));
                if compare(0, 0) == Ordering::Equal {
                    assert_eq!(got, zero_sign(name, row, round), "{what}");
                } else {
                    assert!(is_rounded(got, F32, round, compare), "{what}");
                }
            }
        }
    }
}

/// What `.ftz` makes of results: those that are tiny become zero of their sign.
fn flushed_results(results: Vec<u64>, is_tiny: impl Fn(usize) -> bool) -> Vec<u64> {
    let results = results.into_iter().enumerate();
    let flushed = results.map(|(i, bits)| match is_tiny(i) {
        true => bits & 0x8000_0000,
        false => flush(bits),
    });
    flushed.collect()
}

/// Whether an f32 whose exponent has no limit would be less than the least normal one.
fn is_tiny(value: Exact, round: Round) -> bool {
    let negative = value.compare(Exact::of(0, 0)) == Ordering::Less;
    let below = |mantissa: i128, exponent: i32| match negative {
        true => value.compare(Exact::of(-mantissa, exponent)).reverse(),
        false => value.compare(Exact::of(mantissa, exponent)),
    };
    match round {
        // Half-way between the least normal number and the one before it, which is odd.
        Round::Nearest => below((1 << 25) - 1, -151).is_lt(),
        Round::Down if negative => below((1 << 24) - 1, -150).is_le(),
        Round::Up if !negative => below((1 << 24) - 1, -150).is_le(),
        _ => below(1, -126).is_lt(),
    }
}

#[test]
fn ftz_flushes_operands_and_results_and_sat_clamps() {
    for (name, count, exact_of, _) in OPERATIONS {
        let rows = f32_rows(count);
        let flushed: Vec<Row> = rows.iter().map(|row| row.map(flush)).collect();
        let types = registers("w", count);
        for (suffix, round) in ROUNDS {
            let form =
                |modifiers: &str| format!("{name}{suffix}{modifiers}.f32 {}", operands(count));
            let expected = flushed_results(apply(&form(""), &types, &flushed), |i| {
                let finite = flushed[i][..count].iter().all(|&bits| F32.is_finite(bits));
                finite && is_tiny(exact_of(&flushed[i], F32), round)
            });
            assert_eq!(
                apply(&form(".ftz"), &types, &rows),
                expected,
                "{}",
                form(".ftz")
            );
            let plain = apply(&form(""), &types, &rows);
            let clamped = plain.into_iter().map(|bits| {
                let x = f(bits);
                u64::from(if x > 0.0 { x.min(1.0) } else { 0.0 }.to_bits())
            });
            let expected: Vec<u64> = clamped.collect();
            assert_eq!(
                apply(&form(".sat"), &types, &rows),
                expected,
                "{}",
                form(".sat")
            );
        }
    }
}

#[test]
fn f32_quotients_and_roots_are_rounded_as_ieee_defines() {
    let rows = f32_rows(2);
    for (suffix, round) in ROUNDS {
        let canonical = |x: f32| {
            if x.is_nan() {
                NAN
            } else {
                u64::from(x.to_bits())
            }
        };
        let quotient = |got: u64, a: u64, b: u64, what: String| {
            if f(a) == 0.0 || f(b) == 0.0 || !F32.is_finite(a) || !F32.is_finite(b) {
                assert_eq!(got, canonical(f(a) / f(b)), "{what}");
                return;
            }
            let compare = |m: i128, e: i32| {
                let (n, g) = F32.parts(b);
                let order = exact(a, F32).compare(Exact::of(m * n, e + g));
                if f(b) < 0.0 { order.reverse() } else { order }
            };
            assert!(is_rounded(got, F32, round, compare), "{what}");
        };
        let form = format!("div{suffix}.f32 {}", operands(2));
        for (row, got) in rows.iter().zip(apply(&form, "www", &rows)) {
            quotient(
                got,
                row[0],
                row[1],
                format!("{form} of {row:x?} is {got:#x}"),
            );
        }
        let form = format!("rcp{suffix}.f32 {}", operands(1));
        for (row, got) in rows.iter().zip(apply(&form, "ww", &rows)) {
            let what = format!("{form} of {row:x?} is {got:#x}");
            quotient(got, 0x3f80_0000, row[0], what);
        }
        let form = format!("sqrt{suffix}.f32 {}", operands(1));
        for (row, got) in rows.iter().zip(apply(&form, "ww", &rows)) {
            let what = format!("{form} of {row:x?} is {got:#x}");
            let a = row[0];
            if f(a).is_nan() || f(a) <= 0.0 || !F32.is_finite(a) {
                assert_eq!(got, canonical(f(a).sqrt()), "{what}");
                continue;
            }
            let compare = |m: i128, e: i32| match m {
                ..0 => Ordering::Greater,
                _ => exact(a, F32).compare(Exact::of(m * m, 2 * e)),
            };
            assert!(is_rounded(got, F32, round, compare), "{what}");
        }
        let flushed: Vec<Row> = rows.iter().map(|row| row.map(flush)).collect();
        for (name, count) in [("div", 2), ("rcp", 1), ("sqrt", 1)] {
            let form = |ftz: &str| format!("{name}{suffix}{ftz}.f32 {}", operands(count));
            let types = registers("w", count);
            // No quotient lies between the least normal number and the f32 before it.
            let cut = format!("{name}.rz.f32 {}", operands(count));
            let cut = apply(&cut, &types, &flushed);
            let expected = flushed_results(apply(&form(""), &types, &flushed), |i| {
                cut[i] & 0x7f80_0000 == 0
            });
            assert_eq!(
                apply(&form(".ftz"), &types, &rows),
                expected,
                "{}",
                form(".ftz")
            );
        }
    }
}

#[test]
fn minima_prefer_numbers_and_order_zeros() {
    let rows = f32_rows(2);
    let of = |row: &Row, nan_wins: bool, largest: bool| {
        let (a, b) = (f(row[0]), f(row[1]));
        let chosen = match (a.is_nan(), b.is_nan()) {
            (false, false) => {
                let below = a.total_cmp(&b) == Ordering::Less;
                if below == largest { b } else { a }
            }
            (true, true) => return NAN,
            _ if nan_wins => return NAN,
            (true, _) => b,
            (_, true) => a,
        };
        u64::from(chosen.to_bits())
    };
    for (name, largest) in [("min", false), ("max", true)] {
        let form = format!("{name}.f32 {}", operands(2));
        assert_form(&form, "www", &rows, |row| of(row, false, largest));
        let form = format!("{name}.NaN.f32 {}", operands(2));
        assert_form(&form, "www", &rows, |row| of(row, true, largest));
        let form = format!("{name}.ftz.f32 {}", operands(2));
        assert_form(&form, "www", &rows, |row| {
            of(&row.map(flush), false, largest)
        });
    }
}

#[test]
fn signs_change_without_rounding() {
    let rows = f32_rows(2);
    let of = |bits: u64, changed: u64| if f(bits).is_nan() { NAN } else { changed };
    assert_form("neg.f32 {d}, {a};", "ww", &rows, |r| {
        of(r[0], r[0] ^ 0x8000_0000)
    });
    assert_form("abs.f32 {d}, {a};", "ww", &rows, |r| {
        of(r[0], r[0] & 0x7fff_ffff)
    });
    assert_form("neg.ftz.f32 {d}, {a};", "ww", &rows, |r| {
        of(r[0], flush(r[0]) ^ 0x8000_0000)
    });
    assert_form("abs.ftz.f32 {d}, {a};", "ww", &rows, |r| {
        of(r[0], flush(r[0]) & 0x7fff_ffff)
    });
    assert_form("copysign.f32 {d}, {a}, {b};", "www", &rows, |r| {
        u64::from(f(r[1]).copysign(f(r[0])).to_bits())
    });
}

fn f64_rows(operands: usize) -> Vec<Row> {
    let special = [
        0.0f64,
        -0.0,
        f64::from_bits(1),
        f64::MIN_POSITIVE,
        1.0,
        -1.5,
        1.0 + f64::EPSILON,
        1e300,
        f64::MAX,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    let mut rows = combinations(&special.map(f64::to_bits), operands);
    let mut random = Random(2);
    for _ in 0..1000 {
        rows.push([(); 4].map(|()| random.bits()));
    }
    rows
}

#[test]
fn f64_arithmetic_is_the_processors() {
    let d = f64::from_bits;
    // PTX leaves the bits of an f64 NaN open, so NaN is compared with NaN only.
    let check = |form: &str, count: usize, expected: &dyn Fn(&Row) -> f64| {
        let rows = f64_rows(count);
        let types = registers("l", count);
        for (row, got) in rows.iter().zip(apply(form, &types, &rows)) {
            let expected = expected(row);
            if expected.is_nan() {
                assert!(d(got).is_nan(), "{form} of {row:x?}");
            } else {
                assert_eq!(got, expected.to_bits(), "{form} of {row:x?}");
            }
        }
    };
    check("add.f64 {d}, {a}, {b};", 2, &|r| d(r[0]) + d(r[1]));
    check("add.rn.f64 {d}, {a}, {b};", 2, &|r| d(r[0]) + d(r[1]));
    check("sub.f64 {d}, {a}, {b};", 2, &|r| d(r[0]) - d(r[1]));
    check("mul.f64 {d}, {a}, {b};", 2, &|r| d(r[0]) * d(r[1]));
    check("div.rn.f64 {d}, {a}, {b};", 2, &|r| d(r[0]) / d(r[1]));
    check("fma.rn.f64 {d}, {a}, {b}, {c};", 3, &|r| {
        d(r[0]).mul_add(d(r[1]), d(r[2]))
    });
    check("rcp.rn.f64 {d}, {a};", 1, &|r| 1.0 / d(r[0]));
    check("sqrt.rn.f64 {d}, {a};", 1, &|r| d(r[0]).sqrt());
    check("neg.f64 {d}, {a};", 1, &|r| -d(r[0]));
    check("abs.f64 {d}, {a};", 1, &|r| d(r[0]).abs());
    check("copysign.f64 {d}, {a}, {b};", 2, &|r| {
        d(r[1]).copysign(d(r[0]))
    });
    let least = |r: &Row, largest: bool| match (d(r[0]).is_nan(), d(r[1]).is_nan()) {
        (true, _) => d(r[1]),
        (_, true) => d(r[0]),
        _ if (d(r[0]).total_cmp(&d(r[1])) == Ordering::Less) == largest => d(r[1]),
        _ => d(r[0]),
    };
    check("min.f64 {d}, {a}, {b};", 2, &|r| least(r, false));
    check("max.f64 {d}, {a}, {b};", 2, &|r| least(r, true));
    let rows = f64_rows(1);
    for (row, got) in rows
        .iter()
        .zip(apply("rsqrt.approx.f64 {d}, {a};", "ll", &rows))
    {
        let expected = 1.0 / d(row[0]).sqrt();
        // An H100 is off by a unit in the last place.
        let near = got.abs_diff(expected.to_bits()) <= 1;
        assert!(
            near || expected.is_nan() && d(got).is_nan(),
            "rsqrt of {row:x?}"
        );
    }
    for (row, got) in rows
        .iter()
        .zip(apply("rcp.approx.ftz.f64 {d}, {a};", "ll", &rows))
    {
        assert_eq!(got & 0xffff_ffff, 0);
        let (a, got) = (d(row[0] & !0xffff_ffff), d(got));
        if a.is_normal() && got.is_normal() {
            assert!((got * a - 1.0).abs() < 2f64.powi(-19), "1 / {a} is {got}");
        }
    }
}

fn small_rows(operands: usize, format: Format) -> Vec<Row> {
    let top = format.infinity();
    let one = ((1 << (format.exponent - 1)) - 1) << format.mantissa;
    let special = [
        0,
        0x8000,
        1,
        0x8001,
        (1 << format.mantissa) - 1,
        1 << format.mantissa,
        one,
        one | 0x8000,
        one + 1,
        one + 3,
        top - 1,
        (top - 1) | 0x8000,
        top,
        top | 0x8000,
        0x7fff,
    ];
    let mut rows = combinations(&special, operands);
    let mut random = Random(3);
    for i in 0..2000u64 {
        rows.push([(); 4].map(|()| {
            let bits = random.bits() & 0xffff;
            if i % 2 == 0 {
                bits
            } else {
                bits & 0x83ff | one & 0x7c00
            }
        }));
    }
    rows
}

#[test]
fn arithmetic_of_16_bits_is_rounded_once() {
    for (ty, format) in [("f16", F16), ("bf16", BF16)] {
        for (name, count, exact_of, processor) in OPERATIONS {
            let rows = small_rows(count, format);
            let form = format!("{name}.rn.{ty} {}", operands(count));
            let single = apply(&form, &registers("h", count), &rows);
            for (row, &got) in rows.iter().zip(&single) {
                let what = format!("{form} of {row:x?} is {got:#x}");
                if row[..count].iter().any(|&bits| !format.is_finite(bits)) {
                    let wide = |bits: u64| match ty {
                        "f16" => f16::from_bits(bits as u16).to_f32(),
                        _ => bf16::from_bits(bits as u16).to_f32(),
                    };
                    let expected = processor(wide(row[0]), wide(row[1]), wide(row[2]));
                    let expected = match expected {
                        x if x.is_nan() => 0x7fff,
                        x => format.infinity() | u64::from(x < 0.0) << 15,
                    };
                    assert_eq!(got, expected, "{what}");
                    continue;
                }
                let value = exact_of(row, format);
                let compare = |m, e| value.compare(Exact::of(m, e));
                if compare(0, 0) == Ordering::Equal {
                    let at_31 = row.map(|bits| bits << 16);
                    assert_eq!(got, zero_sign(name, &at_31, Round::Nearest) >> 16, "{what}");
                } else {
                    assert!(is_rounded(got, format, Round::Nearest, compare), "{what}");
                }
            }
            // The packed form does the same in both halves.
            let pairs: Vec<Row> = rows
                .iter()
                .zip(rows.iter().rev())
                .map(|(low, high)| [0, 1, 2, 3].map(|i| low[i] | high[i] << 16))
                .collect();
            let form = format!("{name}.rn.{ty}x2 {}", operands(count));
            let packed = apply(&form, &registers("w", count), &pairs);
            for (i, got) in packed.into_iter().enumerate() {
                let expected = single[i] | single[single.len() - 1 - i] << 16;
                assert_eq!(got, expected, "{form} of {:x?}", pairs[i]);
            }
        }
        let rows = small_rows(2, format);
        let nan = |bits: u64| bits & 0x7fff > format.infinity();
        let order = |bits: u64| match bits & 0x8000 {
            0 => bits as i64,
            _ => -1 - (bits & 0x7fff) as i64,
        };
        for (name, largest) in [("min", false), ("max", true)] {
            let form = format!("{name}.{ty} {}", operands(2));
            assert_form(&form, "hhh", &rows, |r| match (nan(r[0]), nan(r[1])) {
                (true, true) => 0x7fff,
                (true, _) => r[1],
                (_, true) => r[0],
                _ if (order(r[0]) < order(r[1])) == largest => r[1],
                _ => r[0],
            });
        }
        for (name, count) in [("min", 2), ("max", 2), ("neg", 1), ("abs", 1)] {
            let scalar = |rows: &[Row]| {
                let form = format!("{name}.{ty} {}", operands(count));
                apply(&form, &registers("h", count), rows)
            };
            let reversed: Vec<Row> = rows.iter().rev().copied().collect();
            let pairs: Vec<Row> = (0..rows.len())
                .map(|i| [0, 1, 2, 3].map(|at| rows[i][at] | reversed[i][at] << 16))
                .collect();
            let halves = scalar(&rows).into_iter().zip(scalar(&reversed));
            let expected: Vec<u64> = halves.map(|(low, high)| low | high << 16).collect();
            let form = format!("{name}.{ty}x2 {}", operands(count));
            assert_eq!(
                apply(&form, &registers("w", count), &pairs),
                expected,
                "{form}"
            );
        }
        let canonical = |bits: u64| if nan(bits) { 0x7fff } else { bits };
        let form = format!("neg.{ty} {}", operands(1));
        assert_form(&form, "hh", &rows, |r| match nan(r[0]) {
            true => 0x7fff,
            false => r[0] ^ 0x8000,
        });
        let form = format!("abs.{ty} {}", operands(1));
        assert_form(&form, "hh", &rows, |r| canonical(r[0] & 0x7fff));
    }
    // `.ftz` of f16 flushes operands and results; `.sat` clamps.
    let rows = small_rows(2, F16);
    let flush = |bits: u64| {
        if bits & 0x7c00 == 0 {
            bits & 0x8000
        } else {
            bits
        }
    };
    let flushed: Vec<Row> = rows.iter().map(|row| row.map(flush)).collect();
    let expected: Vec<u64> = apply("mul.rn.f16 {d}, {a}, {b};", "hhh", &flushed);
    let expected: Vec<u64> = expected.into_iter().map(flush).collect();
    assert_eq!(
        apply("mul.rn.ftz.f16 {d}, {a}, {b};", "hhh", &rows),
        expected
    );
    let plain = apply("add.rn.f16 {d}, {a}, {b};", "hhh", &rows);
    let clamped = plain.into_iter().map(|bits| {
        let x = f16::from_bits(bits as u16).to_f32();
        u64::from(f16::from_f32(if x > 0.0 { x.min(1.0) } else { 0.0 }).to_bits())
    });
    let expected: Vec<u64> = clamped.collect();
    assert_eq!(
        apply("add.rn.sat.f16 {d}, {a}, {b};", "hhh", &rows),
        expected
    );
}

/// Asserts an approximation's bound against f64: absolute plus relative.
#[track_caller]
fn assert_near(
    form: &str,
    inputs: impl Fn(f32) -> bool,
    (absolute, relative): (f64, f64),
    function: impl Fn(f64) -> f64,
) {
    let mut random = Random(4);
    let mut rows = f32_rows(1);
    rows.extend((0..4000).map(|_| [u64::from(random.float(20.0).to_bits()), 0, 0, 0]));
    rows.retain(|row| inputs(f(row[0])));
    for (row, got) in rows.iter().zip(apply(form, "ww", &rows)) {
        let x = f64::from(f(row[0]));
        let (got, expected) = (f64::from(f(got)), function(x));
        let flushed = form.contains(".ftz") && expected.abs() < f64::from(f32::MIN_POSITIVE);
        if expected.abs() > f64::from(f32::MAX) || flushed {
            continue;
        }
        let allowed = absolute + relative * expected.abs() + f64::from(f32::from_bits(1));
        assert!(
            (got - expected).abs() <= allowed,
            "{form} of {x:e} is {got:e}, not {expected:e}"
        );
    }
}

#[test]
fn approximations_are_within_their_bounds() {
    let all = |x: f32| x.is_finite();
    let positive = |x: f32| x.is_finite() && x >= f32::MIN_POSITIVE;
    for ftz in ["", ".ftz"] {
        let form = |name: &str| format!("{name}.approx{ftz}.f32 {{d}}, {{a}};");
        let normal = |x: f32| ftz.is_empty() || x.abs() >= f32::MIN_POSITIVE;
        assert_near(
            &form("ex2"),
            |x| all(x) && normal(x),
            (0.0, 2f64.powi(-22)),
            f64::exp2,
        );
        assert_near(
            &form("lg2"),
            positive,
            (2f64.powi(-22), 2f64.powi(-22)),
            f64::log2,
        );
        assert_near(&form("rsqrt"), positive, (0.0, 2f64.powf(-22.9)), |x| {
            1.0 / x.sqrt()
        });
        assert_near(&form("sqrt"), positive, (0.0, 2f64.powi(-23)), f64::sqrt);
        let not_zero = |x: f32| x.is_finite() && x.abs() >= f32::MIN_POSITIVE;
        assert_near(&form("rcp"), not_zero, (0.0, 2f64.powi(-23)), |x| 1.0 / x);
        let turn = |x: f32| normal(x) && x.abs() <= std::f32::consts::PI;
        assert_near(&form("sin"), turn, (2f64.powf(-20.5), 0.0), f64::sin);
        assert_near(&form("cos"), turn, (2f64.powf(-20.5), 0.0), f64::cos);
    }
    assert_near(
        "tanh.approx.f32 {d}, {a};",
        all,
        (0.0, 2f64.powi(-11)),
        f64::tanh,
    );
    // What is exact at the borders.
    let at = |form: &str, x: f32| apply(form, "ww", &[[u64::from(x.to_bits()), 0, 0, 0]])[0];
    let bits = |x: f32| u64::from(x.to_bits());
    assert_eq!(at("ex2.approx.ftz.f32 {d}, {a};", f32::NEG_INFINITY), 0);
    assert_eq!(
        at("ex2.approx.ftz.f32 {d}, {a};", f32::INFINITY),
        bits(f32::INFINITY)
    );
    assert_eq!(at("ex2.approx.ftz.f32 {d}, {a};", -0.0), bits(1.0));
    assert_eq!(at("lg2.approx.f32 {d}, {a};", 0.0), bits(f32::NEG_INFINITY));
    assert_eq!(at("lg2.approx.f32 {d}, {a};", -1.0), NAN);
    assert_eq!(
        at("rcp.approx.ftz.f32 {d}, {a};", -0.0),
        bits(f32::NEG_INFINITY)
    );
    assert_eq!(at("rsqrt.approx.f32 {d}, {a};", f32::INFINITY), 0);
    assert_eq!(at("sqrt.approx.ftz.f32 {d}, {a};", -1.0), NAN);
    // Two roundings of a quotient are within 2 ulp.
    let mut random = Random(5);
    let rows: Vec<Row> = (0..2000)
        .map(|_| [0; 4].map(|_: u64| bits(random.float(9.0))))
        .collect();
    for form in ["div.approx.f32", "div.approx.ftz.f32", "div.full.f32"] {
        let form = format!("{form} {{d}}, {{a}}, {{b}};");
        for (row, got) in rows.iter().zip(apply(&form, "www", &rows)) {
            let expected = f64::from(f(row[0])) / f64::from(f(row[1]));
            assert!(
                (f64::from(f(got)) / expected - 1.0).abs() <= 2f64.powi(-22),
                "{form}"
            );
        }
    }
}

#[test]
fn comparisons_are_ordered_or_unordered() {
    type Comparison = (&'static str, fn(Option<Ordering>) -> bool);
    let comparisons: [Comparison; 14] = [
        ("eq", |o| o == Some(Ordering::Equal)),
        ("ne", |o| {
            matches!(o, Some(Ordering::Less | Ordering::Greater))
        }),
        ("lt", |o| o == Some(Ordering::Less)),
        ("le", |o| {
            matches!(o, Some(Ordering::Less | Ordering::Equal))
        }),
        ("gt", |o| o == Some(Ordering::Greater)),
        ("ge", |o| {
            matches!(o, Some(Ordering::Greater | Ordering::Equal))
        }),
        ("equ", |o| matches!(o, None | Some(Ordering::Equal))),
        ("neu", |o| o != Some(Ordering::Equal)),
        ("ltu", |o| matches!(o, None | Some(Ordering::Less))),
        ("leu", |o| o != Some(Ordering::Greater)),
        ("gtu", |o| matches!(o, None | Some(Ordering::Greater))),
        ("geu", |o| o != Some(Ordering::Less)),
        ("num", |o| o.is_some()),
        ("nan", |o| o.is_none()),
    ];
    let rows = f32_rows(2);
    let of64 = f64_rows(2);
    for (name, holds) in comparisons {
        let form = format!("setp.{name}.f32 {}", operands(2));
        assert_form(&form, "pww", &rows, |r| {
            u64::from(holds(f(r[0]).partial_cmp(&f(r[1]))))
        });
        let form = format!("setp.{name}.ftz.f32 {}", operands(2));
        assert_form(&form, "pww", &rows, |r| {
            u64::from(holds(f(flush(r[0])).partial_cmp(&f(flush(r[1])))))
        });
        let form = format!("setp.{name}.f64 {}", operands(2));
        let d = f64::from_bits;
        assert_form(&form, "pll", &of64, |r| {
            u64::from(holds(d(r[0]).partial_cmp(&d(r[1]))))
        });
        for (ty, format) in [("f16", F16), ("bf16", BF16)] {
            let form = format!("setp.{name}.{ty} {}", operands(2));
            assert_form(&form, "phh", &small_rows(2, format), |r| {
                let (a, b) = (r[0] as u16, r[1] as u16);
                u64::from(holds(match ty {
                    "f16" => f16::from_bits(a).partial_cmp(&f16::from_bits(b)),
                    _ => bf16::from_bits(a).partial_cmp(&bf16::from_bits(b)),
                }))
            });
        }
    }
    let form = "set.lt.u32.f32 {d}, {a}, {b};";
    assert_form(form, "www", &rows, |r| {
        if f(r[0]) < f(r[1]) { 0xffff_ffff } else { 0 }
    });
    let form = "set.lt.f32.f32 {d}, {a}, {b};";
    assert_form(form, "www", &rows, |r| {
        if f(r[0]) < f(r[1]) { 0x3f80_0000 } else { 0 }
    });
    type Test = (&'static str, fn(f32) -> bool);
    let tests: [Test; 6] = [
        ("finite", f32::is_finite),
        ("infinite", f32::is_infinite),
        ("number", |x| !x.is_nan()),
        ("notanumber", f32::is_nan),
        ("normal", |x| x.is_normal() || x == 0.0),
        ("subnormal", f32::is_subnormal),
    ];
    for (name, holds) in tests {
        let form = format!("testp.{name}.f32 {{d}}, {{a}};");
        assert_form(&form, "pw", &rows, |r| u64::from(holds(f(r[0]))));
    }
    type Test64 = (&'static str, fn(f64) -> bool);
    let tests: [Test64; 6] = [
        ("finite", f64::is_finite),
        ("infinite", f64::is_infinite),
        ("number", |x| !x.is_nan()),
        ("notanumber", f64::is_nan),
        ("normal", |x| x.is_normal() || x == 0.0),
        ("subnormal", f64::is_subnormal),
    ];
    for (name, holds) in tests {
        let form = format!("testp.{name}.f64 {{d}}, {{a}};");
        assert_form(&form, "pl", &of64, |r| {
            u64::from(holds(f64::from_bits(r[0])))
        });
    }
}
