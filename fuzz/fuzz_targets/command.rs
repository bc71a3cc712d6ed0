#![no_main]

use evenkeel_fuzz::read_as;
use libfuzzer_sys::fuzz_target;

// A script, or a file of arguments; what it is for is found out from what it says. Nothing that it
// names is there: the fuzzer must not read this machine's files.
fuzz_target!(|text: &str| {
    let names_files = [".yaml", ".yml", ".json", "config", "deepspeed", "chat_template"];
    if names_files.iter().any(|word| text.contains(word)) {
        return;
    }
    let path = if text.len() % 2 == 0 { "run.sh" } else { "train.args" };
    read_as(None, path, text, Vec::new());
});
