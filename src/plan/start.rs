//! A starting per-device batch for a model without a recipe.
//!
//! The rule of thumb of transformers (4 samples of a 7B model on a GPU of 24 GB, 2 of a
//! 13B model, model parallelism for 70B) equals this estimate for adapters on a base in 4
//! bits, with sequences of 2048 tokens: the training that such a GPU can hold. Full training takes
//! ten times the memory; request it with the recipe's keys (`model.adapters=false`).

use serde::Serialize;

use super::batch_plan::MemoryEstimate;
use super::memory::Memory;
use super::request::PlanRequest;
use super::{draft, planner};
use crate::recipe::{Diagnostic, Located, Recipe};

/// The share of a device's memory that a proposal uses. It is below that of a run, like the rule of thumb,
/// which covers cards of 24 GB and of 24 GiB.
const SHARE: f64 = 0.8;

/// The largest proposal: more samples at once gain nothing on one device.
const MOST: u64 = 4096;

/// A proposal to start with.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Start {
    /// The largest power of two that fits a device; `None`: not even one sample fits.
    pub per_device_batch_size: Option<u64>,
    /// Devices over all axes.
    pub world_size: u64,
    pub data_parallel_size: u64,
    /// The memory of that micro-batch, with the assumptions; of a single sample if none fits.
    pub memory: MemoryEstimate,
    /// Findings of the rules about memory.
    pub diagnostics: Vec<Located>,
    /// The same findings, for display.
    #[serde(skip)]
    pub found: Vec<Diagnostic>,
}

/// Proposes a batch. `None`: the model's shape or the devices' memory is unknown, or the axes do
/// not divide the devices.
pub fn start(recipe: &Recipe, request: &PlanRequest) -> Option<Start> {
    let spec = &recipe.spec;
    let ranks = draft::ranks(request.gpus, &spec.parallel)?;
    request.device_memory?;
    let memory = Memory::of(spec, recipe.dialect, request)?;
    let mut sizes = std::iter::successors(Some(MOST), |size| (*size > 1).then_some(size / 2));
    let per_device_batch_size = sizes.find(|&size| memory.fits_within(SHARE, ranks, size));
    // The rules need a plan; one sample a device is the smallest.
    let mut single = recipe.clone();
    single.spec.batch.global = Some(ranks);
    single.spec.batch.per_device_batch_size = Some(1);
    let mut found = planner::examine(&single, request).findings;
    found.retain(|diagnostic| diagnostic.rule == "model-needs-sharding");
    Some(Start {
        per_device_batch_size,
        world_size: request.gpus,
        data_parallel_size: ranks,
        memory: memory.estimate(ranks, per_device_batch_size.unwrap_or(1)),
        diagnostics: found.iter().map(|d| d.locate(&recipe.sources)).collect(),
        found,
    })
}

/// A recipe for a model by its hub id, or by its size (`7B`), with the assumptions of the rule of
/// thumb. `None`: no known shape has that size.
pub fn starter(model: &str) -> Option<String> {
    let path = match size(model) {
        Some(parameters) => super::memory::typical(parameters)?,
        None => model,
    };
    let path = serde_json::to_string(path).ok()?;
    Some(format!(
        "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  name: estimate\n  objective: sft\n  \
         model:\n    path: {path}\n    precision: bf16\n    activation_checkpointing: true\n    \
         adapters: true\n    load_in_4bit: true\n  data: {{sequence_length: 2048}}\n"
    ))
}

/// The parameters that a size states: `7B`, `1.5b`, `350M`.
fn size(text: &str) -> Option<f64> {
    let (number, unit) = match text.strip_suffix(['B', 'b']) {
        Some(number) => (number, 1e9),
        None => (text.strip_suffix(['M', 'm'])?, 1e6),
    };
    let number: f64 = number.parse().ok()?;
    (number.is_finite() && number > 0.0).then_some(number * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{DeviceKind, Runner};
    use crate::recipe::{Request, read_text};

    fn proposed(model: &str, overrides: &[&str], gpus: u64) -> Start {
        on(24_000_000_000, model, overrides, gpus)
    }

    fn on(memory: u64, model: &str, overrides: &[&str], gpus: u64) -> Start {
        let request = Request {
            path: "estimate.yaml".into(),
            overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
            ..Request::default()
        };
        let recipe = read_text(&request, starter(model).unwrap()).unwrap();
        let device = DeviceKind::Cuda;
        let external = Runner::External { device };
        let request = PlanRequest {
            device_memory: Some(memory),
            ..PlanRequest::of(external, gpus)
        };
        start(&recipe, &request).unwrap()
    }

    #[test]
    fn estimate_agrees_with_the_rule_of_thumb() {
        assert_eq!(proposed("7B", &[], 1).per_device_batch_size, Some(4));
        assert_eq!(proposed("13B", &[], 1).per_device_batch_size, Some(2));
        // A card of "24 GB" holds 24 GiB.
        assert_eq!(on(24 << 30, "7B", &[], 1).per_device_batch_size, Some(4));
        assert_eq!(on(24 << 30, "13B", &[], 1).per_device_batch_size, Some(2));
        let large = proposed("70B", &[], 1);
        assert_eq!(large.per_device_batch_size, None);
        assert_eq!(large.found[0].rule, "model-needs-sharding");
    }

    #[test]
    fn full_training_takes_more_devices() {
        let full = ["model.adapters=false", "model.load_in_4bit=false"];
        let alone = proposed("7B", &full, 1);
        assert_eq!(alone.per_device_batch_size, None);
        let sharded = [full[0], full[1], "parallel.strategy=fsdp"];
        assert!(proposed("7B", &sharded, 16).per_device_batch_size.is_some());
    }

    #[test]
    fn sizes_are_those_of_well_known_models() {
        for (text, expected) in [
            ("7B", "meta-llama/Llama-2-7b-hf"),
            ("1b", "meta-llama/Llama-3.2-1B"),
            ("13B", "meta-llama/Llama-2-13b-hf"),
            ("350M", "HuggingFaceTB/SmolLM2-360M"),
        ] {
            assert!(starter(text).unwrap().contains(expected), "{text}");
        }
        assert_eq!(starter("30B"), None, "no known model has about that size");
        assert!(starter("acme/own").unwrap().contains("acme/own"));
    }
}
