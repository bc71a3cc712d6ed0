#![no_main]

use std::path::PathBuf;

use evenkeel_fuzz::read_command;
use libfuzzer_sys::fuzz_target;

const RECIPE: &str = "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 4\n";

// The command of an external trainer. NULs separate its words from an accelerate and a DeepSpeed config.
fuzz_target!(|text: &str| {
    let mut parts = text.split('\0');
    let command: Vec<String> = parts.next().unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    if command.is_empty() {
        return;
    }
    let mut next = || parts.next().unwrap_or_default().to_owned();
    let files = [("recipe.yaml", RECIPE.to_owned()), ("a.yaml", next()), ("d.json", next())];
    read_command(command, files.map(|(name, text)| (PathBuf::from(name), text)).into_iter().collect());
});
