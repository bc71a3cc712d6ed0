#![no_main]

use evenkeel_fuzz::read_as;
use libfuzzer_sys::fuzz_target;

// A script or a file of arguments, whose dialect follows from its content. Texts that may name a
// file are skipped: the fuzzer must not read files of this machine.
fuzz_target!(|text: &str| {
    let names_files = [".yaml", ".yml", ".json", "config", "deepspeed", "chat_template"];
    if names_files.iter().any(|word| text.contains(word)) {
        return;
    }
    let path = if text.len() % 2 == 0 { "run.sh" } else { "train.args" };
    read_as(None, path, text, Vec::new());
});
