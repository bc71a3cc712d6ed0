//! The names of the hub in a recipe: the snapshots that they mean, and what a launch downloads for them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::adapters::Folder;
use super::model::{self, ResolvedModel};
use crate::data::{self, BYTE, Held};
use crate::hub::{Hub, Kind, Repo, Small, model_of_snapshot, repo_of_snapshot};
use crate::plan::memory::Shape;
use crate::recipe::Spec;
use crate::recipe::schema::spec::{Conversion, DataSource, Model};

/// The names of the hub in a recipe; `None`: a path, or no name.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub model: Option<Repo>,
    /// The tokenizer's model, also if the recipe names only the model.
    pub tokenizer: Option<Repo>,
    /// The data sets, each with the native path of its source, `data.train.0`.
    pub data: Vec<(String, Repo)>,
}

/// Files of a model that the cache lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    pub repo: Repo,
    pub small: Small,
    pub weights: bool,
}

/// A source of data whose files the cache lacks.
#[derive(Debug, Clone, PartialEq)]
pub struct MissingData {
    pub repo: Repo,
    /// Its native path, `data.train.0`.
    pub path: String,
    pub source: DataSource,
}

impl Names {
    /// Relative paths start at `base`.
    pub fn of(spec: &Spec, base: &Path) -> Names {
        let revision = spec.model.revision.as_deref();
        let on_hub = |name: &&String| name.as_str() != BYTE && data::is_model_on_hub(base, name);
        let model = spec.model.path.as_ref().filter(on_hub);
        let tokenizer = match &spec.tokenizer.path {
            Some(name) => Some(name).filter(on_hub),
            None => model,
        };
        // The revision is that of the model, which may have the tokenizer too.
        let of_tokenizer =
            |name: &String| Repo::model(name, revision.filter(|_| model == Some(name)));
        let folder = spec.model.subfolder.as_deref();
        // A tokenizer that the recipe names has its own repository.
        let beside_model = folder.filter(|_| spec.tokenizer.path.is_none());
        Names {
            tokenizer: tokenizer.map(|name| of_tokenizer(name).within(beside_model)),
            model: model.map(|name| Repo::model(name, revision).within(folder)),
            data: spec
                .data
                .sources()
                .filter(|(_, source)| source.conversion != Some(Conversion::Unknown))
                .filter(|(_, source)| data::is_on_hub(base, &source.path))
                .map(|(path, source)| {
                    let revision = source.revision.as_deref();
                    (path, Repo::data_set(&source.path, revision))
                })
                .collect(),
        }
    }

    pub fn directory(&self, hub: &Hub) -> Option<PathBuf> {
        hub.snapshot_with(self.model.as_ref()?, "config.json")
    }

    fn tokenizer_directory(&self, hub: &Hub) -> Option<PathBuf> {
        hub.snapshot_with(self.tokenizer.as_ref()?, "tokenizer.json")
    }

    /// The recipe with snapshots in place of names. They have the commit of their revision, so that a run keeps its
    /// model and its tokenizer when the revision moves.
    pub fn settled(&self, spec: &Spec, hub: &Hub) -> Spec {
        let mut spec = spec.clone();
        let text = |path: PathBuf| path.to_str().map(str::to_owned);
        let model = self.directory(hub);
        let tokenizer = self.tokenizer_directory(hub);
        if spec.tokenizer.path.is_some() || tokenizer != model {
            spec.tokenizer.path = tokenizer.and_then(text).or(spec.tokenizer.path);
        }
        if let Some(directory) = model.and_then(text) {
            (spec.model.path, spec.model.subfolder) = (Some(directory), None);
        }
        for (path, source) in spec.data.sources_mut() {
            let named = self.data.iter().find(|(named, _)| *named == path);
            let directory = named.and_then(|(_, repo)| data_directory(repo, source, &path, hub));
            if let Some(directory) = directory.and_then(text) {
                source.path = directory;
            }
        }
        spec
    }

    /// The sources whose files the cache lacks.
    pub fn missing_data(&self, spec: &Spec, hub: &Hub) -> Vec<MissingData> {
        let missing = |(path, source): (String, &DataSource)| {
            let (_, repo) = self.data.iter().find(|(named, _)| *named == path)?;
            let is_missing = data_directory(repo, source, &path, hub).is_none();
            is_missing.then(|| MissingData {
                repo: repo.clone(),
                source: source.clone(),
                path,
            })
        };
        spec.data.sources().filter_map(missing).collect()
    }

    /// What the built-in trainer needs and the cache lacks. `tokenizes`: whether the data are text.
    pub fn missing(
        &self,
        spec: &Spec,
        model: &ResolvedModel,
        hub: &Hub,
        tokenizes: impl Fn() -> bool,
    ) -> Vec<Missing> {
        let mut missing = Vec::new();
        let of_tokenizer = self.tokenizer.as_ref();
        let of_tokenizer =
            of_tokenizer.filter(|_| self.tokenizer_directory(hub).is_none() && tokenizes());
        if let Some(repo) = &self.model {
            let weights = model::wants_weights(&spec.model) && model.weights.is_none();
            let config = needs_config(&spec.model) && self.directory(hub).is_none();
            let small = if weights || config {
                Some(Small::All)
            } else {
                of_tokenizer
                    .filter(|of| *of == repo)
                    .map(|_| Small::Tokenizer)
            };
            missing.extend(small.map(|small| Missing {
                repo: repo.clone(),
                small,
                weights,
            }));
        }
        missing.extend(
            of_tokenizer
                .filter(|of| self.model.as_ref() != Some(of))
                .map(|repo| Missing {
                    repo: repo.clone(),
                    small: Small::Tokenizer,
                    weights: false,
                }),
        );
        missing
    }
}

/// The snapshot with all files of a source: that of its repository, or that of the hub's Parquet files if the
/// repository has no data in a format that is read.
fn data_directory(repo: &Repo, source: &DataSource, path: &str, hub: &Hub) -> Option<PathBuf> {
    let snapshot = hub.snapshot(repo)?;
    match data::held(&snapshot, source, path) {
        Held::All => Some(snapshot),
        Held::Less => None,
        Held::Unread => {
            let converted = hub.snapshot(&repo.converted()?)?;
            (data::held(&converted, source, path) == Held::All).then_some(converted)
        }
    }
}

/// The recipe with a folder of a directory as the directory. Relative paths start at `base`.
pub(super) fn located<'s>(spec: &'s Spec, base: &Path) -> Cow<'s, Spec> {
    let (Some(path), Some(folder)) = (&spec.model.path, &spec.model.subfolder) else {
        return Cow::Borrowed(spec);
    };
    if !base.join(path).is_dir() {
        return Cow::Borrowed(spec);
    }
    let mut located = spec.clone();
    located.model.path = Some(format!("{}/{folder}", path.trim_end_matches('/')));
    located.model.subfolder = None;
    Cow::Owned(located)
}

/// Whether a launch downloads a model's config.json if the cache lacks it: for its weights or for its shape.
pub(super) fn downloads_config(model: &Model) -> bool {
    model::wants_weights(model) || needs_config(model)
}

/// Whether neither the recipe nor the table of well-known models states the sizes.
fn needs_config(model: &Model) -> bool {
    !Shape::is_well_known(model) && !Shape::is_stated(|size| model.config.contains_key(size))
}

/// A recipe with the snapshots with which its run began in place of names, so that a resume needs no network and does
/// not follow a revision that has moved. A folder with an adapter is replaced by the model below it, as in the run.
pub fn with_snapshots(spec: Spec, of_run: &Spec) -> Spec {
    let spec = located(&spec, Path::new("")).into_owned();
    let mut spec = match Folder::of(&spec, Path::new("")) {
        Ok(Some(folder)) => folder.settled(&spec),
        _ => spec,
    };
    let kept = |name: Option<&String>, folder: Option<&String>, in_run: &Option<String>| {
        let repo = model_of_snapshot(Path::new(in_run.as_deref()?))?;
        (name == Some(&repo.id) && folder == repo.folder.as_ref()).then(|| in_run.clone())?
    };
    let folder = spec.model.subfolder.clone();
    let (named, folder_of_tokenizer) = match &spec.tokenizer.path {
        Some(name) => (Some(name), None),
        None => (spec.model.path.as_ref(), folder.as_ref()),
    };
    let tokenizer = kept(named, folder_of_tokenizer, &of_run.tokenizer.path);
    spec.tokenizer.path = tokenizer.or(spec.tokenizer.path.take());
    let model = kept(
        spec.model.path.as_ref(),
        folder.as_ref(),
        &of_run.model.path,
    );
    if model.is_some() {
        (spec.model.path, spec.model.subfolder) = (model, None);
    }
    let of_run: BTreeMap<String, &DataSource> = of_run.data.sources().collect();
    for (path, source) in spec.data.sources_mut() {
        let Some(in_run) = of_run.get(&path) else {
            continue;
        };
        let repo = repo_of_snapshot(Path::new(&in_run.path));
        if repo.is_some_and(|repo| repo.kind == Kind::DataSet && repo.id == source.path) {
            source.path.clone_from(&in_run.path);
        }
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn spec(model: &str, tokenizer: Option<&str>) -> Spec {
        let mut spec = Spec::default();
        spec.model.path = Some(model.to_owned());
        spec.tokenizer.path = tokenizer.map(str::to_owned);
        spec
    }

    #[test]
    fn a_directory_is_no_name_and_the_revision_is_the_models() {
        let base = tempfile::tempdir().unwrap();
        std::fs::create_dir(base.path().join("llama")).unwrap();
        let repos = |spec: &Spec| {
            let Names {
                model, tokenizer, ..
            } = Names::of(spec, base.path());
            [model, tokenizer].map(|repo| repo.map(|repo| repo.to_string()))
        };
        let on = |text: &str| Some(text.to_owned());
        assert_eq!(repos(&spec("llama", Some(BYTE))), [None, None]);
        assert_eq!(repos(&spec("./acme/tiny", None)), [None, None]);
        let mut named = spec("acme/tiny", None);
        named.model.revision = on("v2");
        let tiny = on("acme/tiny at revision v2");
        assert_eq!(repos(&named), [tiny.clone(), tiny.clone()]);
        named.tokenizer.path = on("acme/tiny");
        assert_eq!(repos(&named), [tiny.clone(), tiny.clone()]);
        named.model.subfolder = on("a/b");
        let within = on("a/b of acme/tiny at revision v2");
        assert_eq!(repos(&named), [within.clone(), tiny.clone()]);
        named.tokenizer.path = None;
        assert_eq!(repos(&named), [within.clone(), within]);
        (named.model.subfolder, named.tokenizer.path) = (None, on("acme/tiny"));
        let mut local = spec("llama/", None);
        assert_eq!(*located(&local, base.path()), local);
        local.model.subfolder = on("a");
        assert_eq!(*located(&local, base.path()), spec("llama/a", None));
        named.tokenizer.path = on("acme/words");
        assert_eq!(
            repos(&named),
            [tiny.clone(), on("acme/words at revision main")]
        );
        named.tokenizer.path = on(BYTE);
        assert_eq!(repos(&named), [tiny, None]);
    }

    #[test]
    fn a_resume_keeps_the_snapshots_of_its_run() {
        let snapshot = |id: &str| {
            format!(
                "/cache/models--{}/snapshots/{COMMIT}",
                id.replace('/', "--")
            )
        };
        let run = spec(&snapshot("acme/tiny"), None);
        let recipe = spec("acme/tiny", None);
        assert_eq!(with_snapshots(recipe, &run), run);
        // The tokenizer of another snapshot of the model, or of another model.
        for tokenizer in ["acme/tiny", "acme/words"] {
            let run = spec("acme/tiny", Some(&snapshot(tokenizer)));
            let recipe = spec("acme/tiny", Some(tokenizer));
            assert_eq!(with_snapshots(recipe, &run), run);
        }
        // A folder of the repository.
        let in_folder = spec(&format!("{}/a/b", snapshot("acme/tiny")), None);
        let recipe = spec("acme/tiny", None);
        assert_eq!(with_snapshots(recipe.clone(), &in_folder), recipe);
        let mut recipe = recipe;
        recipe.model.subfolder = Some("a/b".to_owned());
        assert_eq!(with_snapshots(recipe, &in_folder), in_folder);
        let other = spec("acme/other", None);
        assert_eq!(with_snapshots(other.clone(), &run), other);
        let local = spec("/models/tiny", None);
        let recipe = spec("acme/tiny", None);
        assert_eq!(with_snapshots(recipe.clone(), &local), recipe);
        // A source of data, and a model of the same name.
        let with_data = |path: &str| {
            let source = DataSource {
                path: path.to_owned(),
                ..DataSource::default()
            };
            let mut spec = Spec::default();
            spec.data.train = vec![DataSource::default(), source];
            spec
        };
        let of_data = snapshot("acme/tiny").replace("models--", "datasets--");
        for (in_run, kept) in [(&of_data, &*of_data), (&snapshot("acme/tiny"), "acme/tiny")] {
            let recipe = with_snapshots(with_data("acme/tiny"), &with_data(in_run));
            assert_eq!(recipe, with_data(kept));
        }
    }
}
