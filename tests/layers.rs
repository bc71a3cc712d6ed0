//! The rooms of `docs/architecture.md` and which way imports may go between them. A room that
//! imports one it must not know fails this test; so does a room that the table does not list.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;

/// Room, and the rooms it may import (besides itself).
const TABLE: &[(&str, &[&str])] = &[
    ("words", &[]),
    ("durable", &[]),
    ("recipe", &[]),
    ("samples", &[]),
    ("inventory", &[]),
    ("telemetry", &["words"]),
    ("comm", &[]),
    ("batch", &["recipe", "words"]),
    ("norm", &["recipe"]),
    ("engine", &["comm"]),
    ("job", &["batch", "durable", "recipe", "telemetry", "words"]),
    (
        "agent",
        &[
            "batch",
            "durable",
            "inventory",
            "job",
            "recipe",
            "telemetry",
            "train",
        ],
    ),
    (
        "operator",
        &["batch", "inventory", "job", "recipe", "telemetry", "words"],
    ),
    ("client", &["inventory", "job", "telemetry", "words"]),
    (
        "train",
        &[
            "batch",
            "comm",
            "durable",
            "engine",
            "job",
            "norm",
            "recipe",
            "samples",
            "telemetry",
            "words",
        ],
    ),
    (
        "launch",
        &[
            "agent",
            "batch",
            "durable",
            "engine",
            "job",
            "recipe",
            "samples",
            "telemetry",
            "train",
            "words",
        ],
    ),
    (
        "cli",
        &[
            "agent",
            "batch",
            "client",
            "durable",
            "engine",
            "inventory",
            "job",
            "launch",
            "operator",
            "recipe",
            "telemetry",
            "train",
            "words",
        ],
    ),
];

/// Collects the rooms named by `crate::room` in code that is not compiled for tests only.
#[derive(Default)]
struct Rooms(BTreeSet<String>);

impl<'ast> Visit<'ast> for Rooms {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let for_tests = item.attrs.iter().any(|attribute| {
            attribute.path().is_ident("cfg")
                && attribute
                    .parse_args::<syn::Ident>()
                    .is_ok_and(|condition| condition == "test")
        });
        if !for_tests {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_use_path(&mut self, path: &'ast syn::UsePath) {
        if path.ident == "crate" {
            self.note_tree(&path.tree);
        }
        syn::visit::visit_use_path(self, path);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut segments = path.segments.iter().map(|segment| &segment.ident);
        if segments.next().is_some_and(|first| first == "crate")
            && let Some(room) = segments.next()
        {
            self.0.insert(room.to_string());
        }
        syn::visit::visit_path(self, path);
    }
}

impl Rooms {
    fn note_tree(&mut self, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => drop(self.0.insert(path.ident.to_string())),
            syn::UseTree::Name(name) => drop(self.0.insert(name.ident.to_string())),
            syn::UseTree::Rename(name) => drop(self.0.insert(name.ident.to_string())),
            syn::UseTree::Group(group) => group.items.iter().for_each(|t| self.note_tree(t)),
            syn::UseTree::Glob(_) => {}
        }
    }
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            // Tests beside the code: `foo/tests/`.
            if path.file_name().is_some_and(|name| name != "tests") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|e| e == "rs")
            // Files of tests beside the code: `foo/tests.rs`, `foo_tests.rs`.
            && !path.file_stem().is_some_and(|s| s.to_string_lossy().ends_with("tests"))
        {
            found.push(path);
        }
    }
}

/// The room of a file below `src`: its folder, or the file itself where it is a room of its own.
/// The two roots of the crate are in none.
fn room_of(relative: &Path) -> Option<String> {
    let first = Path::new(relative.components().next()?.as_os_str());
    let room = first.file_stem()?.to_string_lossy().into_owned();
    let root = first == relative && ["main", "lib"].contains(&room.as_str());
    (!root).then_some(room)
}

/// The table of rooms in `docs/architecture.md`: room, and what it may import.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| *line != "| room | holds | may import |")
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [room, _, imports] = cells.as_slice() else {
            panic!("a row of three cells: {row}");
        };
        let imports = imports.split(", ").filter(|room| *room != "nothing");
        let imports = imports.map(str::to_owned).collect();
        (room.trim_matches('`').to_owned(), imports)
    })
    .collect()
}

#[test]
fn the_table_is_the_one_that_is_documented() {
    let owned = |rooms: &[&str]| rooms.iter().map(|room| room.to_string()).collect();
    let table = TABLE
        .iter()
        .map(|(room, uses)| (room.to_string(), owned(uses)));
    assert_eq!(documented(), table.collect());
}

#[test]
fn a_file_of_its_own_is_a_room_too() {
    let room = |path: &str| room_of(Path::new(path));
    assert_eq!(room("durable.rs").as_deref(), Some("durable"));
    assert_eq!(room("cli/main.rs").as_deref(), Some("cli"));
    assert_eq!(room("main.rs"), None);
    assert_eq!(room("lib.rs"), None);
}

#[test]
fn imports_go_one_way() {
    let table: BTreeMap<_, _> = TABLE.iter().copied().collect();
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut wrong = Vec::new();
    for file in files {
        let relative = file.strip_prefix(&src).unwrap();
        let Some(room) = room_of(relative) else {
            continue;
        };
        let Some(allowed) = table.get(room.as_str()) else {
            wrong.push(format!("the room `{room}` is not in the table"));
            continue;
        };
        let mut rooms = Rooms::default();
        rooms.visit_file(&syn::parse_file(&fs::read_to_string(&file).unwrap()).unwrap());
        for used in rooms.0 {
            if used != room
                && table.contains_key(used.as_str())
                && !allowed.contains(&used.as_str())
            {
                wrong.push(format!(
                    "{}: `{room}` must not know `{used}`",
                    relative.display()
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_has_no_cycle() {
    let table: BTreeMap<_, _> = TABLE.iter().copied().collect();
    let mut settled: BTreeSet<&str> = BTreeSet::new();
    while settled.len() < table.len() {
        let ready: Vec<&str> = table
            .iter()
            .filter(|(room, uses)| {
                !settled.contains(*room) && uses.iter().all(|used| settled.contains(used))
            })
            .map(|(room, _)| *room)
            .collect();
        assert!(
            !ready.is_empty(),
            "a cycle among the rooms not in {settled:?}"
        );
        settled.extend(ready);
    }
}
