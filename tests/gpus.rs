//! `evenkeel gpus` with CUDA libraries that are too old, broken or odd. The libraries are real
//! shared objects, compiled here by the system's C compiler.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// Compiles a shared object that imitates the library of this name.
fn compile(path: &Path, source: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let text = path.with_extension("c");
    std::fs::write(&text, source).unwrap();
    let mut cc = Command::new("cc");
    let made = cc.args(["-shared", "-fPIC", "-o"]).arg(path).arg(&text);
    assert!(made.status().unwrap().success(), "{source}");
}

/// Whether a C compiler exists; prints a message if not.
fn compiler() -> bool {
    let there = Command::new("cc").arg("--version").output().is_ok();
    if !there {
        eprintln!("skipped: no C compiler (cc) to make libraries with");
    }
    there
}

/// Output of the command with a variable that points to libraries.
fn gpus(variable: &str, directory: &Path, format: &str) -> String {
    let mut evenkeel = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    let output = evenkeel
        .args(["gpus", "-o", format])
        .env_remove("EVENKEEL_CUDA_LIBRARIES")
        .env_remove("VIRTUAL_ENV")
        .env(variable, directory)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn old_broken_and_odd_libraries_are_distinguished() {
    if !compiler() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    compile(
        &file("libcuda.so.1"),
        "int cuDriverGetVersion(int *version) { *version = 11080; return 0; }",
    );
    // A library without the version function.
    compile(&file("libcublasLt.so.12"), "int nothing;");
    std::fs::write(file("libnvrtc.so.12"), "text\n".repeat(1000)).unwrap();
    compile(
        &file("libnccl.so.2"),
        "int ncclGetVersion(int *version) { return 3; }",
    );

    let gpus = |format| gpus("EVENKEEL_CUDA_LIBRARIES", directory.path(), format);
    let report: Value = serde_json::from_str(&gpus("json")).unwrap();
    let problem = |file: &str| {
        let libraries = report["cuda_libraries"].as_array().unwrap();
        let library = libraries.iter().find(|l| l["file"] == file).unwrap();
        assert_eq!(
            library["path"],
            json!(directory.path().join(file)),
            "{library}"
        );
        assert_eq!(library["version"], Value::Null, "{library}");
        library["problem"].clone()
    };
    let driver = problem("libcuda.so.1");
    assert_eq!(driver["kind"], "too_old");
    assert_eq!(
        (&driver["version"], &driver["needed"]),
        (&json!("11.8"), &json!("12.0"))
    );
    for (file, words) in [
        ("libcublasLt.so.12", "cublasLtGetVersion"),
        ("libnvrtc.so.12", "invalid ELF header"),
        ("libnccl.so.2", "ncclGetVersion gives error 3"),
    ] {
        let problem = problem(file);
        assert_eq!(problem["kind"], "broken", "{problem}");
        assert!(
            problem["words"].as_str().unwrap().contains(words),
            "{problem}"
        );
    }

    let text = gpus("text");
    let line = text
        .lines()
        .find(|line| line.starts_with("driver "))
        .unwrap();
    assert!(
        line.contains("11.8 is too old, 12.0 is needed: install NVIDIA's driver"),
        "{line}"
    );
}

#[test]
fn libraries_of_wheels_are_found_with_their_versions() {
    if !compiler() {
        return;
    }
    let environment = tempfile::tempdir().unwrap();
    let packages = environment.path().join("lib/python3.12/site-packages");
    let wheel = |path: &str| packages.join("nvidia").join(path);
    compile(
        &wheel("cublas/lib/libcublasLt.so.12"),
        "unsigned long cublasLtGetVersion(void) { return 120901; }",
    );
    compile(
        &wheel("cuda_nvrtc/lib/libnvrtc.so.12"),
        "int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 9; return 0; }",
    );
    compile(
        &wheel("nccl/lib/libnccl.so.2"),
        "int ncclGetVersion(int *version) { *version = 22703; return 0; }",
    );
    for (variable, directory) in [
        ("EVENKEEL_CUDA_LIBRARIES", packages.as_path()),
        ("VIRTUAL_ENV", environment.path()),
    ] {
        let report: Value = serde_json::from_str(&gpus(variable, directory, "json")).unwrap();
        let libraries = report["cuda_libraries"].as_array().unwrap();
        for (name, version) in [("cuBLASLt", "12.9"), ("NVRTC", "12.9"), ("NCCL", "2.27")] {
            let library = libraries.iter().find(|l| l["name"] == name).unwrap();
            assert_eq!(library["version"], version, "{variable}: {library}");
            assert_eq!(library["problem"], Value::Null, "{variable}: {library}");
        }
    }
}

#[test]
fn a_variable_without_a_directory_is_ignored() {
    for place in ["", "/nonexistent", "::", "/dev/null", "/proc/self/mem"] {
        let report = gpus("EVENKEEL_CUDA_LIBRARIES", Path::new(place), "json");
        let report: Value = serde_json::from_str(&report).unwrap();
        let libraries = report["cuda_libraries"].as_array().unwrap();
        assert_eq!(libraries.len(), 5, "{place}");
        // Any library found then comes from the loader's search path.
        assert!(
            libraries
                .iter()
                .all(|library| library["path"] == Value::Null),
            "{place}: {report}"
        );
    }
}
