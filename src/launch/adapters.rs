//! The adapters that a recipe trains: its own, or those of a folder that it names in place of a model.

use std::path::{Path, PathBuf};

use crate::engine::{Adapters, ModelConfig};
use crate::plan::Flaw;
use crate::recipe::Spec;
use crate::train::adapter::{self, AdapterConfig};
use crate::train::run::EarlierAdapter;

/// What a launch trains in place of the model's weights, and below it.
#[derive(Debug, Clone, Default)]
pub struct Trained {
    pub adapters: Option<Adapters>,
    pub earlier: Option<EarlierAdapter>,
    /// The model below, as the recipe or the folder names it.
    pub base: Option<String>,
}

/// The adapter folder that a recipe names in place of a model.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    directory: PathBuf,
    config: AdapterConfig,
}

impl Folder {
    /// `None`: the recipe names a model. Relative paths start at `base`.
    pub fn of(spec: &Spec, base: &Path) -> Result<Option<Folder>, Flaw> {
        let Some(named) = &spec.model.path else {
            return Ok(None);
        };
        let directory = base.join(named);
        if !directory.is_dir() || directory.join("config.json").is_file() {
            return Ok(None);
        }
        match AdapterConfig::read(&directory) {
            Ok(config) => Ok(config.map(|config| Folder { directory, config })),
            Err(error) => Err(flaw("model-shape", error.to_string())),
        }
    }

    /// The recipe with the model below the adapter in place of the folder, whose tokenizer it keeps.
    pub fn settled(&self, spec: &Spec) -> Spec {
        let mut settled = spec.clone();
        settled
            .model
            .path
            .clone_from(&self.config.base_model_name_or_path);
        if spec.tokenizer.path.is_none() && self.directory.join("tokenizer.json").is_file() {
            settled.tokenizer.path = spec.model.path.clone();
        }
        settled
    }
}

/// What the recipe trains on a model of this shape.
pub(super) fn trained(
    spec: &Spec,
    folder: Option<&Folder>,
    shape: &ModelConfig,
) -> Result<Trained, Flaw> {
    let model = &spec.model;
    let refused = |message: String| flaw("trainer-weights", message);
    let earlier = |is_merged| {
        folder.map(|folder| EarlierAdapter {
            directory: folder.directory.clone(),
            is_merged,
        })
    };
    let of_folder = folder.map(|folder| folder.config.settings(spec.seed));
    let of_folder = of_folder.transpose().map_err(refused)?;
    let adapters = match model.adapters {
        true => Some(adapter::of_recipe(model, shape, spec.seed).map_err(refused)?),
        false => of_folder,
    };
    Ok(Trained {
        base: match folder {
            Some(folder) => folder.config.base_model_name_or_path.clone(),
            None => model.path.clone(),
        },
        adapters,
        earlier: earlier(model.adapters),
    })
}

fn flaw(rule: &'static str, message: String) -> Flaw {
    Flaw {
        rule,
        paths: vec![
            "model.lora_target_modules".to_owned(),
            "model.adapters".to_owned(),
            "model.path".to_owned(),
        ],
        message,
        help: "name the layers in lora_target_modules, or `all-linear`; or give your program after `--`"
            .to_owned(),
    }
}
