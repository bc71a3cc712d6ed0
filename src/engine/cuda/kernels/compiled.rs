//! NVRTC compiles every kernel without a warning for every target architecture.

use super::super::error::CudaError;
use super::super::libraries::DIRECTORIES;
use super::super::nvrtc::{Nvrtc, Source};
use super::super::options::Precision;
use super::{ATTENTION_BF16, ATTENTION_F32, ATTENTION_WGMMA, HEADERS, Kernels, SOURCES};

/// A100, H100 and B200.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// NVRTC; `None`, after printing the reason, when it is missing.
fn found() -> Option<Nvrtc> {
    match Nvrtc::load(None) {
        Ok(nvrtc) => Some(nvrtc),
        Err(problem) => {
            // In CI, scripts/test.sh has installed NVRTC.
            assert_ne!(
                std::env::var("CI").as_deref(),
                Ok("true"),
                "{problem} (or set {DIRECTORIES})"
            );
            eprintln!("skipped: no kernel was compiled, {problem} (or set {DIRECTORIES})");
            None
        }
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(nvrtc) = found() else { return };
    let portable = SOURCES.iter().chain([&ATTENTION_F32, &ATTENTION_BF16]);
    let mut all: Vec<(&Kernels, &[&str])> = portable.map(|of| (of, &ARCHITECTURES[..])).collect();
    all.push((&ATTENTION_WGMMA, &["sm_90a"]));
    for (kernels, architectures) in &all {
        for &architecture in *architectures {
            for precision in [Precision::F32, Precision::Bf16] {
                let mut options = precision.options();
                options.push("-DHEAD_DIM=64".to_owned());
                let at = format!("{} with {options:?}", kernels.source.file);
                let compiled = nvrtc
                    .compile(&kernels.source, &options, architecture)
                    .unwrap_or_else(|error| panic!("{at}: {error}"));
                assert_eq!(compiled.log, "", "{at}");
                for kernel in kernels.names {
                    let section = format!(".text.{kernel}\0");
                    let mut windows = compiled.cubin.windows(section.len());
                    assert!(
                        windows.any(|window| window == section.as_bytes()),
                        "{kernel} is not in the code of {at}"
                    );
                }
            }
        }
    }
    eprintln!(
        "compiled: {} files of kernels for {ARCHITECTURES:?}",
        all.len()
    );
}

#[test]
fn a_compile_error_is_reported_with_its_line() {
    let Some(nvrtc) = found() else { return };
    let source = Source {
        file: "wrong.cu",
        text: "#include \"block.cuh\"\n__global__ void f() { g(); }",
        headers: HEADERS,
    };
    let Err(CudaError::Compile { file, log }) = nvrtc.compile(&source, &[], "sm_80") else {
        panic!("it compiles");
    };
    assert_eq!(file, "wrong.cu");
    assert!(log.starts_with("wrong.cu(2): error"), "{log}");
}
