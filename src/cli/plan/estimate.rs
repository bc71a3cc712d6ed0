//! `evenkeel plan --estimate --model MODEL`: a batch to start with, without a recipe.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};

use super::text;
use crate::batch::{self, PlanRequest, Start, memory};
use crate::cli::output::{self, Format};
use crate::cli::{EXIT_REFUSED, render};
use crate::recipe::{ReadError, Recipe, Request, read_text};
use crate::words::count;

/// Keys of a model's `config.json`, which make a shape.
const SHAPE: &str = "model.config.";

/// The recipe that stands for a model, under overrides. `first`: the argument in a recipe's place, which
/// is an override here.
pub fn recipe(
    model: &str,
    first: Option<&Path>,
    overrides: &[String],
) -> anyhow::Result<Result<Recipe, ReadError>> {
    let first = first.map(|path| path.to_string_lossy().into_owned());
    if let Some(file) = first.as_ref().filter(|text| !text.contains('=')) {
        bail!("--model {model} stands in the place of a recipe: leave `{file}` out, or --model");
    }
    let overrides: Vec<String> = first.into_iter().chain(overrides.iter().cloned()).collect();
    let shaped = overrides.iter().any(|text| text.starts_with(SHAPE));
    // Not a size then, but the name of a model that the keys describe.
    let own = shaped.then(|| batch::starter(&format!("model-of-{model}")));
    let text = own.flatten().or_else(|| batch::starter(model));
    let text = text.with_context(|| {
        format!(
            "no shape of about {model} parameters is known: the sizes are {}; give one of them, a hub id, \
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

/// Refuses a model of whose shape nothing is known.
pub fn refuse_unknown(recipe: &Recipe, request: &PlanRequest) -> anyhow::Result<()> {
    if memory::Device::of(&recipe.spec, request).is_some() {
        return Ok(());
    }
    let path = recipe.spec.model.path.as_deref().unwrap_or_default();
    bail!(
        "the shape of `{path}` is not known: give its `config.json` keys as `{SHAPE}hidden_size=…`, or a size \
         in the recipe's place, `--model 7B` (of {})",
        memory::typical_sizes().join(", ")
    );
}

/// Prints what to start with.
pub fn print(recipe: &Recipe, request: &PlanRequest, format: Format) -> anyhow::Result<ExitCode> {
    refuse_unknown(recipe, request)?;
    let start = batch::start(recipe, request)
        .with_context(|| format!("the axes do not divide {} GPUs", request.gpus))?;
    match format {
        Format::Text => output::print(told(recipe, request, &start))?,
        format => format.print(&start)?,
    }
    Ok(match start.per_device_batch_size {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::from(EXIT_REFUSED),
    })
}

fn told(recipe: &Recipe, request: &PlanRequest, start: &Start) -> String {
    let devices = request.devices.count(start.world_size);
    let mut told = match start.per_device_batch_size {
        Some(micro) => format!(
            "start with {} on {}{devices}\nthe largest power of two that fits; accumulation takes the rest of the global batch\n",
            count(micro, "sample"),
            if start.world_size == 1 {
                ""
            } else {
                "each of "
            },
        ),
        None => format!("not a single sample fits {devices}\n"),
    };
    told += &text::memory_of(&start.memory);
    let more = "change what is assumed with native keys: model.adapters=false data.sequence_length=4096 parallel.strategy=fsdp";
    told += &format!("\n{more}\n");
    if !start.found.is_empty() {
        told += "\n";
        told += &render::diagnostics(&start.found, &recipe.sources);
    }
    told
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
        batch::start(&recipe, &request).context("no shape")
    }

    #[test]
    fn what_stands_in_a_recipes_place_is_an_override() {
        let adapters = proposed("7B", None, &[]).unwrap();
        let full = proposed("7B", Some("model.adapters=false"), &[]).unwrap();
        assert!(full.per_device_batch_size < adapters.per_device_batch_size);
        let sharded = ["parallel.strategy=fsdp", "model.load_in_4bit=false"];
        let sharded = proposed("7B", Some("model.adapters=false"), &sharded).unwrap();
        assert!(sharded.per_device_batch_size > full.per_device_batch_size);
        let file = proposed("7B", Some("recipe.yaml"), &[]).unwrap_err();
        assert!(
            file.to_string().contains("leave `recipe.yaml` out"),
            "{file}"
        );
    }

    #[test]
    fn a_size_that_nothing_has_is_answered_with_those_that_are_known() {
        let unknown = proposed("34B", None, &[]).unwrap_err().to_string();
        assert!(unknown.contains("13B, 69B"), "{unknown}");
        let shape = [
            "model.config.hidden_size=8192",
            "model.config.num_hidden_layers=48",
            "model.config.vocab_size=32000",
        ];
        let told = proposed("34B", Some(shape[0]), &shape[1..]).unwrap();
        assert!(told.per_device_batch_size.is_some());
    }
}
