//! What decides the bits of the kernels on a processor: the instructions that they are compiled for, the size of the caches
//! as far as `gemm` uses it, and the mathematical functions of the system.

use gemm_common::cache::kernel_params;

use super::adamw::{AdamW, Factors, update};
use super::cross_entropy::{TokenLoss, forward_backward};
use super::matrix::{Matrix, MatrixMut, multiply_in_parallel};
use super::{attention, layernorm, mlp, rmsnorm, rope};

/// The kernels of a processor. Equal ones compute the same bits of the same input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The widest vectors in use, for example `x86_64 AVX2`.
    pub vectors: String,
    /// Elements along the depth that a large product adds up at a time.
    pub block_depth: usize,
    /// Digest of the bits that a short computation with most kernels has.
    pub probe: u64,
}

impl Identity {
    /// That of this processor.
    pub fn of_this_processor() -> Identity {
        Identity {
            vectors: format!("{} {}", std::env::consts::ARCH, vectors()),
            // Of the kernel that `gemm` has for these vectors: rows and columns that it computes at a time.
            block_depth: kernel_params(1 << 12, 1 << 12, 1 << 20, 16, 6, size_of::<f32>()).kc,
            probe: probe(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn vectors() -> &'static str {
    if is_x86_feature_detected!("avx512f") {
        "AVX-512"
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        "AVX2"
    } else {
        "SSE2"
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn vectors() -> &'static str {
    if cfg!(target_arch = "aarch64") {
        "NEON"
    } else {
        "scalar"
    }
}

/// FNV-1a over the bits of results.
struct Digest(u64);

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    fn floats(&mut self, values: &[f32]) {
        for value in values {
            self.add(&value.to_bits().to_le_bytes());
        }
    }

    fn doubles(&mut self, values: &[f64]) {
        for value in values {
            self.add(&value.to_bits().to_le_bytes());
        }
    }
}

fn values(len: usize, size: f32) -> Vec<f32> {
    (0..len as u32)
        .map(|i| ((i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0) * size)
        .collect()
}

fn probe() -> u64 {
    let mut digest = Digest(0xcbf2_9ce4_8422_2325);
    // Products whose depth is several blocks, in every order of their operands' elements.
    for (rows, columns, depth) in [(70, 66, 1300), (9, 5, 1100), (1, 80, 700)] {
        let (left, right) = (values(rows * depth, 1.0), values(depth * columns, 0.5));
        let a = [
            Matrix::new(&left, rows, depth),
            Matrix::new(&left, depth, rows).t(),
        ];
        let b = [
            Matrix::new(&right, depth, columns),
            Matrix::new(&right, columns, depth).t(),
        ];
        for (a, b) in a.iter().flat_map(|a| b.iter().map(move |b| (*a, *b))) {
            let mut out = values(rows * columns, 0.1);
            multiply_in_parallel(MatrixMut::new(&mut out, rows, columns), a, b, true);
            digest.floats(&out);
        }
    }
    // Attention, in both directions.
    let shape = attention::Shape {
        heads: 2,
        kv_heads: 1,
        head_dim: 12,
        window: None,
    };
    let n = 75;
    let blocks = || vec![0.0; attention::Scratch::block_len(n)];
    let threads = 0..rayon::current_num_threads();
    let scratch = attention::Scratch::new(threads.map(|_| [blocks(), blocks()]).collect());
    let qkv = values(n * shape.qkv(), 1.0);
    let (mut out, mut log_sums) = (vec![0.0; n * 24], vec![0.0; n * 2]);
    let sequences = [0..20, 20..n];
    let of = (shape, &sequences[..]);
    attention::forward(&mut out, &mut log_sums, &qkv, of, &scratch);
    let mut dqkv = vec![0.0; qkv.len()];
    let dout = values(out.len(), 0.3);
    attention::backward(&mut dqkv, &dout, (&qkv, &out, &log_sums), of, &scratch);
    digest.floats(&out);
    digest.floats(&log_sums);
    digest.floats(&dqkv);
    // Norms, activations, loss and update.
    let (x, w) = (values(40 * 50, 2.0), values(50, 1.0));
    let (mut y, mut inverse) = (vec![0.0; x.len()], vec![0.0; 40]);
    rmsnorm::forward(&mut y, &mut inverse, &x, &w, 1e-5);
    digest.floats(&y);
    let mut statistics = vec![0.0; 80];
    layernorm::forward(&mut y, &mut statistics, &x, (&w, &w), 1e-5);
    digest.floats(&y);
    for activation in [mlp::silu, mlp::gelu_tanh, mlp::gelu] {
        let mut h = vec![0.0; 1000];
        mlp::forward(&mut h, &x, (50, true), activation);
        digest.floats(&h);
    }
    for loss in [
        TokenLoss::CrossEntropy,
        TokenLoss::Smoothed(0.1),
        TokenLoss::Dft,
    ] {
        let mut logits = x.clone();
        let targets: Vec<u32> = (0..40).collect();
        digest.doubles(&forward_backward(&mut logits, &targets, None, 50, loss));
        digest.floats(&logits);
    }
    let step = AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        vector_decay: 0.0,
        step: 3,
        gradient_scale: 0.7,
    };
    let (mut p, mut m, mut v) = (x.clone(), y.clone(), vec![0.5; x.len()]);
    update(&Factors::new(&step, true), &mut p, &x, &mut m, &mut v);
    digest.floats(&p);
    // The system's functions.
    let mut table = vec![0.0; 60 * 8];
    rope::fill_table(&mut table, &[1.0, 0.31, 0.1, 0.017]);
    digest.floats(&table);
    for i in 1..200 {
        let x = f64::from(i) * 0.37;
        digest.doubles(&[x.cos(), x.ln(), x.exp(), 0.95f64.powf(x), x.powf(0.25)]);
        digest.floats(&[(x as f32).ln()]);
    }
    digest.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_has_one_identity_with_any_number_of_threads() {
        let of_threads = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(Identity::of_this_processor)
        };
        let one = of_threads(1);
        assert_eq!(of_threads(5), one);
        assert!(one.block_depth >= 512 && one.block_depth <= 1 << 20);
    }

    #[test]
    fn a_digest_finds_one_bit() {
        let of = |values: &[f32]| {
            let mut digest = Digest(0);
            digest.floats(values);
            digest.0
        };
        assert_ne!(of(&[1.0, 2.0]), of(&[1.0, 2.0f32.next_up()]));
        assert_ne!(of(&[0.0]), of(&[-0.0]));
    }
}
