//! Compiles the engine's kernels with NVRTC, runs their PTX and compares it with plain formulas.

#[path = "support/nvrtc.rs"]
mod nvrtc;
mod support;

use emulated_gpu::launch::{Dim, Launch};
use emulated_gpu::ptx::{Counters, Limits, Module};
use half::bf16;
use support::{Memory, Random, f32s, load, of_f32, of_u32, of_u64, u64s, x};

const BLOCK: (&str, &str) = (
    "block.cuh",
    include_str!("../../src/engine/cuda/kernels/block.cuh"),
);

macro_rules! source {
    ($file:literal) => {
        (
            $file,
            include_str!(concat!("../../src/engine/cuda/kernels/", $file)),
        )
    };
}

const MATMUL: (&str, &str) = ("matmul.cu", include_str!("support/matmul.cu"));

/// The PTX of a source from every NVRTC, for two architectures.
fn compiled(source: (&str, &str)) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for nvrtc in nvrtc::all() {
        for architecture in ["sm_80", "sm_90a"] {
            let option = format!("--gpu-architecture={architecture}");
            let ptx = nvrtc.compile(source, BLOCK, &[&option]);
            let file = nvrtc.path.file_name().unwrap_or_default().display();
            all.push((format!("{file} for {architecture}"), ptx));
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
    /// A structure of 4-byte members.
    Floats(Vec<f32>),
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
            P::Floats(values) => bytes.extend(of_f32(values)),
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

/// Asserts that every element is within 1e-5 of the expected one, relative to that or to the root mean
/// square of all, whichever is larger.
#[track_caller]
fn agree(what: &str, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    let typical = (squares / expected.len() as f64).sqrt();
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let allowed = 1e-5 * expected.abs().max(typical);
        let difference = (f64::from(got) - expected).abs();
        assert!(difference <= allowed, "{what}[{i}]: {got}, not {expected}");
    }
}

#[test]
fn rmsnorm_agrees() {
    for (at, ptx) in compiled(source!("rmsnorm.cu")) {
        let (n, width, eps) = (9usize, 83usize, 1e-5f32);
        let mut random = Random(1);
        let (host_x, w) = (random.floats(n * width, 2.0), random.floats(width, 1.5));
        let (dy, dx) = (random.floats(n * width, 0.1), random.floats(n * width, 0.1));
        let dw = random.floats(width, 0.1);
        let of = |values: &[f32], i: usize| f64::from(values[i]);
        let row = |r: usize| (r * width)..(r + 1) * width;
        let inverse: Vec<f64> = (0..n)
            .map(|r| {
                let squares: f64 = row(r).map(|i| of(&host_x, i).powi(2)).sum();
                1.0 / (squares / width as f64 + f64::from(eps)).sqrt()
            })
            .collect();
        let y = |i: usize| of(&host_x, i) * inverse[i / width] * of(&w, i % width);
        let y: Vec<f64> = (0..n * width).map(y).collect();

        let mut memory = Memory::default();
        let module = load(&ptx, &mut memory);
        let to = memory.put(&vec![0; 4 * n * width]);
        let to_inverse = memory.put(&vec![0; 4 * n]);
        let (from, weights) = (memory.put(&of_f32(&host_x)), memory.put(&of_f32(&w)));
        let list = [
            P::Long(to),
            P::Long(to_inverse),
            P::Long(from),
            P::Long(weights),
            P::Int(width as u32),
            P::Float(eps),
        ];
        let grid = (x(n as u32), x(64));
        launch(&module, "rmsnorm_forward", grid, &list, &mut memory, 1);
        agree(&format!("{at}: y"), &f32s(memory.get(to)), &y);
        agree(
            &format!("{at}: inverse"),
            &f32s(memory.get(to_inverse)),
            &inverse,
        );

        for add in [0u32, 1] {
            let [to_dy, to_dx, to_dw] = [&dy, &dx, &dw].map(|values| memory.put(&of_f32(values)));
            let list = [
                P::Long(to_dw),
                P::Long(to_dy),
                P::Long(from),
                P::Long(to_inverse),
                P::Int(n as u32),
                P::Int(width as u32),
                P::Int(add),
            ];
            let columns = (x((width as u32).div_ceil(32)), x(32));
            launch(
                &module,
                "rmsnorm_backward_weight",
                columns,
                &list,
                &mut memory,
                2,
            );
            let column = |i: usize| {
                let rows = (0..n).map(|r| r * width + i);
                let sum: f64 = rows
                    .map(|at| of(&dy, at) * of(&host_x, at) * inverse[at / width])
                    .sum();
                sum + f64::from(add) * of(&dw, i)
            };
            let expected: Vec<f64> = (0..width).map(column).collect();
            agree(&format!("{at}: dw"), &f32s(memory.get(to_dw)), &expected);

            let list = [
                P::Long(to_dy),
                P::Long(to_dx),
                P::Long(from),
                P::Long(to_inverse),
                P::Long(weights),
                P::Int(width as u32),
            ];
            launch(
                &module,
                "rmsnorm_backward_input",
                grid,
                &list,
                &mut memory,
                3,
            );
            let gradient = |i: usize| {
                let r = i / width;
                let terms = row(r).map(|i| of(&dy, i) * of(&w, i % width) * of(&host_x, i));
                let along = terms.sum::<f64>() * inverse[r].powi(3) / width as f64;
                of(&dx, i) + of(&dy, i) * of(&w, i % width) * inverse[r] - of(&host_x, i) * along
            };
            let expected: Vec<f64> = (0..n * width).map(gradient).collect();
            agree(&format!("{at}: dx"), &f32s(memory.get(to_dx)), &expected);
            agree(&format!("{at}: y again"), &f32s(memory.get(to_dy)), &y);
        }
    }
}

#[test]
fn rope_agrees() {
    for (at, ptx) in compiled(source!("rope.cu")) {
        // Three heads of a row rotate, the rest of the row does not.
        let (n, seq_len, head_dim, heads, row) = (12usize, 6usize, 10usize, 3usize, 37usize);
        let half = head_dim / 2;
        let mut table = vec![0f32; seq_len * head_dim];
        for position in 0..seq_len {
            for i in 0..half {
                let angle = position as f64 * 10000f64.powf(-(i as f64) / half as f64);
                table[position * head_dim + i] = angle.cos() as f32;
                table[position * head_dim + half + i] = angle.sin() as f32;
            }
        }
        let host_x = Random(6).floats(n * row, 1.0);
        for (kernel, direction) in [("rope_forward", 1.0), ("rope_backward", -1.0)] {
            let mut expected: Vec<f64> = host_x.iter().map(|&x| f64::from(x)).collect();
            for r in 0..n {
                for i in 0..heads * half {
                    let (pair, at) = (i % half, r * row + i / half * head_dim + i % half);
                    let of_row = &table[r % seq_len * head_dim..];
                    let cosine = f64::from(of_row[pair]);
                    let sine = direction * f64::from(of_row[half + pair]);
                    let (a, b) = (expected[at], expected[at + half]);
                    expected[at] = a * cosine - b * sine;
                    expected[at + half] = b * cosine + a * sine;
                }
            }
            let mut memory = Memory::default();
            let module = load(&ptx, &mut memory);
            let (to, of_table) = (memory.put(&of_f32(&host_x)), memory.put(&of_f32(&table)));
            let list = [
                P::Long(to),
                P::Int(row as u32),
                P::Int(heads as u32),
                P::Long(of_table),
                P::Int(seq_len as u32),
                P::Int(head_dim as u32),
            ];
            launch(&module, kernel, (x(n as u32), x(16)), &list, &mut memory, 4);
            agree(&format!("{at}: {kernel}"), &f32s(memory.get(to)), &expected);
        }
    }
}

#[test]
fn swiglu_agrees() {
    for (at, ptx) in compiled(source!("swiglu.cu")) {
        let (n, inner) = (7usize, 45usize);
        let elements = n * inner;
        let mut random = Random(7);
        let (gate_up, dh) = (
            random.floats(2 * elements, 6.0),
            random.floats(elements, 0.1),
        );
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
        let mut memory = Memory::default();
        let module = load(&ptx, &mut memory);
        let to = memory.put(&vec![0; 4 * elements]);
        let from = memory.put(&of_f32(&gate_up));
        let grid = (x((elements as u32).div_ceil(64)), x(64));
        let list = |to, from| {
            [
                P::Long(to),
                P::Long(from),
                P::Long(elements as u64),
                P::Int(inner as u32),
            ]
        };
        launch(
            &module,
            "swiglu_forward",
            grid,
            &list(to, from),
            &mut memory,
            5,
        );
        agree(&format!("{at}: h"), &f32s(memory.get(to)), &h);
        let to = memory.put(&of_f32(&dh));
        launch(
            &module,
            "swiglu_backward",
            grid,
            &list(to, from),
            &mut memory,
            6,
        );
        agree(&format!("{at}: h again"), &f32s(memory.get(to)), &h);
        agree(
            &format!("{at}: gradient"),
            &f32s(memory.get(from)),
            &gradient,
        );
    }
}

#[test]
fn cross_entropy_agrees_and_rows_without_a_target_have_no_loss_or_gradient() {
    for (at, ptx) in compiled(source!("cross_entropy.cu")) {
        let (n, vocabulary) = (6usize, 151usize);
        // Large differences, so that only a shift by a row's maximum avoids an overflow.
        let logits = Random(9).floats(n * vocabulary, 100.0);
        let mut targets: Vec<u32> = (0..n).map(|row| (row * 37 % vocabulary) as u32).collect();
        targets[4] = u32::MAX;
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
        for kernel in ["cross_entropy_forward", "cross_entropy_forward_backward"] {
            let mut memory = Memory::default();
            let module = load(&ptx, &mut memory);
            let to = memory.put(&of_u64(&vec![f64::NAN.to_bits(); n]));
            let (from, of_targets) = (memory.put(&of_f32(&logits)), memory.put(&of_u32(&targets)));
            let list = [
                P::Long(to),
                P::Long(from),
                P::Long(of_targets),
                P::Int(vocabulary as u32),
            ];
            launch(&module, kernel, (x(n as u32), x(64)), &list, &mut memory, 7);
            let got = u64s(memory.get(to)).into_iter().map(f64::from_bits);
            for (row, (got, expected)) in got.zip(&losses).enumerate() {
                let allowed = 1e-5 * expected;
                assert!(
                    (got - expected).abs() <= allowed,
                    "{at}: loss {row}: {got}, not {expected}"
                );
            }
            match kernel {
                "cross_entropy_forward" => assert_eq!(f32s(memory.get(from)), logits),
                _ => agree(
                    &format!("{at}: gradient"),
                    &f32s(memory.get(from)),
                    &gradient,
                ),
            }
        }
    }
}

#[test]
fn adamw_agrees_and_rounds_its_copy_to_bf16() {
    for (at, ptx) in compiled(source!("adamw.cu")) {
        let elements = 203usize;
        let mut random = Random(10);
        let [w, g, m, v] = [1.0, 3.0, 0.1, 0.2].map(|scale| random.floats(elements, scale));
        let v: Vec<f32> = v.into_iter().map(f32::abs).collect();
        let factors = vec![0.5f32, 0.999, 0.9, 0.95, 0.01, 2.6, 1e-8];
        let mut expected = [vec![], vec![], vec![]];
        for i in 0..elements {
            let f = |at: usize| f64::from(factors[at]);
            let gradient = f64::from(g[i]) * f(0);
            let m = f64::from(m[i]) + (1.0 - f(2)) * (gradient - f64::from(m[i]));
            let v = f(3) * f64::from(v[i]) + (1.0 - f(3)) * gradient * gradient;
            let w = f(1) * f64::from(w[i]) - f(4) * m / (v.sqrt() * f(5) + f(6));
            for (list, value) in expected.iter_mut().zip([w, m, v]) {
                list.push(value);
            }
        }
        let mut memory = Memory::default();
        let module = load(&ptx, &mut memory);
        let [to_w, of_g, to_m, to_v] = [&w, &g, &m, &v].map(|values| memory.put(&of_f32(values)));
        let copy = memory.put(&vec![0; 2 * elements]);
        let list = [
            P::Long(to_w),
            P::Long(copy),
            P::Long(of_g),
            P::Long(to_m),
            P::Long(to_v),
            P::Long(elements as u64),
            P::Floats(factors),
        ];
        let grid = (x((elements as u32).div_ceil(64)), x(64));
        let counters = launch(&module, "adamw", grid, &list, &mut memory, 8);
        for (to, expected) in [to_w, to_m, to_v].into_iter().zip(&expected) {
            agree(&at, &f32s(memory.get(to)), expected);
        }
        let bits = memory.get(copy).chunks_exact(2);
        let bits: Vec<u16> = bits
            .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
            .collect();
        let rounded = f32s(memory.get(to_w))
            .into_iter()
            .map(|w| bf16::from_f32(w).to_bits());
        assert_eq!(bits, rounded.collect::<Vec<u16>>(), "{at}");
        assert_eq!(counters.global_bytes_read, 4 * 4 * elements as u64, "{at}");
        assert_eq!(counters.global_bytes_written, 14 * elements as u64, "{at}");
    }
}

#[test]
fn a_matrix_product_through_cp_async_ldmatrix_and_mma_agrees_for_every_order_of_warps() {
    for (at, ptx) in compiled(MATMUL) {
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
            agree(&at, &f32s(memory.get(to)), &expected);
            assert_eq!(counters.mma, (m * n * k / (16 * 8 * 16)) as u64, "{at}");
            // Rows of 80 bytes: the eight rows of a matrix lie in distinct banks.
            assert_eq!(counters.bank_conflicts, 0, "{at}");
        }
    }
}

#[test]
fn a_softmax_by_shuffles_agrees() {
    for (at, ptx) in compiled(MATMUL) {
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
        agree(&at, &f32s(memory.get(to)), &expected);
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
    for (at, ptx) in compiled(source) {
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
