#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use evenkeel_fuzz::recipe::Dialect;
use evenkeel_fuzz::{read, read_tree};
use libfuzzer_sys::fuzz_target;

/// The folder of this process's tree.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("evenkeel-fuzz-{}", std::process::id()));
    for group in ["model", "loss"] {
        std::fs::create_dir_all(folder.join(group)).expect("a folder for the tree");
    }
    folder
});

// Parts between NULs: the root, two options of `model` and one of `loss`, and then overrides. The
// text's length decides between the two trees that are read.
fuzz_target!(|text: &str| {
    let mut parts = text.split('\0');
    for file in ["config.yaml", "model/a.yaml", "model/b.yaml", "loss/c.yaml"] {
        let part = parts.next().unwrap_or_default();
        std::fs::write(FOLDER.join(file), part).expect("a file of the tree");
    }
    let overrides: Vec<String> = parts.map(str::to_owned).collect();
    let dialect = match text.len() % 2 {
        0 => Dialect::Halos,
        _ => Dialect::Dpo,
    };
    read_tree(dialect, &FOLDER, overrides.clone());
    // The root by itself, as where nothing stands beside it.
    read(dialect, "config.yaml", text.split('\0').next().unwrap_or_default(), overrides);
});
