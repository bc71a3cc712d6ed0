//! Checks the recipe's model and data on this machine for the planner, which opens no files.

use std::borrow::Cow;
use std::path::Path;

use super::adapters::{self, Folder};
use super::model::{self, ResolvedModel};
use super::names::{self, Missing, MissingData, Names, downloads_config};
use crate::data::{self, PrepareRequest};
use crate::hub::Hub;
use crate::plan::rules::is_missing_input;
use crate::plan::{self, AskedRunner, DeviceKind, Flaw, PlanRequest, Runner};
use crate::recipe::{Dialect, ReadError, Recipe, Spec, diagnostic};

/// What this machine has of a recipe.
pub(super) struct Surveyed {
    /// The request with all facts that need no read of the data.
    pub request: PlanRequest,
    pub model: ResolvedModel,
    /// The recipe with snapshots of the hub's cache in place of names.
    pub settled: Spec,
    /// What a launch of the built-in trainer downloads.
    pub missing: Vec<Missing>,
    /// The sources of data that it downloads.
    pub missing_data: Vec<MissingData>,
}

/// Adds to the request all facts about the recipe's model and data that need no read of the data.
/// Relative paths start at `base`. Models of the `hub` are read from its cache.
pub fn survey(recipe: &Recipe, base: &Path, request: PlanRequest, hub: &Hub) -> PlanRequest {
    survey_inputs(recipe, base, request, hub).request
}

/// As [`survey`], with everything that was found.
pub(super) fn survey_inputs(
    recipe: &Recipe,
    base: &Path,
    request: PlanRequest,
    hub: &Hub,
) -> Surveyed {
    let unread = |request, spec: &Spec| Surveyed {
        request,
        model: ResolvedModel::default(),
        settled: spec.clone(),
        missing: Vec::new(),
        missing_data: Vec::new(),
    };
    let located = names::located(&recipe.spec, base);
    let folder = match Folder::of(&located, base) {
        Ok(folder) => folder,
        Err(flaw) => {
            let flaws = vec![flaw];
            return unread(PlanRequest { flaws, ..request }, &recipe.spec);
        }
    };
    let below = match &folder {
        Some(folder) => Cow::Owned(folder.settled(&located)),
        None => Cow::Borrowed(located.as_ref()),
    };
    let spec = below.as_ref();
    // An `accelerate launch` config has neither; an option group lacks one of them.
    if recipe.part {
        return unread(request, spec);
    }
    // Another runner may download what is absent here.
    let elsewhere = !request.runner.is_built_in();
    let mut names = Names::of(spec, base);
    if matches!(recipe.dialect, Dialect::Halos | Dialect::Dpo) {
        // Their programs know how to make prompts of each data set that they have a name for.
        let converted = spec
            .data
            .sources()
            .filter(|(_, source)| source.conversion.is_some());
        let converted: Vec<String> = converted.map(|(path, _)| path).collect();
        names.data.retain(|(path, _)| converted.contains(path));
    }
    let settled = names.settled(spec, hub);
    let is_downloaded = hub.downloads && names.model.is_some() && downloads_config(&spec.model);
    let key = recipe.keys();
    let device = request.runner.device();
    let downloads = elsewhere || is_downloaded;
    let mut model = model::find(spec, names.directory(hub), downloads, device, &key);
    let request_of_data = PrepareRequest::of(&settled, &key, model.shape.as_ref(), base, base);
    let (missing, missing_data) = if elsewhere || !hub.downloads {
        Default::default()
    } else {
        let tokenizes = || data::needs_tokenizer(&request_of_data);
        let missing = names.missing(spec, &model, hub, tokenizes);
        (missing, names.missing_data(spec, hub))
    };
    if let Some(shape) = model.shape.as_ref().filter(|_| !elsewhere) {
        match adapters::trained(&located, folder.as_ref(), shape) {
            Ok(trained) => model.trained = trained,
            Err(flaw) => model.flaws.push(flaw),
        }
    }
    let mut flaws = std::mem::take(&mut model.flaws);
    flaws.extend(data::find_problems(&request_of_data, elsewhere));
    let downloaded = |repo: &Option<_>| {
        let mut missing = missing.iter();
        repo.as_ref()
            .is_some_and(|repo| missing.any(|it| it.repo == *repo))
    };
    if downloaded(&names.tokenizer) {
        flaws.retain(|flaw| flaw.rule != "tokenizer-missing");
    }
    let is_of = |flaw: &Flaw, source: &str| {
        flaw.rule == "data-missing" && flaw.paths.iter().any(|path| path == source)
    };
    flaws.retain(|flaw| !missing_data.iter().any(|it| is_of(flaw, &it.path)));
    if hub.is_offline() {
        for flaw in &mut flaws {
            let is_model = flaw.rule == "model-missing" && names.model.is_some();
            if is_model || names.data.iter().any(|(path, _)| is_of(flaw, path)) {
                flaw.help = format!("unset HF_HUB_OFFLINE, or {}", flaw.help);
            }
        }
    }
    // The built-in trainer counts its samples.
    let rows = elsewhere.then(|| data::few_rows(&request_of_data));
    let request = PlanRequest {
        data_rows: rows.flatten(),
        model_config: model.stored.clone(),
        flaws,
        ..request
    };
    Surveyed {
        request,
        model,
        missing,
        missing_data,
        settled,
    }
}

/// What the built-in trainer would refuse of the model in each pod, as far as the recipe alone tells it. Pods have other
/// files than this machine.
pub fn stated_flaws(recipe: &Recipe, runner: Runner) -> Vec<Flaw> {
    if !runner.is_built_in() || recipe.part {
        return Vec::new();
    }
    let key = recipe.keys();
    let (_, mut flaws) = model::shape_of(&recipe.spec, None, true, runner.device(), &key);
    flaws.retain(|flaw| !is_missing_input(flaw.rule));
    flaws
}

/// The error and what the recipe names, at a place in its files, but is not on this machine: its model, its tokenizer or
/// its data. Other rules may depend on the refused values.
pub fn with_inputs(error: ReadError, asked: AskedRunner, base: &Path, hub: &Hub) -> ReadError {
    let Some(rest) = &error.rest else {
        return error;
    };
    let runner = Runner::of(&rest.spec, asked, DeviceKind::Cpu, None);
    let world = plan::default_world(&rest.spec);
    let request = survey(rest, base, PlanRequest::of(runner, world), hub);
    let found = plan::examine(rest, &request).findings.into_iter();
    let missing = found.filter(|d| d.is_error() && d.span.is_some() && is_missing_input(&d.rule));
    let mut diagnostics = error.diagnostics.clone();
    diagnostics.extend(missing);
    diagnostic::in_file_order(&mut diagnostics);
    ReadError {
        diagnostics,
        ..error
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::hub::Settings;
    use crate::recipe::{self, Request, Severity, corpus, read, read_text};

    fn native(spec: &str) -> Recipe {
        let text = format!("apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n{spec}");
        let request = Request {
            path: "recipe.yaml".into(),
            ..Request::default()
        };
        read_text(&request, text).unwrap_or_else(|error| panic!("{error}"))
    }

    /// `error[rule] line: message` of the problems at plan or at launch.
    fn problems(recipe: &Recipe, asked: AskedRunner, base: &Path) -> Vec<String> {
        let runner = Runner::of(&recipe.spec, asked, DeviceKind::Cuda, None);
        let request = PlanRequest::of(runner, 1);
        let draft = plan::examine(recipe, &survey(recipe, base, request, &Hub::none()));
        let diagnostics = draft.findings.iter();
        diagnostics
            .map(|d| {
                let line = d.span.map_or(0, |span| span.line);
                format!("{}[{}] {line}: {}", d.severity, d.rule, d.message)
            })
            .collect()
    }

    const MODEL: &str = "  batch: {global: 8, per_device_batch_size: 4}
  budget: {samples: 100}
  model:
    config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 128}
";

    #[test]
    fn missing_data_are_a_warning_in_a_plan_and_an_error_at_launch() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = native(&format!(
            "{MODEL}  tokenizer: {{path: nowhere.json}}\n  data:\n    train: [{{path: nowhere.jsonl}}]\n"
        ));
        for (asked, severity) in [
            (AskedRunner::Any, "warning"),
            (AskedRunner::Launch, "error"),
        ] {
            let found = problems(&recipe, asked, folder.path());
            assert_eq!(found.len(), 2, "{found:?}");
            assert!(
                found[0].starts_with(&format!("{severity}[tokenizer-missing] 8: there is no "))
            );
            assert!(found[1].starts_with(&format!("{severity}[data-missing] 10: there is no ")));
        }
        let nothing = native(MODEL);
        assert_eq!(
            problems(&nothing, AskedRunner::Launch, folder.path()),
            ["error[data-missing] 0: no key that is read names data to train on"]
        );
    }

    #[test]
    fn a_refused_key_does_not_hide_missing_inputs() {
        let folder = tempfile::tempdir().unwrap();
        let text = "model_name_or_path: ./no-model\ndataset_name: ./no-data.jsonl\nbf16: true\n\
                    learning_rat: 1.0e-5\nper_device_train_batch_size: 4\nweight_decay: heavy\n";
        let request = Request {
            path: "sft.yaml".into(),
            dialect: Some(recipe::Dialect::HandbookTrl),
            ..Request::default()
        };
        let error = read_text(&request, text.to_owned()).unwrap_err();
        let alone: Vec<&str> = error.diagnostics.iter().map(|d| &*d.rule).collect();
        assert_eq!(alone, ["unknown-key", "wrong-type"]);
        let all = with_inputs(error, AskedRunner::Launch, folder.path(), &Hub::none());
        let all: Vec<&str> = all.diagnostics.iter().map(|d| &*d.rule).collect();
        let rules = [
            "model-missing",
            "tokenizer-missing",
            "data-missing",
            "unknown-key",
            "wrong-type",
        ];
        assert_eq!(all, rules);
    }

    #[test]
    fn hub_data_and_models_are_checked_only_at_launch() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = native(
            "  batch: {global: 8, per_device_batch_size: 4}
  budget: {samples: 100}
  model: {path: acme/new-model}
  data:
    train: [{path: acme/chats}]
",
        );
        assert_eq!(
            problems(&recipe, AskedRunner::Any, folder.path()),
            Vec::<String>::new()
        );
        let found = problems(&recipe, AskedRunner::Launch, folder.path());
        let rules: Vec<&str> = found
            .iter()
            .map(|line| &line[..line.find(':').unwrap()])
            .collect();
        assert_eq!(
            rules,
            [
                "error[model-missing] 6",
                "error[tokenizer-missing] 6",
                "error[data-missing] 8"
            ]
        );
    }

    #[test]
    fn a_launch_downloads_what_the_cache_lacks_of_a_model() {
        const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("data.jsonl"), "{\"text\": \"a\"}\n").unwrap();
        let snapshot = place
            .path()
            .join("models--acme--tiny/snapshots")
            .join(COMMIT);
        std::fs::create_dir_all(&snapshot).unwrap();
        let refs = place.path().join("models--acme--tiny/refs");
        std::fs::create_dir(&refs).unwrap();
        std::fs::write(refs.join("main"), COMMIT).unwrap();
        let hub = |offline| {
            Hub::of(Settings {
                cache: Some(place.path().to_owned()),
                offline,
                ..Settings::none()
            })
        };
        let found = |model: &str, hub: &Hub| {
            let recipe = native(&format!(
                "  batch: {{global: 8, per_device_batch_size: 4}}\n  budget: {{samples: 100}}\n  \
                 model: {{path: acme/tiny{model}}}\n  data: {{sequence_length: 8, train: [{{path: data.jsonl}}]}}\n"
            ));
            let device = DeviceKind::Cpu;
            let runner = Runner::of(&recipe.spec, AskedRunner::Launch, device, None);
            let request = PlanRequest::of(runner, 1);
            let found = survey_inputs(&recipe, place.path(), request, hub);
            let flaws = found.request.flaws.iter();
            let flaws = flaws.map(|flaw| format!("{}: {}; {}", flaw.rule, flaw.message, flaw.help));
            let missing = found.missing.iter();
            let missing = missing.map(|it| format!("{:?}, weights: {}", it.small, it.weights));
            let weights = found
                .model
                .weights
                .map(|_| "weights of the cache".to_owned());
            flaws
                .chain(missing)
                .chain(weights)
                .collect::<Vec<_>>()
                .join("\n")
        };
        let sizes = ", config: {hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 128}";
        let random = ", init: random";
        let online = |model: &str| found(model, &hub(false));
        let write = |name: &str, text: &str| std::fs::write(snapshot.join(name), text).unwrap();

        assert_eq!(online(""), "All, weights: true");
        assert_eq!(online(random), "All, weights: false");
        assert_eq!(online(sizes), "Tokenizer, weights: false");
        insta::assert_snapshot!(found("", &hub(true)), @"
        model-missing: model `acme/tiny` is neither in a local directory nor in the hub's cache, and its shape is unknown; unset HF_HUB_OFFLINE, or download it and set `model.path=DIRECTORY`, or set the shape with `model.config.hidden_size=64` and so on
        tokenizer-missing: the tokenizer of acme/tiny is not on this machine; set `tokenizer.path=DIRECTORY` with a tokenizer.json in it, or `tokenizer.path=byte` for the built-in vocabulary of bytes
        ");
        assert_eq!(online(", revision: v2"), "All, weights: true");

        let config = r#"{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256}"#;
        write("config.json", config);
        assert_eq!(online(""), "All, weights: true");
        assert_eq!(online(random), "Tokenizer, weights: false");
        write("tokenizer.json", "{}");
        assert_eq!(online(random), "");
        assert_eq!(online(sizes), "");
        insta::assert_snapshot!(found("", &hub(true)), @"model-missing: the weights of `acme/tiny` are neither in a local directory nor in the hub's cache; unset HF_HUB_OFFLINE, or download them and set `model.path=DIRECTORY`, or start from random weights with `model.init=random`");
        write("model.safetensors", "");
        assert_eq!(online(""), "weights of the cache");
        assert_eq!(found("", &hub(true)), "weights of the cache");
        assert_eq!(online(random), "");
        assert_eq!(online(sizes), "");
        // A pod neither downloads nor has the cache.
        assert!(found("", &Hub::none()).starts_with("model-missing: "));
    }

    /// TRL's `cpo.py` uses such a model name in its example command.
    #[test]
    fn a_hub_model_without_an_owner_is_checked_only_at_launch() {
        let folder = tempfile::tempdir().unwrap();
        let said_of = |model: &str| {
            let recipe = native(&format!(
                "  batch: {{global: 8, per_device_batch_size: 4}}\n  budget: {{samples: 100}}\n  model: {{path: {model}}}\n  \
             data: {{train: [{{path: acme/chats}}]}}\n",
            ));
            problems(&recipe, AskedRunner::Any, folder.path())
        };
        assert_eq!(said_of("gpt2"), Vec::<String>::new());
        assert_ne!(said_of("./gpt2"), Vec::<String>::new());
        assert_ne!(said_of("models/of/gpt2"), Vec::<String>::new());
        // A local directory of that name exists and contains no model.
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        assert_ne!(said_of("tokenizer.model"), Vec::<String>::new());
    }

    #[test]
    fn memory_is_estimated_from_the_config_in_the_models_directory() {
        let folder = tempfile::tempdir().unwrap();
        let config = r#"{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                     "intermediate_size": 128, "vocab_size": 256}"#;
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let recipe = native(&format!(
            "  batch: {{global: 8, per_device_batch_size: 4}}\n  model: {{path: \"{}\"}}\n",
            folder.path().display()
        ));
        let memory = |request| plan::examine(&recipe, &request).facts.memory;
        assert_eq!(memory(PlanRequest::gpus(1)), None);
        let surveyed = survey(&recipe, folder.path(), PlanRequest::gpus(1), &Hub::none());
        let estimate = memory(surveyed).unwrap();
        // Embedding and head, two blocks of four square matrices and three of the MLP, the norms.
        let parameters = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64;
        assert_eq!(estimate.parameters, 4 * parameters);
        assert!(
            estimate.assumed[0].ends_with("(config.json)"),
            "{:?}",
            estimate.assumed
        );
    }

    #[test]
    fn token_ids_beyond_the_vocabulary_are_found_without_reading_data() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.txt"), "text").unwrap();
        std::fs::write(folder.path().join("a.bin"), "ids").unwrap();
        let with = |more: &str| {
            let recipe = native(&format!("{MODEL}{more}"));
            problems(&recipe, AskedRunner::Any, folder.path())
        };
        let bytes = "  tokenizer: {path: byte}\n  data:\n    train: ";
        assert_eq!(
            with(&format!("{bytes}[{{path: a.txt}}]\n")),
            [
                "error[vocabulary-too-small] 7: the tokenizer byte has 259 token ids, the model's \
             vocab_size is 128"
            ]
        );
        // Token ids need no tokenizer.
        assert_eq!(
            with(&format!("{bytes}[{{path: a.bin}}]\n")),
            Vec::<String>::new()
        );
        assert_eq!(
            with("  data:\n    train: [{path: synthetic, synthetic: {vocabulary: 256}}]\n"),
            [
                "error[vocabulary-too-small] 7: the data has 256 token ids, the model's vocab_size is \
             128"
            ]
        );
    }

    #[test]
    fn a_synthetic_language_of_pure_noise_is_refused_at_its_setting() {
        let folder = tempfile::tempdir().unwrap();
        let language = |settings: &str| {
            let recipe = native(&format!(
                "{MODEL}  data:\n    train:\n    - path: synthetic\n      synthetic: {settings}\n"
            ));
            problems(&recipe, AskedRunner::Any, folder.path())
        };
        let noise = language("{vocabulary: 64, branching: 64}");
        assert!(
            noise[0].starts_with("error[synthetic-language] 11: 64 successors"),
            "{noise:?}"
        );
        assert_eq!(
            language("{vocabulary: 64, branching: 4}"),
            Vec::<String>::new()
        );
        let mixed = native(&format!(
            "{MODEL}  tokenizer: {{path: byte}}\n  data:\n    train: [{{path: synthetic}}, {{path: x/y}}]\n"
        ));
        let mixed = problems(&mixed, AskedRunner::Any, folder.path());
        assert!(
            mixed
                .iter()
                .any(|line| line.starts_with("error[synthetic-language] 10")),
            "{mixed:?}"
        );
    }

    #[test]
    fn a_survey_adds_no_errors_to_upstream_recipes_and_accelerate_configs() {
        let Some(root) = corpus::root() else { return };
        let empty = tempfile::tempdir().unwrap();
        let manifest = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
        let mut surveyed = 0;
        for row in corpus::csv(&manifest).skip(1) {
            let path: PathBuf = root.join(&row[3]);
            let Ok(recipe) = read(&Request {
                path,
                ..Request::default()
            }) else {
                continue;
            };
            let request = survey(&recipe, empty.path(), PlanRequest::gpus(8), &Hub::none());
            let refusing = [
                "model-shape",
                "sequence-too-long",
                "synthetic-language",
                "vocabulary-too-small",
            ];
            let worse = request
                .flaws
                .iter()
                .find(|flaw| refusing.contains(&flaw.rule));
            assert_eq!(worse, None, "{}", row[3]);
            surveyed += 1;
        }
        assert!(surveyed >= 25, "{surveyed}");
    }

    #[test]
    fn an_accelerate_config_alone_is_checked() {
        let read = |text: &str| {
            let request = Request {
                path: "accelerate.yaml".into(),
                ..Request::default()
            };
            recipe::read_text(&request, text.to_owned()).unwrap()
        };
        let found = |text: &str| {
            let recipe = read(text);
            let draft = plan::examine(
                &recipe,
                &survey(&recipe, Path::new(""), PlanRequest::gpus(8), &Hub::none()),
            );
            let diagnostics = draft.findings.into_iter();
            diagnostics
                .map(|d| (d.rule, d.severity))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            found("distributed_type: MULTI_GPU\nnum_processes: 8\n"),
            [("global-batch-unknown".to_owned(), Severity::Error)]
        );
        let axes = "distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config: {parallelism_config_tp_size: 3}\n";
        assert!(found(axes).contains(&("parallelism-product".to_owned(), Severity::Error)));
    }

    /// The overrides that a help line proposes.
    fn proposed(help: &str) -> impl Iterator<Item = &str> {
        let quoted = help.split('`').skip(1).step_by(2);
        quoted.filter(|words| words.contains('='))
    }

    #[test]
    fn overrides_proposed_by_help_work_in_every_dialect() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        std::fs::write(base.join("data.jsonl"), "{\"text\": \"a\"}\n").unwrap();
        let here = base.join("here");
        std::fs::create_dir(&here).unwrap();
        std::fs::write(here.join("tokenizer.json"), "{}").unwrap();
        let config = r#"{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                     "vocab_size": 512}"#;
        std::fs::write(here.join("config.json"), config).unwrap();
        let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
                  batch: {global: 8, per_device_batch_size: 4}\n  budget: {samples: 100}\n";
        let upstream = "per_device_train_batch_size: 4\nmax_steps: 10\n";
        let data = "data: {train: [{path: data.jsonl}]}";
        let hub = "mistralai/Mistral-7B-v0.1";
        let unknown = "acme/new-model";
        let cases = [
            (
                "model-missing",
                format!("{native}  {data}\n  model: {{path: {hub}}}\n"),
            ),
            (
                "model-missing",
                format!("{upstream}model_name_or_path: {hub}\n"),
            ),
            (
                "model-missing",
                format!("{native}  {data}\n  model: {{path: {unknown}}}\n"),
            ),
            (
                "model-missing",
                format!("{upstream}model_name_or_path: {unknown}\n"),
            ),
            (
                "tokenizer-missing",
                format!("{native}  {data}\n  model: {{path: {hub}}}\n"),
            ),
            (
                "tokenizer-missing",
                format!("{upstream}model_name_or_path: {hub}\nevenkeel: {{{data}}}\n"),
            ),
            (
                "tokenizer-missing",
                format!("{upstream}tokenizer_name_or_path: {unknown}\nevenkeel: {{{data}}}\n"),
            ),
            ("data-missing", native.to_owned()),
            ("data-missing", upstream.to_owned()),
            (
                "eval-data-missing",
                format!("{native}  {data}\n  evaluation: {{every_epoch: true}}\n"),
            ),
            (
                "eval-data-missing",
                format!("{upstream}eval_strategy: steps\nevenkeel: {{{data}}}\n"),
            ),
        ];
        for (rule, text) in cases {
            let found = |overrides: Vec<String>| {
                let request = Request {
                    path: "sft/recipe.yaml".into(),
                    overrides,
                    ..Request::default()
                };
                let recipe = read_text(&request, text.clone()).unwrap_or_else(|e| panic!("{e}"));
                let device = DeviceKind::Cuda;
                let runner = Runner::of(&recipe.spec, AskedRunner::Launch, device, None);
                let launched = PlanRequest::of(runner, 1);
                let draft = plan::examine(&recipe, &survey(&recipe, base, launched, &Hub::none()));
                let mut diagnostics = draft.findings.into_iter();
                diagnostics.find(|d| d.rule == rule).map(|d| d.help)
            };
            let help =
                found(Vec::new()).unwrap_or_else(|| panic!("no diagnostic of {rule}\n{text}"));
            let mut tried = 0;
            for way in proposed(&help) {
                // A single key of a shape is incomplete and reports that.
                let way = way.replace("DIRECTORY", here.to_str().unwrap());
                let after = found(vec![way.clone()]);
                assert_eq!(after, None, "{way} on\n{text}");
                tried += 1;
            }
            assert!(tried > 0, "{help}");
        }
    }
}
