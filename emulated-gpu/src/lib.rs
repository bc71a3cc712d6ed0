//! A GPU for tests. It executes the PTX that NVRTC compiles and checks what a real GPU does not report.

pub mod abi;
pub mod config;
pub mod cublaslt;
pub mod driver;
pub mod faults;
pub mod graph;
pub mod launch;
pub mod machine;
pub mod memory;
pub mod nccl;
pub mod nvml;
mod program;
pub mod ptx;
pub mod race;
pub mod report;
pub mod scripted;
pub mod status;
pub mod stream;

use std::io;
use std::path::{Path, PathBuf};

use launch::{LoadError, Program};

/// Names under which programs look for NVIDIA's libraries. All are this one library, so that they share
/// their devices.
const NAMES: [&str; 5] = [
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libcublasLt.so.12",
    "libcublasLt.so.13",
    "libnccl.so.2",
];

/// Links the emulated libraries into a directory, for `EVENKEEL_CUDA_LIBRARIES` or `LD_LIBRARY_PATH`.
pub fn install(directory: &Path) -> io::Result<()> {
    let library = library()?;
    for name in NAMES {
        std::os::unix::fs::symlink(&library, directory.join(name))?;
    }
    Ok(())
}

/// The shared library that cargo built beside the running test.
fn library() -> io::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let mut places = test.ancestors().skip(1).take(2);
    let found = places.find_map(|place| {
        let path = place.join("libemulated_gpu.so");
        path.exists().then_some(path)
    });
    found.ok_or_else(|| {
        let message = format!("no libemulated_gpu.so beside {}", test.display());
        io::Error::new(io::ErrorKind::NotFound, message)
    })
}

/// Loads the text of a module: scripted kernels by their first line, else PTX.
fn load(text: &str) -> Result<Box<dyn Program>, LoadError> {
    if text.starts_with(scripted::MARK) {
        scripted::Scripted::load(text)
    } else {
        program::load(text)
    }
}
