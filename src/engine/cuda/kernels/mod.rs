//! Kernels in CUDA C for the future CUDA engine. They have never run on a GPU, so only the tests compile
//! them.
//!
//! `compiled` compiles them with NVRTC for the target GPUs. `compared` runs the same source on the processor
//! (`host`) and compares it with the CPU engine's arithmetic.

mod compared;
mod compiled;
mod host;
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

/// A header that some sources include.
const BLOCK: (&str, &str) = ("block.cuh", include_str!("block.cuh"));

const SOURCES: [Source; 5] = [
    Source {
        file: "rmsnorm.cu",
        text: include_str!("rmsnorm.cu"),
        kernels: &[
            "rmsnorm_forward",
            "rmsnorm_backward_weight",
            "rmsnorm_backward_input",
        ],
    },
    Source {
        file: "rope.cu",
        text: include_str!("rope.cu"),
        kernels: &["rope_forward", "rope_backward"],
    },
    Source {
        file: "swiglu.cu",
        text: include_str!("swiglu.cu"),
        kernels: &["swiglu_forward", "swiglu_backward"],
    },
    Source {
        file: "cross_entropy.cu",
        text: include_str!("cross_entropy.cu"),
        kernels: &["cross_entropy_forward", "cross_entropy_forward_backward"],
    },
    Source {
        file: "adamw.cu",
        text: include_str!("adamw.cu"),
        kernels: &["adamw"],
    },
];
