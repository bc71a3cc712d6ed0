#![no_main]

use std::path::PathBuf;

use evenkeel_fuzz::recipe::Dialect;
use evenkeel_fuzz::{read, read_tree};
use libfuzzer_sys::fuzz_target;

// NULs separate the root, two options of `model`, one of `loss`, and overrides. The text's length
// selects the tree's dialect.
fuzz_target!(|text: &str| {
    let mut parts = text.split('\0');
    let names = ["config.yaml", "model/a.yaml", "model/b.yaml", "loss/c.yaml"];
    let file = |name| (PathBuf::from(name), parts.next().unwrap_or_default().to_owned());
    let files = names.map(file).into_iter().collect();
    let overrides: Vec<String> = parts.map(str::to_owned).collect();
    let dialect = match text.len() % 2 {
        0 => Dialect::Halos,
        _ => Dialect::Dpo,
    };
    read_tree(dialect, files, overrides.clone());
    // Reads the root alone, without its tree.
    read(dialect, "config.yaml", text.split('\0').next().unwrap_or_default(), overrides);
});
