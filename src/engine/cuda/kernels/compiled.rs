//! NVRTC compiles every kernel without a warning for every target architecture.

use libloading::Library;

use super::super::libraries::{self, DIRECTORIES, NVRTC};
use super::{HEADERS, PRECISIONS, SOURCES, nvrtc};

/// A100, H100 and B200.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// NVRTC; `None`, after printing the reason, when it is missing.
fn found() -> Option<Library> {
    match NVRTC.open(&libraries::directories()) {
        Ok(library) => Some(library),
        Err(problem) => {
            // In CI, scripts/test.sh has installed NVRTC.
            assert_ne!(
                std::env::var("CI").as_deref(),
                Ok("true"),
                "NVRTC is {problem} (or set {DIRECTORIES})"
            );
            eprintln!("skipped: no kernel was compiled, NVRTC is {problem} (or set {DIRECTORIES})");
            None
        }
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(library) = found() else { return };
    for source in SOURCES {
        for architecture in ARCHITECTURES {
            for precision in PRECISIONS {
                let architecture = format!("--gpu-architecture={architecture}");
                let options = [&[architecture.as_str()], precision].concat();
                let text = (source.file, source.text);
                let compiled = nvrtc::compile(&library, text, &HEADERS, &options);
                let at = format!("{} with {options:?}", source.file);
                let code = compiled
                    .code
                    .unwrap_or_else(|| panic!("{at}: {}", compiled.log));
                assert_eq!(compiled.log, "", "{at}");
                for kernel in source.kernels {
                    let section = format!(".text.{kernel}\0");
                    let mut windows = code.windows(section.len());
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
        SOURCES.len()
    );
}

#[test]
fn a_compile_error_is_reported_with_its_line() {
    let Some(library) = found() else { return };
    let wrong = (
        "wrong.cu",
        "#include \"block.cuh\"\n__global__ void f() { g(); }",
    );
    let compiled = nvrtc::compile(&library, wrong, &HEADERS, &["--gpu-architecture=sm_80"]);
    assert_eq!(compiled.code, None);
    assert!(
        compiled.log.starts_with("wrong.cu(2): error"),
        "{}",
        compiled.log
    );
}
