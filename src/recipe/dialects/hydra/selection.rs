//! The options of config groups that overrides choose, add and remove, before the lists are processed.
//!
//! Source: Hydra 1.3, `_internal/defaults_list.py` (`Overrides`).

use std::collections::BTreeMap;

use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::Span;

use super::defaults::{Choice, Default, What};
use super::grammar::{Kind, Override};

/// The overrides of groups on the command line and in `override` entries.
#[derive(Debug, Default)]
pub(super) struct Selection {
    /// Options for groups that are in a list, by [`super::names::List::key`]: from the command line,
    /// and from `override` entries whose group has no earlier choice.
    pub chosen: BTreeMap<String, Chosen>,
    /// Groups of `+GROUP=OPTION`, which no list has.
    pub added: Vec<Default>,
    /// Groups of `~GROUP`.
    pub deleted: BTreeMap<String, Deleted>,
}

/// The options chosen for a group.
#[derive(Debug)]
pub(super) struct Chosen {
    pub options: Choice,
    pub span: Span,
    /// Whether a list has the group.
    pub used: bool,
    /// From the command line, not from a list.
    pub typed: bool,
}

/// A group that an override removes.
#[derive(Debug)]
pub(super) struct Deleted {
    /// Remove only this option.
    pub option: Option<String>,
    pub span: Span,
    /// Whether a list has the group.
    pub used: bool,
}

impl Selection {
    /// Records an override of a group.
    pub fn take(&mut self, line: Override, reading: &mut Reading) {
        let Override {
            kind,
            key,
            package,
            value,
            span,
        } = line;
        let named = match &package {
            Some(package) => format!("{key}@{package}"),
            None => key.clone(),
        };
        let value = value.filter(|value| !value.is_null(Schema::OmegaConf));
        let options = value.as_ref().and_then(Choice::of);
        let (message, help) = match (kind, options) {
            (Kind::Force, _) => (
                format!("`++` cannot choose an option of the config group `{key}`"),
                "write `GROUP=OPTION`, or `+GROUP=OPTION` for a group that the defaults lack",
            ),
            (Kind::Delete, options) => {
                let option = match options {
                    Some(Choice::Options(names)) => names.into_iter().next(),
                    _ => None,
                };
                let used = false;
                self.deleted.insert(named, Deleted { option, span, used });
                return;
            }
            (Kind::Add, Some(options)) => {
                self.added.push(Default {
                    what: What::Group {
                        group: key,
                        options,
                    },
                    package,
                    optional: false,
                    span,
                });
                return;
            }
            (Kind::Change, Some(options)) => {
                let chosen = Chosen {
                    options,
                    span,
                    used: false,
                    typed: true,
                };
                self.chosen.insert(named, chosen);
                return;
            }
            _ => (
                format!("the config group `{key}` takes the name of an option"),
                "write `GROUP=OPTION`",
            ),
        };
        reading.error("override-syntax", Some(span), message, help);
    }

    /// Whether a group is removed: with any option, or with one of these.
    pub fn deletes(&mut self, key: &str, names: Option<&Vec<String>>) -> bool {
        let Some(deleted) = self.deleted.get_mut(key) else {
            return false;
        };
        let fits = match (&deleted.option, names) {
            (None, _) => true,
            (Some(option), Some(names)) => names.contains(option),
            (Some(_), None) => false,
        };
        deleted.used |= fits;
        fits
    }
}
