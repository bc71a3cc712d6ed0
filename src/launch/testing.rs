//! Prepared runs for tests of the launcher, with no rank started.

use std::path::Path;

use super::{Planned, Prepared, Request, RunDir, prepare};
use crate::hub::Hub;
use crate::plan::{AskedRunner, DeviceKind, Reached, Runner};
use crate::recipe::{self, Recipe};

/// A run that is ready for its launcher.
pub(super) struct Launched {
    pub run_dir: RunDir,
    pub recipe: Recipe,
    pub planned: Planned,
    pub request: Request,
    pub prepared: Prepared,
}

/// A recipe written to `place`, and a launch request for it.
pub(super) fn recipe_of(place: &Path, text: &str, overrides: &[&str]) -> (Recipe, Request) {
    recipe_on(place, text, overrides, DeviceKind::Cpu)
}

fn recipe_on(
    place: &Path,
    text: &str,
    overrides: &[&str],
    device: DeviceKind,
) -> (Recipe, Request) {
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    let recipe_path = place.join("recipe.yaml");
    let reading = recipe::Request {
        path: recipe_path.clone(),
        overrides: overrides.clone(),
        ..recipe::Request::default()
    };
    let recipe = recipe::read_text(&reading, text.to_owned());
    let recipe = recipe.unwrap_or_else(|error| panic!("{error:?}"));
    let runner = Runner::of(&recipe.spec, AskedRunner::Launch, device, None);
    let request = Request {
        overrides,
        ..Request::of(recipe_path, runner)
    };
    (recipe, request)
}

impl Launched {
    /// Prepares a run of a small native recipe in `place`/run. `lines`: further settings of its
    /// `spec`, one top-level key per line.
    pub fn at(place: &Path, lines: &str, overrides: &[&str]) -> Launched {
        Launched::try_at(place, lines, overrides).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Launched::at`], on these devices.
    pub fn on(place: &Path, lines: &str, device: DeviceKind) -> Launched {
        Launched::prepare(place, lines, &[], device).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Launched::at`], for a run that may be refused.
    pub fn try_at(place: &Path, lines: &str, overrides: &[&str]) -> Result<Launched, String> {
        Launched::prepare(place, lines, overrides, DeviceKind::Cpu)
    }

    fn prepare(
        place: &Path,
        lines: &str,
        overrides: &[&str],
        device: DeviceKind,
    ) -> Result<Launched, String> {
        let data = "data: {sequence_length: 8, train: [{path: synthetic, synthetic: \
                    {vocabulary: 16, branching: 4, samples: 100}}]}";
        let lines = if lines.contains("data:") {
            lines.to_owned()
        } else {
            format!("{lines}\n{data}")
        };
        let text = format!(
            "apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {{name: run}}
spec:
  objective: language-modelling
  model: {{config: {{hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, \
             num_attention_heads: 2, num_key_value_heads: 1, vocab_size: 300, \
             max_position_embeddings: 16}}}}
  budget: {{samples: 48}}
  {}
",
            lines.replace('\n', "\n  ")
        );
        let (recipe, request) = recipe_on(place, &text, overrides, device);
        let run_dir = RunDir::at(place.join("run"));
        std::fs::create_dir_all(run_dir.path()).unwrap();
        let planned = prepare::plan(
            &recipe,
            2,
            Reached::default(),
            request.runner,
            (None, request.oom_policy),
            &Hub::none(),
        );
        let planned = planned.unwrap();
        let prepared = prepare::prepare(&run_dir, &recipe, &planned, &request, &mut |_| {})
            .map_err(|error| error.to_string())?;
        Ok(Launched {
            run_dir,
            recipe,
            planned,
            request,
            prepared,
        })
    }

    /// Prepares the run again for a resume.
    pub fn resume(&self, change: impl FnOnce(&mut Request)) -> Result<Prepared, String> {
        let mut request = Request {
            resume: true,
            ..self.request.clone()
        };
        change(&mut request);
        prepare::prepare(
            &self.run_dir,
            &self.recipe,
            &self.planned,
            &request,
            &mut |_| {},
        )
        .map_err(|error| error.to_string())
    }
}
