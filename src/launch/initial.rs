//! The initial weights of a run, checked before a rank starts.

use std::path::{Path, PathBuf};

use super::LaunchError;
use crate::engine::{self, ModelConfig};
use crate::recipe::Spec;
use crate::recipe::schema::spec::{Init, Model};
use crate::train::BuiltIn;
use crate::train::preferences::Loss;
use crate::train::weights::{self, Weights, WeightsError};

/// Source of the initial weights.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Initial {
    /// Directory of the weights; `None`: random weights from the seed.
    pub weights: Option<PathBuf>,
    /// A note for the user about the choice.
    pub note: Option<String>,
}

/// Checks the directory for the model's weights (`None`: random weights are already chosen).
/// Messages spell keys with `key`. With [`Init::Auto`] a directory without weights gives random
/// ones and a note. Existing weights must match the shape, tensor by tensor.
pub fn weights(
    model: &Model,
    directory: Option<PathBuf>,
    shape: &ModelConfig,
    key: &dyn Fn(&str) -> String,
) -> Result<Initial, LaunchError> {
    let random = |message: String| Initial {
        weights: None,
        note: Some(format!(
            "{message}: the run starts from random weights; set {init}=weights to refuse that, or \
             {init}=random to confirm it",
            init = key("model.init")
        )),
    };
    let Some(directory) = directory else {
        return Ok(match (&model.path, model.init) {
            (Some(path), Init::Auto) => random(format!("`{path}` is not a local directory")),
            _ => Initial::default(),
        });
    };
    match Weights::open(&directory) {
        Err(WeightsError::Absent { other: None, .. }) if model.init == Init::Auto => {
            return Ok(random(format!(
                "{} contains no weights",
                directory.display()
            )));
        }
        opened => opened?.check(&engine::layout(shape))?,
    }
    Ok(Initial {
        weights: Some(directory),
        note: None,
    })
}

/// Checks again the weights of a run that has no checkpoint yet.
pub fn check(directory: &Path, shape: &ModelConfig) -> Result<(), LaunchError> {
    Ok(Weights::open(directory)?.check(&engine::layout(shape))?)
}

/// Identifies the files of the weights that later starts need as they were: those below adapters, and of a reference model;
/// `None` without such.
pub(super) fn digest(built_in: &BuiltIn, spec: &Spec) -> Result<Option<String>, LaunchError> {
    let folders = built_in.weight_folders();
    let has_reference = Loss::of(spec).is_some_and(|loss| loss.has_reference());
    if folders.is_empty() || built_in.adapters.is_none() && !has_reference {
        return Ok(None);
    }
    Ok(Some(weights::digest(&folders)?))
}

/// The [`digest`] of a run; refuses files other than those with which it began.
pub(super) fn unchanged(built_in: &BuiltIn, spec: &Spec) -> Result<Option<String>, LaunchError> {
    let found = digest(built_in, spec)?;
    let began = &built_in.frozen_digest;
    if began.is_none() || found == *began {
        return Ok(found);
    }
    let folders = built_in.weight_folders().into_iter();
    let folders: Vec<String> = folders.map(|it| it.display().to_string()).collect();
    Err(LaunchError::usage(format!(
        "the weights {} have changed since the launch, in {}; put back those of the launch, or start a new run",
        match built_in.adapters {
            Some(_) => "below the adapters",
            None => "of the reference model",
        },
        folders.join(" or ")
    )))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use safetensors::tensor::Dtype;

    use crate::checkpoint::tensor_file::header;

    fn shape(inner: usize) -> ModelConfig {
        let config = json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": inner,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "vocab_size": 20, "max_position_embeddings": 32, "tie_word_embeddings": false,
        });
        ModelConfig::from_json(&config).unwrap()
    }

    /// A native key as an upstream dialect spells it.
    fn spelled(path: &str) -> String {
        format!("evenkeel.{path}")
    }

    fn found(directory: &Path, init: Init) -> Result<Initial, String> {
        let model = Model {
            path: Some(directory.display().to_string()),
            init,
            ..Model::default()
        };
        let directory = Some(directory.to_path_buf());
        weights(&model, directory, &shape(12), &spelled).map_err(|e| e.to_string())
    }

    /// Writes zeros for the shape's tensors that `keep` accepts.
    fn write(directory: &Path, shape: &ModelConfig, keep: impl Fn(&str) -> bool) {
        let layout = engine::layout(shape);
        let parameters = layout.units.iter().flat_map(|unit| &unit.parameters);
        let kept: Vec<_> = parameters.filter(|p| keep(&p.name)).collect();
        let tensors = kept.iter().map(|p| (p.name.clone(), p.shape.as_slice()));
        let (mut bytes, length) = header(tensors, Dtype::F32).unwrap();
        bytes.resize(bytes.len() + length as usize, 0);
        std::fs::write(directory.join("model.safetensors"), bytes).unwrap();
    }

    #[test]
    fn a_directory_without_weights_gives_random_weights_and_a_note() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), "{}").unwrap();
        std::fs::write(directory.path().join("training_args.bin"), "").unwrap();
        let initial = found(directory.path(), Init::Auto).unwrap();
        assert_eq!(initial.weights, None);
        let note = initial.note.unwrap();
        assert!(
            note.contains("contains no weights: the run starts from random"),
            "{note}"
        );
        assert!(
            note.contains("set evenkeel.model.init=weights to refuse"),
            "{note}"
        );
        let message = found(directory.path(), Init::Weights).unwrap_err();
        assert!(message.contains("has no weights"), "{message}");
    }

    #[test]
    fn weights_in_an_unsupported_format_are_refused() {
        for (name, way_out) in [
            (
                "pytorch_model-00001-of-00002.bin",
                "/converted/*.safetensors* '/",
            ),
            ("model.gguf", "convert model.gguf to safetensors"),
            ("model-00001-of-00002.safetensors", "its index is missing"),
        ] {
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join(name), "").unwrap();
            let message = found(directory.path(), Init::Auto).unwrap_err();
            assert!(message.contains(way_out), "{message}");
        }
    }

    #[test]
    fn weights_are_checked_tensor_by_tensor() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let refusal = || found(directory, Init::Auto).unwrap_err();
        write(directory, &shape(12), |_| true);
        let initial = found(directory, Init::Auto).unwrap();
        assert_eq!(initial.weights.as_deref(), Some(directory));
        assert_eq!(initial.note, None);

        write(directory, &shape(12), |name| name != "model.norm.weight");
        let message = refusal();
        assert!(
            message.contains("`model.norm.weight` is missing"),
            "{message}"
        );
        write(directory, &shape(16), |_| true);
        let message = refusal();
        assert!(
            message.contains("is [16, 8] where the model has [12, 8]"),
            "{message}"
        );
        std::fs::write(directory.join("model.safetensors"), "half").unwrap();
        let said = refusal();
        assert!(said.contains("not a complete safetensors file"), "{said}");
    }

    #[test]
    fn random_weights_instead_of_named_ones_give_a_note() {
        let model = |path: Option<&str>, init| Model {
            path: path.map(str::to_owned),
            init,
            ..Model::default()
        };
        let note = |model: &Model| weights(model, None, &shape(12), &spelled).unwrap().note;
        assert!(
            note(&model(Some("org/llama"), Init::Auto))
                .unwrap()
                .contains("`org/llama`")
        );
        assert_eq!(note(&model(Some("org/llama"), Init::Random)), None);
        assert_eq!(note(&model(None, Init::Auto)), None);
    }
}
