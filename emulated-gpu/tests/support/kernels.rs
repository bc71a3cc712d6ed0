//! What each of the engine's kernels must do: it runs them on inputs of many shapes and compares the results with
//! plain formulas in f64.

use emulated_gpu::launch::{Dim, Launch};
use emulated_gpu::ptx::{Counters, Limits};
use half::bf16;

use super::caught::{Caught, Check, ensure};
use super::nvrtc::Nvrtc;
use super::{Loaded, Memory, Random, bytes_of, f32s, load, of_f32, of_u32, u64s, x};

/// Name and text of a source of the engine.
macro_rules! source {
    ($file:literal) => {
        (
            $file,
            include_str!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../src/engine/cuda/kernels/",
                $file
            )),
        )
    };
}

pub(crate) use source;

pub const HEADERS: [(&str, &str); 6] = [
    source!("attention_bf16.cuh"),
    source!("block.cuh"),
    source!("random.cuh"),
    source!("real.cuh"),
    source!("sequences.cuh"),
    source!("wgmma.cuh"),
];

/// What `real` is in the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Real {
    F32,
    Bf16,
}

impl Real {
    pub fn size(self) -> usize {
        match self {
            Real::F32 => 4,
            Real::Bf16 => 2,
        }
    }

    /// The values rounded to the precision.
    pub fn rounded(self, mut values: Vec<f32>) -> Vec<f32> {
        if self == Real::Bf16 {
            for value in &mut values {
                *value = bf16::from_f32(*value).to_f32();
            }
        }
        values
    }

    /// The bytes of values, which are rounded.
    pub fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Real::F32 => of_f32(values),
            Real::Bf16 => bytes_of(values, |value| {
                bf16::from_f32(value).to_bits().to_le_bytes().to_vec()
            }),
        }
    }

    pub fn values(self, bytes: &[u8]) -> Vec<f32> {
        let pairs = bytes.chunks_exact(2);
        match self {
            Real::F32 => f32s(bytes),
            Real::Bf16 => pairs
                .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
                .collect(),
        }
    }

    /// Half a unit in the last place of a value, in bf16; 0 in f32, whose rounding the other bound includes.
    pub fn half_ulp(self, value: f64) -> f64 {
        match self {
            Real::F32 => 0.0,
            Real::Bf16 => value.abs().max(1e-30).log2().floor().exp2() / 256.0,
        }
    }
}

/// The PTX of a source.
pub struct Compiled {
    /// NVRTC, architecture and precision.
    pub at: String,
    pub ptx: String,
    pub real: Real,
}

/// Compiles a source for an architecture, and those that have it, for a head size.
pub fn compile(
    nvrtc: &Nvrtc,
    source: (&str, &str),
    headers: &[(&str, &str)],
    (architecture, head_dim): (&str, Option<usize>),
    real: Real,
) -> Compiled {
    let option = format!("--gpu-architecture={architecture}");
    let head_size = head_dim.map(|size| format!("-DHEAD_DIM={size}"));
    let mut options = vec![option.as_str()];
    options.extend(head_size.as_deref());
    if real == Real::Bf16 {
        options.push("-DREAL_BF16=1");
    }
    let file = nvrtc.path.file_name().unwrap_or_default().display();
    Compiled {
        at: format!("{file} for {architecture} in {real:?}"),
        ptx: nvrtc.compile(source, headers, &options),
        real,
    }
}

/// A parameter of a kernel.
pub enum P {
    /// An address or a size.
    Long(u64),
    Int(u32),
    Float(f32),
}

/// Lays the parameters out as the kernel's C declaration does.
fn parameters(list: &[P]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for parameter in list {
        match parameter {
            P::Long(value) => {
                bytes.resize(bytes.len().next_multiple_of(8), 0);
                bytes.extend(value.to_le_bytes());
            }
            P::Int(value) => bytes.extend(value.to_le_bytes()),
            P::Float(value) => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}

pub fn launch(
    module: &Loaded,
    kernel: &str,
    (grid, block): (Dim, Dim),
    list: &[P],
    memory: &mut Memory,
    seed: u64,
) -> Result<Counters, Caught> {
    let parameters = parameters(list);
    let launch = Launch {
        grid,
        block,
        dynamic_shared: 0,
        parameters: &parameters,
        seed,
    };
    Ok(module.run(kernel, &launch, &Limits::default(), memory)?)
}

/// An argument of a kernel.
#[derive(Clone)]
enum A {
    /// A buffer with these bytes, at a multiple of 256.
    Buffer(Vec<u8>),
    /// A buffer whose address is a multiple of 256 plus this number of bytes.
    Shifted(usize, Vec<u8>),
    /// A buffer of this number of bytes, which must not be read before they are written.
    Output(usize),
    Null,
    Long(u64),
    Int(u32),
    Float(f32),
}

/// A buffer of f32.
fn floats(values: &[f32]) -> A {
    A::Buffer(of_f32(values))
}

/// A buffer of f64.
fn doubles(values: &[f64]) -> A {
    A::Buffer(bytes_of(values, |value| value.to_le_bytes().to_vec()))
}

/// A buffer of u32.
fn integers(values: &[u32]) -> A {
    A::Buffer(of_u32(values))
}

/// What a launch left in its buffers, in the order of the arguments.
struct Outcome {
    buffers: Vec<Vec<u8>>,
    counters: Counters,
}

impl Outcome {
    fn f32s(&self, buffer: usize) -> Vec<f32> {
        f32s(&self.buffers[buffer])
    }

    fn f64s(&self, buffer: usize) -> Vec<f64> {
        let bits = u64s(&self.buffers[buffer]).into_iter();
        bits.map(f64::from_bits).collect()
    }
}

/// Runs a kernel in three orders of blocks and warps, which must have bitwise equal results, no bank conflicts
/// and no local memory.
fn run(
    of: &Compiled,
    kernel: &str,
    (grid, threads): (usize, u32),
    arguments: &[A],
) -> Result<Outcome, Caught> {
    let local = of.ptx.contains("__local_depot");
    ensure!(Check::Cost, !local, "{kernel} uses local memory");
    let mut first: Option<Outcome> = None;
    for seed in 1..4 {
        let mut memory = Memory::default();
        let module = load(&of.ptx, &mut memory);
        let mut buffers = Vec::new();
        let mut put = |shift: usize, bytes: &[u8]| {
            let mut shifted = vec![0xff; shift];
            shifted.extend(bytes);
            let address = memory.put(&shifted);
            buffers.push((address, shift));
            P::Long(address + shift as u64)
        };
        let mut outputs = Vec::new();
        let list: Vec<P> = arguments
            .iter()
            .map(|argument| match argument {
                A::Buffer(bytes) => put(0, bytes),
                A::Shifted(shift, bytes) => put(*shift, bytes),
                A::Output(bytes) => {
                    let address = put(0, &vec![0xff; *bytes]);
                    outputs.extend(match address {
                        P::Long(address) => Some(address),
                        _ => None,
                    });
                    address
                }
                A::Null => P::Long(0),
                A::Long(value) => P::Long(*value),
                A::Int(value) => P::Int(*value),
                A::Float(value) => P::Float(*value),
            })
            .collect();
        for address in outputs {
            memory.forget(address);
        }
        let geometry = (x(grid as u32), x(threads));
        let counters = launch(&module, kernel, geometry, &list, &mut memory, seed)?;
        let mut outcome = Outcome {
            buffers: Vec::new(),
            counters,
        };
        for (address, shift) in buffers {
            let (before, bytes) = memory.get(address).split_at(shift);
            let kept = before.iter().all(|&byte| byte == 0xff);
            ensure!(Check::OutOfBounds, kept, "{kernel} writes before a buffer");
            outcome.buffers.push(bytes.to_vec());
        }
        let conflicts = counters.bank_conflicts;
        ensure!(
            Check::Cost,
            conflicts == 0,
            "{kernel} has {conflicts} bank conflicts"
        );
        let same = first
            .as_ref()
            .is_none_or(|first| first.buffers == outcome.buffers);
        ensure!(Check::Order, same, "{kernel} depends on the order of warps");
        first = Some(outcome);
    }
    Ok(first.expect("a seed has run"))
}

/// Each request to global memory touches as few sectors as its bytes need.
fn coalesced(outcome: &Outcome) -> Result<(), Caught> {
    let Counters {
        global_sectors: sectors,
        global_sectors_ideal: ideal,
        ..
    } = outcome.counters;
    ensure!(
        Check::Cost,
        sectors <= ideal,
        "{sectors} sectors, not {ideal}"
    );
    Ok(())
}

fn root_mean_square(values: &[f64]) -> f64 {
    let squares: f64 = values.iter().map(|x| x * x).sum();
    (squares / values.len() as f64).sqrt()
}

/// Every element is within `bound` of the expected one, relative to that or to the root mean square of all,
/// whichever is larger.
pub fn agree_within(bound: f64, what: &str, got: &[f32], expected: &[f64]) -> Result<(), Caught> {
    let (len, needed) = (got.len(), expected.len());
    ensure!(
        Check::Value,
        len == needed,
        "{what} has {len} elements, not {needed}"
    );
    let typical = root_mean_square(expected);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let allowed = bound * expected.abs().max(typical);
        let difference = (f64::from(got) - expected).abs();
        ensure!(
            Check::Value,
            difference <= allowed,
            "{what}[{i}] is {got}, not {expected}"
        );
    }
    Ok(())
}

/// Every element is the expected one.
fn same<T: PartialEq>(what: &str, got: &[T], expected: &[T]) -> Result<(), Caught> {
    let same = got == expected;
    ensure!(Check::Value, same, "{what} differs from the definition");
    Ok(())
}

/// The kernel moves no other bytes than it must.
fn moves(what: &str, moved: u64, needed: u64) -> Result<(), Caught> {
    let all = moved == needed;
    ensure!(Check::Cost, all, "{what}: {moved} bytes, not {needed}");
    Ok(())
}

fn agree(what: &str, got: &[f32], expected: &[f64]) -> Result<(), Caught> {
    agree_within(1e-6, what, got, expected)
}

/// The same for a tensor of `real`: bf16 may differ by half a unit in the last place in addition.
fn agree_real(of: &Compiled, what: &str, got: &[u8], expected: &[f64]) -> Result<(), Caught> {
    let got = of.real.values(got);
    let (len, needed) = (got.len(), expected.len());
    ensure!(
        Check::Value,
        len == needed,
        "{what} has {len} elements, not {needed}"
    );
    let typical = root_mean_square(expected);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let allowed = of.real.half_ulp(expected) + 1e-6 * expected.abs().max(typical);
        let difference = (f64::from(got) - expected).abs();
        ensure!(
            Check::Value,
            difference <= allowed,
            "{what}[{i}] is {got}, not {expected}"
        );
    }
    Ok(())
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// SplitMix64's output number `element` after `key`.
fn random_bits(key: u64, element: u64) -> u64 {
    let mut state = u128::from(key) + u128::from(element + 1) * 0x9e37_79b9_7f4a_7c15;
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
        state &= u128::from(u64::MAX);
        state = (state ^ (state >> shift)) * factor;
    }
    state &= u128::from(u64::MAX);
    (state ^ (state >> 31)) as u64
}

/// The upper 24 bits of this number, scaled to −1 ≤ u < 1.
fn uniform(key: u64, element: u64) -> f64 {
    (random_bits(key, element) >> 40) as f64 / 8_388_608.0 - 1.0
}

/// The lower and the upper half of a key.
fn halves(key: u64) -> [u32; 2] {
    [key as u32, (key >> 32) as u32]
}

/// Rows are copied and scaled, with and without noise, at positions of rows and of packed rows; occurrences are added in their
/// order, and scaled.
pub fn embedding(of: &Compiled) -> Result<(), Caught> {
    let tokens = [3u32, 5, 3, 0, 5, 3, 3, 6, 3, 3, 3, 5];
    for (hidden, shift, scale) in [
        (1, 0, 1.0),
        (83, 0, 9.11f32),
        (64, 0, 8.0),
        (64, 4, 1.0),
        (1032, 0, 1.5),
    ] {
        let vocabulary = 7;
        // Three rows of tokens, fewer than the positions that have an embedding.
        let (seq_len, positions) = (4usize, 5usize);
        let mut random = Random(1);
        let table = random.floats(vocabulary * hidden, 1.0);
        let dx = random.floats(tokens.len() * hidden, 1.0);
        let of_positions = random.floats(positions * hidden, 1.0);
        let noise = [(7u64, 0.25f32), (u64::MAX - 5, 1.5), (1 << 40, 0.0)];
        let words: Vec<u32> = noise
            .iter()
            .flat_map(|(key, most)| {
                let [low, high] = halves(*key);
                [low, high, most.to_bits()]
            })
            .collect();
        let places = [0u32, 1, 2, 0, 1, 0, 0, 1, 2, 3, 0, 1];
        let all = [
            (false, false, false),
            (true, false, false),
            (true, true, false),
            (true, false, true),
        ];
        for (with_positions, with_noise, packed) in all {
            let place = |row: usize| match packed {
                true => places[row] as usize,
                false => row % seq_len,
            };
            let arguments = [
                A::Output(4 * dx.len()),
                A::Shifted(shift, of_f32(&table)),
                match with_positions {
                    true => floats(&of_positions),
                    false => A::Null,
                },
                integers(&tokens),
                A::Int(hidden as u32),
                A::Int(seq_len as u32),
                A::Float(scale),
                match with_noise {
                    true => integers(&words),
                    false => A::Null,
                },
                match packed {
                    true => integers(&places),
                    false => A::Null,
                },
            ];
            let got = run(of, "embedding_forward", (tokens.len(), 256), &arguments)?;
            let expected: Vec<f32> = (0..dx.len())
                .map(|i| {
                    let (row, column) = (i / hidden, i % hidden);
                    let of_token = table[tokens[row] as usize * hidden + column];
                    match with_positions {
                        // NVRTC makes one rounding of the product and the sum.
                        true => of_token.mul_add(scale, of_positions[place(row) * hidden + column]),
                        false => of_token * scale,
                    }
                })
                .collect();
            if !with_noise {
                same("x", &got.f32s(0), &expected)?;
            }
            for (i, (got, of_table)) in got.f32s(0).iter().zip(&expected).enumerate() {
                let element = i % (seq_len * hidden);
                let (key, most) = noise[i / (seq_len * hidden)];
                let noise = uniform(key, element as u64) * f64::from(most);
                let expected = f64::from(*of_table) + if with_noise { noise } else { 0.0 };
                ensure!(
                    Check::Value,
                    (f64::from(*got) - expected).abs() <= 1e-5,
                    "x {i}: {got}, not {expected}"
                );
            }
            if (hidden, shift) == (64, 0) {
                coalesced(&got)?;
            }
        }

        let arguments = [
            A::Shifted(shift, of_f32(&of_positions)),
            floats(&dx),
            A::Int((tokens.len() / seq_len) as u32),
            A::Int(seq_len as u32),
            A::Int(hidden as u32),
        ];
        let got = run(of, "positions_backward", (seq_len, 256), &arguments)?;
        let mut expected = of_positions.clone();
        for (row, dx) in dx.chunks(hidden).enumerate() {
            let sums = &mut expected[row % seq_len * hidden..][..hidden];
            for (sum, dx) in sums.iter_mut().zip(dx) {
                *sum += dx;
            }
        }
        same("positions", &got.f32s(0), &expected)?;

        occurrences(of, &tokens, (hidden, shift), scale)?;
    }
    let often: Vec<u32> = tokens.into_iter().chain([3; 300]).collect();
    occurrences(of, &often, (8, 0), 1.5)
}

/// The rows of the gradient are added to those of their tokens, in their order.
fn occurrences(
    of: &Compiled,
    tokens: &[u32],
    (hidden, shift): (usize, usize),
    scale: f32,
) -> Result<(), Caught> {
    let mut random = Random(2);
    let table = random.floats(7 * hidden, 1.0);
    let dx = random.floats(tokens.len() * hidden, 1.0);
    // Four distinct tokens; the kernel must not read the rest of the lists.
    let (mut order, mut starts, mut rows) = (vec![], vec![0], vec![]);
    for token in [5u32, 0, 3, 6] {
        let found = (0..tokens.len() as u32).filter(|&i| tokens[i as usize] == token);
        order.extend(found);
        starts.push(order.len() as u32);
        rows.push(token);
    }
    starts.resize(tokens.len() + 1, u32::MAX);
    rows.resize(tokens.len(), u32::MAX);
    let arguments = [
        A::Shifted(shift, of_f32(&table)),
        floats(&dx),
        integers(&order),
        integers(&starts),
        integers(&rows),
        integers(&[4]),
        A::Int(hidden as u32),
        A::Float(scale),
    ];
    let got = run(of, "embedding_backward", (tokens.len(), 256), &arguments)?;
    let mut sums = vec![0f32; table.len()];
    for (i, &token) in tokens.iter().enumerate() {
        for column in 0..hidden {
            sums[token as usize * hidden + column] += dx[i * hidden + column];
        }
    }
    // NVRTC makes one rounding of the product and the sum.
    let pairs = table.iter().zip(sums);
    let expected: Vec<f32> = pairs.map(|(a, b)| b.mul_add(scale, *a)).collect();
    same("table", &got.f32s(0), &expected)
}

/// The bias is added to each row, and its gradient is the sum of the rows of each block.
pub fn bias(of: &Compiled) -> Result<(), Caught> {
    // Single elements, packs, misaligned packs, more elements than threads.
    for (width, shift) in [(1, 0), (83, 0), (96, 0), (96, 8), (1040, 0)] {
        let (n, rows) = (5usize, 2usize);
        let mut random = Random(3);
        let y = of.real.rounded(random.floats(n * width, 1.0));
        let b = random.floats(width, 1.5);
        let at = |values: &[f32], i: usize| f64::from(values[i]);
        let arguments = [
            A::Shifted(shift, of.real.bytes(&y)),
            floats(&b),
            A::Int(width as u32),
        ];
        let got = run(of, "add_bias", (n, 256), &arguments)?;
        let sums = (0..n * width).map(|i| at(&y, i) + at(&b, i % width));
        let sums: Vec<f64> = sums.collect();
        agree_real(of, &format!("y of width {width}"), &got.buffers[0], &sums)?;
        let arguments = [
            A::Shifted(shift, of_f32(&y)),
            floats(&b),
            A::Int(width as u32),
        ];
        let to_sum = run(of, "add_bias_to_sum", (n, 256), &arguments)?;
        agree(&format!("sum of width {width}"), &to_sum.f32s(0), &sums)?;
        if width == 1040 {
            coalesced(&got)?;
        }

        let blocks = n.div_ceil(rows);
        let arguments = [
            A::Output(4 * blocks * width),
            A::Shifted(shift, of.real.bytes(&y)),
            A::Int(n as u32),
            A::Int(width as u32),
            A::Int(rows as u32),
        ];
        let got = run(of, "row_sums", (blocks, 256), &arguments)?;
        let sum = |i: usize| {
            let (block, column) = (i / width, i % width);
            let of_block = block * rows..n.min((block + 1) * rows);
            of_block.map(|row| at(&y, row * width + column)).sum()
        };
        let sums: Vec<f64> = (0..blocks * width).map(sum).collect();
        agree(&format!("sums of width {width}"), &got.f32s(0), &sums)?;
    }
    Ok(())
}

/// Output and gradients of the norms of heads of this size agree, and the heads of values do not change.
pub fn head_norms(of: &Compiled, head_dim: usize) -> Result<(), Caught> {
    // More heads than warps, and fewer.
    for (heads, kv_heads) in [(3, 1), (9, 3)] {
        let (n, rows, eps) = (5usize, 2usize, 1e-5f32);
        let (normed, width) = (heads + kv_heads, (heads + 2 * kv_heads) * head_dim);
        let mut random = Random(4);
        let x = of.real.rounded(random.floats(n * width, 2.0));
        let dy = of.real.rounded(random.floats(n * width, 0.1));
        let w = random.floats(2 * head_dim, 1.5);
        let at = |values: &[f32], i: usize| f64::from(values[i]);
        let weight = |i: usize| {
            let of_keys = usize::from(i % width / head_dim >= heads);
            at(&w, of_keys * head_dim + i % head_dim)
        };
        let of_head = |i: usize| i / head_dim * head_dim..(i / head_dim + 1) * head_dim;
        let inverse = |i: usize| {
            let squares: f64 = of_head(i).map(|i| at(&x, i).powi(2)).sum();
            1.0 / (squares / head_dim as f64 + f64::from(eps)).sqrt()
        };
        let is_normed = |i: usize| i % width < normed * head_dim;
        let every = || 0..n * width;
        let y = every().map(|i| match is_normed(i) {
            true => at(&x, i) * inverse(i) * weight(i),
            false => at(&x, i),
        });
        let kept: Vec<f32> = every().filter(|&i| is_normed(i)).map(|i| x[i]).collect();
        let what = |name: &str| format!("{name} of {heads} heads of {head_dim}");
        let arguments = [
            A::Buffer(of.real.bytes(&x)),
            A::Output(of.real.size() * kept.len()),
            floats(&w),
            A::Int(heads as u32),
            A::Int(kv_heads as u32),
            A::Float(eps),
        ];
        let forward = run(of, "head_norms_forward", (n, 256), &arguments)?;
        agree_real(of, &what("y"), &forward.buffers[0], &y.collect::<Vec<_>>())?;
        same(&what("x"), &of.real.values(&forward.buffers[1]), &kept)?;

        let dx = every().map(|i| {
            if !is_normed(i) {
                return at(&dy, i);
            }
            let terms = of_head(i).map(|i| at(&dy, i) * weight(i) * at(&x, i));
            let along = terms.sum::<f64>() * inverse(i).powi(3) / head_dim as f64;
            at(&dy, i) * weight(i) * inverse(i) - at(&x, i) * along
        });
        let blocks = n.div_ceil(rows);
        let partial = |i: usize| {
            let (block, column) = (i / (2 * head_dim), i % (2 * head_dim));
            let heads = match column < head_dim {
                true => 0..heads,
                false => heads..normed,
            };
            let of_block = block * rows..n.min((block + 1) * rows);
            let cells = of_block.flat_map(|row| heads.clone().map(move |head| (row, head)));
            let elements =
                cells.map(|(row, head)| row * width + head * head_dim + column % head_dim);
            elements.map(|i| at(&dy, i) * at(&x, i) * inverse(i)).sum()
        };
        let partials: Vec<f64> = (0..blocks * 2 * head_dim).map(partial).collect();
        let arguments = [
            A::Buffer(of.real.bytes(&dy)),
            A::Output(4 * partials.len()),
            A::Buffer(of.real.bytes(&kept)),
            floats(&w),
            A::Int(n as u32),
            A::Int(heads as u32),
            A::Int(kv_heads as u32),
            A::Int(rows as u32),
            A::Float(eps),
        ];
        let backward = run(of, "head_norms_backward", (blocks, 256), &arguments)?;
        let dx: Vec<f64> = dx.collect();
        agree_real(of, &what("dx"), &backward.buffers[0], &dx)?;
        agree_within(2e-6, &what("partial"), &backward.f32s(1), &partials)?;
    }
    Ok(())
}

/// The cache holds the keys and values of the latest tokens behind those of the past ones, and attention over them agrees.
pub fn cached_attention(of: &Compiled, head_dim: usize) -> Result<(), Caught> {
    // Fewer keys than warps, a window within the past and one across it, grouped queries.
    for (past, n, heads, kv_heads, window) in [
        (0usize, 1usize, 2usize, 2usize, None),
        (0, 5, 4, 2, None),
        (13, 3, 3, 1, None),
        (13, 3, 2, 1, Some(7usize)),
        (2, 6, 2, 2, Some(3)),
    ] {
        let (row, width) = ((heads + 2 * kv_heads) * head_dim, 2 * kv_heads * head_dim);
        let mut random = Random(9);
        let qkv = of.real.rounded(random.floats(n * row, 1.0));
        let before = of.real.rounded(random.floats(past * width, 1.0));
        let mut filled = before.clone();
        for of_token in qkv.chunks_exact(row) {
            filled.extend(&of_token[heads * head_dim..]);
        }
        let mut cache = of.real.bytes(&before);
        cache.resize(of.real.size() * filled.len(), 0xff);
        let shape = || [heads, kv_heads, past].map(|size| A::Int(size as u32));
        let mut arguments = vec![A::Buffer(cache), A::Buffer(of.real.bytes(&qkv))];
        arguments.extend(shape());
        let fill = run(of, "fill_cache", (n, 256), &arguments)?;
        same("the cache", &of.real.values(&fill.buffers[0]), &filled)?;

        let at = |values: &[f32], i: usize| f64::from(values[i]);
        let expected = |i: usize| {
            let (token, head, column) = (i / head_dim / heads, i / head_dim % heads, i % head_dim);
            let (own, key_head) = (past + token, head / (heads / kv_heads));
            let first = window.map_or(0, |window| (own + 1).saturating_sub(window));
            let score = |key: usize| {
                let terms = (0..head_dim).map(|d| {
                    at(&qkv, token * row + head * head_dim + d)
                        * at(&filled, key * width + key_head * head_dim + d)
                });
                terms.sum::<f64>() / (head_dim as f64).sqrt()
            };
            let p: Vec<f64> = (first..=own).map(|key| score(key).exp()).collect();
            let value = |key| {
                at(
                    &filled,
                    key * width + (kv_heads + key_head) * head_dim + column,
                )
            };
            let sum: f64 = (first..=own).zip(&p).map(|(key, p)| p * value(key)).sum();
            sum / p.iter().sum::<f64>()
        };
        let expected: Vec<f64> = (0..n * heads * head_dim).map(expected).collect();
        let mut arguments = vec![
            A::Output(of.real.size() * expected.len()),
            A::Buffer(of.real.bytes(&qkv)),
            A::Buffer(of.real.bytes(&filled)),
        ];
        arguments.extend(shape());
        arguments.push(A::Int(
            window.map_or(i32::MAX as u32, |window| window as u32),
        ));
        let attended = run(of, "cached_attention", (n * heads, 128), &arguments)?;
        let what = format!("attention of {n} tokens after {past}, {heads} heads of {head_dim}");
        agree_real(of, &what, &attended.buffers[0], &expected)?;
    }
    Ok(())
}

/// Output, inverse and gradients of the norm agree.
pub fn rmsnorm(of: &Compiled) -> Result<(), Caught> {
    // Single elements, one pack and two packs of a thread, more than the registers take, misaligned.
    for (width, shift, threads) in [
        (1, 0, 256),
        (83, 0, 256),
        (260, 0, 256),
        (260, 8, 256),
        (1028, 0, 256),
        (2048, 0, 256),
        (2052, 0, 256),
        (2052, 0, 512),
        (4100, 0, 1024),
    ] {
        rmsnorm_of(of, width, shift, threads, 0.0)?;
    }
    // Plain elements, and packs in registers.
    for width in [83, 260] {
        rmsnorm_of(of, width, 0, 256, 1.0)?;
    }
    Ok(())
}

fn rmsnorm_of(
    of: &Compiled,
    width: usize,
    shift: usize,
    threads: u32,
    added: f32,
) -> Result<(), Caught> {
    let (n, rows, eps) = (5usize, 2usize, 1e-5f32);
    let mut random = Random(2);
    let (host_x, weights) = (random.floats(n * width, 2.0), random.floats(width, 1.5));
    let w: Vec<f32> = weights.iter().map(|w| added + w).collect();
    let dy = of.real.rounded(random.floats(n * width, 0.1));
    let dx = random.floats(n * width, 0.1);
    let at = |values: &[f32], i: usize| f64::from(values[i]);
    let row = |r: usize| (r * width)..(r + 1) * width;
    let inverse: Vec<f64> = (0..n)
        .map(|r| {
            let squares: f64 = row(r).map(|i| at(&host_x, i).powi(2)).sum();
            1.0 / (squares / width as f64 + f64::from(eps)).sqrt()
        })
        .collect();
    let y: Vec<f64> = (0..n * width)
        .map(|i| at(&host_x, i) * inverse[i / width] * at(&w, i % width))
        .collect();
    let what = |name: &str| format!("{name} of width {width}");

    let arguments = [
        A::Output(of.real.size() * n * width),
        A::Output(4 * n),
        A::Shifted(shift, of_f32(&host_x)),
        floats(&weights),
        A::Int(width as u32),
        A::Float(eps),
        A::Float(added),
    ];
    let forward = run(of, "rmsnorm_forward", (n, 256), &arguments)?;
    agree_real(of, &what("y"), &forward.buffers[0], &y)?;
    agree(&what("inverse"), &forward.f32s(1), &inverse)?;

    let gradient = |i: usize| {
        let r = i / width;
        let terms = row(r).map(|i| at(&dy, i) * at(&w, i % width) * at(&host_x, i));
        let along = terms.sum::<f64>() * inverse[r].powi(3) / width as f64;
        at(&dx, i) + at(&dy, i) * at(&w, i % width) * inverse[r] - at(&host_x, i) * along
    };
    let expected_dx: Vec<f64> = (0..n * width).map(gradient).collect();
    let blocks = n.div_ceil(rows);
    let expected_partial: Vec<f64> = (0..blocks * width)
        .map(|i| {
            let (block, column) = (i / width, i % width);
            let of_block = block * rows..n.min((block + 1) * rows);
            let elements = of_block.map(|r| r * width + column);
            elements
                .map(|i| at(&dy, i) * at(&host_x, i) * inverse[i / width])
                .sum()
        })
        .collect();
    for with_copy in [false, true] {
        let copy = if with_copy {
            A::Output(of.real.size() * n * width)
        } else {
            A::Null
        };
        let arguments = [
            floats(&dx),
            copy,
            A::Output(4 * blocks * width),
            A::Shifted(shift, of.real.bytes(&dy)),
            floats(&host_x),
            A::Buffer(forward.buffers[1].clone()),
            floats(&weights),
            A::Int(n as u32),
            A::Int(width as u32),
            A::Int(rows as u32),
            A::Float(added),
        ];
        let backward = run(of, "rmsnorm_backward", (blocks, threads), &arguments)?;
        let mut buffers = backward.buffers.iter();
        let mut next = || buffers.next().expect("the kernel has this buffer");
        agree_within(2e-6, &what("dx"), &f32s(next()), &expected_dx)?;
        if with_copy {
            agree_real(of, &what("dx_real"), next(), &expected_dx)?;
        }
        agree(&what("partial"), &f32s(next()), &expected_partial)?;
        agree_real(of, &what("y again"), next(), &y)?;
        if shift == 0 && y.len() == 5 * 2048 {
            coalesced(&backward)?;
            // Each row's dx, x, dy and twice w, and its inverse once for each thread.
            let read = (4 + 4 + 2 * 4 + of.real.size()) * y.len() + 5 * 256 * 4;
            moves("read", backward.counters.global_bytes_read, read as u64)?;
        }
    }
    Ok(())
}

/// Output, statistics and gradients of a LayerNorm agree.
pub fn layernorm(of: &Compiled) -> Result<(), Caught> {
    // Single elements, packs, misaligned packs, more elements than threads.
    for (width, shift, threads) in [
        (2usize, 0, 256),
        (83, 0, 256),
        (260, 0, 256),
        (260, 8, 256),
        (1028, 0, 512),
    ] {
        let (n, rows, eps) = (5usize, 2usize, 1e-5f32);
        let mut random = Random(12);
        // The mean is not small beside the deviation.
        let x: Vec<f32> = random
            .floats(n * width, 2.0)
            .iter()
            .map(|x| x + 1.5)
            .collect();
        let weights = random.floats(2 * width, 1.5);
        let (w, b) = weights.split_at(width);
        let dy = of.real.rounded(random.floats(n * width, 0.1));
        let dx = random.floats(n * width, 0.1);
        let at = |values: &[f32], i: usize| f64::from(values[i]);
        let row = |r: usize| (r * width)..(r + 1) * width;
        let mean_of =
            |r: usize, of: &dyn Fn(usize) -> f64| row(r).map(of).sum::<f64>() / width as f64;
        let mean: Vec<f64> = (0..n).map(|r| mean_of(r, &|i| at(&x, i))).collect();
        let inverse: Vec<f64> = (0..n)
            .map(|r| mean_of(r, &|i| (at(&x, i) - mean[r]).powi(2)) + f64::from(eps))
            .map(|variance| 1.0 / variance.sqrt())
            .collect();
        let normed = |i: usize| (at(&x, i) - mean[i / width]) * inverse[i / width];
        let y: Vec<f64> = (0..n * width)
            .map(|i| normed(i) * at(w, i % width) + at(b, i % width))
            .collect();
        let what = |name: &str| format!("{name} of width {width}");
        let arguments = [
            A::Output(of.real.size() * n * width),
            A::Output(8 * n),
            A::Shifted(shift, of_f32(&x)),
            floats(&weights),
            A::Int(width as u32),
            A::Float(eps),
        ];
        let forward = run(of, "layernorm_forward", (n, 256), &arguments)?;
        agree_real(of, &what("y"), &forward.buffers[0], &y)?;
        let kept: Vec<f64> = (0..n).flat_map(|r| [inverse[r], mean[r]]).collect();
        agree(&what("statistics"), &forward.f32s(1), &kept)?;

        let along = |i: usize| at(&dy, i) * at(w, i % width);
        let expected_dx: Vec<f64> = (0..n * width)
            .map(|i| {
                let r = i / width;
                let (shift, product) = (mean_of(r, &along), mean_of(r, &|i| along(i) * normed(i)));
                at(&dx, i) + inverse[r] * (along(i) - shift - normed(i) * product)
            })
            .collect();
        let blocks = n.div_ceil(rows);
        let of_block = |block: usize, of: &dyn Fn(usize) -> f64| -> Vec<f64> {
            let rows = block * rows..n.min((block + 1) * rows);
            let column = |column| rows.clone().map(|r| of(r * width + column)).sum();
            (0..width).map(column).collect()
        };
        let expected_partial: Vec<f64> = (0..blocks)
            .flat_map(|block| {
                let of_w = of_block(block, &|i| at(&dy, i) * normed(i));
                [of_w, of_block(block, &|i| at(&dy, i))].concat()
            })
            .collect();
        for with_copy in [false, true] {
            let arguments = [
                floats(&dx),
                match with_copy {
                    true => A::Output(of.real.size() * n * width),
                    false => A::Null,
                },
                A::Output(8 * blocks * width),
                A::Shifted(shift, of.real.bytes(&dy)),
                floats(&x),
                A::Buffer(forward.buffers[1].clone()),
                floats(&weights),
                A::Int(n as u32),
                A::Int(width as u32),
                A::Int(rows as u32),
            ];
            let backward = run(of, "layernorm_backward", (blocks, threads), &arguments)?;
            let mut buffers = backward.buffers.iter();
            let mut next = || buffers.next().expect("the kernel has this buffer");
            agree_within(4e-6, &what("dx"), &f32s(next()), &expected_dx)?;
            if with_copy {
                agree_real(of, &what("dx_real"), next(), &expected_dx)?;
            }
            agree_within(4e-6, &what("partial"), &f32s(next()), &expected_partial)?;
            agree_real(of, &what("y again"), next(), &y)?;
        }
    }
    Ok(())
}

pub fn column_sums(of: &Compiled) -> Result<(), Caught> {
    for (blocks, width) in [(1, 1), (3, 83), (8, 64), (61, 128), (528, 40)] {
        let mut random = Random(3);
        let (sums, partial) = (
            random.floats(width, 1.0),
            random.floats(blocks * width, 1.0),
        );
        let arguments = [
            floats(&sums),
            floats(&partial),
            A::Int(blocks as u32),
            A::Int(width as u32),
        ];
        let got = run(of, "column_sums", (width.div_ceil(32), 1024), &arguments)?;
        let column = |i: usize| {
            let column = partial.iter().skip(i).step_by(width);
            f64::from(sums[i]) + column.map(|&x| f64::from(x)).sum::<f64>()
        };
        let expected: Vec<f64> = (0..width).map(column).collect();
        agree("sums", &got.f32s(0), &expected)?;
        if width == 128 {
            coalesced(&got)?;
        }
    }
    Ok(())
}

pub fn rope(of: &Compiled) -> Result<(), Caught> {
    // Some heads of a row rotate, the rest of the row does not; and of some heads only the first elements.
    for (head_dim, rotary_dim, heads, row) in [
        (10, 10, 3, 37),
        (10, 4, 3, 37),
        (2, 2, 1, 2),
        (32, 32, 5, 192),
        // Packs of a head, but not of a row.
        (32, 32, 5, 165),
        // Packs of what rotates, but not of a head.
        (36, 32, 4, 160),
        (80, 32, 2, 160),
        (64, 64, 9, 640),
        (128, 128, 2, 256),
    ] {
        let (n, seq_len, half) = (8usize, 4usize, rotary_dim / 2);
        let mut table = vec![0f32; seq_len * rotary_dim];
        for position in 0..seq_len {
            for i in 0..half {
                let angle = position as f64 * 10000f64.powf(-(i as f64) / half as f64);
                table[position * rotary_dim + i] = angle.cos() as f32;
                table[position * rotary_dim + half + i] = angle.sin() as f32;
            }
        }
        let host_x = of.real.rounded(Random(6).floats(n * row, 1.0));
        let packed = [0u32, 1, 0, 0, 1, 2, 3, 0];
        for (direction, packed) in [(1.0, None), (-1.0, None), (1.0, Some(packed))] {
            let mut expected = wide(&host_x);
            for r in 0..n {
                for i in 0..heads * half {
                    let (pair, at) = (i % half, r * row + i / half * head_dim + i % half);
                    let position = packed.map_or(r % seq_len, |packed| packed[r] as usize);
                    let of_row = &table[position * rotary_dim..];
                    let cosine = f64::from(of_row[pair]);
                    let sine = f64::from(direction * of_row[half + pair]);
                    let (a, b) = (expected[at], expected[at + half]);
                    expected[at] = a * cosine - b * sine;
                    expected[at + half] = b * cosine + a * sine;
                }
            }
            for shift in [0, 4] {
                let arguments = [
                    A::Shifted(shift, of.real.bytes(&host_x)),
                    A::Int(row as u32),
                    A::Int(heads as u32),
                    floats(&table),
                    A::Int(seq_len as u32),
                    A::Int(head_dim as u32),
                    A::Int(rotary_dim as u32),
                    A::Float(direction),
                    match packed {
                        Some(packed) => integers(&packed),
                        None => A::Null,
                    },
                ];
                let got = run(of, "rope", (n, 256), &arguments)?;
                agree_real(
                    of,
                    &format!("{rotary_dim} of heads of {head_dim}"),
                    &got.buffers[0],
                    &expected,
                )?;
            }
        }
    }
    Ok(())
}

/// Output and gradients agree, of every activation, with and without gates.
pub fn mlp(of: &Compiled) -> Result<(), Caught> {
    let silu = |x: f64| {
        let sigmoid = 1.0 / (1.0 + (-x).exp());
        (x * sigmoid, sigmoid + x * sigmoid * (1.0 - sigmoid))
    };
    let gelu_tanh = |x: f64| {
        let factor = (2.0 / std::f64::consts::PI).sqrt();
        let tanh = (factor * (x + 0.044715 * x.powi(3))).tanh();
        let slope = factor * (1.0 + 3.0 * 0.044715 * x * x);
        let derivative = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope;
        (0.5 * x * (1.0 + tanh), derivative)
    };
    let gelu = |x: f64| {
        let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
        let below = normal(x);
        (x * below, below + x * density)
    };
    gated(of, ["gated_silu_forward", "gated_silu_backward"], silu)?;
    gated(
        of,
        ["gated_gelu_tanh_forward", "gated_gelu_tanh_backward"],
        gelu_tanh,
    )?;
    gated(of, ["gated_gelu_forward", "gated_gelu_backward"], gelu)?;
    plain(of, ["plain_silu_forward", "plain_silu_backward"], silu)?;
    plain(
        of,
        ["plain_gelu_tanh_forward", "plain_gelu_tanh_backward"],
        gelu_tanh,
    )?;
    plain(of, ["plain_gelu_forward", "plain_gelu_backward"], gelu)
}

/// The normal distribution, by its Taylor series around 0. Beyond ±8 it is 0 or 1 within 1e-15.
fn normal(x: f64) -> f64 {
    if x.abs() > 8.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    // Φ(x) = ½ + φ(x) · (x + x³/3 + x⁵/(3·5) + …)
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    let (mut term, mut sum) = (x, x);
    for odd in (3..300).step_by(2) {
        term *= x * x / f64::from(odd);
        sum += term;
    }
    0.5 + density * sum
}

/// The same as [`gated`] of an MLP without gates.
fn plain(
    of: &Compiled,
    [forward, backward]: [&str; 2],
    activation: impl Fn(f64) -> (f64, f64),
) -> Result<(), Caught> {
    // The last ones are beyond what exponentials of f32 can hold.
    for (elements, shift, grid, most) in [
        (315usize, 0, 2, 6.0),
        (1, 0, 1, 6.0),
        (576, 0, 1, 6.0),
        (320, 4, 1, 6.0),
        (320, 0, 1, 120.0),
    ] {
        let mut random = Random(8);
        let up = of.real.rounded(random.floats(elements, most));
        let dh = of.real.rounded(random.floats(elements, 0.1));
        let (mut h, mut gradient) = (Vec::new(), Vec::new());
        for (up, dh) in up.iter().zip(&dh) {
            let (value, derivative) = activation(f64::from(*up));
            h.push(value);
            gradient.push(f64::from(*dh) * derivative);
        }
        let arguments = |first: A| {
            [
                first,
                A::Shifted(shift, of.real.bytes(&up)),
                A::Long(elements as u64),
                A::Int(elements as u32),
            ]
        };
        let first = A::Output(of.real.size() * elements);
        let forward = run(of, forward, (grid, 256), &arguments(first))?;
        agree_real(of, "h", &forward.buffers[0], &h)?;
        let first = A::Buffer(of.real.bytes(&dh));
        let backward = run(of, backward, (grid, 256), &arguments(first))?;
        agree_real(of, "h again", &backward.buffers[0], &h)?;
        agree_real(of, "gradient", &backward.buffers[1], &gradient)?;
        if elements == 576 {
            coalesced(&forward)?;
            coalesced(&backward)?;
        }
    }
    Ok(())
}

/// `activation`: value and derivative.
fn gated(
    of: &Compiled,
    [forward, backward]: [&str; 2],
    activation: impl Fn(f64) -> (f64, f64),
) -> Result<(), Caught> {
    // The grid may be smaller than the elements need. The last ones are beyond what exponentials of f32 can hold.
    for (n, inner, shift, grid, most) in [
        (7, 45, 0, 2, 6.0),
        (1, 1, 0, 1, 6.0),
        (9, 64, 0, 1, 6.0),
        (9, 264, 0, 2, 6.0),
        (5, 64, 4, 1, 6.0),
        (9, 64, 0, 1, 120.0),
    ] {
        let elements = n * inner;
        let mut random = Random(7);
        let gate_up = of.real.rounded(random.floats(2 * elements, most));
        let dh = of.real.rounded(random.floats(elements, 0.1));
        let gate = |i: usize| f64::from(gate_up[i / inner * 2 * inner + i % inner]);
        let up = |i: usize| f64::from(gate_up[i / inner * 2 * inner + i % inner + inner]);
        let h: Vec<f64> = (0..elements)
            .map(|i| activation(gate(i)).0 * up(i))
            .collect();
        let mut gradient = vec![0.0; 2 * elements];
        for i in 0..elements {
            let ((value, derivative), dh) = (activation(gate(i)), f64::from(dh[i]));
            let at = i / inner * 2 * inner + i % inner;
            gradient[at] = dh * up(i) * derivative;
            gradient[at + inner] = dh * value;
        }
        let arguments = |first: A| {
            [
                first,
                A::Shifted(shift, of.real.bytes(&gate_up)),
                A::Long(elements as u64),
                A::Int(inner as u32),
            ]
        };
        let first = A::Output(of.real.size() * elements);
        let forward = run(of, forward, (grid, 256), &arguments(first))?;
        agree_real(of, "h", &forward.buffers[0], &h)?;
        let first = A::Buffer(of.real.bytes(&dh));
        let backward = run(of, backward, (grid, 256), &arguments(first))?;
        agree_real(of, "h again", &backward.buffers[0], &h)?;
        agree_real(of, "gradient", &backward.buffers[1], &gradient)?;
        if inner % 64 == 0 && shift == 0 {
            coalesced(&forward)?;
            coalesced(&backward)?;
            let bytes = (5 * elements * of.real.size()) as u64;
            let all =
                |counters: Counters| counters.global_bytes_read + counters.global_bytes_written;
            moves("forward", all(forward.counters), bytes - 2 * bytes / 5)?;
            moves("backward", all(backward.counters), 6 * bytes / 5)?;
        }
    }
    Ok(())
}

/// Losses and gradients; rows without a target have neither.
pub fn cross_entropy(of: &Compiled) -> Result<(), Caught> {
    for (vocabulary, threads) in [
        (1, 32),
        (5, 32),
        (151, 64),
        (256, 256),
        (1027, 256),
        (9001, 1024),
    ] {
        let n = 4usize;
        // Large differences, so that only a shift by a row's maximum avoids an overflow.
        let logits = of.real.rounded(Random(9).floats(n * vocabulary, 100.0));
        let mut targets: Vec<u32> = (0..n).map(|row| (row * 37 % vocabulary) as u32).collect();
        targets[2] = u32::MAX;
        let weights = [0.5f32, -2.0, 3.0, 0.0];
        for (with_gradient, is_weighted, smoothing, dynamic) in [
            (0, false, 0.0f32, 0),
            (1, false, 0.0, 0),
            (1, true, 0.0, 0),
            (0, false, 0.25, 0),
            (1, true, 0.25, 0),
            (0, false, 0.0, 1),
            (1, true, 0.0, 1),
        ] {
            let share = f64::from(smoothing);
            let (mut losses, mut gradient) = (vec![0.0; n], vec![0.0; n * vocabulary]);
            for row in (0..n).filter(|&row| targets[row] != u32::MAX) {
                let of_row = &logits[row * vocabulary..(row + 1) * vocabulary];
                let shift = f64::from(of_row.iter().copied().fold(f32::MIN, f32::max));
                let sum: f64 = of_row.iter().map(|&x| (f64::from(x) - shift).exp()).sum();
                let mean = of_row.iter().map(|&x| f64::from(x)).sum::<f64>() / of_row.len() as f64;
                let target = targets[row] as usize;
                let chosen = f64::from(of_row[target]);
                let factor = match dynamic {
                    0 => 1.0,
                    _ => (chosen - shift).exp() / sum,
                };
                let wanted = (1.0 - share) * chosen + share * mean;
                losses[row] = factor * (sum.ln() + shift - wanted);
                for (i, &logit) in of_row.iter().enumerate() {
                    let of_target = (1.0 - share) * f64::from(u8::from(i == target));
                    let of_target = of_target + share / of_row.len() as f64;
                    let p = (f64::from(logit) - shift).exp() / sum;
                    gradient[row * vocabulary + i] = factor * (p - of_target);
                }
            }
            let arguments = [
                A::Output(8 * n),
                A::Buffer(of.real.bytes(&logits)),
                integers(&targets),
                if is_weighted {
                    floats(&weights)
                } else {
                    A::Null
                },
                A::Int(vocabulary as u32),
                A::Int(with_gradient),
                A::Float(smoothing),
                A::Int(dynamic),
            ];
            let got = run(of, "cross_entropy", (n, threads), &arguments)?;
            for (row, (got, expected)) in got.f64s(0).iter().zip(&losses).enumerate() {
                // ln of an f32 sum near 1 has this absolute error.
                let allowed = 1e-6 * expected.max(1.0);
                ensure!(
                    Check::Value,
                    (got - expected).abs() <= allowed,
                    "loss {row}: {got}, not {expected}"
                );
            }
            ensure!(
                Check::Value,
                got.f64s(0)[2] == 0.0,
                "the loss of a row without a target is not 0"
            );
            if with_gradient == 0 {
                same("logits", &of.real.values(&got.buffers[1]), &logits)?;
            } else {
                let factor = |i: usize| {
                    if is_weighted {
                        f64::from(weights[i / vocabulary])
                    } else {
                        1.0
                    }
                };
                let cells = gradient.iter().enumerate();
                let expected: Vec<f64> = cells.map(|(i, cell)| factor(i) * cell).collect();
                agree_real(of, "gradient", &got.buffers[1], &expected)?;
            }
            if vocabulary == 256 && !is_weighted {
                coalesced(&got)?;
            }
        }
    }
    Ok(())
}

/// NaN and infinity propagate, and −∞ has the probability 0.
pub fn cross_entropy_extremes(of: &Compiled) -> Result<(), Caught> {
    let (vocabulary, n) = (40usize, 4usize);
    let mut logits = of.real.rounded(Random(10).floats(n * vocabulary, 1.0));
    logits[7] = f32::NAN;
    logits[vocabulary + 9] = f32::INFINITY;
    // −∞ has the probability 0; a thread whose elements are all −∞ has no maximum.
    logits[2 * vocabulary + 8..3 * vocabulary - 4].fill(f32::NEG_INFINITY);
    let arguments = [
        A::Output(8 * n),
        A::Buffer(of.real.bytes(&logits)),
        integers(&[0, 0, 0, 0]),
        A::Null,
        A::Int(vocabulary as u32),
        A::Int(1),
        A::Float(0.0),
        A::Int(0),
    ];
    let got = run(of, "cross_entropy", (n, 32), &arguments)?;
    let losses = got.f64s(0);
    ensure!(
        Check::Value,
        losses[0].is_nan() && losses[1].is_nan(),
        "{losses:?}"
    );
    let gradient = of.real.values(&got.buffers[1]);
    ensure!(
        Check::Value,
        gradient[0].is_nan(),
        "the gradient of a NaN is not NaN"
    );
    let of_row = &gradient[2 * vocabulary..3 * vocabulary];
    ensure!(
        Check::Value,
        of_row[8..vocabulary - 4] == [0.0; 28],
        "−∞ has a gradient"
    );
    ensure!(
        Check::Value,
        of_row.iter().all(|x| x.is_finite()),
        "the gradient is not finite"
    );
    ensure!(
        Check::Value,
        losses[2].is_finite() && losses[2] > 0.0,
        "the loss {} is not positive and finite",
        losses[2]
    );
    Ok(())
}

/// A kernel that adds the sum of doubles to one.
pub fn sum(of: &Compiled, kernel: &str, threads: u32) -> Result<(), Caught> {
    for n in [1usize, 31, 1024, 2500] {
        let values = wide(&Random(11).floats(n, 5.0));
        let arguments = [doubles(&[3.5]), doubles(&values), A::Int(n as u32)];
        let got = run(of, kernel, (1, threads), &arguments)?.f64s(0)[0];
        let expected = 3.5 + values.iter().sum::<f64>();
        ensure!(
            Check::Value,
            (got - expected).abs() < 1e-10,
            "{kernel} of {n}: {got}, not {expected}"
        );
    }
    Ok(())
}

/// One step of AdamW, operation by operation, as the CPU engine computes it: the weight and both moments.
fn adamw_step(factors: &[f32; 7], [w, g, m, v]: [f32; 4]) -> [f32; 3] {
    let [scale, keep, beta1, beta2, step_size, root, epsilon] = *factors;
    let g = g * scale;
    let m = m + (1.0 - beta1) * (g - m);
    let v = beta2 * v + (1.0 - beta2) * (g * g);
    let denominator = v.sqrt() * root + epsilon;
    [keep * w - step_size * (m / denominator), m, v]
}

/// No product may be fused with a sum: ptxas fuses those without a rounding mode, which the emulator rounds
/// on their own.
fn rounds_every_product(of: &Compiled) -> Result<(), Caught> {
    let fusible = of.ptx.contains("mul.f32") || of.ptx.contains("mul.ftz.f32");
    ensure!(
        Check::Fusible,
        !fusible,
        "a product has no rounding mode; use __fmul_rn"
    );
    Ok(())
}

/// One step gives the bits of the definition.
pub fn adamw(of: &Compiled) -> Result<(), Caught> {
    rounds_every_product(of)?;
    // Whole packs; a rest; a grid smaller than the elements; misaligned moments; no copy.
    for (elements, shift, grid, with_copy) in [
        (1024usize, 0, 1, true),
        (2051, 0, 1, true),
        (203, 4, 1, true),
        (77, 0, 1, false),
    ] {
        let mut random = Random(12);
        let [w, g, m, v] = [1.0, 3.0, 0.1, 0.2].map(|scale| random.floats(elements, scale));
        let v: Vec<f32> = v.into_iter().map(f32::abs).collect();
        let factors = [0.5f32, 0.999, 0.9, 0.95, 0.01, 2.6, 1e-8];
        let copy = if with_copy {
            A::Output(of.real.size() * elements)
        } else {
            A::Null
        };
        let arguments = [
            floats(&w),
            copy,
            floats(&g),
            A::Shifted(shift, of_f32(&m)),
            floats(&v),
            A::Long(elements as u64),
            floats(&factors),
        ];
        let mut got = run(of, "adamw", (grid, 256), &arguments)?;
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        let expected: Vec<[f32; 3]> = (0..elements)
            .map(|i| adamw_step(&factors, [w[i], g[i], m[i], v[i]]))
            .collect();
        let weights: Vec<f32> = expected.iter().map(|of| of[0]).collect();
        if with_copy {
            let copy = got.buffers.remove(1);
            same("copy", &copy, &of.real.bytes(&weights))?;
        }
        for (buffer, index, what) in [(0, 0, "weights"), (2, 1, "exp_avg"), (3, 2, "exp_avg_sq")] {
            let expected: Vec<f32> = expected.iter().map(|of| of[index]).collect();
            same(what, &bits(&got.f32s(buffer)), &bits(&expected))?;
        }
        same("gradient", &got.f32s(1), &g)?;
        if elements == 1024 {
            coalesced(&got)?;
            let written = (3 * 4 + of.real.size()) * elements;
            moves("written", got.counters.global_bytes_written, written as u64)?;
            // The seven factors once for each thread.
            let read = 4 * 4 * elements + 7 * 4 * 256;
            moves("read", got.counters.global_bytes_read, read as u64)?;
        }
    }
    Ok(())
}

/// bf16 of a value by the definition: of the two neighbours the nearer, of a tie the even one.
fn nearest_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let bits = value.to_bits();
    let (down, rest) = ((bits >> 16) as u16, bits & 0xffff);
    let up = rest > 0x8000 || rest == 0x8000 && down % 2 == 1;
    down + u16::from(up)
}

/// Values are rounded to the nearest, and NaN stays NaN.
pub fn cast(of: &Compiled) -> Result<(), Caught> {
    let mut random = Random(13);
    let mut values: Vec<f32> = (0..4096)
        .map(|_| f32::from_bits(random.bits() as u32))
        .collect();
    // Ties, their neighbours, the largest numbers, subnormal numbers, zeroes and infinities.
    for high in [
        0x3f80u32, 0x3f81, 0x0000, 0x8000, 0x7f7f, 0xff7f, 0x007f, 0x7f80, 0xff80,
    ] {
        for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            values.push(f32::from_bits(high << 16 | low));
        }
    }
    values.extend([1.0, 2.0, 3.0]);
    for (shift, grid) in [(0, 3), (4, 2)] {
        let arguments = [
            A::Output(of.real.size() * values.len()),
            A::Shifted(shift, of_f32(&values)),
            A::Long(values.len() as u64),
        ];
        let got = run(of, "cast", (grid, 256), &arguments)?;
        let expected = match of.real {
            Real::F32 => of_f32(&values),
            Real::Bf16 => bytes_of(&values, |value| nearest_bf16(value).to_le_bytes().to_vec()),
        };
        same("y", &got.buffers[0], &expected)?;
    }
    Ok(())
}

/// Elements whose random number is small become 0, and the others grow; backward adds the same of a gradient.
pub fn dropout(of: &Compiled) -> Result<(), Caught> {
    let keys = [7u64, u64::MAX - 5, 1 << 40];
    let (seq_len, rows) = (4usize, 12usize);
    let (adapter, dropped, factor) = (5u32, 5_033_164u32, 1.0f32 / 0.7);
    for (width, shift) in [(1, 0), (83, 0), (64, 0), (64, 8), (1032, 0)] {
        let mut random = Random(14);
        let [x, dx] = [(); 2].map(|()| of.real.rounded(random.floats(rows * width, 1.0)));
        let rest = [
            A::Int(width as u32),
            A::Int(seq_len as u32),
            integers(&keys.map(halves).concat()),
            A::Int(adapter),
            A::Int(dropped),
            A::Float(factor),
        ];
        let mut expected = Vec::new();
        for (row, x) in x.chunks(width).enumerate() {
            let key = random_bits(keys[row / seq_len], u64::from(adapter));
            let first = row % seq_len * width;
            for (element, &x) in (first as u64..).zip(x) {
                let drops = random_bits(key, element) >> 40 < u64::from(dropped);
                expected.push(f64::from(x) * if drops { 0.0 } else { f64::from(factor) });
            }
        }
        let from = of.real.bytes(&x);
        let mut arguments = vec![A::Output(from.len()), A::Shifted(shift, from.clone())];
        arguments.extend(rest.iter().cloned());
        let got = run(of, "dropout", (rows, 256), &arguments)?;
        agree_real(of, "y", &got.buffers[0], &expected)?;
        if (width, shift) == (64, 0) {
            coalesced(&got)?;
            moves(
                "written",
                got.counters.global_bytes_written,
                from.len() as u64,
            )?;
        }
        let mut arguments = vec![A::Shifted(shift, of.real.bytes(&dx)), A::Buffer(from)];
        arguments.extend(rest);
        let got = run(of, "dropout_backward", (rows, 256), &arguments)?;
        let sums = expected.iter().zip(&dx).map(|(d, &dx)| d + f64::from(dx));
        agree_real(of, "dx", &got.buffers[0], &sums.collect::<Vec<f64>>())?;
    }
    Ok(())
}

/// Weights are the values of their codes times the scale of their block.
pub fn dequantise(of: &Compiled) -> Result<(), Caught> {
    for (elements, shift, grid) in [
        (1usize, 0, 1),
        (4096, 0, 2),
        (4096, 0, 1),
        (5003, 0, 3),
        (1024, 4, 1),
        (77, 4, 2),
    ] {
        let mut random = Random(15);
        let codes: Vec<u8> = (0..elements.div_ceil(2))
            .map(|_| random.bits() as u8)
            .collect();
        let scales = random.floats(elements.div_ceil(64), 2.0);
        let table = random.floats(16, 1.0);
        let arguments = [
            A::Shifted(shift, vec![0; of.real.size() * elements]),
            A::Buffer(codes.clone()),
            floats(&scales),
            floats(&table),
            A::Long(elements as u64),
        ];
        let got = run(of, "dequantise", (grid, 256), &arguments)?;
        let weight = |i: usize| {
            let code = codes[i / 2] >> (4 - i % 2 * 4);
            table[usize::from(code & 15)] * scales[i / 64]
        };
        let expected: Vec<f32> = (0..elements).map(weight).collect();
        same("weights", &got.buffers[0], &of.real.bytes(&expected))?;
        if elements == 4096 {
            coalesced(&got)?;
            let written = of.real.size() * elements;
            moves("written", got.counters.global_bytes_written, written as u64)?;
        }
    }
    Ok(())
}

/// Scales are the numbers of their codes times the factor of their group, plus the offset after the last factor, each rounded.
pub fn dequantise_scales(of: &Compiled) -> Result<(), Caught> {
    for (elements, grid) in [(1usize, 1), (256, 1), (600, 1), (2000, 3)] {
        let mut random = Random(16);
        let codes: Vec<u8> = (0..elements).map(|_| random.bits() as u8).collect();
        let factors = random.floats(elements.div_ceil(256) + 1, 2.0);
        let numbers = random.floats(256, 1.0);
        let arguments = [
            A::Buffer(vec![0; size_of::<f32>() * elements]),
            A::Buffer(codes.clone()),
            floats(&factors),
            floats(&numbers),
            A::Long(elements as u64),
        ];
        let got = run(of, "dequantise_scales", (grid, 256), &arguments)?;
        let offset = factors[factors.len() - 1];
        let scale = |i: usize| numbers[usize::from(codes[i])] * factors[i / 256] + offset;
        let expected: Vec<u8> = (0..elements).flat_map(|i| scale(i).to_le_bytes()).collect();
        same("scales", &got.buffers[0], &expected)?;
    }
    Ok(())
}

/// Gradients are added and their squared norms agree.
pub fn gradients(of: &Compiled) -> Result<(), Caught> {
    rounds_every_product(of)?;
    for (elements, shift, grid) in [
        (1, 0, 1),
        (4096, 0, 3),
        (5003, 0, 2),
        (1024, 0, 1),
        (777, 4, 2),
    ] {
        let mut random = Random(14);
        let (g, sum) = (random.floats(elements, 1.0), random.floats(elements, 1.0));
        let total: Vec<f32> = g.iter().zip(&sum).map(|(a, b)| a + b).collect();
        let norm =
            |values: &[f32]| -> f64 { values.iter().map(|&x| f64::from(x) * f64::from(x)).sum() };
        let check = |what: &str, partial: &[f64], expected: f64| -> Result<(), Caught> {
            let got: f64 = partial.iter().sum();
            let difference = (got - expected).abs();
            ensure!(
                Check::Value,
                difference <= 1e-13 * expected,
                "{what}: {got}, not {expected}"
            );
            Ok(())
        };
        let buffer = || A::Shifted(shift, of_f32(&g));
        let size = || A::Long(elements as u64);

        let arguments = [A::Output(8 * grid), buffer(), size()];
        let got = run(of, "squared_norm", (grid, 256), &arguments)?;
        check("squared norm", &got.f64s(0), norm(&g))?;
        let alone = got.f64s(0);
        if elements == 1024 {
            coalesced(&got)?;
            moves("read", got.counters.global_bytes_read, 4096)?;
        }

        let arguments = [floats(&sum), buffer(), size()];
        let got = run(of, "add_gradient", (grid, 256), &arguments)?;
        same("sum", &got.f32s(0), &total)?;

        let arguments = [
            floats(&sum),
            A::Output(8 * grid),
            A::Output(8 * grid),
            buffer(),
            size(),
        ];
        let got = run(of, "add_gradient_measuring", (grid, 256), &arguments)?;
        same("sum", &got.f32s(0), &total)?;
        same("own", &got.f64s(1), &alone)?;
        check("of the sum", &got.f64s(2), norm(&total))?;

        let factor = 0.3f32;
        let arguments = [floats(&sum), buffer(), floats(&[factor]), size()];
        let got = run(of, "add_squares", (grid, 256), &arguments)?;
        let expected: Vec<f32> = g
            .iter()
            .zip(&sum)
            .map(|(g, sum)| sum + factor * (g * g))
            .collect();
        same("squares", &got.f32s(0), &expected)?;
    }
    Ok(())
}
