//! Compiles the attention kernels with NVRTC, runs their PTX and compares it with formulas in f64.

#[path = "support/nvrtc.rs"]
mod nvrtc;
mod support;

use emulated_gpu::launch::{Dim, Launch};
use emulated_gpu::ptx::{Counters, Limits, Module};
use half::bf16;
use nvrtc::Nvrtc;
use support::{Memory, Random, bytes_of, f32s, load, of_f32};

const F32: (&str, &str) = (
    "attention_f32.cu",
    include_str!("../../src/engine/cuda/kernels/attention_f32.cu"),
);

const BF16: (&str, &str) = (
    "attention_bf16.cu",
    include_str!("../../src/engine/cuda/kernels/attention_bf16.cu"),
);

/// The kernels include nothing.
const NO_HEADER: (&str, &str) = ("none.cuh", "");

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];
const HEAD_DIMS: [usize; 7] = [2, 6, 16, 32, 64, 100, 128];
const HEADS: [(usize, usize); 4] = [(4, 4), (4, 2), (4, 1), (5, 1)];
const SEQ_LENS: [usize; 5] = [1, 7, 64, 65, 130];

#[derive(Debug, Clone, Copy)]
struct Shape {
    batch: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Shape {
    /// Elements of a row of `qkv`.
    fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of `qkv`, of `attended` and of `log_sums`.
    fn lens(&self) -> [usize; 3] {
        let tokens = self.batch * self.seq_len;
        let attended = tokens * self.heads * self.head_dim;
        [tokens * self.row(), attended, tokens * self.heads]
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// Where the query, the key and the value of a token begin in `qkv`.
    fn at(&self, batch: usize, token: usize, head: usize) -> [usize; 3] {
        let row = (batch * self.seq_len + token) * self.row();
        let key = self.heads + head / (self.heads / self.kv_heads);
        [head, key, key + self.kv_heads].map(|head| row + head * self.head_dim)
    }

    /// Where the head's result begins in `attended`.
    fn attended_at(&self, batch: usize, token: usize, head: usize) -> usize {
        ((batch * self.seq_len + token) * self.heads + head) * self.head_dim
    }

    /// Where the head's number is in `log_sums` and `delta`.
    fn log_sum_at(&self, batch: usize, token: usize, head: usize) -> usize {
        (batch * self.heads + head) * self.seq_len + token
    }
}

/// What the four kernels give.
struct Results {
    attended: Vec<f64>,
    log_sums: Vec<f64>,
    delta: Vec<f64>,
    dqkv: Vec<f64>,
}

impl Results {
    /// The tensors with their names; the parts of `dqkv` are separate.
    fn tensors(&self, shape: Shape) -> Vec<(&'static str, Vec<f64>)> {
        let (queries, keys) = (
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
        );
        let part = |from: usize, to: usize| -> Vec<f64> {
            let rows = self.dqkv.chunks_exact(shape.row());
            rows.flat_map(|row| row[from..to].to_vec()).collect()
        };
        vec![
            ("attended", self.attended.clone()),
            ("log_sums", self.log_sums.clone()),
            ("delta", self.delta.clone()),
            ("dq", part(0, queries)),
            ("dk", part(queries, queries + keys)),
            ("dv", part(queries + keys, shape.row())),
        ]
    }
}

/// Attention in f64. `round` is applied where a kernel in lower precision rounds: to the results, to the
/// probabilities and to the gradients of the scores.
fn reference(shape: Shape, qkv: &[f64], dattended: &[f64], round: impl Fn(f64) -> f64) -> Results {
    let [qkv_len, attended_len, log_sums_len] = shape.lens();
    let mut results = Results {
        attended: vec![0.0; attended_len],
        log_sums: vec![0.0; log_sums_len],
        delta: vec![0.0; log_sums_len],
        dqkv: vec![0.0; qkv_len],
    };
    let (scale, width) = (shape.scale(), shape.head_dim);
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    for batch in 0..shape.batch {
        for head in 0..shape.heads {
            for i in 0..shape.seq_len {
                let [query_at, ..] = shape.at(batch, i, head);
                let query = &qkv[query_at..][..width];
                let scores: Vec<f64> = (0..=i)
                    .map(|j| scale * dot(query, &qkv[shape.at(batch, j, head)[1]..][..width]))
                    .collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                // The sum has the exponentials before they are rounded.
                let exponentials: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                let sum: f64 = exponentials.iter().sum();
                let log_sum = most + sum.ln();
                results.log_sums[shape.log_sum_at(batch, i, head)] = log_sum;
                let attended_at = shape.attended_at(batch, i, head);
                for d in 0..width {
                    let terms = exponentials.iter().enumerate();
                    let product: f64 = terms
                        .map(|(j, &e)| round(e) * qkv[shape.at(batch, j, head)[2] + d])
                        .sum();
                    results.attended[attended_at + d] = round(product / sum);
                }
                let gradient = &dattended[attended_at..][..width];
                let delta = dot(gradient, &results.attended[attended_at..][..width]);
                results.delta[shape.log_sum_at(batch, i, head)] = delta;
                for (j, score) in scores.iter().enumerate() {
                    let [_, key_at, value_at] = shape.at(batch, j, head);
                    let p = (score - log_sum).exp();
                    let dp = dot(gradient, &qkv[value_at..][..width]);
                    let (ds, p) = (round(p * (dp - delta)), round(p));
                    for d in 0..width {
                        results.dqkv[query_at + d] += scale * ds * qkv[key_at + d];
                        results.dqkv[key_at + d] += scale * ds * qkv[query_at + d];
                        results.dqkv[value_at + d] += p * gradient[d];
                    }
                }
            }
        }
    }
    for value in &mut results.dqkv {
        *value = round(*value);
    }
    results
}

/// How a kernel's elements lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Real {
    F32,
    Bf16,
}

impl Real {
    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Real::F32 => of_f32(values),
            Real::Bf16 => bytes_of(values, |x| bf16::from_f32(x).to_le_bytes().to_vec()),
        }
    }

    fn values(self, bytes: &[u8]) -> Vec<f64> {
        match self {
            Real::F32 => f32s(bytes).into_iter().map(f64::from).collect(),
            Real::Bf16 => bytes
                .chunks_exact(2)
                .map(|bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64())
                .collect(),
        }
    }

    /// Grid and dynamic shared bytes of a kernel, as the source states them.
    fn geometry(self, kernel: &str, shape: Shape) -> (Dim, u32) {
        let dim = shape.head_dim.next_multiple_of(16);
        let keys = if dim <= 64 { 128 } else { 64 };
        let tile = match (self, kernel) {
            (Real::F32, _) | (_, "attention_delta") => 32,
            (Real::Bf16, "attention_backward_keys") => keys,
            (Real::Bf16, _) => 128,
        };
        let heads = match kernel {
            "attention_backward_keys" => shape.kv_heads,
            _ => shape.heads,
        };
        let grid = Dim {
            x: heads as u32,
            y: shape.batch as u32,
            z: shape.seq_len.div_ceil(tile) as u32,
        };
        let shared = match (self, kernel) {
            (_, "attention_delta") => 0,
            (Real::F32, _) => {
                let stride = 4 * (shape.head_dim.div_ceil(4) | 1);
                let tiles = if kernel == "attention_forward" { 3 } else { 4 };
                128 * tiles * stride + 4608
            }
            (Real::Bf16, "attention_forward") => (256 + 2 * keys) * (dim + 8),
            (Real::Bf16, "attention_backward_queries") => 640 * (dim + 8),
            (Real::Bf16, _) => (4 * keys + 256) * (dim + 8) + 512,
        };
        (grid, shared as u32)
    }
}

/// What a run of the four kernels left in memory, and what each of them did.
#[derive(PartialEq)]
struct Run {
    /// attended, log_sums, delta, dqkv
    bytes: [Vec<u8>; 4],
    counters: Vec<(&'static str, Counters)>,
}

impl Run {
    fn results(&self, real: Real) -> Results {
        let [attended, log_sums, delta, dqkv] = &self.bytes;
        Results {
            attended: real.values(attended),
            log_sums: Real::F32.values(log_sums),
            delta: Real::F32.values(delta),
            dqkv: real.values(dqkv),
        }
    }
}

fn run(ptx: &str, real: Real, shape: Shape, qkv: &[f32], dattended: &[f32], seed: u64) -> Run {
    let mut memory = Memory::default();
    let module = load(ptx, &mut memory);
    let [qkv_len, attended_len, log_sums_len] = shape.lens();
    // All bits set are a NaN, so an element that no kernel writes is found.
    let nothing = |bytes: usize| vec![0xff; bytes];
    let element = real.bytes(&[0.0]).len();
    let attended = memory.put(&nothing(element * attended_len));
    let log_sums = memory.put(&nothing(4 * log_sums_len));
    let delta = memory.put(&nothing(4 * log_sums_len));
    let dqkv = memory.put(&nothing(element * qkv_len));
    let qkv = memory.put(&real.bytes(qkv));
    let dattended = memory.put(&real.bytes(dattended));

    let both = [shape.seq_len, shape.heads, shape.kv_heads];
    let backward = [dqkv, dattended, qkv, log_sums, delta];
    let launches: [(&str, &[u64], &[usize]); 4] = [
        ("attention_forward", &[attended, log_sums, qkv], &both),
        ("attention_delta", &[delta, dattended, attended], &both[..2]),
        ("attention_backward_queries", &backward, &both),
        ("attention_backward_keys", &backward, &both),
    ];
    let counters = launches.map(|(kernel, addresses, numbers)| {
        let mut parameters: Vec<u8> = addresses.iter().flat_map(|a| a.to_le_bytes()).collect();
        parameters.extend(numbers.iter().flat_map(|&n| (n as u32).to_le_bytes()));
        let counters = launch(&module, kernel, real, shape, &parameters, &mut memory, seed);
        (kernel, counters)
    });
    Run {
        bytes: [attended, log_sums, delta, dqkv].map(|address| memory.get(address).to_vec()),
        counters: counters.to_vec(),
    }
}

fn launch(
    module: &Module,
    kernel: &str,
    real: Real,
    shape: Shape,
    parameters: &[u8],
    memory: &mut Memory,
    seed: u64,
) -> Counters {
    let (grid, dynamic_shared) = real.geometry(kernel, shape);
    let launch = Launch {
        grid,
        block: support::x(128),
        dynamic_shared,
        parameters,
        seed,
    };
    module
        .run(kernel, &launch, &Limits::default(), memory)
        .unwrap_or_else(|error| panic!("{kernel} of {shape:?}: {error}"))
}

fn compile(nvrtc: &Nvrtc, source: (&str, &str), architecture: &str, head_dim: usize) -> String {
    let architecture = format!("--gpu-architecture={architecture}");
    let head_dim = format!("-DHEAD_DIM={head_dim}");
    nvrtc.compile(source, NO_HEADER, &[&architecture, &head_dim])
}

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
            });
        }
    }
    all
}

/// The distance of two tensors over the norm of the second.
fn distance(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let pairs = got.iter().zip(expected);
    let squares: f64 = pairs.map(|(got, expected)| (got - expected).powi(2)).sum();
    let norm: f64 = expected.iter().map(|x| x * x).sum();
    if squares == 0.0 {
        return 0.0;
    }
    (squares / norm).sqrt()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Runs every shape with a head size, with two seeds and both architectures for some of them, and gives the
/// results to `check`.
fn every_shape(
    (source, real): ((&str, &str), Real),
    round: impl Fn(f32) -> f32,
    check: impl Fn(&str, (Shape, &Results), (&[f64], &[f64])),
) {
    for nvrtc in nvrtc::all() {
        for head_dim in HEAD_DIMS {
            let ptx = ARCHITECTURES.map(|name| compile(&nvrtc, source, name, head_dim));
            for (i, shape) in shapes(head_dim).into_iter().enumerate() {
                let mut random = Random(i as u64);
                let [qkv_len, attended_len, _] = shape.lens();
                let mut floats = |len, scale| -> Vec<f32> {
                    let floats = random.floats(len, scale);
                    floats.into_iter().map(&round).collect()
                };
                // Large enough that some rows have a few probabilities near 1.
                let (qkv, dattended) = (floats(qkv_len, 3.0), floats(attended_len, 0.1));
                // The seeds and the architectures differ in turn, and all of them run where there are two tiles.
                let first = i % 2;
                let got = run(&ptx[first], real, shape, &qkv, &dattended, 1);
                if shape.seq_len == 65 {
                    for ptx in &ptx {
                        let again = run(ptx, real, shape, &qkv, &dattended, 2);
                        assert!(
                            got.bytes == again.bytes,
                            "{shape:?} depends on the order of warps"
                        );
                    }
                }
                let file = nvrtc.path.file_name().unwrap_or_default().display();
                let what = format!("{} by {file} for {}", source.0, ARCHITECTURES[first]);
                let inputs = (&wide(&qkv)[..], &wide(&dattended)[..]);
                check(&what, (shape, &got.results(real)), inputs);
            }
        }
    }
}

/// Compares a run with the reference. `rounding` is where the kernels round, and `factor` how many times that
/// reference's error they may have.
fn assert_agrees(
    what: &str,
    (shape, got): (Shape, &Results),
    (qkv, dattended): (&[f64], &[f64]),
    (rounding, factor): (impl Fn(f64) -> f64, f64),
) {
    let expected = reference(shape, qkv, dattended, |x| x).tensors(shape);
    let rounded = reference(shape, qkv, dattended, rounding).tensors(shape);
    let all = got.tensors(shape);
    for ((name, got), ((_, expected), (_, rounded))) in
        all.iter().zip(expected.iter().zip(&rounded))
    {
        if shape.seq_len == 1 && (*name == "dq" || *name == "dk") {
            // With one key the gradients of the scores are differences of equal numbers.
            let zero = got.iter().all(|x| x.abs() < 1e-5);
            assert!(zero, "{what}: {name} of {shape:?} is not 0");
            continue;
        }
        // Sums in f32 add an error.
        let allowed = factor * distance(rounded, expected) + 2e-6;
        let distance = distance(got, expected);
        assert!(
            distance <= allowed,
            "{what}: {name} of {shape:?} differs by {distance:e}, not {allowed:e}"
        );
    }
}

#[test]
fn f32_attention_agrees() {
    every_shape(
        (F32, Real::F32),
        |x| x,
        |what, run, inputs| assert_agrees(what, run, inputs, (|x| x, 0.0)),
    );
}

#[test]
fn bf16_attention_agrees() {
    let round = |x: f64| bf16::from_f64(x).to_f64();
    every_shape(
        (BF16, Real::Bf16),
        |x| bf16::from_f32(x).to_f32(),
        |what, run, inputs| assert_agrees(what, run, inputs, (round, 1.5)),
    );
}

/// Counters of all kernels at a shape, for sm_90a.
fn counters(source: (&str, &str), real: Real, shape: Shape) -> Vec<Run> {
    let mut random = Random(7);
    let [qkv_len, attended_len, _] = shape.lens();
    let (qkv, dattended) = (
        random.floats(qkv_len, 1.0),
        random.floats(attended_len, 0.1),
    );
    nvrtc::all()
        .iter()
        .map(|nvrtc| {
            let ptx = compile(nvrtc, source, "sm_90a", shape.head_dim);
            run(&ptx, real, shape, &qkv, &dattended, 1)
        })
        .collect()
}

/// Products of 16 × 8 × 16 that a kernel in bf16 needs if it computes exactly the keys that queries see.
fn needed_products(kernel: &str, shape: Shape) -> f64 {
    let products = match kernel {
        "attention_forward" => 2,
        "attention_backward_queries" => 3,
        "attention_backward_keys" => 4,
        _ => 0,
    };
    let pairs = (shape.batch * shape.heads * shape.seq_len * shape.seq_len) as f64 / 2.0;
    let dim = shape.head_dim.next_multiple_of(16) as f64;
    f64::from(products) * pairs * dim / 2048.0
}

#[test]
fn attention_wastes_little() {
    for real in [Real::F32, Real::Bf16] {
        for head_dim in [64, 100, 128] {
            let shape = Shape {
                batch: 1,
                seq_len: 256,
                heads: 2,
                kv_heads: 1,
                head_dim,
            };
            let source = if real == Real::F32 { F32 } else { BF16 };
            for run in counters(source, real, shape) {
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
