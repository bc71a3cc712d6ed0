//! Kernels in CUDA C, for the engine to come. Nothing launches them on a GPU yet, and nobody has: so
//! they are compiled into the tests only.
//!
//! `compiled` has NVRTC compile them for the GPUs that the engine is meant for; `compared` runs their
//! very text on the processor (`host`) and compares it with the CPU engine's arithmetic.

mod compared;
mod compiled;
mod host;
mod nvrtc;

/// A file of kernels.
struct Source {
    /// Its name in this directory.
    file: &'static str,
    /// Its text.
    text: &'static str,
    /// What can be launched.
    kernels: &'static [&'static str],
}

/// What some of them include.
const BLOCK: (&str, &str) = ("block.cuh", include_str!("block.cuh"));

/// All of them.
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
