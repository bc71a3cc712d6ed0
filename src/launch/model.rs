//! Resolves the recipe's model on this machine: its shape, the directory of its weights, and its
//! problems.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::adapters::Trained;
use crate::engine::{Cause, ConfigError, ModelConfig, cuda};
use crate::hub;
use crate::plan::memory::{self, Shape};
use crate::plan::{DeviceKind, Flaw};
use crate::recipe::Spec;
use crate::recipe::schema::spec::{Init, Model};
use crate::util::durable::{FileError, parse_json};
use crate::util::input::{self, CONFIG_BYTES};
use crate::util::shards::are_complete;

/// Keys of a `config.json`.
type Config = BTreeMap<String, Value>;

/// The result of [`find`].
#[derive(Debug, Default)]
pub struct ResolvedModel {
    /// The `config.json` at the model's path.
    pub stored: Option<Config>,
    /// The shape, if enough of it is known.
    pub shape: Option<ModelConfig>,
    /// Directory of the initial weights; `None`: random weights from the seed.
    pub weights: Option<PathBuf>,
    /// What is trained in place of them.
    pub trained: Trained,
    /// All problems, as the rules report them.
    pub flaws: Vec<Flaw>,
}

/// Maps a native path to the key in the user's dialect.
type Key<'a> = &'a dyn Fn(&str) -> String;

/// Resolves the recipe's model, of which the hub's cache may have a `snapshot`. A hub model may be absent if the runner
/// `downloads` it. Messages spell keys with `key`.
pub fn find(
    spec: &Spec,
    snapshot: Option<PathBuf>,
    downloads: bool,
    device: DeviceKind,
    key: Key<'_>,
) -> ResolvedModel {
    let model = &spec.model;
    let mut found = ResolvedModel::default();
    let local = model.path.as_ref().map(PathBuf::from);
    let local = local.filter(|path| path.is_dir());
    let directory = local.clone().or_else(|| snapshot.clone());
    match directory.as_deref().map(read_config).transpose() {
        Ok(stored) => found.stored = stored,
        Err(error) => {
            found.flaws.push(Flaw {
                rule: "model-shape",
                paths: vec!["model.path".to_owned()],
                message: error.to_string(),
                help: "set a directory that contains the model's config.json".to_owned(),
            });
            return found;
        }
    }
    let stored = found.stored.as_ref();
    (found.shape, found.flaws) = shape_of(spec, stored, downloads, device, key);
    let of_snapshot = snapshot.filter(|path| wants_weights(model) && are_complete(path));
    match weights(model, local.or(of_snapshot), key) {
        Ok(weights) => found.weights = weights,
        Err(flaw) if !downloads && found.flaws.is_empty() => {
            found.flaws.push(flaw);
        }
        Err(_) => {}
    }
    found
}

/// The model's shape, if enough of it is known, and what is wrong with it on these devices, from the recipe and the
/// `config.json` that is `stored` at its path.
pub fn shape_of(
    spec: &Spec,
    stored: Option<&Config>,
    downloads: bool,
    device: DeviceKind,
    key: Key<'_>,
) -> (Option<ModelConfig>, Vec<Flaw>) {
    let model = &spec.model;
    // Only a well-known id adds sizes: other models have their family's defaults.
    let known = Shape::of(model, stored).map(|(shape, _)| shape);
    let known = known.filter(|_| Shape::is_well_known(model));
    let stated = |key: &str| {
        let of_folder = stored.is_some_and(|stored| stored.contains_key(key));
        model.config.contains_key(key) || of_folder
    };
    let complete = known.is_some() || Shape::is_stated(stated);
    let mut config = known.as_ref().map(config_of).unwrap_or_default();
    if let Some(model_type) = memory::model_type(model, stored) {
        config.insert("model_type".to_owned(), model_type.into());
    }
    config.extend(stored.cloned().unwrap_or_default());
    config.extend(model.config.clone());
    let (shape, errors) = match ModelConfig::parse(&config.into_iter().collect()) {
        Ok(shape) => {
            let errors = shape.flaws();
            (Some(shape), errors)
        }
        Err(error) => (None, vec![error]),
    };
    let mut flaws: Vec<Flaw> = (errors.iter())
        .map(|error| shape_flaw(error, model, key))
        .collect();
    if flaws.is_empty() && !complete {
        flaws.extend(unknown(model, downloads, key));
    }
    let shape = shape.filter(|_| complete && flaws.is_empty());
    // The positions of an absent hub model are unknown unless the recipe states them.
    let positions = !downloads
        || model.path.is_none()
        || stored.is_some()
        || model.config.contains_key("max_position_embeddings");
    if let Some(shape) = &shape {
        let sequence = shape.check_sequence(length(spec)).err();
        let sequence = sequence.filter(|_| positions);
        let longest = shape.max_position_embeddings;
        flaws.extend(sequence.map(|error| sequence_flaw(&error, longest, key)));
        let of_device = cuda::supported(shape).err();
        let of_device = of_device.filter(|_| device == DeviceKind::Cuda);
        flaws.extend(of_device.map(|error| Flaw {
            rule: "trainer-model",
            paths: vec!["model.config".to_owned(), "model.path".to_owned()],
            message: error.to_string(),
            help: "add `--device cpu`, or give your program after `--`".to_owned(),
        }));
    }
    (shape, flaws)
}

/// Whether a model of the hub gives its weights, and not only its shape: a recipe that changes the sizes has others.
pub fn wants_weights(model: &Model) -> bool {
    match model.init {
        Init::Random => false,
        Init::Weights => true,
        Init::Auto => !Shape::REQUIRED
            .into_iter()
            .any(|size| Shape::states(size, |key| model.config.contains_key(key))),
    }
}

fn length(spec: &Spec) -> usize {
    usize::try_from(spec.data.sequence_length).unwrap_or(usize::MAX)
}

/// A shape that does not fit, reported at the recipe's keys if it has them.
fn shape_flaw(error: &ConfigError, model: &Model, key: Key<'_>) -> Flaw {
    let own = error
        .keys
        .iter()
        .filter(|key| model.config.contains_key(**key));
    let mut paths: Vec<String> = own.map(|key| format!("model.config.{key}")).collect();
    paths.extend(["model.path".to_owned(), "model.config".to_owned()]);
    let keys: Vec<String> = error.keys.iter().map(|key| format!("`{key}`")).collect();
    let change = match keys.as_slice() {
        [] => "the model's config.json".to_owned(),
        keys => keys.join(" or "),
    };
    Flaw {
        rule: match error.cause {
            Cause::Invalid => "model-shape",
            Cause::Uncomputed | Cause::UncomputedUnlessZero => "trainer-model",
        },
        paths,
        message: error.message.clone(),
        help: match error.cause {
            Cause::Invalid => format!("change {change}"),
            Cause::Uncomputed => "choose another model, or give your program after `--`".to_owned(),
            Cause::UncomputedUnlessZero => {
                let off = error.keys.iter().map(|name| {
                    let path = format!("model.config.{name}");
                    format!("{}=0", key(&path))
                });
                let off = off.collect::<Vec<String>>().join(" ");
                format!("train without it: `{off}`, or give your program after `--`")
            }
        },
    }
}

fn sequence_flaw(error: &ConfigError, longest: usize, key: Key<'_>) -> Flaw {
    let shorten = error.help.as_deref().unwrap_or("shorten them");
    let path = "data.sequence_length";
    Flaw {
        rule: "sequence-too-long",
        paths: [path, "model.config", "model.path"]
            .map(str::to_owned)
            .to_vec(),
        message: error.message.clone(),
        help: format!("{shorten}: `{}={longest}`", key(path)),
    }
}

/// The problem of a model without a known shape.
fn unknown(model: &Model, downloads: bool, key: Key<'_>) -> Option<Flaw> {
    let flaw = |rule, path: &str, message: String, help: String| {
        Some(Flaw {
            rule,
            paths: vec![path.to_owned(), "model".to_owned()],
            message,
            help,
        })
    };
    let (path, config) = (key("model.path"), key("model.config"));
    match &model.path {
        Some(_) if !model.config.is_empty() => not_a_shape(key),
        Some(id) if downloads && hub::is_model(id) => None,
        Some(id) => flaw(
            "model-missing",
            "model.path",
            format!("model `{id}` is {}, and its shape is unknown", absent(id)),
            restored(id).unwrap_or_else(|| {
                format!(
                    "download it and set `{path}=DIRECTORY`, or set the shape with \
                     `{config}.hidden_size=64` and so on"
                )
            }),
        ),
        None if !model.config.is_empty() => not_a_shape(key),
        None => flaw(
            "model-missing",
            "model",
            "no key that is read names a model".to_owned(),
            format!(
                "set `{path}=DIRECTORY`, or set the shape with `{config}.hidden_size=64` and so on"
            ),
        ),
    }
}

/// Where a model is not.
fn absent(id: &str) -> &'static str {
    if hub::is_model(id) {
        "neither in a local directory nor in the hub's cache"
    } else {
        "not in a local directory"
    }
}

/// How the snapshot of a run is downloaded again, if a path is one.
fn restored(path: &str) -> Option<String> {
    let repo = hub::model_of_snapshot(Path::new(path))?;
    Some(format!("restore it with `{}`", repo.download_command(None)))
}

/// The problem of keys that do not form a shape.
fn not_a_shape(key: Key<'_>) -> Option<Flaw> {
    let (path, config) = (key("model.path"), key("model.config"));
    Some(Flaw {
        rule: "model-shape",
        paths: vec!["model.config".to_owned()],
        message: format!(
            "`{config}` is an incomplete shape: it needs {}",
            Shape::REQUIRED.join(", ")
        ),
        help: format!("set them, or set `{path}=DIRECTORY` to a directory with a config.json"),
    })
}

/// Directory of the initial weights.
fn weights(
    model: &Model,
    directory: Option<PathBuf>,
    key: Key<'_>,
) -> Result<Option<PathBuf>, Flaw> {
    match (model.init, directory) {
        (Init::Random, _) => Ok(None),
        (_, Some(directory)) => Ok(Some(directory)),
        (Init::Auto, None) if !model.config.is_empty() => Ok(None),
        (Init::Auto | Init::Weights, None) => Err(Flaw {
            rule: "model-missing",
            paths: vec!["model.path".to_owned(), "model.init".to_owned()],
            message: {
                let id = model.path.as_deref().unwrap_or("the model");
                format!("the weights of `{id}` are {}", absent(id))
            },
            help: model.path.as_deref().and_then(restored).unwrap_or_else(|| {
                format!(
                    "download them and set `{}=DIRECTORY`, or start from random weights with `{}=random`",
                    key("model.path"),
                    key("model.init")
                )
            }),
        }),
    }
}

fn config_of(shape: &Shape) -> Config {
    [
        ("num_hidden_layers", shape.layers),
        ("hidden_size", shape.hidden),
        ("intermediate_size", shape.intermediate),
        ("num_attention_heads", shape.heads),
        ("num_key_value_heads", shape.key_value_heads),
        ("head_dim", shape.head_dim),
        ("vocab_size", shape.vocabulary),
    ]
    .map(|(key, size)| (key.to_string(), size.into()))
    .into_iter()
    .chain([("tie_word_embeddings".to_string(), shape.tied.into())])
    .collect()
}

/// The keys of a directory's `config.json`.
pub(super) fn read_config(directory: &Path) -> Result<Config, FileError> {
    let path = directory.join("config.json");
    let bytes = input::read(&path, CONFIG_BYTES)
        .map_err(|error| FileError::from_io("read", &path, 0, error))?;
    parse_json(&path, &bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::{Family, layout};
    use crate::recipe::schema::spec::Spec;

    /// Whether the runner downloads models.
    const DOWNLOADS: bool = true;
    const BUILT_IN: bool = false;

    /// A recipe whose model has a path and custom keys.
    fn spec(path: Option<&str>, config: Value) -> Spec {
        let mut spec = Spec::default();
        spec.model.path = path.map(str::to_owned);
        spec.model.config = serde_json::from_value(config).unwrap();
        spec.data.sequence_length = 64;
        spec
    }

    /// Rule, first path and message of every problem.
    fn flaws(spec: &Spec, downloads: bool) -> Vec<(&'static str, String, String)> {
        let flaws = find(spec, None, downloads, DeviceKind::Cpu, &str::to_owned)
            .flaws
            .into_iter();
        flaws
            .map(|flaw| (flaw.rule, flaw.paths[0].clone(), flaw.message))
            .collect()
    }

    fn rules(spec: &Spec, downloads: bool) -> Vec<&'static str> {
        flaws(spec, downloads)
            .into_iter()
            .map(|flaw| flaw.0)
            .collect()
    }

    fn sizes() -> Value {
        json!({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256,
           "max_position_embeddings": 128})
    }

    #[test]
    fn a_complete_shape_starts_from_random_weights() {
        for downloads in [true, false] {
            let found = find(
                &spec(None, sizes()),
                None,
                downloads,
                DeviceKind::Cpu,
                &str::to_owned,
            );
            assert_eq!(found.flaws, []);
            assert_eq!(found.shape.unwrap().hidden_size, 64);
            assert_eq!(found.weights, None);
        }
    }

    #[test]
    fn a_config_without_some_sizes_has_those_of_its_family() {
        let folder = tempfile::tempdir().unwrap();
        for (family, sizes) in [("mistral", (14336, 8)), ("llama", (11008, 16))] {
            let config = json!({
                "model_type": family, "hidden_size": 64, "num_attention_heads": 16, "num_hidden_layers": 1,
                "vocab_size": 64,
            });
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            let spec = spec(folder.path().to_str(), json!({}));
            let shape = find(&spec, None, DOWNLOADS, DeviceKind::Cpu, &str::to_owned)
                .shape
                .unwrap();
            assert_eq!((shape.intermediate_size, shape.num_key_value_heads), sizes);
            let stored = read_config(folder.path()).unwrap();
            let (estimated, _) = Shape::of(&spec.model, Some(&stored)).unwrap();
            let estimated = (
                estimated.intermediate as usize,
                estimated.key_value_heads as usize,
            );
            assert_eq!(estimated, sizes, "{family}");
        }
    }

    #[test]
    fn the_estimate_has_the_parameters_of_every_family() {
        for family in Family::ALL {
            let config = json!({
                "model_type": family.model_type(), "hidden_size": 256, "num_attention_heads": 32,
                "num_hidden_layers": 2, "vocab_size": 64, "attention_bias": true,
                "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
            });
            let spec = spec(None, config);
            let (estimated, _) = Shape::of(&spec.model, None).unwrap();
            let shape = find(&spec, None, DOWNLOADS, DeviceKind::Cpu, &str::to_owned)
                .shape
                .unwrap();
            assert_eq!(shape.family, family);
            let parameters = layout(&shape).len() as f64;
            assert_eq!(estimated.parameters(), parameters, "{family:?}");
        }
    }

    #[test]
    fn every_impossible_size_is_reported_at_its_key() {
        let mut config = sizes();
        config["hidden_size"] = json!(0);
        config["num_attention_heads"] = json!(6);
        config["num_key_value_heads"] = json!(4);
        let found = flaws(&spec(None, config), DOWNLOADS);
        let paths: Vec<&str> = found.iter().map(|flaw| flaw.1.as_str()).collect();
        assert_eq!(
            paths,
            [
                "model.config.hidden_size",
                "model.config.num_key_value_heads"
            ]
        );
        assert!(found.iter().all(|flaw| flaw.0 == "model-shape"));
        let wide = spec(
            None,
            json!({"hidden_size": "wide", "num_hidden_layers": 2, "vocab_size": 9}),
        );
        assert_eq!(rules(&wide, DOWNLOADS), ["model-shape"]);
    }

    #[test]
    fn an_incomplete_shape_is_refused_and_an_absent_hub_model_only_at_launch() {
        let holes = spec(None, json!({"hidden_size": 64}));
        assert_eq!(rules(&holes, DOWNLOADS), ["model-shape"]);
        let hub = spec(Some("acme/new-model"), json!({}));
        assert_eq!(rules(&hub, DOWNLOADS), Vec::<&str>::new());
        assert_eq!(rules(&hub, BUILT_IN), ["model-missing"]);
        let known = spec(Some("mistralai/Mistral-7B-v0.1"), json!({}));
        assert_eq!(rules(&known, DOWNLOADS), Vec::<&str>::new());
        assert_eq!(rules(&known, BUILT_IN), ["model-missing"]);
        let nowhere = spec(Some("./models/absent"), json!({}));
        assert_eq!(rules(&nowhere, DOWNLOADS), ["model-missing"]);
        assert_eq!(rules(&spec(None, json!({})), DOWNLOADS), ["model-missing"]);
    }

    #[test]
    fn a_sample_longer_than_the_known_positions_is_refused() {
        let mut long = spec(None, sizes());
        long.data.sequence_length = 129;
        assert_eq!(rules(&long, DOWNLOADS), ["sequence-too-long"]);
        long.data.sequence_length = 128;
        assert_eq!(rules(&long, DOWNLOADS), Vec::<&str>::new());
        // Only the hub knows this model's positions; `launch` uses transformers' default.
        let mut hub = spec(
            Some("mistralai/Mistral-7B-v0.1"),
            json!({"vocab_size": 32_064}),
        );
        hub.data.sequence_length = 4096;
        assert_eq!(rules(&hub, DOWNLOADS), Vec::<&str>::new());
        assert_eq!(rules(&hub, BUILT_IN), ["sequence-too-long"]);
    }

    #[test]
    fn the_config_of_a_directory_defines_the_shape() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let spec = spec(Some(path), json!({}));
        assert_eq!(rules(&spec, DOWNLOADS), ["model-shape"]);
        let write = |config: &Value| {
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        };
        write(&sizes());
        let found = find(&spec, None, DOWNLOADS, DeviceKind::Cpu, &str::to_owned);
        assert_eq!(found.flaws, []);
        assert_eq!(found.stored.unwrap()["hidden_size"], 64);
        let mut odd = sizes();
        odd["num_attention_heads"] = json!(6);
        write(&odd);
        assert_eq!(flaws(&spec, DOWNLOADS)[0].1, "model.path");
        odd["num_attention_heads"] = json!(4);
        odd["model_type"] = json!("bloom");
        write(&odd);
        assert_eq!(rules(&spec, DOWNLOADS), ["trainer-model"]);
    }

    #[test]
    fn dropout_is_refused_with_the_overrides_that_turn_it_off() {
        let mut config = sizes();
        config["model_type"] = json!("gpt2");
        config["attn_pdrop"] = json!(0);
        let key = |path: &str| format!("evenkeel.{path}");
        let spec_of = spec(None, config.clone());
        let found = find(&spec_of, None, DOWNLOADS, DeviceKind::Cpu, &key);
        assert_eq!(found.flaws[0].rule, "trainer-model");
        assert_eq!(
            found.flaws[0].help,
            "train without it: `evenkeel.model.config.resid_pdrop=0 evenkeel.model.config.embd_pdrop=0`, or give your \
             program after `--`"
        );
        for key in ["resid_pdrop", "embd_pdrop"] {
            config[key] = json!(0);
        }
        assert_eq!(rules(&spec(None, config), DOWNLOADS), Vec::<&str>::new());
    }
}
