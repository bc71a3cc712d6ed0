//! Layers of a config in the order of its defaults lists, laid over each other.
//!
//! Source: Hydra 1.3, `_internal/defaults_list.py`, `_internal/config_loader_impl.py`; the merge is
//! OmegaConf's `_map_merge`: mappings merge, lists and scalars replace, `???` replaces nothing.

use std::collections::BTreeMap;

use crate::recipe::dialect::RESERVED;
use crate::recipe::node::{Node, Value};
use crate::recipe::reading::Reading;
use crate::recipe::scalar::{Resolved, Schema};
use crate::recipe::source::Span;
use crate::recipe::suggest::{did_you_mean, nearest};
use crate::recipe::yaml::{Weight, weigh};

use super::defaults::{self, Choice, Default, What};
use super::grammar::{Kind, Override};
use super::place::{Place, is_inside};

/// The most files of one config.
const MAX_FILES: usize = 64;
/// The deepest chain of files that name each other.
const MAX_CHAIN: usize = 16;
/// The most nodes of all files together.
const MAX_NODES: usize = 20_000;

/// What the command line says about groups.
#[derive(Debug, Default)]
pub(super) struct Selection {
    chosen: BTreeMap<String, Chosen>,
    added: Vec<Default>,
    deleted: BTreeMap<String, Deleted>,
}

#[derive(Debug)]
struct Chosen {
    options: Choice,
    span: Span,
    used: bool,
    /// By the command line, which wins over every list.
    typed: bool,
}

#[derive(Debug)]
struct Deleted {
    /// Only this option.
    option: Option<String>,
    span: Span,
    used: bool,
}

impl Selection {
    /// Takes an override of a group.
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
        let options = value.as_ref().map(Choice::of);
        let wrong = |message: String, help: &str, reading: &mut Reading| {
            reading.error("override-syntax", Some(span), message, help);
        };
        match (kind, options) {
            (Kind::Force, _) => wrong(
                format!("`++` cannot choose an option of the config group `{key}`"),
                "write `GROUP=OPTION`, or `+GROUP=OPTION` for a group that the defaults lack",
                reading,
            ),
            (Kind::Delete, option) => {
                let option = match option {
                    Some(Some(Choice::Options(names))) => names.into_iter().next(),
                    _ => None,
                };
                let deleted = Deleted {
                    option,
                    span,
                    used: false,
                };
                self.deleted.insert(named, deleted);
            }
            (Kind::Add, Some(Some(options))) => self.added.push(Default {
                what: What::Group {
                    group: key,
                    options,
                },
                package,
                optional: false,
                span,
            }),
            (Kind::Change, Some(Some(options))) => {
                let chosen = Chosen {
                    options,
                    span,
                    used: false,
                    typed: true,
                };
                self.chosen.insert(named, chosen);
            }
            _ => wrong(
                format!("the config group `{key}` takes the name of an option"),
                "write `GROUP=OPTION`",
                reading,
            ),
        }
    }
}

/// Composes one config.
pub(super) struct Composer<'r> {
    place: &'r Place,
    selection: Selection,
    reading: &'r mut Reading,
    config: Node,
    weight: Weight,
    files: usize,
    complete: bool,
}

impl<'r> Composer<'r> {
    /// For a config that begins at a place.
    pub fn new(
        place: &'r Place,
        selection: Selection,
        root: Span,
        reading: &'r mut Reading,
    ) -> Self {
        Composer {
            place,
            selection,
            reading,
            config: Node::mapping(root),
            weight: Weight::default(),
            files: 0,
            complete: true,
        }
    }

    /// The config whose own file is `root`.
    pub fn run(&mut self, root: Node) -> Node {
        let group = self.place.group().unwrap_or_default().to_owned();
        let package = group.replace('/', ".");
        let name = self.place.name.clone();
        self.file(&name, root, &package, &mut Vec::new());
        let span = self.config.span;
        std::mem::replace(&mut self.config, Node::mapping(span))
    }

    /// Reports what the command line chose and nothing took. Whether everything was found.
    pub fn finish(mut self) -> bool {
        let chosen = std::mem::take(&mut self.selection.chosen);
        for (group, chosen) in chosen.into_iter().filter(|(_, c)| !c.used) {
            let (message, help) = (
                format!("no defaults list has the config group `{group}`"),
                format!("write `+{group}=OPTION` to add the group"),
            );
            self.refuse("unknown-override", chosen.span, message, help);
        }
        let deleted = std::mem::take(&mut self.selection.deleted);
        for (group, deleted) in deleted.into_iter().filter(|(_, d)| !d.used) {
            let message = format!("no defaults list has the config group `{group}` to take away");
            self.refuse("unknown-override", deleted.span, message, "leave it out");
        }
        self.complete
    }

    fn refuse(&mut self, rule: &str, span: Span, message: String, help: impl Into<String>) {
        self.complete = false;
        self.reading.error(rule, Some(span), message, help);
    }

    /// Lays a file with everything in its defaults list.
    fn file(&mut self, name: &str, mut node: Node, package: &str, chain: &mut Vec<String>) {
        if let Err((message, help)) = self.count(name, &node, chain) {
            self.refuse("defaults-list", node.span, message, help);
            return;
        }
        if node.resolve(Schema::OmegaConf) == Some(Resolved::Null) {
            return;
        }
        if node.entries().is_none() {
            let message = format!("a config is a mapping, `{name}` is {}", node.kind());
            self.refuse("wrong-type", node.span, message, "write `key: value` lines");
            return;
        }
        let list = node.get("defaults").map(defaults::parse);
        let mut entries = match list {
            None => Vec::new(),
            Some(Ok(entries)) => entries,
            Some(Err((span, message))) => {
                let help = "write `- _self_`, `- FILE` or `- GROUP: OPTION` lines";
                self.refuse("defaults-list", span, message, help);
                Vec::new()
            }
        };
        node.remove_path("defaults");
        if chain.is_empty() {
            // Hydra's own settings say nothing about training.
            node.remove_path("hydra");
            node.remove_path(RESERVED);
            let added = std::mem::take(&mut self.selection.added);
            self.add(added, &mut entries);
        }
        self.note_overrides(name, &entries);
        chain.push(name.to_owned());
        let mut own = Some(node);
        for entry in &entries {
            match &entry.what {
                What::This => {
                    if let Some(node) = own.take() {
                        self.lay(package, node);
                    }
                }
                _ => self.entry(name, package, entry, chain),
            }
        }
        // A file that does not name itself comes after its defaults.
        if let Some(node) = own.take() {
            self.lay(package, node);
        }
        chain.pop();
    }

    /// Adds the groups of the command line to the list of the root, which must not have them.
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
                    let message = format!("`+{group}` adds a config group that the list has");
                    let help = format!("write `{group}=OPTION`");
                    self.refuse("unknown-override", new.span, message, help);
                }
                _ => entries.push(new),
            }
        }
    }

    /// Counts a file; what is wrong and what to do where a config may not have it.
    fn count(
        &mut self,
        name: &str,
        node: &Node,
        chain: &[String],
    ) -> Result<(), (String, &'static str)> {
        if let Some(at) = chain.iter().position(|file| file == name) {
            let circle = [&chain[at..], &[name.to_owned()]].concat().join(" → ");
            let message = format!("the defaults lists go in a circle: {circle}");
            return Err((message, "take one of them out of its list"));
        }
        self.files += 1;
        if self.files > MAX_FILES || chain.len() >= MAX_CHAIN {
            let message = format!(
                "the config takes more than {MAX_FILES} files, or more than {MAX_CHAIN} in a chain"
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

    /// `override GROUP: OPTION` entries, which hold for lists that come later; the first one wins.
    fn note_overrides(&mut self, name: &str, entries: &[Default]) {
        for entry in entries {
            if let What::Override { group, options } = &entry.what {
                let group = join(folder_of(name), group);
                if group.starts_with("hydra/") {
                    continue;
                }
                self.selection.chosen.entry(group).or_insert(Chosen {
                    options: options.clone(),
                    span: entry.span,
                    used: false,
                    typed: false,
                });
            }
        }
    }

    /// Lays what an entry of the list of `name` stands for.
    fn entry(&mut self, name: &str, package: &str, entry: &Default, chain: &mut Vec<String>) {
        let folder = folder_of(name);
        match &entry.what {
            What::This | What::Override { .. } => {}
            What::File(file) => {
                let target = join(folder, file);
                let own = relative(folder_of(file.trim_start_matches('/')));
                let package = inner(package, entry.package.as_deref(), &own);
                self.load(&target, entry, entry.span, &package, chain);
            }
            What::Group { group, options } => {
                let own = relative(group.trim_start_matches('/'));
                let full = join(folder, group);
                let named = match &entry.package {
                    Some(package) => format!("{full}@{package}"),
                    None => full.clone(),
                };
                let mut span = entry.span;
                let mut options = options.clone();
                if let Some(chosen) = self.selection.chosen.get_mut(&named) {
                    chosen.used = true;
                    if chosen.typed || chain.len() == 1 {
                        span = chosen.span;
                    }
                    options.clone_from(&chosen.options);
                }
                if let Some(deleted) = self.selection.deleted.get_mut(&named) {
                    let names = match &options {
                        Choice::Options(names) => names.as_slice(),
                        Choice::Missing => &[],
                    };
                    if deleted.option.as_ref().is_none_or(|o| names.contains(o)) {
                        deleted.used = true;
                        return;
                    }
                }
                let Choice::Options(names) = options else {
                    let help = self.how_to_choose(&full);
                    let message = format!("an option of the config group `{named}` must be chosen");
                    self.refuse("mandatory-missing", span, message, help);
                    return;
                };
                let package = inner(package, entry.package.as_deref(), &own);
                for option in names {
                    self.load(&join(&full, &option), entry, span, &package, chain);
                }
            }
        }
    }

    fn how_to_choose(&self, group: &str) -> String {
        let options = self.place.options(group);
        match options.is_empty() {
            true => format!("there is no folder `{group}` beside the config to choose from"),
            false => format!("write `{group}=OPTION`: one of {}", options.join(", ")),
        }
    }

    /// Reads a file of the tree and lays it.
    fn load(
        &mut self,
        name: &str,
        entry: &Default,
        span: Span,
        package: &str,
        chain: &mut Vec<String>,
    ) {
        let path = self.place.file(name);
        if !is_inside(name) || !path.is_file() {
            if entry.optional {
                return;
            }
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
            return;
        }
        let Some(text) = self.reading.text(&path) else {
            self.complete = false;
            return;
        };
        let header = defaults::package_header(&text);
        let package = match header.as_deref() {
            Some("_group_") | None => package.to_owned(),
            Some("_global_") => String::new(),
            Some(_) if entry.package.is_some() => package.to_owned(),
            Some(header) => header
                .strip_prefix("_global_.")
                .unwrap_or(header)
                .to_owned(),
        };
        // A file of comments alone is an empty config, not an empty recipe.
        let only_comments = |line: &str| line.trim().is_empty() || line.trim().starts_with('#');
        if text.lines().all(only_comments) {
            return;
        }
        match self.reading.parse(&path, text) {
            Some(node) => self.file(name, node, &package, chain),
            None => self.complete = false,
        }
    }

    /// Lays a file's own keys over what there is.
    fn lay(&mut self, package: &str, node: Node) {
        let mut at = &mut self.config;
        for part in package.split('.').filter(|part| !part.is_empty()) {
            if at.get(part).is_none_or(|below| below.entries().is_none()) {
                at.set(part, node.span, Node::mapping(node.span));
            }
            let Value::Mapping(entries) = &mut at.value else {
                return;
            };
            let Some(entry) = entries.iter_mut().find(|e| e.name == part) else {
                return;
            };
            at = &mut entry.value;
        }
        merge(at, node);
    }
}

/// Lays a tree over another as OmegaConf merges them.
pub(super) fn merge(into: &mut Node, over: Node) {
    if over.resolve(Schema::OmegaConf) == Some(Resolved::Missing) && is_given(into) {
        return;
    }
    match (&mut into.value, over.value) {
        (Value::Mapping(own), Value::Mapping(entries)) => {
            for entry in entries {
                match own.iter_mut().find(|e| e.name == entry.name) {
                    Some(present) => {
                        present.name_span = entry.name_span;
                        merge(&mut present.value, entry.value);
                    }
                    None => own.push(entry),
                }
            }
        }
        (_, value) => {
            into.value = value;
            into.span = over.span;
        }
    }
}

fn is_given(node: &Node) -> bool {
    node.resolve(Schema::OmegaConf) != Some(Resolved::Missing)
}

/// The folder of a config's name.
fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// A name as a list in `folder` means it.
fn join(folder: &str, name: &str) -> String {
    match name.strip_prefix('/') {
        Some(absolute) => absolute.to_owned(),
        None if folder.is_empty() => name.to_owned(),
        None => format!("{folder}/{name}"),
    }
}

/// A group's path as a package.
fn relative(group: &str) -> String {
    group.replace('/', ".")
}

/// The package of what a list in `parent` names: as the list says, or after the group.
fn inner(parent: &str, said: Option<&str>, own: &str) -> String {
    let own = match said {
        None => own,
        Some("_here_") => "",
        Some(said) => match said.strip_prefix("_global_") {
            Some(rest) => return rest.trim_start_matches('.').to_owned(),
            None => said,
        },
    };
    match (parent, own) {
        (parent, "") => parent.to_owned(),
        ("", own) => own.to_owned(),
        (parent, own) => format!("{parent}.{own}"),
    }
}
