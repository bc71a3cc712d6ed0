//! Layers of a config in the order of its defaults lists.
//!
//! Hydra processes a list from its last entry to its first. So an override in an entry applies to
//! all earlier entries, and an interpolation sees the options of groups in later
//! entries. Entries whose option is an interpolation are processed last.
//!
//! Source: Hydra 1.3, `_internal/defaults_list.py` (`_create_defaults_tree_impl`),
//! `_internal/config_loader_impl.py`; for files `_internal/config_repository.py` (`load_config`) and
//! `plugins/config_source.py` (`_get_header_dict`: the `@package` header of a file).

use std::collections::BTreeMap;

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::yaml::{MAX_DEPTH, Weight, weigh};
use crate::util::suggest::{did_you_mean, nearest};

use super::Program;
use super::defaults::{self, Choice, Default, What};
use super::interpolation;
use super::layer::Layer;
use super::names::{List, dotted, folder_of};
use super::place::TreeLocation;
use super::place::is_inside;
use super::selection::{Chosen, Selection};
use super::sweep;

/// The most files of one config.
const MAX_FILES: usize = 64;
/// The longest chain of files that include each other.
const MAX_CHAIN: usize = 16;
/// The most nodes of all files.
const MAX_NODES: usize = 20_000;

/// The options that an interpolation in a list can refer to, by group; `None` for `null`. It has every
/// group processed so far.
pub(super) type Choices = BTreeMap<String, Option<String>>;

pub(super) struct Composer<'r> {
    pub place: &'r TreeLocation,
    pub program: &'r Program,
    pub selection: Selection,
    pub reading: &'r mut Reading,
    pub choices: Choices,
    pub weight: Weight,
    pub files: usize,
    /// The files that include the current one, the outermost first.
    pub chain: Vec<String>,
    /// Composition has found everything so far.
    pub complete: bool,
}

impl Composer<'_> {
    /// Composes the config whose own file is `root`.
    pub fn run(&mut self, root: Node) -> Node {
        let mut config = Node::mapping(root.span);
        let place = self.place;
        let list = List {
            name: &place.name,
            package: &dotted(place.group().unwrap_or_default()),
            interpolated: false,
        };
        for layer in self.file(list, root) {
            layer.lay(&mut config);
        }
        config
    }

    /// Reports unused choices of the command line. Returns whether composition found everything.
    pub fn finish(mut self) -> bool {
        let chosen = std::mem::take(&mut self.selection.chosen);
        for (group, chosen) in chosen.into_iter().filter(|(_, c)| !c.used) {
            let (message, help) = match chosen.typed {
                true => (
                    format!("no defaults list has the config group `{group}`"),
                    format!("write `+{group}=OPTION` to add the group"),
                ),
                false => (
                    format!("no earlier entry has the config group `{group}` to override"),
                    "move the entry after the one that it overrides".to_owned(),
                ),
            };
            self.refuse("unknown-override", chosen.span, message, help);
        }
        let deleted = std::mem::take(&mut self.selection.deleted);
        for (group, deleted) in deleted.into_iter().filter(|(_, d)| !d.used) {
            let message = format!("no defaults list has the config group `{group}` to remove");
            self.refuse(
                "unknown-override",
                deleted.span,
                message,
                "remove the override",
            );
        }
        self.complete
    }

    fn refuse(&mut self, rule: &str, span: Span, message: String, help: impl Into<String>) {
        self.complete = false;
        self.reading.error(rule, Some(span), message, help);
    }

    /// The layers of a file and of its defaults list, in merge order.
    fn file(&mut self, list: List<'_>, mut node: Node) -> Vec<Layer> {
        if let Err((message, help)) = self.count(list.name, &node) {
            self.refuse("defaults-list", node.span, message, help);
            return Vec::new();
        }
        if node.is_null(Schema::OmegaConf) {
            return Vec::new();
        }
        if node.entries().is_none() {
            let message = format!("a config is a mapping, `{}` is {}", list.name, node.kind());
            self.refuse("wrong-type", node.span, message, "write `key: value` lines");
            return Vec::new();
        }
        let mut entries = match node.get("defaults").map(defaults::parse) {
            None => Vec::new(),
            Some(Ok(entries)) => entries,
            Some(Err((span, message))) => {
                let help = "write `- _self_`, `- FILE` or `- GROUP: OPTION` lines";
                self.refuse("defaults-list", span, message, help);
                Vec::new()
            }
        };
        node.remove_path("defaults");
        // A file whose list lacks `_self_` comes after its defaults.
        if entries.iter().all(|entry| entry.what != What::This) {
            entries.push(Default::this(node.span));
        }
        if self.chain.is_empty() {
            if let Some((span, (message, help))) = sweep::in_root(&node) {
                self.refuse("unsupported-value", span, message, help);
            }
            // Hydra's own settings do not concern training.
            node.remove_path("hydra");
            node.remove_path(RESERVED);
            let added = std::mem::take(&mut self.selection.added);
            self.add(added, &mut entries);
        }
        self.note_overrides(list, &entries);
        self.chain.push(list.name.to_owned());
        let layers = self.layers(list, &entries, node);
        self.chain.pop();
        layers
    }

    /// The layers of every entry of a list; `own` has the keys of the file that contains the list.
    fn layers(&mut self, list: List<'_>, entries: &[Default], own: Node) -> Vec<Layer> {
        let mut own = Some(own);
        let mut layers: Vec<Vec<Layer>> = entries.iter().map(|_| Vec::new()).collect();
        let mut interpolated = Vec::new();
        for (at, entry) in entries.iter().enumerate().rev() {
            if entry.what == What::This {
                layers[at].extend(own.take().map(|node| Layer {
                    package: list.package.to_owned(),
                    node,
                }));
            } else if let Some(found) = self.entry(list, entry, None) {
                layers[at] = found;
            } else {
                interpolated.push(at);
            }
        }
        // Entries of one list do not see each other's options.
        let choices = self.choices.clone();
        for at in interpolated {
            let found = self.entry(list, &entries[at], Some(&choices));
            layers[at] = found.unwrap_or_default();
        }
        layers.into_iter().flatten().collect()
    }

    /// Adds the groups of the command line to the root's list, which must not have them already.
    fn add(&mut self, added: Vec<Default>, entries: &mut Vec<Default>) {
        for new in added {
            let same = |own: &Default| match (&own.what, &new.what) {
                (What::Group { group, .. }, What::Group { group: other, .. }) => {
                    group == other && own.package == new.package
                }
                _ => false,
            };
            match (entries.iter().any(same), &new.what) {
                (true, What::Group { group, .. }) => {
                    let message =
                        format!("`+{group}` adds a config group that the list already has");
                    let help = format!("write `{group}=OPTION`");
                    self.refuse("unknown-override", new.span, message, help);
                }
                _ => entries.push(new),
            }
        }
    }

    /// Counts a file. An error, with message and help, if the config may not include it.
    fn count(&mut self, name: &str, node: &Node) -> Result<(), (String, &'static str)> {
        if let Some(at) = self.chain.iter().position(|file| file == name) {
            let circle = [&self.chain[at..], &[name.to_owned()]].concat().join(" → ");
            let message = format!("the defaults lists form a cycle: {circle}");
            return Err((message, "remove one of them from its list"));
        }
        self.files += 1;
        if self.files > MAX_FILES || self.chain.len() >= MAX_CHAIN {
            let message = format!(
                "the config includes more than {MAX_FILES} files, or more than {MAX_CHAIN} in a chain"
            );
            return Err((message, "is this the right tree?"));
        }
        let total = self.weight.with(weigh(node));
        match total.filter(|total| total.nodes <= MAX_NODES) {
            Some(total) => self.weight = total,
            None => {
                let message = format!("the config has more than {MAX_NODES} values");
                return Err((message, "is this the right tree?"));
            }
        }
        Ok(())
    }

    /// Records `override GROUP: OPTION` entries, which apply to every list processed later; the
    /// first one wins.
    fn note_overrides(&mut self, list: List<'_>, entries: &[Default]) {
        for entry in entries {
            let What::Override { group, options } = &entry.what else {
                continue;
            };
            let key = list.key(group, entry.package.as_deref());
            if key.starts_with("hydra/") {
                continue;
            }
            if list.interpolated {
                let message =
                    format!("`override {group}` is in a file that an interpolation chose");
                let help = "Hydra forbids that: choose the file by its name";
                self.refuse("defaults-list", entry.span, message, help);
                continue;
            }
            self.selection.chosen.entry(key).or_insert(Chosen {
                options: options.clone(),
                span: entry.span,
                used: false,
                typed: false,
            });
        }
    }

    /// The layers of an entry of a list. `None` if its interpolations refer to choices that are not
    /// given.
    fn entry(
        &mut self,
        list: List<'_>,
        entry: &Default,
        choices: Option<&Choices>,
    ) -> Option<Vec<Layer>> {
        match &entry.what {
            What::This | What::Override { .. } => Some(Vec::new()),
            What::File(file) => {
                let file = self.written(file, entry.span, choices)?;
                let Some(file) = file else {
                    return Some(Vec::new());
                };
                let group = folder_of(file.trim_start_matches('/'));
                let package = list.inner(group, entry.package.as_deref());
                let target = Target {
                    name: list.full(&file),
                    package,
                    interpolated: list.interpolated || choices.is_some(),
                    span: entry.span,
                };
                Some(self.load(target, entry))
            }
            What::Group { group, options } => self.group(list, entry, group, options, choices),
        }
    }

    /// The layers of a group's options; `None` as in [`Composer::entry`].
    fn group(
        &mut self,
        list: List<'_>,
        entry: &Default,
        group: &str,
        options: &Choice,
        choices: Option<&Choices>,
    ) -> Option<Vec<Layer>> {
        let stated = entry.package.as_deref();
        let (full, key) = (list.full(group), list.key(group, stated));
        let (mut options, mut span) = (options.clone(), entry.span);
        if let Some(chosen) = self.selection.chosen.get_mut(&key) {
            chosen.used = true;
            span = chosen.span;
            options.clone_from(&chosen.options);
        }
        if self.selection.deletes(&key, None) {
            return Some(Vec::new());
        }
        let mut names = match options {
            Choice::Options(names) => names,
            Choice::Missing => {
                let help = self.how_to_choose(&full);
                let message = format!("an option of the config group `{key}` must be chosen");
                self.refuse("mandatory-missing", span, message, help);
                return Some(Vec::new());
            }
        };
        if let [name] = names.as_mut_slice() {
            match self.written(name, span, choices)? {
                Some(written) => *name = written,
                None => return Some(Vec::new()),
            }
        } else if let Some(name) = names.iter().find(|name| name.contains("${")) {
            let message = format!("`{name}` is an interpolation in a list of options");
            let help = "Hydra does not resolve it there: write the option's name";
            self.refuse("defaults-list", span, message, help);
            return Some(Vec::new());
        }
        if self.selection.deletes(&key, Some(&names)) {
            return Some(Vec::new());
        }
        if names.len() < 2 {
            self.note_choice(key, names.first().cloned(), span);
        }
        let package = list.inner(group, stated);
        let mut layers = Vec::new();
        for option in names.iter().rev() {
            let target = Target {
                name: format!("{full}/{option}"),
                package: package.clone(),
                interpolated: list.interpolated || choices.is_some(),
                span,
            };
            layers.push(self.load(target, entry));
        }
        Some(layers.into_iter().rev().flatten().collect())
    }

    /// Records the option of a group; a group has only one.
    fn note_choice(&mut self, key: String, option: Option<String>, span: Span) {
        let Some(known) = self.choices.insert(key.clone(), option.clone()) else {
            return;
        };
        let same = known == option;
        let name = |option: Option<String>| option.unwrap_or_else(|| "null".to_owned());
        let message = match same {
            true if option.is_none() => return,
            true => format!("the config group `{key}` is in the lists twice"),
            false => format!(
                "the config group `{key}` is in the lists as `{}` and as `{}`",
                name(option),
                name(known)
            ),
        };
        let help = format!("remove one of them, or write `override {key}: …` instead");
        self.refuse("defaults-list", span, message, help);
    }

    /// A name after its interpolations. `None` if the choices for one are not
    /// given; `Some(None)` after an error, which is reported.
    fn written(
        &mut self,
        name: &str,
        span: Span,
        choices: Option<&Choices>,
    ) -> Option<Option<String>> {
        if !name.contains("${") {
            return Some(Some(name.to_owned()));
        }
        let mut known = Node::mapping(span);
        for (key, option) in choices? {
            let option = match option {
                Some(option) => Node::string(option, span),
                None => Node::plain("null", span),
            };
            known.set(key, span, option);
        }
        let environment = &self.reading.environment;
        let resolved = interpolation::name(name, &known, self.program.resolvers, environment, span);
        Some(match resolved {
            Ok(text) => Some(text),
            Err((message, help)) => {
                self.refuse("interpolation", span, message, help);
                None
            }
        })
    }

    fn how_to_choose(&self, group: &str) -> String {
        let options = self.place.options(group);
        match options.is_empty() {
            true => format!("there is no directory `{group}` next to the config"),
            false => format!("write `{group}=OPTION`: one of {}", options.join(", ")),
        }
    }
}

/// A file that a list names.
struct Target {
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
    fn load(&mut self, target: Target, entry: &Default) -> Vec<Layer> {
        let name = target.name.as_str();
        let path = self.place.file(name);
        if !is_inside(name) || !self.reading.origin.is_file(&path) {
            if !entry.optional {
                self.refuse_missing(name, target.span);
            }
            return Vec::new();
        }
        let Some(text) = self.reading.text(&path, Some(target.span)) else {
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
        if package.split('.').count() > MAX_DEPTH {
            let message = format!("the package of `{name}` has more than {MAX_DEPTH} parts");
            let help = "no recipe key is nested this deeply";
            self.refuse("defaults-list", target.span, message, help);
            return Vec::new();
        }
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
            Some(node) => self.file(list, node),
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
