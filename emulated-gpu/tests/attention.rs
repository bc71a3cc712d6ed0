//! Compiles the attention kernels with NVRTC, runs their PTX and compares it with formulas in f64.

mod support;

use support::attention::{
    BF16, F32, Inputs, Run, Shape, WGMMA, agrees, check, check_with, compile, run, same_bits,
};
use support::caught::Caught;
use support::kernels::{Compiled, HEADERS, Real};
use support::nvrtc;

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];
const HEAD_DIMS: [usize; 7] = [2, 6, 16, 32, 64, 100, 128];
const HEADS: [(usize, usize); 4] = [(4, 4), (4, 2), (4, 1), (5, 1)];
const SEQ_LENS: [usize; 5] = [1, 7, 64, 65, 130];

/// Every second combination of heads and sequence lengths, with one and two rows in turn; the next head size
/// has the other half.
fn shapes(head_dim: usize) -> Vec<Shape> {
    let mut all = Vec::new();
    let mut combination = HEAD_DIMS
        .iter()
        .position(|&size| size == head_dim)
        .unwrap_or(0);
    for (heads, kv_heads) in HEADS {
        for seq_len in SEQ_LENS {
            combination += 1;
            if combination % 2 == 0 {
                continue;
            }
            all.push(Shape {
                batch: 1 + all.len() % 2,
                seq_len,
                heads,
                kv_heads,
                head_dim,
                packed: &[],
                window: None,
            });
        }
    }
    all
}

/// Whether all shapes run, by every NVRTC, which takes minutes: `EVENKEEL_THOROUGH` is set (scripts/nightly.sh).
fn thorough() -> bool {
    std::env::var_os("EVENKEEL_THOROUGH").is_some()
}

/// Runs and compares every shape with every head size, with two orders of warps and both architectures for some
/// of them. Unless [`thorough`], one NVRTC compiles each head size, and a third of the shapes run.
#[track_caller]
fn every_shape(source: (&str, &str), real: Real) {
    let compilers = nvrtc::all();
    for (turn, nvrtc) in compilers.iter().enumerate() {
        for (size, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            if !thorough() && size % compilers.len() != turn {
                continue;
            }
            let both =
                ARCHITECTURES.map(|name| compile(nvrtc, (source, real), &HEADERS, name, head_dim));
            for (i, shape) in shapes(head_dim).into_iter().enumerate() {
                if !thorough() && (i + size) % 3 != 0 {
                    continue;
                }
                // Large enough that some rows have a few probabilities near 1.
                let inputs = Inputs::new(real, shape, i as u64, 3.0);
                // The orders and the architectures differ in turn, and all of them run where there are two tiles.
                let of = &both[i % 2];
                let check = || -> Result<(), Caught> {
                    let got = run(of, shape, &inputs, 1)?;
                    if shape.seq_len == 65 {
                        for of in &both {
                            same_bits(&got, &run(of, shape, &inputs, 2)?)?;
                        }
                    }
                    agrees(&got, real, shape, &inputs)
                };
                check().unwrap_or_else(|caught| panic!("{}: {shape:?}: {caught}", of.at));
            }
        }
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn f32_attention_agrees() {
    every_shape(F32, Real::F32);
}

#[test]
fn bf16_attention_agrees() {
    every_shape(BF16, Real::Bf16);
}

/// Checks a compiled source at batch, sequence length, heads and key-value heads.
#[track_caller]
fn check_causal(of: &Compiled, shape: (usize, usize, usize, usize), head_dim: usize) {
    let (batch, seq_len, heads, kv_heads) = shape;
    let shape = Shape {
        batch,
        seq_len,
        heads,
        kv_heads,
        head_dim,
        packed: &[],
        window: None,
    };
    check(of, shape).unwrap_or_else(|caught| panic!("{}: {shape:?}: {caught}", of.at));
}

/// Head sizes that only the kernels without tensor cores have, in both precisions.
#[test]
fn attention_of_wide_heads_agrees() {
    let shapes = [(1, 1, 2, 1), (2, 33, 2, 2), (1, 70, 3, 1)];
    for (turn, nvrtc) in nvrtc::all().iter().enumerate() {
        for (size, head_dim) in [130, 256].into_iter().enumerate() {
            if !thorough() && size % 2 != turn % 2 {
                continue;
            }
            for real in [Real::F32, Real::Bf16] {
                let of = compile(nvrtc, (F32, real), &HEADERS, "sm_80", head_dim);
                for shape in shapes {
                    check_causal(&of, shape, head_dim);
                }
            }
        }
    }
}

/// Windows of less than a tile, of a tile, across tiles, and beyond the sequence.
#[test]
fn attention_with_a_window_agrees() {
    for nvrtc in nvrtc::all() {
        for real in [Real::F32, Real::Bf16] {
            let of = compile(&nvrtc, (F32, real), &HEADERS, "sm_80", 6);
            for (window, seq_len) in [(2, 70), (5, 33), (32, 100), (41, 130), (200, 70)] {
                let shape = Shape {
                    batch: 2,
                    seq_len,
                    heads: 4,
                    kv_heads: 2,
                    head_dim: 6,
                    packed: &[],
                    window: Some(window),
                };
                check(&of, shape).unwrap_or_else(|caught| panic!("{}: {shape:?}: {caught}", of.at));
            }
        }
    }
}

/// Documents of one token, of parts of tiles, of a tile and of several, and empty ones at the end.
#[test]
fn attention_of_packed_rows_agrees() {
    let shape = |head_dim, window| Shape {
        batch: 2,
        seq_len: 200,
        heads: 4,
        kv_heads: 2,
        head_dim,
        packed: &[1, 70, 128, 1, 3, 197, 0, 0],
        window,
    };
    for (turn, nvrtc) in nvrtc::all().iter().enumerate() {
        for (i, (source, real, head_dim, window)) in [
            (F32, Real::F32, 6, None),
            (F32, Real::Bf16, 6, Some(41)),
            (BF16, Real::Bf16, 64, None),
            (BF16, Real::Bf16, 100, None),
            (WGMMA, Real::Bf16, 64, None),
            (WGMMA, Real::Bf16, 128, None),
        ]
        .into_iter()
        .enumerate()
        {
            if !thorough() && (i + turn) % 2 != 0 {
                continue;
            }
            let architecture = if source == WGMMA { "sm_90a" } else { "sm_80" };
            let of = compile(nvrtc, (source, real), &HEADERS, architecture, head_dim);
            let shape = shape(head_dim, window);
            check(&of, shape).unwrap_or_else(|caught| panic!("{}: {shape:?}: {caught}", of.at));
        }
    }
}

/// Head sizes above 64 that are no multiple of 4; several tiles of queries and keys; inputs of up to ±20, of which most rows
/// see one key.
#[test]
fn attention_beyond_the_usual_sizes_and_values_agrees() {
    for (turn, nvrtc) in nvrtc::all().iter().enumerate() {
        for (i, (source, real, head_dim, seq_len, most)) in [
            (F32, Real::F32, 66, 70, 3.0),
            (BF16, Real::Bf16, 66, 70, 3.0),
            (BF16, Real::Bf16, 102, 140, 3.0),
            (F32, Real::F32, 32, 300, 3.0),
            (F32, Real::Bf16, 32, 300, 3.0),
            (BF16, Real::Bf16, 64, 300, 3.0),
            (F32, Real::F32, 32, 70, 20.0),
            (F32, Real::Bf16, 32, 70, 20.0),
            (BF16, Real::Bf16, 64, 140, 20.0),
            (BF16, Real::Bf16, 102, 140, 20.0),
            (WGMMA, Real::Bf16, 64, 140, 20.0),
            (WGMMA, Real::Bf16, 128, 140, 20.0),
        ]
        .into_iter()
        .enumerate()
        {
            if !thorough() && (i + turn) % 2 != 0 {
                continue;
            }
            let architecture = if source == WGMMA { "sm_90a" } else { "sm_80" };
            let of = compile(nvrtc, (source, real), &HEADERS, architecture, head_dim);
            let shape = Shape {
                batch: 1,
                seq_len,
                packed: &[],
                heads: 2,
                kv_heads: 1,
                head_dim,
                window: None,
            };
            let checked = check_with(&of, shape, most);
            checked.unwrap_or_else(|caught| panic!("{}: {shape:?}, {most}: {caught}", of.at));
        }
    }
}

/// Head sizes of Hopper's kernels, and shapes with one tile, with parts of tiles, and with several.
#[test]
fn hoppers_attention_agrees() {
    let shapes = [
        (1, 1, 2, 1),
        (2, 7, 2, 2),
        (2, 65, 3, 1),
        (1, 128, 2, 1),
        (1, 300, 4, 2),
        (2, 257, 2, 2),
    ];
    for (turn, nvrtc) in nvrtc::all().iter().enumerate() {
        for head_dim in [64, 128] {
            let of = compile(nvrtc, (WGMMA, Real::Bf16), &HEADERS, "sm_90a", head_dim);
            for (i, shape) in shapes.into_iter().enumerate() {
                if thorough() || (i + turn) % 2 == 0 {
                    check_causal(&of, shape, head_dim);
                }
            }
        }
    }
}

/// A run at a shape for sm_90a, by every NVRTC.
fn runs(source: (&str, &str), real: Real, shape: Shape) -> Vec<Run> {
    let inputs = Inputs::new(real, shape, 7, 1.0);
    let compiled = nvrtc::all()
        .into_iter()
        .map(|nvrtc| compile(&nvrtc, (source, real), &HEADERS, "sm_90a", shape.head_dim));
    compiled
        .map(|of| run(&of, shape, &inputs, 1).unwrap_or_else(|caught| panic!("{caught}")))
        .collect()
}

/// Products of 16 × 8 × 16 that a kernel in bf16 needs if it computes exactly the keys that queries see.
fn needed_products(kernel: &str, shape: Shape) -> f64 {
    let products = match kernel {
        "attention_forward" => 2,
        "attention_backward_queries" => 3,
        "attention_backward_keys" => 4,
        "attention_backward" => 5,
        _ => 0,
    };
    let pairs = (shape.batch * shape.heads * shape.seq_len * shape.seq_len) as f64 / 2.0;
    let dim = shape.head_dim.next_multiple_of(16) as f64;
    f64::from(products) * pairs * dim / 2048.0
}

#[test]
fn attention_wastes_little() {
    for (source, real) in [(F32, Real::F32), (BF16, Real::Bf16), (WGMMA, Real::Bf16)] {
        for head_dim in [64, 100, 128] {
            if source == WGMMA && head_dim == 100 {
                continue;
            }
            let shape = Shape {
                batch: 1,
                // Hopper's tiles are large.
                seq_len: if source == WGMMA { 1024 } else { 256 },
                heads: 2,
                kv_heads: 1,
                head_dim,
                packed: &[],
                window: None,
            };
            for run in runs(source, real, shape) {
                for (kernel, c) in &run.counters {
                    let (all, products) = (c.instructions.total(), c.mma as f64);
                    println!(
                        "{real:?} {head_dim} {kernel}: {} instructions, {} mma, {} conflicts, {} of {} sectors",
                        all, c.mma, c.bank_conflicts, c.global_sectors, c.global_sectors_ideal
                    );
                    let what = format!("{real:?} {kernel} with head size {head_dim}");
                    // Rows of 100 elements begin in the middle of sectors and of the 128 bytes of a turn.
                    let sectors = if head_dim == 100 { 1.25 } else { 1.0 };
                    // NVRTC splits a few of the f32 kernels' 16-byte loads, other ones in every run.
                    let conflicts = match (real, head_dim) {
                        (Real::Bf16, 64 | 128) => 0,
                        _ => all / 50,
                    };
                    assert!(c.bank_conflicts <= conflicts, "{what}: bank conflicts");
                    let allowed = sectors * c.global_sectors_ideal as f64;
                    assert!(c.global_sectors as f64 <= allowed, "{what}: sectors");
                    if real == Real::F32 {
                        assert_eq!(c.mma, 0, "{what}");
                        continue;
                    }
                    // The tiles on the diagonal are computed whole.
                    let needed = needed_products(kernel, shape);
                    assert!(
                        products >= needed && products <= 1.25 * needed,
                        "{what}: mma"
                    );
                    if *kernel != "attention_delta" {
                        assert!(all as f64 <= 16.0 * products, "{what}: instructions");
                    }
                }
            }
        }
    }
}
