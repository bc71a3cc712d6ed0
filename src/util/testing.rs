//! Shared parts of unit tests.

use std::path::Path;
use std::process::Command;

/// Writes a script for a shell as an executable file. A separate process does it: a parallel test may fork a child of
/// this process, which would keep the file open for writing while it is executed.
pub fn write_program(path: &Path, script: &str) {
    let written = Command::new("sh")
        .args([
            "-c",
            "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\" && chmod +x \"$0\"",
        ])
        .args([path.as_os_str(), script.as_ref()])
        .status();
    assert!(written.unwrap().success());
}

/// Asserts that a generated file of the repository has this text. With `UPDATE` set, writes it.
pub fn is_kept(path: &str, text: &str) {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(whole.parent().unwrap()).unwrap();
        std::fs::write(&whole, text).unwrap();
    }
    let kept = std::fs::read_to_string(&whole).unwrap_or_default();
    assert!(
        kept == text,
        "{path} is not current: UPDATE=1 cargo test --lib"
    );
}
