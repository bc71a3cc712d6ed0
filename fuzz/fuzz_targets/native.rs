#![no_main]

use evenkeel_fuzz::read;
use evenkeel_fuzz::recipe::Dialect;
use libfuzzer_sys::fuzz_target;

// Wraps a text that does not begin with `apiVersion` as the `spec` of a recipe, so the fuzzer need
// not discover the wrapper first.
fuzz_target!(|text: &str| {
    if text.starts_with("apiVersion") {
        read(Dialect::Native, "recipe.yaml", text, Vec::new());
    } else {
        let spec: String = text.lines().map(|line| format!("  {line}\n")).collect();
        let text = format!("apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n{spec}");
        read(Dialect::Native, "recipe.yaml", &text, Vec::new());
    }
});
