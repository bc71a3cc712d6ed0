//! The environment variables that a recipe may refer to (`${oc.env:NAME}`).

use std::collections::BTreeMap;

/// An input of reading, as the files are: a reader never asks its own process for a variable. The controller's
/// environment may hold secrets, and a value that a recipe reads appears in the job's status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Environment {
    /// The variables of the user's shell.
    Shell(BTreeMap<String, String>),
    /// The variables in `spec.trainer.env` of a TrainingJob.
    Job(BTreeMap<String, String>),
}

impl Default for Environment {
    fn default() -> Self {
        Environment::Shell(BTreeMap::new())
    }
}

impl Environment {
    /// The value of a variable.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (Environment::Shell(variables) | Environment::Job(variables)) = self;
        variables.get(name).map(String::as_str)
    }

    /// Adds variables. They replace those of the same name.
    pub(crate) fn extend(&mut self, more: &BTreeMap<String, String>) {
        let (Environment::Shell(variables) | Environment::Job(variables)) = self;
        variables.extend(more.clone());
    }

    /// Message and help for a variable without a value.
    pub(crate) fn missing(&self, name: &str) -> (String, String) {
        match self {
            Environment::Shell(_) => (
                format!("the environment has no `{name}`"),
                "set it, or give a default: `${oc.env:NAME,default}`".to_owned(),
            ),
            Environment::Job(_) => (
                format!(
                    "spec.trainer.env has no `{name}`, the only environment of a TrainingJob's recipe"
                ),
                "set the variable there, set the key in spec.overrides, or give a default: \
                 `${oc.env:NAME,default}`"
                    .to_owned(),
            ),
        }
    }
}
