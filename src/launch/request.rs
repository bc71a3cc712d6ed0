//! What a launch is asked for, and what its preparation comes to, be it new or resumed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::model::Found;
use super::{RunState, worlds};
use crate::batch::{OomPolicy, Plan, PlanRequest};
use crate::engine::ModelConfig;
use crate::recipe::{Diagnostic, Recipe};
use crate::train::Setup;
use crate::train::data::PrepareRequest;

/// What the command line adds to the recipe.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The recipe's file.
    pub recipe_path: PathBuf,
    /// The overrides.
    pub overrides: Vec<String>,
    /// Bytes that a rank may use.
    pub rank_memory: Option<u64>,
    /// What follows when memory runs out before anything is trained.
    pub oom_policy: OomPolicy,
    /// Cores to share out.
    pub cores: u64,
    /// Go on with what the directory holds.
    pub resume: bool,
    /// Signals so far: one stops the preparation.
    pub signals: Arc<AtomicUsize>,
}

impl Request {
    /// Whether a signal came.
    pub(super) fn stopped(&self) -> bool {
        self.signals.load(Ordering::Relaxed) > 0
    }
}

/// A recipe that may be launched: what every further step takes for granted.
pub struct Planned {
    /// The plan of the first generation.
    pub plan: Plan,
    /// The warnings that come with it.
    pub diagnostics: Vec<Diagnostic>,
    /// What was planned.
    pub(super) request: PlanRequest,
    /// The model that it names.
    pub(super) model: Found,
}

/// A run that is ready for its launcher.
pub struct Prepared {
    /// The run.
    pub setup: Setup,
    /// Where an earlier launcher left it.
    pub state: Option<RunState>,
    /// The recipe, where the user's own program trains: it is written anew for every generation.
    pub own: Option<Recipe>,
    /// What people should know about it, a line each.
    pub notes: Vec<String>,
}

impl Prepared {
    /// The arithmetic of the batch that it begins or goes on with.
    pub fn proof(&self, planned: &Planned) -> String {
        let Some(state) = &self.state else {
            return planned.plan.proof.clone();
        };
        // Its old ranks may have committed more since it was planned.
        let reached = state.reached(&self.setup);
        let plan = worlds::plan(&self.setup, planned.plan.outline.world_size, reached);
        plan.as_ref()
            .unwrap_or(&planned.plan)
            .proof_at(reached.batch)
    }
}

/// The data of a recipe, to be looked at, or prepared into `directory`. `key` is the recipe's own
/// ([`Recipe::keys`]); without a `model` nobody asks whether its vocabulary is large enough.
pub fn data_of<'a>(
    recipe: &'a Recipe,
    key: &'a dyn Fn(&str) -> String,
    model: Option<&ModelConfig>,
    base: &'a Path,
    directory: &'a Path,
) -> PrepareRequest<'a> {
    let spec = &recipe.spec;
    PrepareRequest {
        data: &spec.data,
        tokenizer: &spec.tokenizer,
        objective: spec.objective,
        seed: spec.seed,
        model: spec.model.path.as_deref(),
        vocab_size: model.map(|model| model.vocab_size as u64),
        base,
        directory,
        resume: false,
        fingerprint: None,
        key,
        stopped: &|| false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;
    use crate::recipe::Dialect;

    #[test]
    fn the_data_of_a_run_are_named_by_the_keys_of_its_dialect() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), "batch: {global: 12, micro: 2}", &[]);
        let named = |dialect| {
            let setup = Setup {
                dialect,
                ..launched.prepared.setup.clone()
            };
            let recipe = setup.recipe();
            let key = recipe.keys();
            let data = data_of(&recipe, &key, None, place.path(), place.path());
            (data.key)("data.train")
        };
        assert_eq!(named(Dialect::Native), "data.train");
        assert_eq!(named(Dialect::HandbookTrl), "evenkeel.data.train");
    }
}
