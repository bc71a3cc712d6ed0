//! The modules of `docs/architecture.md` and the direction of the imports between them. The test
//! reads every file of `src` that is not compiled for tests only, follows re-exports to the file that
//! defines an item, and fails when an import breaks the table or closes a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;

/// A module, and the modules it may import besides itself. `recipe::…` are the layers inside `recipe`;
/// for the other modules they are `recipe`.
const TABLE: &[(&str, &[&str])] = &[
    ("util", &[]),
    ("objective", &[]),
    ("recipe::syntax", &[]),
    ("recipe::schema", &["objective", "recipe::syntax", "util"]),
    (
        "recipe::dialects",
        &["recipe::schema", "recipe::syntax", "util"],
    ),
    (
        "recipe",
        &["recipe::dialects", "recipe::schema", "recipe::syntax"],
    ),
    ("hub", &["util"]),
    ("plan", &["hub", "objective", "recipe", "util"]),
    ("export", &["recipe"]),
    ("samples", &["util"]),
    ("bucket", &["util"]),
    ("inventory", &[]),
    ("comm", &["util"]),
    ("telemetry", &["util"]),
    ("engine", &["comm", "util"]),
    ("norm", &["recipe", "util"]),
    ("lifecycle", &["plan", "telemetry", "util"]),
    ("api", &["bucket", "lifecycle", "plan", "recipe", "util"]),
    (
        "data",
        &[
            "bucket", "engine", "hub", "plan", "recipe", "samples", "util",
        ],
    ),
    (
        "checkpoint",
        &["bucket", "comm", "engine", "lifecycle", "util"],
    ),
    (
        "train",
        &[
            "bucket",
            "checkpoint",
            "comm",
            "data",
            "engine",
            "lifecycle",
            "norm",
            "objective",
            "plan",
            "recipe",
            "samples",
            "telemetry",
            "util",
        ],
    ),
    (
        "external_trainer",
        &["export", "lifecycle", "plan", "recipe", "telemetry", "util"],
    ),
    (
        "host",
        &[
            "bucket",
            "checkpoint",
            "external_trainer",
            "inventory",
            "lifecycle",
            "recipe",
            "telemetry",
            "train",
            "util",
        ],
    ),
    (
        "agent",
        &[
            "api",
            "bucket",
            "checkpoint",
            "external_trainer",
            "host",
            "inventory",
            "lifecycle",
            "plan",
            "recipe",
            "telemetry",
            "train",
            "util",
        ],
    ),
    (
        "launch",
        &[
            "bucket",
            "checkpoint",
            "data",
            "engine",
            "external_trainer",
            "host",
            "hub",
            "inventory",
            "lifecycle",
            "plan",
            "recipe",
            "samples",
            "telemetry",
            "train",
            "util",
        ],
    ),
    (
        "operator",
        &[
            "api",
            "external_trainer",
            "inventory",
            "launch",
            "lifecycle",
            "plan",
            "recipe",
            "telemetry",
            "util",
        ],
    ),
    (
        "client",
        &["api", "inventory", "lifecycle", "telemetry", "util"],
    ),
    (
        "cli",
        &[
            "agent",
            "api",
            "bucket",
            "client",
            "data",
            "engine",
            "export",
            "external_trainer",
            "host",
            "hub",
            "inventory",
            "launch",
            "lifecycle",
            "operator",
            "plan",
            "recipe",
            "telemetry",
            "train",
            "util",
        ],
    ),
];

/// The path of a module or an item, from the root of the crate.
type ItemPath = Vec<String>;

/// One file of `src`.
struct Source {
    /// Its module: `["plan", "rules"]`.
    module: ItemPath,
    /// What it imports or names by a path, from the root of the crate.
    imports: BTreeSet<ItemPath>,
    /// The items that it re-exports, by name.
    reexports: BTreeMap<String, ItemPath>,
}

/// Collects the imports of a file.
struct Imports<'m> {
    source: Source,
    modules: &'m BTreeSet<ItemPath>,
    /// How many inline modules surround the visited item.
    depth: usize,
}

impl<'ast> Visit<'ast> for Imports<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !source_tests::for_tests(&item.attrs) && item.content.is_some() {
            self.depth += 1;
            syn::visit::visit_item_mod(self, item);
            self.depth -= 1;
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let public = !matches!(item.vis, syn::Visibility::Inherited);
        self.note(&item.tree, &mut Vec::new(), public);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = source_tests::names(path);
        if segments.len() > 1
            && let Some(path) = self.absolute(&segments)
        {
            self.source.imports.insert(path);
        }
        syn::visit::visit_path(self, path);
    }
}

impl Imports<'_> {
    /// Notes every leaf of a `use` tree.
    fn note(&mut self, tree: &syn::UseTree, prefix: &mut Vec<String>, public: bool) {
        let (name, shown_as) = match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.note(&path.tree, prefix, public);
                prefix.pop();
                return;
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.note(tree, prefix, public);
                }
                return;
            }
            syn::UseTree::Name(name) => (Some(name.ident.to_string()), name.ident.to_string()),
            syn::UseTree::Rename(name) => (Some(name.ident.to_string()), name.rename.to_string()),
            syn::UseTree::Glob(_) => (None, String::new()),
        };
        let mut leaf = prefix.clone();
        leaf.extend(name.filter(|name| name != "self"));
        let Some(path) = self.absolute(&leaf) else {
            return;
        };
        if public {
            self.source.reexports.insert(shown_as, path);
        } else {
            self.source.imports.insert(path);
        }
    }

    /// A path from the root of the crate; `None` where it leads out of the crate.
    fn absolute(&self, segments: &[String]) -> Option<ItemPath> {
        let own = &self.source.module;
        let mut base: ItemPath = own.clone();
        base.extend(vec![String::new(); self.depth]);
        let mut rest = segments;
        match rest.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &rest[1..]),
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            // A child module of this file.
            child => {
                base.push(child.to_owned());
                let known = self.modules.contains(&base);
                base.pop();
                if !known {
                    return None;
                }
            }
        }
        base.extend(rest.iter().cloned());
        Some(base)
    }
}

/// The module of a file below `src`; the two roots of the crate are the empty path.
fn module_of(relative: &Path) -> ItemPath {
    let mut module: ItemPath = relative
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    let last = module.last().map(String::as_str);
    if last == Some("mod") || matches!(module.as_slice(), [root] if root == "main" || root == "lib")
    {
        module.pop();
    }
    module
}

/// Every file of `src` by its module.
fn sources() -> BTreeMap<ItemPath, Source> {
    let src = source_tests::root().join("src");
    let paths = source_tests::below(&src);
    let modules: BTreeSet<ItemPath> = paths
        .iter()
        .map(|path| module_of(path.strip_prefix(&src).unwrap()))
        .collect();
    let read = |path: &PathBuf| {
        let module = module_of(path.strip_prefix(&src).unwrap());
        let mut imports = Imports {
            source: Source {
                module: module.clone(),
                imports: BTreeSet::new(),
                reexports: BTreeMap::new(),
            },
            modules: &modules,
            depth: 0,
        };
        imports.visit_file(&syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap());
        (module, imports.source)
    };
    paths
        .iter()
        .map(read)
        .filter(|(module, _)| !module.is_empty())
        .collect()
}

/// The module of the file that defines what a path names.
fn defined_in(path: &[String], sources: &BTreeMap<ItemPath, Source>) -> Option<ItemPath> {
    let module = (1..=path.len())
        .rev()
        .map(|length| &path[..length])
        .find(|prefix| sources.contains_key(*prefix))?;
    let Some(item) = path.get(module.len()) else {
        return Some(module.to_vec());
    };
    let source = &sources[module];
    match source.reexports.get(item) {
        Some(target) if target != path => {
            let mut target = target.clone();
            target.extend(path[module.len() + 1..].iter().cloned());
            defined_in(&target, sources)
        }
        _ => Some(module.to_vec()),
    }
}

/// Imports between files: module to modules. A file may import the modules that contain it, as
/// `use super::…` does: these imports are left out.
fn imports() -> BTreeMap<ItemPath, BTreeSet<ItemPath>> {
    let sources = sources();
    let targets = |source: &Source| {
        let targets = source.imports.iter();
        let targets = targets.filter_map(|path| defined_in(path, &sources));
        targets
            .filter(|target| !source.module.starts_with(target))
            .collect()
    };
    sources
        .iter()
        .map(|(module, source)| (module.clone(), targets(source)))
        .collect()
}

/// The row of the table that a module belongs to, as the module `from` sees it.
fn row(module: &[String], from: &[String]) -> String {
    let inside = module[0] == from[0];
    let layer = module[..module.len().min(2)].join("::");
    let layered = TABLE.iter().any(|(row, _)| *row == layer);
    if inside && layered {
        layer
    } else {
        module[0].clone()
    }
}

/// The table in `docs/architecture.md`: module, and what it may import.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let path = source_tests::root().join("docs/architecture.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| *line != "| module | holds | may import |")
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [module, _, imports] = cells.as_slice() else {
            panic!("a row of three cells: {row}");
        };
        let imports = imports.split(", ").filter(|module| *module != "nothing");
        let imports = imports.map(|module| module.trim_matches('`').to_owned());
        (module.trim_matches('`').to_owned(), imports.collect())
    })
    .collect()
}

/// What is left when every key that imports none of the others, or that none of the others imports, is
/// removed again and again: the keys on circles and between them.
fn circles<K: Ord + Clone>(mut graph: BTreeMap<K, BTreeSet<K>>) -> BTreeMap<K, BTreeSet<K>> {
    loop {
        let before = graph.len();
        let keys: BTreeSet<K> = graph.keys().cloned().collect();
        for targets in graph.values_mut() {
            targets.retain(|target| keys.contains(target));
        }
        let imported: BTreeSet<K> = graph.values().flatten().cloned().collect();
        graph.retain(|key, targets| !targets.is_empty() && imported.contains(key));
        if graph.len() == before {
            return graph;
        }
    }
}

#[test]
fn the_table_is_documented() {
    let table = TABLE.iter().map(|(module, imports)| {
        let imports = imports.iter().map(|import| (*import).to_owned()).collect();
        ((*module).to_owned(), imports)
    });
    assert_eq!(documented(), table.collect());
}

#[test]
fn imports_follow_the_table() {
    let table: BTreeMap<_, _> = TABLE.iter().copied().collect();
    let mut wrong = BTreeSet::new();
    for (module, targets) in imports() {
        let from = row(&module, &module);
        let Some(allowed) = table.get(from.as_str()) else {
            wrong.insert(format!("`{from}` is not in the table"));
            continue;
        };
        for target in targets {
            let to = row(&target, &module);
            if to != from && !allowed.contains(&to.as_str()) {
                let (module, target) = (module.join("::"), target.join("::"));
                wrong.insert(format!(
                    "`{from}` must not import `{to}`: {module} imports {target}"
                ));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{}",
        wrong.into_iter().collect::<Vec<_>>().join("\n")
    );
}

#[test]
fn every_row_of_the_table_is_used() {
    let mut unused: BTreeSet<(String, String)> = TABLE
        .iter()
        .flat_map(|(from, to)| to.iter().map(|to| (from.to_string(), to.to_string())))
        .collect();
    for (module, targets) in imports() {
        for target in targets {
            unused.remove(&(row(&module, &module), row(&target, &module)));
        }
    }
    assert_eq!(unused, BTreeSet::new());
}

#[test]
fn modules_import_each_other_in_one_direction() {
    let owned = |rows: &[&str]| rows.iter().map(|row| row.to_string()).collect();
    let table = TABLE
        .iter()
        .map(|(row, rows)| (row.to_string(), owned(rows)));
    assert_eq!(circles(table.collect()), BTreeMap::new());
}

#[test]
fn files_import_each_other_in_one_direction() {
    let circles = circles(imports());
    let shown = circles.iter().map(|(from, to)| {
        let to: Vec<String> = to.iter().map(|path| path.join("::")).collect();
        format!("{} imports {}", from.join("::"), to.join(", "))
    });
    assert!(
        circles.is_empty(),
        "{}",
        shown.collect::<Vec<_>>().join("\n")
    );
}

#[test]
fn a_directory_holds_at_least_three_files() {
    fn small(directory: &Path, found: &mut Vec<String>) {
        let entries: Vec<PathBuf> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        // `foo/` and `foo.rs` beside it are one module.
        let own = usize::from(directory.with_extension("rs").exists());
        // Insta puts the expected texts of tests beside them.
        let snapshots = directory.ends_with("snapshots");
        let tests = entries.iter().any(|path| path.ends_with("tests"));
        if !snapshots && !tests && entries.len() + own < 3 {
            found.push(directory.display().to_string());
        }
        for path in entries.iter().filter(|path| path.is_dir()) {
            small(path, found);
        }
    }
    let mut found = Vec::new();
    small(&source_tests::root().join("src"), &mut found);
    assert!(found.is_empty(), "{}", found.join("\n"));
}
