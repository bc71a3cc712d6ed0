//! The request of a launch and the result of its preparation, for new and resumed runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::RunState;
use super::model::ResolvedModel;
use super::names::{Missing, MissingData};
use crate::hub::Repo;
use crate::lifecycle::stall::{OnStall, ProgressDeadline};
use crate::plan::{DeviceMemory, Draft, OomPolicy, Plan, Reached, Runner, Worlds};
use crate::recipe::{Recipe, Spec};
use crate::train::Run;

/// The command line's additions to the recipe.
#[derive(Debug, Clone)]
pub struct Request {
    pub recipe_path: PathBuf,
    pub overrides: Vec<String>,
    /// The whole command after `evenkeel`, as typed.
    pub command_line: Vec<String>,
    /// What runs the recipe.
    pub runner: Runner,
    /// Memory of the devices, if known.
    pub device_memory: Option<DeviceMemory>,
    /// Reaction to out-of-memory before the first checkpoint.
    pub oom_policy: OomPolicy,
    /// CPU cores shared by the ranks.
    pub cores: u64,
    /// Ids of the GPUs that ranks can take; empty if they compute on the CPU.
    pub gpus: Vec<String>,
    /// How many of them can train together.
    pub gpus_together: usize,
    /// Most ranks that one machine runs, unless they are fewer.
    pub most_on_a_host: u64,
    /// Time that ranks may take without progress.
    pub progress_deadline: ProgressDeadline,
    pub on_stall: OnStall,
    /// Bucket for the checkpoints of a new run, with a prefix that runs may share.
    pub bucket: Option<String>,
    /// Resume the run in the directory.
    pub resume: bool,
    /// Number of signals received; one stops the preparation.
    pub signals: Arc<AtomicUsize>,
}

impl Request {
    /// The request of a recipe without options.
    pub fn of(recipe_path: PathBuf, runner: Runner) -> Request {
        Request {
            recipe_path,
            overrides: Vec::new(),
            command_line: Vec::new(),
            runner,
            device_memory: None,
            oom_policy: OomPolicy::default(),
            cores: 1,
            gpus: Vec::new(),
            gpus_together: 0,
            most_on_a_host: u64::MAX,
            progress_deadline: ProgressDeadline::default(),
            on_stall: OnStall::default(),
            bucket: None,
            resume: false,
            signals: Arc::default(),
        }
    }

    /// Whether a signal was received.
    pub(super) fn stopped(&self) -> bool {
        self.signals.load(Ordering::Relaxed) > 0
    }
}

/// A recipe that passed all checks for a launch.
pub struct Planned {
    /// The plan of the first generation.
    pub plan: Plan,
    /// The same world with the findings of the rules.
    pub draft: Draft,
    /// The state of the run that it continues.
    pub(super) reached: Reached,
    /// The worlds that the recipe may have on this machine.
    pub worlds: Worlds,
    pub(super) model: ResolvedModel,
    /// The recipe with snapshots of the hub's cache in place of names.
    pub(super) settled: Spec,
    /// What the launch downloads first of models.
    pub missing: Vec<Missing>,
    /// The sources of data that it downloads.
    pub missing_data: Vec<MissingData>,
}

impl Planned {
    /// The repositories of the hub that the launch downloads, each once.
    pub fn downloads(&self) -> Vec<&Repo> {
        let models = self.missing.iter().map(|missing| &missing.repo);
        let data = self.missing_data.iter().map(|missing| &missing.repo);
        let mut repos = Vec::new();
        for repo in models.chain(data) {
            if !repos.contains(&repo) {
                repos.push(repo);
            }
        }
        repos
    }

    /// The worlds of the run, which keeps what it was launched with.
    pub(super) fn of_run(&self, run: &Run) -> Worlds {
        let run_dir = Some((&run.spec, run.runner()));
        self.worlds.clone().with(run_dir, run.data_samples)
    }
}

/// A run that is ready for its launcher.
pub struct Prepared {
    pub run: Run,
    /// The worlds that the run may have.
    pub worlds: Worlds,
    /// State left by an earlier launcher.
    pub state: Option<RunState>,
    /// Recipe of the external trainer, written again for every generation; `None` for the built-in
    /// trainer.
    pub external: Option<Recipe>,
    /// Notes for the user, one per line.
    pub notes: Vec<String>,
    /// What was made of the recipe, one per line.
    pub facts: Vec<String>,
}

impl Prepared {
    /// The formula of the batch with which the run starts or resumes.
    pub fn formula(&self, planned: &Planned) -> String {
        // Old ranks may have committed more since the plan was made.
        let reached = self.state.clone().unwrap_or_default().reached(&self.run);
        let plan = self.worlds.plan(planned.plan.facts.world_size, reached);
        plan.as_ref()
            .unwrap_or(&planned.plan)
            .formula_at(reached.batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::PrepareRequest;
    use crate::launch::testing::Launched;
    use crate::recipe::Dialect;

    #[test]
    fn data_keys_follow_the_runs_dialect() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(
            place.path(),
            "batch: {global: 12, per_device_batch_size: 2}",
            &[],
        );
        let named = |dialect| {
            let run = Run {
                dialect,
                ..launched.prepared.run.clone()
            };
            let recipe = run.recipe();
            let key = recipe.keys();
            let data = PrepareRequest::of(&recipe.spec, &key, None, place.path(), place.path());
            (data.key)("data.train")
        };
        assert_eq!(named(Dialect::Native), "data.train");
        assert_eq!(named(Dialect::HandbookTrl), "evenkeel.data.train");
    }
}
