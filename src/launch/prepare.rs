//! Prepares a run between its recipe and its first generation: the plan, the model's weights, the
//! data, the horizon. Every refusal happens here, before a process starts.

use std::path::{Path, PathBuf};

use super::begin::{base, begin};
use super::{LaunchError, Planned, Prepared, Request, RunDir, adapters, initial, resume, survey};
use crate::data::{self, Language, Manifest, PrepareRequest, Progress};
use crate::hub::Hub;
use crate::launch::external;
use crate::plan::{DeviceMemory, OomPolicy, PlanRequest, Reached, Runner, Worlds};
use crate::recipe::schema::spec::Synthetic;
use crate::recipe::{Recipe, Spec};
use crate::train::{BuiltIn, Run};

/// Plans a recipe for its runner on this machine, whose devices have this memory, with the models in the cache of the
/// `hub`. After an out-of-memory error the batch follows the policy.
pub fn plan(
    recipe: &Recipe,
    ranks: u64,
    reached: Reached,
    runner: Runner,
    (memory, oom_policy): (Option<DeviceMemory>, OomPolicy),
    hub: &Hub,
) -> Result<Planned, LaunchError> {
    let request = PlanRequest {
        oom_policy,
        ..PlanRequest::of(runner, ranks)
    };
    let surveyed = survey::survey_inputs(recipe, &base()?, request, hub);
    let worlds = Worlds::new(recipe.clone(), surveyed.request, memory);
    let draft = worlds.examine(ranks, reached);
    let Some(plan) = draft.plan() else {
        return Err(Box::new(draft).into());
    };
    Ok(Planned {
        plan,
        draft,
        reached,
        worlds,
        model: surveyed.model,
        settled: surveyed.settled,
        missing: surveyed.missing,
        missing_data: surveyed.missing_data,
    })
}

/// Prepares a new run in the directory, or resumes an existing one. The caller holds the run lock.
pub fn prepare(
    run_dir: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    for path in [run_dir.path(), &request.recipe_path, &base()?] {
        if path.to_str().is_none() {
            return Err(LaunchError::usage(format!(
                "the path {} is not UTF-8, as run records must be; rename it, \
                     or use another directory",
                path.display()
            )));
        }
    }
    if recipe.spec.trainer.is_external() {
        return external::prepare(run_dir, recipe, planned, request);
    }
    if request.resume {
        return resume::resume(run_dir, recipe, planned, request, progress);
    }
    let found = &planned.model;
    let key = recipe.keys();
    let model = found.shape.clone().ok_or_else(|| LaunchError::Model {
        message: format!(
            "the model's shape is unknown; set a directory with a config.json, {}=DIRECTORY, or \
             set the shape in {}",
            key("model.path"),
            key("model.config")
        ),
    })?;
    let named = &recipe.spec.model;
    let initial = initial::weights(named, found.weights.clone(), &model, &key)?;
    let data = data::prepare(
        &PrepareRequest {
            stopped: &|| request.stopped(),
            ..PrepareRequest::of(
                &planned.settled,
                &key,
                Some(&model),
                &base()?,
                &Run::data(run_dir.path()),
            )
        },
        progress,
    )?;
    let packed = data.packed();
    let manifest = data.manifest;
    refuse_without_evaluation_data(recipe, &manifest)?;
    let samples = manifest.train.samples;
    let (worlds, news) = judge(planned, samples)?;
    let trained = &planned.model.trained;
    let trained_note = trained
        .adapters
        .as_ref()
        .map(|it| adapters::described(it, &model));
    let built_in = BuiltIn {
        model,
        // Random weights have no folder that another program could read.
        base_model: (trained.base.clone())
            .filter(|_| trained.adapters.is_some() && initial.weights.is_some()),
        weights: initial.weights,
        adapters: trained.adapters.clone(),
        merged_adapters: trained.merged.clone(),
        start_adapter: trained.start.clone(),
        frozen_digest: None,
        companions: companions(&planned.settled, &base()?),
        data_fingerprint: Some(manifest.fingerprint.clone()),
        rank_memory: request.runner.rank_memory(),
        entropy: (manifest.synthetic.as_ref())
            .filter(|_| recipe.spec.is_cross_entropy())
            .and_then(entropy),
    };
    let built_in = BuiltIn {
        frozen_digest: initial::digest(&built_in, &recipe.spec)?,
        ..built_in
    };
    let run = begin(
        recipe,
        &planned.settled,
        planned,
        request,
        Some((built_in, samples)),
    )?;
    if run.horizon.budget_samples.is_none() {
        return Err(LaunchError::usage(format!(
            "no key that is read says how long to train: set {}, {} or {}",
            key("budget.samples"),
            key("budget.steps"),
            key("budget.epochs")
        )));
    }
    run_dir.write_run(&run)?;
    Ok(Prepared {
        run,
        worlds,
        state: None,
        external: None,
        facts: [packed, trained_note].into_iter().flatten().collect(),
        notes: [initial.note]
            .into_iter()
            .flatten()
            .chain(data.notes)
            .chain(news)
            .collect(),
    })
}

/// Refuses requested evaluations whose sources are all training data. The rule `eval-data-missing` refuses
/// them if there are no sources; which files a source has is known only now.
fn refuse_without_evaluation_data(recipe: &Recipe, manifest: &Manifest) -> Result<(), LaunchError> {
    let intervals = recipe.spec.evaluation.intervals();
    let (Some(asked), None) = (intervals.first(), &manifest.evaluation) else {
        return Ok(());
    };
    if recipe.spec.data.evaluation.is_empty() {
        return Ok(());
    }
    let key = recipe.keys();
    Err(LaunchError::usage(format!(
        "`{}` requests evaluations, and no evaluation data are left: files of `{}` that are also \
             training data are not evaluated on; name other files, or hold samples out with `{}`",
        key(asked),
        key("data.evaluation"),
        key("data.held_out")
    )))
}

/// Evaluates the rules that need the data's length, which is known only after counting. Returns the worlds with this
/// length, and new warnings, one per line.
fn judge(planned: &Planned, samples: u64) -> Result<(Worlds, Vec<String>), LaunchError> {
    let before = &planned.plan.facts;
    let worlds = planned.worlds.clone();
    let worlds = worlds.with(None, Some(samples));
    let plan = worlds.plan(before.world_size, planned.reached)?;
    let diagnostics = plan.facts.diagnostics.iter();
    let news = diagnostics
        .filter(|diagnostic| !before.diagnostics.contains(diagnostic))
        .map(|d| format!("{}: {}; {}", d.rule, d.message, d.help))
        .collect();
    Ok((worlds, news))
}

/// The entropy of the synthetic language, the lower bound of the loss.
fn entropy(synthetic: &Synthetic) -> Option<f64> {
    Language::new(synthetic, "synthetic")
        .ok()
        .map(|language| language.entropy)
}

/// Names of a tokenizer's files.
pub(super) const TOKENIZER: [&str; 6] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
];

/// The files of other programs that every checkpoint gets: those of the tokenizer that made the data, and what the model
/// generates by default. transformers and vLLM read `tokenizer.json`, llama.cpp also `tokenizer.model`.
fn companions(spec: &Spec, base: &Path) -> Vec<PathBuf> {
    let model = spec.model.path.as_ref().map(|path| base.join(path));
    let tokenizer = match &spec.tokenizer.path {
        Some(path) => Some(base.join(path.trim_end_matches("tokenizer.json"))),
        None => model.clone(),
    };
    let of_tokenizer = TOKENIZER.map(|name| Some(tokenizer.as_ref()?.join(name)));
    let of_model = model.map(|model| model.join("generation_config.json"));
    let files = of_tokenizer.into_iter().chain([of_model]).flatten();
    files.filter(|path| path.is_file()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;

    fn lines(place: &Path, evaluation: &str, more: &str) -> String {
        let corpus = place.join("corpus.jsonl");
        std::fs::write(&corpus, "{\"text\": \"abcdefgh\"}\n".repeat(100)).unwrap();
        std::fs::write(place.join("other.jsonl"), "{\"text\": \"ihgfedcb\"}\n").unwrap();
        format!(
            "batch: {{global: 12, per_device_batch_size: 2}}\ntokenizer: {{path: byte}}\n\
             data: {{sequence_length: 8, train: [{{path: {}}}], evaluation: [{{path: {}}}]}}{more}",
            corpus.display(),
            place.join(evaluation).display()
        )
    }

    #[test]
    fn checkpoints_get_the_tokenizer_of_the_data_and_the_models_generation_config() {
        let place = tempfile::tempdir().unwrap();
        for file in [
            "model/generation_config.json",
            "model/tokenizer.json",
            "model/tokenizer.model",
            "other/tokenizer.json",
            "other/chat_template.jinja",
        ] {
            let file = place.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        let names = |model: Option<&str>, tokenizer: Option<&str>| {
            let mut spec = Spec::default();
            spec.model.path = model.map(str::to_owned);
            spec.tokenizer.path = tokenizer.map(str::to_owned);
            let files = companions(&spec, place.path());
            let name = |file: &PathBuf| {
                file.strip_prefix(place.path())
                    .unwrap()
                    .display()
                    .to_string()
            };
            files.iter().map(name).collect::<Vec<_>>()
        };
        let generates = "model/generation_config.json";
        let of_model = ["model/tokenizer.json", "model/tokenizer.model", generates];
        assert_eq!(names(Some("model"), None), of_model);
        let of_other = [
            "other/tokenizer.json",
            "other/chat_template.jinja",
            generates,
        ];
        assert_eq!(names(Some("model"), Some("other")), of_other);
        assert_eq!(names(Some("model"), Some("other/tokenizer.json")), of_other);
        assert_eq!(names(Some("model"), Some("byte")), [generates]);
        assert!(names(None, None).is_empty());
    }

    #[test]
    fn evaluation_on_training_data_is_reported() {
        let place = tempfile::tempdir().unwrap();
        let lines = lines(place.path(), "corpus.jsonl", "");
        let launched = Launched::at(place.path(), &lines, &[]);
        let notes = |prepared: &Prepared| {
            let place = place.path().display().to_string();
            prepared.notes.join("\n").replace(&place, "[place]")
        };
        insta::assert_snapshot!(notes(&launched.prepared), @"
        data.evaluation.0.path: [place]/corpus.jsonl is named by an earlier source and read only once
        no evaluation is made: every file of `data.evaluation` is also training data, on which a loss means nothing; name other files, or hold samples out with `data.held_out`
        some data are not trained: 100 truncated to the sequence length; `data.sequence_length` is 8
        ");
        // Also where the data are already prepared.
        assert_eq!(
            notes(&launched.resume(|_| {}).unwrap()),
            notes(&launched.prepared)
        );
    }

    #[test]
    fn requested_evaluations_on_training_data_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let asked = "\nevaluation: {every_samples: 24}";
        let refused = lines(place.path(), "corpus.jsonl", asked);
        let refused = Launched::try_at(place.path(), &refused, &[]).err();
        insta::assert_snapshot!(refused.unwrap_or_default(), @"`evaluation.every_samples` requests evaluations, and no evaluation data are left: files of `data.evaluation` that are also training data are not evaluated on; name other files, or hold samples out with `data.held_out`");
        let whole = lines(place.path(), "other.jsonl", asked);
        assert!(Launched::try_at(place.path(), &whole, &[]).is_ok());
    }
}
