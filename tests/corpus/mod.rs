//! Upstream's recipes, which are not part of this repository.

use std::path::{Path, PathBuf};

/// The corpus, absolute: `EVENKEEL_RECIPES`, or `../shared/recipes` beside the crate. `None`, and a message: it is missing.
pub fn root() -> Option<PathBuf> {
    let stated = std::env::var_os("EVENKEEL_RECIPES").map(PathBuf::from);
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/recipes");
    let root = std::path::absolute(stated.unwrap_or_else(own)).ok()?;
    let found = root.is_dir();
    if !found {
        println!(
            "SKIPPED: no corpus at {} (set EVENKEEL_RECIPES)",
            root.display()
        );
    }
    found.then_some(root)
}
