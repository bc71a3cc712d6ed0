#![no_main]

use evenkeel_fuzz::check_tree;
use evenkeel_fuzz::recipe::syntax::yaml;
use evenkeel_fuzz::recipe::{Severity, Sources};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let mut sources = Sources::default();
    let file = sources.add("recipe.yaml", text);
    let mut diagnostics = Vec::new();
    match yaml::parse(text, file, &mut diagnostics) {
        Some(root) => check_tree(&root, text),
        None => assert!(diagnostics.iter().any(|d| d.severity == Severity::Error)),
    }
});
