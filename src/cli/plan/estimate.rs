//! `evenkeel plan --estimate --model MODEL`: proposes an initial batch without a recipe.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};

use super::text;
use crate::cli::output::{self, Format};
use crate::cli::{EXIT_REFUSED, render};
use crate::plan::{self, PlanRequest, Start, memory};
use crate::recipe::{ReadError, Recipe, Request, read_text};
use crate::util::format::count;

/// Prefix of the `config.json` keys that define a shape.
const SHAPE: &str = "model.config.";

/// A recipe for a model under overrides. `first` is the positional recipe argument, which counts as
/// an override here.
pub fn recipe(
    model: &str,
    first: Option<&Path>,
    overrides: &[String],
) -> anyhow::Result<Result<Recipe, ReadError>> {
    let first = first.map(|path| path.to_string_lossy().into_owned());
    if let Some(file) = first.as_ref().filter(|text| !text.contains('=')) {
        bail!("--model {model} replaces a recipe; remove `{file}` or --model");
    }
    let overrides: Vec<String> = first.into_iter().chain(overrides.iter().cloned()).collect();
    let shaped = overrides.iter().any(|text| text.starts_with(SHAPE));
    // Then `model` is a name, and the keys define the shape.
    let shape_only = shaped.then(|| plan::starter(&format!("model-of-{model}")));
    let text = shape_only.flatten().or_else(|| plan::starter(model));
    let text = text.with_context(|| {
        format!(
            "no known shape has about {model} parameters; use one of the sizes {}, a hub id, \
             or the model's own shape, `{SHAPE}hidden_size=… {SHAPE}num_hidden_layers=… {SHAPE}vocab_size=…`",
            memory::typical_sizes().join(", ")
        )
    })?;
    let request = Request {
        path: "estimate".into(),
        overrides,
        ..Request::default()
    };
    Ok(read_text(&request, text))
}

/// Refuses a model of unknown shape.
pub fn refuse_unknown(recipe: &Recipe, request: &PlanRequest) -> anyhow::Result<()> {
    if memory::Memory::of(&recipe.spec, recipe.dialect, request).is_some() {
        return Ok(());
    }
    let path = recipe.spec.model.path.as_deref().unwrap_or_default();
    bail!(
        "the shape of `{path}` is unknown; set its `config.json` keys as `{SHAPE}hidden_size=…`, or a size \
         instead of the recipe, `--model 7B` (of {})",
        memory::typical_sizes().join(", ")
    );
}

pub fn print(recipe: &Recipe, request: &PlanRequest, format: Format) -> anyhow::Result<ExitCode> {
    refuse_unknown(recipe, request)?;
    let Some(start) = plan::start(recipe, request) else {
        output::say(format_args!(
            "error: the axes do not divide {} GPUs; plan for a multiple of their product\n",
            request.gpus
        ));
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    match format {
        Format::Text => output::print(proposal(recipe, request, &start))?,
        format => format.print(&start)?,
    }
    Ok(match start.per_device_batch_size {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::from(EXIT_REFUSED),
    })
}

fn proposal(recipe: &Recipe, request: &PlanRequest, start: &Start) -> String {
    let devices = request.count(start.world_size);
    let mut text = match start.per_device_batch_size {
        Some(per_device_batch_size) => format!(
            "start with {} on {}{devices}\nthe largest power of two that fits; accumulation takes the rest of the global batch\n",
            count(per_device_batch_size, "sample"),
            if start.world_size == 1 {
                ""
            } else {
                "each of "
            },
        ),
        None => format!("no sample fits on {devices}\n"),
    };
    text += &text::memory_of(&start.memory);
    let more = "change the assumptions with native keys: model.adapters=false data.sequence_length=4096 parallel.strategy=fsdp";
    text += &format!("\n{more}\n");
    if !start.found.is_empty() {
        text += "\n";
        text += &render::diagnostics(&start.found, &recipe.sources);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposed(model: &str, first: Option<&str>, overrides: &[&str]) -> anyhow::Result<Start> {
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        let recipe = recipe(model, first.map(Path::new), &overrides)??;
        let request = PlanRequest {
            device_memory: Some(80_000_000_000),
            ..PlanRequest::gpus(8)
        };
        plan::start(&recipe, &request).context("no shape")
    }

    #[test]
    fn the_recipe_argument_is_an_override_with_a_model() {
        let adapters = proposed("7B", None, &[]).unwrap();
        let full = proposed("7B", Some("model.adapters=false"), &[]).unwrap();
        assert!(full.per_device_batch_size < adapters.per_device_batch_size);
        let sharded = ["parallel.strategy=fsdp", "model.load_in_4bit=false"];
        let sharded = proposed("7B", Some("model.adapters=false"), &sharded).unwrap();
        assert!(sharded.per_device_batch_size > full.per_device_batch_size);
        let file = proposed("7B", Some("recipe.yaml"), &[]).unwrap_err();
        assert!(file.to_string().contains("remove `recipe.yaml`"), "{file}");
    }

    #[test]
    fn an_unknown_size_lists_the_known_sizes() {
        let unknown = proposed("34B", None, &[]).unwrap_err().to_string();
        assert!(unknown.contains("13B, 69B"), "{unknown}");
        let shape = [
            "model.config.hidden_size=8192",
            "model.config.num_hidden_layers=48",
            "model.config.vocab_size=32000",
        ];
        let start = proposed("34B", Some(shape[0]), &shape[1..]).unwrap();
        assert!(start.per_device_batch_size.is_some());
    }
}
