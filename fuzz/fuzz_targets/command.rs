#![no_main]

use std::path::PathBuf;

use evenkeel_fuzz::{read_as, read_beside};
use libfuzzer_sys::fuzz_target;

// A script or a file of arguments, whose dialect follows from its content. NULs separate it from the files that it
// may name: an accelerate config, a recipe, a DeepSpeed config.
fuzz_target!(|text: &str| {
    let mut parts = text.split('\0');
    let script = parts.next().unwrap_or_default();
    let path = if text.len() % 2 == 0 { "run.sh" } else { "train.args" };
    let file = |name| (PathBuf::from(name), parts.next().unwrap_or_default().to_owned());
    read_beside(path, script, ["a.yaml", "r.yaml", "d.json"].map(file).into_iter().collect());
    // The text alone is also written for another world. The fuzzer must not read files of this machine.
    let names_files = [".yaml", ".yml", ".json", "config", "deepspeed", "chat_template"];
    if !names_files.iter().any(|word| script.contains(word)) {
        read_as(None, path, script, Vec::new());
    }
});
