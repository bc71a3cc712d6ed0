//! `cvt` from and to floating point.

mod support;

use half::{bf16, f16};
use support::Random;
use support::device::compares;
use support::exact::{BF16, Exact, F16, F32, Format, Round, is_rounded};
use support::lanes::{Row, apply, assert_form};

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

fn rows(special: &[u64], bits: u32) -> Vec<Row> {
    let mut random = Random(1);
    let mut rows: Vec<Row> = special.iter().map(|&value| [value, 0, 0, 0]).collect();
    rows.extend((0..3000).map(|_| [random.bits() >> (64 - bits), 0, 0, 0]));
    rows
}

fn of_f32() -> Vec<Row> {
    let mut special: Vec<u64> = [
        0.0f32,
        0.5,
        1.5,
        2.5,
        0.499_999_97,
        1.0,
        255.5,
        256.0,
        65504.0,
        65519.9,
        65520.0,
        32767.5,
        1e-8,
        6e-8,
        2147483648.0,
        4294967296.0,
        9.223_372e18,
        1.844_674_4e19,
        3e38,
        f32::INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
    ]
    .iter()
    .flat_map(|x| [x.to_bits().into(), (-x).to_bits().into()])
    .collect();
    special.extend([0x7fc0_0000, 0x7f80_0001, 0xffc0_0000]);
    // Numbers near 1 with long fractions, halfway cases among them.
    special.extend((0..200).map(|i| 0x3f80_0000u64 + i * 0x800));
    let mut rows = rows(&special, 32);
    let mut random = Random(2);
    rows.extend((0..2000).map(|_| [u64::from(random.float(70000.0).to_bits()), 0, 0, 0]));
    rows
}

fn of_f64() -> Vec<Row> {
    let of_singles = of_f32();
    let singles = of_singles.iter().map(|row| f64::from(f(row[0])).to_bits());
    let mut special: Vec<u64> = singles.collect();
    special.extend([1e300f64, -1e300, 1e-310, 1.0 + f64::EPSILON, f64::MAX].map(f64::to_bits));
    rows(&special, 64)
}

const ROUNDS: [(&str, Round); 4] = [
    ("rn", Round::Nearest),
    ("rz", Round::Zero),
    ("rm", Round::Down),
    ("rp", Round::Up),
];

fn integral(x: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

#[test]
fn floats_become_integers_by_rounding_and_clamping() {
    let sources: [(&str, &str, Vec<Row>); 4] = [
        ("f32", "w", of_f32()),
        ("f64", "l", of_f64()),
        (
            "f16",
            "h",
            rows(&[0x7c00, 0xfc00, 0x7fff, 0x3800, 0xb800], 16),
        ),
        (
            "bf16",
            "h",
            rows(&[0x7f80, 0xff80, 0x7fff, 0x3f00, 0xbf00], 16),
        ),
    ];
    for (source, letter, rows) in &sources {
        let value = |bits: u64| match *source {
            "f32" => f64::from(f(bits)),
            "f64" => f64::from_bits(bits),
            "f16" => f16::from_bits(bits as u16).to_f64(),
            _ => bf16::from_bits(bits as u16).to_f64(),
        };
        for (target, bits, signed) in [
            ("u16", 16u32, false),
            ("s16", 16, true),
            ("u32", 32, false),
            ("s32", 32, true),
            ("u64", 64, false),
            ("s64", 64, true),
        ] {
            let registers = format!(
                "{}{letter}",
                match bits {
                    16 => "h",
                    32 => "w",
                    _ => "l",
                }
            );
            for (suffix, round) in ROUNDS {
                let form = format!("cvt.{suffix}i.{target}.{source} {{d}}, {{a}};");
                assert_form(&form, &registers, rows, |r| {
                    let x = value(r[0]);
                    if x.is_nan() {
                        let zero = *source != "f64" && bits != 64;
                        return if zero { 0 } else { 1 << (bits - 1) };
                    }
                    let (least, most) = match signed {
                        true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
                        false => (0, (1i128 << bits) - 1),
                    };
                    let clamped = (integral(x, round) as i128).clamp(least, most);
                    clamped as u64 & (u64::MAX >> (64 - bits))
                });
            }
        }
    }
    let form = "cvt.rzi.ftz.s32.f32 {d}, {a};";
    assert_form(form, "ww", &of_f32(), |r| {
        u64::from(f(flush(r[0])) as i32 as u32)
    });
}

#[test]
fn integers_become_floats_by_one_rounding() {
    let special = [
        0,
        1,
        0xff_ffff,
        0x100_0001,
        0x100_0003,
        u64::MAX,
        1 << 63,
        (1 << 63) + 1,
        1 << 53 | 1,
    ];
    let rows = rows(&special, 64);
    for (source, letter, bits, signed) in [
        ("u32", "w", 32u32, false),
        ("s32", "w", 32, true),
        ("u64", "l", 64, false),
        ("s64", "l", 64, true),
        ("s16", "h", 16, true),
        ("u16", "h", 16, false),
    ] {
        let value = |r: &Row| -> i128 {
            let low = r[0] << (64 - bits);
            if signed {
                (low as i64 >> (64 - bits)).into()
            } else {
                (low >> (64 - bits)).into()
            }
        };
        for (suffix, round) in ROUNDS {
            let form = format!("cvt.{suffix}.f32.{source} {{d}}, {{a}};");
            for (row, got) in rows.iter().zip(apply(&form, &format!("w{letter}"), &rows)) {
                let exact = Exact::of(value(row), 0);
                let right = is_rounded(got, F32, round, |m, e| exact.compare(Exact::of(m, e)));
                assert!(right, "{form} of {row:x?} is {got:#x}");
            }
        }
        for (ty, format) in [("f16", F16), ("bf16", BF16)] {
            let form = format!("cvt.rn.{ty}.{source} {{d}}, {{a}};");
            for (row, got) in rows.iter().zip(apply(&form, &format!("h{letter}"), &rows)) {
                let exact = Exact::of(value(row), 0);
                let right = is_rounded(got, format, Round::Nearest, |m, e| {
                    exact.compare(Exact::of(m, e))
                });
                assert!(right, "{form} of {row:x?} is {got:#x}");
            }
        }
        let form = format!("cvt.rn.f64.{source} {{d}}, {{a}};");
        assert_form(&form, &format!("l{letter}"), &rows, |r| {
            (value(r) as f64).to_bits()
        });
    }
}

#[test]
fn floats_become_narrower_by_one_rounding() {
    let nan = |x: f64, canonical: u64, bits: u64| if x.is_nan() { canonical } else { bits };
    for (suffix, round) in ROUNDS {
        let form = format!("cvt.{suffix}.f32.f64 {{d}}, {{a}};");
        let rows = of_f64();
        for (row, got) in rows.iter().zip(apply(&form, "wl", &rows)) {
            let x = f64::from_bits(row[0]);
            let what = format!("{form} of {x:e} is {got:#x}");
            if !x.is_finite() {
                assert_eq!(got, u64::from((x as f32).to_bits()), "{what}");
                continue;
            }
            let compare = |m: i128, e: i32| {
                let other = m as f64 * 2f64.powi(e);
                x.partial_cmp(&other).expect("finite numbers are ordered")
            };
            assert!(is_rounded(got, F32, round, compare), "{what}");
        }
    }
    let rows = of_f32();
    let narrow: [(&str, Format); 2] = [("f16", F16), ("bf16", BF16)];
    for (ty, format) in narrow {
        for (suffix, round) in [("rn", Round::Nearest), ("rz", Round::Zero)] {
            let form = format!("cvt.{suffix}.{ty}.f32 {{d}}, {{a}};");
            for (row, got) in rows.iter().zip(apply(&form, "hw", &rows)) {
                let what = format!("{form} of {row:x?} is {got:#x}");
                let x = f64::from(f(row[0]));
                if !x.is_finite() {
                    let infinity = format.infinity() | u64::from(x < 0.0) << 15;
                    assert_eq!(got, nan(x, 0x7fff, infinity), "{what}");
                    continue;
                }
                let (m, e) = F32.parts(row[0]);
                let exact = Exact::of(m, e);
                let right = is_rounded(got, format, round, |m, e| exact.compare(Exact::of(m, e)));
                assert!(right || x == 0.0, "{what}");
            }
        }
        let to = |bits: u64| {
            let x = f(bits);
            if x.is_nan() {
                return 0x7fff;
            }
            u64::from(match ty {
                "f16" => f16::from_f32(x).to_bits(),
                _ => bf16::from_f32(x).to_bits(),
            })
        };
        // The first operand becomes the upper half.
        let pairs: Vec<Row> = rows
            .iter()
            .zip(rows.iter().rev())
            .map(|(a, b)| [a[0], b[0], 0, 0])
            .collect();
        let form = format!("cvt.rn.{ty}x2.f32 {{d}}, {{a}}, {{b}};");
        assert_form(&form, "www", &pairs, |r| to(r[0]) << 16 | to(r[1]));
        let positive = |bits: u64| if to(bits) & 0x8000 != 0 { 0 } else { to(bits) };
        let form = format!("cvt.rn.relu.{ty}x2.f32 {{d}}, {{a}}, {{b}};");
        assert_form(&form, "www", &pairs, |r| {
            positive(r[0]) << 16 | positive(r[1])
        });
        let form = format!("cvt.rn.relu.{ty}.f32 {{d}}, {{a}};");
        assert_form(&form, "hw", &rows, |r| positive(r[0]));
    }
}

#[test]
fn floats_become_wider_exactly() {
    let canonical = |x: f32| u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() });
    let all: Vec<Row> = (0..1 << 16).map(|bits| [bits, 0, 0, 0]).collect();
    assert_form("cvt.f32.f16 {d}, {a};", "wh", &all, |r| {
        canonical(f16::from_bits(r[0] as u16).to_f32())
    });
    assert_form("cvt.f32.bf16 {d}, {a};", "wh", &all, |r| r[0] << 16);
    let rows = of_f32();
    for (row, got) in rows.iter().zip(apply("cvt.f64.f32 {d}, {a};", "lw", &rows)) {
        let (got, expected) = (f64::from_bits(got), f64::from(f(row[0])));
        assert!(got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()));
    }
}

#[test]
fn floats_are_rounded_to_integers_clamped_and_flushed_in_place() {
    let rows = of_f32();
    let canonical = |x: f32| u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() });
    for (suffix, round) in ROUNDS {
        let form = format!("cvt.{suffix}i.f32.f32 {{d}}, {{a}};");
        assert_form(&form, "ww", &rows, |r| {
            canonical(integral(f(r[0]).into(), round) as f32)
        });
        let form = format!("cvt.{suffix}i.ftz.f32.f32 {{d}}, {{a}};");
        assert_form(&form, "ww", &rows, |r| {
            canonical(integral(f(flush(r[0])).into(), round) as f32)
        });
        let form = format!("cvt.{suffix}i.f64.f64 {{d}}, {{a}};");
        let of_f64 = of_f64();
        for (row, got) in of_f64.iter().zip(apply(&form, "ll", &of_f64)) {
            let expected = integral(f64::from_bits(row[0]), round);
            assert!(got == expected.to_bits() || expected.is_nan(), "{form}");
        }
    }
    let clamp = |x: f32| if x > 0.0 { x.min(1.0) } else { 0.0 };
    assert_form("cvt.sat.f32.f32 {d}, {a};", "ww", &rows, |r| {
        canonical(clamp(f(r[0])))
    });
    assert_form("cvt.ftz.sat.f32.f32 {d}, {a};", "ww", &rows, |r| {
        canonical(clamp(f(flush(r[0]))))
    });
    assert_form("cvt.ftz.f32.f32 {d}, {a};", "ww", &rows, |r| {
        canonical(f(flush(r[0])))
    });
}

#[test]
fn tf32_keeps_ten_bits() {
    // The bits of NaN differ from those of an H100, which makes infinity of some.
    let mut rows = of_f32();
    rows.retain(|row| !(compares() && f(row[0]).is_nan()));
    for (form, away) in [("cvt.rna.tf32.f32", true), ("cvt.rn.tf32.f32", false)] {
        let form = format!("{form} {{d}}, {{a}};");
        for (row, got) in rows.iter().zip(apply(&form, "ww", &rows)) {
            let x = f(row[0]);
            if x.is_nan() {
                assert_eq!(got, 0x7fff_ffff);
                continue;
            }
            // In f64, where the neighbours and half of their distance are exact.
            let below = f64::from(f(row[0] & !0x1fff));
            let step = f64::from(f((row[0] & 0x7f80_0000).max(0x0080_0000))) / 1024.0;
            let above = below + step.copysign(x.into());
            let (to_below, to_above) = ((f64::from(x) - below).abs(), (above - f64::from(x)).abs());
            let even = row[0] >> 13 & 1 == 0;
            let chosen = match to_below.partial_cmp(&to_above) {
                Some(std::cmp::Ordering::Less) => below,
                Some(std::cmp::Ordering::Equal) if even && !away => below,
                _ => above,
            };
            let chosen = if x.is_infinite() { x } else { chosen as f32 };
            assert_eq!(got, u64::from(chosen.to_bits()), "{form} of {x:e}");
        }
    }
}
