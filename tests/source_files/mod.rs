//! The files of `src`, for tests that read the source code.

use std::fs;
use std::path::{Path, PathBuf};

/// The Rust files below a directory that are not compiled for tests only.
pub fn below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy();
        if ["tests", "testing", "corpus"].contains(&stem.as_ref()) {
            continue;
        }
        if path.is_dir() {
            found.extend(below(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

/// Whether attributes compile an item for tests only.
#[allow(dead_code, reason = "one of the tests only lists the files")]
pub fn for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .parse_args::<syn::Ident>()
                .is_ok_and(|condition| condition == "test")
    })
}

/// The names of a path, without generic arguments.
#[allow(dead_code, reason = "one of the tests only lists the files")]
pub fn names(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|s| s.ident.to_string()).collect()
}
