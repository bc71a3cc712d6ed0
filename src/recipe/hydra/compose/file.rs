//! A file that a list names: its path and its layers.
//!
//! Source: Hydra 1.3, `_internal/config_repository.py` (`load_config`), `plugins/config_source.py`
//! (`_get_header_dict`: the `@package` header of a file).

use super::Composer;
use crate::recipe::hydra::defaults::{self, Default};
use crate::recipe::hydra::layer::Layer;
use crate::recipe::hydra::names::{List, folder_of};
use crate::recipe::hydra::place::is_inside;
use crate::recipe::source::Span;
use crate::recipe::suggest::{did_you_mean, nearest};

/// A file that a list names.
pub(super) struct Target {
    /// The name from the root of the tree.
    pub name: String,
    /// The package that the list gives it.
    pub package: String,
    /// An interpolation chose the file, or the list that names it.
    pub interpolated: bool,
    /// The position of the choice.
    pub span: Span,
}

impl Composer<'_> {
    /// The layers of a file of the tree.
    pub(super) fn load(
        &mut self,
        target: Target,
        entry: &Default,
        chain: &mut Vec<String>,
    ) -> Vec<Layer> {
        let name = target.name.as_str();
        let path = self.place.file(name);
        if !is_inside(name) || !self.reading.origin.is_file(&path) {
            if !entry.optional {
                self.refuse_missing(name, target.span);
            }
            return Vec::new();
        }
        let Some(text) = self.reading.text(&path) else {
            self.complete = false;
            return Vec::new();
        };
        let header = defaults::package_header(&text);
        let package = match header.as_deref() {
            None => target.package,
            // The list's package overrides the file's header.
            Some(_) if entry.package.is_some() => target.package,
            Some("_global_") => String::new(),
            Some(header) => header
                .strip_prefix("_global_.")
                .unwrap_or(header)
                .to_owned(),
        };
        // A file of comments alone is an empty config, not an error.
        let only_comments = |line: &str| line.trim().is_empty() || line.trim().starts_with('#');
        if text.lines().all(only_comments) {
            self.reading.sources.add(path, text);
            return Vec::new();
        }
        let list = List {
            name,
            package: &package,
            interpolated: target.interpolated,
        };
        match self.reading.parse(&path, text) {
            Some(node) => self.file(list, node, chain),
            None => {
                self.complete = false;
                Vec::new()
            }
        }
    }

    fn refuse_missing(&mut self, name: &str, span: Span) {
        let (group, option) = (folder_of(name), name.rsplit('/').next().unwrap_or(name));
        let options = self.place.options(group);
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        let choose = self.how_to_choose(group);
        let (message, help) = match group {
            "" => (
                format!(
                    "there is no config `{name}` in {}",
                    self.place.folder.display()
                ),
                did_you_mean(option, words),
            ),
            group => (
                format!("the config group `{group}` has no option `{option}`"),
                match nearest(option, &words) {
                    Some(near) => format!("did you mean `{near}`? {choose}"),
                    None => choose,
                },
            ),
        };
        self.refuse("config-missing", span, message, help);
    }
}
