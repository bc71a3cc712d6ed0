//! Kernels in CUDA C for the CUDA engine. They have never run on a GPU, so only the tests compile them.
//!
//! `compiled` compiles them with NVRTC for the target GPUs. The tests of the package `emulated-gpu` run the PTX
//! and compare it with plain formulas.
//!
//! Every source is compiled once for each of the [`PRECISIONS`]. Its first comment states the shapes and each
//! kernel's grid and threads.

mod compiled;
mod nvrtc;

/// A source file of kernels.
struct Source {
    /// Its name in this directory.
    file: &'static str,
    /// The CUDA C source.
    text: &'static str,
    /// Names of the launchable kernels.
    kernels: &'static [&'static str],
}

/// Names and texts of the headers that sources include.
const HEADERS: [(&str, &str); 2] = [
    ("block.cuh", include_str!("block.cuh")),
    ("real.cuh", include_str!("real.cuh")),
];

/// The compiler's options for activations in f32 and in bf16.
const PRECISIONS: [&[&str]; 2] = [&[], &["-DREAL_BF16=1"]];

const SOURCES: [Source; 8] = [
    Source {
        file: "embedding.cu",
        text: include_str!("embedding.cu"),
        kernels: &["embedding_forward", "embedding_backward"],
    },
    Source {
        file: "rmsnorm.cu",
        text: include_str!("rmsnorm.cu"),
        kernels: &["rmsnorm_forward", "rmsnorm_backward", "column_sums"],
    },
    Source {
        file: "rope.cu",
        text: include_str!("rope.cu"),
        kernels: &["rope"],
    },
    Source {
        file: "swiglu.cu",
        text: include_str!("swiglu.cu"),
        kernels: &["swiglu_forward", "swiglu_backward"],
    },
    Source {
        file: "cross_entropy.cu",
        text: include_str!("cross_entropy.cu"),
        kernels: &["cross_entropy", "sum_losses"],
    },
    Source {
        file: "adamw.cu",
        text: include_str!("adamw.cu"),
        kernels: &["adamw"],
    },
    Source {
        file: "squares.cu",
        text: include_str!("squares.cu"),
        kernels: &[
            "squared_norm",
            "add_gradient",
            "add_gradient_measuring",
            "add_squares",
            "sum_partials",
        ],
    },
    Source {
        file: "cast.cu",
        text: include_str!("cast.cu"),
        kernels: &["cast"],
    },
];
