#![no_main]

use evenkeel_fuzz::read;
use evenkeel_fuzz::recipe::Dialect;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| read(Dialect::Deepspeed, "ds_config.json", text, Vec::new()));
