//! Compiles the engine's kernels with NVRTC in both precisions, runs their PTX and compares it with plain
//! formulas in f64.

mod support;

use emulated_gpu::launch::Dim;
use half::bf16;
use support::caught::Caught;
use support::kernels::{self, Compiled, HEADERS, P, Real, agree_within, compile, launch, source};
use support::{Memory, Random, f32s, load, nvrtc, of_f32, x};

const MATMUL: (&str, &str) = ("matmul.cu", include_str!("support/matmul.cu"));

/// A source from every NVRTC, for two architectures and both precisions.
fn compiled(source: (&str, &str)) -> Vec<Compiled> {
    compiled_for(source, None)
}

/// The same for a head size.
fn compiled_for(source: (&str, &str), head_dim: Option<usize>) -> Vec<Compiled> {
    let mut all = Vec::new();
    for nvrtc in nvrtc::all() {
        for architecture in ["sm_80", "sm_90a"] {
            for real in [Real::F32, Real::Bf16] {
                let target = (architecture, head_dim);
                all.push(compile(&nvrtc, source, &HEADERS, target, real));
            }
        }
    }
    all
}

/// Runs a check of every variant of a source.
#[track_caller]
fn check(source: (&str, &str), check: impl Fn(&Compiled) -> Result<(), Caught>) {
    for of in compiled(source) {
        check(&of).unwrap_or_else(|caught| panic!("{}: {caught}", of.at));
    }
}

#[test]
fn embedding_copies_rows_and_adds_occurrences_in_their_order() {
    check(source!("embedding.cu"), kernels::embedding);
}

#[test]
fn rmsnorm_agrees() {
    check(source!("rmsnorm.cu"), kernels::rmsnorm);
}

#[test]
fn layernorm_agrees() {
    check(source!("layernorm.cu"), kernels::layernorm);
}

#[test]
fn column_sums_agree() {
    check(source!("rmsnorm.cu"), kernels::column_sums);
}

#[test]
fn biases_agree() {
    check(source!("bias.cu"), kernels::bias);
}

#[test]
fn norms_of_heads_agree() {
    // Less than a warp, no multiple of one, the largest.
    for head_dim in [6, 40, 128, 256] {
        for of in compiled_for(source!("head_norms.cu"), Some(head_dim)) {
            kernels::head_norms(&of, head_dim)
                .unwrap_or_else(|caught| panic!("{} with heads of {head_dim}: {caught}", of.at));
        }
    }
}

#[test]
fn attention_over_a_cache_agrees() {
    for head_dim in [6, 40, 256] {
        for of in compiled_for(source!("cached_attention.cu"), Some(head_dim)) {
            kernels::cached_attention(&of, head_dim)
                .unwrap_or_else(|caught| panic!("{} with heads of {head_dim}: {caught}", of.at));
        }
    }
}

#[test]
fn rope_agrees() {
    check(source!("rope.cu"), kernels::rope);
}

#[test]
fn activations_of_mlps_agree() {
    check(source!("mlp.cu"), kernels::mlp);
}

#[test]
fn cross_entropy_agrees_and_rows_without_a_target_have_no_loss_or_gradient() {
    check(source!("cross_entropy.cu"), kernels::cross_entropy);
}

#[test]
fn cross_entropy_propagates_nan_and_infinity_and_gives_minus_infinity_the_probability_0() {
    check(source!("cross_entropy.cu"), kernels::cross_entropy_extremes);
}

#[test]
fn losses_and_partial_sums_are_added() {
    check(source!("cross_entropy.cu"), |of| {
        kernels::sum(of, "sum_losses", 1024)
    });
    check(source!("squares.cu"), |of| {
        kernels::sum(of, "sum_partials", 256)
    });
}

#[test]
fn adamw_is_bitwise_the_definition() {
    check(source!("adamw.cu"), kernels::adamw);
}

#[test]
fn cast_rounds_to_the_nearest_and_keeps_nan() {
    check(source!("cast.cu"), kernels::cast);
}

#[test]
fn inputs_of_adapters_are_dropped_and_so_is_their_gradient() {
    check(source!("adapter.cu"), kernels::dropout);
}

#[test]
fn weights_are_those_of_their_codes() {
    check(source!("nf4.cu"), kernels::dequantise);
}

#[test]
fn scales_are_those_of_their_codes() {
    check(source!("nf4.cu"), kernels::dequantise_scales);
}

#[test]
fn gradients_are_added_and_measured() {
    check(source!("squares.cu"), kernels::gradients);
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
            let counters =
                launch(&module, "matmul", (grid, x(128)), &list, &mut memory, seed).unwrap();
            agree_within(1e-5, &at, &f32s(memory.get(to)), &expected).unwrap();
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
        launch(&module, "softmax", (x(2), block), &list, &mut memory, 9).unwrap();
        agree_within(1e-5, &at, &f32s(memory.get(to)), &expected).unwrap();
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
        launch(&module, "functions", grid, &list, &mut memory, 10).unwrap();
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
