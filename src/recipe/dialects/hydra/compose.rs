//! The files of a config, merged in the order of its defaults lists.
//!
//! Hydra processes a list from its last entry to its first, so an override in an entry applies to all
//! earlier entries.
//!
//! Source: Hydra 1.3, `_internal/defaults_list.py` (`_create_defaults_tree_impl`, `Overrides`),
//! `_internal/config_loader_impl.py`, `core/default_element.py` (`get_config_path`,
//! `get_final_package`); for files `_internal/config_repository.py` (`load_config`) and
//! `plugins/config_source.py` (`_get_header_dict`: the `@package` header of a file).

use std::collections::BTreeMap;

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::yaml::MAX_DEPTH;
use crate::util::suggest::{did_you_mean, nearest, short};

use super::defaults::{self, Choice, Default, What};
use super::grammar::{self, Kind, Override};
use super::place::{TreeLocation, is_inside};

/// The most files of one config.
const MAX_FILES: usize = 64;
/// The most values of all files.
const MAX_VALUES: usize = 20_000;

/// The option chosen for a group.
struct Chosen {
    choice: Choice,
    span: Span,
    /// Whether a list has the group.
    used: bool,
    /// From the command line, not from an `override` entry.
    typed: bool,
}

pub(super) struct Composer<'r> {
    place: &'r TreeLocation,
    reading: &'r mut Reading,
    /// Options for groups that are in a list, by group: from the command line, else from the first
    /// `override` entry.
    chosen: BTreeMap<String, Chosen>,
    /// Groups of `+GROUP=OPTION`, which no list has.
    added: Vec<Default>,
    /// Groups in the lists so far, with their options.
    known: BTreeMap<String, Option<String>>,
    values: usize,
    files: usize,
    /// The files that include the current one, the outermost first.
    chain: Vec<String>,
    /// The keys of every file below its package, the last to merge first.
    layers: Vec<Node>,
    /// Composition has found everything so far.
    complete: bool,
}

impl<'r> Composer<'r> {
    pub fn new(place: &'r TreeLocation, reading: &'r mut Reading) -> Composer<'r> {
        Composer {
            place,
            reading,
            chosen: BTreeMap::new(),
            added: Vec::new(),
            known: BTreeMap::new(),
            values: 0,
            files: 0,
            chain: Vec::new(),
            layers: Vec::new(),
            complete: true,
        }
    }

    /// Records an override of a group.
    pub fn choose(&mut self, line: Override) {
        let Override {
            kind, key, span, ..
        } = line;
        let choice = line.value.as_ref().and_then(Choice::of);
        let choice = choice.filter(|choice| *choice != Choice::Nothing);
        let (message, help) = match (kind, choice) {
            (Kind::Force, _) => (
                format!("`++` cannot choose an option of the config group `{key}`"),
                "write `GROUP=OPTION`, or `+GROUP=OPTION` for a group that the defaults lack",
            ),
            (Kind::Add, Some(choice)) => {
                self.added.push(Default {
                    what: What::Group { group: key, choice },
                    optional: false,
                    span,
                });
                return;
            }
            (Kind::Delete, choice) | (Kind::Change, choice @ Some(_)) => {
                let chosen = Chosen {
                    choice: choice.unwrap_or(Choice::Nothing),
                    span,
                    used: false,
                    typed: true,
                };
                // A removed group stays removed, whatever its option.
                let earlier = self.chosen.get(&key).map(|chosen| &chosen.choice);
                if earlier != Some(&Choice::Nothing) {
                    self.chosen.insert(key, chosen);
                }
                return;
            }
            (Kind::Add | Kind::Change, None) => (
                format!("the config group `{key}` takes the name of an option"),
                "write `GROUP=OPTION`",
            ),
        };
        self.reading
            .error("override-syntax", Some(span), message, help);
    }

    /// Composes the config whose own file is `root`. Returns whether composition found everything.
    pub fn run(mut self, root: Node) -> (Node, bool) {
        let mut config = Node::mapping(root.span);
        let place = self.place;
        let package = place.group().unwrap_or_default().replace('/', ".");
        self.file(&place.name, &package, root);
        for mut layer in std::mem::take(&mut self.layers).into_iter().rev() {
            drop_missing(&mut layer, &config);
            config.overlay(layer);
        }
        for (group, chosen) in std::mem::take(&mut self.chosen) {
            if chosen.used {
                continue;
            }
            let (message, help) = if !chosen.typed {
                (
                    format!("no earlier entry has the config group `{group}` to override"),
                    "move the entry after the one that it overrides".to_owned(),
                )
            } else if chosen.choice == Choice::Nothing {
                (
                    format!("no defaults list has the config group `{group}` to remove"),
                    "remove the override".to_owned(),
                )
            } else {
                (
                    format!("no defaults list has the config group `{group}`"),
                    format!("write `+{group}=OPTION` to add the group"),
                )
            };
            self.refuse("unknown-override", chosen.span, message, help);
        }
        (config, self.complete)
    }

    fn refuse(&mut self, rule: &str, span: Span, message: String, help: impl Into<String>) {
        self.complete = false;
        self.reading.error(rule, Some(span), message, help);
    }

    /// Refuses the option of a group, which another one ends.
    fn refuse_option(
        &mut self,
        rule: &str,
        group: &str,
        span: Span,
        message: String,
        help: String,
    ) {
        let ended = (!self.place.options(group).is_empty()).then(|| format!("{group}=OPTION"));
        let problem = Diagnostic::error(rule, Some(span), message, help);
        self.complete = false;
        self.reading.diagnostics.push(match ended {
            Some(words) => problem.ended_by([words]),
            None => problem,
        });
    }

    /// Adds the layers of a file and of its defaults list.
    fn file(&mut self, name: &str, package: &str, mut node: Node) {
        if let Err((message, help)) = self.count(name, &node) {
            return self.refuse("defaults-list", node.span, message, help);
        }
        if node.is_null(Schema::OmegaConf) {
            return;
        }
        if node.entries().is_none() {
            let message = format!("a config is a mapping, `{name}` is {}", node.kind());
            return self.refuse("wrong-type", node.span, message, "write `key: value` lines");
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
            entries.push(Default {
                what: What::This,
                optional: false,
                span: node.span,
            });
        }
        if self.chain.is_empty() {
            self.hydras_own(&mut node);
            self.add(&mut entries);
        }
        self.note_overrides(name, package, &entries);
        self.chain.push(name.to_owned());
        let folder = folder_of(name);
        for entry in entries.iter().rev() {
            match &entry.what {
                What::This if package.is_empty() => self.layers.push(node.clone()),
                What::This => {
                    let mut layer = Node::mapping(node.span);
                    layer.set_path(package, node.clone());
                    self.layers.push(layer);
                }
                What::Override { .. } => {}
                What::File(file) => {
                    let below = below(package, folder_of(file));
                    self.load(&full(folder, file), &below, entry.optional, entry.span);
                }
                What::Group { group, choice } => {
                    let (full, below) = (full(folder, group), below(package, group));
                    self.group(&full, &below, entry, choice);
                }
            }
        }
        self.chain.pop();
    }

    /// Removes Hydra's settings from the root, and refuses those that change the config.
    fn hydras_own(&mut self, root: &mut Node) {
        if let Some(mode) = root.get_path("hydra.mode")
            && mode.text() == Some("MULTIRUN")
        {
            let (message, help) = grammar::sweep("hydra.mode: MULTIRUN");
            self.refuse("unsupported-value", mode.span, message, help);
        }
        if let Some(list) = root.get_path("hydra.searchpath")
            && !list.is_null(Schema::OmegaConf)
        {
            let (message, help) = SEARCH_PATH;
            self.refuse("unsupported-value", list.span, message.to_owned(), help);
        }
        root.remove_path("hydra");
        root.remove_path(RESERVED);
    }

    /// Adds the groups of the command line to the root's list, which must not have them already.
    fn add(&mut self, entries: &mut Vec<Default>) {
        for new in std::mem::take(&mut self.added) {
            let What::Group { group, .. } = &new.what else {
                continue;
            };
            let same =
                |own: &Default| matches!(&own.what, What::Group { group: own, .. } if own == group);
            if entries.iter().any(same) {
                let message = format!("`+{group}` adds a config group that the list already has");
                let help = format!("write `{group}=OPTION`");
                self.refuse("unknown-override", new.span, message, help);
            } else {
                entries.push(new);
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
        self.values += node.count();
        let message = if self.files > MAX_FILES {
            format!("the config includes more than {MAX_FILES} files")
        } else if self.values > MAX_VALUES {
            format!("the config has more than {MAX_VALUES} values")
        } else {
            return Ok(());
        };
        Err((message, "is this the right tree?"))
    }

    /// Records `override GROUP: OPTION` entries, which apply to every list processed later; the
    /// first one wins.
    fn note_overrides(&mut self, name: &str, package: &str, entries: &[Default]) {
        for entry in entries {
            let What::Override { group, choice } = &entry.what else {
                continue;
            };
            let key = key(&full(folder_of(name), group), &below(package, group));
            if !key.starts_with("hydra/") {
                self.chosen.entry(key).or_insert(Chosen {
                    choice: choice.clone(),
                    span: entry.span,
                    used: false,
                    typed: false,
                });
            }
        }
    }

    /// Adds the layers of a group's option.
    fn group(&mut self, full: &str, package: &str, entry: &Default, choice: &Choice) {
        let key = key(full, package);
        let (mut choice, mut span) = (choice.clone(), entry.span);
        if let Some(chosen) = self.chosen.get_mut(&key) {
            chosen.used = true;
            (choice, span) = (chosen.choice.clone(), chosen.span);
        }
        let option = match choice {
            Choice::Option(option) => Some(option),
            Choice::Nothing => None,
            Choice::Missing => {
                let help = self.how_to_choose(full);
                let message = format!("an option of the config group `{key}` must be chosen");
                return self.refuse_option("mandatory-missing", full, span, message, help);
            }
        };
        let known = self.known.insert(key.clone(), option.clone());
        if known.is_some_and(|known| known.is_some() || option.is_some()) {
            let message = format!("the config group `{key}` is in the lists twice");
            let help = format!("remove one of them, or write `override {key}: …` instead");
            self.refuse("defaults-list", span, message, help);
        }
        if let Some(option) = option {
            self.load(&format!("{full}/{option}"), package, entry.optional, span);
        }
    }

    fn how_to_choose(&self, group: &str) -> String {
        let options = self.place.options(group);
        if options.is_empty() {
            format!("there is no directory `{group}` next to the config")
        } else {
            format!("write `{group}=OPTION`: one of {}", options.join(", "))
        }
    }

    /// Adds the layers of a file of the tree. `span`: the position that names it.
    fn load(&mut self, name: &str, package: &str, optional: bool, span: Span) {
        if name.contains("${") {
            let message = format!("`{}` is an interpolation in a defaults list", short(name));
            let help = "it is not supported there: write the option's name";
            return self.refuse("defaults-list", span, message, help);
        }
        let path = self.place.file(name);
        if !is_inside(name) || !self.reading.origin.is_file(&path) {
            if !optional {
                self.refuse_missing(name, span);
            }
            return;
        }
        let Some(text) = self.reading.text(&path, Some(span)) else {
            self.complete = false;
            return;
        };
        let package = match defaults::package_header(&text) {
            None => package.to_owned(),
            Some("_global_") => String::new(),
            Some(header) => {
                let header = short(header);
                let message = format!("the package `{header}` of `{name}` is not supported");
                let help = "remove the line, or write `# @package _global_`";
                return self.refuse("defaults-list", span, message, help);
            }
        };
        if package.split('.').count() > MAX_DEPTH {
            let message = format!("`{name}` is more than {MAX_DEPTH} groups deep");
            let help = "no recipe key is nested this deeply";
            return self.refuse("defaults-list", span, message, help);
        }
        // A file of comments alone is an empty config, not an error.
        let only_comments = |line: &str| line.trim().is_empty() || line.trim().starts_with('#');
        if text.lines().all(only_comments) {
            self.reading.sources.add(path, text);
            return;
        }
        match self.reading.parse(&path, text) {
            Some(node) => self.file(name, &package, node),
            None => self.complete = false,
        }
    }

    fn refuse_missing(&mut self, name: &str, span: Span) {
        let (group, option) = (folder_of(name), name.rsplit('/').next().unwrap_or(name));
        let options = self.place.options(group);
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        let (message, help) = if group.is_empty() {
            let folder = self.place.folder.display();
            (
                format!("there is no config `{name}` in {folder}"),
                did_you_mean(option, words),
            )
        } else {
            let choose = self.how_to_choose(group);
            (
                format!("the config group `{group}` has no option `{option}`"),
                match nearest(option, &words) {
                    Some(near) => format!("did you mean `{near}`? {choose}"),
                    None => choose,
                },
            )
        };
        match group {
            "" => self.refuse("config-missing", span, message, help),
            group => self.refuse_option("config-missing", group, span, message, help),
        }
    }
}

/// The message and the help for a tree with more folders, in its root or on the command line.
pub(super) const SEARCH_PATH: (&str, &str) = (
    "`hydra.searchpath` is not supported",
    "put the files into the folders of the tree",
);

/// Removes every `???` of a layer for which the config has a value: it replaces nothing (OmegaConf 2.3,
/// `basecontainer.py`, `_map_merge`).
fn drop_missing(layer: &mut Node, config: &Node) {
    let Value::Mapping(entries) = &mut layer.value else {
        return;
    };
    entries.retain_mut(|entry| {
        let Some(present) = config.get(&entry.name) else {
            return true;
        };
        drop_missing(&mut entry.value, present);
        entry.value.resolve(Schema::OmegaConf) != Some(Resolved::Missing)
    });
}

/// The directory of a config's name.
fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The path of an entry's file or group, from the root of the tree. `folder`: of the file with the list.
fn full(folder: &str, name: &str) -> String {
    match name.strip_prefix('/') {
        Some(absolute) => absolute.to_owned(),
        None if folder.is_empty() => name.to_owned(),
        None => format!("{folder}/{name}"),
    }
}

/// The package of a group's files in the list of a file with this package.
fn below(package: &str, group: &str) -> String {
    let own = group.trim_start_matches('/').replace('/', ".");
    [package, &own]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(".")
}

/// The key by which an override chooses a group: its path, and `@PACKAGE` if the package differs from the path.
fn key(full: &str, package: &str) -> String {
    if package == full.replace('/', ".") {
        full.to_owned()
    } else {
        format!("{full}@{package}")
    }
}
