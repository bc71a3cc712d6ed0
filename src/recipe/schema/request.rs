//! A request to read a recipe.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::dialect::{Dialect, RESERVED};
use super::environment::Environment;
use super::origin::Origin;
use super::overrides::Setting;
use crate::recipe::syntax::shell;

/// Bytes of a command that messages repeat.
const LONG: usize = 100;

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
    /// The program of `command` is the external trainer.
    pub starts_command: bool,
    /// The external trainer's command, which replaces the recipe's.
    pub trainer_command: Vec<String>,
    /// The environment of the external trainer's ranks, which replaces the recipe's. Empty: the recipe's.
    pub trainer_environment: BTreeMap<String, String>,
    /// The text of the external trainer's DeepSpeed config, which replaces the recipe's.
    pub deepspeed_config: Option<String>,
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
    /// The options of the world as typed, for the commands in messages. Empty: `--gpus N`.
    pub world: Vec<String>,
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

    /// Whether the user states an axis, so that those which are not read are known.
    pub(crate) fn states_axes(&self) -> bool {
        let begin = format!("{RESERVED}.parallel.");
        self.overrides.iter().any(|text| text.starts_with(&begin))
    }

    /// The command that plans this recipe with more words, as the user types it.
    pub(crate) fn plan_with(&self, more: &[&str]) -> String {
        let mut words = vec!["evenkeel".to_owned(), "plan".to_owned()];
        if !self.path.as_os_str().is_empty() {
            words.push(self.path.display().to_string());
        }
        match self.world.is_empty() {
            true => words.extend(["--gpus", "N"].map(str::to_owned)),
            false => words.extend(self.world.iter().cloned()),
        }
        words.extend(self.overrides.iter().cloned());
        words.extend(more.iter().map(|word| (*word).to_owned()));
        let line = shell::join(&words);
        match self.command.is_empty() {
            true => line,
            false if self.command.iter().map(String::len).sum::<usize>() > LONG => {
                format!("{line} -- COMMAND")
            }
            false => format!("{line} -- {}", shell::join(&self.command)),
        }
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
