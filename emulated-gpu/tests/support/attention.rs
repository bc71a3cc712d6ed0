//! Attention's kernels: what they must compute, and how they run.

use emulated_gpu::launch::{Dim, Launch};
use emulated_gpu::ptx::{Counters, Limits};
use half::bf16;

use super::caught::{Caught, Check, ensure};
use super::kernels::{Compiled, Real, source, wide};
use super::nvrtc::Nvrtc;
use super::{Memory, Random, load, x};

pub const F32: (&str, &str) = source!("attention_f32.cu");
pub const BF16: (&str, &str) = source!("attention_bf16.cu");
/// Hopper's, with one kernel for the backward pass.
pub const WGMMA: (&str, &str) = source!("attention_wgmma.cu");
const BACKWARD: &str = "attention_backward";

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub batch: usize,
    pub seq_len: usize,
    /// Tokens of the sequences in packed rows, whose last ones may be empty. Without them each row is one.
    pub packed: &'static [usize],
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Keys that a query sees, itself included; `None`: all up to itself.
    pub window: Option<usize>,
}

impl Shape {
    /// The first token of each sequence, and its number of tokens.
    pub fn sequences(&self) -> Vec<(usize, usize)> {
        let rows = vec![self.seq_len; self.batch];
        let lengths = match self.packed {
            [] => &rows,
            packed => packed,
        };
        let mut start = 0;
        let sequences = lengths.iter().map(|&len| {
            start += len;
            (start - len, len)
        });
        sequences.collect()
    }

    /// Elements of a row of `qkv`.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of `qkv`, of `attended` and of `log_sums`.
    pub fn lens(&self) -> [usize; 3] {
        let tokens = self.batch * self.seq_len;
        let attended = tokens * self.heads * self.head_dim;
        [tokens * self.row(), attended, tokens * self.heads]
    }

    pub fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// Where the query, the key and the value of a token begin in `qkv`.
    pub fn at(&self, token: usize, head: usize) -> [usize; 3] {
        let row = token * self.row();
        let key = self.heads + head / (self.heads / self.kv_heads);
        [head, key, key + self.kv_heads].map(|head| row + head * self.head_dim)
    }

    /// Where the head's result begins in `attended`.
    pub fn attended_at(&self, token: usize, head: usize) -> usize {
        (token * self.heads + head) * self.head_dim
    }
}

/// What the kernels give.
pub struct Results {
    pub attended: Vec<f64>,
    pub log_sums: Vec<f64>,
    pub delta: Vec<f64>,
    pub dqkv: Vec<f64>,
}

impl Results {
    /// The tensors with their names; the parts of `dqkv` are separate.
    pub fn tensors(&self, shape: Shape) -> Vec<(&'static str, Vec<f64>)> {
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
    for (start, len) in shape.sequences() {
        for head in 0..shape.heads {
            for i in 0..len {
                // Where the head's number is in `log_sums` and `delta`.
                let number_at = start * shape.heads + head * len + i;
                let [query_at, ..] = shape.at(start + i, head);
                let query = &qkv[query_at..][..width];
                let seen = |j: usize| shape.window.is_none_or(|window| i - j < window);
                let score = |j: usize| match seen(j) {
                    true => scale * dot(query, &qkv[shape.at(start + j, head)[1]..][..width]),
                    false => f64::NEG_INFINITY,
                };
                let scores: Vec<f64> = (0..=i).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                // The sum has the exponentials before they are rounded.
                let exponentials: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                let sum: f64 = exponentials.iter().sum();
                let log_sum = most + sum.ln();
                results.log_sums[number_at] = log_sum;
                let attended_at = shape.attended_at(start + i, head);
                for d in 0..width {
                    let terms = exponentials.iter().enumerate();
                    let product: f64 = terms
                        .map(|(j, &e)| round(e) * qkv[shape.at(start + j, head)[2] + d])
                        .sum();
                    results.attended[attended_at + d] = round(product / sum);
                }
                let gradient = &dattended[attended_at..][..width];
                let delta = dot(gradient, &results.attended[attended_at..][..width]);
                results.delta[number_at] = delta;
                for (j, score) in scores.iter().enumerate() {
                    let [_, key_at, value_at] = shape.at(start + j, head);
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

/// Grid, threads and dynamic shared bytes of a kernel, as the source states them.
fn geometry(of: &Compiled, kernel: &str, shape: Shape) -> (Dim, u32, u32) {
    if of.is_hoppers() && kernel != "attention_delta" {
        return hoppers_geometry(kernel, shape);
    }
    let dim = shape.head_dim.next_multiple_of(16);
    let keys = if dim <= 64 { 128 } else { 64 };
    let tile = match kernel {
        "attention_delta" => 32,
        _ if of.is_plain() => 32,
        "attention_backward_keys" => keys,
        _ => 128,
    };
    let heads = match kernel {
        "attention_backward_keys" => shape.kv_heads,
        _ => shape.heads,
    };
    let grid = Dim {
        x: heads as u32,
        y: shape.sequences().len() as u32,
        z: shape.seq_len.div_ceil(tile) as u32,
    };
    let shared = match kernel {
        "attention_delta" => 0,
        _ if of.is_plain() => {
            let stride = 4 * (shape.head_dim.div_ceil(4) | 1);
            let tiles = if kernel == "attention_forward" { 3 } else { 4 };
            128 * tiles * stride + 4608
        }
        "attention_forward" => 384 * (dim + 8),
        "attention_backward_queries" => 640 * (dim + 8),
        _ => (4 * keys + 256) * (dim + 8) + 512,
    };
    (grid, 128, shared as u32)
}

fn hoppers_geometry(kernel: &str, shape: Shape) -> (Dim, u32, u32) {
    let blocks = |rows| shape.seq_len.div_ceil(rows) as u32;
    let [heads, rows] = [shape.heads, shape.sequences().len()].map(|n| n as u32);
    let wide = shape.head_dim == 128;
    if kernel == BACKWARD {
        let shared = if wide { 164_880 } else { 165_904 };
        return (x(heads * rows * blocks(128)), 384, shared);
    }
    let grid = Dim {
        x: heads,
        y: rows,
        z: blocks(64),
    };
    (grid, 128, if wide { 81_920 } else { 73_728 })
}

impl Compiled {
    /// Without tensor cores, with a window.
    fn is_plain(&self) -> bool {
        self.ptx.contains("attention_forward_param_7")
    }

    fn is_hoppers(&self) -> bool {
        self.ptx.contains(&format!(".entry {BACKWARD}("))
    }
}

/// What a run of the kernels left in memory, and what each of them did.
pub struct Run {
    /// attended, log_sums, delta, dqkv
    bytes: [Vec<u8>; 4],
    pub counters: Vec<(&'static str, Counters)>,
}

impl Run {
    fn results(&self, real: Real) -> Results {
        let [attended, log_sums, delta, dqkv] = &self.bytes;
        Results {
            attended: wide(&real.values(attended)),
            log_sums: wide(&Real::F32.values(log_sums)),
            delta: wide(&Real::F32.values(delta)),
            dqkv: wide(&real.values(dqkv)),
        }
    }
}

/// Runs the kernels after each other, all in the order of warps that the seed gives.
pub fn run(of: &Compiled, shape: Shape, inputs: &Inputs, seed: u64) -> Result<Run, Caught> {
    let mut memory = Memory::default();
    let module = load(&of.ptx, &mut memory);
    let [qkv_len, attended_len, log_sums_len] = shape.lens();
    // All bits set are a NaN, so an element that no kernel writes is found, and so is one that is read too early.
    let mut nothing = |bytes: usize| {
        let address = memory.put(&vec![0xff; bytes]);
        memory.forget(address);
        address
    };
    let element = of.real.size();
    let attended = nothing(element * attended_len);
    let log_sums = nothing(4 * log_sums_len);
    let delta = nothing(4 * log_sums_len);
    let dqkv = nothing(element * qkv_len);
    let query_sums = nothing(4 * attended_len);
    let keys = shape.batch * shape.seq_len * shape.kv_heads * shape.head_dim;
    let key_sums = nothing(4 * 2 * keys);
    let qkv = memory.put(&of.real.bytes(&inputs.qkv));
    let dattended = memory.put(&of.real.bytes(&inputs.dattended));

    let sequences = shape.sequences();
    let tiles = shape.batch * shape.seq_len / if shape.head_dim == 64 { 128 } else { 64 };
    let counters = (tiles + sequences.len()) * (shape.heads + 2 * shape.kv_heads);
    let turns = memory.put(&vec![0; 4 * (1 + counters)]);
    let of_sequences = sequences
        .iter()
        .flat_map(|&(start, len)| [start as u32, len as u32]);
    let spans: Vec<u8> = of_sequences.flat_map(u32::to_le_bytes).collect();
    let spans = match shape.packed {
        [] => 0,
        _ => memory.put(&spans),
    };

    let all = [shape.seq_len, shape.heads, shape.kv_heads];
    let backward = [dqkv, dattended, qkv, log_sums, delta];
    let in_turns = [
        dqkv, query_sums, key_sums, turns, dattended, qkv, log_sums, delta,
    ];
    let forward = [attended, log_sums, qkv];
    let of_delta = [delta, dattended, attended];
    let mut launches: Vec<(&str, &[u64], &[usize])> = vec![
        ("attention_forward", &forward, &all),
        ("attention_delta", &of_delta, &all[..2]),
    ];
    if of.is_hoppers() {
        launches.push((BACKWARD, &in_turns, &all));
    } else {
        launches.push(("attention_backward_queries", &backward, &all));
        launches.push(("attention_backward_keys", &backward, &all));
    }
    let mut counters = Vec::new();
    for (kernel, addresses, numbers) in launches {
        let mut parameters: Vec<u8> = addresses.iter().flat_map(|a| a.to_le_bytes()).collect();
        parameters.extend(numbers.iter().flat_map(|&n| (n as u32).to_le_bytes()));
        if of.is_plain() && kernel != "attention_delta" {
            let window = shape.window.map_or(i32::MAX as u32, |window| window as u32);
            parameters.extend(window.to_le_bytes());
        }
        // Addresses are aligned among the parameters.
        parameters.resize(parameters.len().next_multiple_of(8), 0);
        parameters.extend(spans.to_le_bytes());
        let (grid, threads, dynamic_shared) = geometry(of, kernel, shape);
        let launch = Launch {
            grid,
            block: x(threads),
            dynamic_shared,
            parameters: &parameters,
            seed,
        };
        let counted = module.run(kernel, &launch, &Limits::default(), &mut memory)?;
        counters.push((kernel, counted));
    }
    Ok(Run {
        bytes: [attended, log_sums, delta, dqkv].map(|address| memory.get(address).to_vec()),
        counters,
    })
}

/// Compiles a source for a head size.
pub fn compile(
    nvrtc: &Nvrtc,
    (source, real): ((&str, &str), Real),
    headers: &[(&str, &str)],
    architecture: &str,
    head_dim: usize,
) -> Compiled {
    let options = [
        format!("--gpu-architecture={architecture}"),
        format!("-DHEAD_DIM={head_dim}"),
    ];
    let mut options: Vec<&str> = options.iter().map(String::as_str).collect();
    if real == Real::Bf16 {
        options.push("-DREAL_BF16=1");
    }
    let file = nvrtc.path.file_name().unwrap_or_default().display();
    Compiled {
        at: format!(
            "{} by {file} for {architecture} with head size {head_dim}",
            source.0
        ),
        ptx: nvrtc.compile(source, headers, &options),
        real,
    }
}

/// What the kernels read.
pub struct Inputs {
    pub qkv: Vec<f32>,
    pub dattended: Vec<f32>,
}

impl Inputs {
    /// Random values in the precision, `qkv` in [−scale, scale).
    pub fn new(real: Real, shape: Shape, seed: u64, scale: f32) -> Self {
        let mut random = Random(seed);
        let [qkv_len, attended_len, _] = shape.lens();
        Self {
            qkv: real.rounded(random.floats(qkv_len, scale)),
            dattended: real.rounded(random.floats(attended_len, 0.1)),
        }
    }
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

/// Whether no query sees more than one key.
fn of_one_token(shape: Shape) -> bool {
    shape.sequences().iter().all(|&(_, len)| len <= 1)
}

/// Compares a run with the reference. In bf16 it may have 1.5 times the error of a reference that rounds where
/// the kernels round.
pub fn agrees(got: &Run, real: Real, shape: Shape, inputs: &Inputs) -> Result<(), Caught> {
    let (qkv, dattended) = (wide(&inputs.qkv), wide(&inputs.dattended));
    let reference = |round: fn(f64) -> f64| {
        let results = reference(shape, &qkv, &dattended, round);
        results.tensors(shape)
    };
    let expected = reference(|x| x);
    let rounded = match real {
        Real::F32 => expected.clone(),
        Real::Bf16 => reference(|x| bf16::from_f64(x).to_f64()),
    };
    // Sums in f32 add an error, which grows with the scores.
    let largest = qkv.iter().fold(3.0f64, |most, x| most.max(x.abs()));
    let in_f32 = 2e-6 * (largest / 3.0).powi(2);
    let all = got.results(real).tensors(shape);
    for ((name, got), ((_, expected), (_, rounded))) in
        all.iter().zip(expected.iter().zip(&rounded))
    {
        if of_one_token(shape) && (*name == "dq" || *name == "dk") {
            // With one key the gradients of the scores are differences of equal numbers.
            let zero = got.iter().all(|x| x.abs() < 1e-5);
            ensure!(Check::Value, zero, "{name} of {shape:?} is not 0");
            continue;
        }
        let allowed = 1.5 * distance(rounded, expected) + in_f32;
        let distance = distance(got, expected);
        ensure!(
            Check::Value,
            distance <= allowed,
            "{name} of {shape:?} differs by {distance:e}, not {allowed:e}"
        );
    }
    Ok(())
}

/// Runs the kernels at a shape in two orders of warps, which must give the same bits, and compares the results.
pub fn check(of: &Compiled, shape: Shape) -> Result<(), Caught> {
    check_with(of, shape, 3.0)
}

/// The same with queries, keys and values in [−scale, scale).
pub fn check_with(of: &Compiled, shape: Shape, scale: f32) -> Result<(), Caught> {
    let inputs = Inputs::new(of.real, shape, 0, scale);
    let got = run(of, shape, &inputs, 1)?;
    same_bits(&got, &run(of, shape, &inputs, 2)?)?;
    agrees(&got, of.real, shape, &inputs)
}

/// Two runs with other orders of warps gave the same bits.
pub fn same_bits(one: &Run, other: &Run) -> Result<(), Caught> {
    let same = one.bytes == other.bytes;
    ensure!(
        Check::Order,
        same,
        "the result depends on the order of warps"
    );
    Ok(())
}
