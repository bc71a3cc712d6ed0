#![no_main]

use evenkeel_fuzz::read;
use evenkeel_fuzz::recipe::Dialect;
use libfuzzer_sys::fuzz_target;

// A text that does not begin with the native form's first key is taken as the spec below it, so
// that the fuzzer need not find the wrapper first.
fuzz_target!(|text: &str| {
    if text.starts_with("apiVersion") {
        read(Dialect::Native, "recipe.yaml", text, Vec::new());
    } else {
        let spec: String = text.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!("apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n{spec}");
        read(Dialect::Native, "recipe.yaml", &text, Vec::new());
    }
});
