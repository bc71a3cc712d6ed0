//! `evenkeel plan --estimate --model MODEL`: a batch to start with, without a recipe.

use std::process::ExitCode;

use anyhow::{Context, bail};

use super::text;
use crate::batch::{self, PlanRequest, Start};
use crate::cli::output::{self, Format};
use crate::cli::{EXIT_REFUSED, render};
use crate::recipe::{ReadError, Recipe, Request, read_text};
use crate::words::count;

/// The recipe that stands for a model, under overrides.
pub fn recipe(model: &str, overrides: &[String]) -> anyhow::Result<Result<Recipe, ReadError>> {
    let text = batch::starter(model).with_context(|| {
        format!("no shape of about {model} parameters is known: give a hub id, or a recipe with the model's `config`")
    })?;
    let request = Request {
        path: "estimate".into(),
        overrides: overrides.to_vec(),
        ..Request::default()
    };
    Ok(read_text(&request, text))
}

/// Prints what to start with.
pub fn print(recipe: &Recipe, request: &PlanRequest, format: Format) -> anyhow::Result<ExitCode> {
    let Some(start) = batch::start(recipe, request) else {
        let path = recipe.spec.model.path.as_deref().unwrap_or_default();
        bail!(
            "the shape of `{path}` is not known: give its `config.json` keys as `model.config.hidden_size=…`"
        );
    };
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
