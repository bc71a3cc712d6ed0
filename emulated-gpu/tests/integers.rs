//! Integer and logic instructions against plain Rust, on random operands and the borders of their types.

mod support;

use proptest::prelude::*;
use support::lanes::{Row, apply, assert_form, combinations};

/// Rows with random operands among which small numbers and borders are frequent.
fn rows() -> impl Strategy<Value = Vec<Row>> {
    let value = prop_oneof![
        any::<u64>(),
        0u64..70,
        Just(u64::MAX),
        Just(1u64 << 31),
        Just(1u64 << 63),
        Just(u64::MAX >> 1),
        Just(0x7fff_ffff),
        Just(0x8000),
        Just(0x7fff),
    ];
    prop::collection::vec([value.clone(), value.clone(), value.clone(), value], 128)
}

type Form = (&'static str, &'static str, fn(u64, u64, u64) -> u64);

fn s16(a: u64) -> i64 {
    i64::from(a as i16)
}

fn u16_of(a: u64) -> u64 {
    u64::from(a as u16)
}

fn s32(a: u64) -> i64 {
    i64::from(a as i32)
}

fn u32_of(a: u64) -> u64 {
    u64::from(a as u32)
}

fn low32(a: i64) -> u64 {
    u32_of(a as u64)
}

fn low16(a: i64) -> u64 {
    u16_of(a as u64)
}

/// Forms whose operands are registers of one width, with their meaning in wide arithmetic.
const FORMS: &[Form] = &[
    ("add.u16 {d}, {a}, {b};", "hhh", |a, b, _| {
        u16_of(a.wrapping_add(b))
    }),
    ("add.s16 {d}, {a}, {b};", "hhh", |a, b, _| {
        low16(s16(a) + s16(b))
    }),
    ("sub.s16 {d}, {a}, {b};", "hhh", |a, b, _| {
        low16(s16(a) - s16(b))
    }),
    ("mul.lo.s16 {d}, {a}, {b};", "hhh", |a, b, _| {
        low16(s16(a) * s16(b))
    }),
    ("mul.lo.u16 {d}, {a}, {b};", "hhh", |a, b, _| {
        u16_of(u16_of(a) * u16_of(b))
    }),
    ("mul.hi.s16 {d}, {a}, {b};", "hhh", |a, b, _| {
        low16((s16(a) * s16(b)) >> 16)
    }),
    ("mul.hi.u16 {d}, {a}, {b};", "hhh", |a, b, _| {
        (u16_of(a) * u16_of(b)) >> 16
    }),
    ("mad.lo.s16 {d}, {a}, {b}, {c};", "hhhh", |a, b, c| {
        low16(s16(a) * s16(b) + s16(c))
    }),
    ("mul.wide.s16 {d}, {a}, {b};", "whh", |a, b, _| {
        low32(s16(a) * s16(b))
    }),
    ("mul.wide.u16 {d}, {a}, {b};", "whh", |a, b, _| {
        u16_of(a) * u16_of(b)
    }),
    ("mad.wide.s16 {d}, {a}, {b}, {c};", "whhw", |a, b, c| {
        low32(s16(a) * s16(b) + s32(c))
    }),
    ("mad.wide.u16 {d}, {a}, {b}, {c};", "whhw", |a, b, c| {
        u32_of(u16_of(a) * u16_of(b) + u32_of(c))
    }),
    ("min.s16 {d}, {a}, {b};", "hhh", |a, b, _| {
        low16(s16(a).min(s16(b)))
    }),
    ("max.s16 {d}, {a}, {b};", "hhh", |a, b, _| {
        low16(s16(a).max(s16(b)))
    }),
    ("min.u16 {d}, {a}, {b};", "hhh", |a, b, _| {
        u16_of(a).min(u16_of(b))
    }),
    ("max.u16 {d}, {a}, {b};", "hhh", |a, b, _| {
        u16_of(a).max(u16_of(b))
    }),
    ("neg.s16 {d}, {a};", "hh", |a, _, _| low16(-s16(a))),
    ("abs.s16 {d}, {a};", "hh", |a, _, _| low16(s16(a).abs())),
    ("not.b16 {d}, {a};", "hh", |a, _, _| u16_of(!a)),
    ("and.b16 {d}, {a}, {b};", "hhh", |a, b, _| u16_of(a & b)),
    ("or.b16 {d}, {a}, {b};", "hhh", |a, b, _| u16_of(a | b)),
    ("xor.b16 {d}, {a}, {b};", "hhh", |a, b, _| u16_of(a ^ b)),
    ("shl.b16 {d}, {a}, {b};", "hhw", |a, b, _| match u32_of(b) {
        by @ 0..16 => u16_of(a << by),
        _ => 0,
    }),
    ("shr.u16 {d}, {a}, {b};", "hhw", |a, b, _| {
        u16_of(a) >> u32_of(b).min(16)
    }),
    ("shr.s16 {d}, {a}, {b};", "hhw", |a, b, _| {
        low16(s16(a) >> u32_of(b).min(15))
    }),
    ("add.u32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a.wrapping_add(b))
    }),
    ("add.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32(s32(a) + s32(b))
    }),
    ("add.sat.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32((s32(a) + s32(b)).clamp(i32::MIN.into(), i32::MAX.into()))
    }),
    ("sub.u32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a.wrapping_sub(b))
    }),
    ("sub.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32(s32(a) - s32(b))
    }),
    ("sub.sat.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32((s32(a) - s32(b)).clamp(i32::MIN.into(), i32::MAX.into()))
    }),
    ("mul.lo.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32(s32(a) * s32(b))
    }),
    ("mul.lo.u32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a.wrapping_mul(b))
    }),
    ("mul.hi.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32((s32(a) * s32(b)) >> 32)
    }),
    ("mul.hi.u32 {d}, {a}, {b};", "www", |a, b, _| {
        (u32_of(a) * u32_of(b)) >> 32
    }),
    ("mul.wide.s32 {d}, {a}, {b};", "lww", |a, b, _| {
        (s32(a) * s32(b)) as u64
    }),
    ("mul.wide.u32 {d}, {a}, {b};", "lww", |a, b, _| {
        u32_of(a) * u32_of(b)
    }),
    ("mad.lo.s32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of(a.wrapping_mul(b).wrapping_add(c))
    }),
    ("mad.lo.u32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of(a.wrapping_mul(b).wrapping_add(c))
    }),
    ("mad.hi.s32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        low32(((s32(a) * s32(b)) >> 32) + s32(c))
    }),
    ("mad.hi.u32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of(((u32_of(a) * u32_of(b)) >> 32) + u32_of(c))
    }),
    ("mad.wide.s32 {d}, {a}, {b}, {c};", "lwwl", |a, b, c| {
        ((s32(a) * s32(b)) as u64).wrapping_add(c)
    }),
    ("mad.wide.u32 {d}, {a}, {b}, {c};", "lwwl", |a, b, c| {
        (u32_of(a) * u32_of(b)).wrapping_add(c)
    }),
    ("min.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32(s32(a).min(s32(b)))
    }),
    ("max.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32(s32(a).max(s32(b)))
    }),
    ("min.u32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a).min(u32_of(b))
    }),
    ("max.u32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a).max(u32_of(b))
    }),
    ("neg.s32 {d}, {a};", "ww", |a, _, _| low32(-s32(a))),
    ("abs.s32 {d}, {a};", "ww", |a, _, _| low32(s32(a).abs())),
    ("sad.u32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of(u32_of(a).abs_diff(u32_of(b)) + u32_of(c))
    }),
    ("sad.s32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of(s32(a).abs_diff(s32(b)) + u32_of(c))
    }),
    ("and.b32 {d}, {a}, {b};", "www", |a, b, _| u32_of(a & b)),
    ("or.b32 {d}, {a}, {b};", "www", |a, b, _| u32_of(a | b)),
    ("xor.b32 {d}, {a}, {b};", "www", |a, b, _| u32_of(a ^ b)),
    ("not.b32 {d}, {a};", "ww", |a, _, _| u32_of(!a)),
    ("cnot.b32 {d}, {a};", "ww", |a, _, _| {
        u64::from(u32_of(a) == 0)
    }),
    ("shl.b32 {d}, {a}, {b};", "www", |a, b, _| match u32_of(b) {
        by @ 0..32 => u32_of(a << by),
        _ => 0,
    }),
    ("shr.u32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a) >> u32_of(b).min(32)
    }),
    ("shr.b32 {d}, {a}, {b};", "www", |a, b, _| {
        u32_of(a) >> u32_of(b).min(32)
    }),
    ("shr.s32 {d}, {a}, {b};", "www", |a, b, _| {
        low32(s32(a) >> u32_of(b).min(31))
    }),
    ("shf.l.wrap.b32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of((u32_of(b) << 32 | u32_of(a)) << (c & 31) >> 32)
    }),
    ("shf.r.wrap.b32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of((u32_of(b) << 32 | u32_of(a)) >> (c & 31))
    }),
    (
        "shf.l.clamp.b32 {d}, {a}, {b}, {c};",
        "wwww",
        |a, b, c| match u32_of(c) {
            by @ 0..32 => u32_of((u32_of(b) << 32 | u32_of(a)) << by >> 32),
            _ => u32_of(a),
        },
    ),
    (
        "shf.r.clamp.b32 {d}, {a}, {b}, {c};",
        "wwww",
        |a, b, c| match u32_of(c) {
            by @ 0..32 => u32_of((u32_of(b) << 32 | u32_of(a)) >> by),
            _ => u32_of(b),
        },
    ),
    ("popc.b32 {d}, {a};", "ww", |a, _, _| {
        (0..32).map(|i| a >> i & 1).sum()
    }),
    ("popc.b64 {d}, {a};", "wl", |a, _, _| {
        (0..64).map(|i| a >> i & 1).sum()
    }),
    ("clz.b32 {d}, {a};", "ww", |a, _, _| {
        (0..32).take_while(|i| a >> (31 - i) & 1 == 0).count() as u64
    }),
    ("clz.b64 {d}, {a};", "wl", |a, _, _| {
        (0..64).take_while(|i| a >> (63 - i) & 1 == 0).count() as u64
    }),
    ("brev.b32 {d}, {a};", "ww", |a, _, _| {
        (0..32).map(|i| (a >> i & 1) << (31 - i)).sum()
    }),
    ("brev.b64 {d}, {a};", "ll", |a, _, _| {
        (0..64).fold(0, |r, i| r | (a >> i & 1) << (63 - i))
    }),
    ("bfind.u32 {d}, {a};", "ww", |a, _, _| {
        (0..32)
            .rev()
            .find(|i| a >> i & 1 == 1)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.shiftamt.u32 {d}, {a};", "ww", |a, _, _| {
        (0..32)
            .find(|i| a >> (31 - i) & 1 == 1)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.s32 {d}, {a};", "ww", |a, _, _| {
        let sign = a >> 31 & 1;
        (0..32)
            .rev()
            .find(|i| a >> i & 1 != sign)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.u64 {d}, {a};", "wl", |a, _, _| {
        (0..64)
            .rev()
            .find(|i| a >> i & 1 == 1)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.s64 {d}, {a};", "wl", |a, _, _| {
        (0..64)
            .rev()
            .find(|i| a >> i & 1 != a >> 63)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.shiftamt.s32 {d}, {a};", "ww", |a, _, _| {
        let sign = a >> 31 & 1;
        (0..32)
            .find(|i| a >> (31 - i) & 1 != sign)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.shiftamt.u64 {d}, {a};", "wl", |a, _, _| {
        (0..64)
            .find(|i| a >> (63 - i) & 1 == 1)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("bfind.shiftamt.s64 {d}, {a};", "wl", |a, _, _| {
        (0..64)
            .find(|i| a >> (63 - i) & 1 != a >> 63)
            .map_or(0xffff_ffff, |i| i)
    }),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0xca;", "wwww", |a, b, c| {
        u32_of(a & b | !a & c)
    }),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0x96;", "wwww", |a, b, c| {
        u32_of(a ^ b ^ c)
    }),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0x1b;", "wwww", |a, b, c| {
        // The truth table's bit 4a + 2b + c.
        (0..32)
            .map(|i| (0x1b >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i)
            .sum()
    }),
    ("prmt.b32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        let bytes =
            [u32_of(a).to_le_bytes(), u32_of(b).to_le_bytes()].map(|b| [b[0], b[1], b[2], b[3]]);
        (0..4)
            .map(|i| {
                let select = c >> (4 * i) & 15;
                let byte = bytes.as_flattened()[(select & 7) as usize];
                let byte = if select > 7 {
                    (byte as i8 >> 7) as u8
                } else {
                    byte
                };
                u64::from(byte) << (8 * i)
            })
            .sum()
    }),
    ("add.u64 {d}, {a}, {b};", "lll", |a, b, _| a.wrapping_add(b)),
    ("add.s64 {d}, {a}, {b};", "lll", |a, b, _| a.wrapping_add(b)),
    ("sub.s64 {d}, {a}, {b};", "lll", |a, b, _| a.wrapping_sub(b)),
    ("sub.u64 {d}, {a}, {b};", "lll", |a, b, _| a.wrapping_sub(b)),
    ("mul.lo.s64 {d}, {a}, {b};", "lll", |a, b, _| {
        a.wrapping_mul(b)
    }),
    ("mul.lo.u64 {d}, {a}, {b};", "lll", |a, b, _| {
        a.wrapping_mul(b)
    }),
    ("mul.hi.u64 {d}, {a}, {b};", "lll", |a, b, _| {
        ((u128::from(a) * u128::from(b)) >> 64) as u64
    }),
    ("mul.hi.s64 {d}, {a}, {b};", "lll", |a, b, _| {
        ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
    }),
    ("mad.lo.s64 {d}, {a}, {b}, {c};", "llll", |a, b, c| {
        a.wrapping_mul(b).wrapping_add(c)
    }),
    ("mad.lo.u64 {d}, {a}, {b}, {c};", "llll", |a, b, c| {
        a.wrapping_mul(b).wrapping_add(c)
    }),
    ("min.s64 {d}, {a}, {b};", "lll", |a, b, _| {
        (a as i64).min(b as i64) as u64
    }),
    ("max.s64 {d}, {a}, {b};", "lll", |a, b, _| {
        (a as i64).max(b as i64) as u64
    }),
    ("min.u64 {d}, {a}, {b};", "lll", |a, b, _| a.min(b)),
    ("max.u64 {d}, {a}, {b};", "lll", |a, b, _| a.max(b)),
    ("neg.s64 {d}, {a};", "ll", |a, _, _| a.wrapping_neg()),
    ("abs.s64 {d}, {a};", "ll", |a, _, _| {
        (a as i64).unsigned_abs()
    }),
    ("and.b64 {d}, {a}, {b};", "lll", |a, b, _| a & b),
    ("or.b64 {d}, {a}, {b};", "lll", |a, b, _| a | b),
    ("xor.b64 {d}, {a}, {b};", "lll", |a, b, _| a ^ b),
    ("not.b64 {d}, {a};", "ll", |a, _, _| !a),
    ("cnot.b64 {d}, {a};", "ll", |a, _, _| u64::from(a == 0)),
    ("shl.b64 {d}, {a}, {b};", "llw", |a, b, _| match u32_of(b) {
        by @ 0..64 => a << by,
        _ => 0,
    }),
    ("shr.u64 {d}, {a}, {b};", "llw", |a, b, _| match u32_of(b) {
        by @ 0..64 => a >> by,
        _ => 0,
    }),
    ("shr.s64 {d}, {a}, {b};", "llw", |a, b, _| {
        (a as i64 >> u32_of(b).min(63)) as u64
    }),
    ("slct.b32.s32 {d}, {a}, {b}, {c};", "wwww", |a, b, c| {
        u32_of(if s32(c) >= 0 { a } else { b })
    }),
    ("slct.b64.s32 {d}, {a}, {b}, {c};", "lllw", |a, b, c| {
        if s32(c) >= 0 { a } else { b }
    }),
    ("selp.b16 {d}, {a}, {b}, {c};", "hhhp", |a, b, c| {
        u16_of(if c != 0 { a } else { b })
    }),
    ("selp.b32 {d}, {a}, {b}, {c};", "wwwp", |a, b, c| {
        u32_of(if c != 0 { a } else { b })
    }),
    ("selp.f32 {d}, {a}, {b}, {c};", "wwwp", |a, b, c| {
        u32_of(if c != 0 { a } else { b })
    }),
    ("selp.b64 {d}, {a}, {b}, {c};", "lllp", |a, b, c| {
        if c != 0 { a } else { b }
    }),
    ("selp.f64 {d}, {a}, {b}, {c};", "lllp", |a, b, c| {
        if c != 0 { a } else { b }
    }),
    ("and.pred {d}, {a}, {b};", "ppp", |a, b, _| {
        u64::from(a != 0 && b != 0)
    }),
    ("or.pred {d}, {a}, {b};", "ppp", |a, b, _| {
        u64::from(a != 0 || b != 0)
    }),
    ("xor.pred {d}, {a}, {b};", "ppp", |a, b, _| {
        u64::from((a != 0) != (b != 0))
    }),
    ("not.pred {d}, {a};", "pp", |a, _, _| u64::from(a == 0)),
    ("mov.pred {d}, {a};", "pp", |a, _, _| u64::from(a != 0)),
    ("mov.b16 {d}, {a};", "hh", |a, _, _| u16_of(a)),
    ("mov.u32 {d}, {a};", "ww", |a, _, _| u32_of(a)),
    ("mov.b64 {d}, {a};", "ll", |a, _, _| a),
    ("mov.b64 {d}, {{a}, {b}};", "lww", |a, b, _| {
        u32_of(a) | b << 32
    }),
    ("mov.b32 {d}, {{a}, {b}};", "whh", |a, b, _| {
        u16_of(a) | u16_of(b) << 16
    }),
    ("mov.b64 {d}, {{a}, {b}, {c}, {a}};", "lhhh", |a, b, c| {
        u16_of(a) | u16_of(b) << 16 | u16_of(c) << 32 | a << 48
    }),
    (".reg .b32 x; mov.b64 {x, {d}}, {a};", "wl", |a, _, _| {
        a >> 32
    }),
    ("mov.b64 {{d}, _}, {a};", "wl", |a, _, _| u32_of(a)),
    (".reg .b16 y; mov.b32 {y, {d}}, {a};", "hw", |a, _, _| {
        u16_of(a >> 16)
    }),
    (
        ".reg .b16 x, y, z; mov.b64 {x, y, {d}, z}, {a};",
        "hl",
        |a, _, _| u16_of(a >> 32),
    ),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn forms_agree_with_wide_arithmetic(rows in rows()) {
        for (form, types, meaning) in FORMS {
            assert_form(form, types, &rows, |r| meaning(r[0], r[1], r[2]));
        }
    }

    #[test]
    fn quotients_and_remainders_truncate(rows in rows()) {
        let rows: Vec<Row> = rows
            .into_iter()
            .filter(|r| r[1] as u16 != 0)
            .collect();
        prop_assume!(!rows.is_empty());
        let of = |ty: &str, letter: &str, rows: &[Row], q: fn(u64, u64) -> u64, r: fn(u64, u64) -> u64| {
            let types = letter.repeat(3);
            assert_form(&format!("div.{ty} {{d}}, {{a}}, {{b}};"), &types, rows, |row| q(row[0], row[1]));
            assert_form(&format!("rem.{ty} {{d}}, {{a}}, {{b}};"), &types, rows, |row| r(row[0], row[1]));
        };
        of("u16", "h", &rows, |a, b| u16_of(a) / u16_of(b), |a, b| u16_of(a) % u16_of(b));
        of("s16", "h", &rows, |a, b| low16(s16(a) / s16(b)), |a, b| low16(s16(a) % s16(b)));
        of("u32", "w", &rows, |a, b| u32_of(a) / u32_of(b), |a, b| u32_of(a) % u32_of(b));
        of("s32", "w", &rows, |a, b| low32(s32(a) / s32(b)), |a, b| low32(s32(a) % s32(b)));
        of("u64", "l", &rows, |a, b| a / b, |a, b| a % b);
        of(
            "s64",
            "l",
            &rows,
            |a, b| (i128::from(a as i64) / i128::from(b as i64)) as u64,
            |a, b| (i128::from(a as i64) % i128::from(b as i64)) as u64,
        );
    }

    #[test]
    fn bit_fields_are_extracted_and_inserted(rows in rows(), at in 0u64..70, len in 0u64..70) {
        let rows: Vec<Row> = rows.into_iter().map(|r| [r[0], r[1], at, len]).collect();
        let bit = |value: u64, i: u64, bits: u64| if i < bits { value >> i & 1 } else { 0 };
        for (ty, letter, bits, signed) in
            [("u32", "w", 32, false), ("s32", "w", 32, true), ("u64", "l", 64, false), ("s64", "l", 64, true)]
        {
            let form = format!("bfe.{ty} {{d}}, {{a}}, {{c}}, {{e}};");
            let types = format!("{letter}{letter}{letter}ww");
            assert_form(&form, &types, &rows, |r| {
                let sign = match signed && len > 0 {
                    true => bit(r[0], (at + len - 1).min(bits - 1), bits),
                    false => 0,
                };
                (0..bits).fold(0, |field, i| {
                    let inside = i < len && at + i < bits;
                    field | if inside { bit(r[0], at + i, bits) } else { sign } << i
                })
            });
        }
        for (ty, letter, bits) in [("b32", "w", 32), ("b64", "l", 64)] {
            let form = format!("bfi.{ty} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};");
            let types = format!("{letter}{letter}{letter}ww");
            assert_form(&form, &types, &rows, |r| {
                (0..bits).fold(0, |result, i| {
                    let from_a = i >= at && i - at < len;
                    result | if from_a { r[0] >> (i - at) & 1 } else { r[1] >> i & 1 } << i
                })
            });
        }
    }

    #[test]
    fn comparisons_agree(rows in rows()) {
        type Test = (&'static str, &'static str, fn(i128, i128) -> bool);
        let tests: [Test; 6] = [
            ("eq", "eq", |a, b| a == b),
            ("ne", "ne", |a, b| a != b),
            ("lt", "lo", |a, b| a < b),
            ("le", "ls", |a, b| a <= b),
            ("gt", "hi", |a, b| a > b),
            ("ge", "hs", |a, b| a >= b),
        ];
        type Of = fn(u64) -> i128;
        let types: [(&str, &str, Of); 7] = [
            ("u16", "h", |a| u16_of(a).into()),
            ("s16", "h", |a| s16(a).into()),
            ("u32", "w", |a| u32_of(a).into()),
            ("s32", "w", |a| s32(a).into()),
            ("u64", "l", |a| a.into()),
            ("s64", "l", |a| (a as i64).into()),
            ("b32", "w", |a| u32_of(a).into()),
        ];
        for (name, unsigned_name, holds) in tests {
            for (ty, letter, of) in types {
                if ty == "b32" && name != "eq" && name != "ne" {
                    continue;
                }
                let registers = format!("p{letter}{letter}");
                let form = format!("setp.{name}.{ty} {{d}}, {{a}}, {{b}};");
                assert_form(&form, &registers, &rows, |r| u64::from(holds(of(r[0]), of(r[1]))));
                if ty.starts_with('u') {
                    let form = format!("setp.{unsigned_name}.{ty} {{d}}, {{a}}, {{b}};");
                    assert_form(&form, &registers, &rows, |r| u64::from(holds(of(r[0]), of(r[1]))));
                }
            }
        }
        // The second destination gets the opposite comparison, combined with the predicate too.
        let combined = |r: &Row, op: &str, holds: bool| {
            let c = r[2] != 0;
            u64::from(match op {
                "and" => holds && c,
                "or" => holds || c,
                _ => holds != c,
            })
        };
        for op in ["and", "or", "xor"] {
            let form = format!("setp.lt.{op}.s32 {{d}}, {{a}}, {{b}}, {{c}};");
            assert_form(&form, "pwwp", &rows, |r| combined(r, op, s32(r[0]) < s32(r[1])));
            let form = format!(".reg .pred x; setp.lt.{op}.s32 x|{{d}}, {{a}}, {{b}}, {{c}};");
            assert_form(&form, "pwwp", &rows, |r| combined(r, op, s32(r[0]) >= s32(r[1])));
            let form = format!("setp.lt.{op}.s32 {{d}}, {{a}}, {{b}}, !{{c}};");
            assert_form(&form, "pwwp", &rows, |r| {
                let negated = [r[0], r[1], u64::from(r[2] == 0), 0];
                combined(&negated, op, s32(r[0]) < s32(r[1]))
            });
        }
        assert_form("set.le.u32.s32 {d}, {a}, {b};", "www", &rows, |r| {
            if s32(r[0]) <= s32(r[1]) { 0xffff_ffff } else { 0 }
        });
    }
}

#[test]
fn literals_have_the_instructions_type() {
    let none = [[0; 4]];
    let one = |form: &str, types: &str| apply(form, types, &none)[0];
    assert_eq!(one("mov.u32 {d}, -1;", "w"), 0xffff_ffff);
    assert_eq!(one("mov.u64 {d}, -1;", "l"), u64::MAX);
    assert_eq!(one("mov.u16 {d}, -2;", "h"), 0xfffe);
    assert_eq!(one("mov.u32 {d}, 0x1F;", "w"), 31);
    assert_eq!(one("mov.u32 {d}, 017;", "w"), 15);
    assert_eq!(one("mov.u32 {d}, 0b101;", "w"), 5);
    assert_eq!(one("mov.u32 {d}, 7U;", "w"), 7);
    assert_eq!(one("mov.f32 {d}, 0f3F800000;", "w"), 0x3f80_0000);
    assert_eq!(one("mov.f64 {d}, 0d3FF0000000000000;", "l"), 1f64.to_bits());
    assert_eq!(one("mov.f32 {d}, 1.5;", "w"), u64::from(1.5f32.to_bits()));
    assert_eq!(
        one("mov.f32 {d}, -0.25;", "w"),
        u64::from((-0.25f32).to_bits())
    );
    assert_eq!(one("mov.f64 {d}, 2.5;", "l"), 2.5f64.to_bits());
    assert_eq!(one("mov.u32 {d}, WARP_SZ;", "w"), 32);
}

#[test]
fn conversions_between_integers_extend_truncate_and_clamp() {
    let values = [
        0,
        1,
        0x7f,
        0x80,
        0xff,
        0x100,
        0x7fff,
        0x8000,
        0xffff,
        0x1_0000,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        1 << 32,
        i64::MAX as u64,
        1 << 63,
        u64::MAX,
        u64::MAX - 300,
    ];
    let rows = combinations(&values, 1);
    let letter = |bits: u32| match bits {
        64 => "l",
        32 => "w",
        _ => "h",
    };
    for from in [8u32, 16, 32, 64] {
        for to in [8u32, 16, 32, 64] {
            for (sf, st) in [(false, false), (false, true), (true, false), (true, true)] {
                let name =
                    |signed: bool, bits: u32| format!("{}{bits}", if signed { "s" } else { "u" });
                let types = format!("{}{}", letter(to), letter(from));
                let width = to.max(16);
                let value = |r: &Row| -> i128 {
                    let low = r[0] << (64 - from);
                    if sf {
                        (low as i64 >> (64 - from)).into()
                    } else {
                        (low >> (64 - from)).into()
                    }
                };
                let extended = |value: i128| -> u64 {
                    let low = (value as u64) << (64 - to);
                    let full = if st {
                        (low as i64 >> (64 - to)) as u64
                    } else {
                        low >> (64 - to)
                    };
                    full << (64 - width) >> (64 - width)
                };
                let form = format!("cvt.{}.{} {{d}}, {{a}};", name(st, to), name(sf, from));
                assert_form(&form, &types, &rows, |r| extended(value(r)));
                let (least, most) = match st {
                    true => (-(1i128 << (to - 1)), (1i128 << (to - 1)) - 1),
                    false => (0, (1i128 << to) - 1),
                };
                // PTX has `.sat` only where a clamp is possible.
                let fits = |signed: bool, bits: u32| (if signed { bits - 1 } else { bits }, signed);
                let ((source, of_source), (target, of_target)) = (fits(sf, from), fits(st, to));
                if source > target || (of_source && !of_target) {
                    let form = format!("cvt.sat.{}.{} {{d}}, {{a}};", name(st, to), name(sf, from));
                    assert_form(&form, &types, &rows, |r| {
                        extended(value(r).clamp(least, most))
                    });
                }
            }
        }
    }
    // A register may be wider than the type.
    assert_form("cvt.s32.s8 {d}, {a};", "ww", &rows, |r| {
        low32(i64::from(r[0] as i8))
    });
    assert_form("cvt.u32.u16 {d}, {a};", "wl", &rows, |r| u16_of(r[0]));
}
