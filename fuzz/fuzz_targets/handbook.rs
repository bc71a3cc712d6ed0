#![no_main]

use evenkeel_fuzz::read;
use evenkeel_fuzz::recipe::Dialect;
use libfuzzer_sys::fuzz_target;

// Parts after a NUL are overrides. The text's length selects the folder, so every trainer is
// covered.
fuzz_target!(|text: &str| {
    let mut parts = text.split('\0');
    let recipe = parts.next().unwrap_or_default();
    let overrides = parts.map(str::to_owned).collect();
    let folders = ["sft", "dpo", "kto", "orpo", "simpo", "grpo", "ppo", "reward", "x"];
    let path = format!("{}/config.yaml", folders[recipe.len() % folders.len()]);
    read(Dialect::HandbookTrl, &path, recipe, overrides);
});
