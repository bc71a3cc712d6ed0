//! The adapters that a recipe trains: its own, or those of a folder that it names in place of a model.

use std::path::{Path, PathBuf};

use super::LaunchError;
use crate::engine::{Adapted, Adapters, Family, ModelConfig};
use crate::plan::{DeviceKind, Flaw};
use crate::recipe::Spec;
use crate::telemetry::human::grouped;
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
    let is_quantised = model.load_in_4bit;
    if is_quantised && shape.family == Family::GptNeoX {
        return Err(refused(
            "the built-in trainer has no GPT-NeoX in 4 bits".to_owned(),
        ));
    }
    if is_quantised && adapters.is_none() {
        return Err(refused(
            "weights in 4 bits cannot be trained, only adapters over them".to_owned(),
        ));
    }
    let adapters = adapters.map(|adapters| Adapters {
        is_quantised,
        ..adapters
    });
    Ok(Trained {
        base: match folder {
            Some(folder) => folder.config.base_model_name_or_path.clone(),
            None => model.path.clone(),
        },
        adapters,
        earlier: earlier(model.adapters),
    })
}

/// Refuses adapters on GPUs, which do not compute them yet.
pub(super) fn refuse_on_device(has_adapters: bool, device: DeviceKind) -> Result<(), LaunchError> {
    if has_adapters && device == DeviceKind::Cuda {
        return Err(LaunchError::Model {
            message: "adapters are trained on CPUs only; add `--device cpu`".to_owned(),
        });
    }
    Ok(())
}

/// The adapters of a run, for people.
pub(super) fn described(adapters: &Adapters, shape: &ModelConfig) -> String {
    let adapted = Adapted::new(shape, adapters.clone());
    let (trained, all) = (adapted.trained.len(), adapted.model.len());
    let layers = match adapters.modules.as_slice() {
        [] => "every linear layer".to_owned(),
        names => names.join(", "),
    };
    format!(
        "adapters of rank {} on {layers} are trained: {} parameters over {} that are frozen{}",
        adapters.rank,
        grouped(trained),
        grouped(all),
        if adapters.is_quantised {
            ", in 4 bits"
        } else {
            ""
        }
    )
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
