//! A request to read a recipe.

use std::path::PathBuf;

use super::dialect::{Dialect, RESERVED};
use super::environment::Environment;
use super::origin::Origin;
use super::overrides::Setting;

/// The recipe to read, with the command line's options.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Where to read all files from.
    pub origin: Origin,
    /// The environment variables that the recipe may refer to. Default: none.
    pub environment: Environment,
    /// The recipe's file, or the folder of a Hydra tree. Empty: the command holds everything.
    pub path: PathBuf,
    /// The words of the upstream command. The launcher's options and the trainer's arguments override the
    /// recipe's.
    pub command: Vec<String>,
    /// The words of a launcher that starts the recipe's program, without the program's arguments. Only
    /// `launcher` or `command` is set.
    pub launcher: Vec<String>,
    /// The external trainer's command, which replaces the recipe's.
    pub trainer_command: Vec<String>,
    /// An additional accelerate config.
    pub accelerate: Option<PathBuf>,
    /// Overrides, `KEY=VALUE`, with keys of the recipe's dialect or below the reserved key `evenkeel`.
    pub overrides: Vec<String>,
    /// The dialect. `None`: it is detected.
    pub dialect: Option<Dialect>,
    /// The version of the dialect. `None`: it is detected.
    pub version: Option<String>,
    /// Flags that set a native key. They win over everything else.
    pub settings: Vec<Setting>,
}

impl Request {
    /// The value of the flag for a native path, such as `batch.gpus`.
    pub(crate) fn setting(&self, path: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.path == path)
    }

    /// Whether the user gives the global batch, so that a recipe need not state one.
    pub(crate) fn states_batch(&self) -> bool {
        self.setting("batch.global").is_some()
            || self.overrides_key(&format!("{RESERVED}.batch.global"))
    }

    /// Whether an override replaces the key.
    pub(crate) fn overrides_key(&self, key: &str) -> bool {
        let mut names = self
            .overrides
            .iter()
            .filter_map(|text| text.split_once('='));
        names.any(|(name, _)| name == key)
    }
}
