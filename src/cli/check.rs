//! `evenkeel check`: reports every problem of one or more recipes, as text or as data.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use serde::Serialize;

use super::output::{self, Format};
use super::recipe_args::{RecipeOptions, TrainerChoice};
use super::render::{self, sarif};
use super::{EXIT_REFUSED, first_set, needs, unread};
use crate::launch::{self, survey, with_inputs};
use crate::plan::{self, DeviceKind, PlanRequest, Runner};
use crate::recipe::{Diagnostic, Dialect, Located, Severity, Sources, diagnostic};

/// Check recipes against every rule.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  evenkeel check recipes/*/sft/*.yaml --recipe-gpus 8
  evenkeel check recipe.yaml --gpus 6 -o json
  evenkeel check HALOs/config loss=dpo model=llama exp_name=x --gpus 8
  evenkeel check recipes/*.yaml ds_config.json run.sh -o sarif > evenkeel.sarif

Without --gpus every recipe is checked in the world that it states.
Exit codes: 0 no errors, 1 a rule refuses a recipe, 2 invalid arguments or a
file that cannot be read.")]
pub struct Args {
    /// Recipe files, or folders of config trees; an argument with `=` that is not a file overrides
    /// a key of all of them, as for `plan`
    #[arg(required = true, value_name = "RECIPE")]
    recipes: Vec<PathBuf>,

    #[command(flatten)]
    options: RecipeOptions,

    /// What runs the recipes; its own rules apply too [default: any: the rules that hold for every trainer]
    #[arg(long, value_enum, value_name = "TRAINER")]
    trainer: Option<TrainerChoice>,

    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Output::Text)]
    output: Output,
}

/// Output format of the problems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// Plain text
    Text,
    /// One JSON document
    Json,
    /// The JSON document as YAML
    Yaml,
    /// SARIF 2.1.0, for code review
    Sarif,
}

/// Result for one recipe; the schema of `-o json`.
#[derive(Serialize)]
struct Checked {
    recipe: PathBuf,
    dialect: Option<Dialect>,
    diagnostics: Vec<Located>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let alone = args.options.gpus_per_node.is_some() && args.options.nodes.is_none();
    needs(first_set(&[("--gpus-per-node", alone)]), "--nodes")?;
    let base = launch::base()?;
    let hub = args.options.hub();
    let mut code = 0;
    let mut checked = Vec::new();
    let (overrides, recipes) = sort(&args.recipes);
    if recipes.is_empty() {
        bail!("the arguments are only overrides; add a recipe");
    }
    let mut results = Vec::new();
    for path in recipes {
        let (dialect, sources, diagnostics) = match args.options.read(path, &overrides) {
            Ok(recipe) => {
                // The requested world, else the recipe's, so that the result does not depend on
                // this machine.
                let default_world = || plan::default_world(&recipe.spec);
                let gpus = args.options.world().unwrap_or_else(default_world);
                let asked = TrainerChoice::asked(args.trainer);
                let runner = Runner::of(&recipe.spec, asked, DeviceKind::Cuda, None);
                let request = PlanRequest {
                    gpus_per_node: args.options.gpus_per_node,
                    ..PlanRequest::of(runner, gpus)
                };
                let request = survey(&recipe, &base, request, &hub);
                let mut found = plan::examine(&recipe, &request).findings;
                if recipe.dialect == Dialect::Accelerate {
                    pass_worlds(&mut found);
                }
                // An upstream recipe usually runs in upstream's trainer. Differences of the
                // built-in trainer are reported by `plan` and `launch`.
                if recipe.dialect != Dialect::Native && !runner.is_built_in() {
                    found.retain(|problem| problem.rule != "trainer-numerics");
                }
                (Some(recipe.dialect), recipe.sources, found)
            }
            Err(error) => {
                let asked = TrainerChoice::asked(args.trainer);
                let error = with_inputs(error, asked, &base, &hub);
                code = code.max(unread(&error));
                (None, error.sources, error.diagnostics)
            }
        };
        if diagnostic::has_error(&diagnostics) {
            code = code.max(EXIT_REFUSED);
        }
        match args.output {
            Output::Text => print_text(path, &diagnostics, &sources)?,
            Output::Sarif => results.extend(sarif::results(&sarif::Checked {
                recipe: path,
                diagnostics: &diagnostics,
                sources: &sources,
            })),
            Output::Json | Output::Yaml => {}
        }
        checked.push(Checked {
            recipe: path.clone(),
            dialect,
            diagnostics: diagnostics.iter().map(|d| d.locate(&sources)).collect(),
        });
    }
    match args.output {
        Output::Text => {}
        Output::Json => Format::Json.print(&checked)?,
        Output::Yaml => Format::Yaml.print(&checked)?,
        Output::Sarif => Format::Json.print(&sarif::document(results))?,
    }
    Ok(ExitCode::from(code))
}

/// An accelerate config has a world but no batch. Only a plan needs the batch.
fn pass_worlds(found: &mut [Diagnostic]) {
    for problem in found {
        if problem.rule == "global-batch-unknown" {
            problem.severity = Severity::Note;
        }
    }
}

/// Splits the arguments into overrides and recipes.
fn sort(arguments: &[PathBuf]) -> (Vec<String>, Vec<&PathBuf>) {
    let mut overrides = Vec::new();
    let mut recipes = Vec::new();
    for argument in arguments {
        match argument.to_str() {
            Some(text) if (text.contains('=') || text.starts_with('~')) && !argument.exists() => {
                overrides.push(text.to_owned());
            }
            _ => recipes.push(argument),
        }
    }
    (overrides, recipes)
}

fn print_text(
    path: &std::path::Path,
    diagnostics: &[Diagnostic],
    sources: &Sources,
) -> Result<(), output::Unprinted> {
    output::print(render::diagnostics(diagnostics, sources))?;
    output::line(format_args!(
        "{}: {}",
        path.display(),
        render::summary(diagnostics)
    ))
}
