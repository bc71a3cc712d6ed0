//! What is to be read, and what the command line says about it.

use std::path::PathBuf;

use super::dialect::Dialect;
use super::origin::Origin;
use super::overrides::Setting;

/// What to read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Where the files that are named here, and those that they name, are looked for.
    pub origin: Origin,
    /// The recipe, or the folder of a tree of configs; empty where a command says everything.
    pub path: PathBuf,
    /// The command that starts it upstream, in words: the launcher's options and the trainer's
    /// arguments, which stand over the recipe's.
    pub command: Vec<String>,
    /// An accelerate config beside it.
    pub accelerate: Option<PathBuf>,
    /// `KEY=VALUE` in the recipe's own dialect, or below the reserved key `evenkeel`.
    pub overrides: Vec<String>,
    /// The dialect, where detection should not decide.
    pub dialect: Option<Dialect>,
    /// The version of the dialect, likewise.
    pub version: Option<String>,
    /// Flags that set a native key; they win over everything else.
    pub settings: Vec<Setting>,
}
