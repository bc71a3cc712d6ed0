//! What to type after a launch that was refused or could not download: the same command with downloaded files, or with
//! the user's own trainer.

use std::path::Path;

use crate::data::is_on_hub;
use crate::hub::{HubError, Repo};
use crate::recipe::schema::spec::Objective;
use crate::recipe::syntax::shell;
use crate::recipe::{Diagnostic, Dialect, Recipe, Severity};

/// The commands after a refusal, one a line, for the words that the user typed. Empty: the findings say what to change.
pub fn after_refusal(recipe: &Recipe, findings: &[Diagnostic], typed: &[String]) -> Vec<String> {
    let errors: Vec<&str> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error)
        .map(|finding| finding.rule.as_str())
        .collect();
    if recipe.spec.trainer.is_external() {
        return Vec::new();
    }
    let own = typed
        .iter()
        .position(|word| word == "--")
        .unwrap_or(typed.len());
    let typed = shell::join(&typed[..own]);
    if errors.iter().any(|rule| rule.starts_with("trainer-")) {
        return vec![format!("{typed} -- {}", program(recipe))];
    }
    let absent = ["model-missing", "tokenizer-missing", "data-missing"];
    if !errors.iter().all(|rule| absent.contains(rule)) {
        return Vec::new();
    }
    let (mut lines, mut overrides) = (Vec::new(), Vec::new());
    let is_absent = |path: &str| match path {
        "model.path" => errors.iter().any(|rule| *rule != "data-missing"),
        _ => errors.contains(&"data-missing"),
    };
    for (path, repo) in named(recipe) {
        if is_absent(&path) && is_on_hub(Path::new(""), &repo.id) {
            let (download, named) = repo.download_for(&recipe.key(&path));
            if !lines.contains(&download) {
                lines.push(download);
            }
            overrides.extend(named.filter(|named| !overrides.contains(named)));
        }
    }
    if !lines.is_empty() {
        overrides.insert(0, typed);
        lines.push(overrides.join(" "));
    }
    lines
}

/// The commands after a repository that could not be downloaded, one a line.
pub fn after_download(recipe: &Recipe, failed: &HubError, typed: &[String]) -> Vec<String> {
    let mut named = named(recipe);
    named.retain(|(_, repo)| (repo.kind, &repo.id) == (failed.repo.kind, &failed.repo.id));
    let mut paths: Vec<&str> = named.iter().map(|(path, _)| path.as_str()).collect();
    if paths.is_empty() {
        paths.push("tokenizer.path");
    }
    failed.next(&shell::join(typed), &paths, &recipe.keys())
}

/// The model and the data of a recipe, each with the native path of its name.
fn named(recipe: &Recipe) -> Vec<(String, Repo)> {
    let spec = &recipe.spec;
    let revision = spec.model.revision.as_deref();
    let model = spec.model.path.iter();
    let model = model.map(|name| ("model.path".to_owned(), Repo::model(name, revision)));
    let data = spec.data.sources().map(|(path, source)| {
        let repo = Repo::data_set(&source.path, source.revision.as_deref());
        (format!("{path}.path"), repo)
    });
    model.chain(data).collect()
}

/// The program that trains such a recipe upstream, with the words that evenkeel fills in.
fn program(recipe: &Recipe) -> String {
    let objective = recipe.spec.objective;
    match recipe.dialect {
        Dialect::HandbookTrl if handbooks(recipe) => {
            format!("python scripts/{objective}.py --config {{recipe}} {{resume_args}}")
        }
        Dialect::HandbookTrl => format!("trl {objective} --config {{recipe}} {{resume_args}}"),
        Dialect::Halos => "python launch.py OVERRIDES {args}".to_owned(),
        Dialect::Dpo => "python train.py OVERRIDES {args}".to_owned(),
        _ => "python train.py {recipe} {resume_args}".to_owned(),
    }
}

/// Whether one of the handbook's three scripts trains the recipe, by its key for the data.
fn handbooks(recipe: &Recipe) -> bool {
    let scripts = [Objective::Sft, Objective::Dpo, Objective::Orpo];
    let key = recipe.key("data.train.0.path");
    scripts.contains(&recipe.spec.objective)
        && (key.starts_with("dataset_mixture") || key.starts_with("dataset_mixer"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Request, read_text};

    /// What follows a refused `evenkeel launch recipe.yaml --procs 2` by these rules.
    fn next(text: &str, rules: &[&str]) -> Vec<String> {
        let request = Request {
            path: "recipe.yaml".into(),
            ..Request::default()
        };
        let recipe = read_text(&request, text.to_owned()).unwrap();
        let findings: Vec<_> = rules
            .iter()
            .map(|rule| Diagnostic::error(rule, None, "", ""))
            .collect();
        let typed = ["evenkeel", "launch", "recipe.yaml", "--procs", "2"].map(str::to_owned);
        after_refusal(&recipe, &findings, &typed)
    }

    const BATCH: &str =
        "per_device_train_batch_size: 4\nnum_train_epochs: 1\nmodel_name_or_path: acme/model\n";

    #[test]
    fn what_the_built_in_trainer_does_not_train_is_the_users_trainers() {
        let dpo = format!("{BATCH}beta: 0.1\nloss_type: sigmoid\n");
        for (data, program) in [
            (
                "dataset_mixer: {acme/pairs: 1.0}\n",
                "python scripts/dpo.py --config {recipe}",
            ),
            ("dataset_name: acme/pairs\n", "trl dpo --config {recipe}"),
        ] {
            let expected =
                format!("evenkeel launch recipe.yaml --procs 2 -- {program} {{resume_args}}");
            let rules = ["data-missing", "trainer-objective"];
            assert_eq!(next(&format!("{dpo}{data}"), &rules), [expected]);
        }
    }

    #[test]
    fn what_is_on_the_hub_is_downloaded_and_named() {
        let sft = format!("{BATCH}dataset_name: acme/chats\n");
        assert_eq!(
            next(
                &sft,
                &["model-missing", "tokenizer-missing", "data-missing"]
            ),
            [
                "hf download acme/model --local-dir model",
                "hf download acme/chats --repo-type dataset --local-dir chats",
                "evenkeel launch recipe.yaml --procs 2 model_name_or_path=model dataset_name=chats",
            ]
        );
        // The name in a mixture is a key, and no override renames it.
        let mixer = format!("{BATCH}dataset_mixer:\n  acme/chats: 1.0\n");
        assert_eq!(
            next(&mixer, &["data-missing"]),
            [
                "hf download acme/chats --repo-type dataset --local-dir acme/chats",
                "evenkeel launch recipe.yaml --procs 2",
            ]
        );
        // Another error has another way out.
        assert_eq!(next(&sft, &["data-missing", "batch-divisible"]), [""; 0]);
    }

    #[test]
    fn every_source_of_a_failed_data_set_is_renamed() {
        let request = Request {
            path: "dpo.yaml".into(),
            ..Request::default()
        };
        for (data, overrides) in [
            (
                "dataset_mixture:\n  datasets:\n  - {id: acme/pairs, split: a}\n  - {id: acme/pairs, split: b}\n",
                "dataset_mixture.datasets.0.id=pairs dataset_mixture.datasets.1.id=pairs",
            ),
            (
                "dataset_name: acme/pairs\neval_strategy: steps\n",
                "dataset_name=pairs",
            ),
        ] {
            let recipe = read_text(&request, format!("{BATCH}{data}")).unwrap();
            let failed = HubError {
                repo: Repo::data_set("acme/pairs", None),
                endpoint: String::new(),
                cause: Box::new(crate::hub::Cause::Offline),
            };
            let next = after_download(&recipe, &failed, &["evenkeel".to_owned()]);
            assert_eq!(next[1], format!("evenkeel {overrides}"));
        }
    }
}
