//! Compiles the engine's kernels with NVRTC in both precisions, runs their PTX and compares it with plain
//! formulas in f64.

#[path = "support/nvrtc.rs"]
mod nvrtc;
mod support;

use emulated_gpu::launch::{Dim, Launch};
use emulated_gpu::ptx::{Counters, Limits, Module};
use half::bf16;
use support::{Memory, Random, f32s, load, of_f32, of_u32, u64s, x};

macro_rules! source {
    ($file:literal) => {
        (
            $file,
            include_str!(concat!("../../src/engine/cuda/kernels/", $file)),
        )
    };
}

const HEADERS: [(&str, &str); 2] = [source!("block.cuh"), source!("real.cuh")];

const MATMUL: (&str, &str) = ("matmul.cu", include_str!("support/matmul.cu"));

/// What `real` is in the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Real {
    F32,
    Bf16,
}

impl Real {
    fn size(self) -> usize {
        match self {
            Real::F32 => 4,
            Real::Bf16 => 2,
        }
    }

    /// The values rounded to the precision.
    fn rounded(self, mut values: Vec<f32>) -> Vec<f32> {
        if self == Real::Bf16 {
            for value in &mut values {
                *value = bf16::from_f32(*value).to_f32();
            }
        }
        values
    }

    /// The bytes of values, which are rounded.
    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Real::F32 => of_f32(values),
            Real::Bf16 => support::bytes_of(values, |value| {
                bf16::from_f32(value).to_bits().to_le_bytes().to_vec()
            }),
        }
    }

    fn values(self, bytes: &[u8]) -> Vec<f32> {
        let pairs = bytes.chunks_exact(2);
        match self {
            Real::F32 => f32s(bytes),
            Real::Bf16 => pairs
                .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
                .collect(),
        }
    }

    /// Half a unit in the last place of a value, in bf16; 0 in f32, whose rounding the other bound includes.
    fn half_ulp(self, value: f64) -> f64 {
        match self {
            Real::F32 => 0.0,
            Real::Bf16 => value.abs().max(1e-30).log2().floor().exp2() / 256.0,
        }
    }
}

/// The PTX of a source.
struct Compiled {
    /// NVRTC, architecture and precision.
    at: String,
    ptx: String,
    real: Real,
}

/// A source from every NVRTC, for two architectures and both precisions.
fn compiled(source: (&str, &str)) -> Vec<Compiled> {
    let mut all = Vec::new();
    for nvrtc in nvrtc::all() {
        for architecture in ["sm_80", "sm_90a"] {
            for real in [Real::F32, Real::Bf16] {
                let option = format!("--gpu-architecture={architecture}");
                let mut options = vec![option.as_str()];
                if real == Real::Bf16 {
                    options.push("-DREAL_BF16=1");
                }
                let ptx = nvrtc.compile(source, &HEADERS, &options);
                let file = nvrtc.path.file_name().unwrap_or_default().display();
                let at = format!("{file} for {architecture} in {real:?}");
                all.push(Compiled { at, ptx, real });
            }
        }
    }
    all
}

/// A parameter of a kernel.
enum P {
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

fn launch(
    module: &Module,
    kernel: &str,
    (grid, block): (Dim, Dim),
    list: &[P],
    memory: &mut Memory,
    seed: u64,
) -> Counters {
    let parameters = parameters(list);
    let launch = Launch {
        grid,
        block,
        dynamic_shared: 0,
        parameters: &parameters,
        seed,
    };
    module
        .run(kernel, &launch, &Limits::default(), memory)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// An argument of a kernel.
enum A {
    /// A buffer with these bytes, at a multiple of 256.
    Buffer(Vec<u8>),
    /// A buffer whose address is a multiple of 256 plus this number of bytes.
    Shifted(usize, Vec<u8>),
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
    A::Buffer(support::bytes_of(values, |value| {
        value.to_le_bytes().to_vec()
    }))
}

/// A buffer of u32.
fn integers(values: &[u32]) -> A {
    A::Buffer(of_u32(values))
}

/// A buffer to write, of NaN.
fn output(bytes: usize) -> A {
    A::Buffer(vec![0xff; bytes])
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
#[track_caller]
fn run(of: &Compiled, kernel: &str, (grid, threads): (usize, u32), arguments: &[A]) -> Outcome {
    assert!(!of.ptx.contains("__local_depot"), "{}: {kernel}", of.at);
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
        let list: Vec<P> = arguments
            .iter()
            .map(|argument| match argument {
                A::Buffer(bytes) => put(0, bytes),
                A::Shifted(shift, bytes) => put(*shift, bytes),
                A::Null => P::Long(0),
                A::Long(value) => P::Long(*value),
                A::Int(value) => P::Int(*value),
                A::Float(value) => P::Float(*value),
            })
            .collect();
        let geometry = (x(grid as u32), x(threads));
        let counters = launch(&module, kernel, geometry, &list, &mut memory, seed);
        let buffers = buffers.into_iter().map(|(address, shift)| {
            let (before, bytes) = memory.get(address).split_at(shift);
            assert!(before.iter().all(|&byte| byte == 0xff), "{}", of.at);
            bytes.to_vec()
        });
        let outcome = Outcome {
            buffers: buffers.collect(),
            counters,
        };
        assert_eq!(counters.bank_conflicts, 0, "{}: {kernel}", of.at);
        match &first {
            None => first = Some(outcome),
            Some(first) => assert!(
                outcome.buffers == first.buffers,
                "{}: {kernel} depends on the order of warps",
                of.at
            ),
        }
    }
    first.expect("a seed has run")
}

/// Asserts that each request to global memory touches as few sectors as its bytes need.
#[track_caller]
fn coalesced(of: &Compiled, outcome: &Outcome) {
    let Counters {
        global_sectors: sectors,
        global_sectors_ideal: ideal,
        ..
    } = outcome.counters;
    assert!(
        sectors <= ideal,
        "{}: {sectors} sectors, not {ideal}",
        of.at
    );
}

fn root_mean_square(values: &[f64]) -> f64 {
    let squares: f64 = values.iter().map(|x| x * x).sum();
    (squares / values.len() as f64).sqrt()
}

/// Asserts that every element is within `bound` of the expected one, relative to that or to the root mean
/// square of all, whichever is larger.
#[track_caller]
fn agree_within(bound: f64, what: &str, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let typical = root_mean_square(expected);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let allowed = bound * expected.abs().max(typical);
        let difference = (f64::from(got) - expected).abs();
        assert!(difference <= allowed, "{what}[{i}]: {got}, not {expected}");
    }
}

#[track_caller]
fn agree(what: &str, got: &[f32], expected: &[f64]) {
    agree_within(1e-6, what, got, expected);
}

/// The same for a tensor of `real`: bf16 may differ by half a unit in the last place in addition.
#[track_caller]
fn agree_real(of: &Compiled, what: &str, got: &[u8], expected: &[f64]) {
    let got = of.real.values(got);
    assert_eq!(got.len(), expected.len(), "{}: {what}", of.at);
    let typical = root_mean_square(expected);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let allowed = of.real.half_ulp(expected) + 1e-6 * expected.abs().max(typical);
        let difference = (f64::from(got) - expected).abs();
        assert!(
            difference <= allowed,
            "{}: {what}[{i}]: {got}, not {expected}",
            of.at
        );
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

#[test]
fn embedding_copies_rows_and_adds_occurrences_in_their_order() {
    for of in compiled(source!("embedding.cu")) {
        for (hidden, shift) in [(1, 0), (83, 0), (64, 0), (64, 4), (1032, 0)] {
            let vocabulary = 7;
            let tokens = [3u32, 5, 3, 0, 5, 3, 3, 6, 3, 3, 3];
            let mut random = Random(1);
            let table = random.floats(vocabulary * hidden, 1.0);
            let dx = random.floats(tokens.len() * hidden, 1.0);
            let arguments = [
                output(4 * dx.len()),
                A::Shifted(shift, of_f32(&table)),
                integers(&tokens),
                A::Int(hidden as u32),
            ];
            let got = run(&of, "embedding_forward", (tokens.len(), 256), &arguments);
            let rows = tokens.iter().map(|&token| token as usize * hidden);
            let expected: Vec<f32> = rows
                .flat_map(|at| table[at..at + hidden].to_vec())
                .collect();
            assert_eq!(got.f32s(0), expected, "{}", of.at);
            if (hidden, shift) == (64, 0) {
                coalesced(&of, &got);
            }

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
            ];
            let got = run(&of, "embedding_backward", (tokens.len(), 256), &arguments);
            let mut sums = vec![0f32; table.len()];
            for (i, &token) in tokens.iter().enumerate() {
                for column in 0..hidden {
                    sums[token as usize * hidden + column] += dx[i * hidden + column];
                }
            }
            let expected: Vec<f32> = table.iter().zip(sums).map(|(a, b)| a + b).collect();
            assert_eq!(got.f32s(0), expected, "{}", of.at);
        }
    }
}

#[test]
fn rmsnorm_agrees() {
    for of in compiled(source!("rmsnorm.cu")) {
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
            rmsnorm(&of, width, shift, threads);
        }
    }
}

fn rmsnorm(of: &Compiled, width: usize, shift: usize, threads: u32) {
    let (n, rows, eps) = (5usize, 2usize, 1e-5f32);
    let mut random = Random(2);
    let (host_x, w) = (random.floats(n * width, 2.0), random.floats(width, 1.5));
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
    let what = |name: &str| format!("{}: {name} of width {width}", of.at);

    let arguments = [
        output(of.real.size() * n * width),
        output(4 * n),
        A::Shifted(shift, of_f32(&host_x)),
        floats(&w),
        A::Int(width as u32),
        A::Float(eps),
    ];
    let forward = run(of, "rmsnorm_forward", (n, 256), &arguments);
    agree_real(of, &what("y"), &forward.buffers[0], &y);
    agree(&what("inverse"), &forward.f32s(1), &inverse);

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
            output(of.real.size() * n * width)
        } else {
            A::Null
        };
        let arguments = [
            floats(&dx),
            copy,
            output(4 * blocks * width),
            A::Shifted(shift, of.real.bytes(&dy)),
            floats(&host_x),
            A::Buffer(forward.buffers[1].clone()),
            floats(&w),
            A::Int(n as u32),
            A::Int(width as u32),
            A::Int(rows as u32),
        ];
        let backward = run(of, "rmsnorm_backward", (blocks, threads), &arguments);
        let mut buffers = backward.buffers.iter();
        let mut next = || buffers.next().expect("the kernel has this buffer");
        agree_within(2e-6, &what("dx"), &f32s(next()), &expected_dx);
        if with_copy {
            agree_real(of, &what("dx_real"), next(), &expected_dx);
        }
        agree(&what("partial"), &f32s(next()), &expected_partial);
        agree_real(of, &what("y again"), next(), &y);
        if shift == 0 && y.len() == 5 * 2048 {
            coalesced(of, &backward);
            // Each row's dx, x, dy and twice w, and its inverse once for each thread.
            let read = (4 + 4 + 2 * 4 + of.real.size()) * y.len() + 5 * 256 * 4;
            assert_eq!(
                backward.counters.global_bytes_read, read as u64,
                "{}",
                of.at
            );
        }
    }
}

#[test]
fn column_sums_agree() {
    for of in compiled(source!("rmsnorm.cu")) {
        for (blocks, width) in [(1, 1), (3, 83), (8, 64), (61, 128)] {
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
            let got = run(&of, "column_sums", (width.div_ceil(32), 256), &arguments);
            let column = |i: usize| {
                let column = partial.iter().skip(i).step_by(width);
                f64::from(sums[i]) + column.map(|&x| f64::from(x)).sum::<f64>()
            };
            let expected: Vec<f64> = (0..width).map(column).collect();
            agree(&of.at, &got.f32s(0), &expected);
            if width == 128 {
                coalesced(&of, &got);
            }
        }
    }
}

#[test]
fn rope_agrees() {
    for of in compiled(source!("rope.cu")) {
        // Some heads of a row rotate, the rest of the row does not.
        for (head_dim, heads, row) in [
            (10, 3, 37),
            (2, 1, 2),
            (32, 5, 192),
            (64, 9, 640),
            (128, 2, 256),
        ] {
            let (n, seq_len, half) = (8usize, 4usize, head_dim / 2);
            let mut table = vec![0f32; seq_len * head_dim];
            for position in 0..seq_len {
                for i in 0..half {
                    let angle = position as f64 * 10000f64.powf(-(i as f64) / half as f64);
                    table[position * head_dim + i] = angle.cos() as f32;
                    table[position * head_dim + half + i] = angle.sin() as f32;
                }
            }
            let host_x = of.real.rounded(Random(6).floats(n * row, 1.0));
            for direction in [1.0, -1.0] {
                let mut expected = wide(&host_x);
                for r in 0..n {
                    for i in 0..heads * half {
                        let (pair, at) = (i % half, r * row + i / half * head_dim + i % half);
                        let of_row = &table[r % seq_len * head_dim..];
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
                        A::Float(direction),
                    ];
                    let got = run(&of, "rope", (n, 256), &arguments);
                    agree_real(
                        &of,
                        &format!("heads of {head_dim}"),
                        &got.buffers[0],
                        &expected,
                    );
                }
            }
        }
    }
}

#[test]
fn swiglu_agrees() {
    for of in compiled(source!("swiglu.cu")) {
        // The grid may be smaller than the elements need.
        for (n, inner, shift, grid) in [
            (7, 45, 0, 2),
            (1, 1, 0, 1),
            (9, 64, 0, 1),
            (9, 264, 0, 2),
            (5, 64, 4, 1),
        ] {
            let elements = n * inner;
            let mut random = Random(7);
            let gate_up = of.real.rounded(random.floats(2 * elements, 6.0));
            let dh = of.real.rounded(random.floats(elements, 0.1));
            let gate = |i: usize| f64::from(gate_up[i / inner * 2 * inner + i % inner]);
            let up = |i: usize| f64::from(gate_up[i / inner * 2 * inner + i % inner + inner]);
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let h: Vec<f64> = (0..elements)
                .map(|i| gate(i) * sigmoid(gate(i)) * up(i))
                .collect();
            let mut gradient = vec![0.0; 2 * elements];
            for i in 0..elements {
                let (s, dh) = (sigmoid(gate(i)), f64::from(dh[i]));
                let silu = gate(i) * s;
                let at = i / inner * 2 * inner + i % inner;
                gradient[at] = dh * up(i) * (s + silu * (1.0 - s));
                gradient[at + inner] = dh * silu;
            }
            let arguments = |first: A| {
                [
                    first,
                    A::Shifted(shift, of.real.bytes(&gate_up)),
                    A::Long(elements as u64),
                    A::Int(inner as u32),
                ]
            };
            let first = output(of.real.size() * elements);
            let forward = run(&of, "swiglu_forward", (grid, 256), &arguments(first));
            agree_real(&of, "h", &forward.buffers[0], &h);
            let first = A::Buffer(of.real.bytes(&dh));
            let backward = run(&of, "swiglu_backward", (grid, 256), &arguments(first));
            agree_real(&of, "h again", &backward.buffers[0], &h);
            agree_real(&of, "gradient", &backward.buffers[1], &gradient);
            if inner % 64 == 0 && shift == 0 {
                coalesced(&of, &forward);
                coalesced(&of, &backward);
                let bytes = (5 * elements * of.real.size()) as u64;
                let all =
                    |counters: Counters| counters.global_bytes_read + counters.global_bytes_written;
                assert_eq!(all(forward.counters), bytes - 2 * bytes / 5, "{}", of.at);
                assert_eq!(all(backward.counters), 6 * bytes / 5, "{}", of.at);
            }
        }
    }
}

#[test]
fn cross_entropy_agrees_and_rows_without_a_target_have_no_loss_or_gradient() {
    for of in compiled(source!("cross_entropy.cu")) {
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
            let (mut losses, mut gradient) = (vec![0.0; n], vec![0.0; n * vocabulary]);
            for row in (0..n).filter(|&row| targets[row] != u32::MAX) {
                let of_row = &logits[row * vocabulary..(row + 1) * vocabulary];
                let shift = f64::from(of_row.iter().copied().fold(f32::MIN, f32::max));
                let sum: f64 = of_row.iter().map(|&x| (f64::from(x) - shift).exp()).sum();
                let target = targets[row] as usize;
                losses[row] = sum.ln() + shift - f64::from(of_row[target]);
                for (i, &logit) in of_row.iter().enumerate() {
                    let unit = f64::from(u8::from(i == target));
                    gradient[row * vocabulary + i] = (f64::from(logit) - shift).exp() / sum - unit;
                }
            }
            for with_gradient in [0, 1] {
                let arguments = [
                    output(8 * n),
                    A::Buffer(of.real.bytes(&logits)),
                    integers(&targets),
                    A::Int(vocabulary as u32),
                    A::Int(with_gradient),
                ];
                let got = run(&of, "cross_entropy", (n, threads), &arguments);
                for (row, (got, expected)) in got.f64s(0).iter().zip(&losses).enumerate() {
                    // ln of an f32 sum near 1 has this absolute error.
                    let allowed = 1e-6 * expected.max(1.0);
                    assert!(
                        (got - expected).abs() <= allowed,
                        "{}: loss {row}: {got}, not {expected}",
                        of.at
                    );
                }
                assert_eq!(got.f64s(0)[2], 0.0, "{}", of.at);
                if with_gradient == 0 {
                    assert_eq!(of.real.values(&got.buffers[1]), logits, "{}", of.at);
                } else {
                    agree_real(&of, "gradient", &got.buffers[1], &gradient);
                }
                if vocabulary == 256 {
                    coalesced(&of, &got);
                }
            }
        }
    }
}

#[test]
fn cross_entropy_propagates_nan_and_infinity_and_gives_minus_infinity_the_probability_0() {
    for of in compiled(source!("cross_entropy.cu")) {
        let (vocabulary, n) = (40usize, 4usize);
        let mut logits = of.real.rounded(Random(10).floats(n * vocabulary, 1.0));
        logits[7] = f32::NAN;
        logits[vocabulary + 9] = f32::INFINITY;
        // −∞ has the probability 0; a thread whose elements are all −∞ has no maximum.
        logits[2 * vocabulary + 8..3 * vocabulary - 4].fill(f32::NEG_INFINITY);
        let arguments = [
            output(8 * n),
            A::Buffer(of.real.bytes(&logits)),
            integers(&[0, 0, 0, 0]),
            A::Int(vocabulary as u32),
            A::Int(1),
        ];
        let got = run(&of, "cross_entropy", (n, 32), &arguments);
        let losses = got.f64s(0);
        assert!(
            losses[0].is_nan() && losses[1].is_nan(),
            "{}: {losses:?}",
            of.at
        );
        let gradient = of.real.values(&got.buffers[1]);
        assert!(gradient[0].is_nan(), "{}", of.at);
        let of_row = &gradient[2 * vocabulary..3 * vocabulary];
        assert_eq!(of_row[8..vocabulary - 4], [0.0; 28], "{}", of.at);
        assert!(of_row.iter().all(|x| x.is_finite()), "{}", of.at);
        assert!(losses[2].is_finite() && losses[2] > 0.0, "{}", of.at);
    }
}

#[test]
fn losses_and_partial_sums_are_added() {
    let kernels = [
        (source!("cross_entropy.cu"), "sum_losses", 1024),
        (source!("squares.cu"), "sum_partials", 256),
    ];
    for (source, kernel, threads) in kernels {
        for of in compiled(source) {
            for n in [1usize, 31, 1024, 2500] {
                let values = wide(&Random(11).floats(n, 5.0));
                let arguments = [doubles(&[3.5]), doubles(&values), A::Int(n as u32)];
                let got = run(&of, kernel, (1, threads), &arguments).f64s(0)[0];
                let expected = 3.5 + values.iter().sum::<f64>();
                assert!(
                    (got - expected).abs() < 1e-10,
                    "{}: {got}, not {expected}",
                    of.at
                );
            }
        }
    }
}

/// One step of AdamW, operation by operation, as the CPU engine computes it: the weight and both moments.
fn adamw(factors: &[f32; 7], [w, g, m, v]: [f32; 4]) -> [f32; 3] {
    let [scale, keep, beta1, beta2, step_size, root, epsilon] = *factors;
    let g = g * scale;
    let m = m + (1.0 - beta1) * (g - m);
    let v = beta2 * v + (1.0 - beta2) * (g * g);
    let denominator = v.sqrt() * root + epsilon;
    [keep * w - step_size * (m / denominator), m, v]
}

#[test]
fn adamw_is_bitwise_the_definition() {
    for of in compiled(source!("adamw.cu")) {
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
                output(of.real.size() * elements)
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
            let mut got = run(&of, "adamw", (grid, 256), &arguments);
            let bits =
                |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
            let expected: Vec<[f32; 3]> = (0..elements)
                .map(|i| adamw(&factors, [w[i], g[i], m[i], v[i]]))
                .collect();
            let weights: Vec<f32> = expected.iter().map(|of| of[0]).collect();
            if with_copy {
                let copy = got.buffers.remove(1);
                assert_eq!(copy, of.real.bytes(&weights), "{}: copy", of.at);
            }
            for (buffer, index) in [(0, 0), (2, 1), (3, 2)] {
                let expected: Vec<f32> = expected.iter().map(|of| of[index]).collect();
                assert_eq!(
                    bits(&got.f32s(buffer)),
                    bits(&expected),
                    "{}: {index}",
                    of.at
                );
            }
            assert_eq!(got.f32s(1), g, "{}", of.at);
            if elements == 1024 {
                coalesced(&of, &got);
                let written = (3 * 4 + of.real.size()) * elements;
                assert_eq!(
                    got.counters.global_bytes_written, written as u64,
                    "{}",
                    of.at
                );
                // The seven factors once for each thread.
                let read = 4 * 4 * elements + 7 * 4 * 256;
                assert_eq!(got.counters.global_bytes_read, read as u64, "{}", of.at);
            }
        }
    }
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

#[test]
fn cast_rounds_to_the_nearest_and_keeps_nan() {
    for of in compiled(source!("cast.cu")) {
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
                output(of.real.size() * values.len()),
                A::Shifted(shift, of_f32(&values)),
                A::Long(values.len() as u64),
            ];
            let got = run(&of, "cast", (grid, 256), &arguments);
            let expected = match of.real {
                Real::F32 => of_f32(&values),
                Real::Bf16 => {
                    support::bytes_of(&values, |value| nearest_bf16(value).to_le_bytes().to_vec())
                }
            };
            assert!(got.buffers[0] == expected, "{}", of.at);
        }
    }
}

#[test]
fn gradients_are_added_and_measured() {
    for of in compiled(source!("squares.cu")) {
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
            let norm = |values: &[f32]| -> f64 {
                values.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
            };
            let check = |what: &str, partial: &[f64], expected: f64| {
                let got: f64 = partial.iter().sum();
                let difference = (got - expected).abs();
                assert!(
                    difference <= 1e-13 * expected,
                    "{}: {what}: {got}, not {expected}",
                    of.at
                );
            };
            let buffer = || A::Shifted(shift, of_f32(&g));
            let size = || A::Long(elements as u64);

            let arguments = [output(8 * grid), buffer(), size()];
            let got = run(&of, "squared_norm", (grid, 256), &arguments);
            check("squared norm", &got.f64s(0), norm(&g));
            let alone = got.f64s(0);
            if elements == 1024 {
                coalesced(&of, &got);
                assert_eq!(got.counters.global_bytes_read, 4096, "{}", of.at);
            }

            let arguments = [floats(&sum), buffer(), size()];
            let got = run(&of, "add_gradient", (grid, 256), &arguments);
            assert_eq!(got.f32s(0), total, "{}", of.at);

            let arguments = [
                floats(&sum),
                output(8 * grid),
                output(8 * grid),
                buffer(),
                size(),
            ];
            let got = run(&of, "add_gradient_measuring", (grid, 256), &arguments);
            assert_eq!(got.f32s(0), total, "{}", of.at);
            assert_eq!(got.f64s(1), alone, "{}", of.at);
            check("of the sum", &got.f64s(2), norm(&total));

            let factor = 0.3f32;
            let arguments = [floats(&sum), buffer(), floats(&[factor]), size()];
            let got = run(&of, "add_squares", (grid, 256), &arguments);
            let expected: Vec<f32> = g
                .iter()
                .zip(&sum)
                .map(|(g, sum)| sum + factor * (g * g))
                .collect();
            assert_eq!(got.f32s(0), expected, "{}", of.at);
        }
    }
}

#[test]
fn a_matrix_product_through_cp_async_ldmatrix_and_mma_agrees_for_every_order_of_warps() {
    for Compiled { at, ptx, .. } in compiled(MATMUL) {
        let (m, n, k) = (128usize, 64usize, 128usize);
        let mut random = Random(11);
        let mut small = |len: usize| -> Vec<bf16> {
            (0..len)
                .map(|_| bf16::from_f32(random.float(1.0)))
                .collect()
        };
        let (a, b) = (small(m * k), small(n * k));
        let bytes = |values: &[bf16]| -> Vec<u8> {
            values
                .iter()
                .flat_map(|value| value.to_bits().to_le_bytes())
                .collect()
        };
        let product = |i: usize| -> f64 {
            let pairs = (0..k).map(|at| (a[i / n * k + at], b[i % n * k + at]));
            pairs.map(|(a, b)| a.to_f64() * b.to_f64()).sum()
        };
        let expected: Vec<f64> = (0..m * n).map(product).collect();
        for seed in 0..4 {
            let mut memory = Memory::default();
            let module = load(&ptx, &mut memory);
            let to = memory.put(&vec![0; 4 * m * n]);
            let (of_a, of_b) = (memory.put(&bytes(&a)), memory.put(&bytes(&b)));
            let list = [
                P::Long(to),
                P::Long(of_a),
                P::Long(of_b),
                P::Int(n as u32),
                P::Int(k as u32),
            ];
            let grid = Dim {
                x: (n / 64) as u32,
                y: (m / 64) as u32,
                z: 1,
            };
            let counters = launch(&module, "matmul", (grid, x(128)), &list, &mut memory, seed);
            agree_within(1e-5, &at, &f32s(memory.get(to)), &expected);
            assert_eq!(counters.mma, (m * n * k / (16 * 8 * 16)) as u64, "{at}");
            // Rows of 80 bytes: the eight rows of a matrix lie in distinct banks.
            assert_eq!(counters.bank_conflicts, 0, "{at}");
        }
    }
}

#[test]
fn a_softmax_by_shuffles_agrees() {
    for Compiled { at, ptx, .. } in compiled(MATMUL) {
        let (rows, width) = (8usize, 3usize);
        let host_x = Random(12).floats(rows * 32 * width, 10.0);
        let mut expected = Vec::new();
        for row in host_x.chunks_exact(32 * width) {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            expected.extend(row.iter().map(|&x| f64::from(x).exp() / sum));
        }
        let mut memory = Memory::default();
        let module = load(&ptx, &mut memory);
        let to = memory.put(&of_f32(&host_x));
        let list = [P::Long(to), P::Int(width as u32)];
        let block = Dim { x: 32, y: 4, z: 1 };
        launch(&module, "softmax", (x(2), block), &list, &mut memory, 9);
        agree_within(1e-5, &at, &f32s(memory.get(to)), &expected);
    }
}

#[test]
fn functions_of_cudas_library_agree() {
    let source = ("math.cu", include_str!("support/math.cu"));
    let mut random = Random(13);
    let mut inputs = random.floats(400, 4.0);
    // Far arguments take the slow path of the trigonometric functions, through local and constant memory.
    inputs.extend(random.floats(100, 80.0));
    let far = inputs.len();
    inputs.extend(random.floats(100, 1e7));
    // Rust has no erf; its series converges for the near arguments.
    let erf = |x: f64| {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    };
    type Function<'a> = (&'a str, Box<dyn Fn(f64) -> f64 + 'a>);
    let of = |name, f: fn(f64) -> f64| -> Function<'_> { (name, Box::new(f)) };
    // As the kernel computes it, in f32.
    let b = |a: f64| f64::from((a as f32).abs() + 0.5);
    let functions: Vec<Function<'_>> = vec![
        of("sinf", f64::sin),
        of("cosf", f64::cos),
        of("expf", f64::exp),
        of("exp2f", f64::exp2),
        ("logf", Box::new(move |a| b(a).ln())),
        ("log2f", Box::new(move |a| b(a).log2())),
        ("powf", Box::new(move |a| b(a).powf(f64::from(1.7f32)))),
        of("tanhf", f64::tanh),
        ("erff", Box::new(erf)),
        ("rsqrtf", Box::new(move |a| 1.0 / b(a).sqrt())),
        of("cbrtf", f64::cbrt),
        ("fmodf", Box::new(|a| a % f64::from(0.7f32))),
        of("exp", f64::exp),
        ("log", Box::new(move |a| b(a).ln())),
        of("atanf", f64::atan),
        ("division", Box::new(move |a| a / b(a))),
        of("roundf", f64::round),
        of("rintf", f64::round_ties_even),
        ("log1pf", Box::new(move |a| b(a).ln_1p())),
        of("expm1f", f64::exp_m1),
    ];
    for Compiled { at, ptx, .. } in compiled(source) {
        let mut memory = Memory::default();
        let module = load(&ptx, &mut memory);
        let n = inputs.len();
        let to = memory.put(&vec![0; 4 * n * functions.len()]);
        let from = memory.put(&of_f32(&inputs));
        let list = [P::Long(to), P::Long(from), P::Int(n as u32)];
        let grid = (x((n as u32).div_ceil(96)), x(96));
        launch(&module, "functions", grid, &list, &mut memory, 10);
        let got = f32s(memory.get(to));
        for (row, (name, function)) in functions.iter().enumerate() {
            for (i, &input) in inputs.iter().enumerate() {
                if *name == "erff" && input.abs() > 4.0 {
                    continue;
                }
                let (got, expected) = (f64::from(got[row * n + i]), function(f64::from(input)));
                let single = expected as f32;
                if !single.is_normal() || i >= far && name.starts_with("fmod") {
                    continue;
                }
                // CUDA states at most 4 ulp for these; 8 leave room for the approximations inside.
                let ulp = f64::from(single.abs().next_up()) - f64::from(single.abs());
                let difference = (got - expected).abs();
                assert!(
                    difference <= 8.0 * ulp,
                    "{at}: {name}({input}) is {got}, not {expected}"
                );
            }
        }
    }
}
