#![no_main]

use evenkeel_fuzz::read;
use evenkeel_fuzz::recipe::Dialect;
use libfuzzer_sys::fuzz_target;

// JSON if the text begins with a brace, else YAML.
fuzz_target!(|text: &str| {
    let json = text.trim_start().starts_with('{');
    let path = if json { "args.json" } else { "args.yaml" };
    read(Dialect::Transformers, path, text, Vec::new());
});
